import sys
from types import ModuleType

import pytest
import torch

from benchmarks.correctness import limit, relative_error
from benchmarks.peers import PEERS, Package
from benchmarks.problems import random_tensors
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


def test_the_gemm_is_checked_too(small_gemm):
    assert small_gemm.relative_error() < 1e-2
