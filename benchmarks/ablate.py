"""What each idea is worth: one generation with its switches turned on one after another, and with each off alone.

    ladder          every switch off, then one more on a rung: what an idea adds to those before it
    without         the full configuration less one switch: what would be lost without it
    with            the full configuration and one switch more, of those that it leaves off
    before          beside the ladder's foot: the generation before with its own ideas off, and as it is by default

Tiles and stages are those of the full configuration throughout, so a rung differs from its neighbour by its idea alone.
They are the problem's default unless others are chosen: what an idea saves, registers say, must be there without it.
The generation before has its own tiles, and is timed in the same turns.
A configuration that there cannot be, because a rule of its Config forbids it, is a line with the rule and no number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import compare, comparison, plot, rows, without_gpu
from benchmarks.contenders import Ours, default_choices, numbers, switched
from benchmarks.peers import GEMM
from benchmarks.problems import grid, name, problem_of
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa_common.problem import Problem
from fa_common.switches import label, switches, without

SUITE = "ablate"
PICTURE = rows.ROOT / "docs" / "ablate-latest.svg"

# The problem of the FA3 paper's own ablation, and what it found there.
VERSION = "fa3"
HEAD_DIMS = (128,)
MASKS = ("full",)
SEQLENS = (8448,)
BATCH = 4
HEADS = 16
[DEFAULT] = grid(HEAD_DIMS, MASKS, SEQLENS, batch=BATCH, heads=HEADS)
PAPER = (
    "The FA3 paper's own ablation (its table 2: this shape, fp16, an H100): 661 TFLOP/s; 582 without GEMM-softmax "
    "pipelining; 570 without warp specialization."
)

ROUNDS = 20  # four times a comparison's: neighbouring rungs may differ by a percent

LABEL_WIDTH = 44  # characters of a line's name in the picture, before it is broken
WHOLE, GAIN, LOSS, OTHER = "#08306b", "#4292c6", "#d6604d", "#888888"

# What turns off the ideas of a generation that has no switches: the fields that its default adds to the paper.
PLAIN = {"fa1": {"q_splits": 1}}


@dataclass(frozen=True)
class Line:
    """A configuration as one view shows it, beside the one that it is compared with."""

    text: str
    config: Any  # None for one that there cannot be
    before: Any = None  # of a rung: the rung before
    full: Any = None  # of every other line: the full configuration
    why_not: str | None = None  # why there cannot be this configuration
    version: str | None = None  # of the generation before, beside the ladder

    @property
    def is_rung(self) -> bool:
        return self.full is None

    @property
    def view(self) -> int:
        """Where it stands: the generation before, the ladder, one switch less or more."""
        return 0 if self.version else 1 if self.is_rung else 2


def lines(full: Any) -> list[Line]:
    """The three views of a Config's switches. A configuration may stand in more than one of them."""
    return [*_rungs(full), *_one_off(full), *_one_more(full)]


def references(version: str, problem: Problem, full: Any = None) -> list[Line]:
    """The generation before on this problem, with its own ideas off and as it is by default; one line if both are one.

    None for the first generation, and where the one before cannot run.
    """
    found: dict[Any, Line] = {}
    for one in reference_contenders(version):
        if not one.generation.why_not(problem):
            config, why_not = _legal(lambda one=one: one.config(problem))
            text = f"{one.name}{_plain_values(one.version, config)}" if config and not one.switched else one.name
            found.setdefault(config, Line(text, config, full=full, why_not=why_not, version=one.version))
    return list(found.values())


def reference_contenders(version: str) -> list[Ours]:
    """The generation before, with its own ideas off and as it is by default; none before the first."""
    before = predecessor(version)
    if before is None:
        return []
    return [Ours(before, f"{before}, {plain_name(before)}", plain(before)), Ours(before, f"{before}, its default")]


def predecessor(version: str) -> str | None:
    """The generation before."""
    return dict(zip(list(GENERATIONS)[1:], GENERATIONS, strict=False)).get(version)


def plain(version: str) -> dict[str, Any]:
    """The fields of a Config that turn off a generation's own ideas."""
    return PLAIN.get(version) or dict.fromkeys([f.name for f in switches(GENERATIONS[version].config_type)], False)


def plain_name(version: str) -> str:
    """A generation's ideas turned off: "all off", or the fields that do it."""
    return ", ".join(f"{field} {value}" for field, value in PLAIN.get(version, {}).items()) or "all off"


def is_plain(version: str, config: Mapping[str, Any]) -> bool:
    """Whether a generation's own ideas are off in a Config, or in a row's."""
    return all(config.get(field) == value for field, value in plain(version).items())


def _plain_values(version: str, config: Any) -> str:
    """What the default has in the fields of PLAIN: ": q_splits 4"."""
    values = ", ".join(f"{field} {getattr(config, field)}" for field in PLAIN.get(version, {}))
    return values and f": {values}"


def _rungs(full: Any) -> Iterator[Line]:
    """The ladder, as `fa_common.switches.ladder` climbs it; a rung that there cannot be is passed over by the next."""
    on, before = dict.fromkeys([one.name for one in switches(full)], False), None
    for one in [None, *(one for one in switches(full) if getattr(full, one.name))]:
        text = f"+ {one.metadata['label']}" if one else "all off"
        on |= {one.name: True} if one else {}
        config, why_not = _legal(lambda on=on: switched(full, on))
        yield Line(f"{text} = {label(full)}" if config == full else text, config, before=before, why_not=why_not)
        before = config or before


def _one_off(full: Any) -> Iterator[Line]:
    """The full configuration less one switch and less what stands on it."""
    for one in switches(full):
        if getattr(full, one.name):
            less, why_not = _legal(lambda name=one.name: without(_relaxed(full, name), name))
            gone = [f for f in switches(full) if less and getattr(full, f.name) > getattr(less, f.name)] or [one]
            text = f"without {', '.join(f.metadata['label'] for f in gone)}"
            yield Line(text, less, full=full, why_not=why_not)


def _one_more(full: Any) -> Iterator[Line]:
    """The full configuration and one switch more, where it has all that this one stands on."""
    for one in switches(full):
        if not getattr(full, one.name) and all(getattr(full, need) for need in one.metadata["requires"]):
            more, why_not = _legal(lambda name=one.name: switched(full, {name: True}))
            yield Line(f"with {one.metadata['label']}", more, full=full, why_not=why_not)


def _relaxed(full: Any, name: str) -> Any:
    """`full`, or, where that does not go without the switch `name`, `full` with its named choices at their defaults."""
    try:
        without(full, name)
    except ValueError:
        return replace(full, **default_choices(full))
    return full


def _legal(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """A Config and None, or None and the rule that forbids it."""
    try:
        return make(), None
    except ValueError as error:
        return None, str(error)


def full_config(version: str, problem: Problem, chosen: Mapping[str, int]) -> Any:
    """What the lines start from: the problem's default, with the fields in `chosen`. Raises ValueError naming the rule
    that forbids it, or a field that the generation's Config has not."""
    default = GENERATIONS[version].default_config(problem)
    known = numbers(default)
    if unknown := [field for field in chosen if field not in known]:
        kind = f"{version}.{type(default).__name__}"
        raise ValueError(f"{', '.join(unknown)}: {kind} has no such number; choose from {', '.join(known)}")
    return replace(default, **chosen)


def contenders(
    version: str, problems: Sequence[Problem], chosen: Mapping[str, int] = MappingProxyType({})
) -> list[Ours]:
    """Every configuration that the lines of these problems need, once; its name is its switches' label."""
    configs = [line.config for problem in problems for line in lines(full_config(version, problem, chosen))]
    by_label = {
        label(config): {f.name: getattr(config, f.name) for f in switches(config)} for config in configs if config
    }
    return [Ours(version, text, {**chosen, **on}) for text, on in by_label.items()]


def ablate(
    version: str,
    problems: Sequence[Problem],
    chosen: Mapping[str, int],
    budget: Budget,
    results: Path,
    picture: Path,
    console: Console,
) -> int:
    """Measures the ablation on the current GPU; the exit status is 1 if a configuration failed, 130 if interrupted."""
    everyone = [*reference_contenders(version), *contenders(version, problems, chosen)]
    sweep = compare.prepare(everyone, problems, budget, results, console, SUITE)

    def who(row: Row) -> str:
        if row.version == version:
            return row.switches_label
        return f"{row.version}, {plain_name(row.version) if is_plain(row.version, row.config) else 'its default'}"

    status = compare.run(compare.steps(sweep, [[problem] for problem in problems], who), console)
    compare.show(sweep, console, tables, draw, picture)
    return status or int(bool(sweep.failed))


def compile_only(version: str, problems: Sequence[Problem], chosen: Mapping[str, int], console: Console) -> int:
    """Shows what each configuration is compiled to; the exit status is 1 if one does not compile."""
    kinds = without_gpu.kinds_of(problems)
    for problem in kinds:
        if reason := GENERATIONS[version].why_not(problem):
            console.print(f"{version} is missing in {name(problem)}: {reason}", highlight=False)
            continue
        for line in lines(full_config(version, problem, chosen)):
            if line.why_not:
                console.print(f"{name(problem)}, {line.text}: {line.why_not}", highlight=False)
    able = [problem for problem in kinds if not GENERATIONS[version].why_not(problem)]
    everyone = [*reference_contenders(version), *contenders(version, able, chosen)]
    return int(not without_gpu.kernels(everyone, able, console, who="configuration"))


class Ablation:
    """What one run measured on one problem, under the lines that this checkout's Config has."""

    def __init__(self, measured: pd.DataFrame):
        self.version = ablated_version(measured)
        before = [row for row in comparison.as_rows(measured) if row.version != self.version]
        measured = [row for row in comparison.as_rows(measured) if row.version == self.version]
        self.problem = problem_of(measured[0])
        default = GENERATIONS[self.version].default_config(self.problem)
        known = [field for field in numbers(default) if field in measured[0].config]
        self.full = replace(default, **{field: measured[0].config[field] for field in known})
        self.chosen = {field: getattr(self.full, field) for field in known if self.full != default}
        self.lines = [*references(self.version, self.problem, self.full), *lines(self.full)]
        self._rows = {_on(row.config): row for row in measured}
        self._before = {is_plain(row.version, row.config): row for row in before}

    def row(self, config: Any) -> Row | None:
        """The row with exactly these switches on; None if there is none."""
        return None if config is None else self._rows.get(_on(asdict(config)))

    def row_of(self, line: Line) -> Row | None:
        """A line's row; None if it was not measured."""
        if line.version is None:
            return self.row(line.config)
        return self._before.get(is_plain(line.version, asdict(line.config))) if line.config else None

    @property
    def fastest(self) -> float:
        return max(row.tflops for row in (*self._rows.values(), *self._before.values()))

    def change(self, line: Line, base: Any) -> float | None:
        """By how much a line is faster than the configuration `base`, a fraction; None where one was not measured."""
        row, other = self.row_of(line), self.row(base)
        return None if row is None or other is None else row.tflops / other.tflops - 1

    @property
    def title(self) -> str:
        return f"{self.version} one idea at a time, forward, {name(self.problem)}"

    @property
    def is_the_papers(self) -> bool:
        """Whether the paper's figures belong under it: its generation and its shape, whatever the dtype."""
        return self.version == VERSION and replace(self.problem, dtype=DEFAULT.dtype) == DEFAULT


def _on(config: Mapping[str, Any]) -> frozenset[str]:
    """The switches that are on: a Config's fields that are True."""
    return frozenset(field for field, value in config.items() if value is True)


def ablations(run: pd.DataFrame) -> list[Ablation]:
    """The problems of a run, in the order in which they were measured."""
    problem = ["dtype", "head_dim", "causal", "batch", "seqlen_q", "heads_q", "heads_kv"]
    return [Ablation(measured) for _, measured in run[run.version != GEMM].groupby(problem, sort=False)]


def ablated_version(run: pd.DataFrame) -> str | None:
    """Whose ideas a run turned on and off: the newest generation in it; the one before is there for comparison."""
    return next((version for version in reversed(GENERATIONS) if version in set(run.version)), None)


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: each configuration on the default problem."""
    found = [ablation for ablation in ablations(run) if ablation.problem == DEFAULT]
    if not found:
        return [line.text for line in lines(GENERATIONS[VERSION].default_config(DEFAULT))]
    return [line.text for ablation in found for line in ablation.lines if line.config and not ablation.row_of(line)]


def tables(run: pd.DataFrame) -> list[Table]:
    """A table for each problem of a run: every line's rate, its spread and its change."""
    stale = comparison.stale_versions(run)
    return [_table(ablation, stale, comparison.notes(run)) for ablation in ablations(run)]


def _table(ablation: Ablation, stale: set[str], notes: list[str]) -> Table:
    rate = "TFLOP/s" + (comparison.STALE if ablation.version in stale else "")
    columns = ["configuration", rate, "p20 to p80", "to the rung before", "to the top rung"]
    result = Table(f"{ablation.title} (batch, seqlen, heads)", columns, notes=notes)
    if ablation.is_the_papers:
        result.notes.append(PAPER)
    if ablation.chosen:
        chosen = ", ".join(f"{field} {value}" for field, value in ablation.chosen.items())
        result.notes.append(f"Every line has {chosen}; the default of this problem has others.")
    if befores := {line.version for line in ablation.lines if line.version}:
        before = befores.pop()
        result.notes.append(
            f"Lines of {before}: the generation before, with its own tiles, timed in turns with the rest. "
            f'"{before}, {plain_name(before)}" has its own ideas off, as "all off" has those of {ablation.version}.'
        )
    for line in ablation.lines:
        row = ablation.row_of(line)
        measured = (
            [f"{row.tflops:.0f}", "{:.0f} to {:.0f}".format(*comparison.spread(row))]
            if row
            else [comparison.NOTHING] * 2
        )
        changes = [ablation.change(line, base) for base in (line.before, line.full)]
        if line.why_not:
            result.notes.append(f"{line.text}: {line.why_not}.")
        text = line.text + (comparison.STALE if line.version in stale else "")
        result.add(text, *measured, *(comparison.NOTHING if x is None else f"{x:+.1%}" for x in changes))
    return result


def draw(run: pd.DataFrame, path: Path) -> None:
    """Writes a waterfall for each problem of a run: the ladder's foot as a whole bar, then a step for each change."""
    panels = ablations(run)
    heights = [0.8 + 0.34 * len(panel.lines) for panel in panels]
    figure = Figure(figsize=(8.0, sum(heights)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for panel, ablation in zip(axes, panels, strict=True):
        places = [y + 0.5 * line.view for y, line in enumerate(ablation.lines)]  # a gap between two views
        for y, line in zip(places, ablation.lines, strict=True):
            _draw_line(panel, ablation, line, y)
        top = ablation.row(ablation.full)
        if top is not None:
            panel.axvline(top.tflops, color=WHOLE, linewidth=0.8, linestyle=":")
        texts = [fill(line.text, LABEL_WIDTH, break_long_words=False) for line in ablation.lines]
        panel.set_yticks(places, texts, fontsize=8)
        panel.set_ylim(places[-1] + 0.6, places[0] - 0.6)  # the ladder's foot above, as in the table
        panel.set_xlim(0, 1.25 * ablation.fastest)  # room for the numbers
        panel.set_title(ablation.title, fontsize=10)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    axes[-1].set_xlabel("TFLOP/s; a whisker spans the 20th to the 80th percentile", fontsize=9)
    plot.save(figure, path)


def _draw_line(panel: Axes, ablation: Ablation, line: Line, y: float) -> None:
    """One bar: from what the line is compared with, or zero where that is nothing, to what it reached."""
    row, base = ablation.row_of(line), None if line.version else ablation.row(line.before or line.full)
    if row is None:
        text = "cannot be" if line.why_not else "not measured"
        panel.annotate(text, (0, y), (5, 0), textcoords="offset points", va="center", fontsize=8, color=OTHER)
        return
    start = base.tflops if base else 0.0
    color = OTHER if line.version else WHOLE if base is None else GAIN if row.tflops >= start else LOSS
    panel.barh(y, row.tflops - start, left=start, color=color, height=0.6)
    slower, faster = comparison.spread(row)
    panel.hlines(y, slower, faster, color="black", linewidth=1.0)
    text = f"{row.tflops:.0f}" if base is None else f"{row.tflops:.0f}  ({row.tflops - start:+.0f})"
    panel.annotate(text, (max(start, faster), y), (5, 0), textcoords="offset points", va="center", fontsize=8)
