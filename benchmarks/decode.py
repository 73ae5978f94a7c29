"""Generating one token: few queries against a long cache of K and V, where the bytes of the cache set the time.

A call reads 2 * batch * length * heads_kv * head_dim * itemsize bytes of K and V, and TB/s are those over the time.
Every version makes the same calls in the same two ways: replayed from a CUDA graph, as a server does, so that the
host's time does not count; and eagerly, one Python call after the other, where it does. Calls go over so many copies of
the cache that none is still in the L2.

Ours takes turns with a cache in e4m3 too, half the bytes: q, K and V are quantised once, before the timed calls. There
it is right if it agrees with fp64 attention of the numbers that its e4m3 tensors stand for.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

import fa3
from benchmarks import compare, comparison, fp8
from benchmarks.accuracy import dequantized
from benchmarks.compare import Admitted, Standard, Sweep, within
from benchmarks.contenders import Contender
from benchmarks.correctness import QUANTIZED_LIMIT, limit, relative_error
from benchmarks.peers import GEMM, PEERS, Package, Sdpa
from benchmarks.problems import exact_output, kind, name, problem_of, random_tensors, size
from benchmarks.rows import Row, source_sha
from benchmarks.tables import Table
from benchmarks.timing import Budget, Call, DeviceTimer, in_turns
from fa3.config import FP8_CAPABILITIES
from fa_common.problem import Problem

SUITE = "decode"
BATCHES = (1, 8, 64)
SEQLENS = (1024, 8192, 32768, 131072)  # of the cache
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}  # of the cache that is not in e4m3, and how a column calls it
MAX_BYTES = 40e9  # of K and V; the largest default, batch 64 at 131072, has 34e9
MAX_PROBED_BYTES = 10e9  # likewise: the probes of both caches run at once, and drawing K and V takes each twice this

MIN_CALLS, MAX_CALLS = 4, 128  # of one replay
MIN_COPIES_BYTES = 4 * 60e6  # of all copies of K and V in e4m3, the smaller ones: several times the L2
GRAPH, EAGER = "graph", "eager"  # a row's `call`

SMALL = {"batch": 2, "seqlen_k": 200}  # of the check without a GPU


class Cached:
    """`flash_attn_with_kvcache` of a generation of ours, which may lack it."""

    def __init__(self, version: str, name: str | None = None, switched: dict | None = None):
        self.version = version
        self.name = name or version
        self.switched = switched or {}  # further arguments of every call, such as num_splits

    @cached_property
    def _function(self) -> Callable | str:
        module = f"{self.version}.kvcache"
        try:
            return import_module(module).flash_attn_with_kvcache
        except (ImportError, AttributeError) as error:
            return f"`from {module} import flash_attn_with_kvcache` fails: {error}"

    def why_not(self, problem: Problem) -> str | None:
        return self._function if isinstance(self._function, str) else None

    def kernel(self, problem: Problem) -> None:
        """None: how many splits a call makes, and so which kernels it needs, is its own choice."""

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Callable[[], Tensor]:
        out = torch.full_like(q, torch.nan, dtype=problem.dtype)
        arguments = {"causal": problem.causal, "out": out} | self.switched | more

        def call() -> Tensor:
            self._function(q, k, v, **arguments)
            return out

        return call

    def scope(self) -> AbstractContextManager:
        return nullcontext()

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"version": self.version, "config": self.switched or None, "source_sha": source_sha(self.version)}


class CachedFp8(Cached):
    """The same of e4m3 tensors, quantised beforehand from the 16-bit tensors of a problem."""

    def __init__(self, version: str, name: str | None = None, switched: dict | None = None):
        super().__init__(version, name or fp8_name(version), switched)

    def why_not(self, problem: Problem) -> str | None:
        return FP8_CAPABILITIES.why_not(fp8.in_fp8(problem)) or super().why_not(problem)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        q, k, v, *descales = quantized(q, k, v)
        scales = dict(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))
        return super().prepare(problem, q, k, v, out_dtype=problem.dtype, **scales)

    def columns(self, problem: Problem) -> dict[str, Any]:
        return super().columns(problem) | {"dtype": fp8.DTYPE}


def fp8_name(version: str) -> str:
    """What a version is called where its cache is in e4m3."""
    return f"{version} fp8"


def quantized(q: Tensor, k: Tensor, v: Tensor) -> fa3.Quantized:
    """In e4m3, a scale for each block of rows; V lies by rows, as a cache does that is written a token at a time."""
    made = fa3.quantize(q, k, v)
    return made._replace(v=made.v.contiguous())


VERSIONS = ("fa3",)
WAYS = (Cached, CachedFp8)  # of each version
DECODERS: dict[str, Sdpa | Package] = {
    peer.name: peer for peer in (Sdpa("torch-sdpa"), PEERS["flash-attn-4"], PEERS["flash-attn-3"])
}
DEFAULT_PEERS = ("torch-sdpa", "flash-attn-4")


def cells(
    batches: Sequence[int] = BATCHES,
    seqlens: Sequence[int] = SEQLENS,
    *,
    seqlen_q: int = 1,
    heads: int = HEADS,
    heads_kv: int = HEADS_KV,
    head_dim: int = HEAD_DIM,
    dtype: str = "bfloat16",
) -> list[Problem]:
    """The problems whose K and V fit; several queries see the cache causally, the last one all of it."""
    problems = [
        Problem(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen,
            heads_q=heads,
            heads_kv=heads_kv,
            head_dim=head_dim,
            dtype=getattr(torch, dtype),
            causal=seqlen_q > 1,
        )
        for batch in batches
        for seqlen in sorted(seqlens)
    ]
    small_enough = [problem for problem in problems if cache_bytes(problem) <= MAX_BYTES]
    if not small_enough:
        raise ValueError(f"a cache of at most {MAX_BYTES / 1e9:.0f} GB is needed; the smallest of these is larger")
    return small_enough


def cache_bytes(problem: Problem) -> int:
    """The bytes of K and V that a call has to read."""
    return 2 * problem.batch * problem.seqlen_k * problem.heads_kv * problem.head_dim * problem.dtype.itemsize


def contenders(versions: Sequence[str], switched: dict | None = None) -> list[Contender]:
    """Each of ours with either cache, then the peers; `switched` are further arguments of ours."""
    ours = [way(version, switched=switched) for version in versions if version in VERSIONS for way in WAYS]
    return [*ours, *(DECODERS[version] for version in versions if version in DECODERS)]


def standards(problem: Problem, tensors: tuple[Tensor, ...], everyone: Sequence[Contender]) -> dict[str, Standard]:
    """What each contender is held against, by name."""
    exact = Standard(exact_output(problem, *tensors), limit(problem.dtype))
    found = dict.fromkeys([one.name for one in everyone], exact)
    for one in everyone:
        if isinstance(one, CachedFp8) and not one.why_not(problem):
            found[one.name] = Standard(_exact_of_quantized(problem, quantized(*tensors)), QUANTIZED_LIMIT)
    return found


def _exact_of_quantized(problem: Problem, tensors: fa3.Quantized) -> Tensor:
    """O by the fp64 reference: one sequence at a time, since the numbers in fp32 are four times as large."""
    sequences = zip(*(x.split(1) for x in tensors), strict=True)
    return torch.cat([exact_output(problem, *dequantized(fa3.Quantized(*one))) for one in sequences])


class EveryCall(DeviceTimer):
    """Times calls in the form in which they are given."""

    def settle(self, call: Call, estimate_ms: float) -> Call:
        return call


def measure(
    problems: Sequence[Problem],
    versions: Sequence[str],
    num_splits: int,
    budget: Budget,
    results: Path,
    console: Console,
) -> int:
    """Measures every problem on the current GPU; 1 if one of ours failed, 130 if interrupted."""
    chosen = {"num_splits": num_splits} if num_splits else {}
    probed = [problem for problem in problems if cache_bytes(problem) <= MAX_PROBED_BYTES]
    sweep = compare.prepare(contenders(versions, chosen), probed, budget, results, console, SUITE, EveryCall)
    steps = [(name(problem), partial(both_ways, sweep, problem)) for problem in problems]
    status = compare.run(steps, console)
    compare.show(sweep, console, lambda run: [table(run)])
    return status or int(bool(sweep.failed - set(DECODERS)))


@torch.no_grad()
def both_ways(sweep: Sweep, problem: Problem) -> str:
    """A row of each contender for each way to make its calls, all of them in turns; says how it went."""
    tensors = random_tensors(problem)
    held_against = standards(problem, tensors, sweep.contenders)
    admitted = {one.contender.name: one for one in sweep.admit(problem, tensors, held_against)}
    copies = _copies(problem, tensors)
    num_calls = min(MAX_CALLS, max(MIN_CALLS, len(copies)))
    calls: dict[tuple[str, str], Call] = {}
    for who, one in admitted.items():
        several = _several(one, copies, num_calls)
        several()  # whatever it does only once is done before a graph sees it
        calls[who, EAGER] = several
        if replay := sweep.timer.captured(several):
            calls[who, GRAPH] = replay
    timings = in_turns(sweep.timer, calls, sweep.budget)
    rates = {}
    for (who, way), timing in timings.items():
        one, one_call = admitted[who], timing.of_one(num_calls)
        given = fp8.in_fp8(problem) if isinstance(one.contender, CachedFp8) else problem
        row = sweep.keep(one, one_call, call=way, tb_per_s=cache_bytes(given) / one_call.ms / 1e9)
        if way == GRAPH:
            rates[who] = f"{who} {1e3 * row.ms:.1f} us, {row.tb_per_s:.2f} TB/s"
    return f"{name(problem)}: {'  '.join(rates.values())}"


def _copies(problem: Problem, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Q, K and V, so often that all of them together, in e4m3 too, do not stay in the L2."""
    count = min(MAX_CALLS, -(-int(MIN_COPIES_BYTES) // cache_bytes(fp8.in_fp8(problem))))
    return [tensors, *(tuple(x.clone() for x in tensors) for _ in range(count - 1))]


def _several(one: Admitted, copies: Sequence[tuple[Tensor, ...]], num_calls: int) -> Call:
    """`num_calls` calls one after the other, each on the next copy, the first on that of the check."""
    others = [within(one.contender, one.contender.prepare(one.problem, *tensors)) for tensors in copies[1:]]
    calls = list(islice(cycle([one.call, *others]), num_calls))

    def several() -> None:
        for call in calls:
            call()

    return several


def column(row: Row) -> str:
    """Whose columns a row stands in."""
    return fp8_name(row.version) if row.dtype == fp8.DTYPE else row.version


def table(run: pd.DataFrame) -> Table:
    """Every problem of a run: each version's time and rate from a graph, its time when called eagerly."""
    measured = comparison.as_rows(run[run.version != GEMM])
    stale = comparison.stale_versions(run)
    # A row in FP8 belongs to the problem that was quantised.
    dtype = max((getattr(torch, row.dtype) for row in measured), key=lambda dtype: dtype.itemsize)
    by_problem: dict[Problem, dict[tuple[str, str], Row]] = {}
    for row in measured:
        by_problem.setdefault(replace(problem_of(row), dtype=dtype), {})[column(row), row.call] = row
    names = {column(row): row.version for row in measured}
    ours, peers = [one for one in names if one in VERSIONS], [one for one in names if one in DECODERS]
    marked = {one: one + (comparison.STALE if version in stale else "") for one, version in names.items()}
    first = next(iter(by_problem))
    ratios: dict[str, tuple[str, Sequence[str]]] = {}  # whose time, and of whom the least is divided by it
    for newest in ours[-1:]:
        if peers:
            ratios[f"{marked[newest]} / best peer"] = newest, peers
        if fp8_name(newest) in names:
            ratios[f"fp8 / {DTYPES[first.dtype_name]}"] = fp8_name(newest), [newest]
    units = ("us", "TB/s", "eager us")
    columns = ["batch", "cache", "K+V MB", *(f"{marked[one]} {unit}" for unit in units for one in names), *ratios]
    shape = f"{first.dtype_name}, heads {first.heads_q}/{first.heads_kv}, head_dim {first.head_dim}"
    result = Table(f"Decoding, {shape}, {first.seqlen_q} query a sequence", columns, labels=2)
    for problem, found in by_problem.items():
        shown = [found.get((one, way)) for way in (GRAPH, GRAPH, EAGER) for one in names]
        forms = [_us] * len(names) + [_rate] * len(names) + [_us] * len(names)
        line = [comparison.NOTHING if row is None else form(row) for form, row in zip(forms, shown, strict=True)]
        for one, rivals in ratios.values():
            times = [found[rival, GRAPH].ms for rival in rivals if (rival, GRAPH) in found]
            row = found.get((one, GRAPH))
            line.append(f"{min(times) / row.ms:.2f}" if row and times else comparison.NOTHING)
        result.add(str(problem.batch), str(problem.seqlen_k), f"{cache_bytes(problem) / 1e6:.0f}", *line)
    result.notes.append(
        "us: a call's time in a CUDA graph of many; eager: made by Python, one after the other; TB/s: bytes of K and V "
        "over the graph's time; a ratio is of those times, above 1 where the first is the faster."
    )
    if any(row.dtype == fp8.DTYPE for row in measured):
        result.notes.append(
            "fp8: q, K and V in e4m3 with a scale for each block, half the bytes, made before the call."
        )
    if stale:
        result.notes.append(comparison.STALE_NOTE)
    return result


def _us(row: Row) -> str:
    return f"{1e3 * row.ms:.1f}"


def _rate(row: Row) -> str:
    return f"{row.tb_per_s:.2f}"


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: each default problem by each default version, from a graph.

    By ours in FP8 too.
    """
    measured = comparison.as_rows(run[run.version != GEMM])
    known = {(row.version, problem_of(row)) for row in measured if row.call == GRAPH}
    wanted = [(version, problem) for problem in cells() for version in (*VERSIONS, *DEFAULT_PEERS)]
    wanted += [(version, fp8.in_fp8(problem)) for problem in cells() for version in VERSIONS]
    return [f"{version} {name(problem)}" for version, problem in wanted if (version, problem) not in known]


def without_a_gpu(problems: Sequence[Problem], versions: Sequence[str], console: Console) -> int:
    """Shows what would be measured, and how right ours and torch are on a small cache; 1 if one is wrong."""
    everyone = contenders(versions)
    table = Table(
        "What would be measured (batch, queries over cache, heads)",
        ["dtype", "d", "shape", "size", "K+V MB", "MFLOP"],
        labels=4,
    )
    for problem in problems:
        label = problem.dtype_name, str(problem.head_dim), kind(problem), size(problem)
        table.add(*label, f"{cache_bytes(problem) / 1e6:.1f}", f"{problem.flops('fwd') / 1e6:.0f}")
    console.print(table.to_rich())
    small = replace(problems[0], **SMALL, total_q=None, total_k=None, device="cpu", arch=None)
    tensors, wrong = random_tensors(small), False
    # A CPU would not say which head_dims have no kernel.
    held_against = standards(small, tensors, [one for one in everyone if not one.why_not(problems[0])])
    for one in everyone:
        if reason := one.why_not(problems[0]):
            console.print(f"{one.name} is missing: {reason}", highlight=False)
            continue
        exact, at_most = held_against[one.name]
        try:
            error = relative_error(within(one, one.prepare(small, *tensors))(), exact)
            found = f"relative error {error:.1e}"
        except Exception as failure:  # a peer that needs a GPU, for one
            error, found = float("nan"), f"{type(failure).__name__}: {failure}"
        console.print(f"{one.name} on this CPU, {name(small)}: {found}", highlight=False)
        wrong |= one.name not in DECODERS and not error <= at_most
    return int(wrong)
