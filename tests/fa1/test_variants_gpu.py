"""FA1's kernels on a Hopper GPU: tiles, splits, where K and V stay, windows, softcap and packed sequences. Values
against float64 and the names of public reports are as in tests/test_forward_gpu.py; gradients as in
tests/test_backward_gpu.py, which holds the default backward against all shapes.
"""

from dataclasses import replace

import pytest
import torch

import fa1
from fa1.config import BackwardConfig, Config, default_backward_config, default_config
from fa_common.problem import Problem
from tests import test_backward_gpu as backward
from tests.fa3.test_variants_gpu import (
    BESIDE_NAN,
    LONG_AMONG_TINY,
    MIXED,
    PUBLIC,
    WINDOW_SHAPES,
    WINDOWS,
    Packed,
    arguments_of,
    check_packed,
    configs,
    pack,
    rows_of,
)
from tests.test_forward_gpu import Shape, assert_same_bits, check, make, shapes_of_few_iterations

pytestmark = pytest.mark.gpu

BASES = {head_dim: default_config(Problem(1, 512, 512, 1, 1, head_dim)) for head_dim in (64, 128, 256)}
SHAPES = [Shape(1, 257, 385), Shape(2, 129, 64, 4, 2), Shape(1, 1, 1), Shape(1, 5, 2), Shape(2, 65, 193, 3, 1)]


def attend(q, k, v, **options):
    return fa1.flash_attn_func(q, k, v, return_lse=True, **options)


def attend_packed(sequences: Packed, **options):
    return fa1.flash_attn_varlen_func(*sequences, return_lse=True, **options)


def hold(shapes: list[Shape], head_dim: int, config: Config | None = None, factor: float = 1.0, **mask) -> None:
    """Every shape against float64; `mask` is causal, window, softcap, and `factor` what q and k are multiplied by."""
    for shape in shapes:
        q, k, v = make(shape, head_dim)
        q, k = factor * q, factor * k
        check((shape, mask, config), *attend(q, k, v, config=config, **arguments_of(mask)), q, k, v, **mask)


def hold_packed(lengths, config: Config | None = None, mask: dict | None = None, **sizes) -> None:
    mask = mask or {}
    sequences = pack(lengths, **sizes)
    results = attend_packed(sequences, config=config, **arguments_of(mask))
    check_packed((sizes, mask, config), results, sequences, lengths, **mask)


# ---- Tiles, splits, places

TILES = {
    "16 x 256": Config(),
    "16 x 64": Config(tile_n=64),
    "32 x 256": Config(tile_m=32),
    "32 x 512, 8 warps": Config(tile_m=32, tile_n=512, num_warps=8),
    "1 stage of shares": Config(share_stages=1),
    "K and V in shared memory": Config(tile_n=128, kv_in_registers=False),
    "3 splits": Config(q_splits=3),
    "8 splits": Config(q_splits=8),
}


@configs(TILES)
def test_tiles(config):
    hold([*SHAPES, *shapes_of_few_iterations(config.tile_n)], 64, config, causal=True)


@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_wide_heads(head_dim):
    hold([*SHAPES, Shape(1, 130, 400)], head_dim, causal=True)


# ---- Windows, softcap


@pytest.mark.parametrize("head_dim", [64, 256])
def test_windows(head_dim):
    for window in WINDOWS:
        hold(WINDOW_SHAPES, head_dim, window=window)
    hold([Shape(1, 129, 16)], head_dim, window=(32, 64))  # FA#2199
    for left in (0, 64, 200):
        hold(WINDOW_SHAPES, head_dim, causal=True, window=(left, None))


def test_a_window_of_everything_before_is_causal():
    """FA#1133."""
    for shape in (Shape(2, 257, 257), Shape(2, 193, 600), Shape(2, 600, 193)):
        q, k, v = make(shape, 64)
        expected = attend(q, k, v, causal=True)
        for window_size in ((shape.seqlen_k - 1, 0), (None, 0)):
            assert_same_bits(attend(q, k, v, window_size=window_size), expected, (shape, window_size))


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(64, {}), (64, {"window": (64, 30)}), (128, {"causal": True})],
    ids=["64-full", "64-window", "128-causal"],
)
def test_softcap(head_dim, mask):
    """Also of scores far above it (FA#1025), where nothing may overflow and nothing masked may get a weight."""
    for softcap in (1.0, 50.0):
        for factor in (1.0, 100.0):
            hold([Shape(2, 193, 257, 4, 2), Shape(1, 64, 64)], head_dim, factor=factor, softcap=softcap, **mask)


# ---- Packed sequences


@pytest.mark.parametrize(("lengths", "sizes"), PUBLIC.values(), ids=PUBLIC)
def test_packed_sequences_of_public_reports(lengths, sizes):
    hold_packed(lengths, mask={"causal": True}, **sizes)


@pytest.mark.parametrize(
    ("head_dim", "config", "mask"),
    [
        (64, None, {"window": (40, 9)}),
        (64, replace(BASES[64], q_splits=3), {"causal": True}),
        (128, None, {"causal": True, "softcap": 5.0}),
        (256, None, {}),
    ],
    ids=["64-window", "64-causal, 3 splits", "128-causal, softcap", "256-full"],
)
def test_packed_sequences(head_dim, config, mask):
    for lengths in (MIXED, LONG_AMONG_TINY):
        hold_packed(lengths, config, mask, head_dim=head_dim)


def test_packed_sequences_have_the_bits_of_dense_ones():
    """FA#1897."""
    sequences, config = pack(MIXED), BASES[64]
    q, k, v, *_ = sequences
    out, lse = attend_packed(sequences, causal=True, config=config)
    for queries, keys in rows_of(MIXED):
        if queries.start < queries.stop:
            dense = attend(q[queries][None], k[keys][None], v[keys][None], causal=True, config=config)
            assert_same_bits([x[0] for x in dense], (out[queries], lse[:, queries]), f"{queries} dense")


def test_nothing_leaks_from_one_packed_sequence_into_another():
    """FA#1745, FA#2374: 0 * NaN is NaN."""
    sequences = pack(BESIDE_NAN)
    expected = attend_packed(sequences, causal=True)
    rows = rows_of(BESIDE_NAN)
    for queries, keys in (rows[2], rows[4]):
        sequences.q[queries] = torch.nan
        sequences.k[keys] = torch.nan
        sequences.v[keys] = torch.nan
    out, lse = attend_packed(sequences, causal=True)
    for i, (queries, _) in enumerate(rows):
        if i not in (2, 4):
            results, clean = ((x[queries], y[:, queries]) for x, y in ((out, lse), expected))
            assert_same_bits(results, clean, f"sequence {i}")


# ---- The backward

BACKWARDS = {
    "64, the paper's grid": (64, BackwardConfig()),
    "64, 3 splits": (64, BackwardConfig(kv_splits=3)),
    "64, two warps share keys": (64, BackwardConfig(num_warps=8, key_warps=4, kv_splits=2)),
    "64, 16 keys a warp": (64, BackwardConfig(tile_n=64, kv_splits=2)),
    "128, 8 warps": (128, BackwardConfig(num_warps=8, key_warps=8, kv_splits=2)),
    "256": (256, default_backward_config(Problem(1, 512, 512, 1, 1, 256))),
}


@pytest.mark.parametrize(("head_dim", "config"), BACKWARDS.values(), ids=BACKWARDS)
def test_backward_tiles(head_dim, config):
    options = backward.Options(causal=True)
    shapes = [*backward.FEW_SHAPES, backward.Shape(1, 1, 1), backward.Shape(1, 5, 2), backward.Shape(1, 385, 385, 7, 1)]
    for shape in shapes:
        q, k, v = tensors = backward.make(shape, head_dim)
        out, lse = fa1.forward(q, k, v, causal=True)
        dout = torch.randn_like(out)
        found = fa1.backward(dout, q, k, v, out, lse, causal=True, config=config)
        backward.check((shape, config), found, dout, tensors, options)


def test_one_cta_adds_up_in_one_order():
    """FA#2244."""
    q, k, v = backward.make(backward.Shape(2, 385, 600, 4, 2), 64)
    out, lse = fa1.forward(q, k, v)
    dout = torch.randn_like(out)
    expected = fa1.backward(dout, q, k, v, out, lse, deterministic=True)
    for i in range(30):
        found = fa1.backward(dout, q, k, v, out, lse, deterministic=True)
        backward.assert_same_bits(found, expected, f"run {i}")
