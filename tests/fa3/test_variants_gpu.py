"""FA3's kernels on a Hopper GPU, one by one: every switch, tile and schedule, windows, softcap, packed sequences and
packed heads. Values against float64 and the names of public reports are as in tests/test_forward_gpu.py.
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fa3
from fa3.config import SCHEDULERS, Config, default_config
from fa_common.problem import Problem
from fa_common.switches import label, ladder, switches, without
from tests.switch_pairs import covering
from tests.test_forward_gpu import (
    CANARY,
    Expected,
    Shape,
    assert_close,
    assert_same_bits,
    check,
    expect,
    full_and_causal,
    make,
    shapes_of_few_iterations,
)

pytestmark = pytest.mark.gpu

# Tiles that leave registers and shared memory for what an idea takes more of when it is off.
BASES = {64: Config(tile_m=192, tile_n=64), 128: Config(tile_m=128, tile_n=64)}
FLOOR = ladder(BASES[64])[0][1]
# More tiles than an H200 has SMs, so that each persistent CTA computes several.
MANY_TILES = Shape(9, 257, 257, 17, 17)
MANY_SHARED = Shape(9, 257, 193, 18, 6)
# More bytes of K and V than the L2 holds: `lpt_order` takes the heads in sections, here of two sizes.
SECTIONS = Shape(3, 300, 2048, 17, 17)
GROUPS = (1, 3, 4, 7, 8)
HEAD_DIMS = (64, 128, 256)


def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    return fa3.flash_attn_func(q, k, v, return_lse=True, **options)


def hold(shapes: list[Shape], head_dim: int, config: Config | None = None, factor: float = 1.0, **mask) -> None:
    """Every shape against float64; `mask` is causal, window, softcap, and `factor` what q and k are multiplied by."""
    arguments = arguments_of(mask)
    for shape in shapes:
        q, k, v = make(shape, head_dim)
        q, k = factor * q, factor * k
        check((shape, mask, config), *attend(q, k, v, config=config, **arguments), q, k, v, **mask)


def arguments_of(mask: dict) -> dict:
    """What `expect` calls window is window_size to the library."""
    return {"window_size" if name == "window" else name: value for name, value in mask.items()}


def configs(named: dict[str, Config | None]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("config", named.values(), ids=named)


# ---- Switches, tiles, stages, schedules


def turned(config: Config) -> list[tuple[str, Config]]:
    """(name, config) with one switch turned, each in its turn, then with all off."""
    variants = []
    for switch in switches(config):
        if getattr(config, switch.name):
            variants.append((f"without {switch.metadata['label']}", without(config, switch.name)))
        else:
            variants.append((f"with {switch.metadata['label']}", replace(config, **{switch.name: True})))
    return [*variants, ladder(config)[0]]


def shapes_for(config: Config) -> list[Shape]:
    shapes = [Shape(1, 257, 385), Shape(2, 129, 64, 4, 2), MANY_SHARED]
    return shapes + shapes_of_few_iterations(config.tile_n)


@pytest.mark.parametrize(
    ("head_dim", "causal", "config"),
    [
        pytest.param(head_dim, causal, config, id=f"{head_dim}-{'causal' if causal else 'full'}-{name}")
        for head_dim, causal in ((64, False), (128, True))
        for name, config in turned(BASES[head_dim])
    ],
)
def test_each_switch_turned_alone(head_dim, causal, config):
    hold(shapes_for(config), head_dim, config, causal=causal)


@pytest.mark.parametrize("config", covering(Config(tile_m=128, tile_n=64)), ids=label)
def test_any_two_switches(config):
    hold(shapes_for(config), 64, config, causal=True)


@configs(dict(ladder(BASES[128])))
def test_each_rung_of_the_ladder(config):
    hold(shapes_for(config), 128, config, causal=True)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages(stages):
    config = Config(tile_m=128, tile_n=64, stages=stages)
    hold(shapes_for(config), 64, config, causal=True)


@pytest.mark.parametrize(
    ("head_dim", "tile_m", "tile_n"),
    [(64, 64, 128), (64, 64, 256), (64, 128, 16), (64, 192, 80), (64, 256, 64), (96, 192, 96), (128, 128, 176)],
)
def test_tiles(head_dim, tile_m, tile_n):
    config = Config(tile_m=tile_m, tile_n=tile_n, pingpong=tile_m > 64, epilogue_overlap=head_dim < 128)
    hold(shapes_for(config), head_dim, config)


@full_and_causal
@pytest.mark.parametrize("epilogue_overlap", [True, False], ids=["own memory", "sQ"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 136, 192, 256])
def test_o_leaves_in_pieces(head_dim, epilogue_overlap, causal):
    """One to four of them, through one or two places; also from a warpgroup that has no row of its tile, or few."""
    scheduler = "dynamic" if causal else "static"
    config = Config(tile_m=128, tile_n=64, scheduler=scheduler, epilogue_overlap=epilogue_overlap)
    hold([MANY_TILES, MANY_SHARED, Shape(150, 65, 65, 1, 1), Shape(300, 3, 16, 1, 1)], head_dim, config, causal=causal)


@pytest.mark.parametrize(
    ("head_dim", "tile_m", "tile_n", "steps"),
    [(40, 256, 64, 1), (64, 192, 96, 4), (96, 192, 96, 2), (128, 192, 80, 2), (128, 128, 128, 8), (256, 128, 64, 4)],
)
def test_queries_in_registers(head_dim, tile_m, tile_n, steps):
    config = Config(tile_m=tile_m, tile_n=tile_n, q_register_steps=steps, epilogue_overlap=head_dim < 256)
    hold(shapes_for(config), head_dim, config, causal=True)


SCHEDULES = {
    "static": BASES[128],
    "static, in order": replace(BASES[128], lpt_order=False),
    "dynamic": replace(BASES[128], scheduler="dynamic"),
    "dynamic, in order": replace(BASES[128], scheduler="dynamic", lpt_order=False),
    "dynamic, O through sQ": replace(BASES[128], scheduler="dynamic", epilogue_overlap=False),
    "a CTA a tile": without(BASES[128], "persistent"),
}


@configs(SCHEDULES)
def test_schedules(config):
    few = [Shape(1, 1, 1), Shape(1, 129, 129, 1, 1), Shape(132, 65, 65, 1, 1), Shape(133, 65, 65, 1, 1)]
    hold([MANY_TILES, SECTIONS, MANY_SHARED, *few], 128, config, causal=True)


@configs({name: SCHEDULES[name] for name in ("static", "dynamic")})
def test_schedules_of_equal_tiles(config):
    hold([MANY_TILES, MANY_SHARED], 128, config)


# ---- Optimistic exponentials


FACTORS = (1.0, 0.5, 0.0, -1.0, 1.0, 2.0, 0.25)  # of the scores in a row, row after row
# log2(e) times these is up to 2^7, where P is infinite, and beyond; 87.5 to 88.5 lie between 2^126 and 2^128.
HEIGHTS = (3.0, 10.0, 60.0, 87.5, 88.0, 88.5, 89.0, 1000.0)


def late_maxima(seqlen_k: int) -> dict[str, Tensor]:
    """Scores, (keys,), that rise in the order in which blocks are visited: towards the first key."""
    keys = torch.arange(seqlen_k, device="cuda")
    return {
        "all equal": torch.ones_like(keys).float(),
        "rising by 3 a block": 3.0 * ((seqlen_k - keys) // 64),
        "rising by 1/16 a key": (seqlen_k - keys) / 16.0,
        "rising by 1 a key": (seqlen_k - keys).float(),
        "falling by 1 a key": keys.float(),
        **{f"{height} for one key": height * (keys == 5) for height in HEIGHTS},
        **{f"{height} for a block": height * (keys < 64) for height in HEIGHTS},
        "40 and 2000, far apart": 40.0 * (keys // 64 == 4) + 2000.0 * (keys == 1),
    }


def with_scores(scores: Tensor, shape: Shape, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v whose scores are these, given the softmax_scale 1 / head_dim, times FACTORS."""
    q, k, v = make(shape, head_dim, dtype)
    factors = q.new_tensor(FACTORS).repeat(-(-shape.seqlen_q // len(FACTORS)))[: shape.seqlen_q]
    q = factors[None, :, None, None].expand_as(q).contiguous()
    k = scores.to(dtype)[None, :, None, None].expand_as(k).contiguous()
    return q, k, v


OPTIMISTS = [
    *(pytest.param(torch.bfloat16, head_dim, None, id=f"bfloat16-{head_dim}") for head_dim in HEAD_DIMS),
    pytest.param(torch.float16, 64, None, id="float16-64"),
    pytest.param(torch.float16, 128, None, id="float16-128"),
    pytest.param(torch.bfloat16, 64, replace(BASES[64], overlap_gemm_softmax=False), id="in order"),
    pytest.param(torch.bfloat16, 64, replace(BASES[64], polynomial_exp=True), id="polynomial"),
    pytest.param(torch.bfloat16, 128, replace(BASES[128], two_level_accumulation=True), id="two levels"),
    pytest.param(torch.bfloat16, 64, replace(BASES[64], cluster=True), id="2-CTA multicast"),
    pytest.param(torch.bfloat16, 64, replace(BASES[64], pack_gqa=True), id="packed GQA"),
    pytest.param(torch.bfloat16, 64, without(BASES[64], "tma"), id="without TMA loads"),
    pytest.param(torch.bfloat16, 64, replace(BASES[64], optimistic_exp=False), id="not optimistic"),
]


@full_and_causal
@pytest.mark.parametrize(("dtype", "head_dim", "config"), OPTIMISTS)
def test_maxima_that_come_late(dtype, head_dim, config, causal):
    """P outgrows its limit a little, a lot, or beyond all fp32 numbers, in some rows of a warp and not in others."""
    shape = Shape(1, 200, 600, 4, 2)
    for name, scores in late_maxima(shape.seqlen_k).items():
        q, k, v = with_scores(scores, shape, head_dim, dtype)
        results = attend(q, k, v, causal=causal, softmax_scale=1 / head_dim, config=config)
        check((name, causal), *results, q, k, v, causal, scale=1 / head_dim)


@full_and_causal
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_random_scores_that_are_computed_again(head_dim, causal):
    """Other rows and columns would give other numbers; the largest scores are some hundreds."""
    q, k, v = make(Shape(2, 330, 700, 4, 2), head_dim)
    k[:, :130] *= 100
    k[:, 400:410] *= 10
    check(head_dim, *attend(q, k, v, causal=causal), q, k, v, causal)
    window = (500, 40)
    check((head_dim, window), *attend(q, k, v, window_size=window), q, k, v, window=window)


def test_random_scores_of_packed_sequences_that_are_computed_again():
    sequences = pack(MIXED)
    for queries, keys in rows_of(MIXED):
        if queries.start < queries.stop:
            sequences.k[keys][:50] *= 100
    for mask in ({}, {"causal": True}, {"window": (150, 20)}):
        results = attend_packed(sequences, **arguments_of(mask))
        check_packed(mask, results, sequences, MIXED, **mask)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_first_key_of_a_row_in_a_block_that_all_see(head_dim):
    """Behind it lie blocks of which the row sees nothing: it has no shift yet."""
    tile_n = default_config(Problem(1, 200, 600, 2, 2, head_dim, causal=True)).tile_n
    for blocks in (1, 2, 5):
        offset = blocks * tile_n - 1  # query i faces key i + offset
        hold([Shape(1, 300, 300 + offset), Shape(2, 130, 130 + offset, 4, 2)], head_dim, causal=True)
        # No query faces a key so far in front of it.
        hold([Shape(1, 300, 600)], head_dim, window=(400, (offset - 300) % tile_n))
        hold([Shape(1, 300, 600)], head_dim, factor=5.0, window=(400, (offset - 300) % tile_n))


@pytest.mark.parametrize(("head_dim", "jump"), [(64, 1.0), (64, 1000.0), (128, 1000.0), (256, 1.0)])
def test_a_key_that_is_nan_is_seen_by_its_own_rows_alone(head_dim, jump):
    q, k, v = make(Shape(1, 300, 300, 4, 2), head_dim)
    q = q.abs()
    k[:, :3] = jump / head_dim**0.5
    first = 200
    k[:, first] = torch.nan
    out, lse = attend(q, k, v, causal=True)
    assert out[:, first:].isnan().all()
    assert lse[..., first:].isnan().all()
    earlier = [x[:, :first] for x in (out, q, k, v)]
    check("rows before", earlier[0], lse[..., :first], *earlier[1:], causal=True)


# ---- Windows


WINDOWS = ((64, 0), (100, 30), (0, 0), (None, 17), (300, None), (3, 500), (0, 64), (64, 64), (1, 700))
# Long enough that each of these bounds hides something.
WINDOW_SHAPES = [
    Shape(2, 385, 385, 4, 2),
    Shape(1, 193, 600),
    Shape(1, 600, 330),
    Shape(1, 130, 1100),
    Shape(1, 70, 320),
]


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        *(pytest.param(head_dim, None, id=f"{head_dim}") for head_dim in HEAD_DIMS),
        pytest.param(64, FLOOR, id="64-all off"),
        pytest.param(64, without(BASES[64], "warp_specialized"), id="64-without warp specialization"),
        pytest.param(64, without(BASES[64], "tma"), id="64-without TMA loads"),
        pytest.param(64, replace(BASES[64], cluster=True), id="64-2-CTA multicast"),
        pytest.param(64, replace(BASES[64], pack_gqa=True), id="64-packed GQA"),
    ],
)
def test_windows(head_dim, config):
    for window in WINDOWS:
        hold(WINDOW_SHAPES, head_dim, config, window=window)
    hold([Shape(1, 129, 16)], head_dim, config, window=(32, 64))  # FA#2199
    hold([MANY_SHARED], head_dim, config, window=(64, 10))
    for left in (0, 64, 200):
        hold(WINDOW_SHAPES, head_dim, config, causal=True, window=(left, None))


def test_a_window_of_everything_before_is_causal():
    """FA#1133."""
    for shape in (Shape(2, 257, 257), Shape(2, 193, 600), Shape(2, 600, 193)):
        q, k, v = make(shape, 64)
        expected = attend(q, k, v, causal=True)
        left = shape.seqlen_k - 1
        check(shape, *expected, q, k, v, window=(left, 0))
        for window_size in ((left, 0), (None, 0), (-1, 0)):
            assert_same_bits(attend(q, k, v, window_size=window_size), expected, (shape, window_size))


def test_a_causal_window_is_bounded_on_the_right_by_causal():
    q, k, v = make(Shape(2, 257, 385), 64)
    expected = attend(q, k, v, window_size=(64, 0))
    for right in (0, 30, None):
        assert_same_bits(attend(q, k, v, causal=True, window_size=(64, right)), expected, right)


# ---- Softcap


@pytest.mark.parametrize(
    ("head_dim", "config", "mask"),
    [
        pytest.param(64, None, {}, id="64-full"),
        pytest.param(64, None, {"causal": True}, id="64-causal"),
        pytest.param(64, None, {"window": (64, 30)}, id="64-window"),
        pytest.param(128, None, {"causal": True}, id="128-causal"),
        pytest.param(256, None, {"causal": True}, id="256-causal"),
        pytest.param(64, FLOOR, {}, id="64-full-all off"),
    ],
)
def test_softcap(head_dim, config, mask):
    """Also of scores far above it (FA#1025), where nothing may overflow and nothing masked may get a weight."""
    shapes = [Shape(2, 193, 257, 4, 2), Shape(1, 257, 129), Shape(1, 64, 64)]
    for softcap in (1.0, 5.0, 50.0):
        for factor in (1.0, 100.0):
            hold(shapes, head_dim, config, factor, softcap=softcap, **mask)


def test_softcap_of_equal_and_of_very_low_scores():
    """FA#2082."""
    q, k, v = make(Shape(2, 193, 257), 64)
    for score in (0.0, 1.0, -1e4, 1e4):
        # A score is softmax_scale * 64 * q * k = k, with q = 1 / 8.
        q, k = torch.full_like(q, 1 / 8), torch.full_like(k, score)
        out, lse = attend(q, k, v, causal=True, softcap=50.0)
        check(score, out, lse, q, k, v, causal=True, softcap=50.0)


# ---- Packed sequences


class Packed(NamedTuple):
    """Sequences one after the other, as flash_attn_varlen_func takes them."""

    q: Tensor  # (total_q, heads_q, head_dim)
    k: Tensor  # (total_k, heads_kv, head_dim)
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


Lengths = tuple[list[int], list[int]]  # of the queries and of the keys of each sequence

# Nothing before, between and after; keys without queries, queries without keys; tiles that end anywhere.
MIXED = ([0, 1, 64, 65, 0, 200, 385, 3, 0, 130, 0], [0, 5, 64, 129, 70, 0, 385, 600, 0, 1, 3])
PUBLIC = {
    "FA#443": (([76, 34, 146], [1, 1, 1]), {"heads": (1, 1), "head_dim": 32, "scale": 3.0}),
    "FA#1537": (([1, 0, 1], [3, 0, 5]), {"heads": (9, 3)}),
    "FA#1619": (([0, 0, 0, 1], [0, 0, 0, 1]), {"heads": (21, 7), "head_dim": 120}),
    "FA#1713": (([150, 0, 150], [100, 100, 100]), {}),
    "FA#1155": (([50, 90, 30], [0, 64, 0]), {}),
    "FA#1254": (([0, 0, 1023], [1, 0, 2045]), {"head_dim": 128}),
    "FA#2391": (([30, 1, 2] * 100, [1, 2, 33] * 100), {}),
}
FEW = ([1, 0, 3, 16, 2, 1], [257, 0, 64, 129, 0, 1])
LONG_AMONG_TINY = ([1, 2, 0] * 50 + [2000] + [0, 3, 1] * 50, [2, 0, 1] * 50 + [2100] + [1, 3, 0] * 50)
SHORT = 32  # keys: sequences of so few are compared together, since each alone has few elements


def pack(lengths: Lengths, heads: tuple[int, int] = (4, 2), head_dim: int = 64, scale: float = 1.0) -> Packed:
    heads_q, heads_kv = heads
    cu_seqlens = [torch.tensor([0, *accumulate(side)], dtype=torch.int32, device="cuda") for side in lengths]
    q = torch.randn(sum(lengths[0]), heads_q, head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, sum(lengths[1]), heads_kv, head_dim, dtype=torch.bfloat16, device="cuda")
    return Packed(scale * q, scale * k, scale * v, *cu_seqlens, *map(partial(max, default=0), lengths))


def rows_of(lengths: Lengths) -> list[tuple[slice, slice]]:
    """(queries, keys) of each sequence."""
    sides = ([slice(*bounds) for bounds in pairwise(accumulate(side, initial=0))] for side in lengths)
    return list(zip(*sides, strict=True))


def attend_packed(sequences: Packed, **options) -> tuple[Tensor, Tensor]:
    return fa3.flash_attn_varlen_func(*sequences, return_lse=True, **options)


def forward_packed(sequences: Packed, **options) -> tuple[Tensor, Tensor]:
    q, k, v, *described = sequences
    return fa3.forward(q, k, v, **dict(zip(Packed._fields[3:], described, strict=True)), **options)


def check_packed(name: object, results: tuple[Tensor, Tensor], sequences: Packed, lengths: Lengths, **mask) -> None:
    """Each sequence by itself, the short ones all together; one without keys is 0, its LSE -inf."""
    (out, lse), (q, k, v, *_) = results, sequences
    assert out.shape == q.shape, name
    assert lse.shape == (q.shape[1], q.shape[0]), name
    short = []
    for i, (queries, keys) in enumerate(rows_of(lengths)):
        if queries.start == queries.stop:
            continue
        own_out, own_lse = out[queries], lse[:, queries]
        if keys.start == keys.stop:
            assert not own_out.any(), f"{name}: sequence {i}, without keys, is not 0"
            assert own_lse.isneginf().all(), f"{name}: LSE of sequence {i}, without keys, is not -inf"
            continue
        exact, pytorch, size_of_scores = expect(q[queries][None], k[keys][None], v[keys][None], **mask)
        expected = Expected(tuple(x[0] for x in exact), tuple(x[0] for x in pytorch), size_of_scores)
        if keys.stop - keys.start > SHORT:
            assert_close(f"{name}, sequence {i}", own_out, own_lse, expected)
        else:
            short.append((own_out, own_lse, expected))
    if short:
        outs, lses, expected = zip(*short, strict=True)
        exact, pytorch = (
            (torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs], dim=1))
            for pairs in ([x.exact for x in expected], [x.pytorch for x in expected])
        )
        together = Expected(exact, pytorch, max(x.size_of_scores for x in expected))
        assert_close(f"{name}, short sequences", torch.cat(outs), torch.cat(lses, dim=1), together)


def hold_packed(lengths: Lengths, config: Config | None = None, mask: dict | None = None, **sizes) -> None:
    mask = mask or {}
    sequences = pack(lengths, **sizes)
    results = attend_packed(sequences, config=config, **arguments_of(mask))
    check_packed((sizes, mask, config), results, sequences, lengths, **mask)


@pytest.mark.parametrize(("lengths", "sizes"), PUBLIC.values(), ids=PUBLIC)
def test_packed_sequences_of_public_reports(lengths, sizes):
    hold_packed(lengths, mask={"causal": True}, **sizes)


PACKED_CONFIGS = {
    "default": None,
    "static": BASES[64],
    "all off": FLOOR,
    "without TMA loads": without(BASES[64], "tma"),
    "without warp specialization": without(BASES[64], "warp_specialized"),
    "2-CTA multicast": replace(BASES[64], cluster=True),
    "packed GQA": replace(BASES[64], pack_gqa=True, scheduler="dynamic"),
}


@pytest.mark.parametrize("name", ["default", "2-CTA multicast"])
def test_no_box_lies_behind_the_end_of_a_sequence(name):
    """TMA looks up the moved base of such a box, which is before K's memory by K's size: most likely no memory."""
    torch.cuda.empty_cache()  # a segment of its own for K and for V
    hold_packed(([130, 130, 130, 0], [33, 17, 65, 400_000]), PACKED_CONFIGS[name], heads=(8, 8))


@configs(PACKED_CONFIGS)
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (40, 9)}], ids=["causal", "window"])
def test_packed_sequences(config, mask):
    for lengths in (MIXED, LONG_AMONG_TINY, PUBLIC["FA#2391"][0]):
        for heads in ((4, 2), (3, 3)):
            hold_packed(lengths, config, mask, heads=heads)
    # Several rounds of a persistent CTA.
    hold_packed(([257, 0, 130, 1] * 5, [193, 7, 257, 0] * 5), config, mask, heads=(18, 6))


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(64, {}), (128, {"causal": True, "softcap": 5.0})],
    ids=["64-full", "128-causal, softcap"],
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


@configs({"static": BASES[64], "dynamic": Config(tile_m=192, tile_n=80, stages=3, scheduler="dynamic")})
@full_and_causal
def test_packed_sequences_have_the_bits_of_dense_ones(config, causal):
    """And those that each has alone: FA#1897."""
    sequences = pack(MIXED)
    q, k, v, *_ = sequences
    out, lse = attend_packed(sequences, causal=causal, config=config)
    for queries, keys in rows_of(MIXED):
        if queries.start < queries.stop:
            expected = out[queries], lse[:, queries]
            dense = attend(q[queries][None], k[keys][None], v[keys][None], causal=causal, config=config)
            assert_same_bits([x[0] for x in dense], expected, f"{queries} dense")
            bounds = (torch.tensor([0, x.stop - x.start], dtype=torch.int32, device="cuda") for x in (queries, keys))
            alone = Packed(q[queries], k[keys], v[keys], *bounds, *sequences[5:])
            assert_same_bits(attend_packed(alone, causal=causal, config=config), expected, f"{queries} alone")
    q, k, v = make(Shape(5, 193, 257, 4, 2), 64)
    lengths = ([193] * 5, [257] * 5)
    described = pack(lengths)[3:]
    packed = attend_packed(Packed(*(x.flatten(0, 1) for x in (q, k, v)), *described), causal=causal, config=config)
    out, lse = attend(q, k, v, causal=causal, config=config)
    assert_same_bits(packed, (out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)), "a batch of equal lengths")


# The first sequence without keys lies before NaN, the last one behind it.
BESIDE_NAN = ([65, 10, 70, 130, 5, 3], [100, 0, 300, 193, 40, 0])


@configs(
    {name: PACKED_CONFIGS[name] for name in PACKED_CONFIGS if name not in ("static", "without warp specialization")}
)
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


@configs({name: PACKED_CONFIGS[name] for name in ("default", "static", "all off", "packed GQA")})
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
        for poison in (CANARY, torch.nan):
            out.fill_(poison)
            lse.fill_(poison)
            forward_packed(sequences, out=out, lse=lse, **options)
            assert_same_bits((out, lse), expected, poison)
        out.fill_(CANARY)
        lse.fill_(CANARY)
        assert (around_out == CANARY).all(), "written outside of out"
        assert (around_lse == CANARY).all(), "written outside of LSE"


def test_views_of_packed_sequences_give_the_same_bits_as_copies():
    """Slices of one projection (FA#2541), and rows, heads and columns inside NaN (FA#1745)."""
    sequences = pack(MIXED)
    expected = attend_packed(sequences, causal=True)
    q, k, v, *described = sequences
    inside_nan = []
    for x in (q, k, v):
        total, heads, head_dim = x.shape
        larger = x.new_full((total + 400, heads + 2, head_dim + 64), torch.nan)
        inside_nan.append(larger[200 : 200 + total, 1:-1, :head_dim].copy_(x))
    assert_same_bits(attend_packed(Packed(*inside_nan, *described), causal=True), expected, "inside NaN")
    k, v = torch.cat((k, v), dim=1).split(2, dim=1)
    assert_same_bits(attend_packed(Packed(q, k, v, *described), causal=True), expected, "projection")
    off_by_one = [x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    assert_same_bits(attend_packed(Packed(*off_by_one, *described), causal=True), expected, "off by one")


def test_packed_offsets_beyond_32_bits():
    """FA#1311, FA#767: the last rows of q, k, v and out lie more than 2^31 elements behind the first."""
    lengths = ([65, 0, 200], [130, 3, 132])
    sequences = pack(lengths, heads=(2, 2))
    q, k, v, *described = sequences
    expected = forward_packed(sequences, causal=True)
    far_q, far_k, far_v, out = (far_apart(x) for x in (q, k, v, torch.zeros_like(q)))
    results = forward_packed(Packed(far_q, far_k, far_v, *described), causal=True, out=out)
    assert_same_bits(results, expected)


def far_apart(x: Tensor) -> Tensor:
    """The same values, row by row 2^23 elements apart."""
    stride = 2**23
    storage = x.new_empty((x.shape[0] - 1) * stride + x[0].numel())
    return storage.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)


# ---- Packed heads


def few_queries(group: int, seqlen_k: int = 257) -> list[Shape]:
    return [Shape(3, seqlen_q, seqlen_k, 2 * group, 2) for seqlen_q in (1, 3, 16)]


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_few_queries_of_many_heads(head_dim, causal):
    for group in GROUPS[1:]:
        for seqlen_k in (1, 2, 64, 257, 1000):
            hold(few_queries(group, seqlen_k), head_dim, causal=causal)
    hold([Shape(300, 1, 129, 32, 4), Shape(70, 16, 300, 8, 4), Shape(1, 1, 4000, 71, 1)], head_dim, causal=causal)


def test_few_queries_with_a_window_and_a_softcap():
    for group in GROUPS[1:]:
        for window in ((64, 0), (100, 1), (300, None)):
            hold(few_queries(group, 600), 64, window=window, softcap=5.0)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_packed_heads_of_long_sequences(head_dim, causal, scheduler):
    config = replace(BASES[head_dim], pack_gqa=True, scheduler=scheduler)
    for group in GROUPS:
        shapes = [*few_queries(group), Shape(2, 129, 193, 2 * group, 2), Shape(1, 257, 64, group, 1)]
        hold(shapes, head_dim, config, causal=causal)
    hold([MANY_SHARED, Shape(2, 1100, 1100, 6, 2)], head_dim, config, causal=causal)


def test_few_queries_of_packed_sequences():
    for group in GROUPS[1:]:
        hold_packed(FEW, mask={"causal": True}, heads=(2 * group, 2))
    hold_packed(([1] * 300, [1, 30, 0, 129, 64, 257] * 50), heads=(8, 2))


# ---- Every head_dim


GATHERS = {
    "packed GQA": Config(tile_m=128, tile_n=64, pack_gqa=True, epilogue_overlap=False),
    "without TMA loads": without(Config(tile_m=128, tile_n=64, epilogue_overlap=False), "tma"),
}


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        *(pytest.param(head_dim, None, id=f"{head_dim}") for head_dim in (8, 40, 96, 120, 192, 248)),
        *(
            pytest.param(head_dim, config, id=f"{head_dim}-{name}")
            for head_dim in (72, 200)
            for name, config in GATHERS.items()
        ),
    ],
)
def test_every_head_dim(head_dim, config):
    """FA#1347: packed, with everything; what lies behind each row in memory must not be taken for columns."""
    q, k, v, *described = pack(MIXED, head_dim=256)
    columns = [x.new_full(x.shape, torch.nan)[..., :head_dim].copy_(x[..., :head_dim]) for x in (q, k, v)]
    sequences = Packed(*columns, *described)
    mask = {"causal": True, "window": (150, None), "softcap": 20.0}
    results = attend_packed(sequences, config=config, **arguments_of(mask))
    check_packed(head_dim, results, sequences, MIXED, **mask)


# ---- Bits, streams, graphs


def dense_inputs(shape: Shape) -> dict[str, Tensor]:
    return dict(zip("qkv", make(shape, 64), strict=True))


def packed_inputs(lengths: Lengths) -> dict:
    return pack(lengths, heads=(8, 4))._asdict()


def run(inputs: dict) -> tuple[Tensor, Tensor]:
    """Causal, by the default config: tiles are drawn from a counter."""
    return fa3.forward(**inputs, causal=True)


# Two inputs each that run one kernel.
COUNTING = {
    "dense": [partial(dense_inputs, Shape(8, 600, 1000, 8, 4)), partial(dense_inputs, Shape(9, 257, 193, 18, 6))],
    "packed": [partial(packed_inputs, [6 * side for side in MIXED]), partial(packed_inputs, LONG_AMONG_TINY)],
}
dense_and_packed = pytest.mark.parametrize("makers", COUNTING.values(), ids=COUNTING)


def test_the_counter_is_in_use():
    for varlen in (False, True):
        problem = Problem(9, 257, 193, 18, 6, 64, causal=True, varlen=varlen)
        assert default_config(problem).scheduler == "dynamic"


@dense_and_packed
def test_runs_repeat_bitwise(makers):
    for make_inputs in makers:
        inputs = make_inputs()
        expected = run(inputs)
        for i in range(10):
            assert_same_bits(run(inputs), expected, f"run {i}")


@dense_and_packed
def test_runs_on_two_streams_do_not_disturb_each_other(makers):
    inputs = [make_inputs() for make_inputs in makers]
    expected = [run(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((i, run(inputs[i])))
    torch.cuda.synchronize()
    for i, result in results:
        assert_same_bits(result, expected[i], f"stream {i}")


def test_a_sequence_does_not_depend_on_its_batch_beside_another_stream():
    """FA#1897."""
    q, k, v = make(MANY_SHARED, 64)
    others, stream = dense_inputs(Shape(8, 600, 1000, 8, 4)), torch.cuda.Stream()
    alone = [run({"q": q[i : i + 1], "k": k[i : i + 1], "v": v[i : i + 1]}) for i in range(MANY_SHARED.batch)]
    run(others)
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(stream):
            run(others)
        out, lse = run({"q": q, "k": k, "v": v})
        for i, expected in enumerate(alone):
            assert_same_bits((out[i : i + 1], lse[i : i + 1]), expected, f"batch entry {i}")


@dense_and_packed
def test_graphs_replay_on_two_streams(makers):
    inputs = [make_inputs() for make_inputs in makers]
    expected = [run(x) for x in inputs]
    captured = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(x)
        captured.append((graph, results, torch.cuda.Stream()))
    for replay in range(2):
        for _, results, _ in captured:
            for x in results:
                x.fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(2):
            for graph, _, stream in captured:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for i, (_, results, _) in enumerate(captured):
            assert_same_bits(results, expected[i], f"replay {replay} of graph {i}")
