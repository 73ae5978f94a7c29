"""The probe's parent, against workers that stand in for a kernel that works, hangs, crashes or fails."""

import sys

import pytest

from benchmarks import probe
from benchmarks.contenders import Ours

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
