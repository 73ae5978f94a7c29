"""One problem for as long as a model would ask for it: a burst runs on a cool GPU, a loop under the power limit.

Every version is first timed as in `compare`, in turns and a few launches at a time. Then each loops by itself, launch
after launch with nothing in between, and the second half of that loop counts. The matrix product does the same.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console

from benchmarks import compare, comparison, without_gpu
from benchmarks.compare import Sweep
from benchmarks.contenders import Ours
from benchmarks.peers import GEMM, PEERS
from benchmarks.problems import grid, name, problem_of
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.timing import Budget, in_turns, sustained
from fa import GENERATIONS
from fa_common.problem import Problem

SUITE = "sustained"
VERSIONS = ("fa3",)
DEFAULT_PEERS = ("cudnn", "flash-attn-4")
[DEFAULT] = grid([128], ["full"], [16384])
SECONDS = 10.0

BURST, SUSTAINED = "burst", "sustained"  # a row's `call`


def measure(
    problem: Problem, versions: Sequence[str], seconds: float, budget: Budget, results: Path, console: Console
) -> int:
    """Measures burst and loop on the current GPU; 1 if one of ours failed, 130 if interrupted."""
    ours = [Ours(version) for version in versions if version in GENERATIONS]
    peers = [PEERS[version] for version in versions if version in PEERS]
    sweep = compare.prepare([*ours, *peers], [problem], budget, results, console, SUITE)
    status = compare.run([(name(problem), lambda: loops(sweep, problem, seconds))], console)
    compare.show(sweep, console, lambda run: [table(run)])
    return status or int(bool(sweep.failed & set(GENERATIONS)))


def compile_only(problem: Problem, versions: Sequence[str], console: Console) -> int:
    """Shows what each kernel is compiled to; the exit status is 1 if one does not compile."""
    return int(not without_gpu.kernels([Ours(version) for version in versions], [problem], console))


@torch.no_grad()
def loops(sweep: Sweep, problem: Problem, seconds: float) -> str:
    """A burst row and a loop row of every contender that is right, and of the matrix product; says how it went."""
    admitted = {one.contender.name: one for one in sweep.admit(problem)}
    calls = {GEMM: sweep.gemm} | {who: one.call for who, one in admitted.items()}
    bursts = in_turns(sweep.timer, calls, sweep.budget)
    gemm = sweep.keep_gemm(bursts[GEMM], call=BURST)
    for who, one in admitted.items():
        sweep.keep(one, bursts[who], gemm, call=BURST)
    loop = sustained(sweep.timer, sweep.gemm, bursts[GEMM].ms, seconds)
    kept = [sweep.keep_gemm(loop, call=SUSTAINED, seconds=seconds)]
    for who, one in admitted.items():
        loop = sustained(sweep.timer, one.call, bursts[who].ms, seconds)
        kept.append(sweep.keep(one, loop, kept[0], call=SUSTAINED, seconds=seconds))
    return f"{name(problem)}: {'  '.join(f'{row.version} {row.tflops:.0f}' for row in kept)} TFLOP/s for {seconds:g} s"


def table(run: pd.DataFrame) -> Table:
    """Every version's burst beside its loop."""
    measured = comparison.as_rows(run)
    stale = comparison.stale_versions(run)
    problem = next(problem_of(row) for row in measured if row.version != GEMM)
    by_call = {(row.version, row.call): row for row in measured}
    seconds = max(row.seconds or 0 for row in measured)
    result = Table(
        f"Forward, {name(problem)}, a burst and {seconds:g} s without a pause",
        ["version", "burst TFLOP/s", "sustained TFLOP/s", "of burst", "SM clock MHz", "power W", "p20 to p80"],
        notes=[
            "Sustained: the second half of a loop of launches, with the median clock and power there. Burst: in turns, "
            f"as in `compare`. {GEMM} is a bf16 product of {measured[0].seqlen_q}^3."
        ],
    )
    for version in dict.fromkeys(row.version for row in measured):
        burst, loop = by_call.get((version, BURST)), by_call.get((version, SUSTAINED))
        result.add(
            version + (comparison.STALE if version in stale else ""),
            f"{burst.tflops:.0f}" if burst else comparison.NOTHING,
            *_of_loop(burst, loop),
        )
    if stale:
        result.notes.append(comparison.STALE_NOTE)
    return result


def _of_loop(burst: Row | None, loop: Row | None) -> list[str]:
    if loop is None:
        return [comparison.NOTHING] * 5
    return [
        f"{loop.tflops:.0f}",
        f"{loop.tflops / burst.tflops:.0%}" if burst else comparison.NOTHING,
        *(comparison.NOTHING if x is None else f"{x:.0f}" for x in (loop.sm_clock_mhz, loop.power_w)),
        "{:.0f} to {:.0f}".format(*comparison.spread(loop)),
    ]


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: the default problem's loop of each default version."""
    measured = comparison.as_rows(run[run.version != GEMM])
    known = {row.version for row in measured if row.call == SUSTAINED and problem_of(row) == DEFAULT}
    return [version for version in (*VERSIONS, *DEFAULT_PEERS) if version not in known]
