"""Decoding with a cache: values and errors on a CPU, where keys are split and merged too; choices; what is launched.

The kernels themselves run in test_kvcache_gpu.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fa
import fa3
from fa3 import algorithm, kvcache
from fa3.config import Config
from fa3.kvcache import choose_splits, decode_config, estimated_us, flash_attn_with_kvcache
from fa_common import reference
from fa_common.memory import Memory
from fa_common.problem import Problem, UnsupportedProblem

LENGTHS = (0, 1, 127, 128, 129, 1000)
CAPACITY = 1003
HEADS = ((32, 8), (6, 1), (8, 8))
NO_SCALES = (None, None, None)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (130, 0)},
    "window ahead": {"window_size": (5, 2)},
    "softcap": {"softcap": 1.5},
    "softcap, causal, window": {"softcap": 1.5, "causal": True, "window_size": (300, -1)},
}


def make(seqlen_q=1, heads=(6, 2), lengths=LENGTHS, head_dim=16, capacity=CAPACITY, dtype=torch.bfloat16):
    """q, k_cache, v_cache and cache_seqlens; NaN is what the caches hold beyond their lengths."""
    heads_q, heads_kv = heads
    q = torch.randn(len(lengths), seqlen_q, heads_q, head_dim).to(dtype)
    k_cache, v_cache = torch.randn(2, len(lengths), capacity, heads_kv, head_dim).to(dtype)
    for i, length in enumerate(lengths):
        k_cache[i, length:] = v_cache[i, length:] = torch.nan
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32)


def exact(q, k_cache, v_cache, cache_seqlens, **options):
    """(out, lse) in float64, each sequence on its own."""
    left, right = (None if x == -1 else x for x in options.pop("window_size", (None, None)))
    results = [
        reference.attention(q[[i]], k_cache[[i], :length], v_cache[[i], :length], window=(left, right), **options)
        for i, length in enumerate(cache_seqlens.tolist())
    ]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def check(results, expected):
    out, lse = results
    exact_out, exact_lse = expected
    assert lse.dtype == torch.float32
    without_keys = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), without_keys)
    assert not out[without_keys.transpose(1, 2)].any()
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


# ---- Values


@pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("seqlen_q", [1, 4, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_the_reference(heads, seqlen_q, num_splits):
    q, k_cache, v_cache, cache_seqlens = make(seqlen_q, heads)
    for name, options in MASKS.items():
        expected = exact(q, k_cache, v_cache, cache_seqlens, **options)
        results = flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, num_splits=num_splits, return_lse=True, **options
        )
        try:
            check(results, expected)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 72, 256])
def test_types_and_widths(head_dim, dtype, num_splits):
    q, k_cache, v_cache, cache_seqlens = make(3, (4, 2), (129, 5), head_dim, 130, dtype)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, num_splits=num_splits, return_lse=True
    )
    assert (out.shape, out.dtype) == (q.shape, dtype)
    check((out, lse), exact(q, k_cache, v_cache, cache_seqlens))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_without_lengths_the_whole_cache_is_used(num_splits):
    q, k_cache, v_cache, cache_seqlens = make(lengths=(CAPACITY, CAPACITY))
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, num_splits=num_splits)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, num_splits=num_splits), expected)


def test_causal_is_aligned_to_the_length_in_use():
    q, k_cache, v_cache, _ = make(2, (1, 1), (3,))
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor([3], dtype=torch.int32), causal=True)
    first, _ = reference.attention(q[:, :1], k_cache[:, :2], v_cache[:, :2])
    second, _ = reference.attention(q[:, 1:], k_cache[:, :3], v_cache[:, :3])
    torch.testing.assert_close(out.double(), torch.cat((first, second), 1), rtol=1e-2, atol=1e-2)


def test_a_single_query_is_never_masked_by_causal():
    q, k_cache, v_cache, cache_seqlens = make()
    results = [
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=causal)
        for causal in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("shape", [(0, 1, 9), (2, 0, 9), (2, 1, 0)], ids=str)
def test_empty(shape, num_splits):
    batch, seqlen_q, capacity = shape
    q, k_cache = torch.randn(batch, seqlen_q, 4, 16).bfloat16(), torch.randn(batch, capacity, 2, 16).bfloat16()
    lengths = torch.zeros(batch, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, k_cache, cache_seqlens=lengths, num_splits=num_splits, return_lse=True
    )
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))


def test_outputs_given_are_written_and_returned():
    q, k_cache, v_cache, cache_seqlens = make(4)
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, num_splits=2, return_lse=True)
    out, lse = torch.empty_like(q), torch.empty(len(LENGTHS), 6, 4)
    results = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, num_splits=2, return_lse=True, out=out, lse=lse
    )
    assert results[0] is out
    assert results[1] is lse
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_views_of_a_fused_cache():
    q, k_cache, v_cache, cache_seqlens = make()
    fused = torch.stack((k_cache, v_cache), 3)  # (batch, seqlen, heads, 2, head_dim)
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens)
    out = flash_attn_with_kvcache(q, fused[..., 0, :], fused[..., 1, :], cache_seqlens=cache_seqlens)
    assert torch.equal(out, expected)


# ---- The algorithm


def test_more_splits_read_the_cache_no_more_often():
    """Only the parts are written and read besides: fp32 O and LSE of each split."""
    q, k, v = torch.randn(2, 1, 8, 16).bfloat16(), *torch.randn(2, 2, 640, 2, 16).bfloat16()
    options = {"softmax_scale": 1.0, "config": SimpleNamespace(tile_n=64)}
    counts = []
    for num_splits in (1, 5):
        memory = Memory()
        algorithm.forward_split(q, k, v, num_splits=num_splits, memory=memory, **options)
        counts.append(memory)
    assert counts[0].matmul_flops == counts[1].matmul_flops
    part = 4 * 2 * 8 * (16 + 1)
    for count in ("bytes_read", "bytes_written"):
        assert getattr(counts[1], count) - getattr(counts[0], count) == 4 * part


def test_splits_without_a_key_count_nothing():
    outs, lses = torch.randn(3, 5, 8), torch.randn(3, 5, 1)
    expected = algorithm.merge(outs[:2], lses[:2])
    outs[2], lses[2] = 0, -torch.inf
    torch.testing.assert_close(algorithm.merge(outs, lses), expected)
    out, lse = algorithm.merge(torch.zeros(2, 5, 8), torch.full((2, 5, 1), -torch.inf))
    assert torch.equal(out, torch.zeros(5, 8))
    assert lse.isneginf().all()


def test_merging_is_what_the_front_door_does_between_calls():
    outs, lses = torch.randn(4, 2, 3, 5, 8), torch.randn(4, 2, 5, 3)
    expected = fa.merge(outs.unbind(), lses.unbind())
    out, lse = algorithm.merge(outs, lses.transpose(2, 3)[..., None])
    torch.testing.assert_close((out, lse[..., 0].transpose(1, 2)), expected)


# ---- Refusals


def refused(error, match, q, k_cache, v_cache, **options):
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(q, k_cache, v_cache, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"cache_seqlens": 5}, TypeError, "cache_seqlens must be an int32 tensor"),
        ({"cache_seqlens": torch.zeros(6)}, ValueError, "cache_seqlens must be int32; got torch.float32"),
        ({"cache_seqlens": torch.zeros(5, dtype=torch.int32)}, ValueError, r"of shape \(6,\).*got shape \(5,\)"),
        ({"cache_seqlens": torch.zeros(6, 2, dtype=torch.int32)[:, 0]}, ValueError, "must be contiguous"),
        ({"cache_seqlens": torch.zeros(6, dtype=torch.int32, device="meta")}, ValueError, "on the device of q, cpu"),
        ({"cache_seqlens": torch.full((6,), 1004, dtype=torch.int32)}, ValueError, "0 up to .* 1003; got lengths"),
        ({"cache_seqlens": torch.full((6,), -1, dtype=torch.int32)}, ValueError, "got lengths from -1 to -1"),
        ({"num_splits": -1}, ValueError, "num_splits must be 1 to 128, or 0"),
        ({"num_splits": 129}, ValueError, "got 129"),
        ({"num_splits": True}, TypeError, "num_splits must be a Python int; got bool"),
        ({"num_splits": 2.0}, TypeError, "num_splits must be a Python int; got float"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a Python number"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"window_size": [1, 1]}, TypeError, "window_size must be a tuple"),
        ({"out": torch.zeros(1)}, ValueError, "out must be torch.bfloat16 of shape"),
        ({"lse": torch.zeros(1)}, ValueError, "lse must be torch.float32 of shape"),
        ({"k": None}, TypeError, "unexpected keyword argument 'k'"),
        ({"block_table": None}, TypeError, "unexpected keyword argument 'block_table'"),
        ({"rotary_cos": None}, TypeError, "unexpected keyword argument 'rotary_cos'"),
    ],
)
def test_wrong_arguments(options, error, match):
    refused(error, match, *make()[:3], **options)


def test_wrong_tensors():
    q, k_cache, v_cache, _ = make()
    refused(TypeError, "k must be a torch.Tensor; got NoneType", q, None, v_cache)
    refused(ValueError, "k and v must have one shape", q, k_cache, v_cache[:, 1:])
    refused(ValueError, "must have one batch", q[1:], k_cache, v_cache)
    refused(ValueError, "must have one dtype", q.half(), k_cache, v_cache)
    refused(ValueError, "positive multiple of the heads", q[:, :, :5], k_cache, v_cache)
    refused(UnsupportedProblem, "not float32", *(x.float() for x in (q, k_cache, v_cache)))


@pytest.mark.parametrize("place", [0, 1, 2], ids=["q", "k_cache", "v_cache"])
def test_a_gradient_is_refused_by_name(place):
    tensors = list(make()[:3])
    tensors[place].requires_grad_()
    refused(UnsupportedProblem, "flash_attn_with_kvcache has no gradient", *tensors)
    with torch.no_grad():
        flash_attn_with_kvcache(*tensors)


def test_a_cache_that_the_kernel_cannot_read_is_refused_and_not_copied():
    cache = torch.empty(2, 9, 2, 64, dtype=torch.bfloat16)
    kvcache._check_cache("k_cache", cache)
    kvcache._check_cache("k_cache", cache[:, 1:, 1:, :32])
    with pytest.raises(ValueError, match=r"k_cache must have a last stride of 1 .* it is never copied; got strides"):
        kvcache._check_cache("k_cache", cache.transpose(2, 3))
    with pytest.raises(ValueError, match="others that are multiples of 16 bytes"):
        kvcache._check_cache("v_cache", torch.empty(2, 9, 2, 65, dtype=torch.bfloat16)[..., :64])
    with pytest.raises(ValueError, match="v_cache must be aligned to 16 bytes"):
        kvcache._check_cache("v_cache", cache.view(-1)[1 : 1 + 64 * 8].view(1, 4, 2, 64))


# ---- The front door


def test_the_front_door():
    q, k_cache, v_cache, cache_seqlens = make()
    expected = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, num_splits=2)
    for version in ("auto", "fa3"):
        out = fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, version=version, cache_seqlens=cache_seqlens, num_splits=2
        )
        assert torch.equal(out, expected)
    for version in ("fa1", "fa2"):
        with pytest.raises(UnsupportedProblem, match=f"{version} cannot run this problem: .* fa3 can"):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, version=version)
        with fa.use(version), pytest.raises(UnsupportedProblem, match=f"{version} cannot"):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache)
    with pytest.raises(ValueError, match="version must be one of"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, version="fa4")


def test_compiled_without_a_break():
    q, k_cache, v_cache, cache_seqlens = make(4)

    def decode(q, out):
        return fa.flash_attn_with_kvcache(
            2 * q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=True, num_splits=3, return_lse=True, out=out
        )

    expected = decode(q, None)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    out = torch.empty_like(q)
    for given in (None, out):
        assert all(torch.equal(x, y) for x, y in zip(compiled(q, given), expected, strict=True))
    assert torch.equal(out, expected[0])


def test_the_operator_keeps_its_promises():
    q, k_cache, v_cache, cache_seqlens = make(lengths=(9, 5), capacity=9)
    arguments = (q, k_cache, v_cache, cache_seqlens, None, None, None, None, True, 3, None, 0.0, 2, None)
    torch.library.opcheck(torch.ops.fa3.with_kvcache.default, arguments)


# ---- Choices

PROBLEM = Problem(batch=1, seqlen_q=1, seqlen_k=8192, heads_q=32, heads_kv=8, head_dim=128)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q", [1, 4, 16, 17, 600])
@pytest.mark.parametrize("heads", [*HEADS, (64, 1)], ids=str)
def test_few_queries_are_one_tile(heads, seqlen_q, head_dim):
    problem = replace(PROBLEM, heads_q=heads[0], heads_kv=heads[1], seqlen_q=seqlen_q, head_dim=head_dim)
    config = decode_config(problem)
    assert config.scheduler == "static"
    if seqlen_q <= 16:
        assert config.pack_gqa == (problem.group > 1)
    if seqlen_q * problem.group <= 64:
        assert config.tile_m == 64


@pytest.mark.parametrize("batch", [1, 2, 8, 24, 64, 300])
@pytest.mark.parametrize("capacity", [1, 128, 512, 1024, 8192, 32768, 131072])
@pytest.mark.parametrize("heads", [(32, 8), (16, 1)], ids=str)
def test_the_number_of_splits(heads, capacity, batch):
    problem = replace(PROBLEM, batch=batch, seqlen_k=capacity, heads_q=heads[0], heads_kv=heads[1])
    config = decode_config(problem)
    num_splits = choose_splits(problem, config, 132)
    num_blocks = -(-capacity // config.tile_n)
    assert 1 <= num_splits <= 128
    assert num_splits <= num_blocks, "a split has at least one block"
    times = [estimated_us(problem, config, 132, n) for n in (num_splits, 1)]
    assert times[0] <= times[1]
    num_tiles = batch * heads[1]
    if num_tiles >= 132 * 3:
        assert num_splits == 1, "enough tiles by themselves"
    elif num_tiles < 66 and num_blocks >= 256:
        assert num_splits > 1
        assert num_tiles * num_splits >= 132 // 2, "enough SMs to use up the bandwidth"


def test_a_window_leaves_less_to_split():
    config = decode_config(PROBLEM)
    windowed = replace(PROBLEM, seqlen_k=131072, window=(200, None))
    assert choose_splits(windowed, config, 132) == 1
    assert choose_splits(replace(windowed, window=(None, 5)), config, 132) > 1


# ---- Launches


@pytest.fixture
def launched(monkeypatch):
    """What the kernels of a prepared run are called with, and their keys."""
    calls = []

    def load(key, build):
        return lambda *arguments: calls.append((key, build, arguments))

    monkeypatch.setattr(kvcache, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return calls


@pytest.mark.parametrize("has_lengths", [False, True])
def test_one_split_is_one_launch(launched, has_lengths):
    q, k_cache, v_cache, cache_seqlens = make(4)
    cache_seqlens = cache_seqlens if has_lengths else None
    problem = Problem.from_tensors(q, k_cache, v_cache, causal=True, softmax_scale=0.25)
    run = kvcache._prepare(problem, 1, q.dtype, q, has_lengths, NO_SCALES)
    out, lse = run(q, k_cache, v_cache, cache_seqlens, NO_SCALES, None, None)
    [(key, build, arguments)] = launched
    assert (key.sequences, key.splits, key.causal) == ("cached" if has_lengths else "dense", False, True)
    assert build is kvcache.build_forward
    assert all(x is y for x, y in zip(arguments[:5], (q, k_cache, v_cache, out, lse), strict=True))
    assert arguments[5:] == (None, cache_seqlens, None, 0.25, 0.0, 2**30, 0, 132, 1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (6, 6, 4), torch.float32)


def test_several_splits_are_merged(launched):
    q, k_cache, v_cache, cache_seqlens = make(4)
    problem = Problem.from_tensors(q, k_cache, v_cache, window_size=(20, 1), softcap=2.0)
    run = kvcache._prepare(problem, 7, q.dtype, q, True, NO_SCALES)
    given = torch.empty_like(q), torch.empty(6, 6, 4)
    results = run(q, k_cache, v_cache, cache_seqlens, NO_SCALES, *given)
    assert all(x is y for x, y in zip(results, given, strict=True))
    (attention, _, arguments), (merge, build, merged) = launched
    assert (attention.splits, attention.window, attention.softcap) == (True, True, True)
    assert (merge.direction, merge.config, build) == ("merge", None, kvcache.build_merge)
    assert arguments[6] is cache_seqlens
    assert arguments[8:] == (0.25, 2.0, 20, 1, 132, 7)
    parts = arguments[3:5]
    assert [(tuple(x.shape), x.dtype) for x in parts] == [((7, *q.shape), torch.float32), ((7, 6, 6, 4), torch.float32)]
    assert all(x is y for x, y in zip(merged, (*parts, *given), strict=True))


def test_queries_that_no_kernel_reads_are_copied_and_the_caches_never(launched):
    q, k_cache, v_cache, _ = make(4, head_dim=64)
    q = q.transpose(1, 3).contiguous().transpose(1, 3)
    run = kvcache._prepare(Problem.from_tensors(q, k_cache, v_cache), 0, q.dtype, q, False, NO_SCALES)
    out, _ = run(q, k_cache, v_cache, None, NO_SCALES, None, None)
    [(_, _, arguments), *_] = launched
    assert arguments[0].is_contiguous()
    assert torch.equal(arguments[0], q)
    assert arguments[1] is k_cache
    assert arguments[2] is v_cache
    assert out.is_contiguous()


def test_the_merge_key_is_not_the_attention_kernels():
    keys = {
        kvcache.attention_kernel(PROBLEM, Config(), n, lengths, PROBLEM.dtype)[0]
        for n in (1, 2)
        for lengths in (False, True)
    }
    assert len(keys | {kvcache.merge_key(PROBLEM.head_dim, PROBLEM.dtype)}) == 5
