"""FP8 against bf16: the forward on e4m3 tensors that are there already, and with their quantisation in every call.

    bf16                q, k and v as they are drawn
    fp8                 the same, quantised once before the timed calls, a scale for each block of rows
    with quantization   q, k and v as they are drawn again; each call quantises them first
    a peer              q, k and v quantised once before the timed calls, a scale for each tensor

All are timed in turns. The second and the peers are right if they agree with fp64 attention of the numbers that their
e4m3 tensors stand for, the other two if they agree with that of the tensors as drawn.
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
from benchmarks.contenders import Contender, Ours, switched
from benchmarks.correctness import QUANTIZED_LIMIT, QUANTIZED_OUT_LIMIT, QUANTIZING_LIMIT, limit, relative_error
from benchmarks.peers import FP8_PEERS, GEMM, CudnnFp8
from benchmarks.problems import exact_output, grid, kind, name, problem_of, random_tensors
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.timing import Budget
from fa3.config import FP8_CAPABILITIES, default_fp8_config
from fa3.fp8_launch import build_forward, forward_key, quantized_by_columns
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
        return switched(default_fp8_config(problem, quantized_by_columns(problem)), self.switched)

    def kernel(self, problem: Problem) -> tuple[KernelKey, Build]:
        key = forward_key(in_fp8(problem), self.config(problem), problem.dtype, quantized_by_columns(problem))
        return key, build_forward

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


def standards(problem: Problem, tensors: tuple[Tensor, ...], everyone: Sequence[Contender]) -> dict[str, Standard]:
    """What each contender is held against, by name."""
    exact = exact_output(problem, *tensors)
    of_quantized = exact_output(problem, *dequantized(fa3.quantize(*tensors)))
    by_way = {
        Ours: Standard(exact, limit(problem.dtype)),
        OnQuantized: Standard(of_quantized, QUANTIZED_LIMIT),
        Quantizing: Standard(exact, QUANTIZING_LIMIT),
    }
    if any(type(one) is CudnnFp8 for one in everyone):
        quantized = CudnnFp8.quantize(*tensors)
        scaled = exact_output(problem, *dequantized(quantized)) * CudnnFp8.scale_out(quantized)
        by_way[CudnnFp8] = Standard(scaled, QUANTIZED_OUT_LIMIT)
    return {one.name: by_way[type(one)] for one in everyone}


def measure(
    problems: Sequence[Problem],
    versions: Sequence[str],
    budget: Budget,
    results: Path,
    console: Console,
    peers: Sequence[str] = (),
) -> int:
    """Measures every problem, in 16 bits, on the current GPU; 1 if one of ours failed, 130 if interrupted."""
    everyone = [*contenders(versions), *(FP8_PEERS[peer] for peer in peers)]
    sweep = compare.prepare(everyone, problems, budget, results, console, compare.suite_of(SUITE, budget))
    status = compare.run([(name(problem), partial(all_ways, sweep, problem)) for problem in problems], console)
    compare.show(sweep, console, lambda run: [table(run)])
    return status or int(bool(sweep.failed - set(FP8_PEERS)))


@torch.no_grad()
def all_ways(sweep: Sweep, problem: Problem) -> str:
    """A row of each contender that is right; says how it went."""
    tensors = random_tensors(problem)
    admitted = sweep.admit(problem, tensors, standards(problem, tensors, sweep.contenders))
    gemm, *measured = sweep.time(admitted)
    rates = [f"{GEMM} {gemm.tflops:.0f}", *(f"{column(row)} {row.tflops:.0f}" for row in measured)]
    return f"{name(problem)}: {'  '.join(rates)} TFLOP/s"


def column(row: Row) -> str:
    """Where a row stands in its problem's line: at its way, a peer's at its name."""
    return row.version if row.version in FP8_PEERS else NAMES[row.call]


def table(run: pd.DataFrame) -> Table:
    """Every problem of a run: the rate of each way and peer; what FP8 gains over the other two and the best peer."""
    found: dict[Problem, dict[str, float]] = {}
    for row in comparison.as_rows(run[run.version.isin((VERSION, *FP8_PEERS))]):
        found.setdefault(replace(problem_of(row), dtype=torch.bfloat16), {})[column(row)] = row.tflops
    peers = [peer for peer in FP8_PEERS if (run.version == peer).any()]
    best = "best peer"
    for rates in found.values():
        if measured := [rates[peer] for peer in peers if peer in rates]:
            rates[best] = max(measured)
    fp8 = NAMES[QUANTIZED]
    ratios = [(fp8, NAMES[None]), (fp8, WITH_QUANTIZATION), (WITH_QUANTIZATION, NAMES[None])]
    ratios += [(fp8, best)] * bool(peers)
    stale = comparison.STALE if comparison.stale_versions(run) else ""
    result = Table(
        f"Forward in FP8, {VERSION}{stale}, TFLOP/s{comparison.after_rest(run)}",
        ["d", "mask", "seqlen", *NAMES.values(), *peers, *(f"{a} / {b}" for a, b in ratios)],
        labels=3,
        notes=[
            *comparison.notes(run),
            "fp8: q, k and v in e4m3 with a scale for each block, made before the call; with quantization: in it.",
            *(f"{peer}: {FP8_PEERS[peer].note}" for peer in peers),
        ],
    )
    for problem, rates in found.items():
        shown = [f"{rates[one]:.0f}" if one in rates else comparison.NOTHING for one in (*NAMES.values(), *peers)]
        gains = [f"{rates[a] / rates[b]:.2f}" if a in rates and b in rates else comparison.NOTHING for a, b in ratios]
        result.add(str(problem.head_dim), kind(problem), str(problem.seqlen_q), *shown, *gains)
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
