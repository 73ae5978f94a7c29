"""Generating one token: few queries against a long cache of K and V, where the bytes of the cache set the time.

A call reads 2 * batch * length * heads_kv * head_dim * itemsize bytes of K and V, and TB/s are those over the time.
Every version makes the same calls in the same two ways: replayed from a CUDA graph, as a server does, so that the
host's time does not count; and eagerly, one Python call after the other, where it does. Calls go over so many copies of
the cache that none is still in the L2.
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

from benchmarks import compare, comparison
from benchmarks.compare import Admitted, Sweep, within
from benchmarks.correctness import limit, relative_error
from benchmarks.peers import GEMM, PEERS, Package, Sdpa
from benchmarks.problems import exact_output, kind, name, problem_of, random_tensors, size
from benchmarks.rows import Row, source_sha
from benchmarks.tables import Table
from benchmarks.timing import Budget, Call, DeviceTimer, in_turns
from fa_common.problem import Problem

SUITE = "decode"
BATCHES = (1, 8, 64)
SEQLENS = (1024, 8192, 32768, 131072)  # of the cache
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPES = ("bfloat16", "float16")
MAX_BYTES = 40e9  # of K and V; the largest default, batch 64 at 131072, has 34e9

MIN_CALLS, MAX_CALLS = 4, 64  # of one replay
MIN_COPIES_BYTES = 4 * 60e6  # of all copies of K and V: several times the L2
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

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        out = torch.full_like(q, torch.nan)
        arguments = {"causal": problem.causal, "out": out} | self.switched

        def call() -> Tensor:
            self._function(q, k, v, **arguments)
            return out

        return call

    def scope(self) -> AbstractContextManager:
        return nullcontext()

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"version": self.version, "config": self.switched or None, "source_sha": source_sha(self.version)}


VERSIONS = ("fa3",)
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
    ours = [Cached(version, switched=chosen) for version in versions if version in VERSIONS]
    peers = [DECODERS[version] for version in versions if version in DECODERS]
    sweep = compare.prepare([*ours, *peers], problems, budget, results, console, SUITE, EveryCall)
    steps = [(name(problem), partial(both_ways, sweep, problem)) for problem in problems]
    status = compare.run(steps, console)
    compare.show(sweep, console, lambda run: [table(run)])
    return status or int(bool(sweep.failed & set(VERSIONS)))


@torch.no_grad()
def both_ways(sweep: Sweep, problem: Problem) -> str:
    """A row of each contender for each way to make its calls, all of them in turns; says how it went."""
    tensors = random_tensors(problem)
    admitted = {one.contender.name: one for one in sweep.admit(problem, tensors)}
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
        one_call = timing.of_one(num_calls)
        row = sweep.keep(admitted[who], one_call, call=way, tb_per_s=cache_bytes(problem) / one_call.ms / 1e9)
        if way == GRAPH:
            rates[who] = f"{who} {1e3 * row.ms:.1f} us, {row.tb_per_s:.2f} TB/s"
    return f"{name(problem)}: {'  '.join(rates.values())}"


def _copies(problem: Problem, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Q, K and V, so often that all of them together do not stay in the L2."""
    count = min(MAX_CALLS, -(-int(MIN_COPIES_BYTES) // cache_bytes(problem)))
    return [tensors, *(tuple(x.clone() for x in tensors) for _ in range(count - 1))]


def _several(one: Admitted, copies: Sequence[tuple[Tensor, ...]], num_calls: int) -> Call:
    """`num_calls` calls one after the other, each on the next copy."""
    prepared = [within(one.contender, one.contender.prepare(one.problem, *tensors)) for tensors in copies]
    calls = list(islice(cycle(prepared), num_calls))

    def several() -> None:
        for call in calls:
            call()

    return several


def table(run: pd.DataFrame) -> Table:
    """Every problem of a run: each version's time and rate from a graph, its time when called eagerly."""
    measured = comparison.as_rows(run[run.version != GEMM])
    stale = comparison.stale_versions(run)
    by_problem: dict[Problem, dict[tuple[str, str], Row]] = {}
    for row in measured:
        by_problem.setdefault(problem_of(row), {})[row.version, row.call] = row
    versions = list(dict.fromkeys(row.version for row in measured))
    ours, peers = [v for v in versions if v in VERSIONS], [v for v in versions if v not in VERSIONS]
    marked = {version: version + (comparison.STALE if version in stale else "") for version in versions}
    units = ("us", "TB/s", "eager us")
    columns = ["batch", "cache", "K+V MB", *(f"{marked[v]} {unit}" for unit in units for v in versions)]
    if ours and peers:
        columns.append(f"{marked[ours[-1]]} / best peer")
    first = next(iter(by_problem))
    shape = f"{first.dtype_name}, heads {first.heads_q}/{first.heads_kv}, head_dim {first.head_dim}"
    result = Table(f"Decoding, {shape}, {first.seqlen_q} query a sequence", columns, labels=2)
    for problem, found in by_problem.items():
        shown = [found.get((v, way)) for way in (GRAPH, GRAPH, EAGER) for v in versions]
        forms = [_us] * len(versions) + [_rate] * len(versions) + [_us] * len(versions)
        line = [comparison.NOTHING if row is None else form(row) for form, row in zip(forms, shown, strict=True)]
        if ours and peers:
            rivals = [found[peer, GRAPH].ms for peer in peers if (peer, GRAPH) in found]
            row = found.get((ours[-1], GRAPH))
            line.append(f"{min(rivals) / row.ms:.2f}" if row and rivals else comparison.NOTHING)
        result.add(str(problem.batch), str(problem.seqlen_k), f"{cache_bytes(problem) / 1e6:.0f}", *line)
    result.notes.append(
        "us: a call's time in a CUDA graph of many; eager: made by Python, one after the other; TB/s: bytes of K and V "
        "over the graph's time; the ratio is of those times, above 1 where ours is the faster."
    )
    if stale:
        result.notes.append(comparison.STALE_NOTE)
    return result


def _us(row: Row) -> str:
    return f"{1e3 * row.ms:.1f}"


def _rate(row: Row) -> str:
    return f"{row.tb_per_s:.2f}"


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: each default problem by each default version, from a graph."""
    measured = comparison.as_rows(run[run.version != GEMM])
    known = {(row.version, problem_of(row)) for row in measured if row.call == GRAPH}
    versions = (*VERSIONS, *DEFAULT_PEERS)
    return [f"{v} {name(p)}" for p in cells() for v in versions if (v, p) not in known]


def without_a_gpu(problems: Sequence[Problem], versions: Sequence[str], console: Console) -> int:
    """Shows what would be measured, and how right ours and torch are on a small cache; 1 if one is wrong."""
    contenders = [*(Cached(v) for v in versions if v in VERSIONS), *(DECODERS[v] for v in versions if v in DECODERS)]
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
    exact = exact_output(small, *tensors)
    for one in contenders:
        if reason := one.why_not(small):
            console.print(f"{one.name} is missing: {reason}", highlight=False)
            continue
        try:
            error = relative_error(within(one, one.prepare(small, *tensors))(), exact)
            found = f"relative error {error:.1e}"
        except Exception as failure:  # a peer that needs a GPU, for one
            error, found = float("nan"), f"{type(failure).__name__}: {failure}"
        console.print(f"{one.name} on this CPU, {name(small)}: {found}", highlight=False)
        wrong |= one.name in VERSIONS and not error <= limit(small.dtype)
    return int(wrong)
