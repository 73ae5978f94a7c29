"""FP8 against bf16: the forward on e4m3 tensors that are there already, and with their quantisation in every call.

    bf16                q, k and v as they are drawn
    fp8                 the same, quantised once before the timed calls, a scale for each block of rows
    with quantization   q, k and v as they are drawn again; each call quantises them first

All three are timed in turns. The second is right if it agrees with fp64 attention of the numbers that its e4m3 tensors
stand for, the other two if they agree with that of the tensors as drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

import fa3
from benchmarks import compare, comparison, without_gpu
from benchmarks.accuracy import dequantized
from benchmarks.compare import Standard, Sweep
from benchmarks.contenders import Ours, switched
from benchmarks.correctness import QUANTIZED_LIMIT, QUANTIZING_LIMIT, limit, relative_error
from benchmarks.peers import GEMM
from benchmarks.problems import exact_output, grid, kind, name, problem_of, random_tensors
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.timing import Budget
from fa3.config import FP8_CAPABILITIES, default_fp8_config
from fa3.fp8_launch import build_forward, forward_key
from fa_common.compile import Build, KernelKey
from fa_common.problem import Problem

SUITE = "fp8"
DTYPE = "float8_e4m3fn"
VERSION = "fa3"  # that has FP8

QUANTIZED, WITH_QUANTIZATION = "quantized", "with quantization"  # a row's `call`; one in bf16 has none
NAMES = {None: "bf16", QUANTIZED: "fp8", WITH_QUANTIZATION: WITH_QUANTIZATION}


class OnQuantized(Ours):
    """A generation on e4m3 tensors, quantised beforehand from the 16-bit tensors of a problem."""

    way = QUANTIZED

    def __init__(self, version: str, name: str | None = None, switched: dict | None = None):
        super().__init__(version, name or f"{version} {NAMES[self.way]}", switched)

    def config(self, problem: Problem) -> Any:
        return switched(default_fp8_config(problem), self.switched)

    def kernel(self, problem: Problem) -> tuple[KernelKey, Build]:
        return forward_key(in_fp8(problem), self.config(problem), problem.dtype), build_forward

    def why_not(self, problem: Problem) -> str | None:
        if self.version != VERSION:
            return self.generation.why_not(in_fp8(problem))
        return FP8_CAPABILITIES.why_not(in_fp8(problem)) or super().why_not(problem)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        tensors = fa3.quantize(q, k, v)._asdict()
        return partial(fa3.flash_attn_func, **tensors, out_dtype=q.dtype, **self.arguments(problem))

    def columns(self, problem: Problem) -> dict[str, Any]:
        return super().columns(problem) | {"dtype": DTYPE, "call": self.way}


class Quantizing(OnQuantized):
    """A generation that quantises its 16-bit tensors in every call."""

    way = WITH_QUANTIZATION

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        return partial(fa3.flash_attn_fp8_func, q, k, v, **self.arguments(problem))


def in_fp8(problem: Problem) -> Problem:
    """The same of e4m3 tensors."""
    return replace(problem, dtype=getattr(torch, DTYPE))


def contenders(versions: Sequence[str]) -> list[Ours]:
    """All three ways of the version that has FP8; of the others one, which says why it is left out."""
    ways = {VERSION: (Ours, OnQuantized, Quantizing)}
    return [way(version) for version in versions for way in ways.get(version, (OnQuantized,))]


def standards(problem: Problem, tensors: tuple[Tensor, ...], ours: Sequence[Ours]) -> dict[str, Standard]:
    """What each contender is held against, by name."""
    exact = exact_output(problem, *tensors)
    of_quantized = exact_output(problem, *dequantized(fa3.quantize(*tensors)))
    by_way = {
        Ours: Standard(exact, limit(problem.dtype)),
        OnQuantized: Standard(of_quantized, QUANTIZED_LIMIT),
        Quantizing: Standard(exact, QUANTIZING_LIMIT),
    }
    return {one.name: by_way[type(one)] for one in ours}


def measure(
    problems: Sequence[Problem], versions: Sequence[str], budget: Budget, results: Path, console: Console
) -> int:
    """Measures every problem, in 16 bits, on the current GPU; 1 if one of ours failed, 130 if interrupted."""
    sweep = compare.prepare(contenders(versions), problems, budget, results, console, SUITE)
    status = compare.run([(name(problem), partial(all_ways, sweep, problem)) for problem in problems], console)
    compare.show(sweep, console, lambda run: [table(run)])
    return status or int(bool(sweep.failed))


@torch.no_grad()
def all_ways(sweep: Sweep, problem: Problem) -> str:
    """A row of each contender that is right; says how it went."""
    tensors = random_tensors(problem)
    admitted = sweep.admit(problem, tensors, standards(problem, tensors, sweep.contenders))
    gemm, *measured = sweep.time(admitted)
    rates = [f"{GEMM} {gemm.tflops:.0f}", *(f"{NAMES[row.call]} {row.tflops:.0f}" for row in measured)]
    return f"{name(problem)}: {'  '.join(rates)} TFLOP/s"


def table(run: pd.DataFrame) -> Table:
    """Every problem of a run: the rate of each way, and what FP8 gains over the other two."""
    found: dict[Problem, dict[str | None, Row]] = {}
    for row in comparison.as_rows(run[run.version == VERSION]):
        found.setdefault(replace(problem_of(row), dtype=torch.bfloat16), {})[row.call] = row
    stale = comparison.STALE if comparison.stale_versions(run) else ""
    ratios = ((QUANTIZED, None), (QUANTIZED, WITH_QUANTIZATION), (WITH_QUANTIZATION, None))
    result = Table(
        f"Forward in FP8, {VERSION}{stale}, TFLOP/s",
        ["d", "mask", "seqlen", *NAMES.values(), *(f"{NAMES[a]} / {NAMES[b]}" for a, b in ratios)],
        labels=3,
        notes=[
            *comparison.notes(run),
            "fp8: q, k and v in e4m3 with a scale for each block, made before the call; with quantization: in it.",
        ],
    )
    for problem, by_way in found.items():
        rates = [f"{by_way[way].tflops:.0f}" if way in by_way else comparison.NOTHING for way in NAMES]
        gains = [
            f"{by_way[a].tflops / by_way[b].tflops:.2f}" if a in by_way and b in by_way else comparison.NOTHING
            for a, b in ratios
        ]
        result.add(str(problem.head_dim), kind(problem), str(problem.seqlen_q), *rates, *gains)
    return result


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: each problem of the default sweep in each way."""
    measured = comparison.as_rows(run[run.version == VERSION])
    known = {(row.call, replace(problem_of(row), dtype=torch.bfloat16)) for row in measured}
    return [f"{NAMES[way]} {name(p)}" for p in grid() for way in NAMES if (way, p) not in known]


def without_a_gpu(problems: Sequence[Problem], versions: Sequence[str], console: Console) -> int:
    """Shows the error of each algorithm on a small problem, and each kernel; 1 if one is wrong or does not compile."""
    ours, kinds = contenders(versions), without_gpu.kinds_of(problems)
    errors = Table("The algorithms on this CPU", ["d", "mask", "way", "rel. error", "right up to"], labels=3)
    wrong = False
    for problem in kinds:
        small = replace(problem, **without_gpu.SHAPE, total_q=None, total_k=None, device="cpu", arch=None)
        tensors = random_tensors(small)
        held_against = standards(small, tensors, ours)
        for one in ours:
            if one.why_not(problem):
                continue
            exact, at_most = held_against[one.name]
            error = relative_error(one.prepare(small, *tensors)(), exact)
            wrong |= not error <= at_most
            errors.add(str(problem.head_dim), kind(problem), one.name, f"{error:.1e}", f"{at_most:.1e}")
    console.print(errors.to_rich())
    # With quantisation it is the same kernel that attends.
    attending = [one for one in ours if not isinstance(one, Quantizing)]
    return int(not without_gpu.kernels(attending, kinds, console) or wrong)
