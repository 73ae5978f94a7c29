"""The probe's parent, against workers that stand in for a kernel that works, hangs, crashes or fails."""

import sys
from dataclasses import replace

import pytest

from benchmarks import probe
from benchmarks.contenders import Ours
from benchmarks.decode import Cached
from benchmarks.problems import packed
from fa_common.isolated import IsolatedFailure

TIMES = {"timeout": 2.0, "startup": 60.0}


def worker(body: str) -> tuple[str, ...]:
    """A worker whose `body` runs for each problem; `ok()` answers."""
    program = (
        "import os, pickle, sys, time\n"
        "def ok(): print(flush=True)\n"
        "problems = pickle.load(sys.stdin.buffer)\n"
        "ok()\n"
        f"for problem in problems:\n    {body}\n"
    )
    return sys.executable, "-c", program


@pytest.fixture
def problems(cpu_problem):
    return [cpu_problem(seqlen, causal) for seqlen in (256, 64, 128) for causal in (False, True)]


def test_nothing_fails(problems):
    assert probe.failures(worker("ok()"), problems, **TIMES) == {}


def test_without_problems_no_worker_starts():
    assert probe.failures(("/no/such/program",), []) == {}


def test_the_shortest_problem_comes_first(problems):
    body = "print(problem.seqlen_q, flush=True); time.sleep(60)"
    failed = probe.failures(worker(body), problems, **TIMES)
    assert {reason.split()[0] for reason in failed.values()} == {"64"}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("time.sleep(60)", "no answer within 2 s"),
        ("os.abort()", "its process ended with status -6"),
        ("sys.exit('out of order')", "its process ended with status 1: out of order"),
        ("print('RuntimeError: bad tile', flush=True); break", "RuntimeError: bad tile"),
    ],
)
def test_a_failure_costs_only_problems_that_run_the_same_code(problems, trouble: str, reason: str):
    program = worker(f"if problem.causal and problem.seqlen_q == 128:\n        {trouble}\n    ok()")
    failed = probe.failures(program, problems, **TIMES)
    assert {(problem.causal, problem.seqlen_q) for problem in failed} == {(True, 128), (True, 256)}
    assert all(text.startswith(reason) and "causal 1 x 128 x 1" in text for text in failed.values())


def test_a_worker_that_does_not_start_fails_everything(problems):
    failed = probe.failures((sys.executable, "-c", "raise SystemExit('no torch')"), problems)
    assert set(failed) == set(problems)
    assert set(failed.values()) == {"its probe did not start: its process ended with status 1: no torch"}


def test_the_worker_answers_a_line_for_each_problem(problems):
    command = probe.command_of(Ours("fa3", switched={"pingpong": False}))
    assert probe.failures(command, problems[:2]) == {}


@pytest.fixture
def launch_fails(monkeypatch, clean_report, cpu_problem):
    """Kernels that compile, of the given size, and whose launch ends as given."""

    def make(reason: str, shared_memory: int) -> str:
        problem = cpu_problem()
        monkeypatch.setattr(probe, "precompile", lambda jobs: {})
        monkeypatch.setattr(probe, "failures", lambda command, problems, timeout: dict.fromkeys(problems, reason))
        monkeypatch.setattr(probe, "report", lambda key, build: replace(clean_report, shared_memory=shared_memory))
        return probe.unfit([Ours("fa3")], [problem])["fa3", problem]

    return make


@pytest.mark.parametrize(
    ("reason", "shared_memory", "explained"),
    [
        ("RuntimeError: invalid argument", 240_000, "; it needs 240000 bytes of shared memory, sm_90 has 232448"),
        ("RuntimeError: invalid argument", 200_000, ""),
        ("no answer within 30 s", 240_000, ""),
    ],
)
def test_a_kernel_that_is_too_large_says_so(launch_fails, reason: str, shared_memory: int, explained: str):
    assert launch_fails(reason, shared_memory) == reason + explained


def test_what_does_not_compile_has_its_error_alone(monkeypatch, cpu_problem):
    problem = cpu_problem()
    failure = IsolatedFailure("f raised\nTraceback:\n  here\nValueError: tile_n\n\nits output ends:\nnoise")
    monkeypatch.setattr(probe, "precompile", lambda jobs: {key: failure for key, _ in jobs})
    assert probe.unfit([Ours("fa3")], [problem]) == {("fa3", problem): "does not compile: ValueError: tile_n"}


def test_a_contender_whose_kernels_are_unknown_has_time_to_compile(monkeypatch, cpu_problem):
    timeouts = []
    monkeypatch.setattr(probe, "failures", lambda command, problems, timeout: timeouts.append(timeout) or {})
    cached = Cached("fa3")
    monkeypatch.setattr(cached, "why_not", lambda problem: None)
    assert probe.unfit([cached], [cpu_problem()]) == {}
    assert timeouts == [probe.COMPILING_TIMEOUT_S]


def test_the_worker_knows_the_contender_by_name():
    *_, kind, version, switched = probe.command_of(Cached("fa3", switched={"num_splits": 4}))
    assert (kind, version, switched) == ("benchmarks.decode:Cached", "fa3", '{"num_splits": 4}')


def test_the_real_worker_runs_dense_and_packed_problems(cpu_problem):
    problems = [cpu_problem(), replace(cpu_problem(), **packed([3, 40]))]
    assert probe.failures(probe.command_of(Ours("fa3")), problems) == {}
