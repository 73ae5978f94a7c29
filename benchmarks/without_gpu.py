"""The comparison without a Hopper GPU, everything but speed: what each algorithm computes, what each kernel became."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import track

from benchmarks.contenders import Ours
from benchmarks.correctness import limit, relative_error
from benchmarks.probe import error_line
from benchmarks.problems import code, kind, name, random_tensors
from benchmarks.tables import Table
from fa_common.isolated import IsolatedFailure
from fa_common.memory import Memory
from fa_common.problem import Problem
from fa_common.reference import attention
from fa_common.report import KernelReport, report

# Small enough to wait for, long enough that the terms quadratic in seqlen lead.
SHAPE = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads_q": 2, "heads_kv": 2}

INSTRUCTIONS = ("HMMA", "HGMMA", "QGMMA", "LDGSTS", "UTMALDG", "LDSM", "USETMAXREG", "MUFU")

Reports = dict[tuple[Problem, str], KernelReport | IsolatedFailure]


def compare(problems: Sequence[Problem], versions: Sequence[str], console: Console) -> int:
    """Shows the algorithms and the kernels of each dtype, head_dim and mask; 1 if one is wrong or does not compile."""
    ours = [Ours(version) for version in versions]
    kinds = kinds_of(problems)
    algorithms, worst = algorithms_table(ours, kinds)
    console.print(algorithms.to_rich())
    return int(not kernels(ours, kinds, console) or worst > 1)


def kernels(ours: Sequence[Ours], kinds: Sequence[Problem], console: Console, who: str = "version") -> bool:
    """Shows what became of each kernel; whether every one of them compiles. `who` heads the column of their names."""
    for problem in kinds:
        for one in ours:
            if reason := one.why_not(problem):
                console.print(f"{one.name} is missing in {name(problem)}: {reason}", highlight=False)
    reports = kernel_reports(ours, kinds, console)
    console.print(kernels_table(reports, who).to_rich())
    return not any(isinstance(made, IsolatedFailure) for made in reports.values())


def kinds_of(problems: Sequence[Problem]) -> list[Problem]:
    """One problem, the longest, of each dtype, head_dim and kind."""
    return list({code(problem): problem for problem in problems}.values())


def algorithms_table(ours: Sequence[Ours], kinds: Sequence[Problem]) -> tuple[Table, float]:
    """Every algorithm on real CPU tensors, and the largest error as a multiple of what is right for its dtype."""
    shape = " x ".join(str(SHAPE[name]) for name in ("batch", "seqlen_q", "heads_q"))
    table = Table(
        f"The algorithms on this CPU: forward, {shape} (batch, seqlen, heads)",
        ["dtype", "d", "mask", "version", "rel. error", "HBM MB", "of least", "matmul MFLOP", "other MFLOP"],
        labels=4,
        notes=["Bytes and FLOPs are counted as the algorithm runs; the least reads inputs and writes outputs once."],
    )
    worst = 0.0
    for large in kinds:
        problem = Problem(
            **SHAPE, head_dim=large.head_dim, dtype=large.dtype, causal=large.causal, device="cpu", arch=None
        )
        tensors = random_tensors(problem)
        exact, _ = attention(*tensors, causal=problem.causal)
        for one in ours:
            memory = Memory()
            out, _ = one.generation.algorithm.forward(
                *tensors,
                softmax_scale=problem.softmax_scale,
                causal=problem.causal,
                config=one.generation.default_config(large),
                memory=memory,
            )
            error = relative_error(out, exact)
            worst = max(worst, error / limit(problem.dtype))
            table.add(
                *_labels(problem),
                one.name,
                f"{error:.1e}",
                f"{memory.bytes_moved / 1e6:.1f}",
                f"{memory.bytes_moved / problem.bytes('fwd'):.1f}",
                f"{memory.matmul_flops / 1e6:.0f}",
                f"{memory.non_matmul_flops / 1e6:.0f}",
            )
    return table, worst


def kernel_reports(ours: Sequence[Ours], kinds: Sequence[Problem], console: Console) -> Reports:
    """Compiles the kernel that each generation would run for each problem, as many at a time as there are cores."""
    jobs = {(problem, one.name): one.kernel(problem) for problem in kinds for one in ours if not one.why_not(problem)}

    def compile_one(key_and_build: tuple) -> KernelReport | IsolatedFailure:
        try:
            return report(*key_and_build)
        except IsolatedFailure as failure:
            return failure

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(compile_one, jobs.values())
        shown = track(made, "compiling the kernels", len(jobs), console=console, transient=True)
        return dict(zip(jobs, shown, strict=True))


def kernels_table(reports: Reports, who: str) -> Table:
    """Registers, memory and instructions of every kernel, and what is wrong with it."""
    table = Table(
        "The kernels as compiled for sm_90a",
        ["dtype", "d", "mask", who, "registers", "shared KiB", "spilled B", *INSTRUCTIONS, "all"],
        labels=4,
        notes=["Instructions are counted in the machine code, not as executed."],
    )
    for (problem, version), made in reports.items():
        if isinstance(made, IsolatedFailure):
            table.add(*_labels(problem), version, *["-"] * (len(table.columns) - table.labels))
            table.notes.append(f"{version} d={problem.head_dim} {kind(problem)} does not compile: {error_line(made)}")
            continue
        table.add(
            *_labels(problem),
            version,
            str(made.registers),
            f"{made.shared_memory / 1024:.0f}",
            str(made.spill_stores),
            *(str(made.instructions[name]) for name in INSTRUCTIONS),
            str(made.instructions.total()),
        )
        if faults := made.problems():
            table.notes.append(f"{version} d={problem.head_dim} {kind(problem)}: {'; '.join(faults)}")
        if made.why_no_instructions and made.why_no_instructions not in table.notes:
            table.notes.append(made.why_no_instructions)
    return table


def _labels(problem: Problem) -> tuple[str, str, str]:
    return problem.dtype_name, str(problem.head_dim), kind(problem)
