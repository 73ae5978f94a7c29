"""Which key blocks a warpgroup takes, computed by the kernel's own lines on Python's numbers."""

import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3 import scheduler
from fa3.config import Config
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
        patch.setattr(tiles, "const_expr", bool)
        patch.setattr(tiles, "Int32", int)
        yield


def work_of(tile_m: int, tile_n: int, seqlen_q: int, group: int, bounds: tuple, num_splits: int) -> Work:
    """What `key_blocks` looks at; the rest is None."""
    config = Config(tile_m=tile_m, tile_n=tile_n, pingpong=tile_m > 64, pack_gqa=group > 1)
    facts = types.SimpleNamespace(config=config, cluster_size=1, splits=num_splits > 1)
    sizes = Sizes(None, None, seqlen_q, None, None, None, num_splits, None, group)
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
