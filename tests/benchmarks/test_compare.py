"""The sweep itself, on problems that a CPU solves at once and with a timer that only pretends."""

from contextlib import nullcontext
from io import StringIO

import pytest
import torch
from rich.console import Console

from benchmarks import compare, comparison, rows
from benchmarks.contenders import Ours
from benchmarks.peers import GEMM, PEERS, Package
from benchmarks.timing import Budget
from fa import GENERATIONS


class Stub:
    """A contender whose call does what `attend` says."""

    def __init__(self, name: str, attend, why_not: str | None = None):
        self.name = name
        self.attend = attend
        self.reason = why_not

    def why_not(self, problem):
        return self.reason

    def prepare(self, problem, q, k, v):
        return lambda: self.attend(q, k, v)

    def scope(self):
        return nullcontext()

    def columns(self, problem):
        return {}


@pytest.fixture
def make_sweep(fake_timer, small_gemm, tmp_path):
    def make(contenders, unfit=(), timer=None):
        facts = {"gpu": "NVIDIA H200", "torch": torch.__version__, "dsl": None, "driver": None}
        timer = timer or fake_timer()
        return compare.Sweep(contenders, small_gemm, timer, Budget(rounds=2), tmp_path, facts, dict(unfit))

    return make


def kept(tmp_path) -> list:
    return list(rows.read(tmp_path / "h200" / "compare.jsonl"))


def test_every_version_is_checked_timed_and_kept(make_sweep, cpu_problem, tmp_path):
    sweep = make_sweep([*map(Ours, GENERATIONS), PEERS["torch-math"]])
    PEERS["torch-math"].why_not = lambda problem: None
    try:
        measured = sweep.measure(cpu_problem(causal=True))
    finally:
        del PEERS["torch-math"].why_not
    assert kept(tmp_path) == measured == sweep.rows
    assert [row.version for row in measured] == [GEMM, *GENERATIONS, "torch-math"]
    assert len({row.run for row in measured}) == 1
    assert not sweep.skipped
    for row in measured[1:]:
        assert 0 < row.rel_err < 1e-2
        assert (row.pass_, row.dtype, row.seqlen_q, row.causal, row.window) == ("fwd", "bfloat16", 64, True, None)
        assert row.tflops == pytest.approx(4 * 64 * 64**2 / 2 / 1e9)  # in 1 ms
        assert (row.sm_clock_mhz, row.power_w) == (1700.0, 600.0)
    for row in measured[1:4]:
        assert row.source_sha == rows.source_sha(row.version)
        assert row.config["tile_m"] > 0
        assert row.switches_label
    assert measured[-1].source_sha is None


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (lambda q, k, v: v, "wrong: relative error"),
        (lambda q, k, v: torch.full_like(q, torch.nan), "wrong: relative error nan"),
        (lambda q, k, v: q.view(1), "RuntimeError: shape"),
    ],
)
def test_a_wrong_version_gets_no_row(make_sweep, cpu_problem, tmp_path, attend, reason: str):
    sweep = make_sweep([Stub("fa2", attend), Ours("fa3")])
    sweep.measure(cpu_problem())
    assert [row.version for row in kept(tmp_path)] == [GEMM, "fa3"]
    [why] = [why for version, why in sweep.skipped if version == "fa2"]
    assert why.startswith(reason)


def test_ours_failing_is_a_failure_and_a_peer_lacking_something_is_not(make_sweep, cpu_problem, monkeypatch):
    def refuse(q, k, v):
        raise NotImplementedError("not for this head_dim")

    ours = Ours("fa3")
    monkeypatch.setattr(ours, "prepare", lambda problem, q, k, v: lambda: refuse(q, k, v))
    sweep = make_sweep([ours, Stub("cudnn", refuse), Stub("flash-attn-4", refuse, why_not="not installed")])
    sweep.measure(cpu_problem())
    assert sweep.failed == {"fa3"}
    assert ("flash-attn-4", "not installed") in sweep.skipped
    assert ("cudnn", "NotImplementedError: not for this head_dim") in sweep.skipped


def test_what_the_probe_found_unfit_is_not_launched(make_sweep, cpu_problem, tmp_path):
    def launch(q, k, v):
        pytest.fail("launched")

    problem = cpu_problem()
    sweep = make_sweep([Stub("fa1", launch)], {("fa1", problem): "no answer within 30 s"})
    sweep.measure(problem)
    assert [row.version for row in kept(tmp_path)] == [GEMM]
    assert sweep.failed == {"fa1"}


def test_problems_of_a_group_are_timed_in_turns(make_sweep, cpu_problem, fake_timer, tmp_path):
    timer = fake_timer(lambda call: 100.0)  # one launch is warm-up enough, and one a turn
    sweep = make_sweep([Ours("fa2"), Ours("fa3")], timer=timer)
    measured = sweep.measure(cpu_problem(64), cpu_problem(128))
    seen = [(row.version, row.seqlen_q) for row in measured[1:]]
    assert seen == [("fa2", 64), ("fa3", 64), ("fa2", 128), ("fa3", 128)]
    order = [call for call, _ in timer.bursts]
    assert len(order) == 5 * (1 + 2)
    assert set(order[:5]) == set(order[5:10]) == set(order[10:])
    assert order[5:10] != order[10:], "who is first changes"


def run_and_show(sweep, problems, tmp_path) -> tuple[int, str]:
    output = Console(file=StringIO(), width=160)
    status = compare.run(compare.steps(sweep, [[problem] for problem in problems]), output)
    compare.show(sweep, output, picture=tmp_path / "picture.svg")
    return status, output.file.getvalue()


def test_an_interrupt_keeps_what_was_measured(make_sweep, cpu_problem, fake_timer, tmp_path):
    class Interrupted(fake_timer):
        def burst(self, call, launches):
            if kept(tmp_path):  # in the second problem
                raise KeyboardInterrupt
            return super().burst(call, launches)

    sweep = make_sweep([Ours("fa2")], timer=Interrupted())
    status, output = run_and_show(sweep, [cpu_problem(64), cpu_problem(128)], tmp_path)
    assert status == 130
    assert [(row.version, row.seqlen_q) for row in kept(tmp_path)] == [(GEMM, 16), ("fa2", 64)]
    assert "Interrupted" in output
    assert f"2 rows of run {sweep.run}" in output
    assert (tmp_path / "picture.svg").exists()


def test_a_lost_gpu_ends_the_sweep(make_sweep, cpu_problem, tmp_path):
    def fault(q, k, v):
        if q.shape[1] == 128:
            raise torch.AcceleratorError("an illegal memory access was encountered", 700)
        return Ours("fa2").prepare(cpu_problem(64), q, k, v)()

    status, output = run_and_show(make_sweep([Stub("fa2", fault)]), [cpu_problem(64), cpu_problem(128)], tmp_path)
    assert status == 1
    assert len(kept(tmp_path)) == 2
    assert "The GPU is lost" in output


def test_the_end_shows_a_table_a_picture_and_what_is_missing(make_sweep, cpu_problem, tmp_path):
    missing = Package("flash-attn-3", "no_such_module")
    sweep = make_sweep([Ours("fa2"), Ours("fa3"), missing])
    status, output = run_and_show(sweep, [cpu_problem(64), cpu_problem(128)], tmp_path)
    assert status == 0
    assert "fa3 / fa2" in output
    assert "flash-attn-3 is missing in every problem: `import no_such_module` fails" in output
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_the_whole_command(monkeypatch, fake_timer, small_gemm, cpu_problem, tmp_path):
    facts = {"gpu": "NVIDIA H200", "torch": "2.11.0", "dsl": "4.8.1", "driver": "580.1"}
    monkeypatch.setattr(compare.machine, "facts", lambda: facts)
    monkeypatch.setattr(compare, "DeviceTimer", lambda telemetry: fake_timer())
    monkeypatch.setattr(compare, "Gemm", lambda: small_gemm)
    problems = [cpu_problem(64), cpu_problem(128)]
    unfit = {("fa1", problem): "does not compile: tile_n" for problem in problems}
    monkeypatch.setattr(compare.probe, "unfit", lambda ours, problems: unfit)
    output = Console(file=StringIO(), width=160)
    versions = ["fa1", "fa2", "fa3", "flash-attn-3"]
    status = compare.compare(problems, versions, Budget(rounds=1), tmp_path, tmp_path / "picture.svg", output)
    text = output.file.getvalue()
    assert status == 1
    assert "NVIDIA H200, driver 580.1, torch 2.11.0, CuTe DSL 4.8.1" in text
    assert "bfloat16 d=64 full 1 x 128 x 1: cublas-gemm 0  fa2 0  fa3 0 TFLOP/s" in text
    assert "fa1 is missing in every problem: does not compile: tile_n" in text
    assert [row.version for row in kept(tmp_path)] == [GEMM, "fa2", "fa3"] * 2


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize(("direction", "suite"), [("fwd", "compare"), ("bwd", "compare-bwd")])
def test_bursts_are_kept_by_themselves(cpu_problem, tmp_path, direction: str, suite: str):
    budget, output = Budget(rounds=1, idle_ms=250), Console(file=StringIO(), width=160)
    compare.compare([cpu_problem()], ["fa2"], budget, tmp_path, tmp_path / "picture.svg", output, direction)
    [file] = (tmp_path / "h200").iterdir()
    assert file.name == f"{suite}-burst.jsonl"
    measured = [(row.suite, row.version, row.idle_ms) for row in rows.read(file)]
    assert measured == [(f"{suite}-burst", GEMM, 250), (f"{suite}-burst", "fa2", 250)]


def test_every_title_of_bursts_says_how_long_the_rest_was(make_row):
    run = comparison.frame([make_row(version, idle_ms=250) for version in ("fa3", "cudnn")])
    titles = [table.title for table in compare.tables(run)]
    assert len(titles) == 2
    assert all(title.endswith(", each turn after 250 ms of rest") for title in titles)


def test_with_no_version_right_there_is_no_table(make_sweep, cpu_problem, tmp_path):
    status, output = run_and_show(make_sweep([Stub("fa2", lambda q, k, v: v)]), [cpu_problem(64)], tmp_path)
    assert status == 0
    assert "fa2 is missing in every problem: wrong" in output
    assert not (tmp_path / "picture.svg").exists()
