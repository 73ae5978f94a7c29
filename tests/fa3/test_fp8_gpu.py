"""FP8 attention on a Hopper GPU, held against float64 on the numbers that the e4m3 tensors stand for.

What is left is the rounding of P to e4m3, by up to 2^-4 of itself and about 2.6 % in the root mean square, which is the
error of out where V has both signs. Scores are off by what the tensor cores lose: they do not add up products of e4m3
numbers in full fp32. Tensors are quantized on the CPU, so that no test of attention depends on the other kernels. V by
rows and V by columns have kernels of their own.

A kernel is compiled for each (head_dim, mask, packed, type of out), which takes seconds: one test holds one kernel
against many shapes. Names of public reports are as in tests/test_forward_gpu.py.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fa3
from benchmarks.accuracy import dequantized
from fa3 import fp8, fp8_launch
from fa3.config import KV_BLOCK, Q_BLOCK, Config, default_fp8_config
from fa3.fp8 import E4M3, SCALES
from fa_common import reference
from fa_common.generation import Prepared
from fa_common.problem import Problem
from tests.test_forward_gpu import Shape, assert_same_bits, full_and_causal, inside_nan, off_by_one

pytestmark = pytest.mark.gpu

ROUNDING_OF_P = 0.04  # of the norm of out
ROUNDING_IN_FEW_ROWS = 0.06  # where few keys count, and few rows make up for each other
ROUNDING_OF_ALL = 0.07  # the same where q, k and v are rounded too
DRIFT = 0.01  # where V has one sign the roundings of P cancel, and what stays is what adding up loses
DRIFT_OF_ONE_SUM = 0.02
LSE_ERROR = 2e-2
HEAD_DIMS = (16, 48, 64, 96, 128, 192, 256)

# One, two, three and five key blocks of 128 and of 64 keys, exactly and with one key more or less (tilelang#2566).
LENGTHS_K = sorted({n * block + extra for block in (64, 128) for n in (1, 2, 3, 5) for extra in (-1, 0, 1)})
SHAPES = [
    *(Shape(1, 130, length) for length in LENGTHS_K),
    Shape(2, 257, 385, 6, 2),
    Shape(2, 193, 600, 4, 1),
    Shape(2, 600, 193, 4, 2),  # causal: rows without keys
    Shape(2, 1, 257, 6, 2),
    Shape(2, 5, 2),
    Shape(3, 64, 64),
    Shape(9, 193, 257, 17, 17),  # more tiles than an H200 has SMs
    Shape(1, 130, 4500, 4, 2),  # more than 32 blocks, whose scales lanes hold
]


def draw(shape: Shape, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v on the CPU, each run of 32 rows of a size of its own, so that blocks have different scales."""

    def one(seqlen: int, heads: int, octaves: float) -> Tensor:
        sizes = octaves * (2 * torch.rand(shape.batch, -(-seqlen // 32), heads, 1) - 1)
        sizes = sizes.exp2().repeat_interleave(32, 1)[:, :seqlen]
        return (sizes * torch.randn(shape.batch, seqlen, heads, head_dim)).to(dtype)

    return (
        one(shape.seqlen_q, shape.heads_q, 0.5),
        one(shape.seqlen_k, shape.heads_kv, 0.5),
        one(shape.seqlen_k, shape.heads_kv, 3.0),
    )


def to_gpu(quantized: fa3.Quantized) -> fa3.Quantized:
    return fa3.Quantized(*(x.cuda() for x in quantized))


def make(shape: Shape, head_dim: int, scales: str = "block", v_by_columns: bool = False) -> fa3.Quantized:
    """Random tensors, quantized."""
    return laid_out(to_gpu(fa3.quantize(*draw(shape, head_dim), scales=scales, hadamard=False)), v_by_columns)


def laid_out(quantized: fa3.Quantized, v_by_columns: bool) -> fa3.Quantized:
    """With a contiguous V, or with one whose keys lie next to each other, and NaN up to a multiple of 16 behind them.

    A number of keys that is no multiple of 4 no kernel takes by columns: there it is the copy that is tested.
    """
    v = quantized.v
    if not v_by_columns:
        return quantized._replace(v=v.contiguous())
    batch, seqlen, heads, head_dim = v.shape
    columns = torch.full((batch, heads, head_dim, -(-seqlen // 16) * 16), 0x7F, dtype=torch.uint8, device=v.device)
    rows = columns.permute(0, 3, 1, 2)[:, :seqlen]
    rows.copy_(v.view(torch.uint8))
    return quantized._replace(v=rows.view(E4M3))


def attend(quantized: fa3.Quantized, **options) -> tuple[Tensor, Tensor]:
    return fa3.flash_attn_func(**quantized._asdict(), return_lse=True, **options)


def expect(quantized: fa3.Quantized, window=(None, None), **mask) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    return reference.attention(*dequantized(quantized), window=window, **mask)


def check(name: object, results: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], bound=ROUNDING_OF_P) -> None:
    (out, lse), (exact_out, exact_lse) = results, exact
    assert lse.dtype == torch.float32, name
    has_no_key = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), has_no_key), f"{name}: LSE is -inf in the wrong rows"
    assert not out[has_no_key.mT].any(), f"{name}: a row without keys is not 0"
    error = (out.double() - exact_out).norm().item()
    assert error <= bound * exact_out.norm().item(), f"{name}: error {error:.2e}, out {exact_out.norm().item():.2e}"
    torch.testing.assert_close(
        lse.double(), exact_lse, atol=LSE_ERROR, rtol=1e-5, msg=lambda text: f"{name}: LSE: {text}"
    )


def hold(
    shapes: list[Shape],
    head_dim: int,
    v_by_columns: bool,
    scales: str = "block",
    out_dtype=torch.bfloat16,
    **mask,
) -> None:
    """Every shape against float64; `mask` is causal, window, softcap."""
    for shape in shapes:
        quantized = make(shape, head_dim, scales, v_by_columns)
        results = attend(quantized, out_dtype=out_dtype, **arguments_of(mask))
        assert results[0].dtype == out_dtype
        check((shape, scales, mask), results, expect(quantized, **mask))


def arguments_of(mask: dict) -> dict:
    """What `expect` calls window is window_size to the library."""
    return {"window_size" if name == "window" else name: value for name, value in mask.items()}


both_layouts = pytest.mark.parametrize("v_by_columns", [False, True], ids=["V by rows", "V by columns"])


# ---- Values


@both_layouts
@full_and_causal
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shapes(head_dim, causal, v_by_columns):
    hold(SHAPES, head_dim, v_by_columns, causal=causal)


@both_layouts
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows(head_dim, v_by_columns):
    shapes = [Shape(2, 385, 385, 4, 2), Shape(1, 193, 600), Shape(1, 600, 332), Shape(1, 130, 1100)]
    for window in ((64, 0), (100, 30), (0, 0), (None, 17), (300, None), (3, 500)):
        hold(shapes, head_dim, v_by_columns, window=window)
    hold([Shape(1, 129, 16)], head_dim, v_by_columns, window=(32, 64))  # FA#2199
    hold(shapes, head_dim, v_by_columns, causal=True, window=(200, None))


@both_layouts
@pytest.mark.parametrize(("head_dim", "mask"), [(64, {}), (128, {"causal": True}), (64, {"window": (64, 30)})], ids=str)
def test_softcap(head_dim, mask, v_by_columns):
    shapes = [Shape(2, 193, 260, 4, 2), Shape(1, 257, 129), Shape(1, 64, 64)]
    for softcap in (1.0, 5.0, 50.0):
        hold(shapes, head_dim, v_by_columns, softcap=softcap, **mask)


@both_layouts
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_scales_and_types_of_out(head_dim, causal, out_dtype, v_by_columns):
    for scales in SCALES:
        shapes = [Shape(2, 257, 388, 6, 2), Shape(2, 193, 130, 4, 1)]
        hold(shapes, head_dim, v_by_columns, scales, out_dtype, causal=causal)


def test_each_tensor_has_a_kind_of_scale_of_its_own():
    shape = Shape(2, 193, 385, 6, 2)
    q, k, v, *of_blocks = make(shape, 64)
    of_heads, of_all = torch.rand(3, 2, 2, device="cuda") / 100 + 0.002, torch.tensor(0.01, device="cuda")
    one = torch.ones(1, device="cuda")
    for name, given in {
        "head, tensor, block": (of_heads[0], of_all, of_blocks[2]),
        "block, head, tensor": (of_blocks[0], of_heads[1], of_all[None]),
        "tensor, block, head": (of_all, of_blocks[1], of_heads[2]),
        "none of v": (*of_blocks[:2], None),
    }.items():
        scales = dict(zip(("descale_q", "descale_k", "descale_v"), given, strict=True))
        results = fa3.flash_attn_func(q, k, v, **scales, return_lse=True)
        check(name, results, expect(fa3.Quantized(q, k, v, *(one if x is None else x for x in given))))


@both_layouts
@pytest.mark.parametrize("scores", ["zero", "equal", "one very high", "all very low"])
def test_degenerate_scores(scores, v_by_columns):
    """FA#2082: no overflow, no NaN, no row lost."""
    q, k, v = draw(Shape(2, 193, 260), 64, torch.float32)
    # A score is softmax_scale * 64 * q * k = k, with q = 1 / 8.
    q, k = torch.full_like(q, 1 / 8), torch.full_like(k, {"equal": 1.0, "all very low": -1e4}.get(scores, 0.0))
    if scores == "zero":
        q, k, v = (torch.zeros_like(x) for x in (q, k, v))
    if scores == "one very high":
        k[:, 11] = 1e4
    quantized = laid_out(to_gpu(fa3.quantize(q, k, v, hadamard=False)), v_by_columns)
    check(scores, attend(quantized, causal=True), expect(quantized, causal=True))


@both_layouts
@pytest.mark.parametrize("same_keys", [False, True], ids=["random keys", "the same keys"])
def test_no_p_is_beyond_the_largest_number(same_keys, v_by_columns):
    """FA#2577, FA#2716: one query, where every P may be the largest."""
    for seqlen_k in (127, 128, 129, 132, 131_072):
        q, k, v = draw(Shape(1, 1, seqlen_k, 6, 1), 128)
        k = k[:, :1].expand_as(k) if same_keys else k
        quantized = laid_out(to_gpu(fa3.quantize(q, k, v, hadamard=False)), v_by_columns)
        check(seqlen_k, attend(quantized), expect(quantized))


def long_sums() -> Iterator[tuple[int, fa3.Quantized]]:
    """vllm#23813, FA#2250: V without a sign, so that no error is hidden by another."""
    for seqlen_k in (2048, 16_384, 131_072):
        q, k, v = draw(Shape(1, 64, seqlen_k, 2, 2), 128)
        yield seqlen_k, to_gpu(fa3.quantize(q, k, v.abs(), hadamard=False))


@both_layouts
def test_a_long_sum_in_two_levels_does_not_drift(v_by_columns):
    config = Config(tile_m=128, tile_n=64, stages=4, pingpong=False, two_level_accumulation=True)
    errors = {}
    for seqlen_k, quantized in long_sums():
        quantized = laid_out(quantized, v_by_columns)
        results, exact = attend(quantized, config=config), expect(quantized)
        check(seqlen_k, results, exact, DRIFT)
        errors[seqlen_k] = ((results[0].double() - exact[0]).norm() / exact[0].norm()).item()
    assert errors[131_072] <= 2 * errors[2048], errors


@pytest.mark.xfail(strict=True, reason="the tensor cores do not add up 8-bit products in full fp32")
def test_a_long_sum_in_one_level_does_not_drift():
    for seqlen_k, quantized in long_sums():
        check(seqlen_k, attend(quantized), expect(quantized), DRIFT_OF_ONE_SUM)


@both_layouts
def test_scales_of_v_that_are_far_apart(v_by_columns):
    """V's scale is a bias of the scores: neither may a large one overflow P, nor a small one lose its block's keys."""
    shape = Shape(1, 130, 644)
    for factors in ((1e-3, 1.0, 1e3, 1.0, 1e-3, 1.0), (1e3, 1e-3, 1e3, 1e-3, 1e3, 1e-3), (1e-6,) * 6, (1e6,) * 6):
        quantized = make(shape, 64, v_by_columns=v_by_columns)
        quantized = quantized._replace(descale_v=quantized.descale_v * torch.tensor(factors, device="cuda"))
        check(factors, attend(quantized), expect(quantized))


# ---- Blocks of 96 keys, whose parts may have two scales


def wide(head_dim: int) -> Config:
    """With Q in shared memory alone, which at head_dim 128 leaves registers for 192 rows."""
    tile_m, stages = (128, 2) if head_dim > 128 else (192, 3)
    return Config(tile_m=tile_m, tile_n=96, stages=stages, pingpong=False)


# One, two, three, five and seven blocks, exactly and with one key more or less, and the same of what shares a scale.
LENGTHS_OF_96 = sorted({n * block + extra for block in (96, 128) for n in (1, 2, 3, 5, 7) for extra in (-1, 0, 1)})


@both_layouts
@full_and_causal
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_blocks_of_96_keys(head_dim, causal, v_by_columns):
    shapes = [
        *(Shape(1, 130, length) for length in LENGTHS_OF_96),
        Shape(9, 193, 257, 17, 17),
        Shape(2, 600, 193, 4, 2),
    ]
    for shape in shapes:
        for scales in SCALES:
            quantized = make(shape, head_dim, scales, v_by_columns)
            results = attend(quantized, causal=causal, config=wide(head_dim))
            check((shape, scales), results, expect(quantized, causal=causal))


@both_layouts
@pytest.mark.parametrize("mask", [{"window": (100, 30)}, {"causal": True, "softcap": 5.0}], ids=str)
def test_blocks_of_96_keys_with_windows_and_softcap(mask, v_by_columns):
    for shape in (Shape(2, 385, 388, 4, 2), Shape(1, 130, 1100)):
        quantized = make(shape, 256, v_by_columns=v_by_columns)
        check((shape, mask), attend(quantized, config=wide(256), **arguments_of(mask)), expect(quantized, **mask))


@both_layouts
def test_scales_that_are_far_apart_in_a_block_of_96_keys(v_by_columns):
    factors = torch.tensor((1e-3, 1.0, 1e3, 1.0, 1e-3, 1.0), device="cuda")
    for of_v in (factors, factors.flip(0)):
        quantized = make(Shape(1, 130, 644), 64, v_by_columns=v_by_columns)
        quantized = quantized._replace(
            descale_k=quantized.descale_k * factors.clamp(0.1, 10), descale_v=quantized.descale_v * of_v
        )
        check(of_v, attend(quantized, config=wide(64)), expect(quantized))


# ---- Optimistic exponentials


FACTORS = (1.0, 0.5, 0.0, -1.0, 1.0, 2.0, 0.25)  # of the scores in a row, row after row
# Scores of five blocks of 128 keys. Lowered by 2^3 or 2^4, a flat row has sums of up to 384; a rise by 0.15 is a factor
# of 1.16, by 0.55 of 1.73, by 0.56 of 1.75: below the limit of 448 and above it.
LATE_MAXIMA = {
    "all equal": (1.0,) * 5,
    "near the limit": (1.55, 1.15, 1.0, 1.0, 1.0),
    "beyond it": (1.8, 1.6, 1.56, 1.0, 1.0),
    "rising by 3 a block": (13.0, 10.0, 7.0, 4.0, 1.0),
    "rising by 30 a block": (121.0, 91.0, 61.0, 31.0, 1.0),
    **{f"{height} at last": (height, 1.0, 1.0, 1.0, 1.0) for height in (80.0, 86.0, 88.0, 90.0, 1000.0)},
    "40 and 2000, far apart": (2000.0, 1.0, 1.0, 40.0, 1.0),
    "falling": (1.0, 4.0, 7.0, 10.0, 1000.0),
}
OPTIMISTS = {
    "64": (64, None),
    "128": (128, None),
    "256": (256, None),
    "64 x 96": (64, wide(64)),
    "in order": (64, Config(tile_m=128, tile_n=64, pingpong=False, overlap_gemm_softmax=False)),
    "two levels": (64, Config(tile_m=128, tile_n=64, pingpong=False, two_level_accumulation=True)),
    "not optimistic": (64, Config(tile_m=128, tile_n=64, pingpong=False, optimistic_exp=False)),
}


@both_layouts
@full_and_causal
@pytest.mark.parametrize(("head_dim", "config"), OPTIMISTS.values(), ids=OPTIMISTS)
def test_maxima_that_come_late(head_dim, config, causal, v_by_columns):
    """P outgrows e4m3 a little, a lot, or beyond all fp32 numbers, in some rows of a warp and not in others.

    Scores are exact: Q holds FACTORS, K ones, and the scales of K are the scores.
    """
    shape = Shape(1, 200, 640, 4, 2)
    for name, scores in LATE_MAXIMA.items():
        q, k, v, descale_q, descale_k, descale_v = make(shape, head_dim, v_by_columns=v_by_columns)
        factors = torch.tensor(FACTORS, device="cuda").repeat(-(-shape.seqlen_q // len(FACTORS)))[: shape.seqlen_q]
        quantized = fa3.Quantized(
            factors[None, :, None, None].expand(q.shape).to(E4M3),
            torch.ones(k.shape, device="cuda").to(E4M3),
            v,
            torch.full_like(descale_q, head_dim**-0.5),
            torch.tensor(scores, device="cuda").expand_as(descale_k).contiguous(),
            descale_v,
        )
        results = attend(quantized, causal=causal, config=config)
        # Equal P are all rounded the same way, by up to 2^-4.
        check((name, causal), results, expect(quantized, causal=causal), ROUNDING_OF_ALL)


@both_layouts
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_first_key_of_a_row_in_a_block_that_all_see(head_dim, v_by_columns):
    """Behind it lie blocks of which the row sees nothing: it has no shift yet."""
    problem = Problem(1, 200, 600, 2, 2, head_dim, dtype=E4M3, causal=True)
    tile_n = default_fp8_config(problem, v_by_columns).tile_n
    for blocks in (1, 2, 5):
        offset = blocks * tile_n - 1  # query i faces key i + offset
        shapes = [Shape(1, 301, 301 + offset), Shape(2, 133, 133 + offset, 4, 2)]
        hold(shapes, head_dim, v_by_columns, causal=True)


@both_layouts
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_key_that_is_nan_is_seen_by_its_own_rows_alone(head_dim, v_by_columns):
    quantized, first = make(Shape(1, 300, 300, 4, 2), head_dim, v_by_columns=v_by_columns), 200
    quantized.k.view(torch.uint8)[:, first] = 0x7F
    out, lse = attend(quantized, causal=True)
    assert out[:, first:].isnan().all()
    assert lse[..., first:].isnan().all()
    q, k, v, descale_q, *descales = quantized
    earlier = fa3.Quantized(
        q[:, :first],
        k[:, :first],
        v[:, :first],
        descale_q[..., : -(-first // Q_BLOCK)],
        *(x[..., : -(-first // KV_BLOCK)] for x in descales),
    )
    check("rows before", (out[:, :first], lse[..., :first]), expect(earlier, causal=True))


# ---- Packed sequences


class Packed(NamedTuple):
    """Sequences one after the other."""

    quantized: fa3.Quantized
    bounds: tuple[Tensor, Tensor]  # cu_seqlens
    longest: tuple[int, int]
    rows: list[tuple[slice, slice]]  # queries and keys of each sequence


# Nothing before, between and after; keys without queries, queries without keys; tiles that end anywhere.
MIXED = ([0, 1, 64, 65, 0, 200, 385, 3, 0, 130, 0], [0, 5, 64, 129, 70, 0, 385, 600, 0, 1, 3])
SEVERAL_ROUNDS = ([257, 0, 130, 1] * 5, [193, 7, 257, 0] * 5)
Lengths = tuple[list[int], list[int]]


def pack(lengths: Lengths, head_dim: int, scales: str = "block", heads: tuple[int, int] = (4, 2)) -> Packed:
    total_q, total_k = map(sum, lengths)
    q, k, v = (x[0] for x in draw(Shape(1, total_q, total_k, *heads), head_dim))
    bounds = tuple(torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in lengths)
    longest = tuple(map(partial(max, default=0), lengths))
    sequences = dict(
        zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*bounds, *longest), strict=True)
    )
    quantized = fa3.quantize(q, k, v, scales=scales, hadamard=False, **sequences)
    sides = ([slice(*ends) for ends in pairwise(bound.tolist())] for bound in bounds)
    return Packed(to_gpu(quantized), tuple(x.cuda() for x in bounds), longest, list(zip(*sides, strict=True)))


def attend_packed(packed: Packed, **options) -> tuple[Tensor, Tensor]:
    q, k, v, *descales = packed.quantized
    scales = dict(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))
    return fa3.flash_attn_varlen_func(q, k, v, *packed.bounds, *packed.longest, **scales, return_lse=True, **options)


def each(packed: Packed) -> Iterator[tuple[slice, fa3.Quantized]]:
    """The queries of each sequence, and it alone; not those that have none."""
    q, k, v, *descales = packed.quantized
    for i, (queries, keys) in enumerate(packed.rows):
        own = [x if x.ndim == 1 else x[i : i + 1] for x in descales]
        if queries.start < queries.stop:
            yield queries, fa3.Quantized(q[None, queries], k[None, keys], v[None, keys], *own)


def expect_packed(packed: Packed, **mask) -> tuple[Tensor, Tensor]:
    q = packed.quantized.q
    out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64, device="cuda")
    for queries, alone in each(packed):
        if alone.k.shape[1]:
            exact = expect(alone, **mask)
            out[queries], lse[:, queries] = (x[0] for x in exact)
    return out, lse


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        (64, {}),
        (64, {"causal": True}),
        (64, {"window": (40, 9)}),
        (128, {"causal": True}),
        (256, {"causal": True, "softcap": 5.0}),
    ],
    ids=str,
)
def test_packed_sequences(head_dim, mask):
    for lengths, heads in ((MIXED, (4, 2)), (MIXED, (3, 3)), (SEVERAL_ROUNDS, (18, 6))):
        packed = pack(lengths, head_dim, heads=heads)
        results = attend_packed(packed, **arguments_of(mask))
        check((lengths, heads), results, expect_packed(packed, **mask))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_few_queries_of_several_heads_share_a_tile(head_dim, scales):
    """And have scales of their own, packed and dense, by rows and by columns."""
    for heads in ((4, 2), (12, 2)):
        packed = pack(([1, 16, 5, 0, 9], [300, 100, 0, 4, 129]), head_dim, scales, heads=heads)
        expected = expect_packed(packed, causal=True)
        check((scales, heads), attend_packed(packed, causal=True), expected, ROUNDING_IN_FEW_ROWS)
        for seqlen_q, v_by_columns in product((1, 16), (False, True)):
            quantized = make(Shape(2, seqlen_q, 272, *heads), head_dim, scales, v_by_columns)
            name = scales, heads, seqlen_q, v_by_columns
            check(name, attend(quantized), expect(quantized), ROUNDING_IN_FEW_ROWS)


@pytest.mark.parametrize("config", [None, wide(64)], ids=["default", "96 keys"])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_packed_sequences(scales, config):
    for lengths in (MIXED, SEVERAL_ROUNDS):
        packed = pack(lengths, 64, scales, heads=(6, 2))
        results = attend_packed(packed, causal=True, config=config)
        check((scales, lengths), results, expect_packed(packed, causal=True))


def test_nothing_leaks_from_one_packed_sequence_into_another():
    """FA#1745, FA#2374: 0 * NaN is NaN; also of what lies before the first and behind the last."""
    packed = pack(([65, 10, 70, 130, 5, 3], [100, 0, 300, 193, 40, 0]), 64)
    expected = attend_packed(packed, causal=True)
    check("without NaN", expected, expect_packed(packed, causal=True))
    q, k, v, *descales = packed.quantized
    q, k, v = (x.new_full((x.shape[0] + 400, *x.shape[1:]), torch.nan)[200:-200].copy_(x) for x in (q, k, v))
    for i in (2, 4):
        queries, keys = packed.rows[i]
        for x, rows in ((q, queries), (k, keys), (v, keys)):
            x[rows] = torch.nan
    out, lse = attend_packed(packed._replace(quantized=fa3.Quantized(q, k, v, *descales)), causal=True)
    for i in (0, 1, 3, 5):
        queries, _ = packed.rows[i]
        results, clean = ((x[queries], y[:, queries]) for x, y in ((out, lse), expected))
        assert_same_bits(results, clean, f"sequence {i}")


# ---- Memory


@full_and_causal
@pytest.mark.parametrize("view", ["inside NaN", "projection", "heads before seqlen", "expanded batch", "off by one"])
def test_views_give_the_same_bits_as_copies(causal, view):
    q, k, v, *descales = make(Shape(2, 193, 193), 64)
    if view == "inside NaN":  # FA#1745: what lies beyond the end of a sequence, a head or a row
        q, k, v = (inside_nan(x) for x in (q, k, v))
    elif view == "projection":  # FA#2541
        q, k, v = torch.stack([x.view(torch.uint8) for x in (q, k, v)], dim=2).view(E4M3).unbind(2)
    elif view == "heads before seqlen":  # FA#818; the scales too
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        descales = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in descales]
    elif view == "expanded batch":  # FA#2745
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    else:  # FA#2745: a base pointer that no 16-byte load can start at
        q, k, v = (off_by_one(x) for x in (q, k, v))
    copies = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v, *descales))
    expected = attend(fa3.Quantized(*copies), causal=causal)
    assert_same_bits(attend(fa3.Quantized(q, k, v, *descales), causal=causal), expected, view)


@full_and_causal
@pytest.mark.parametrize("poison", [0xA5, 0xFF])  # a small number; NaN
def test_every_output_element_is_written_and_nothing_else(causal, poison, monkeypatch):
    """FA#1155: out and LSE each in the middle of a buffer, whose margins keep what they held."""
    buffers, margin = [], 4096

    def allocation(shape, dtype, device):
        def allocate():
            size = torch.Size(shape).numel() * dtype.itemsize
            buffer = torch.full((margin + size + margin,), poison, dtype=torch.uint8, device=device)
            buffers.append((buffer, size))
            return buffer[margin : margin + size].view(dtype).view(shape)

        return allocate

    for shape in (Shape(2, 193, 257), Shape(2, 1, 1), Shape(2, 129, 64, 4, 2)):
        quantized = make(shape, 64)
        expected = attend(quantized, causal=causal)
        buffers.clear()
        with monkeypatch.context() as patched:
            patched.setattr(fp8, "_runs", Prepared())  # a prepared run would allocate as it was told to
            patched.setattr(fp8_launch, "allocation", allocation)
            results = attend(quantized, causal=causal)
        assert_same_bits(results, expected, shape)
        assert len(buffers) == 2
        for buffer, size in buffers:
            assert (buffer[:margin] == poison).all(), f"{shape}: written before"
            assert (buffer[margin + size :] == poison).all(), f"{shape}: written behind"


# ---- Bits, graphs


@full_and_causal
def test_runs_repeat_bitwise(causal):
    quantized = make(Shape(9, 385, 385, 18, 6), 64)
    expected = attend(quantized, causal=causal)
    for run in range(20):
        assert_same_bits(attend(quantized, causal=causal), expected, f"run {run}")


@full_and_causal
def test_a_sequence_does_not_depend_on_its_batch(causal):
    """FA#1897."""
    quantized = make(Shape(64, 257, 257, 4, 2), 64)
    out, lse = attend(quantized, causal=causal)
    for i in (0, 13, 63):
        alone = fa3.Quantized(*(x[i : i + 1] for x in quantized))
        assert_same_bits(attend(alone, causal=causal), (out[i : i + 1], lse[i : i + 1]), f"batch entry {i}")


def test_packed_sequences_have_the_bits_of_dense_ones():
    config = default_fp8_config(Problem(1, 385, 600, 4, 2, 64, dtype=E4M3, causal=True, varlen=True))
    packed, options = pack(MIXED, 64), {"causal": True, "config": config}
    out, lse = attend_packed(packed, **options)
    for queries, alone in each(packed):
        if alone.k.shape[1]:
            blocks_q, blocks_k = -(-alone.q.shape[1] // Q_BLOCK), -(-alone.k.shape[1] // KV_BLOCK)
            used = (blocks_q, blocks_k, blocks_k)
            own = [x[..., :number] for x, number in zip(alone[3:], used, strict=True)]
            dense = attend(fa3.Quantized(*alone[:3], *own), **options)
            assert_same_bits([x[0] for x in dense], (out[queries], lse[:, queries]), queries)


def test_the_last_query_alone_sees_what_it_sees_among_the_others():
    """Decoding after a prefill."""
    for seqlen in (128, 300, 1025):
        quantized = make(Shape(2, seqlen, seqlen, 6, 2), 128)
        out, lse = attend(quantized, causal=True)
        last = quantized._replace(q=quantized.q[:, -1:], descale_q=quantized.descale_q[..., -1:])
        check(seqlen, attend(last, causal=True), (out[:, -1:].double(), lse[..., -1:].double()))


def test_a_captured_graph_replays_with_new_inputs():
    shape = Shape(2, 257, 129, 4, 2)
    quantized = make(shape, 64)
    attend(quantized, causal=True)  # compiles, outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(quantized, causal=True)
    for _ in range(2):
        fresh = make(shape, 64)
        for static, new in zip(quantized, fresh, strict=True):
            static.copy_(new)
        graph.replay()
        assert_same_bits(results, attend(fresh, causal=True))


# ---- With quantization


@pytest.mark.parametrize("scales", SCALES)
def test_from_16_bit_tensors_to_16_bit_tensors(scales):
    """Against float64 of the tensors before they were quantized."""
    for shape in (Shape(2, 257, 385, 6, 2), Shape(2, 600, 193, 4, 1)):
        q, k, v = (x.cuda() for x in draw(shape, 64))
        for causal in (False, True):
            out, lse = fa3.flash_attn_fp8_func(q, k, v, causal=causal, scales=scales, return_lse=True)
            assert out.dtype == q.dtype
            exact, exact_lse = reference.attention(q, k, v, causal=causal)
            assert (out.double() - exact).norm() <= ROUNDING_OF_ALL * exact.norm(), (shape, causal)
            assert torch.equal(lse.isneginf(), exact_lse.isneginf())


def test_the_kernels_agree_with_the_algorithms():
    """Quantization and attention on the GPU, and both on the CPU."""
    tensors = draw(Shape(2, 193, 257, 4, 2), 64)
    options = {"causal": True, "return_lse": True}
    out, lse = fa3.flash_attn_fp8_func(*tensors, **options)
    results = fa3.flash_attn_fp8_func(*(x.cuda() for x in tensors), **options)
    check("GPU and CPU", results, (out.double().cuda(), lse.double().cuda()))
