"""The version comparison on a GPU: for every problem, each version checked, then all of them timed in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from benchmarks import comparison, machine, plot, probe, rows
from benchmarks.contenders import OURS, Contender, Ours, Results
from benchmarks.correctness import limit, relative_error
from benchmarks.peers import GEMM, PEERS, Differentiated, Gemm
from benchmarks.problems import exact_gradients, exact_output, name, problem_columns, problem_of, random_tensors
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.telemetry import Telemetry
from benchmarks.timing import Budget, DeviceTimer, Timer, Timing, in_turns
from fa import GENERATIONS
from fa_common.problem import Direction, Problem

SUITE = "compare"
SUITES = {"fwd": SUITE, "bwd": "compare-bwd", "fwd+bwd": "compare-fwd-bwd"}  # by pass
BURST = "-burst"  # behind a suite's name
PICTURE = rows.ROOT / "docs" / "compare-latest.svg"

Step = tuple[str, Callable[[], str]]  # what is measured, and what measures it and says how it went


class Standard(NamedTuple):
    """What a contender's results are held against, and the largest relative error of right ones."""

    exact: Results
    limit: float


class Admitted(NamedTuple):
    """A contender that is right on a problem."""

    contender: Contender
    problem: Problem
    call: Callable[[], Results]
    error: float


class Sweep:
    """One run: measures problems and appends each row as soon as it is measured.

    `facts` are the columns that say where (`machine.facts`); `unfit` holds, by version and problem, why not to try. The
    contenders all run `direction`: "fwd" returns O, "bwd" and "fwd+bwd" return the gradients.
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
        direction: Direction = "fwd",
    ):
        self.direction = direction
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
    def measure(self, *problems: Problem) -> list[Row]:
        """Checks every contender on each of these problems and times the right ones, all of them in turns.

        Returns the rows, the matrix product's first; they are on disk already.
        """
        return self.time([one for problem in problems for one in self.admit(problem)])

    def time(self, admitted: Sequence[Admitted]) -> list[Row]:
        """The rows of these, timed in turns with the matrix product, whose own is the first."""
        calls = {GEMM: self.gemm} | {(one.contender.name, one.problem): one.call for one in admitted}
        timings = in_turns(self.timer, calls, self.budget)
        gemm = self.keep_gemm(timings[GEMM])
        times = [timings[one.contender.name, one.problem] for one in admitted]
        return [gemm, *(self.keep(one, timing, gemm) for one, timing in zip(admitted, times, strict=True))]

    def admit(
        self,
        problem: Problem,
        tensors: tuple[Tensor, ...] | None = None,
        standards: Mapping[str, Standard] | None = None,
    ) -> list[Admitted]:
        """The contenders that are right on this problem, each with its call on the tensors that it was checked on.

        Those are random if not given; `standards`, by contender, are all the reference on them if not given.
        """
        self.num_problems += 1
        tensors = tensors or random_tensors(problem)
        if standards is None:
            exact = (exact_output if self.direction == "fwd" else exact_gradients)(problem, *tensors)
            standards = dict.fromkeys([one.name for one in self.contenders], Standard(exact, limit(problem.dtype)))
        found = [(one, self._admit(one, problem, tensors, standards[one.name])) for one in self.contenders]
        return [Admitted(contender, problem, *admitted) for contender, admitted in found if admitted]

    def keep(self, one: Admitted, timing: Timing, gemm: Row | None = None, **more: Any) -> Row:
        """The row of one that was timed, in turn with `gemm` if given; with `more` columns."""
        columns = problem_columns(one.problem) | {"version": one.contender.name} | one.contender.columns(one.problem)
        return self._keep(columns | more, one.problem.flops(self.direction), timing, one.error, gemm and gemm.tflops)

    def keep_gemm(self, timing: Timing, **more: Any) -> Row:
        """The row of the matrix product."""
        rate = self.gemm.FLOPS / timing.ms / 1e9
        return self._keep(self.gemm.columns() | more, self.gemm.FLOPS, timing, self.gemm_error, rate)

    def _admit(
        self, contender: Contender, problem: Problem, tensors: tuple[Tensor, ...], standard: Standard
    ) -> tuple[Callable, float] | None:
        """The contender's call and its error on this problem; None, and a note, if it cannot be timed."""
        if reason := self.unfit.get((contender.name, problem)):
            return self._skip(contender, problem, reason, failed=True)
        if reason := contender.why_not(problem):
            return self._skip(contender, problem, reason)
        try:
            call = within(contender, contender.prepare(problem, *tensors))
            error = relative_error(call(), standard.exact)
        except torch.AcceleratorError:  # a fault takes the CUDA context with it: nothing after it could be measured
            raise
        except torch.OutOfMemoryError:
            return self._skip(contender, problem, "out of GPU memory")
        except Exception as failure:  # what a peer raises where it lacks something is the peer's own choice
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
            return self._skip(contender, problem, reason, failed=isinstance(contender, Ours))
        if not error <= standard.limit:
            reason = f"wrong: relative error {error:.1e}, at most {standard.limit:.1e} is right"
            return self._skip(contender, problem, reason, failed=True)
        return call, error

    def _skip(self, contender: Contender, problem: Problem, reason: str, failed: bool = False) -> None:
        self.skipped.setdefault((contender.name, reason), []).append(problem)
        if failed:
            self.failed.add(contender.name)

    def _keep(self, columns: dict, flops: int, timing: Timing, error: float, gemm_tflops: float | None) -> Row:
        tflops = flops / timing.ms / 1e9
        row = Row(
            run=self.run,
            suite=self.suite,
            pass_=self.direction,
            tflops=tflops,
            pct_of_gemm=100 * tflops / gemm_tflops if gemm_tflops else None,
            rel_err=error,
            time=rows.now(),
            idle_ms=self.budget.idle_ms or None,
            **columns,
            **asdict(timing),
            **self.facts,
        )
        rows.append(row, self.results)
        self.rows.append(row)
        return row


def within(contender: Contender, call: Callable) -> Callable:
    """`call` inside the contender's scope."""

    def scoped() -> Results:
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
    direction: Direction = "fwd",
) -> int:
    """Sweeps the current GPU and shows the run; the exit status is 1 if one of ours failed, 130 if interrupted."""
    ours = [OURS[direction](version) for version in versions if version in GENERATIONS]
    peers = [in_direction(PEERS[version], direction) for version in versions if version in PEERS]
    suite = suite_of(SUITES[direction], budget)
    sweep = prepare([*ours, *peers], problems, budget, results, console, suite, direction=direction)
    status = run(steps(sweep, [[problem] for problem in problems]), console)
    show(sweep, console, picture=picture)
    return status or int(bool(sweep.failed & set(GENERATIONS)))


def suite_of(suite: str, budget: Budget) -> str:
    """Where rows are kept: those of bursts by themselves, since heat makes others slower."""
    return f"{suite}{BURST}" if budget.idle_ms else suite


def in_direction(peer: Contender, direction: Direction) -> Contender:
    """A peer's forward, or its gradients."""
    return peer if direction == "fwd" else Differentiated(peer, with_forward=direction == "fwd+bwd")


def prepare(
    contenders: Sequence[Contender],
    problems: Sequence[Problem],
    budget: Budget,
    results: Path,
    console: Console,
    suite: str = SUITE,
    timer: type[DeviceTimer] | None = None,
    direction: Direction = "fwd",
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
        timer=(timer or DeviceTimer)(telemetry),
        budget=budget,
        results=results,
        facts=facts,
        unfit=probe.unfit([one for one in contenders if hasattr(one, "kernel")], problems),  # peers run as they are
        suite=suite,
        direction=direction,
    )


def steps(
    sweep: Sweep, groups: Sequence[Sequence[Problem]], who: Callable[[Row], str] = lambda row: row.version
) -> list[Step]:
    """A step for each group of problems that are timed in turns; `who` names a row in its problem's line."""

    def measure(problems: Sequence[Problem]) -> str:
        gemm, *measured = sweep.measure(*problems)
        rates = {name(problem): [f"{GEMM} {gemm.tflops:.0f}"] for problem in problems}
        for row in measured:
            rates[name(problem_of(row))].append(f"{who(row)} {row.tflops:.0f}")
        return "\n".join(f"{problem}: {'  '.join(line)} TFLOP/s" for problem, line in rates.items())

    return [(name(problems[0]), partial(measure, problems)) for problems in groups]


def run(steps: Sequence[Step], console: Console) -> int:
    """Takes every step, printing what each returns; 130 when interrupted, 1 when the GPU is lost, else 0."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(steps))
        for description, step in steps:
            progress.update(task, description=description)
            try:
                console.print(step(), highlight=False)
            except KeyboardInterrupt:
                console.print("Interrupted.")
                return 130
            except torch.AcceleratorError as error:
                console.print(f"The GPU is lost at {description}: {str(error).splitlines()[0]}")
                return 1
            progress.advance(task)
            torch.cuda.empty_cache()
    return 0


def tables(run: pd.DataFrame) -> list[Table]:
    """What a run found: every rate, then where the newest generation stands against its best peer."""
    return [comparison.table(run), *filter(None, [comparison.margins(run)])]


def show(
    sweep: Sweep,
    console: Console,
    tables: Callable[[pd.DataFrame], list[Table]] = tables,
    draw: Callable[[pd.DataFrame, Path], None] = plot.draw,
    picture: Path | None = None,
) -> None:
    """The run's tables, its picture if it has one, and what is not in them and why."""
    measured = comparison.newest_run(comparison.frame(sweep.rows))
    if measured is not None:
        path = rows.path_of(sweep.suite, sweep.facts["gpu"], sweep.results)
        for table in tables(measured):
            console.print(table.to_rich())
        console.print(f"{len(sweep.rows)} rows of run {sweep.run} in {path}")
        if picture:
            draw(measured, picture)
            console.print(f"their picture in {picture}")
    for (contender, reason), problems in sweep.skipped.items():
        where = "every problem" if len(problems) == sweep.num_problems else ", ".join(map(name, problems))
        console.print(f"{contender} is missing in {where}: {reason}", highlight=False)
