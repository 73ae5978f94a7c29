"""Masks and blocks against their definition, written out pair by pair."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_common.masks import BlockMask, Mask

BOUNDS = st.one_of(st.none(), st.integers(0, 12), st.just(2**62))
MASKS = st.builds(
    Mask,
    seqlen_q=st.integers(0, 10),
    seqlen_k=st.integers(0, 10),
    causal=st.booleans(),
    window=st.tuples(BOUNDS, BOUNDS),
)


def by_definition(mask: Mask) -> torch.Tensor:
    """What each query sees of each key, (seqlen_q, seqlen_k), straight from the contract's words."""
    left, right = mask.window
    visible = torch.ones(mask.seqlen_q, mask.seqlen_k, dtype=torch.bool)
    for query in range(mask.seqlen_q):
        position = query + mask.seqlen_k - mask.seqlen_q  # bottom-right
        for key in range(mask.seqlen_k):
            too_early = left is not None and key < position - left
            too_late = (right is not None and key > position + right) or (mask.causal and key > position)
            visible[query, key] = not (too_early or too_late)
    return visible


@given(MASKS)
def test_visible_pairs(mask):
    expected = by_definition(mask)
    assert torch.equal(mask.visible(slice(0, mask.seqlen_q), slice(0, mask.seqlen_k)), expected)
    assert mask.num_pairs == expected.sum()


@given(MASKS, st.data())
def test_runs_of_queries_and_keys(mask, data):
    expected = by_definition(mask)
    start = data.draw(st.integers(0, mask.seqlen_q))
    queries = slice(start, data.draw(st.integers(start, mask.seqlen_q)))
    start = data.draw(st.integers(0, mask.seqlen_k))
    keys = slice(start, data.draw(st.integers(start, mask.seqlen_k)))
    assert torch.equal(mask.visible(queries, keys), expected[queries, keys])
    if queries.start < queries.stop:
        assert positions(mask.keys_seen_by(queries)) == expected[queries].any(0).nonzero().flatten().tolist()
    if keys.start < keys.stop:
        assert positions(mask.queries_seeing(keys)) == expected[:, keys].any(1).nonzero().flatten().tolist()
    if queries.start < queries.stop and keys.start < keys.stop:
        assert mask.sees_all(queries, keys) == expected[queries, keys].all()


@given(MASKS, st.integers(1, 5), st.integers(1, 5))
def test_blocks(mask, tile_m, tile_n):
    blocks, expected = BlockMask(mask, tile_m, tile_n), by_definition(mask)
    seen_from = {m_block: set(blocks.n_blocks(m_block)) for m_block in range(blocks.num_m_blocks)}
    seen_by = {n_block: set(blocks.m_blocks(n_block)) for n_block in range(blocks.num_n_blocks)}
    for m_block in seen_from:
        for n_block in seen_by:
            block = expected[m_block * tile_m : (m_block + 1) * tile_m, n_block * tile_n : (n_block + 1) * tile_n]
            assert torch.equal(blocks.visible(m_block, n_block), block)
            assert (n_block in seen_from[m_block]) == (m_block in seen_by[n_block]) == bool(block.any())
            assert blocks.is_full(m_block, n_block) == (block.shape[1] == tile_n and bool(block.all()))


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ((2, 5), ["####.", "#####"]),
        ((5, 2), ["..", "..", "..", "#.", "##"]),
        ((5, 6), ["##....", "###...", "####..", "#####.", "######"]),
    ],
)
def test_causal_is_aligned_bottom_right(lengths, rows):
    visible = Mask(*lengths, causal=True).visible(slice(0, lengths[0]), slice(0, lengths[1]))
    assert ["".join(".#"[seen] for seen in row) for row in visible.int().tolist()] == rows


def test_pairs_of_a_long_sequence_are_not_visited():
    assert Mask(10**9, 10**9, causal=True).num_pairs == 10**9 * (10**9 + 1) // 2
    assert Mask(10**9, 10**9, window=(3, 0)).num_pairs == 4 * 10**9 - 6


def test_a_negative_bound_is_refused():
    with pytest.raises(ValueError, match=r"at least 0, got \(-1, 0\); give None"):
        Mask(4, 4, window=(-1, 0))


def positions(run: slice) -> list[int]:
    return list(range(run.start, run.stop))
