"""Which tile a number is and which key blocks a warpgroup takes, by the kernel's own lines on Python's numbers."""

import heapq
import types
from collections.abc import Iterable
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.problems import grid
from fa3 import scheduler
from fa3.config import Config, default_config
from fa3.scheduler import Scheduler, Sizes, Tile, Work
from fa_common import tiles

ROWS = 64  # of a warpgroup


@pytest.fixture(scope="module", autouse=True)
def plain_numbers():
    """In place of what the DSL makes of minima, selections and divisions."""
    cutlass = types.SimpleNamespace(min=min, max=max, select_=lambda condition, x, y: x if condition else y)
    cute = types.SimpleNamespace(ceil_div=lambda x, y: -(-x // y))
    with pytest.MonkeyPatch.context() as patch:
        for module in (scheduler, tiles):
            patch.setattr(module, "cutlass", cutlass)
            patch.setattr(module, "cute", cute)
        patch.setattr(scheduler, "Int32", int)
        patch.setattr(tiles, "const_expr", bool)
        patch.setattr(tiles, "Int32", int)
        yield


def work_of(tile_m: int, tile_n: int, seqlen_q: int, group: int, bounds: tuple, num_splits: int) -> Work:
    """What `key_blocks` looks at; the rest is None."""
    config = Config(tile_m=tile_m, tile_n=tile_n, pingpong=tile_m > 64, pack_gqa=group > 1)
    facts = types.SimpleNamespace(config=config, cluster_size=1, splits=num_splits > 1)
    sizes = Sizes(None, None, seqlen_q, None, None, None, num_splits, None, None, group)
    schedule = Scheduler(facts, sizes, None, None, None, None)
    return Work(facts, schedule, None, bounds, group, scale_tanh=None, scale_log2=None)


@settings(max_examples=300, deadline=None)
@given(
    tile_m=st.sampled_from((64, 128, 192)),
    tile_n=st.sampled_from((64, 80, 128)),
    seqlens=st.tuples(st.integers(1, 320), st.integers(0, 1200)),
    group=st.sampled_from((1, 2, 6)),
    bounds=st.sampled_from(((None, None), (None, 0), (None, 3), (130, 0), (5, 2), (0, 0), (300, 40))),
    num_splits=st.sampled_from((1, 2, 3, 7, 16)),
)
def test_splits_share_out_every_block_that_a_warpgroup_sees(tile_m, tile_n, seqlens, group, bounds, num_splits):
    seqlen_q, seqlen_k = seqlens
    work = work_of(tile_m, tile_n, seqlen_q, group, bounds, num_splits)
    for first_row in range(0, seqlen_q * group, ROWS):
        m_block, taken, whole = first_row // tile_m, [], []
        for split in range(num_splits):
            tile = Tile(m_block, 0, 0, split, 0, 0, seqlen_q, seqlen_k)
            blocks, loaded = work.key_blocks(tile, first_row, ROWS), work.all_key_blocks(tile)
            # The producer loads these for all warpgroups: nobody may take another, or none.
            assert loaded.begin <= blocks.begin < blocks.end <= loaded.end
            assert bounds[0] is not None or blocks.begin == loaded.begin
            taken += range(blocks.begin, blocks.end)
            whole += [n for n in range(blocks.begin, blocks.end) if not blocks.is_masked(n)]
        seen = work.seen_blocks(tile, first_row, ROWS)
        if seqlen_k:
            assert all(taken.count(n) == 1 for n in range(seen.begin, seen.end))
        # Whatever it takes besides, it masks.
        assert whole == [n for n in range(seen.begin, seen.end) if not seen.is_masked(n)]


# ---- Longest tiles first


def places(num_m_blocks: int, num_heads: int, section: int) -> list[tuple[int, int]]:
    """(m_block, head) of every tile, in the order of their numbers."""
    facts = types.SimpleNamespace(lpt_order=True)
    schedule = Scheduler(facts, None, None, None, num_m_blocks, None)
    return [schedule.place(i, num_m_blocks, section, -num_heads % section) for i in range(num_m_blocks * num_heads)]


@settings(max_examples=200, deadline=None)
@given(num_m_blocks=st.integers(1, 9), num_heads=st.integers(1, 40), section=st.integers(1, 40))
def test_sections_of_heads_one_after_the_other_each_from_the_longest_tiles_on(num_m_blocks, num_heads, section):
    section = min(section, num_heads)
    order = places(num_m_blocks, num_heads, section)
    assert len(set(order)) == num_m_blocks * num_heads
    # The first section has what the others leave, which are whole.
    first_heads = num_heads % section
    of_sections = [list(group) for _, group in groupby(order, lambda tile: (tile[1] - first_heads) // section)]
    assert len(of_sections) == -(-num_heads // section)
    for one in of_sections:
        lengths = [m_block for m_block, _ in one]
        assert lengths == sorted(lengths, reverse=True)


def time_of_the_slowest(lengths: Iterable[int], num_ctas: int = 132) -> float:
    """Of CTAs that draw tiles of these lengths in this order, over what it would be if all were equally busy."""
    lengths = list(lengths)
    busy_until = [0] * num_ctas
    for length in lengths:
        heapq.heapreplace(busy_until, busy_until[0] + length)
    return max(busy_until) * num_ctas / sum(lengths)


@pytest.mark.parametrize("problem", grid(masks=["causal"], seqlens=[1024, 2048, 4096, 8192, 16384]), ids=str)
def test_no_cta_is_late(problem):
    """Sections of 7, 7, 7, 7 and 4 of 32 heads, at head_dim 256 and 4096 keys, once cost a tenth of the time."""
    config = default_config(problem)
    num_m_blocks, num_heads = -(-problem.seqlen_q // config.tile_m), problem.batch * problem.heads_q
    section = scheduler.heads_of_section(4 * problem.head_dim * problem.seqlen_k, 1, num_heads)
    blocks = [
        -(-(m_block + 1) * config.tile_m // config.tile_n) for m_block, _ in places(num_m_blocks, num_heads, section)
    ]
    assert time_of_the_slowest(blocks) < 1.05
