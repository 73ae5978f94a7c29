"""Decoding with a cache in e4m3 on a Hopper GPU, held against float64 on the numbers that the tensors stand for.

What is left is the rounding of P to e4m3, as in test_fp8_gpu.py. A cache holds NaN beyond its lengths, and the blocks
there have a scale that would be seen.
"""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fa3
from benchmarks.accuracy import dequantized
from fa3.config import KV_BLOCK
from fa3.kvcache import flash_attn_with_kvcache
from fa_common import reference
from tests.fa3.test_kvcache_gpu import (
    CANARY,
    CAPACITY,
    HEADS,
    LENGTHS,
    SPLITS,
    assert_same_bits,
    every_head_dim,
    one_and_several_splits,
)

E4M3 = torch.float8_e4m3fn
NAN_BYTE = 0x7F
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window ahead": {"window_size": (130, 2)},
    "softcap, causal, window": {"softcap": 5.0, "causal": True, "window_size": (300, -1)},
}
ROUNDING_OF_P = 0.06  # of a sequence's norm: of few keys one rounding may count alone
LSE_ERROR = 2e-2


class Caches(NamedTuple):
    """The arguments of flash_attn_with_kvcache by their names."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor | None
    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor


def make(
    seqlen_q: int = 1,
    heads: tuple[int, int] = (8, 2),
    lengths: tuple[int, ...] = LENGTHS,
    head_dim: int = 128,
    capacity: int = CAPACITY,
    scales: str = "block",
    device: str = "cuda",
) -> Caches:
    """Random numbers, each head and each run of 32 keys of a size of its own; quantized on the CPU."""
    (heads_q, heads_kv), batch = heads, len(lengths)
    sizes = (2 * torch.rand(batch, -(-capacity // 32), heads_kv, 1) - 1).exp2().repeat_interleave(32, 1)[:, :capacity]
    q = torch.randn(batch, seqlen_q, heads_q, head_dim) * torch.rand(heads_q, 1).add(0.5)
    k, v = sizes * torch.randn(2, batch, capacity, heads_kv, head_dim)
    made = fa3.quantize(q, k, v, scales=scales, hadamard=False)
    made = made._replace(v=made.v.contiguous())
    for i, length in enumerate(lengths):
        for cache in (made.k, made.v):
            cache.view(torch.uint8)[i, length:] = NAN_BYTE
        for descale in (made.descale_k, made.descale_v):
            if descale.ndim == 3:
                descale[i, :, max(1, -(-length // KV_BLOCK)) :] = 2.0**40
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return Caches(*(x.to(device) for x in (*made[:3], lengths, *made[3:])))


def attend(caches: Caches, **options) -> tuple[Tensor, Tensor]:
    return flash_attn_with_kvcache(**caches._asdict(), return_lse=True, **options)


def exact(caches: Caches, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, each sequence on its own."""
    left, right = (None if x == -1 else x for x in options.pop("window_size", (None, None)))
    q, k, v = dequantized(fa3.Quantized(*caches[:3], *caches[4:]))
    results = [
        reference.attention(q[[i]], k[[i], :length], v[[i], :length], window=(left, right), **options)
        for i, length in enumerate(caches.cache_seqlens.tolist())
    ]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def check(name: object, results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Of each sequence, since a long one's error would hide a short one's."""
    (out, lse), (exact_out, exact_lse) = results, expected
    assert lse.dtype == torch.float32, name
    without_keys = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), without_keys), f"{name}: LSE is -inf in the wrong rows"
    assert not out[without_keys.mT].any(), f"{name}: a row without keys is not 0"
    error = (out.double() - exact_out).flatten(1).norm(dim=1)
    bound = ROUNDING_OF_P * exact_out.flatten(1).norm(dim=1)
    assert (error <= bound).all(), f"{name}: errors {(error / bound).tolist()} of what rounding P makes"
    error = (lse.double() - exact_lse).nan_to_num(0).abs().max().item()  # -inf less -inf
    assert error <= LSE_ERROR, f"{name}: error of LSE {error:.1e}"


# ---- Values


@pytest.mark.gpu
@every_head_dim
@pytest.mark.parametrize("mask", MASKS)
def test_against_the_reference(mask, head_dim):
    options = MASKS[mask]
    for heads, seqlen_q in product(HEADS, (1, 4, 16)):
        caches = make(seqlen_q, heads, LENGTHS, head_dim)
        expected = exact(caches, **options)
        for num_splits in SPLITS:
            check((heads, seqlen_q, num_splits), attend(caches, num_splits=num_splits, **options), expected)


@pytest.mark.gpu
@one_and_several_splits
@pytest.mark.parametrize("head_dim", [16, 48, 96, 160, 192, 240])
def test_other_head_dims(head_dim, num_splits):
    caches = make(4, (8, 2), LENGTHS, head_dim)
    check(head_dim, attend(caches, num_splits=num_splits, causal=True), exact(caches, causal=True))


@pytest.mark.gpu
@one_and_several_splits
@pytest.mark.parametrize("seqlen_q", [17, 65, 300])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_many_queries(heads, seqlen_q, num_splits):
    caches = make(seqlen_q, heads)
    check(seqlen_q, attend(caches, num_splits=num_splits, causal=True), exact(caches, causal=True))


@pytest.mark.gpu
@one_and_several_splits
@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_scales_of_every_form(scales, num_splits):
    for heads in HEADS:
        caches = make(4, heads, scales=scales)
        check(heads, attend(caches, num_splits=num_splits), exact(caches))


@pytest.mark.gpu
@every_head_dim
def test_a_long_cache_and_as_many_splits_as_there_can_be(head_dim):
    caches = make(1, (8, 1), (40_000, 39_999, 5, 0), head_dim, capacity=40_001)
    expected = exact(caches)
    for num_splits in (0, 64, 127, 128):
        check(num_splits, attend(caches, num_splits=num_splits), expected)


@pytest.mark.gpu
@one_and_several_splits
def test_without_lengths_the_whole_cache_is_used(num_splits):
    caches = make(lengths=(CAPACITY,) * 3)
    results = attend(caches._replace(cache_seqlens=None), num_splits=num_splits)
    assert_same_bits(results, attend(caches, num_splits=num_splits))


@pytest.mark.gpu
@every_head_dim
@one_and_several_splits
def test_a_new_token_sees_what_the_prefills_last_row_sees(num_splits, head_dim):
    """Within the rounding of P of both, whose blocks are of other keys."""
    caches = make(300, (8, 2), (700,), head_dim, capacity=700, scales="head")
    scales = {name: value for name, value in caches._asdict().items() if name.startswith("descale")}
    prefill = fa3.flash_attn_func(*caches[:3], causal=True, **scales)
    token, _ = attend(caches._replace(q=caches.q[:, -1:].contiguous()), num_splits=num_splits)
    difference = (token.double() - prefill[:, -1:].double()).norm()
    assert difference <= 2 * ROUNDING_OF_P * prefill[:, -1:].double().norm()


# ---- Memory, bits, graphs


@pytest.mark.gpu
@one_and_several_splits
def test_caches_are_read_where_they_are(num_splits):
    caches = make(4)
    expected = attend(caches, num_splits=num_splits)
    fused = torch.stack((caches.k_cache.view(torch.uint8), caches.v_cache.view(torch.uint8)), 3).view(E4M3)
    views = caches._replace(k_cache=fused[..., 0, :], v_cache=fused[..., 1, :])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert_same_bits(attend(views, num_splits=num_splits), expected)
    assert torch.cuda.max_memory_allocated() - before < caches.k_cache.nbytes, "a cache was copied"


@pytest.mark.gpu
@one_and_several_splits
def test_a_cache_that_the_kernel_cannot_read_is_refused(num_splits):
    """V by columns is one, as `quantize` makes it of dense sequences."""
    caches = make(capacity=1008)
    v_by_columns = caches.v_cache.view(torch.uint8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).view(E4M3)
    with pytest.raises(ValueError, match=r"v_cache must have a last stride of 1 .* never copied.*contiguous"):
        attend(caches._replace(v_cache=v_by_columns), num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
@one_and_several_splits
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_every_output_element_is_written_and_nothing_else(heads, num_splits, out_dtype):
    for seqlen_q in (1, 4, 70):
        caches = make(seqlen_q, heads)
        expected = attend(caches, num_splits=num_splits, out_dtype=out_dtype)
        shape = (len(LENGTHS) + 2, seqlen_q + 260, heads[0] + 2, 128 + 16)
        around_out = torch.full(shape, CANARY, dtype=out_dtype, device="cuda")
        around_lse = torch.full((expected[1].numel() + 256,), CANARY, device="cuda")
        out, lse = around_out[1:-1, 130:-130, 1:-1, 8:-8], around_lse[128:-128].view(expected[1].shape)
        attend(caches, num_splits=num_splits, out_dtype=out_dtype, out=out, lse=lse)
        assert_same_bits((out, lse), expected, seqlen_q)
        out.fill_(CANARY)
        lse.fill_(CANARY)
        assert (around_out == CANARY).all(), f"{seqlen_q} queries: written outside of out"
        assert (around_lse == CANARY).all(), f"{seqlen_q} queries: written outside of LSE"


@pytest.mark.gpu
@every_head_dim
@pytest.mark.parametrize("num_splits", SPLITS)
def test_runs_repeat_bitwise(num_splits, head_dim):
    caches = make(4, head_dim=head_dim)
    expected = attend(caches, num_splits=num_splits, causal=True)
    for run in range(20):
        assert_same_bits(attend(caches, num_splits=num_splits, causal=True), expected, f"run {run}")


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_captured_graph_replays_with_other_lengths_and_scales(num_splits):
    caches = make(4, lengths=(CAPACITY,) * 6)
    attend(caches, num_splits=num_splits, causal=True)  # compiles, outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(caches, num_splits=num_splits, causal=True)
    for lengths in (LENGTHS[::-1], (0,) * 6, (1, 2, 3, 4, 500, 640)):
        caches.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        caches.descale_q.mul_(1.1)
        graph.replay()
        assert_same_bits(results, attend(caches, num_splits=num_splits, causal=True), lengths)
        check(lengths, results, exact(caches, causal=True))
