"""What FA1's Configs may be, what every problem gets by default, and which blocks meet. Needs no GPU."""

from itertools import product
from types import SimpleNamespace

import pytest

from fa1.config import (
    BackwardConfig,
    Config,
    default_backward_config,
    default_config,
    whole_pieces,
)
from fa1.forward import Forward
from fa1.interface import bind_backward, shape_forward
from fa_common.compile import KernelKey
from fa_common.masks import BlockMask, Mask
from fa_common.problem import UNBOUNDED, Problem

MASKS = ({}, {"causal": True}, {"window": (100, 30)}, {"softcap": 30.0}, {"varlen": True, "causal": True})
LENGTHS = (1, 512, 1024, 4096, 16384)


def problems_of(head_dim: int) -> list[Problem]:
    return [Problem(4, seqlen, seqlen, 8, 2, head_dim, **mask) for seqlen, mask in product(LENGTHS, MASKS)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_warps": 3}, r"num_warps must be 2, 4 or 8 .* got 3$"),
        ({"tile_m": 24}, r"tile_m must be a multiple of 16 .* got 24$"),
        ({"tile_m": 16, "num_warps": 8}, r"tile_m must be .* of 32; got 16$"),
        ({"tile_n": 96}, r"tile_n must be a multiple of 16 \* num_warps = 64 .* got 96$"),
        ({"share_stages": 3}, r"share_stages must be 1 or 2 .* got 3$"),
        ({"q_splits": 0}, r"q_splits must be at least 1 .* got 0$"),
    ],
    ids=str,
)
def test_what_a_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        Config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_warps": 2}, r"num_warps must be 4 or 8 .* got 2$"),
        ({"key_warps": 1}, r"key_warps must be num_warps or half of it .* got 1 of 4$"),
        ({"tile_m": 16}, r"tile_m must be a multiple of 32 .* got 16$"),
        ({"tile_n": 96}, r"tile_n must be 16, 32 or 64 times key_warps = 4; got 96$"),
        ({"kv_splits": 0}, r"kv_splits must be at least 1 .* got 0$"),
    ],
    ids=str,
)
def test_what_a_backward_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        BackwardConfig(**change)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 192, 256])
def test_default_splits_fill_a_gpu_but_none_is_idle(head_dim):
    for problem in problems_of(head_dim):
        config = default_config(problem)
        assert config.q_splits == 1 or (config.q_splits // 2) * 128 < problem.seqlen_q
        backward = default_backward_config(problem)
        assert backward.kv_splits == 1 or (backward.kv_splits // 2) * backward.tile_n < problem.seqlen_k
    problem = Problem(1, 16384, 16384, 2048 // head_dim, 2048 // head_dim, head_dim)
    assert shape_forward(problem, default_config(problem), 132).num_ctas >= 132
    assert default_backward_config(problem).kv_splits * problem.heads_kv >= 128


def test_a_deterministic_backward_is_the_papers_grid():
    problem = Problem(1, 16384, 16384, 4, 4, 64, deterministic=True)
    assert default_backward_config(problem).kv_splits == 1
    from fa1.backward import Backward

    key = KernelKey("fa1", "backward", "bfloat16", 64, False, BackwardConfig(kv_splits=2), deterministic=True)
    with pytest.raises(ValueError, match=r"deterministic=True needs kv_splits=1 .* got kv_splits=2"):
        Backward(key)


@pytest.mark.parametrize(("head_dim", "num_warps", "pieces"), [(40, 4, 8), (64, 4, 8), (96, 4, 12), (72, 8, 16)])
def test_warps_share_the_columns_of_o_evenly(head_dim, num_warps, pieces):
    assert whole_pieces(head_dim, num_warps) == pieces


def test_scratch_of_the_backward():
    import torch

    from fa_common.generation import Saved

    problem = Problem(2, 70, 33, 4, 2, 40, softmax_scale=0.5, causal=True, softcap=3.0)
    given = []
    launch = bind_backward(lambda *arguments: given.extend(arguments), problem, BackwardConfig(), 132)
    tensors = Saved(*(torch.empty(0) for _ in range(6)), None)
    launch(tensors, (tensors.q, tensors.k, tensors.v), None, None)
    assert [tuple(x.shape) for x in given[10:12]] == [(4, 6, 64), (4, 6, 32 * 64)]
    assert given[6] is tensors.lse  # read by nobody
    assert given[12:] == [None, None, 0.5, 3.0, UNBOUNDED, 0, 70, 0]


# ---- Which query blocks a key block is visited by


def visits_of(lengths: tuple, tile: tuple, mask: dict, q_splits: int) -> dict[int, list[int]]:
    """The key blocks that visit each query block, in order, by the kernel's own arithmetic."""
    (seqlen_q, seqlen_k), (tile_m, tile_n), window = lengths, tile, mask.get("window")
    kernel = object.__new__(Forward)
    kernel.config = SimpleNamespace(tile_m=tile_m, tile_n=tile_n, q_splits=q_splits)
    bounds = (None, 0 if mask.get("causal") else None)
    if window:
        left, right = (UNBOUNDED if bound is None else bound for bound in window)
        bounds = (left, 0 if mask.get("causal") else right)
    num_m_blocks = -(-seqlen_q // tile_m)
    visits = {m_block: [] for m_block in range(num_m_blocks)}
    for split in range(q_splits):
        sequence = SimpleNamespace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        one = SimpleNamespace(bounds=bounds, sequence=sequence, num_m_blocks=num_m_blocks, split=split)
        for n_block in range(max(-(-seqlen_k // tile_n), 1)):
            for m_block in range(*map(int, kernel.visits(n_block, one)), q_splits):
                visits[m_block].append(n_block)
    for m_block, n_blocks in visits.items():
        first, last = kernel.first_and_last_visit(m_block, one)
        assert n_blocks == list(range(first, last + 1)), (lengths, tile, mask, m_block)
    return visits


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        *({"window": window} for window in [(0, 0), (3, 0), (32, 64), (0, None), (None, 5), (40, 1), (500, 500)]),
        {"causal": True, "window": (20, None)},
    ],
    ids=str,
)
def test_each_query_block_is_visited_by_the_keys_it_sees_and_at_least_once(mask):
    """A row's O begins at its first visit and is complete at its last; none may be missed, and none come twice."""
    for lengths in product((1, 2, 5, 17, 63, 65, 129, 193), (0, 1, 2, 16, 31, 64, 100, 129, 250)):
        for tile, q_splits in (((16, 64), 1), ((16, 32), 3), ((32, 16), 2)):
            visits = visits_of(lengths, tile, mask, q_splits)
            blocks = BlockMask(Mask(*lengths, **mask), *tile)
            for m_block, n_blocks in visits.items():
                assert n_blocks, "a row would stay unwritten"
                assert set(blocks.n_blocks(m_block)) <= set(n_blocks)
