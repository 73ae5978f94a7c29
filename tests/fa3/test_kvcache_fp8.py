"""Decoding with a cache in e4m3: values and errors on a CPU, choices, what is launched, and what it is compiled to.

The kernels themselves run in test_kvcache_fp8_gpu.py.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import fa
import fa3
from fa3 import kvcache
from fa3.config import check_fp8_config, default_fp8_config
from fa3.fp8_launch import build_forward, forward_key
from fa3.kvcache import (
    E4M3_KEYS_PER_US,
    attention_kernel,
    choose_splits,
    decode_config,
    estimated_us,
    flash_attn_with_kvcache,
)
from fa_common.compile import KernelKey
from fa_common.problem import Problem, UnsupportedProblem
from fa_common.report import SHARED_MEMORY_LIMIT, report
from tests.fa3.test_kvcache_fp8_gpu import MASKS, attend, check, exact, make
from tests.fa3.test_kvcache_gpu import HEADS

E4M3 = torch.float8_e4m3fn
SCALES = ("tensor", "head", "block")


# ---- Values


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("seqlen_q", [1, 4, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_the_reference(heads, seqlen_q, scales):
    caches = make(seqlen_q, heads, head_dim=16, scales=scales, device="cpu")
    for name, options in MASKS.items():
        for num_splits in (0, 1, 3):
            check((name, num_splits), attend(caches, num_splits=num_splits, **options), exact(caches, **options))


def test_without_lengths_the_whole_cache_is_used():
    caches = make(lengths=(300, 300), capacity=300, head_dim=16, device="cpu")
    expected = attend(caches)
    results = attend(caches._replace(cache_seqlens=None))
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_out_has_the_type_asked_for_and_goes_where_it_is_told():
    caches = make(head_dim=16, device="cpu")
    expected, expected_lse = attend(caches, out_dtype=torch.float16)
    assert expected.dtype == torch.float16
    out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    results = attend(caches, out_dtype=torch.float16, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_empty():
    q, cache = torch.zeros(2, 1, 4, 16).to(E4M3), torch.zeros(2, 0, 2, 16).to(E4M3)
    out, lse = flash_attn_with_kvcache(q, cache, cache, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 1, 4, 16).bfloat16())
    assert lse.isneginf().all()


def test_a_new_token_sees_what_the_prefills_last_row_sees():
    q, k, v = torch.randn(1, 257, 4, 16), *torch.randn(2, 1, 257, 2, 16)
    quantized = fa3.quantize(q, k, v, scales="head")
    prefill = fa3.flash_attn_func(**quantized._asdict(), causal=True)
    scales = {name: value for name, value in quantized._asdict().items() if name.startswith("descale")}
    token = flash_attn_with_kvcache(quantized.q[:, -1:], quantized.k, quantized.v, **scales)
    # Both round P to e4m3, in blocks of other keys.
    torch.testing.assert_close(token.float(), prefill[:, -1:].float(), rtol=0.05, atol=0.02)


# ---- Refusals


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q": torch.zeros(6, 1, 8, 16).bfloat16()}, ValueError, "q, k and v must all be torch.float8_e4m3fn"),
        ({"q": None}, TypeError, "q must be a torch.Tensor"),
        ({"descale_k": 1.0}, TypeError, "descale_k must be a float32 tensor, or None for 1"),
        ({"descale_k": torch.ones(2)}, ValueError, r"descale_k must be \(\) or \(1,\) .*got \(2,\)"),
        ({"descale_q": torch.ones(6, 8, 2)}, ValueError, r"descale_q must be .*\(6, 8, 1\).*got \(6, 8, 2\)"),
        ({"descale_v": torch.ones(1).double()}, ValueError, "descale_v must be float32"),
        ({"descale_v": -torch.ones(1)}, ValueError, "descale_v must be positive and finite"),
        ({"out_dtype": torch.float32}, ValueError, "out_dtype must be torch.bfloat16 or torch.float16"),
        ({"out": torch.zeros(6, 1, 8, 16).half()}, ValueError, "out must be torch.bfloat16 of shape"),
        ({"num_splits": 129}, ValueError, "num_splits must be 1 to 128"),
        ({"descale_q": torch.ones(1).requires_grad_()}, UnsupportedProblem, "has no gradient"),
    ],
)
def test_wrong_arguments(change, error, match):
    arguments = make(head_dim=16, device="cpu")._asdict() | change
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(**arguments)


def test_sixteen_bits_have_no_scales():
    q, cache = torch.zeros(1, 1, 2, 16).bfloat16(), torch.zeros(1, 9, 2, 16).bfloat16()
    for name, value in (("descale_q", torch.ones(1)), ("out_dtype", torch.float16)):
        with pytest.raises(ValueError, match=r"are for torch\.float8_e4m3fn tensors; got torch\.bfloat16"):
            flash_attn_with_kvcache(q, cache, cache, **{name: value})


def test_head_dims_that_fp8_has_not():
    x = torch.zeros(1, 1, 2, 24).to(E4M3)
    with pytest.raises(UnsupportedProblem, match="multiples of 16 up to 256; got 24"):
        flash_attn_with_kvcache(x, x, x)


# ---- The front door and torch.compile


def test_the_front_door_and_compiled_without_a_break():
    caches = make(4, (6, 2), head_dim=16, device="cpu")
    expected = attend(caches, causal=True)

    def decode(arguments):
        return fa.flash_attn_with_kvcache(**arguments, causal=True, return_lse=True)

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for function in (decode, compiled):
        assert all(torch.equal(x, y) for x, y in zip(function(caches._asdict()), expected, strict=True))


def test_the_operator_keeps_its_promises():
    caches = make(lengths=(9, 5), capacity=9, head_dim=16, device="cpu")
    arguments = (*caches, None, True, 3, None, 0.0, 2, None)
    checks = ("test_autograd_registration", "test_faketensor")  # the others compare e4m3 tensors, which torch cannot
    torch.library.opcheck(torch.ops.fa3.with_kvcache.default, arguments, test_utils=checks)


# ---- Choices and launches

PROBLEM = Problem(batch=1, seqlen_q=1, seqlen_k=8192, heads_q=32, heads_kv=8, head_dim=128, dtype=E4M3)


def test_half_the_bytes_take_less_time_but_keys_take_theirs():
    bf16 = replace(PROBLEM, dtype=torch.bfloat16)
    for batch, capacity in product((1, 8, 64), (1024, 8192, 131072)):
        sizes = {"batch": batch, "seqlen_k": capacity}
        problems = [replace(problem, **sizes) for problem in (PROBLEM, bf16)]
        times = [estimated_us(p, decode_config(p), 132, choose_splits(p, decode_config(p), 132)) for p in problems]
        assert times[0] < times[1]
    narrow = replace(PROBLEM, batch=8, head_dim=16)
    assert estimated_us(narrow, decode_config(narrow), 132, 1) > 8192 / E4M3_KEYS_PER_US
    assert choose_splits(narrow, decode_config(narrow), 132) > 1


@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_what_is_launched(monkeypatch, num_splits, has_lengths):
    calls = []
    monkeypatch.setattr(kvcache, "load", lambda key, build: lambda *arguments: calls.append((key, build, arguments)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    q, k, v, lengths, *descales = make(4, (8, 2), head_dim=32, device="cpu")
    lengths = lengths if has_lengths else None
    problem = Problem.from_tensors(q, k, v, softmax_scale=0.25)
    run = kvcache._prepare(problem, num_splits, torch.float16, q, has_lengths, descales)
    out, lse = run(q, k, v, lengths, descales, None, None)
    assert (out.shape, out.dtype, lse.dtype) == (q.shape, torch.float16, torch.float32)
    (key, build, arguments), *merges = calls
    assert (key.dtype, key.splits, key.v_by_columns) == ("float8_e4m3fn-float16", num_splits > 1, False)
    assert key.sequences == ("cached" if has_lengths else "dense")
    assert build is build_forward
    assert all(x is y for x, y in zip(arguments[:3], (q, k, v), strict=True))
    assert all(x is y for x, y in zip(arguments[5:8], descales, strict=True))  # of blocks: as they are
    assert arguments[8:] == (None, lengths, None, 0.25, 0.0, 2**30, 2**30, 132, num_splits)
    assert [key.dtype for key, *_ in merges] == ["float16"] * (num_splits > 1)


# ---- Kernels


def kernels() -> list:
    keys: dict[KernelKey, str] = {}
    sizes = {"decoding": (1, 32, 8), "one head each": (1, 8, 8), "two tiles": (16, 64, 8), "many queries": (300, 8, 8)}
    masks = {"full": {}, "window softcap": {"window": (512, 0), "softcap": 30.0}}
    for head_dim, (title, (seqlen_q, heads_q, heads_kv)), num_splits in product((64, 128, 256), sizes.items(), (1, 2)):
        for mask, options in masks.items():
            if options and (num_splits == 1 or title not in ("decoding", "many queries")):
                continue  # the same config, and fewer registers
            problem = Problem(8, seqlen_q, 8192, heads_q, heads_kv, head_dim, dtype=E4M3, **options)
            key, _ = attention_kernel(problem, decode_config(problem), num_splits, True, torch.bfloat16)
            keys[key] = f"d{head_dim}-{title}-{mask}-{num_splits} splits"
    for head_dim, v_by_columns in product((64, 128, 256), (False, True)):
        problem = Problem(8, 4, 8192, 32, 8, head_dim, dtype=E4M3)
        key = forward_key(problem, default_fp8_config(problem, v_by_columns), torch.bfloat16, v_by_columns)
        keys[key] = f"d{head_dim}-few queries, V by {'columns' if v_by_columns else 'rows'}"
    return [pytest.param(key, id=title) for key, title in keys.items()]


@pytest.mark.slow
@pytest.mark.parametrize("key", kernels())
def test_kernel(key: KernelKey):
    check_fp8_config(key.config)
    kernel = report(key, build_forward)
    assert not kernel.problems(), "; ".join(kernel.problems())  # spills, local memory, ptxas' remarks (C75..)
    assert kernel.shared_memory <= SHARED_MEMORY_LIMIT
    instructions = set(kernel.instructions)
    queries = {"LDGSTS"} if key.config.pack_gqa else {"UTMALDG"}  # cp.async gathers the rows of several heads
    assert instructions >= {"QGMMA", "UTMALDG"} | queries
    assert not instructions & {"HGMMA", "HMMA"}
    assert kernel.instructions["USETMAXREG"] == 2
