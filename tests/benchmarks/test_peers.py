import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from benchmarks.accuracy import dequantized
from benchmarks.correctness import QUANTIZED_OUT_LIMIT, limit, relative_error
from benchmarks.peers import FP8_PEERS, PEERS, CudnnFp8, Package
from benchmarks.problems import exact_output, packed, random_tensors
from fa_common.problem import Problem
from fa_common.reference import attention


def test_torchs_attention_is_called_with_heads_first_and_comes_back_with_seqlen_first(cpu_problem):
    problem, peer = cpu_problem(causal=True), PEERS["torch-math"]
    tensors = random_tensors(problem)
    with peer.scope():
        out = peer.prepare(problem, *tensors)()
    exact, _ = attention(*tensors, causal=True)
    assert relative_error(out, exact) < limit(problem.dtype)


@pytest.mark.parametrize("result", [lambda out: out, lambda out: (out, "lse")], ids=["out", "out and lse"])
def test_a_package_may_return_lse_as_well(monkeypatch: pytest.MonkeyPatch, cpu_problem, result):
    module = ModuleType("some_attention")
    module.flash_attn_func = lambda q, k, v, causal: result(q + causal)
    monkeypatch.setitem(sys.modules, "some_attention", module)
    peer, problem = Package("some-attention", "some_attention"), cpu_problem(causal=True)
    q, k, v = random_tensors(problem)
    assert peer.missing is None
    assert torch.equal(peer.prepare(problem, q, k, v)(), q + 1)


@pytest.mark.parametrize("error", [ImportError("no libcuda"), RuntimeError("built for another torch")])
def test_a_package_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(module: str):
        raise error

    monkeypatch.setattr("benchmarks.peers.import_module", fail)
    assert str(error) in Package("some-attention", "some_attention").missing


@pytest.mark.parametrize(("free_gib", "fits"), [(139, True), (90, False)])
def test_the_math_backend_is_left_out_where_its_scores_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, fits: bool
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * 2**30, 141 * 2**30))
    problem = Problem(batch=1, seqlen_q=16384, seqlen_k=16384, heads_q=32, heads_kv=32, head_dim=64)
    assert (PEERS["torch-math"].why_not(problem) is None) == fits


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_attends_to_tensors_with_a_scale_each(cpu_problem, fake_cudnn, causal: bool):
    problem = replace(cpu_problem(causal=causal), batch=2, heads_q=3, heads_kv=3, total_q=None, total_k=None)
    peer, tensors = FP8_PEERS["cudnn-fp8"], random_tensors(problem)
    call = peer.prepare(problem, *tensors)
    fake_cudnn.stream.cuda_stream = 2  # as while a CUDA graph is captured
    out = call()
    assert (out.shape, out.dtype) == (tensors[0].shape, torch.float8_e4m3fn)
    quantized = peer.quantize(*tensors)
    exact = exact_output(problem, *dequantized(quantized)) * peer.scale_out(quantized)
    assert relative_error(out, exact) < QUANTIZED_OUT_LIMIT

    [graph] = fake_cudnn.graphs
    given = graph.arguments
    assert given["generate_stats"] is False
    assert given["q"].dim == [2, 3, 64, 64]
    assert given["q"].stride == [64 * 3 * 64, 64, 3 * 64, 1], "heads follow each other in a token: nothing is copied"
    for name in ("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o"):
        assert (given[name].name, given[name].dim, given[name].data_type) == (name, [1, 1, 1, 1], "fp32")
    assert [x.output for x in graph.results] == [True, True, True], "cuDNN's own graphs have both maxima as outputs"
    assert [x.data_type for x in graph.results] == ["e4m3", "fp32", "fp32"]


def test_no_output_of_cudnn_saturates(cpu_problem, fake_cudnn):
    problem = cpu_problem(seqlen=1)
    q, k, v = random_tensors(problem)  # a single key: O is V, which reaches its scale's 448
    out = FP8_PEERS["cudnn-fp8"].prepare(problem, q, k, 1000 * v)()
    assert out.float().abs().max() == 224


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"causal": True}, None),
        ({"causal": True, "seqlen_k": 128, "total_k": None}, "aligned top-left"),
        ({"window": (16, 0)}, "window"),
        ({"softcap": 30.0}, "softcap"),
        (packed([64, 32]), "varlen"),
    ],
)
def test_what_cudnn_refuses_in_fp8(cpu_problem, fake_cudnn, changed: dict, reason: str | None):
    found = FP8_PEERS["cudnn-fp8"].why_not(replace(cpu_problem(), **changed))
    assert found is None if reason is None else reason in found


def test_cudnn_in_fp8_may_be_missing(cpu_problem):
    peer = CudnnFp8("cudnn-fp8", "cudnn_that_nobody_has")
    reason = "`import cudnn_that_nobody_has` fails: ModuleNotFoundError: No module named 'cudnn_that_nobody_has'"
    assert peer.missing == peer.why_not(cpu_problem()) == reason


def test_the_gemm_is_checked_too(small_gemm):
    assert small_gemm.relative_error() < 1e-2
