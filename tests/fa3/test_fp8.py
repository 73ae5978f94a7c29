"""FP8 on a CPU: e4m3 numbers, scales and rotation, attention against the reference, refusals.

Attention is compared with the reference on the numbers that the e4m3 tensors stand for, so that what is left is the
rounding of P. "FA#2577" and the like name the public report of the input that once broke an attention kernel.
"""

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import fa
import fa3
import fa_common.generation as generation_module
from fa3 import algorithm, fp8, fp8_arguments, fp8_launch
from fa3.config import KV_BLOCK, Q_BLOCK, Config, default_fp8_config
from fa_common import reference
from fa_common.generation import ALIGNMENT
from fa_common.memory import Memory
from fa_common.problem import UnsupportedProblem
from fa_common.switches import without

E4M3 = torch.float8_e4m3fn
SCALES = ("tensor", "head", "block")
BLOCKS = (Q_BLOCK, KV_BLOCK, KV_BLOCK)

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 20)},
    "window of the past": {"window_size": (150, 0)},
    "softcap": {"softcap": 1.5},
    "softcap, causal, window": {"softcap": 0.7, "causal": True, "window_size": (100, None)},
}


def tensors(seqlen_q=150, seqlen_k=300, heads_q=4, heads_kv=2, head_dim=32, batch=2, dtype=torch.float32):
    q = torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype)
    k, v = torch.randn(2, batch, seqlen_k, heads_kv, head_dim).to(dtype)
    return q, k, v


def dequantized(quantized):
    """The numbers that dense e4m3 tensors stand for, float64."""
    numbers = []
    for x, descale, block in zip(quantized[:3], quantized[3:], BLOCKS, strict=True):
        seqlen, heads = x.shape[1:3]
        if descale.ndim == 3:
            descale = descale.repeat_interleave(block, 2)[..., :seqlen].transpose(1, 2)[..., None]
        elif descale.ndim == 2:
            descale = descale.repeat_interleave(heads // descale.shape[1], 1)[:, None, :, None]
        numbers.append(x.double() * descale.double())
    return numbers


def check(quantized, config=None, **options):
    """Out within what rounding P to e4m3 makes of it, LSE within what fp32 does.

    e4m3 numbers lie 2^-3 of their power of two apart, so a P is off by at most 2^-4 of itself; below the least normal
    number, 2^-6, they lie 2^-9 apart, and P by up to 2^-10. The first adds up to 2^-4 of what attention makes of |V|. A
    row sum is at least that of its largest P, 256, in units of V's scale, so the second adds at most
    2^-10 * 448 * seqlen_k / 256 of that. To both the rounding of out to bf16, 2^-9.
    """
    out, lse = fa3.flash_attn_func(**quantized._asdict(), return_lse=True, config=config, **options)
    left, right = options.pop("window_size", (None, None))
    q, k, v = dequantized(quantized)
    exact, exact_lse = reference.attention(q, k, v, window=(left, right), **options)
    of_magnitudes, _ = reference.attention(q, k, v.abs(), window=(left, right), **options)
    bound = 2**-4 * of_magnitudes + 2**-18 * 448 * k.shape[1] * quantized.descale_v.max() + 2**-9 * exact.abs()
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= bound + 1e-6).all()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    assert not out[exact_lse.isneginf().transpose(1, 2)].any()


# ---- e4m3 numbers


def encodings():
    """Every e4m3 number, in the order of its bits: 0 up to 448 and NaN, then the same below 0."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3)


def bits(x):
    return x.view(torch.uint8)


def same(x, y):
    """Bitwise, which torch.equal cannot say of e4m3."""
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_e4m3_numbers_stay_what_they_are(dtype):
    numbers = encodings().to(dtype)
    made = algorithm.to_e4m3(numbers)
    is_nan = numbers.isnan()
    assert is_nan.sum() == 2
    assert same(made[~is_nan], encodings()[~is_nan])
    assert made[is_nan].float().isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_half_way_between_two_numbers_the_even_one_is_taken(sign):
    numbers = encodings()[:127].float()
    lower, upper = sign * numbers[:-1], sign * numbers[1:]
    middle = (lower + upper) / 2
    is_even = torch.arange(126) % 2 == 0
    assert torch.equal(algorithm.to_e4m3(middle).float(), torch.where(is_even, lower, upper))
    assert torch.equal(algorithm.to_e4m3(torch.nextafter(middle, lower)).float(), lower)
    assert torch.equal(algorithm.to_e4m3(torch.nextafter(middle, upper)).float(), upper)


def test_beyond_the_largest_number_it_saturates():
    large = torch.tensor([448.1, 463.0, 464.0, 464.1, 480.0, 1e6, 3e38, torch.inf])
    assert (algorithm.to_e4m3(large).float() == 448).all()
    assert (algorithm.to_e4m3(-large).float() == -448).all()


# ---- Quantization


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("head_dim", [16, 48, 96, 128, 256])
def test_values_and_scales(scales, head_dim):
    given = tensors(head_dim=head_dim)
    quantized = fa3.quantize(*given, scales=scales, hadamard=False)
    shapes = {"tensor": [(1,)] * 3, "head": [(2, 2)] * 3, "block": [(2, 4, 3), (2, 2, 3), (2, 2, 3)]}[scales]
    assert [tuple(x.shape) for x in quantized[3:]] == shapes
    assert all(x.dtype == torch.float32 for x in quantized[3:])
    assert all(x.dtype == E4M3 and x.shape == y.shape for x, y in zip(quantized[:3], given, strict=True))
    for x, number, descale in zip(given, dequantized(quantized), quantized[3:], strict=True):
        assert ((number - x).abs() <= 2**-4 * x.abs() + 2**-10 * descale.max()).all()


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 193])
def test_the_largest_of_each_block_becomes_the_largest_number(seqlen):
    q, k, v = tensors(seqlen, seqlen)
    quantized = fa3.quantize(q, k, v, hadamard=False)
    for x, value, descale, block in zip((q, k, v), quantized[:3], quantized[3:], BLOCKS, strict=True):
        for i, (rows, values) in enumerate(zip(x.split(block, 1), value.float().split(block, 1), strict=True)):
            assert torch.equal(descale[..., i], rows.abs().amax((1, 3)) / 448)
            assert (values.abs().amax((1, 3)) == 448).all()


@pytest.mark.parametrize("scales", SCALES)
def test_query_heads_share_the_scale_of_their_head_of_k_and_v(scales):
    q, k, v = tensors()
    q[:, :, 0] *= 100
    descale_q = fa3.quantize(q, k, v, scales=scales, hadamard=False).descale_q
    if scales == "tensor":
        assert torch.equal(descale_q, q.abs().amax()[None] / 448)
    elif scales == "head":
        assert (descale_q[:, 0] > 50 * descale_q[:, 1]).all(), "heads 0 and 1, heads 2 and 3"
    else:
        assert (descale_q[:, 0] > 50 * descale_q[:, 1]).all(), "each head by itself"


@pytest.mark.parametrize("scales", SCALES)
def test_nothing_but_zeros_has_scale_1(scales):
    quantized = fa3.quantize(*(torch.zeros_like(x) for x in tensors()), scales=scales)
    assert all((x == 1).all() for x in quantized[3:])
    assert not any(x.float().any() for x in quantized[:3])


def test_a_block_of_zeros_does_not_change_the_others():
    q, k, v = tensors()
    expected = fa3.quantize(q, k, v)
    k[:, KV_BLOCK : 2 * KV_BLOCK] = 0
    quantized = fa3.quantize(q, k, v)
    assert (quantized.descale_k[..., 1] == 1).all()
    assert torch.equal(quantized.descale_k[..., ::2], expected.descale_k[..., ::2])
    assert same(quantized.k[:, :KV_BLOCK], expected.k[:, :KV_BLOCK])


def test_numbers_too_small_for_a_scale_become_zero():
    quantized = fa3.quantize(*(torch.full_like(x, 2.0**-110) for x in tensors()))
    assert all((x == 1).all() for x in quantized[3:])
    assert not any(x.float().any() for x in quantized[:3])


def test_small_numbers_have_a_scale():
    quantized = fa3.quantize(*(torch.full_like(x, 2.0**-100) for x in tensors()), hadamard=False)
    assert all((x == 2.0**-100 / 448).all() for x in quantized[3:])
    assert all((x.float() == 448).all() for x in quantized[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_quantized_as_the_numbers_they_are(dtype):
    given = tensors(dtype=dtype)
    for made, expected in zip(fa3.quantize(*given), fa3.quantize(*(x.float() for x in given)), strict=True):
        assert same(made, expected)


# ---- Rotation


def sylvester(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / size**0.5


@pytest.mark.parametrize(("head_dim", "run"), [(16, 16), (48, 16), (96, 32), (128, 128), (240, 16), (256, 256)])
def test_the_rotation_is_hadamards(head_dim, run):
    signs = fp8.random_signs(head_dim, 0, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    matrix = signs.double().diag() @ torch.block_diag(*[sylvester(run)] * (head_dim // run))
    rotated = algorithm.rotate(torch.eye(head_dim), signs)
    torch.testing.assert_close(rotated.double(), matrix, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rotated @ rotated.mT, torch.eye(head_dim))


@pytest.mark.parametrize("head_dim", [16, 48, 96, 128, 256])
def test_the_rotation_keeps_the_scores(head_dim):
    q, k, _ = tensors(head_dim=head_dim, heads_kv=4)
    signs = fp8.random_signs(head_dim, 3, torch.device("cpu"))
    rotated = torch.einsum("bmhd,bnhd->bhmn", algorithm.rotate(q, signs), algorithm.rotate(k, signs))
    torch.testing.assert_close(rotated, torch.einsum("bmhd,bnhd->bhmn", q, k), rtol=1e-4, atol=1e-4)


def test_an_outlier_is_spread_over_its_row():
    rotated = algorithm.rotate(torch.eye(128)[5] * 100, fp8.random_signs(128, 0, torch.device("cpu")))
    torch.testing.assert_close(rotated.abs(), torch.full((128,), 100 / 128**0.5))


def test_v_is_not_rotated():
    given = tensors()
    rotated, plain = (fa3.quantize(*given, hadamard=hadamard) for hadamard in (True, False))
    assert same(rotated.v, plain.v)
    assert torch.equal(rotated.descale_v, plain.descale_v)
    assert not same(rotated.k, plain.k)


def test_a_seed_gives_the_same_signs_each_time():
    given = tensors()
    first, again, other = (fa3.quantize(*given, seed=seed) for seed in (7, 7, 8))
    assert all(same(x, y) for x, y in zip(first, again, strict=True))
    assert not same(first.q, other.q)
    assert same(first.v, other.v)


# ---- Attention


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
def test_against_the_reference(heads, scales, mask):
    heads_q, heads_kv = heads
    check(fa3.quantize(*tensors(heads_q=heads_q, heads_kv=heads_kv), scales=scales), **MASKS[mask])


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 128, 256])
def test_head_dims(head_dim):
    check(fa3.quantize(*tensors(70, 140, head_dim=head_dim)), causal=True)


@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 127, 128, 129, 255, 257, 385])
@pytest.mark.parametrize("seqlen_q", [1, 65, 129])
def test_lengths_around_the_blocks(seqlen_q, seqlen_k):
    """Causal: with more queries than keys the first rows see none (FA#1778)."""
    check(fa3.quantize(*tensors(seqlen_q, seqlen_k, batch=1)), causal=True)


@pytest.mark.parametrize("tiles", [(64, 64), (128, 64), (128, 96), (192, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_tiles_need_not_be_the_blocks(scales, tiles):
    tile_m, tile_n = tiles
    config = Config(tile_m=tile_m, tile_n=tile_n, pingpong=tile_m > 64)
    check(fa3.quantize(*tensors(200, 500), scales=scales), config, causal=True)


def test_the_error_of_normal_numbers_is_that_of_rounding():
    """Independent roundings, each 2^-4 / sqrt(3) of a number at most on average, mostly cancel."""
    quantized = fa3.quantize(*tensors(256, 1024, head_dim=64))
    out = fa3.flash_attn_func(**quantized._asdict())
    exact, _ = reference.attention(*dequantized(quantized))
    assert (out - exact).norm() < 2**-4 / 3**0.5 * exact.norm()


def test_scales_of_every_form_say_the_same():
    """What is left out is 1; each form of one and the same scale gives the same bits (vllm#51363)."""
    quantized = fa3.quantize(*tensors(), hadamard=False, scales="tensor")
    q, k, v, *descales = quantized
    expected = fa3.flash_attn_func(**quantized._asdict(), return_lse=True)
    of_heads = [x.expand(2, 2).contiguous() for x in descales]
    of_blocks = [x.expand(shape) for x, shape in zip(descales, ((2, 4, 3), (2, 2, 3), (2, 2, 3)), strict=True)]
    for descale_q, descale_k, descale_v in ([x[0] for x in descales], of_heads, of_blocks):
        scales = {"descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v}
        results = fa3.flash_attn_func(q, k, v, **scales, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    ones = dict.fromkeys(("descale_q", "descale_k", "descale_v"), torch.ones(()))
    assert torch.equal(fa3.flash_attn_func(q, k, v), fa3.flash_attn_func(q, k, v, **ones))


def test_scales_that_differ_by_far():
    q, k, v = tensors(heads_q=2)
    v[:, :, 0] *= 1e4
    v[:, KV_BLOCK : 2 * KV_BLOCK] *= 1e-3
    k[:, :, 1] *= 0.1
    for scales in SCALES:
        check(fa3.quantize(q, k, v, scales=scales))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_out_has_the_type_asked_for(dtype):
    quantized = fa3.quantize(*tensors())
    out = fa3.flash_attn_func(**quantized._asdict(), out_dtype=dtype)
    assert out.dtype == dtype
    expected = fa3.flash_attn_func(**quantized._asdict(), out_dtype=torch.float16).double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_from_sixteen_bits_in_one_call(dtype):
    q, k, v = tensors(dtype=dtype)
    options = {"causal": True, "window_size": (90, None), "softcap": 3.0, "softmax_scale": 0.3}
    results = fa3.flash_attn_fp8_func(q, k, v, **options, return_lse=True, scales="head", seed=3)
    quantized = fa3.quantize(q, k, v, scales="head", seed=3)
    expected = fa3.flash_attn_func(**quantized._asdict(), **options, return_lse=True, out_dtype=dtype)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert torch.equal(fa3.flash_attn_fp8_func(q, k, v, **options, scales="head", seed=3), expected[0])


def test_views_are_read_as_what_they_are():
    quantized = fa3.quantize(*tensors())
    expected = fa3.flash_attn_func(**quantized._asdict())
    views = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in quantized[:3])
    scales = (torch.stack((x, x), -1)[..., 0] for x in quantized[3:])
    assert torch.equal(fa3.flash_attn_func(**fa3.Quantized(*views, *scales)._asdict()), expected)


def test_v_of_a_multiple_of_sixteen_keys_is_quantized_by_columns():
    for num_keys, strides in ((304, (2 * 32 * 304, 1, 32 * 304, 304)), (300, (300 * 64, 64, 32, 1))):
        q, k, v = tensors(seqlen_k=num_keys)
        made = fa3.quantize(q, k, v)
        assert made.v.stride() == strides
        assert all(x.is_contiguous() for x in made if x is not made.v)
        values, descale = algorithm.quantize(v, "block", 2, KV_BLOCK)
        assert torch.equal(made.v.float(), values.float())
        assert torch.equal(made.descale_v, descale)
    one = {"cu_seqlens_q": torch.tensor([0, 150], dtype=torch.int32), "max_seqlen_q": 150}
    one |= {"cu_seqlens_k": torch.tensor([0, 304], dtype=torch.int32), "max_seqlen_k": 304}
    assert fa3.quantize(*(x[0] for x in tensors(seqlen_k=304)), **one).v.is_contiguous()


def test_it_does_not_matter_how_v_lies():
    quantized, config = fa3.quantize(*tensors(seqlen_k=304)), Config(tile_n=64)
    results = [
        fa3.flash_attn_func(**quantized._replace(v=v)._asdict(), config=config, return_lse=True)
        for v in (quantized.v, quantized.v.contiguous())
    ]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_it_reads_half_the_bytes_and_computes_as_much():
    quantized = fa3.quantize(*tensors(128, 256, heads_q=2), scales="tensor")
    options = {"softmax_scale": 1.0, "config": SimpleNamespace(tile_m=64, tile_n=128)}
    fp8_memory, memory = Memory(), Memory()
    one = torch.ones(2, 2, 2)
    algorithm.forward_fp8(*quantized[:3], one, one, one, memory=fp8_memory, **options)
    algorithm.forward(*(x.bfloat16() for x in quantized[:3]), memory=memory, **options)
    num_tiles = 4 * 2 * 2  # (batch * heads) * query blocks * key blocks
    scales = 4 * (num_tiles // 2 + 2 * num_tiles)
    assert fp8_memory.bytes_read - scales == memory.bytes_read // 2
    assert fp8_memory.bytes_written == memory.bytes_written
    assert fp8_memory.matmul_flops == memory.matmul_flops


# ---- Packed sequences


def packed(lengths_q, lengths_k, heads_q=4, heads_kv=2, head_dim=32, longer=0):
    q = torch.randn(sum(lengths_q), heads_q, head_dim)
    k, v = torch.randn(2, sum(lengths_k), heads_kv, head_dim)
    bounds = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    sequences = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))
    return (q, k, v), sequences | {"max_seqlen_q": max(lengths_q) + longer, "max_seqlen_k": max(lengths_k) + longer}


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([150, 1, 64], [300, 129, 1]), ([0, 70, 5], [20, 0, 128]), ([1, 0, 1], [3, 0, 5]), ([200], [100])],
    ids=str,
)
@pytest.mark.parametrize("scales", SCALES)
def test_packed_sequences_are_what_each_is_alone(scales, lengths_q, lengths_k):
    given, sequences = packed(lengths_q, lengths_k, longer=130)
    quantized = fa3.quantize(*given, **sequences, scales=scales)
    options = {"causal": True, "return_lse": True, "config": fa3.Config(tile_n=64)}
    results = fa3.flash_attn_varlen_func(**quantized._asdict(), **sequences, **options)
    lengths = (lengths_q, lengths_k, lengths_k)
    if scales == "tensor":  # one scale for all sequences
        split = zip(*(x.split(n) for x, n in zip(quantized[:3], lengths, strict=True)), strict=True)
        alone = [fa3.Quantized(*(x[None] for x in one), *quantized[3:]) for one in split]
    else:
        split = zip(*(x.split(n) for x, n in zip(given, lengths, strict=True)), strict=True)
        alone = [fa3.quantize(*(x[None] for x in one), scales=scales) for one in split]
    expected = [fa3.flash_attn_func(**one._asdict(), **options) for one in alone]
    outs, lses = ([x[0] for x in ones] for ones in zip(*expected, strict=True))
    assert torch.equal(results[0], torch.cat(outs))
    assert torch.equal(results[1], torch.cat(lses, 1))


def test_blocks_past_the_end_of_a_sequence_have_scale_1():
    given, sequences = packed([150, 1], [300, 129])
    quantized = fa3.quantize(*given, **sequences)
    assert [tuple(x.shape) for x in quantized[3:]] == [(2, 4, 3), (2, 2, 3), (2, 2, 3)]
    assert (quantized.descale_q[1, :, 1:] == 1).all()
    assert (quantized.descale_k[1, :, 2:] == 1).all()
    assert (quantized.descale_k[1, :, :2] < 1).all()


# ---- Inputs that broke other kernels


@pytest.fixture
def largest_p(monkeypatch):
    """The largest P that is rounded to e4m3."""
    seen = []

    def rounded(P, dtype):
        seen.extend(P.amax()[None].tolist() if P.numel() else [])
        return algorithm.to_e4m3(P).to(P.dtype)

    monkeypatch.setattr(algorithm, "rounded", rounded)
    return seen


@pytest.mark.parametrize("seqlen_k", [127, 128, 129, 130])
def test_p_does_not_saturate(seqlen_k, largest_p):
    """FA#2577, FA#2716: the keys just past a block."""
    q, k, v = tensors(1, seqlen_k, 6, 1, 128)
    check(fa3.quantize(q, k, v))
    check(fa3.quantize(q, torch.zeros_like(k), v))  # all scores equal: each P is the largest
    assert max(largest_p) == algorithm.P_MAX


def test_p_does_not_saturate_where_maxima_and_scales_rise(largest_p):
    """Key blocks are visited last to first: here scores and V's scales rise in that order."""
    q, k, v = tensors(64, 640, batch=1)
    steepness = torch.arange(640, 0, -1)[None, :, None, None] / 100
    check(fa3.quantize(q.abs(), k.abs() * steepness, v * steepness.exp()))
    assert max(largest_p) <= algorithm.P_MAX


@pytest.mark.parametrize("seqlen_k", [2048, 16384, 131072])
@pytest.mark.parametrize("scales", SCALES)
def test_the_error_does_not_grow_with_the_length(seqlen_k, scales):
    """vllm#23813, FA#2250: all-positive V, so that what is lost in adding up shows."""
    q, k, v = tensors(2, seqlen_k, 1, 1, 16, batch=1)
    quantized = fa3.quantize(q, k, v.abs(), scales=scales)
    exact, exact_lse = reference.attention(*dequantized(quantized))
    out, lse = fa3.flash_attn_func(**quantized._asdict(), return_lse=True, out_dtype=torch.float16)
    assert ((out - exact) / exact).abs().max() < 4e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("score", [0.0, -1e4, 1e4])
def test_one_score_for_all_keys(score):
    """FA#2082: out is the mean of V."""
    q, k = torch.ones(1, 3, 2, 16), torch.full((1, 200, 2, 16), score / 16)
    v = torch.randn(1, 200, 2, 16)
    quantized = fa3.quantize(q, k, v, hadamard=False)
    out, lse = fa3.flash_attn_func(**quantized._asdict(), softmax_scale=1.0, return_lse=True)
    mean = dequantized(quantized)[2].mean(1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.double(), mean, rtol=2**-4, atol=5e-3)
    torch.testing.assert_close(
        lse, torch.full_like(lse, score + torch.tensor(200.0).log().item()), rtol=1e-5, atol=1e-4
    )


def test_one_score_above_all():
    q, k, v = torch.ones(1, 1, 1, 16), torch.zeros(1, 300, 1, 16), torch.randn(1, 300, 1, 16)
    k[:, 7] = 1e4 / 16
    quantized = fa3.quantize(q, k, v, hadamard=False)
    out = fa3.flash_attn_func(**quantized._asdict(), softmax_scale=1.0)
    torch.testing.assert_close(out.double(), dequantized(quantized)[2][:, 7:8], rtol=2**-8, atol=0)


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_zeros(which):
    given = [torch.zeros_like(x) if which in (name, "all") else x for name, x in zip("qkv", tensors(), strict=True)]
    check(fa3.quantize(*given))


def test_softcap_far_below_the_scores():
    """vllm#56579: no key that the mask hides comes back."""
    q, k, v = tensors()
    check(fa3.quantize(100 * q, 100 * k, v), softcap=1.0, causal=True)
    check(fa3.quantize(100 * q, 100 * k, v), softcap=50.0)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_empty(scales, shape):
    batch, seqlen_q, seqlen_k = shape
    quantized = fa3.quantize(*tensors(seqlen_q, seqlen_k, batch=batch), scales=scales)
    out, lse = fa3.flash_attn_func(**quantized._asdict(), return_lse=True)
    assert torch.equal(out, torch.zeros(batch, seqlen_q, 4, 32, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))


def test_the_papers_table():
    """FA3's table 3, root mean square errors of Q, K and V with outliers: N(0, 1) + N(0, 100) * Bernoulli(0.001).

    The paper has 2.4e-2 for one scale and 9.1e-3 for blocks with rotation, 2.4e-2 without it, 9.3e-3 without blocks.
    """

    def draw():
        shape = (1, 2048, 1, 128)
        return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)

    q, k, v = draw(), draw(), draw()
    exact, _ = reference.attention(q, k, v)

    def error(scales, hadamard):
        quantized = fa3.quantize(q, k, v, scales=scales, hadamard=hadamard)
        out = fa3.flash_attn_func(**quantized._asdict(), out_dtype=torch.float16)
        return (out - exact).square().mean().sqrt().item()

    assert 1.2e-2 < error("tensor", False) < 2.4e-2
    assert 1.2e-2 < error("block", False) < 2.4e-2
    assert error("tensor", True) < 9.3e-3
    assert error("block", True) < 9.1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rotation_is_worth_its_time(device, dtype):
    """With outliers in Q and K and one scale for each tensor."""
    q, k, v = tensors(512, 512, 16, 16, 128, batch=1, dtype=dtype)
    q, k = (x + 20 * torch.randn_like(x) * (torch.rand(x.shape) < 1e-3) for x in (q, k))
    q, k, v = (x.to(device) for x in (q, k, v))
    exact, _ = reference.attention(q, k, v, causal=True)
    options = {"causal": True, "scales": "tensor"}
    plain, rotated = (
        (fa3.flash_attn_fp8_func(q, k, v, hadamard=hadamard, **options).double() - exact).norm()
        for hadamard in (False, True)
    )
    assert rotated < 0.85 * plain


# ---- Refusals


def quantized_tensors():
    return fa3.quantize(*tensors(5, 7))._asdict()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"descale_q": 1.0}, TypeError, "descale_q must be a float32 tensor, or None for 1; got float"),
        ({"descale_k": torch.ones(1).half()}, ValueError, "descale_k must be float32; got torch.float16"),
        ({"descale_v": torch.ones(1, device="meta")}, ValueError, "descale_v must be on .* q, cpu; got meta"),
        ({"descale_q": torch.ones(2)}, ValueError, r"descale_q must be \(\) or \(1,\).*got \(2,\)"),
        ({"descale_q": torch.ones(2, 4)}, ValueError, r"\(2, 2\) for one of each sequence and head.*\(2, 4\)"),
        ({"descale_q": torch.ones(2, 2, 1)}, ValueError, r"\(2, 4, 1\) for one of each block; got \(2, 2, 1\)"),
        ({"descale_k": torch.ones(2, 2, 2)}, ValueError, r"\(2, 2, 1\) for one of each block; got \(2, 2, 2\)"),
        ({"descale_v": torch.ones(2, 1, 2, 1)}, ValueError, "descale_v must be"),
        ({"descale_v": torch.zeros(1)}, ValueError, "descale_v must be positive and finite; got 0.0 to 0.0"),
        ({"descale_k": torch.tensor(torch.inf)}, ValueError, "descale_k must be positive and finite"),
        ({"descale_q": torch.tensor(torch.nan)}, ValueError, "descale_q must be positive and finite"),
        ({"out_dtype": torch.float32}, ValueError, "out_dtype must be .*bfloat16 or .*float16; got .*float32"),
        ({"out_dtype": E4M3}, ValueError, "got torch.float8_e4m3fn"),
        ({"config": fa.GENERATIONS["fa2"].config_type()}, TypeError, "config must be a fa3.Config; got"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"window_size": (4, -2)}, ValueError, r"got \(4, -2\)"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"dropout_p": 0.0}, TypeError, "unexpected keyword argument 'dropout_p'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(change, error, match):
    with pytest.raises(error, match=match):
        fa3.flash_attn_func(**quantized_tensors() | change)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (Config(tile_n=80), "the FP8 kernel needs tile_n 64, 96 or 128 .*; got 80"),
        (without(Config(), "p_in_registers"), "the FP8 kernel needs p_in_registers=True"),
        (Config(stages=1), "the FP8 kernel needs 2 stages or more"),
    ],
    ids=["tile_n", "switch", "stages"],
)
def test_a_config_that_the_kernel_cannot_have_is_refused_on_a_cpu_too(config, match):
    with pytest.raises(ValueError, match=match):
        fa3.flash_attn_func(**quantized_tensors(), config=config)
    with pytest.raises(ValueError, match=match):
        fa3.flash_attn_fp8_func(*tensors(5, 7, dtype=torch.bfloat16), config=config)


def test_mixed_types():
    given = quantized_tensors()
    for name in "qkv":
        other = given | {name: given[name].bfloat16()}
        with pytest.raises(ValueError, match=r"q, k and v must all be torch.float8_e4m3fn; got .*bfloat16.*quantize"):
            fa3.flash_attn_func(**other)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8])
def test_another_type_of_one_byte(dtype):
    q, k, v = (x.to(dtype) for x in tensors(5, 7))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedProblem, match=f"takes float8_e4m3fn, float16 or bfloat16, not {name}: quantize"):
        fa3.flash_attn_func(q, k, v)


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v", "out_dtype"])
def test_sixteen_bits_have_no_scales(name):
    value = torch.float16 if name == "out_dtype" else torch.ones(())
    with pytest.raises(ValueError, match=r"are for torch.float8_e4m3fn tensors; got torch.bfloat16; leave them out"):
        fa3.flash_attn_func(*tensors(5, 7, dtype=torch.bfloat16), **{name: value})


@pytest.mark.parametrize("name", ["q", "k", "v", "descale_q", "descale_v"])
def test_a_gradient_is_refused(name):
    """FA#1711."""
    given = quantized_tensors()
    given[name].requires_grad_()
    with pytest.raises(UnsupportedProblem, match=r"fp8 attention has no gradient: call under torch.no_grad\(\)"):
        fa3.flash_attn_func(**given)
    with torch.no_grad():
        fa3.flash_attn_func(**given)
    q, k, v = tensors(5, 7, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match="quantize has no gradient"):
        fa3.flash_attn_fp8_func(q, k, v.requires_grad_())


@pytest.mark.parametrize("head_dim", [8, 24, 40, 248])
def test_head_dims_that_fp8_has_not(head_dim):
    given = tensors(5, 7, head_dim=head_dim)
    match = f"multiples of 16 up to 256; got {head_dim}; pad"
    with pytest.raises(UnsupportedProblem, match=match):
        fa3.quantize(*given)
    with pytest.raises(UnsupportedProblem, match=match):
        fa3.flash_attn_func(*(x.to(E4M3) for x in given))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scales": "row"}, ValueError, "scales must be one of tensor, head, block; got 'row'"),
        ({"hadamard": 1}, TypeError, "hadamard must be True or False; got int"),
        ({"seed": None}, TypeError, "seed must be a Python int; got NoneType"),
        ({"seed": True}, TypeError, "seed must be a Python int; got bool"),
        ({"q": torch.ones(2, 5, 4, 32).double()}, ValueError, "must have one dtype"),
        ({"q": None}, TypeError, "q must be a torch.Tensor; got NoneType"),
        ({"max_seqlen_q": 5}, ValueError, "must be .total, heads, head_dim."),
    ],
    ids=str,
)
def test_what_quantize_refuses(change, error, match):
    with pytest.raises(error, match=match):
        fa3.quantize(**dict(zip("qkv", tensors(5, 7), strict=True)) | change)


def test_what_is_quantized_has_more_digits():
    given = quantized_tensors()
    with pytest.raises(ValueError, match=r"quantize takes torch.float16, .* got torch.float8_e4m3fn; convert"):
        fa3.quantize(given["q"], given["k"], given["v"])
    with pytest.raises(ValueError, match=r"must be float16 or bfloat16, as out is; got torch.float32"):
        fa3.flash_attn_fp8_func(*tensors(5, 7))


@pytest.mark.parametrize("arch", [80, 100])
def test_another_gpu_is_named(arch):
    problem = fa.Problem(batch=1, seqlen_q=9, seqlen_k=9, heads_q=1, heads_kv=1, head_dim=64, dtype=E4M3, arch=arch)
    with pytest.raises(UnsupportedProblem, match=f"fp8 attention runs on sm_90, this GPU is sm_{arch}"):
        fp8_arguments.check_problem(problem)
    fp8_arguments.check_problem(replace(problem, arch=90))


def test_a_block_of_keys_is_a_tile():
    problem = fa.Problem(batch=1, seqlen_q=9, seqlen_k=9, heads_q=1, heads_kv=1, head_dim=64, dtype=E4M3)
    assert default_fp8_config(problem).tile_n == KV_BLOCK


# ---- On a GPU: kernels that are Python functions, and CPU tensors that pass for a GPU's


class Gpu:
    """Makes kernels that compute by the algorithm; keeps what they and the quantizing host were called with."""

    def __init__(self):
        self.keys = []  # of the kernels loaded
        self.launches = []  # the tensors of each launch
        self.quantizations = []  # the arguments of each, by name
        self.num_problems = 0  # that were looked at in full
        self.is_capturing = False

    def load(self, key, build):
        self.keys.append(key)

        def kernel(*arguments):
            tensors, (softmax_scale, softcap, left, right, _, num_splits) = arguments[:11], arguments[11:]
            q, k, v, out, lse, *scales, cu_seqlens_q, cu_seqlens_k, counter = tensors
            assert num_splits == 1
            refuse(key, q, k, v, scales, cu_seqlens_q, cu_seqlens_k)
            assert (counter is not None) == (key.config.scheduler == "dynamic")
            assert counter is None or (counter.dtype, counter.tolist()) == (torch.int32, [0])
            self.launches.append(tensors)
            window = (left if left < 2**30 else None, right if right < 2**30 else None)
            options = {"softmax_scale": softmax_scale, "softcap": softcap, "window": window, "config": key.config}
            if cu_seqlens_q is None:
                results = algorithm.forward_fp8(q, k, v, *scales, **options, out_dtype=out.dtype)
                out.copy_(results[0])
                lse.copy_(results[1])
                return
            bounds = (pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
            for i, (queries, keys) in enumerate(zip(*bounds, strict=True)):
                queries, keys = slice(*queries), slice(*keys)
                one = (q[None, queries], k[None, keys], v[None, keys], *(x[i : i + 1] for x in scales))
                results = algorithm.forward_fp8(*one, **options, out_dtype=out.dtype)
                out[queries], lse[:, queries] = results[0][0], results[1][0]

        return kernel

    def prepare_quantization(self, problem, tensors, scales, signs):
        def run(tensors, cu_seqlens):
            q, k, v = tensors
            if len(q) and (k.shape != v.shape or not q.dtype == k.dtype == v.dtype):  # no batch, no kernel
                raise ValueError("Mismatched Tensor")
            if any(x.data_ptr() % ALIGNMENT for x in tensors):
                raise ValueError("Misaligned Tensor")
            options = {"scales": scales, "signs": signs, "cu_seqlens": cu_seqlens}
            self.quantizations.append({"problem": problem, "tensors": tensors} | options)
            return tuple(range(6))

        return run


def refuse(key, q, k, v, scales, cu_seqlens_q, cu_seqlens_k):
    """Raises ValueError where a compiled kernel does: nothing else stands between it and memory that is not there."""
    for x in (q, k, v):
        if (x.ndim, x.dtype, x.shape[-1]) != (q.ndim, E4M3, key.head_dim) or x.data_ptr() % ALIGNMENT:
            raise ValueError("Mismatched Tensor")
        # Any stride passes where there is one element.
        unit_mode = 1 if key.v_by_columns and x is v else x.ndim - 1
        strides = [x.stride(i) for i in range(x.ndim) if i != unit_mode and x.shape[i] != 1]
        if x.stride(unit_mode) != 1 or any(stride % ALIGNMENT for stride in strides):
            raise ValueError("Invalid strides")
    if k.shape != v.shape or any((x.ndim, x.dtype) != (3, torch.float32) for x in scales):
        raise ValueError("Mismatched shape")
    for x in (cu_seqlens_q, cu_seqlens_k):
        if x is not None and (x.dtype != torch.int32 or x.shape != cu_seqlens_q.shape):
            raise ValueError("Mismatched Tensor")


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    from_tensors = fa.Problem.from_tensors

    def from_tensors_on_gpu(*arguments, **options):
        gpu.num_problems += 1
        return replace(from_tensors(*arguments, **options), device="cuda", arch=90, seqlens=None)

    monkeypatch.setattr(fp8.Problem, "from_tensors", from_tensors_on_gpu)
    monkeypatch.setattr(fp8_launch, "load", gpu.load)
    monkeypatch.setitem(sys.modules, "fa3.quantize_launch", SimpleNamespace(prepare=gpu.prepare_quantization))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    forget()
    yield gpu
    forget()


def forget():
    fp8._runs.clear()
    fp8._quantizations.clear()


def e4m3(*sizes, **options):
    return tuple(x.to(E4M3) for x in tensors(*sizes, **options))


def of_blocks(scale, heads, blocks):
    """A scale of any form as one of each block."""
    if scale is None or scale.ndim < 2:
        return torch.ones(2, heads, blocks) * (1 if scale is None else scale)
    if scale.ndim == 2:
        return scale.repeat_interleave(heads // scale.shape[1], 1)[..., None].repeat(1, 1, blocks)
    return scale


def assert_attends(given, scales, results, **options):
    heads = [x.shape[2] for x in given]
    scales = [of_blocks(x, n, 3) for x, n in zip(scales, heads, strict=True)]
    config = options.pop("config", Config(tile_n=64))
    expected = algorithm.forward_fp8(*given, *scales, softmax_scale=32**-0.5, config=config, **options)
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)  # other tiles round P otherwise


FORMS = {
    "none": (None, None, None),
    "numbers": ((), (), ()),
    "one": ((1,), (1,), (1,)),
    "heads": ((2, 2), (2, 2), (2, 2)),
    "blocks": ((2, 4, 3), (2, 2, 3), (2, 2, 3)),
    "mixed": ((2, 2), None, (2, 2, 3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_prepared_run_attends_with_the_scales_of_each_call(gpu, form):
    for i in range(3):
        given, scales = e4m3(), [None if shape is None else 0.1 + torch.rand(shape) for shape in FORMS[form]]
        if i == 2:  # of other strides
            scales = [x if x is None else torch.stack((x, x), -1)[..., 0] for x in scales]
        names = dict(zip(("descale_q", "descale_k", "descale_v"), scales, strict=True))
        results = fa3.flash_attn_func(*given, **names, return_lse=True)
        assert_attends(given, scales, results)
    assert (results[0].shape, results[0].dtype, results[1].shape) == ((2, 150, 4, 32), torch.bfloat16, (2, 4, 150))
    assert all(x is y for x, y in zip(gpu.launches[-1], given, strict=False))
    assert (len(gpu.keys), gpu.num_problems, len(fp8._runs)) == (1, 1, 1)


def test_scales_are_views_where_they_can_be(gpu):
    given, of_heads, one_of_blocks = e4m3(), torch.rand(2, 2), torch.rand(2, 2, 3)
    fa3.flash_attn_func(*given, descale_q=torch.rand(1), descale_k=of_heads, descale_v=one_of_blocks)
    scales = gpu.launches[0][5:8]
    assert [x.stride() for x in scales] == [(0, 0, 0), (2, 1, 0), (6, 3, 1)]
    assert scales[1].data_ptr() == of_heads.data_ptr()
    assert scales[2] is one_of_blocks


def test_a_run_is_found_by_all_that_it_depends_on(gpu):
    q, k, v = e4m3()
    calls = [
        {},
        {"causal": True},
        {"window_size": (9, 3)},
        {"softcap": 2.0},
        {"softmax_scale": 0.5},
        {"out_dtype": torch.float16},
        {"config": Config(tile_n=64)},
        {"descale_k": torch.ones(())},
        {"descale_k": torch.ones(2, 2)},
        {"k": torch.cat((k, k), 1)[:, :300]},
        {"q": q[:, :149], "descale_q": torch.ones(2, 2)},
    ]
    for number, change in enumerate(calls, start=1):
        for _ in range(2):
            fa3.flash_attn_func(**{"q": q, "k": k, "v": v} | change)
        assert len(gpu.keys) == gpu.num_problems == len(fp8._runs) == number
    assert len(gpu.launches) == 2 * len(calls)
    out = fa3.flash_attn_func(q, k, v, out_dtype=torch.float16)
    assert (out.dtype, gpu.keys[5].dtype) == (torch.float16, "float8_e4m3fn-float16")


def test_the_scale_1_is_made_once(gpu, monkeypatch):
    made, one = [], fp8_arguments._one
    monkeypatch.setattr(fp8_arguments, "_one", lambda device: made.append(1) or one(device))
    given = e4m3()
    for _ in range(3):
        fa3.flash_attn_func(*given, descale_k=torch.ones(1))
    assert len(made) == 1


def test_what_a_capture_makes_stays_in_its_graph(gpu):
    given = e4m3()
    gpu.is_capturing = True
    fa3.flash_attn_func(*given)
    assert len(fp8._runs) == 0
    gpu.is_capturing = False
    fa3.flash_attn_func(*given)
    assert len(fp8._runs) == 1


def test_the_memory_of_runs_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(generation_module, "MAX_RUNS", 3)
    for seqlen in range(1, 9):
        fa3.flash_attn_func(*e4m3(seqlen, 5))
        fa3.quantize(*tensors(seqlen, 5))
        assert len(fp8._runs) <= 3
        assert len(fp8._quantizations) <= 3


def test_each_launch_draws_tiles_from_a_counter_of_its_own(gpu):
    for _ in range(2):
        fa3.flash_attn_func(*e4m3(), causal=True)
    first, second = (launch[-1] for launch in gpu.launches)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("position", [0, 1, 2], ids=["q", "k", "v"])
def test_what_the_kernel_cannot_read_is_copied(gpu, position):
    given = list(e4m3())
    fa3.flash_attn_func(*given)
    for unreadable in (off_by_one, lambda x: x.mT.contiguous().mT):
        changed = list(given)
        changed[position] = unreadable(given[position])
        results = fa3.flash_attn_func(*changed, return_lse=True)
        assert_attends(given, (None, None, None), results)
        copied = [x is not y for x, y in zip(gpu.launches[-1][:3], changed, strict=True)]
        assert copied == [i == position for i in range(3)]


def test_v_by_columns_is_read_as_it_lies(gpu):
    q, k, v = e4m3()
    v = by_columns(v, pitch=304)
    for _ in range(2):
        results = fa3.flash_attn_func(q, k, v, return_lse=True)
        assert_attends((q, k, v), (None, None, None), results)
        assert gpu.launches[-1][2] is v
    (key,) = gpu.keys
    assert key.v_by_columns


def test_the_default_tiles_depend_on_how_v_lies(gpu):
    q, k, v = e4m3(head_dim=64)
    fa3.flash_attn_func(q, k, v)
    fa3.flash_attn_func(q, k, by_columns(v, pitch=304))
    problem = fa.Problem(2, 150, 300, 4, 2, 64, dtype=E4M3)
    assert [key.config for key in gpu.keys] == [default_fp8_config(problem, layout) for layout in (False, True)]
    assert gpu.keys[0].config != gpu.keys[1].config


@pytest.mark.parametrize(("num_keys", "pitch"), [(300, 300), (301, 304)], ids=["a stride", "no fours of keys"])
def test_v_by_columns_that_no_kernel_takes_is_copied(gpu, num_keys, pitch):
    q, k, v = e4m3(seqlen_k=num_keys)
    v = by_columns(v, pitch)
    results = fa3.flash_attn_func(q, k, v, return_lse=True)
    assert_attends((q, k, v), (None, None, None), results)
    assert gpu.launches[-1][2].is_contiguous()
    assert not gpu.keys[-1].v_by_columns


def test_v_by_columns_off_by_a_byte_is_copied(gpu):
    q, k, v = e4m3()
    fa3.flash_attn_func(q, k, by_columns(v, pitch=304))
    results = fa3.flash_attn_func(
        q, k, off_by_one(v.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2), return_lse=True
    )
    assert_attends((q, k, v), (None, None, None), results)
    assert gpu.launches[-1][2].is_contiguous()


def by_columns(v, pitch):
    """The same numbers, the keys of a column next to each other, and columns `pitch` apart."""
    batch, seqlen, heads, head_dim = v.shape
    columns = torch.zeros(batch, heads, head_dim, pitch, dtype=torch.uint8)
    columns[..., :seqlen] = v.view(torch.uint8).permute(0, 2, 3, 1)
    return columns.view(E4M3).permute(0, 3, 1, 2)[:, :seqlen]


def test_a_stride_that_no_element_uses_is_repaired_too(gpu):
    q, k, v = e4m3(batch=1)
    fa3.flash_attn_func(q.as_strided(q.shape, (3, *q.stride()[1:])), k, v)
    assert gpu.launches[0][0].stride(0) % ALIGNMENT == 0


def off_by_one(x):
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def test_packed_sequences_are_launched(gpu):
    options = {"causal": True, "return_lse": True}
    for lengths_q, lengths_k in (([150, 3], [150, 129]), ([53, 100], [79, 200])):
        given, sequences = packed(lengths_q, lengths_k)
        given = tuple(x.to(E4M3) for x in given)
        sequences |= {"max_seqlen_q": 150, "max_seqlen_k": 200}
        out, lse = fa3.flash_attn_varlen_func(*given, **sequences, **options)
        assert (out.shape, lse.shape) == ((153, 4, 32), (4, 153))
        q, k, v = (x[None, n:] for x, n in zip(given, (lengths_q[0], lengths_k[0], lengths_k[0]), strict=True))
        alone = fa3.flash_attn_func(q, k, v, **options)
        torch.testing.assert_close(out[None, lengths_q[0] :].float(), alone[0].float(), rtol=2e-2, atol=2e-2)
        launched = gpu.launches[-2][8:10]
        assert all(x is y for x, y in zip(launched, sequences.values(), strict=False)), "as they were given"
    assert [key.sequences for key in gpu.keys] == ["packed", "dense", "dense"], "the values of cu_seqlens are in no key"
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be int32; got torch\.int64"):
        fa3.flash_attn_varlen_func(*given, **sequences | {"cu_seqlens_k": sequences["cu_seqlens_k"].long()}, **options)
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor"):
        fa3.flash_attn_varlen_func(*given, **sequences | {"cu_seqlens_q": None}, **options)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"v": lambda x: x[:, :, :1]}, "k and v must have one shape"),
        ({"v": lambda x: x.bfloat16()}, "q, k and v must all be torch.float8_e4m3fn"),
        ({"k": lambda x: x.view(torch.float8_e5m2)}, "q, k and v must all be torch.float8_e4m3fn"),
        ({"descale_k": lambda x: x.double()}, "descale_k must be float32; got torch.float64"),
        ({"descale_k": lambda x: x[:1]}, r"descale_k must be \(\) or .*got \(1, 2\)"),
        ({"q": lambda x: None}, "q must be a torch.Tensor; got NoneType"),
        ({"descale_q": lambda x: 1.0}, "descale_q must be a float32 tensor, or None for 1; got float"),
        ({"out_dtype": lambda x: torch.float32}, "out_dtype must be"),
        ({"out_dtype": lambda x: [x]}, "out_dtype must be"),
        ({"config": lambda x: Config(tile_n=80)}, "the FP8 kernel needs tile_n 64, 96 or 128"),
        ({"window_size": lambda x: [1, 2]}, "window_size must be a tuple"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,  # a function has another address in each process
)
def test_what_is_wrong_is_named_by_a_prepared_run_too(gpu, change, match):
    q, k, v = e4m3()
    call = {"q": q, "k": k, "v": v, "descale_q": None, "descale_k": torch.ones(2, 2), "out_dtype": torch.float16}
    fa3.flash_attn_func(**call)
    [(name, changed)] = change.items()
    wrong = changed(call.get(name))
    if name in ("k", "v"):
        wrong = wrong.as_strided(wrong.shape, call[name].stride())  # what the prepared run is found by stays
    with pytest.raises((TypeError, ValueError), match=match):
        fa3.flash_attn_func(**call | {name: wrong})
    assert (len(gpu.launches), len(fp8._runs)) == (1, 1)


def test_a_gradient_is_refused_by_a_prepared_run_too(gpu):
    q, k, v = e4m3()
    fa3.flash_attn_func(q, k, v)
    with pytest.raises(UnsupportedProblem, match="fp8 attention has no gradient"):
        fa3.flash_attn_func(q.requires_grad_(), k, v)
    given = tensors()
    fa3.quantize(*given)
    with pytest.raises(UnsupportedProblem, match="quantize has no gradient"):
        fa3.quantize(*(x.requires_grad_() for x in given))


def test_another_error_of_the_kernel_passes(gpu, monkeypatch):
    def kernel(*arguments):
        raise ValueError("of its own")

    monkeypatch.setattr(fp8_launch, "load", lambda key, build: kernel)
    with pytest.raises(ValueError, match="of its own"):
        fa3.flash_attn_func(*e4m3())


def test_the_operator_runs_what_a_call_has_prepared(gpu):
    q, k, v = e4m3()
    expected = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    values = (torch.bfloat16, None, True, None, None, 0.0, False, "", None, None, None, None)
    results = torch.ops.fa3.forward_fp8.default(q, k, v, None, None, None, *values)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert len(fp8._runs) == 1


@pytest.mark.parametrize("lengths", [(2, 0, 7), (2, 5, 0), (0, 5, 7)], ids=["no queries", "no keys", "no batch"])
def test_without_a_score_nothing_is_launched(gpu, lengths):
    batch, seqlen_q, seqlen_k = lengths
    out, lse = fa3.flash_attn_func(*e4m3(seqlen_q, seqlen_k, batch=batch), return_lse=True)
    assert torch.equal(out, torch.zeros(batch, seqlen_q, 4, 32, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))
    assert gpu.keys == []


def test_a_kernel_quantizes(gpu):
    given = tensors()
    for _ in range(3):
        assert fa3.quantize(*given, scales="head", seed=5) == fa3.Quantized(*range(6))
    *_, called = gpu.quantizations
    assert all(x is y for x, y in zip(called.pop("tensors"), given, strict=True))
    assert torch.equal(called.pop("signs"), fp8.random_signs(32, 5, torch.device("cpu")))
    assert (called["scales"], called["cu_seqlens"]) == ("head", (None, None))
    assert (len(gpu.quantizations), gpu.num_problems) == (3, 1)


def test_a_kernel_quantizes_packed_sequences(gpu):
    for lengths in ([5, 2], [4, 3]):
        given, sequences = packed(lengths, [3, 9])
        sequences |= {"max_seqlen_q": 5, "hadamard": False}
        fa3.quantize(*given, **sequences)
        *_, called = gpu.quantizations
        assert called["signs"] is None
        assert (called["problem"].seqlen_q, called["problem"].seqlen_k) == (5, 9)
        assert all(x is y for x, y in zip(called["cu_seqlens"], sequences.values(), strict=False))
    assert gpu.num_problems == 1
    with pytest.raises(TypeError, match="cu_seqlens_k must be an int32 tensor"):
        fa3.quantize(*given, **sequences | {"cu_seqlens_k": None})
    with pytest.raises(ValueError, match="max_seqlen_q must not be negative"):
        fa3.quantize(*given, **sequences | {"max_seqlen_q": -1})


def test_a_quantization_is_found_by_all_that_it_depends_on(gpu):
    q, k, v = tensors()
    halves = dict(zip("qkv", (x.half() for x in (q, k, v)), strict=True))
    for number, change in enumerate(({}, {"scales": "head"}, {"hadamard": False}, {"seed": 1}, halves), start=1):
        for _ in range(2):
            fa3.quantize(**{"q": q, "k": k, "v": v} | change)
        assert gpu.num_problems == len(fp8._quantizations) == number
    options = [(call["scales"], call["signs"] is None) for call in gpu.quantizations[::2]]
    assert options == [("block", False), ("head", False), ("block", True), ("block", False), ("block", False)]


def test_what_the_quantizing_kernel_cannot_read_is_copied(gpu):
    q, k, v = tensors()
    fa3.quantize(q, k, v)
    fa3.quantize(q, off_by_one(k), v)
    first, second = (call["tensors"] for call in gpu.quantizations)
    assert [x is y for x, y in zip(first, second, strict=True)] == [True, False, True]
    assert torch.equal(second[1], k)
    assert gpu.num_problems == 1


@pytest.mark.parametrize("batch", [0, 2])
def test_what_the_quantizing_kernel_refuses_is_named(gpu, batch):
    q, k, v = tensors(batch=batch)
    fa3.quantize(q, k, v)
    for wrong, match in ((v[:, :, :1], "one shape"), (v.double(), "one dtype")):
        with pytest.raises(ValueError, match=match):
            fa3.quantize(q, k, wrong.as_strided(wrong.shape, v.stride()))
    with pytest.raises(TypeError, match="seed must be a Python int; got list"):
        fa3.quantize(q, k, v, seed=[1])


# ---- torch.compile


def test_compiled_without_a_break():
    q, k, v = tensors(dtype=torch.bfloat16)

    def attend(q):
        return fa3.flash_attn_fp8_func(2 * q, k, v, causal=True, window_size=(90, None), return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(compiled(q), attend(q), strict=True))
    quantized = fa3.quantize(q, k, v)
    compiled = torch.compile(fa3.flash_attn_func, fullgraph=True, backend="aot_eager")
    for scales in ({}, {"descale_q": quantized.descale_q, "out_dtype": torch.float16}):
        assert torch.equal(compiled(*quantized[:3], **scales), fa3.flash_attn_func(*quantized[:3], **scales))


def test_the_operators_keep_their_promises():
    q, k, v = tensors(5, 7)
    for scales in SCALES:
        torch.library.opcheck(torch.ops.fa3.quantize.default, (q, k, v, scales, True, 0, None, None, None, None))
    given, sequences = packed([5, 2], [3, 9])
    torch.library.opcheck(torch.ops.fa3.quantize.default, (*given, "block", True, 0, *sequences.values()))
    values = (torch.float16, None, True, 4, None, 0.0, False, "", None, None, None, None)
    checks = ("test_autograd_registration", "test_faketensor")  # the others compare e4m3 tensors, which torch cannot
    torch.library.opcheck(torch.ops.fa3.forward_fp8.default, (*fa3.quantize(q, k, v), *values), test_utils=checks)
