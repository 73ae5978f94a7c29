"""Run every kernel once in a process of its own, before the sweep trusts it.

A kernel that hangs cannot be interrupted, and one that faults takes its process's CUDA context with it. Here it costs a
worker process, `python -m benchmarks.probe CLASS VERSION SWITCHED`, and the rows of that version in that configuration.
"""

import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import IO

from benchmarks.contenders import Ours
from benchmarks.problems import code, name, random_tensors
from benchmarks.rows import ROOT
from fa_common.compile import precompile
from fa_common.isolated import IsolatedFailure
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT, report

TIMEOUT_S = 30.0  # for one problem, loading its kernel included
COMPILING_TIMEOUT_S = 150.0  # the same where the kernel has to be compiled first
NO_ANSWER = "no answer"
STARTUP_S = 180.0  # until a worker has torch, CUDA and the package


def unfit(ours: Sequence[Ours], problems: Sequence[Problem]) -> dict[tuple[str, Problem], str]:
    """Compiles every kernel and runs each once, all outside this process: (name, problem) that cannot run, and why.

    What a generation does not claim to run is not tried.
    """
    named = {one.name: one for one in ours}
    possible = {one.name: [problem for problem in problems if not one.why_not(problem)] for one in ours}
    kernels = {(one.name, problem): one.kernel(problem) for one in ours for problem in possible[one.name]}
    kernels = {job: kernel for job, kernel in kernels.items() if kernel}
    uncompiled = precompile(kernels.values())
    found = {
        job: f"does not compile: {error_line(uncompiled[key])}"
        for job, (key, _) in kernels.items()
        if key in uncompiled
    }

    def run_once(who: str) -> dict[Problem, str]:
        runnable = [problem for problem in possible[who] if (who, problem) not in found]
        compiled = all((who, problem) in kernels for problem in runnable)
        failed = failures(command_of(named[who]), runnable, TIMEOUT_S if compiled else COMPILING_TIMEOUT_S)
        return {problem: reason + _too_large(reason, kernels.get((who, problem))) for problem, reason in failed.items()}

    with ThreadPoolExecutor(max(1, len(possible))) as pool:
        for who, failed in zip(possible, pool.map(run_once, possible), strict=True):
            found |= {(who, problem): reason for problem, reason in failed.items()}
    return found


def error_line(failure: IsolatedFailure) -> str:
    """What went wrong, without the traceback that led there and without the output around it."""
    return str(failure).partition("\nits output ends:\n")[0].strip().splitlines()[-1]


def command_of(one: Ours) -> tuple[str, ...]:
    """The worker of one of ours, with its switches."""
    kind = f"{type(one).__module__}:{type(one).__qualname__}"
    return sys.executable, "-m", "benchmarks.probe", kind, one.version, json.dumps(one.switched)


def _too_large(reason: str, kernel: tuple | None) -> str:
    """A clause on a kernel that asks for more shared memory than there is, which no launch says in words; else ""."""
    if kernel is None or reason.startswith(NO_ANSWER):
        return ""
    try:
        needed = report(*kernel).shared_memory
    except (IsolatedFailure, ValueError):  # the reason at hand has to do
        return ""
    if needed <= SHARED_MEMORY_LIMIT:
        return ""
    return f"; it needs {needed} bytes of shared memory, sm_90 has {SHARED_MEMORY_LIMIT}"


def failures(
    command: Sequence[str],
    problems: Sequence[Problem],
    timeout: float = TIMEOUT_S,
    startup: float = STARTUP_S,
) -> dict[Problem, str]:
    """The problems that a worker cannot run, each with the reason; a hang lasts `timeout` seconds and no longer.

    Short sequences come first. A problem that fails takes with it the longer ones of its dtype, head_dim and mask: they
    run the same code, and each further hang would cost as much again.
    """
    todo, failed = sorted(problems, key=lambda problem: problem.seqlen_q), {}
    while todo:
        worker = _Worker.start(command, todo)
        try:
            if reason := worker.answer(startup):
                return failed | dict.fromkeys(todo, f"its probe did not start: {reason}")
            culprit = None
            for problem in todo:
                if reason := worker.answer(timeout):
                    culprit = problem
                    break
        finally:
            worker.stop()
        if culprit is None:
            return failed
        rest = todo[todo.index(culprit) :]
        failed |= {other: f"{reason} (at {name(culprit)})" for other in rest if code(other) == code(culprit)}
        todo = [other for other in rest if other not in failed]
    return failed


def work(ours: Ours, requests: IO[bytes], answers: IO[str]) -> None:
    """The worker: an empty line once it is ready, then one a problem; a line with text is a failure and its last."""
    problems = pickle.load(requests)
    ours.prepare(problems[0], *random_tensors(problems[0]))  # imports the package and starts CUDA
    print(file=answers, flush=True)
    for problem in problems:
        try:
            out = ours.prepare(problem, *random_tensors(problem))()
            last = out[-1] if isinstance(out, tuple) else out  # of dQ, dK and dV
            last.flatten()[-1].item()  # waits for the kernel, and raises what it raised
        except Exception as error:
            print(" ".join(f"{type(error).__name__}: {error}".split()), file=answers, flush=True)
            return
        print(file=answers, flush=True)


@dataclass(frozen=True)
class _Worker:
    """A running worker and the lines it answers."""

    process: subprocess.Popen
    lines: queue.Queue  # a str each, None once the worker is gone
    stderr: IO[bytes]

    @classmethod
    def start(cls, command: Sequence[str], problems: Sequence[Problem]) -> "_Worker":
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by `stop`
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT)
        with suppress(BrokenPipeError), process.stdin:  # a worker that is gone already is missed at its first answer
            pickle.dump(problems, process.stdin)
        lines = queue.Queue()

        def pump() -> None:
            for line in process.stdout:
                lines.put(line.decode(errors="replace").strip())
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        return cls(process, lines, stderr)

    def answer(self, timeout: float) -> str:
        """The next line: empty for success, else the reason of the failure."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            return f"{NO_ANSWER} within {timeout:.0f} s"
        return self._last_words() if line is None else line

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stderr.close()

    def _last_words(self) -> str:
        status = self.process.wait()
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with status {status}" + (f": {lines[-1]}" if lines else "")


if __name__ == "__main__":
    # The answers keep the pipe to themselves: whatever else writes to stdout, the compiler's C++ too, goes to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        kind, version, switched = sys.argv[1:]
        work(resolve_name(kind)(version, switched=json.loads(switched)), sys.stdin.buffer, pipe)
