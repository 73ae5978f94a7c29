"""Gradients as what is measured: who computes them, and how they are checked and kept."""

import math

import pandas as pd
import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import compare, comparison, rows, tiles
from benchmarks.contenders import OURS, OursBackward
from benchmarks.correctness import limit, relative_error
from benchmarks.peers import GEMM, Differentiated, Sdpa
from benchmarks.problems import exact_gradients, packed, random_gradient, random_tensors
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa_common.problem import Problem

MATH = Sdpa("torch-math", SDPBackend.MATH)
ABLE = [v for v in ("fa1", "fa2", "fa3") if OursBackward(v).generation.default_backward_config]


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_contender_computes_the_same_gradients(cpu_problem, direction, causal):
    problem = cpu_problem(96, causal)
    tensors = random_tensors(problem)
    exact = exact_gradients(problem, *tensors)
    contenders = [*(OURS[direction](version) for version in ABLE), compare.in_direction(MATH, direction)]
    for one in contenders:
        call = compare.within(one, one.prepare(problem, *tensors))
        for _ in range(2):  # the graph of the forward must be there for the next call too
            assert relative_error(call(), exact) < limit(problem.dtype), one.name


def test_packed_gradients_are_exact_too():
    problem = Problem(**packed([5, 40, 17]), heads_q=2, heads_kv=1, head_dim=64, causal=True, device="cpu", arch=None)
    tensors = random_tensors(problem)
    assert random_gradient(problem).shape == tensors[0].shape
    found = OursBackward("fa2").prepare(problem, *tensors)()
    assert relative_error(found, exact_gradients(problem, *tensors)) < limit(problem.dtype)


def test_the_largest_error_counts():
    right = (torch.ones(4), torch.ones(4))
    assert relative_error((torch.ones(4), torch.zeros(4)), right) == 1.0
    assert relative_error((torch.ones(4), right[1] * 1.5), right) == pytest.approx(0.5)
    assert math.isnan(relative_error((torch.full((4,), torch.nan), torch.zeros(4)), right))


def test_rows_of_gradients(fake_timer, small_gemm, cpu_problem, tmp_path):
    facts = {"gpu": "NVIDIA H200", "torch": torch.__version__, "dsl": None, "driver": None}
    ours = [OURS["fwd+bwd"](version) for version in ("fa2", "fa3")]
    peer = Differentiated(MATH, with_forward=True)
    peer.why_not = lambda problem: None
    sweep = compare.Sweep(
        [*ours, peer],
        small_gemm,
        fake_timer(),
        Budget(rounds=1),
        tmp_path,
        facts,
        {},
        compare.SUITES["fwd+bwd"],
        "fwd+bwd",
    )
    sweep.measure(cpu_problem(64))
    kept = list(rows.read(tmp_path / "h200" / "compare-fwd-bwd.jsonl"))
    measured = [row for row in kept if row.version != GEMM]
    assert {row.version for row in measured} == {*ABLE, "torch-math"} & {"fa2", "fa3", "torch-math"}
    for row in measured:
        assert row.pass_ == "fwd+bwd"
        assert row.tflops == pytest.approx(3.5 * 4 * 64 * 64**2 / 1e9)  # in 1 ms
        assert 0 < row.rel_err < limit(torch.bfloat16)
    assert set(measured[0].config) == {"forward", "backward"}
    assert comparison.table(comparison.frame(kept)).title == "Forward and backward, TFLOP/s"


def test_a_candidate_changes_the_backwards_tiles():
    problem = Problem(1, 4096, 4096, 8, 8, 128)
    one = OursBackward("fa2", switched={"tile_n": 64})
    assert one.config(problem).tile_n == 64
    assert one.kernel(problem)[0].direction == "backward"
    assert one.why_not(problem) is None
    assert "multiple of 64" in OursBackward("fa2", switched={"tile_n": 72}).why_not(problem)


def test_only_who_has_a_backward_is_missing(make_row):
    run = comparison.frame([make_row("fa2", pass_="bwd")])
    assert isinstance(run, pd.DataFrame)
    assert {entry.split()[0] for entry in comparison.missing(run)} <= set(ABLE)


def test_the_backwards_tiles_are_searched():
    problem = Problem(1, 4096, 4096, 8, 8, 128)
    found = tiles.candidates("fa2", problem, tiles.space_of("fa2", "bwd"), "bwd")
    assert found[0].config(problem) == OursBackward("fa2").config(problem)
    assert len({one.kernel(problem)[0] for one in found}) == len(found) > 10
    with pytest.raises(ValueError, match=r"stages: fa2.BackwardConfig has no such field; choose from tile_m"):
        tiles.candidates("fa2", problem, {"stages": (1, 2)}, "bwd")
    if not GENERATIONS["fa3"].default_backward_config:
        with pytest.raises(ValueError, match="fa3 has no backward kernel"):
            tiles.space_of("fa3", "bwd")
