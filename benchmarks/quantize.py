"""What quantising costs: bf16 or fp16 Q, K and V to e4m3 with their scales, in bytes a second and beside a copy.

Bytes are those that no way avoids: each input read once, each e4m3 number written once; the scales are too few to
count. A scale for a head or a tensor is known only once all of it has been read, so those inputs are read twice. The
copy, on the device and in turn with the others, reads and writes as many bytes in all.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import fa3
from benchmarks import compare, machine, rows
from benchmarks.accuracy import dequantized
from benchmarks.comparison import STALE, STALE_NOTE
from benchmarks.correctness import QUANTIZATION_LIMIT, relative_error
from benchmarks.problems import SHAPE_COLUMNS, grid, name, random_tensors, size
from benchmarks.rows import QuantizeRow
from benchmarks.tables import Table
from benchmarks.telemetry import Telemetry
from benchmarks.timing import Budget, DeviceTimer, Timer, in_turns
from fa3 import algorithm
from fa3.fp8 import SCALES, random_signs
from fa_common.problem import Problem

SUITE = "quantize"
VERSION = "fa3"
HEAD_DIMS = (64, 128, 256)
SEQLENS = (1024, 16384)

Way = tuple[str, bool]  # scales, hadamard
WAYS: tuple[Way, ...] = tuple(product(reversed(SCALES), (True, False)))
COPY = "copy"

SMALL = {"batch": 1, "seqlen_q": 200, "seqlen_k": 200}  # of the check without a GPU


def problems_of(head_dims: Sequence[int] = HEAD_DIMS, seqlens: Sequence[int] = SEQLENS, **others) -> list[Problem]:
    """The shapes whose tensors are quantised."""
    return grid(head_dims, ["full"], seqlens, **others)


def bytes_of(problem: Problem) -> int:
    """What quantising its tensors has to read and to write."""
    elements = (problem.total_q * problem.heads_q + 2 * problem.total_k * problem.heads_kv) * problem.head_dim
    return elements * (problem.dtype.itemsize + torch.float8_e4m3fn.itemsize)


def error(tensors: tuple[Tensor, ...], way: Way) -> float:
    """The largest relative error of q, k and v as quantised, against q and k rotated and v."""
    scales, hadamard = way
    q, k, v = tensors
    if hadamard:
        q, k = (algorithm.rotate(x, random_signs(q.shape[-1], 0, q.device)) for x in (q, k))
    made = fa3.quantize(*tensors, scales=scales, hadamard=hadamard)
    return relative_error(tuple(dequantized(made)), (q.double(), k.double(), v.double()))


def measure(problems: Sequence[Problem], budget: Budget, results: Path, console: Console) -> int:
    """Measures every way on the current GPU; 1 if one of them is wrong, 130 if interrupted."""
    facts, timer, measured, wrong = machine.facts(), DeviceTimer(Telemetry()), [], []
    place = facts | {"run": rows.new_run(), "source_sha": rows.source_sha(VERSION)}

    def one(problem: Problem) -> str:
        tensors = random_tensors(problem)
        errors = {way: error(tensors, way) for way in WAYS}
        right = [way for way in WAYS if errors[way] <= QUANTIZATION_LIMIT]
        wrong.extend(f"{name(problem)}, {label(way)}: {errors[way]:.1e}" for way in WAYS if way not in right)
        made = rows_of(problem, tensors, {way: errors[way] for way in right}, timer, budget, place)
        for row in made:
            rows.append(row, results)
        measured.extend(made)
        return f"{name(problem)}: {'  '.join(f'{label(way_of(row))} {row.gb_per_s:.0f}' for row in made)} GB/s"

    status = compare.run([(name(problem), partial(one, problem)) for problem in problems], console)
    if measured:
        console.print(table(measured).to_rich())
        console.print(f"{len(measured)} rows of run {place['run']} in {rows.path_of(SUITE, place['gpu'], results)}")
    for what in wrong:
        console.print(f"wrong by more than {QUANTIZATION_LIMIT:.1e}: {what}", highlight=False)
    return status or int(bool(wrong))


def rows_of(
    problem: Problem, tensors: tuple[Tensor, ...], errors: dict[Way, float], timer: Timer, budget: Budget, place: dict
) -> list[QuantizeRow]:
    """A row of each way whose error is given, all timed in turns with the copy."""
    num_bytes = bytes_of(problem)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=problem.device)
    calls = {COPY: partial(torch.empty_like(source).copy_, source)}
    for scales, hadamard in errors:
        calls[scales, hadamard] = partial(fa3.quantize, *tensors, scales=scales, hadamard=hadamard)
    timings = in_turns(timer, calls, budget)
    copy = timings.pop(COPY)
    shape = {column: getattr(problem, column) for column in SHAPE_COLUMNS if column != "causal"}
    return [
        QuantizeRow(
            version=VERSION,
            dtype=problem.dtype_name,
            scales=scales,
            hadamard=hadamard,
            gb_per_s=num_bytes / timing.ms / 1e6,
            pct_of_copy=100 * copy.ms / timing.ms,
            rel_err=errors[scales, hadamard],
            time=rows.now(),
            **asdict(timing),
            **shape,
            **place,
        )
        for (scales, hadamard), timing in timings.items()
    ]


def label(way: Way) -> str:
    """ "block, rotated" """
    scales, hadamard = way
    return f"{scales}{', rotated' if hadamard else ''}"


def way_of(row: QuantizeRow) -> Way:
    return row.scales, row.hadamard


def problem_of(row: QuantizeRow) -> Problem:
    shape = {column: getattr(row, column) for column in SHAPE_COLUMNS if column != "causal"}
    return Problem(**shape, dtype=getattr(torch, row.dtype))


def table(run: Sequence[QuantizeRow]) -> Table:
    """Every problem of a run: a line for each way."""
    columns = ["d", "size", "scales", "rotated", "us", "GB/s", "p20 to p80", "of a copy"]
    is_stale = run[0].source_sha != rows.source_sha(VERSION)
    result = Table(f"Quantising {run[0].dtype}, {VERSION}{STALE if is_stale else ''}", columns, labels=4)
    for row in run:
        rates = (row.gb_per_s * row.ms / ms for ms in (row.ms_p80, row.ms_p20))
        result.add(
            str(row.head_dim),
            size(problem_of(row)),
            row.scales,
            "yes" if row.hadamard else "no",
            f"{1e3 * row.ms:.1f}",
            f"{row.gb_per_s:.0f}",
            "{:.0f} to {:.0f}".format(*rates),
            f"{row.pct_of_copy:.0f} %",
        )
    result.notes.append(
        "Sizes are batch x seqlen x heads. GB/s: q, k and v read and written once; of a copy's rate, in turn with them."
    )
    if is_stale:
        result.notes.append(STALE_NOTE)
    if lacking := missing(run):
        result.notes.append(f"An incomplete run: it lacks {len(lacking)} measurements of a full one.")
    return result


def missing(run: Sequence[QuantizeRow]) -> list[str]:
    """What a complete run has and this one has not: each way on each default problem."""
    known = {(way_of(row), problem_of(row)) for row in run}
    wanted = product(WAYS, problems_of())
    return [f"{label(way)} {name(problem)}" for way, problem in wanted if (way, problem) not in known]


def without_a_gpu(problems: Sequence[Problem], console: Console) -> int:
    """Shows what would be measured, and the algorithms' errors on small tensors; 1 if one is wrong."""
    plan = Table(
        "What would be measured (batch, seqlen, heads), and the errors on small tensors on this CPU",
        ["dtype", "d", "size", "MB", *map(label, WAYS)],
        labels=3,
    )
    wrong = False
    for problem in problems:
        small = replace(problem, **SMALL, total_q=None, total_k=None, device="cpu", arch=None)
        errors = [error(random_tensors(small), way) for way in WAYS]
        wrong |= any(not x <= QUANTIZATION_LIMIT for x in errors)
        sizes = problem.dtype_name, str(problem.head_dim), size(problem), f"{bytes_of(problem) / 1e6:.0f}"
        plan.add(*sizes, *(f"{x:.1e}" for x in errors))
    console.print(plan.to_rich())
    return int(wrong)
