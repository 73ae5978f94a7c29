"""Tables and pictures in README.md and docs/, generated from the committed rows and from nothing else.

A document marks its places, `<!-- generated: NAME -->` to `<!-- end -->`; the block of that name replaces what stands
between them. Generating twice changes nothing.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from benchmarks import ablate, accuracy, compare, comparison, decode, fp8, plot, quantize, shapes, sustained
from benchmarks.doctor import host_table
from benchmarks.rows import RESULTS, ROOT, AccuracyRow, QuantizeRow, Row, TestsRow, newest_run, read, source_sha
from benchmarks.tables import Table

DOCS = ROOT / "docs"
AT_REST = "--idle-ms 250"  # before the bursts that the documents show
DOCUMENTS = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))

_PLACE = re.compile(r"(?P<begin><!-- generated: (?P<block>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def regenerate(documents: Sequence[Path] = DOCUMENTS, results: Path = RESULTS, docs: Path = DOCS) -> list[Path]:
    """Fills every marked place and draws every picture; returns the files whose content changed.

    Raises ValueError for a place whose block does not exist, or that has no end.
    """
    gpus = sorted(path for path in results.glob("*") if path.is_dir())
    pictures, changed = {}, []
    for gpu, (suite, (newest, draw)) in product(gpus, PICTURES.items()):
        run = newest(gpu)
        if run is None:
            continue
        picture = pictures[gpu, suite] = docs / f"{_file_name(suite)}-{gpu.name}.svg"
        before = picture.read_bytes() if picture.exists() else None
        draw(run, picture)
        if picture.read_bytes() != before:
            changed.append(picture)
    for document in documents:
        text = document.read_text(encoding="utf-8")
        links = {place: os.path.relpath(picture, document.parent) for place, picture in pictures.items()}
        filled = _fill(document, text, gpus, links)
        if filled != text:
            document.write_text(filled, encoding="utf-8")
            changed.append(document)
    return changed


def _fill(document: Path, text: str, gpus: Sequence[Path], links: Mapping[tuple[Path, str], str]) -> str:
    """The document's text with every block in its place; `links` lead to pictures, by directory of rows and suite."""

    def block(place: re.Match) -> str:
        if place["block"] not in BLOCKS:
            raise ValueError(f"{document}: a block must be one of {', '.join(BLOCKS)}; got {place['block']}")
        command, make = BLOCKS[place["block"]]
        parts = [part for gpu in gpus if (part := make(gpu, links.get((gpu, command))))]
        nothing = f"*Nothing measured yet: `python -m benchmarks {command}`, on a Hopper GPU, adds the rows.*"
        return place["begin"] + ("\n\n".join(parts) or nothing) + "\n" + place["end"]

    filled, places = _PLACE.subn(block, text)
    if places != text.count("<!-- generated:"):
        raise ValueError(f"{document}: each `<!-- generated: NAME -->` needs a line of its own and an `<!-- end -->`")
    return filled


def _file_name(command: str) -> str:
    """A command as part of a file's name: "compare-bwd" for "compare --pass bwd"."""
    return re.sub(r" --\w+ ", "-", command).replace("+", "-")


def _rows(gpu: Path, suite: str) -> pd.DataFrame:
    return comparison.frame(list(read(gpu / f"{suite}.jsonl")))


def _newest_comparison(gpu: Path, suite: str = compare.SUITE) -> pd.DataFrame | None:
    return comparison.newest_run(_rows(gpu, suite))


def _newest_ablation(gpu: Path, version: str = "fa3") -> pd.DataFrame | None:
    rows = _rows(gpu, "ablate")
    runs = [run for run, measured in rows.groupby("run") if ablate.ablated_version(measured) == version]
    return comparison.newest_run(rows[rows.run.isin(runs)], ablate.missing)


def _compare_summary(gpu: Path, picture: str | None, suite: str = compare.SUITE) -> str | None:
    """The longest sequences, and the picture."""
    run = _newest_comparison(gpu, suite)
    return None if run is None else _with_facts(run, comparison.summary(run), picture)


def _compare(gpu: Path, picture: str | None, suite: str = compare.SUITE) -> str | None:
    """Every problem, and the picture."""
    run = _newest_comparison(gpu, suite)
    if run is None:
        return None
    table = comparison.table(run)
    if lacking := comparison.missing(run):
        table.notes.append(f"An incomplete run: it lacks {len(lacking)} measurements of a full one.")
    return _with_facts(run, table, picture)


def _compare_margins(gpu: Path, picture: str | None) -> str | None:
    """The newest generation over its best peer; its run may lack the older generations."""
    run = comparison.newest_run(_rows(gpu, "compare"), comparison.missing_margins)
    table = None if run is None else comparison.margins(run)
    return table and _with_facts(run, table)


def _bursts(
    gpu: Path, picture: str | None, suite: str, table: Callable[[pd.DataFrame], Table] = comparison.table
) -> str | None:
    """The newest run whose turns began with the GPU at rest, of whatever problems it has."""
    run = comparison.newest_run(_rows(gpu, f"{suite}{compare.BURST}"), lacks=lambda run: ())
    return None if run is None else _with_facts(run, table(run))


def _suite(module: ModuleType) -> Callable[[Path, str | None], str | None]:
    """The block of a suite that has one table: its most complete run."""

    def block(gpu: Path, picture: str | None) -> str | None:
        run = comparison.newest_run(_rows(gpu, module.SUITE), module.missing)
        if run is None:
            return None
        table = module.table(run)
        if lacking := module.missing(run):
            table.notes.append(f"An incomplete run: it lacks {len(lacking)} measurements of a full one.")
        return _with_facts(run, table)

    return block


def _ablate(gpu: Path, picture: str | None, version: str = "fa3") -> str | None:
    """What each switch is worth, a table a problem, and the picture."""
    run = _newest_ablation(gpu, version)
    if run is None:
        return None
    *others, last = ablate.tables(run)
    parts = [_with_facts(run, table) for table in others]
    return "\n\n".join([*parts, _with_facts(run, last, picture, shows="what each switch is worth")])


def _host(gpu: Path, picture: str | None) -> str | None:
    """What a call costs the host."""
    measured = list(read(gpu / "host.jsonl"))
    if not measured:
        return None
    newest = [row for row in measured if row.run == max(row.run for row in measured)]
    return _with_facts(comparison.frame(newest), host_table(newest))


def _tests(gpu: Path, picture: str | None) -> str | None:
    """The newest run of the GPU tests."""
    runs: list[TestsRow] = list(read(gpu / "tests.jsonl"))
    if not runs:
        return None
    last = max(runs, key=lambda row: row.run)
    changed = [version for version, sha in last.source_sha.items() if sha != source_sha(version)]
    since = f" Since then {', '.join(changed)} changed." if changed else ""
    return (
        f"{last.gpu}, {last.time}: {last.passed} passed, {last.failed} failed, {last.skipped} skipped "
        f"in {last.seconds:.0f} s.{since}"
    )


def _accuracy(gpu: Path, picture: str | None) -> str | None:
    """Every error, and the picture."""
    run = accuracy.newest_run(gpu)
    if run is None:
        return None
    parts = _titled(run, accuracy.table(run))
    return "\n\n".join([*parts, f"![root mean square errors]({picture})"] if picture else parts)


def _quantize(gpu: Path, picture: str | None) -> str | None:
    """What quantising costs."""
    run = newest_run(gpu / f"{quantize.SUITE}.jsonl", quantize.missing)
    return run and "\n\n".join(_titled(run, quantize.table(run)))


def _titled(run: Sequence[AccuracyRow | QuantizeRow], table: Table) -> list[str]:
    """A table under its title, where and when it was measured."""
    last = run[-1]
    return [f"{table.title}. {last.gpu}, torch {last.torch}; run {last.run}, {last.time[:10]}.", table.to_markdown()]


def _with_facts(
    run: pd.DataFrame, table: Table, picture: str | None = None, shows: str = "rate over sequence length"
) -> str:
    """A table under its title, where and when it was measured, and the picture's link."""
    row = Row(**run.iloc[-1])
    clocks = run.sm_clock_mhz.dropna()
    clock = f", SM clock {clocks.min():.0f} to {clocks.max():.0f} MHz" if len(clocks) else ""
    place = f"{row.gpu}, driver {row.driver}, torch {row.torch}, CuTe DSL {row.dsl}{clock}"
    parts = [f"{table.title}. {place}; run {row.run}, {row.time[:10]}.", table.to_markdown()]
    return "\n\n".join([*parts, f"![{shows}]({picture})"] if picture else parts)


# What a document may ask for: the command that adds the rows, and the block of one GPU.
BLOCKS: dict[str, tuple[str, Callable[[Path, str | None], str | None]]] = {
    "compare-summary": ("compare", _compare_summary),
    "compare": ("compare", _compare),
    "compare-margins": ("compare", _compare_margins),
    "compare-bwd": ("compare --pass bwd", partial(_compare, suite="compare-bwd")),
    "compare-bwd-summary": ("compare --pass bwd", partial(_compare_summary, suite="compare-bwd")),
    "compare-fwd-bwd": ("compare --pass fwd+bwd", partial(_compare, suite="compare-fwd-bwd")),
    "shapes": ("shapes", _suite(shapes)),
    "sustained": ("sustained", _suite(sustained)),
    "decode": ("decode", _suite(decode)),
    "fp8": (f"compare --dtype {fp8.DTYPE}", _suite(fp8)),
    "compare-burst": (f"compare {AT_REST}", partial(_bursts, suite=compare.SUITE)),
    "fp8-burst": (f"compare --dtype {fp8.DTYPE} {AT_REST}", partial(_bursts, suite=fp8.SUITE, table=fp8.table)),
    "quantize": ("quantize", _quantize),
    "ablate": ("ablate", _ablate),
    "ablate-fa2": ("ablate --version fa2", partial(_ablate, version="fa2")),
    "accuracy": ("accuracy", _accuracy),
    "host": ("doctor", _host),
    "tests": ("gpu-tests", _tests),
}

# What is drawn of a suite: its run, and how.
PICTURES: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Path], None]]] = {
    "compare": (_newest_comparison, plot.draw),
    "compare --pass bwd": (partial(_newest_comparison, suite="compare-bwd"), plot.draw),
    "compare --pass fwd+bwd": (partial(_newest_comparison, suite="compare-fwd-bwd"), plot.draw),
    "ablate": (_newest_ablation, ablate.draw),
    "ablate --version fa2": (partial(_newest_ablation, version="fa2"), ablate.draw),
    "accuracy": (accuracy.newest_run, accuracy.draw),
}
