"""The version comparison on a GPU: for every problem, each version checked, then all of them timed in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from benchmarks import comparison, machine, plot, probe, rows
from benchmarks.contenders import Contender, Ours
from benchmarks.correctness import limit, relative_error
from benchmarks.peers import GEMM, PEERS, Gemm
from benchmarks.problems import name, problem_columns, random_tensors
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.telemetry import Telemetry
from benchmarks.timing import Budget, DeviceTimer, Timer, Timing, in_turns
from fa import GENERATIONS
from fa_common.problem import Problem
from fa_common.reference import attention

SUITE = "compare"
PICTURE = rows.ROOT / "docs" / "compare-latest.svg"


class Sweep:
    """One run: measures problems one by one and appends each row as soon as it is measured.

    `facts` are the columns that say where (`machine.facts`); `unfit` holds, by version and problem, why not to try.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        gemm: Gemm,
        timer: Timer,
        budget: Budget,
        results: Path,
        facts: Mapping[str, str | None],
        unfit: Mapping[tuple[str, Problem], str],
        suite: str = SUITE,
    ):
        self.contenders = contenders
        self.gemm = gemm
        self.gemm_error = gemm.relative_error()
        self.timer = timer
        self.budget = budget
        self.results = results
        self.facts = facts
        self.unfit = unfit
        self.suite = suite
        self.run = rows.new_run()
        self.num_problems = 0
        self.rows: list[Row] = []
        self.skipped: dict[tuple[str, str], list[Problem]] = {}  # (contender, reason): where
        self.failed: set[str] = set()  # contenders that were wrong or broke, rather than lack something

    @torch.no_grad()
    def measure(self, problem: Problem) -> list[Row]:
        """Checks every contender on this problem and times the right ones; returns their rows, already on disk."""
        self.num_problems += 1
        tensors = random_tensors(problem)
        exact, _ = attention(*tensors, causal=problem.causal)
        calls: dict[str, Callable] = {GEMM: self.gemm}
        errors = {GEMM: self.gemm_error}
        for contender in self.contenders:
            admitted = self._admit(contender, problem, tensors, exact)
            if admitted:
                calls[contender.name], errors[contender.name] = admitted
        del exact
        timings = in_turns(self.timer, calls, self.budget)

        gemm_tflops = self.gemm.FLOPS / timings[GEMM].ms / 1e9
        measured = [self._row(self.gemm.columns(), self.gemm.FLOPS, timings[GEMM], errors[GEMM], gemm_tflops)]
        for contender in self.contenders:
            if contender.name in calls:
                columns = problem_columns(problem) | {"version": contender.name} | contender.columns(problem)
                timing, error = timings[contender.name], errors[contender.name]
                measured.append(self._row(columns, problem.flops("fwd"), timing, error, gemm_tflops))
        for row in measured:
            rows.append(row, self.results)
            self.rows.append(row)
        return measured

    def _admit(
        self, contender: Contender, problem: Problem, tensors: tuple[Tensor, ...], exact: Tensor
    ) -> tuple[Callable, float] | None:
        """The contender's call and its error on this problem; None, and a note, if it cannot be timed."""
        if reason := self.unfit.get((contender.name, problem)):
            return self._skip(contender, problem, reason, failed=True)
        if reason := contender.why_not(problem):
            return self._skip(contender, problem, reason)
        try:
            call = within(contender, contender.prepare(problem, *tensors))
            error = relative_error(call(), exact)
        except torch.AcceleratorError:  # a fault takes the CUDA context with it: nothing after it could be measured
            raise
        except torch.OutOfMemoryError:
            return self._skip(contender, problem, "out of GPU memory")
        except Exception as failure:  # what a peer raises where it lacks something is the peer's own choice
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
            return self._skip(contender, problem, reason, failed=isinstance(contender, Ours))
        if not error <= limit(problem.dtype):
            reason = f"wrong: relative error {error:.1e}, at most {limit(problem.dtype):.1e} is right"
            return self._skip(contender, problem, reason, failed=True)
        return call, error

    def _skip(self, contender: Contender, problem: Problem, reason: str, failed: bool = False) -> None:
        self.skipped.setdefault((contender.name, reason), []).append(problem)
        if failed:
            self.failed.add(contender.name)

    def _row(self, columns: dict, flops: int, timing: Timing, error: float, gemm_tflops: float) -> Row:
        tflops = flops / timing.ms / 1e9
        return Row(
            run=self.run,
            suite=self.suite,
            pass_="fwd",
            tflops=tflops,
            pct_of_gemm=100 * tflops / gemm_tflops,
            rel_err=error,
            time=rows.now(),
            **columns,
            **asdict(timing),
            **self.facts,
        )


def within(contender: Contender, call: Callable) -> Callable:
    """`call` inside the contender's scope."""

    def scoped() -> Tensor:
        with contender.scope():
            return call()

    return scoped


def compare(
    problems: Sequence[Problem],
    versions: Sequence[str],
    budget: Budget,
    results: Path,
    picture: Path,
    console: Console,
) -> int:
    """Sweeps the current GPU and shows the run; the exit status is 1 if one of ours failed, 130 if interrupted."""
    ours = [Ours(version) for version in versions if version in GENERATIONS]
    peers = [PEERS[version] for version in versions if version in PEERS]
    sweep = prepare([*ours, *peers], problems, budget, results, console)
    status = run(sweep, problems, console)
    show(sweep, picture, console)
    return status or int(bool(sweep.failed & set(GENERATIONS)))


def prepare(
    contenders: Sequence[Contender],
    problems: Sequence[Problem],
    budget: Budget,
    results: Path,
    console: Console,
    suite: str = SUITE,
) -> Sweep:
    """A sweep of the current GPU; every kernel of ours is compiled and has run once, or is known to be unfit."""
    telemetry = Telemetry()
    facts = machine.facts()
    console.print(f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, CuTe DSL {facts['dsl']}")
    if telemetry.why_not:
        console.print(f"Clock and power are not recorded: {telemetry.why_not}")
    console.print("Compiling the kernels, and running each once in a process of its own ...")
    return Sweep(
        contenders=contenders,
        gemm=Gemm(),
        timer=DeviceTimer(telemetry),
        budget=budget,
        results=results,
        facts=facts,
        unfit=probe.unfit([one for one in contenders if isinstance(one, Ours)], problems),
        suite=suite,
    )


def run(
    sweep: Sweep,
    problems: Sequence[Problem],
    console: Console,
    who: Callable[[Row], str] = lambda row: row.version,
) -> int:
    """Measures every problem, a line each as it is done; 130 when interrupted, 1 when the GPU is lost, else 0.

    `who` names a row in its problem's line.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(problems))
        for problem in problems:
            progress.update(task, description=name(problem))
            try:
                measured = sweep.measure(problem)
            except KeyboardInterrupt:
                console.print("Interrupted.")
                return 130
            except torch.AcceleratorError as error:
                console.print(f"The GPU is lost at {name(problem)}: {str(error).splitlines()[0]}")
                return 1
            rates = "  ".join(f"{who(row)} {row.tflops:.0f}" for row in measured)
            console.print(f"{name(problem)}: {rates} TFLOP/s", highlight=False)
            progress.advance(task)
            torch.cuda.empty_cache()
    return 0


def show(
    sweep: Sweep,
    picture: Path,
    console: Console,
    tables: Callable[[pd.DataFrame], list[Table]] = lambda run: [comparison.table(run)],
    draw: Callable[[pd.DataFrame, Path], None] = plot.draw,
) -> None:
    """The run's tables, its picture, and what is not in them and why."""
    measured = comparison.newest_run(comparison.frame(sweep.rows))
    if measured is not None:
        path = rows.path_of(sweep.suite, sweep.facts["gpu"], sweep.results)
        for table in tables(measured):
            console.print(table.to_rich())
        console.print(f"{len(sweep.rows)} rows of run {sweep.run} in {path}")
        draw(measured, picture)
        console.print(f"their picture in {picture}")
    for (contender, reason), problems in sweep.skipped.items():
        where = "every problem" if len(problems) == sweep.num_problems else ", ".join(map(name, problems))
        console.print(f"{contender} is missing in {where}: {reason}", highlight=False)
