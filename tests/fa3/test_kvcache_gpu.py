"""Decoding with a cache on a Hopper GPU: values against float64, and every promise about memory, bits and graphs."""

import pytest
import torch
from torch import Tensor

from fa3 import algorithm, kvcache
from fa3.kvcache import flash_attn_with_kvcache
from fa_common import reference
from fa_common.compile import load
from fa_common.problem import UnsupportedProblem

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 127, 128, 129, 1000)
CAPACITY = 1003
HEADS = ((32, 8), (6, 1), (8, 8))
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (130, 0)},
    "window ahead": {"window_size": (5, 2)},
    "softcap": {"softcap": 5.0},
    "softcap, causal, window": {"softcap": 5.0, "causal": True, "window_size": (300, -1)},
}
SPLITS = (0, 1, 2, 3, 7)
CANARY = 768.0  # of no meaning, and exact in every type

every_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])
one_and_several_splits = pytest.mark.parametrize("num_splits", [1, 3])


def make(
    seqlen_q: int = 1,
    heads: tuple[int, int] = (8, 2),
    lengths: tuple[int, ...] = LENGTHS,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    capacity: int = CAPACITY,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k_cache, v_cache and cache_seqlens; NaN is what the caches hold beyond their lengths."""
    heads_q, heads_kv = heads
    q = torch.randn(len(lengths), seqlen_q, heads_q, head_dim, dtype=dtype, device="cuda")
    k_cache, v_cache = torch.randn(2, len(lengths), capacity, heads_kv, head_dim, dtype=dtype, device="cuda")
    for i, length in enumerate(lengths):
        k_cache[i, length:] = v_cache[i, length:] = torch.nan
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None, **options):
    return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, return_lse=True, **options)


def exact(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, **options) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, each sequence on its own."""
    left, right = (None if x == -1 else x for x in options.pop("window_size", (None, None)))
    results = [
        reference.attention(q[[i]], k_cache[[i], :length], v_cache[[i], :length], window=(left, right), **options)
        for i, length in enumerate(cache_seqlens.tolist())
    ]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def check(name: object, results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """P is rounded once and out once: each row's error is a fraction of a unit of the type, against the row's size."""
    (out, lse), (exact_out, exact_lse) = results, expected
    assert lse.dtype == torch.float32, name
    assert torch.equal(lse.isneginf(), exact_lse.isneginf()), f"{name}: LSE is -inf in the wrong rows"
    assert not out[exact_lse.isneginf().transpose(1, 2)].any(), f"{name}: a row without keys is not 0"
    error = (out.double() - exact_out).square().mean(-1).sqrt()
    size = exact_out.square().mean(-1).sqrt()
    bound = torch.finfo(out.dtype).eps * size + 1e-6
    assert (error <= bound).all(), f"{name}: RMS error of a row of out is {(error / bound).max():.2f} times its bound"
    error = (lse.double() - exact_lse).nan_to_num(0).abs().max().item()  # -inf less -inf
    assert error <= 5e-5, f"{name}: error of LSE {error:.1e}"


def assert_same_bits(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], name: object = "") -> None:
    for what, x, y in zip(("out", "LSE"), results, expected, strict=True):
        assert torch.equal(x, y), f"{name}: {what} differs in {(x != y).sum()} of {x.numel()} elements"


# ---- Values


@every_head_dim
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_against_the_reference(mask, dtype, head_dim):
    options = MASKS[mask]
    for heads in HEADS:
        for seqlen_q in (1, 4, 16):
            tensors = make(seqlen_q, heads, LENGTHS, head_dim, dtype)
            expected = exact(*tensors, **options)
            for num_splits in SPLITS:
                results = attend(*tensors, num_splits=num_splits, **options)
                check((heads, seqlen_q, num_splits), results, expected)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 192, 248])
@one_and_several_splits
def test_other_head_dims(head_dim, num_splits):
    tensors = make(4, (8, 2), LENGTHS, head_dim)
    check(head_dim, attend(*tensors, num_splits=num_splits, causal=True), exact(*tensors, causal=True))


@one_and_several_splits
@pytest.mark.parametrize("seqlen_q", [17, 65, 300])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_many_queries(heads, seqlen_q, num_splits):
    tensors = make(seqlen_q, heads)
    check(seqlen_q, attend(*tensors, num_splits=num_splits, causal=True), exact(*tensors, causal=True))


@every_head_dim
def test_a_long_cache_and_as_many_splits_as_there_can_be(head_dim):
    tensors = make(1, (8, 1), (40_000, 39_999, 5, 0), head_dim, capacity=40_001)
    expected = exact(*tensors)
    for num_splits in (0, 64, 127, 128):
        check(num_splits, attend(*tensors, num_splits=num_splits), expected)


@one_and_several_splits
def test_without_lengths_the_whole_cache_is_used(num_splits):
    q, k_cache, v_cache, cache_seqlens = make(lengths=(CAPACITY,) * 3)
    expected = attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits)
    assert_same_bits(attend(q, k_cache, v_cache, None, num_splits=num_splits), expected)


@one_and_several_splits
@pytest.mark.parametrize("shape", [(0, 1, 9), (2, 0, 9), (2, 1, 0)], ids=str)
def test_empty(shape, num_splits):
    batch, seqlen_q, capacity = shape
    q = torch.randn(batch, seqlen_q, 4, 64, device="cuda").bfloat16()
    cache = torch.randn(batch, capacity, 2, 64, device="cuda").bfloat16()
    out, lse = attend(q, cache, cache, None, num_splits=num_splits)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf, device="cuda"))


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_merging(dtype, head_dim):
    """The merging kernel alone, with splits, rows and sequences that have no key."""
    merge = load(kvcache.merge_key(head_dim, dtype), kvcache.build_merge)
    for num_splits in (1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64, 65, 100, 127, 128):
        for batch, seqlen_q, heads in ((1, 1, 5), (3, 4, 2)):
            outs = torch.randn(num_splits, batch, seqlen_q, heads, head_dim, device="cuda")
            lses = 5 * torch.randn(num_splits, batch, heads, seqlen_q, device="cuda")
            lses[torch.rand_like(lses) < 0.3] = -torch.inf
            lses[:, -1, -1] = -torch.inf  # in no split a key
            outs[lses.isneginf().transpose(2, 3)] = 0
            out = torch.full((batch, seqlen_q, heads, head_dim), torch.nan, dtype=dtype, device="cuda")
            lse = torch.full((batch, heads, seqlen_q), torch.nan, device="cuda")
            merge(outs, lses, out, lse)
            exact_out, exact_lse = algorithm.merge(outs.double(), lses.double().transpose(2, 3)[..., None])
            name = (num_splits, batch, seqlen_q, heads)
            assert not out[exact_lse[..., 0].isneginf()].any(), name
            torch.testing.assert_close(lse.double(), exact_lse[..., 0].transpose(1, 2), rtol=1e-5, atol=1e-5)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(out.double(), exact_out, rtol=eps, atol=3e-5)


# ---- Memory


@one_and_several_splits
def test_caches_are_read_where_they_are(num_splits):
    q, k_cache, v_cache, cache_seqlens = make(4)
    expected = attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits)
    fused = torch.stack((k_cache, v_cache), 3)  # (batch, seqlen, heads, 2, head_dim)
    views = {
        "fused": (fused[..., 0, :], fused[..., 1, :]),
        "heads before seqlen": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache)),
        "inside NaN": tuple(inside_nan(x) for x in (k_cache, v_cache)),
    }
    for name, caches in views.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = attend(q, *caches, cache_seqlens, num_splits=num_splits)
        assert_same_bits(results, expected, name)
        assert torch.cuda.max_memory_allocated() - before < k_cache.nbytes, f"{name}: a cache was copied"


@one_and_several_splits
def test_queries_of_any_strides(num_splits):
    q, k_cache, v_cache, cache_seqlens = make(4)
    expected = attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits)
    views = {
        "projection": torch.cat((q, q), -1)[..., :128],
        "head_dim first": q.transpose(1, 3).contiguous().transpose(1, 3),
        "off by one": q.new_empty(q.numel() + 1)[1:].view(q.shape).copy_(q),
    }
    for name, view in views.items():
        assert_same_bits(attend(view, k_cache, v_cache, cache_seqlens, num_splits=num_splits), expected, name)


@one_and_several_splits
def test_a_cache_that_the_kernel_cannot_read_is_refused(num_splits):
    q, k_cache, v_cache, cache_seqlens = make()
    unreadable = torch.empty(*k_cache.shape[:-1], 129, dtype=q.dtype, device="cuda")[..., :128]
    misaligned = k_cache.new_empty(k_cache.numel() + 1)[1:].view(k_cache.shape)
    for cache, match in ((unreadable, "never copied; got strides"), (misaligned, "never copied; got address")):
        with pytest.raises(ValueError, match=f"k_cache must .* {match}"):
            attend(q, cache, v_cache, cache_seqlens, num_splits=num_splits)
        with pytest.raises(ValueError, match=f"v_cache must .* {match}"):
            attend(q, k_cache, cache, cache_seqlens, num_splits=num_splits)


@one_and_several_splits
def test_wrong_arguments_are_named_before_and_after_a_right_call(num_splits):
    q, k_cache, v_cache, cache_seqlens = make()
    spread_lse = torch.empty(6, 8, 2, device="cuda")[..., :1]
    misaligned_out = q.new_empty(q.numel() + 1)[1:].view(q.shape)
    for _ in range(2):
        with pytest.raises(ValueError, match="cache_seqlens must be int32"):
            attend(q, k_cache, v_cache, cache_seqlens.long(), num_splits=num_splits)
        with pytest.raises(ValueError, match=r"cache_seqlens must be contiguous of shape \(6,\)"):
            attend(q, k_cache, v_cache, cache_seqlens[1:], num_splits=num_splits)
        with pytest.raises(ValueError, match="cache_seqlens must be on the device of q"):
            attend(q, k_cache, v_cache, cache_seqlens.cpu(), num_splits=num_splits)
        with pytest.raises(ValueError, match="k and v must have one shape"):
            attend(q, k_cache, v_cache[:, 1:], cache_seqlens, num_splits=num_splits)
        with pytest.raises(ValueError, match="lse must be contiguous"):
            attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits, lse=spread_lse)
        with pytest.raises(ValueError, match="out must be aligned to 16 bytes"):
            attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits, out=misaligned_out)
        attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits)
    with pytest.raises(UnsupportedProblem, match="has no gradient"):
        attend(q.requires_grad_(), k_cache, v_cache, cache_seqlens, num_splits=num_splits)


@every_head_dim
@one_and_several_splits
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_every_output_element_is_written_and_nothing_else(heads, num_splits, head_dim):
    """Canaries lie in and around out, as rows, heads, columns and batch entries, and in and around LSE."""
    for seqlen_q in (1, 4, 70):
        q, *cache = make(seqlen_q, heads, LENGTHS, head_dim)
        expected = attend(q, *cache, num_splits=num_splits)
        around_out = q.new_full((len(LENGTHS) + 2, seqlen_q + 260, heads[0] + 2, head_dim + 16), CANARY)
        around_lse = torch.full((expected[1].numel() + 256,), CANARY, device="cuda")
        out = around_out[1:-1, 130:-130, 1:-1, 8:-8]
        lse = around_lse[128:-128].view(expected[1].shape)
        attend(q, *cache, num_splits=num_splits, out=out, lse=lse)
        assert_same_bits((out, lse), expected, seqlen_q)
        out.fill_(CANARY)
        lse.fill_(CANARY)
        assert (around_out == CANARY).all(), f"{seqlen_q} queries: written outside of out"
        assert (around_lse == CANARY).all(), f"{seqlen_q} queries: written outside of LSE"


def inside_nan(x: Tensor) -> Tensor:
    """The same values as a view into a larger tensor of NaN: longer sequences, more heads, a wider head_dim."""
    batch, seqlen, heads, head_dim = x.shape
    larger = x.new_full((batch + 1, seqlen + 200, heads + 1, head_dim + 64), torch.nan)
    return larger[:batch, :seqlen, :heads, :head_dim].copy_(x)


# ---- Bits, graphs, streams, devices


@every_head_dim
@pytest.mark.parametrize("num_splits", SPLITS)
def test_runs_repeat_bitwise(num_splits, head_dim):
    tensors = make(4, (8, 2), LENGTHS, head_dim)
    expected = attend(*tensors, num_splits=num_splits, causal=True)
    for run in range(20):
        assert_same_bits(attend(*tensors, num_splits=num_splits, causal=True), expected, f"run {run}")


@one_and_several_splits
def test_a_sequence_does_not_depend_on_its_batch(num_splits):
    tensors = make(2, lengths=LENGTHS * 4)
    out, lse = attend(*tensors, num_splits=num_splits)
    for i in (1, 5, 10):
        alone = attend(*(x[[i]] for x in tensors), num_splits=num_splits)
        assert_same_bits(alone, (out[[i]], lse[[i]]), f"batch entry {i}")


@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_captured_graph_replays_with_other_lengths(num_splits):
    q, k_cache, v_cache, cache_seqlens = make(4)
    k_cache, v_cache = (x.nan_to_num() for x in (k_cache, v_cache))
    attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits, causal=True)  # compiles, outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits, causal=True)
    for lengths in (LENGTHS[::-1], (CAPACITY,) * 6, (0,) * 6, (1, 2, 3, 4, 500, 640)):
        cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        graph.replay()
        eager = attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits, causal=True)
        assert_same_bits(results, eager, lengths)
        check(lengths, results, exact(q, k_cache, v_cache, cache_seqlens, causal=True))


@one_and_several_splits
def test_a_side_stream_with_a_slow_producer(num_splits):
    q, k_cache, v_cache, cache_seqlens = make()
    expected = attend(q, k_cache, v_cache, cache_seqlens, num_splits=num_splits)
    late_lengths, stream = torch.zeros_like(cache_seqlens), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles
        late_lengths.copy_(cache_seqlens)
        results = attend(q, k_cache, v_cache, late_lengths, num_splits=num_splits)
    stream.synchronize()
    assert_same_bits(results, expected)


@one_and_several_splits
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one(num_splits):
    tensors = [x.to("cuda:1") for x in make()]
    with torch.cuda.device(0):
        results = attend(*tensors, num_splits=num_splits)
    assert results[0].device == results[1].device == tensors[0].device
    check("cuda:1", results, exact(*tensors))
