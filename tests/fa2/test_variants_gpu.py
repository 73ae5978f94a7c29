"""FA2's forward kernels on a Hopper GPU: every switch, tile and number of stages, windows, softcap and packed
sequences. Values against float64 and the names of public reports are as in tests/test_forward_gpu.py.
"""

from dataclasses import replace

import pytest
import torch

import fa2
from fa2.config import Config, default_config
from fa_common.problem import Problem
from fa_common.switches import ladder, switches, without
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
    far_apart,
    pack,
    rows_of,
)
from tests.test_forward_gpu import (
    CANARY,
    Shape,
    assert_same_bits,
    check,
    full_and_causal,
    make,
    shapes_of_few_iterations,
)

pytestmark = pytest.mark.gpu

BASES = {head_dim: default_config(Problem(1, 512, 512, 1, 1, head_dim)) for head_dim in (64, 128, 256)}
FLOOR = ladder(BASES[64])[0][1]


def attend(q, k, v, **options):
    return fa2.flash_attn_func(q, k, v, return_lse=True, **options)


def attend_packed(sequences: Packed, **options):
    return fa2.flash_attn_varlen_func(*sequences, return_lse=True, **options)


def forward_packed(sequences: Packed, **options):
    q, k, v, *described = sequences
    return fa2.forward(q, k, v, **dict(zip(Packed._fields[3:], described, strict=True)), **options)


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


def shapes_for(config: Config, head_dim: int) -> list[Shape]:
    """Ragged ends, groups of heads, and few iterations of the CTA's own blocks of keys."""
    return [Shape(1, 257, 385), Shape(2, 129, 64, 4, 2), *shapes_of_few_iterations(config.tile(head_dim).tile_n)]


# ---- Switches, tiles, stages


def turned(config: Config) -> dict[str, Config]:
    """`config` with one switch off, each in its turn, then with all off."""
    alone = {f"without {one.metadata['label']}": without(config, one.name) for one in switches(config)}
    return alone | {"all off": ladder(config)[0][1]}


@pytest.mark.parametrize(
    ("head_dim", "causal", "config"),
    [
        pytest.param(head_dim, causal, config, id=f"{head_dim}-{'causal' if causal else 'full'}-{name}")
        for head_dim, causal in ((64, True), (128, False))
        for name, config in turned(BASES[head_dim]).items()
    ],
)
def test_each_switch_turned_alone(head_dim, causal, config):
    hold(shapes_for(config, head_dim), head_dim, config, causal=causal)


@configs(dict(ladder(BASES[64])[1:-1]))
def test_each_rung_of_the_ladder(config):
    hold(shapes_for(config, 64), 64, config, causal=True)


TILES = {
    "2 stages": replace(BASES[64], stages=2),
    "3 stages": replace(BASES[64], stages=3),
    "2 stages, all off": replace(FLOOR, stages=2),
    "Q in registers": replace(BASES[64], q_in_registers=True),
    "Q in registers, 2 stages": replace(BASES[64], q_in_registers=True, stages=2),
    "rescaled by predicates": replace(BASES[64], branch_to_rescale=False),
    "64 x 32": Config(tile_m=64, tile_n=32),
    "128 x 96": Config(tile_m=128, tile_n=96),
    "128 x 128, 8 warps": Config(tile_m=128, tile_n=128, num_warps=8),
}


@configs(TILES)
def test_tiles(config):
    hold(shapes_for(config, 64), 64, config, causal=True)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_stages_of_wide_heads(head_dim):
    config = replace(BASES[head_dim], stages=2)
    if head_dim == 256:
        config = replace(config, tile_n=32)
    hold(shapes_for(config, head_dim), head_dim, config, causal=True)


# ---- Windows


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        *(pytest.param(head_dim, None, id=f"{head_dim}") for head_dim in BASES),
        pytest.param(64, FLOOR, id="64-all off"),
        pytest.param(64, without(BASES[64], "skip_masked_blocks"), id="64-hidden blocks computed"),
        pytest.param(64, replace(BASES[64], stages=2), id="64-2 stages"),
    ],
)
def test_windows(head_dim, config):
    for window in WINDOWS:
        hold(WINDOW_SHAPES, head_dim, config, window=window)
    hold([Shape(1, 129, 16)], head_dim, config, window=(32, 64))  # FA#2199
    for left in (0, 64, 200):
        hold(WINDOW_SHAPES, head_dim, config, causal=True, window=(left, None))


def test_a_window_of_everything_before_is_causal():
    """FA#1133."""
    for shape in (Shape(2, 257, 257), Shape(2, 193, 600), Shape(2, 600, 193)):
        q, k, v = make(shape, 64)
        expected = attend(q, k, v, causal=True)
        for window_size in ((shape.seqlen_k - 1, 0), (None, 0), (-1, 0)):
            assert_same_bits(attend(q, k, v, window_size=window_size), expected, (shape, window_size))


# ---- Softcap


@pytest.mark.parametrize(
    ("head_dim", "config", "mask"),
    [
        pytest.param(64, None, {}, id="64-full"),
        pytest.param(64, None, {"window": (64, 30)}, id="64-window"),
        pytest.param(128, None, {"causal": True}, id="128-causal"),
        pytest.param(256, None, {"causal": True}, id="256-causal"),
        pytest.param(64, FLOOR, {}, id="64-full-all off"),
    ],
)
def test_softcap(head_dim, config, mask):
    """Also of scores far above it (FA#1025), where nothing may overflow and nothing masked may get a weight."""
    shapes = [Shape(2, 193, 257, 4, 2), Shape(1, 257, 129), Shape(1, 64, 64)]
    for softcap in (1.0, 50.0):
        for factor in (1.0, 100.0):
            hold(shapes, head_dim, config, factor, softcap=softcap, **mask)


# ---- Packed sequences

PACKED_CONFIGS = {
    "default": BASES[64],
    "all off": FLOOR,
    "one CTA a head": without(BASES[64], "parallel_seqlen"),
    "2 stages": replace(BASES[64], stages=2),
}


@pytest.mark.parametrize(("lengths", "sizes"), PUBLIC.values(), ids=PUBLIC)
def test_packed_sequences_of_public_reports(lengths, sizes):
    hold_packed(lengths, mask={"causal": True}, **sizes)


@configs(PACKED_CONFIGS)
def test_packed_sequences(config):
    for lengths in (MIXED, LONG_AMONG_TINY, PUBLIC["FA#2391"][0]):
        for heads in ((4, 2), (3, 3)):
            hold_packed(lengths, config, {"causal": True}, heads=heads)


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(64, {"window": (40, 9)}), (128, {"causal": True, "softcap": 5.0}), (256, {})],
    ids=["64-window", "128-causal, softcap", "256-full"],
)
def test_packed_sequences_by_default(head_dim, mask):
    for lengths in (MIXED, LONG_AMONG_TINY):
        hold_packed(lengths, mask=mask, head_dim=head_dim)


def test_no_packed_sequence_at_all():
    sequences = pack(([], []))
    assert [x.shape for x in attend_packed(sequences)] == [(0, 4, 64), (4, 0)]
    for lengths in (([0, 0], [3, 5]), ([3, 5], [0, 0]), ([0], [0])):
        sequences = pack(lengths)
        check_packed(lengths, attend_packed(sequences, causal=True), sequences, lengths, causal=True)


@full_and_causal
def test_packed_sequences_have_the_bits_of_dense_ones(causal):
    """FA#1897."""
    sequences = pack(MIXED)
    q, k, v, *_ = sequences
    out, lse = attend_packed(sequences, causal=causal)
    for queries, keys in rows_of(MIXED):
        if queries.start < queries.stop:
            dense = attend(q[queries][None], k[keys][None], v[keys][None], causal=causal)
            assert_same_bits([x[0] for x in dense], (out[queries], lse[:, queries]), f"{queries} dense")


@configs(PACKED_CONFIGS)
def test_nothing_leaks_from_one_packed_sequence_into_another(config):
    """FA#1745, FA#2374: 0 * NaN is NaN."""
    sequences = pack(BESIDE_NAN)
    expected = attend_packed(sequences, causal=True, config=config)
    check_packed("without NaN", expected, sequences, BESIDE_NAN, causal=True)
    rows = rows_of(BESIDE_NAN)
    for queries, keys in (rows[2], rows[4]):
        sequences.q[queries] = torch.nan
        sequences.k[keys] = torch.nan
        sequences.v[keys] = torch.nan
    out, lse = attend_packed(sequences, causal=True, config=config)
    for i, (queries, _) in enumerate(rows):
        if i in (2, 4):
            assert out[queries].isnan().all(), f"sequence {i}"
        else:
            results, clean = ((x[queries], y[:, queries]) for x, y in ((out, lse), expected))
            assert_same_bits(results, clean, f"sequence {i}")


@configs(PACKED_CONFIGS)
def test_every_output_element_of_packed_sequences_is_written_and_nothing_else(config):
    """Canaries lie in and around out, as rows, heads and columns, and in and around LSE; FA#1155."""
    for lengths in (MIXED, PUBLIC["FA#1155"][0], PUBLIC["FA#2391"][0]):
        sequences = pack(lengths)
        options = {"causal": True, "config": config}
        expected = forward_packed(sequences, **options)
        total, heads, head_dim = sequences.q.shape
        around_out = sequences.q.new_full((total + 260, heads + 2, head_dim + 16), CANARY)
        around_lse = torch.full((heads * total + 256,), CANARY, device="cuda")
        out = around_out[130:-130, 1:-1, 8:-8]
        lse = around_lse[128:-128].view(heads, total)
        forward_packed(sequences, out=out, lse=lse, **options)
        assert_same_bits((out, lse), expected, lengths)
        out.fill_(CANARY)
        lse.fill_(CANARY)
        assert (around_out == CANARY).all(), "written outside of out"
        assert (around_lse == CANARY).all(), "written outside of LSE"


def test_packed_offsets_beyond_32_bits():
    """FA#1311, FA#767: the last rows of q, k, v and out lie more than 2^31 elements behind the first."""
    sequences = pack(([65, 0, 200], [130, 3, 132]), heads=(2, 2))
    q, k, v, *described = sequences
    expected = forward_packed(sequences, causal=True)
    far_q, far_k, far_v, out = (far_apart(x) for x in (q, k, v, torch.zeros_like(q)))
    results = forward_packed(Packed(far_q, far_k, far_v, *described), causal=True, out=out)
    assert_same_bits(results, expected)
