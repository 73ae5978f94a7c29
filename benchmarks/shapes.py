"""Beyond the square grid: grouped heads, fp16, packed sequences, windows and softcap, each against plain attention.

    GQA 32/8                 as many K/V heads as query heads: four times the K and V
    fp16                     the same problem in bf16
    varlen, 1 to 8192        sequences of one length
    window (1024, 0)         causal sequences of one length, about twice the window's
    softcap 50               the same problem without one

A shape's plain partner has as many FLOPs and about as many tokens. Both are timed in turns, so that their ratio says
what the feature costs. TFLOP/s count the pairs that the mask leaves, sequence by sequence.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pandas as pd
import torch
from rich.console import Console

from benchmarks import compare, comparison, without_gpu
from benchmarks.contenders import Ours
from benchmarks.correctness import limit, relative_error
from benchmarks.peers import GEMM, PEERS
from benchmarks.problems import MASKS, exact_output, grid, kind, name, packed, problem_of, random_tensors, size
from benchmarks.tables import Table
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa_common.problem import Problem

SUITE = "shapes"
VERSIONS = ("fa3",)
HEAD_DIMS = (128,)
SEQLENS = (4096, 16384)

KINDS = ("gqa", "fp16", "varlen", "window", "softcap")  # in the order in which they are measured
GQA_HEADS = 32, 8
SOFTCAP = 50.0
WINDOW = 1024, None  # causal, so (1024, 0)
WINDOW_SEQLEN = 16384  # shorter rows see most of their keys in such a window
LONGEST, PACKED_TOKENS, SEED = 8192, 32768, 0

SMALL = {"batch": 1, "seqlen_q": 192, "seqlen_k": 192}  # of the check without a GPU
SMALL_LENGTHS = (1, 70, 128)


def shapes(
    head_dims: Sequence[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    seqlens: Sequence[int] = SEQLENS,
    kinds: Sequence[str] = KINDS,
) -> list[Problem]:
    """The shapes of these kinds, kind by kind, at each head_dim, mask and length where it makes a difference."""
    plain = grid(head_dims, masks, seqlens)
    heads_q, heads_kv = GQA_HEADS
    long = [problem for problem in plain if problem.causal and problem.seqlen_q == WINDOW_SEQLEN]
    of_kind = {
        "gqa": [replace(problem, heads_q=heads_q, heads_kv=heads_kv) for problem in plain],
        "fp16": [replace(problem, dtype=torch.float16) for problem in plain],
        "varlen": [replace(problem, **packed(lengths())) for problem in grid(head_dims, masks, [LONGEST])],
        "window": [replace(problem, window=WINDOW) for problem in long],
        "softcap": [replace(problem, softcap=SOFTCAP) for problem in plain],
    }
    return [shape for one in KINDS if one in kinds for shape in of_kind[one]]


def lengths(longest: int = LONGEST, tokens: int = PACKED_TOKENS, seed: int = SEED) -> list[int]:
    """Lengths drawn from 1 to `longest` that add up to `tokens`; the same ones each time."""
    random, drawn = Random(seed), []
    while (left := tokens - sum(drawn)) > 0:
        drawn.append(min(left, random.randint(1, longest)))
    return drawn


def partner(shape: Problem) -> Problem:
    """What a shape is measured against: plain bf16 attention without its feature, of as many FLOPs.

    Without a window or packed sequences it is of the same size, with them sequences of one length that have as many
    pairs of a query and a key, and about as many tokens.
    """
    plain = replace(shape, dtype=torch.bfloat16, heads_kv=shape.heads_q, window=(None, None), softcap=0.0)
    if not shape.varlen and shape.window == (None, None):
        return plain
    squares = shape.pairs * (2 if shape.causal else 1)  # the sum of the sequences' seqlen^2
    batch = max(1, round(shape.total_q**2 / squares))
    seqlen = round((squares / batch) ** 0.5)
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "total_q": None, "total_k": None}
    return replace(plain, **sizes, varlen=False, seqlens=None)


def groups(problems: Sequence[Problem]) -> list[list[Problem]]:
    """A plain problem and then all the shapes that it is the partner of: they are timed in turns."""
    found: dict[Problem, list[Problem]] = {}
    for shape in problems:
        found.setdefault(partner(shape), []).append(shape)
    return [[plain, *others] for plain, others in found.items()]


def measure(
    problems: Sequence[Problem], versions: Sequence[str], budget: Budget, results: Path, console: Console
) -> int:
    """Measures shapes and partners on the current GPU; 1 if one of ours failed, 130 if interrupted."""
    ours = [Ours(version) for version in versions if version in GENERATIONS]
    peers = [PEERS[version] for version in versions if version in PEERS]
    turns = groups(problems)
    sweep = compare.prepare([*ours, *peers], [p for group in turns for p in group], budget, results, console, SUITE)
    status = compare.run(compare.steps(sweep, turns), console)
    compare.show(sweep, console, lambda run: [table(run)])
    return status or int(bool(sweep.failed & set(GENERATIONS)))


def table(run: pd.DataFrame) -> Table:
    """Every shape of a run beside its partner."""
    measured = comparison.as_rows(run[run.version != GEMM])
    stale = comparison.stale_versions(run)
    by_problem = {(row.version, problem_of(row)): row for row in measured}
    result = Table(
        "Forward, shapes beyond the grid",
        ["version", "dtype", "d", "shape", "size", "TFLOP/s", "p20 to p80", "against", "its TFLOP/s", "ratio"],
        labels=5,
        notes=[
            *comparison.notes(run),
            "Sizes are batch x seqlen x heads. TFLOP/s count the pairs that the mask leaves. Against: plain bf16 "
            "attention of as many FLOPs with a K/V head for each query head, timed in turn.",
        ],
    )
    for (version, problem), row in by_problem.items():
        plain = partner(problem)
        if plain == problem:
            continue
        other = by_problem.get((version, plain))
        result.add(
            version + (comparison.STALE if version in stale else ""),
            problem.dtype_name,
            str(problem.head_dim),
            kind(problem),
            size(problem),
            f"{row.tflops:.0f}",
            "{:.0f} to {:.0f}".format(*comparison.spread(row)),
            f"{kind(plain)} {size(plain)}",
            f"{other.tflops:.0f}" if other else comparison.NOTHING,
            f"{row.tflops / other.tflops:.2f}" if other else comparison.NOTHING,
        )
    if packings := {tuple(row.lengths) for row in measured if row.lengths}:
        result.notes += [f"Varlen: sequences of {', '.join(map(str, one))} tokens." for one in sorted(packings)]
    return result


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: each default shape and its partner, by the default versions."""
    known = {(row.version, problem_of(row)) for row in comparison.as_rows(run[run.version != GEMM])}
    wanted = [problem for group in groups(shapes()) for problem in group]
    return [f"{version} {name(p)}" for version in VERSIONS for p in wanted if (version, p) not in known]


def without_a_gpu(problems: Sequence[Problem], versions: Sequence[str], console: Console) -> int:
    """Shows what would be measured, how right each algorithm is on a small one, and each kernel; 1 if one is wrong."""
    ours = [Ours(version) for version in versions if version in GENERATIONS]
    plan = Table(
        "What would be measured (batch, seqlen, heads), and the error of each algorithm on a small one",
        ["dtype", "d", "shape", "size", "GFLOP", "against", "its GFLOP", *(f"{one.name} rel. error" for one in ours)],
        labels=4,
    )
    wrong, errors = False, {}
    for problem in problems:
        plain, small = partner(problem), _small(problem)
        if small not in errors:
            errors[small] = [_error(one, small) for one in ours]
        wrong |= any(not error <= limit(problem.dtype) for error in errors[small])
        work = [f"{p.flops('fwd') / 1e9:.0f}" for p in (problem, plain)]
        label = problem.dtype_name, str(problem.head_dim), kind(problem), size(problem)
        plan.add(*label, work[0], f"{kind(plain)} {size(plain)}", work[1], *(f"{e:.1e}" for e in errors[small]))
    console.print(plan.to_rich())
    kinds = without_gpu.kinds_of(problems)
    return int(not without_gpu.kernels(ours, kinds, console) or wrong)


def _small(problem: Problem) -> Problem:
    """A problem of the same kind that a CPU solves at once."""
    sizes = packed(SMALL_LENGTHS) if problem.varlen else SMALL | {"total_q": None, "total_k": None}
    heads = {"heads_q": problem.group, "heads_kv": 1}
    window = tuple(bound and 64 for bound in problem.window)
    return replace(problem, **sizes, **heads, window=window, device="cpu", arch=None)


def _error(one: Ours, problem: Problem) -> float:
    tensors = random_tensors(problem)
    return relative_error(one.prepare(problem, *tensors)(), exact_output(problem, *tensors))
