"""The rows of one `compare` run side by side: a line a problem, a column a version, and the ratios that matter."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import floor

import pandas as pd

from benchmarks.peers import GEMM, PEERS, Gemm
from benchmarks.problems import grid, name
from benchmarks.rows import Row, source_sha
from benchmarks.tables import Table
from fa import GENERATIONS

PROBLEM = ["dtype", "head_dim", "causal", "seqlen_q"]
STALE = "†"
STALE_NOTE = f"{STALE} measured on other code than this checkout's."
CLOSE = "▼"
AHEAD = 1.05  # below it, a lead over the best peer is within what repeats of a cell differ by
NOTHING = "-"
TITLES = {"fwd": "Forward", "bwd": "Backward", "fwd+bwd": "Forward and backward"}
MARGIN = "margin"  # the form of a ratio to the best peer


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a table, a column a field. A row without `rel_err` was never checked and does not count."""
    return pd.DataFrame([asdict(row) for row in rows if row.rel_err is not None], columns=list(Row.__annotations__))


def as_rows(run: pd.DataFrame) -> list[Row]:
    """The rows that a frame was made of: pandas has a NaN where a row has None."""
    return [Row(**record) for record in run.astype(object).where(run.notna(), None).to_dict("records")]


def spread(row: Row) -> tuple[float, float]:
    """A row's rates at the 80th and the 20th percentile of its times, the slower first."""
    return row.tflops * row.ms / row.ms_p80, row.tflops * row.ms / row.ms_p20


def newest_run(
    measured: pd.DataFrame, lacks: Callable[[pd.DataFrame], Sequence[str]] | None = None
) -> pd.DataFrame | None:
    """The run that `lacks` least (by default of what `missing` lists), of several the newest; None if there is none."""
    lacks = lacks or missing
    with_attention = measured[measured.run.isin(measured.run[measured.version != GEMM])]
    runs = [run for _, run in with_attention.groupby("run", sort=True)]
    return min(reversed(runs), key=lambda run: len(lacks(run)), default=None)


def missing(run: pd.DataFrame) -> list[str]:
    """What a complete run has and this one has not: each generation on each problem of the default sweep."""
    measured = set(run[[*PROBLEM, "version"]].itertuples(index=False, name=None))
    forward_only = set(run.pass_) == {"fwd"}
    able = [version for version in GENERATIONS if forward_only or GENERATIONS[version].capabilities.backward]
    return [
        f"{version} {name(problem)}"
        for problem in grid()
        for version in able
        if (problem.dtype_name, problem.head_dim, problem.causal, problem.seqlen_q, version) not in measured
    ]


def side_by_side(run: pd.DataFrame, column: str = "tflops") -> pd.DataFrame:
    """A column of the rows by problem (lines) and version (columns, generations first, oldest first)."""
    attention = run[run.version != GEMM].drop_duplicates([*PROBLEM, "version"], keep="last")
    wide = attention.pivot(index=PROBLEM, columns="version", values=column)
    return wide[[version for version in (*GENERATIONS, *PEERS) if version in wide]]


def gemm_rate(run: pd.DataFrame) -> float | None:
    """The run's matrix-product rate in TFLOP/s, its ceiling; None when it was not measured."""
    measured = run.tflops[run.version == GEMM]
    return measured.median() if len(measured) else None


def stale_versions(run: pd.DataFrame) -> set[str]:
    """The generations whose rows were measured on other code than this checkout's."""
    ours = run[run.version.isin(GENERATIONS)]
    return {version for version, sha in zip(ours.version, ours.source_sha, strict=True) if sha != source_sha(version)}


def table(run: pd.DataFrame) -> Table:
    """Every problem of a run: rates, ratios to the predecessor and to the best peer, share of the GEMM."""
    wide = side_by_side(run)
    ours, peers = _split(wide)
    columns = {version: (wide[version], ".0f") for version in (*ours, *peers)}
    for old, new in pairwise(GENERATIONS):
        if old in wide and new in wide:
            columns[f"{new} / {old}"] = wide[new] / wide[old], ".2f"
    for newest in ours[-1:]:
        if peers:
            columns[f"{newest} / best peer"] = wide[newest] / wide[peers].max(axis=1), MARGIN
        columns[f"{newest} % of GEMM"] = side_by_side(run, "pct_of_gemm")[newest], ".0f"

    stale = stale_versions(run)
    marked = [column + (STALE if column in stale else "") for column in columns]
    title = f"{_title(run)}, TFLOP/s{after_rest(run)}"
    result = Table(title, ["dtype", "d", "mask", "seqlen", *marked], labels=4, notes=notes(run))
    if any(form == MARGIN for _, form in columns.values()):
        result.notes.append(f"{CLOSE} less than {AHEAD} times the best peer.")
    for problem in wide.index:
        dtype, head_dim, causal, seqlen = problem
        numbers = [_number(values[problem], form) for values, form in columns.values()]
        result.add(dtype, str(head_dim), _mask(causal), str(seqlen), *numbers)
    return result


def summary(run: pd.DataFrame) -> Table:
    """The longest sequences of a run: the generations and the best peer."""
    longest = side_by_side(run).index.get_level_values("seqlen_q").max()
    wide = side_by_side(run).xs(longest, level="seqlen_q")
    ours, peers = _split(wide)
    stale = stale_versions(run)
    marked = [version + (STALE if version in stale else "") for version in ours]
    title = f"{_title(run)}, TFLOP/s, {longest} tokens a sequence"
    result = Table(title, ["dtype", "d", "mask", *marked, "best peer"], labels=3, notes=notes(run))
    for (dtype, head_dim, causal), line in wide.iterrows():
        measured = line[peers].dropna()
        best = f"{measured.max():.0f} ({measured.idxmax()})" if len(measured) else NOTHING
        result.add(dtype, str(head_dim), _mask(causal), *(_number(line[version], ".0f") for version in ours), best)
    return result


def margins(run: pd.DataFrame) -> Table | None:
    """The newest generation over its best peer, a column a length; None where one of them was not measured."""
    wide = side_by_side(run)
    ours, peers = _split(wide)
    if not ours or not peers:
        return None
    newest = ours[-1]
    ratios = (wide[newest] / wide[peers].max(axis=1)).unstack("seqlen_q")
    stale = STALE if newest in stale_versions(run) else ""
    result = Table(
        f"{_title(run)}, {newest}{stale} over its best peer ({', '.join(peers)}){after_rest(run)}",
        ["dtype", "d", "mask", *map(str, ratios)],
        labels=3,
        notes=notes(run),
    )
    for (dtype, head_dim, causal), line in ratios.iterrows():
        result.add(dtype, str(head_dim), _mask(causal), *(_number(ratio, MARGIN) for ratio in line))
    measured = ratios.stack().dropna()
    result.notes.append(f"{CLOSE} less than {AHEAD}: {(measured < AHEAD).sum()} of {len(measured)}.")
    return result


def missing_margins(run: pd.DataFrame) -> list[str]:
    """What a complete table of margins has and this run has not: the newest generation and a peer on each problem."""
    wide = side_by_side(run)
    ours, peers = _split(wide)
    newest = list(GENERATIONS)[-1]
    if newest not in ours or not peers:
        return [newest, "a peer"]
    known = set(wide.index[wide[newest].notna() & wide[peers].notna().any(axis=1)])
    return [name(p) for p in grid() if (p.dtype_name, p.head_dim, p.causal, p.seqlen_q) not in known]


def _title(run: pd.DataFrame) -> str:
    """Which pass a run timed."""
    return TITLES[run.pass_.iloc[-1]]


def after_rest(run: pd.DataFrame) -> str:
    """What a title says of bursts."""
    idle_ms = run.idle_ms.iloc[-1]
    return "" if pd.isna(idle_ms) else f", each turn after {idle_ms:.0f} ms of rest"


def _split(wide: pd.DataFrame) -> tuple[list[str], list[str]]:
    """The columns that are generations, and those that are peers."""
    return [version for version in wide if version in GENERATIONS], [version for version in wide if version in PEERS]


def notes(run: pd.DataFrame) -> list[str]:
    """What belongs under every table of a run: its ceiling, and what its marks mean."""
    lines = []
    if (gemm := gemm_rate(run)) is not None:
        lines.append(f"A bf16 GEMM of {Gemm.SIZE}^3, timed in turn with every line: {gemm:.0f} TFLOP/s.")
    if stale_versions(run):
        lines.append(STALE_NOTE)
    return lines


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _number(value: float, form: str) -> str:
    if pd.isna(value):
        return NOTHING
    if form == MARGIN:
        cut = floor(round(100 * value, 6)) / 100  # never rounded up to what it has not reached
        return f"{cut:.2f}{CLOSE if value < AHEAD else ''}"
    return format(value, form)
