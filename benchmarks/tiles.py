"""Which tiles are fastest: one generation with many a choice of tiles, warps and stages, on each problem in turns.

Every candidate is the problem's default configuration with other numbers in some fields of its Config; those that its
rules forbid are left out. A candidate that is wrong, or does not fit into an SM, is a note and no number. One that
spills is measured like the others and marked: no default may spill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks import compare, comparison, rows, without_gpu
from benchmarks.contenders import OURS, Ours
from benchmarks.peers import GEMM
from benchmarks.problems import SHAPE_COLUMNS, name, problem_of
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa_common.isolated import IsolatedFailure
from fa_common.problem import Direction, Problem
from fa_common.report import KernelReport, report

SUITE = "tiles"
VERSION = "fa2"
HEAD_DIMS = (128,)
MASKS = ("full",)
SEQLENS = (16384,)
PASSES = ("fwd", "bwd")
ROUNDS = 10

Space = Mapping[str, Sequence[Any]]  # the values that each field of a Config takes

# What is searched unless other values are given.
SPACES: dict[str, Space] = {
    "fa1": {"tile_m": (16, 32, 64), "tile_n": (64, 128, 256), "num_warps": (4, 8)},
    "fa2": {"tile_m": (64, 128), "tile_n": (32, 48, 64, 96, 128), "num_warps": (4, 8), "stages": (1, 2)},
    "fa3": {"tile_m": (128, 192, 256), "tile_n": (64, 80, 96, 128, 176), "stages": (2, 3)},
}

# The same of the backward, for those whose warps share out what fa2's do.
BACKWARD_SPACE: Space = {
    "tile_m": (32, 64, 128),
    "tile_n": (64, 128),
    "num_warps": (4, 8),
    "key_warps": (2, 4, 8),
    "query_warps": (1, 2, 4),
}


def space_of(version: str, direction: Direction) -> Space:
    """What is searched unless other values are given. Raises ValueError where there is nothing to search."""
    if direction == "fwd":
        return SPACES[version]
    default = GENERATIONS[version].default_backward_config
    if default is None:
        raise ValueError(f"{version} has no backward kernel: choose another version, or --pass fwd")
    known = {f.name for f in fields(GENERATIONS[version].backward_config_type)}
    return {field: values for field, values in BACKWARD_SPACE.items() if field in known}


def candidates(version: str, problem: Problem, space: Space, direction: Direction = "fwd") -> list[Ours]:
    """The default, and each other legal combination of the values in `space`; named by the values that differ from it.

    Raises ValueError for a field that the generation's Config has not.
    """
    ours = OURS[direction]
    default = ours(version).config(problem)
    known = [f.name for f in fields(default)]
    if unknown := [field for field in space if field not in known]:
        kind = f"{version}.{type(default).__name__}"
        raise ValueError(f"{', '.join(unknown)}: {kind} has no such field; choose from {', '.join(known)}")
    found = {default: ours(version, label_of(default, space), _changes(default, space))}
    for values in product(*space.values()):
        changes = dict(zip(space, values, strict=True))
        try:
            config = replace(default, **changes)
        except ValueError:  # its rules forbid it
            continue
        found.setdefault(config, ours(version, label_of(config, space), changes))
    return list(found.values())


def nearest(found: Sequence[Ours], problem: Problem, at_most: int | None) -> list[Ours]:
    """At most so many of the candidates: the first, which is the default, and those that differ in fewest fields."""
    default = asdict(found[0].config(problem))

    def distance(one: Ours) -> int:
        return sum(value != default[field] for field, value in asdict(one.config(problem)).items())

    return sorted(found, key=distance)[:at_most]


def label_of(config: Any, space: Space) -> str:
    """A candidate by the fields that are searched: "tile_m 128, tile_n 64, stages 2"."""
    return ", ".join(f"{field} {getattr(config, field)}" for field in space)


def _changes(config: Any, space: Space) -> dict[str, Any]:
    return {field: getattr(config, field) for field in space}


def search(
    version: str,
    problems: Sequence[Problem],
    space: Space,
    budget: Budget,
    results: Path,
    console: Console,
    direction: Direction = "fwd",
    at_most: int | None = None,
) -> int:
    """Measures the candidates of each kind of problem on the current GPU; 1 if one was wrong, 130 if interrupted."""
    status, identifier = 0, rows.new_run()
    for kind in _by_kind(problems):
        ours = nearest(candidates(version, kind[0], space, direction), kind[0], at_most)
        sweep = compare.prepare(ours, kind, budget, results, console, SUITE, direction=direction)
        sweep.run = identifier
        who = {tuple(one.switched.items()): one.name for one in sweep.contenders}

        def named(row: Row, who: Mapping[tuple, str] = who) -> str:
            return who.get(tuple(_searched(row, space).items()), row.version)

        status = max(status, compare.run(compare.steps(sweep, [[problem] for problem in kind], named), console))
        compare.show(sweep, console, lambda run: tables(run, space))
        if status == 130:
            break
    return status


def compile_only(
    version: str,
    problems: Sequence[Problem],
    space: Space,
    console: Console,
    direction: Direction = "fwd",
    at_most: int | None = None,
) -> int:
    """Shows what each candidate is compiled to; the exit status is 1 if none compiles."""
    compiled = False
    for kind in _by_kind(problems):
        able = [problem for problem in kind if not GENERATIONS[version].why_not(problem)][-1:]
        ours = nearest(candidates(version, kind[0], space, direction), kind[0], at_most)
        reports = without_gpu.kernel_reports(ours, able, console)
        console.print(without_gpu.kernels_table(reports, "candidate").to_rich())
        compiled = compiled or any(isinstance(made, KernelReport) for made in reports.values())
    return int(not compiled)


def _by_kind(problems: Sequence[Problem]) -> list[list[Problem]]:
    """The problems of one dtype, head_dim and mask together: they have their candidates in common."""
    kinds: dict[tuple, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault((problem.dtype, problem.head_dim, problem.mask_name), []).append(problem)
    return list(kinds.values())


def _searched(row: Row, space: Space) -> dict[str, Any]:
    return {field: row.config.get(field) for field in space}


def tables(run: pd.DataFrame, space: Space) -> list[Table]:
    """A table for each problem of a run, the fastest candidate first."""
    measured = run[run.version != GEMM]
    kinds = measured.groupby(["version", "pass_", "dtype", *SHAPE_COLUMNS], sort=False)
    return [_table(comparison.as_rows(group), space, comparison.notes(run)) for _, group in kinds]


def _table(measured: Sequence[Row], space: Space, notes: Sequence[str]) -> Table:
    problem, version, direction = problem_of(measured[0]), measured[0].version, measured[0].pass_
    default = asdict(OURS[direction](version).config(problem))
    base = next((row for row in measured if row.config == default), None)
    columns = [*space, "TFLOP/s", "p20 to p80", "to the default", "registers", "shared KiB", "spilled B"]
    table = Table(
        f"{version} tiles, {comparison.TITLES[direction].lower()}, {name(problem)} (batch, seqlen, heads)",
        columns,
        notes=list(notes),
    )
    for row in sorted(measured, key=lambda row: row.tflops, reverse=True):
        change = "default" if row is base else f"{row.tflops / base.tflops - 1:+.1%}" if base else comparison.NOTHING
        spread = "{:.0f} to {:.0f}".format(*comparison.spread(row))
        values = [str(value) for value in _searched(row, space).values()]
        table.add(*values, f"{row.tflops:.0f}", spread, change, *_compiled(row, problem))
    return table


def _compiled(row: Row, problem: Problem) -> tuple[str, str, str]:
    """Registers, shared memory and spills of a row's kernel, if this checkout still has its Config and compiles it."""
    ours = OURS[row.pass_](row.version, switched=row.config)
    try:
        made = report(*ours.kernel(problem))
    except (IsolatedFailure, TypeError, ValueError):
        return (comparison.NOTHING,) * 3
    return str(made.registers), f"{made.shared_memory / 1024:.0f}", str(made.spill_stores)
