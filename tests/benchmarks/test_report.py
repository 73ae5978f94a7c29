from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import comparison, report, rows
from benchmarks.peers import GEMM
from benchmarks.problems import grid
from benchmarks.rows import TestsRow
from benchmarks.tables import Table
from fa import GENERATIONS

NEWEST = "20260301T000000Z-cccccc"
RATES = {"fa1": 40.0, "fa2": 300.0, "fa3": 600.0, "torch-fa2": 310.0, "cudnn": 500.0}


@pytest.fixture
def add_run(make_row, gemm_row, tmp_path):
    """Appends one run of suite `compare` with the given rates to tmp_path/results."""

    def add(run: str, problems=None, rates=RATES, **changed):
        rows.append(rows.Row(**vars(gemm_row) | {"run": run}), tmp_path / "results")
        for problem in problems or grid():
            for version, tflops in rates.items():
                row = make_row(version, problem, run=run, tflops=tflops, pct_of_gemm=tflops / 8, **changed)
                rows.append(row, tmp_path / "results")

    return add


@pytest.fixture
def document(tmp_path) -> Path:
    path = tmp_path / "docs" / "page.md"
    path.parent.mkdir()
    places = "\n\n".join(f"<!-- generated: {block} -->\nold text\n<!-- end -->" for block in report.BLOCKS)
    path.write_text(f"before\n\n{places}\n\nafter\n")
    return path


def regenerate(document: Path) -> list[Path]:
    root = document.parent.parent
    return report.regenerate([document], root / "results", root / "docs")


def test_without_rows_a_place_says_how_to_get_some(document):
    assert regenerate(document) == [document]
    text = document.read_text()
    assert text.startswith("before\n\n<!-- generated: ")
    assert text.endswith("<!-- end -->\n\nafter\n")
    assert "old text" not in text
    for command in ("compare", "ablate", "shapes", "sustained", "decode", "quantize", "doctor", "gpu-tests"):
        assert f"`python -m benchmarks {command}`" in text
    assert not list(document.parent.glob("*.svg"))


def test_tables_and_picture_come_from_the_rows(document, add_run):
    add_run(NEWEST)
    picture = document.parent / "compare-h200.svg"
    assert regenerate(document) == [picture, document]
    text = document.read_text()
    assert "| bfloat16 | 128 | causal | 40 | 300 | 600 | 500 (cudnn) |" in text
    assert "| bfloat16 | 64 | full | 4096 | 40 | 300 | 600 | 310 | 500 | 7.50 | 2.00 | 1.20 | 75 |" in text
    assert "![rate over sequence length](compare-h200.svg)" in text
    assert "NVIDIA H200, driver 580.1, torch 2.11.0, CuTe DSL 4.8.1, SM clock 1700 to 1700 MHz; run" in text
    assert "800 TFLOP/s" in text
    assert comparison.STALE not in text
    labels = ElementTree.parse(picture).getroot().itertext()
    assert {"fa3", "cudnn", "16384"} <= {label.strip() for label in labels} or "<!-- fa3 -->" in picture.read_text()


def test_generating_twice_changes_nothing(document, add_run):
    add_run(NEWEST)
    regenerate(document)
    before = {path: path.read_bytes() for path in document.parent.iterdir()}
    assert regenerate(document) == []
    assert before == {path: path.read_bytes() for path in document.parent.iterdir()}


def test_the_margins_say_where_the_lead_is_thin(document, add_run):
    add_run(NEWEST)
    add_run("20260401T000000Z-dddddd", rates={"fa3": 519.9, "cudnn": 500.0})  # without fa1 and fa2
    regenerate(document)
    text = document.read_text()
    assert "Forward, fa3 over its best peer (cudnn). NVIDIA H200" in text
    assert "| bfloat16 | 256 | causal | 1.03▼ | 1.03▼ | 1.03▼ | 1.03▼ | 1.03▼ | 1.03▼ |" in text
    assert "▼ less than 1.05: 36 of 36." in text
    assert "| bfloat16 | 64 | full | 4096 | 40 | 300 | 600 | 310 | 500 | 7.50 | 2.00 | 1.20 | 75 |" in text


def test_only_the_newest_complete_run_counts(document, add_run):
    add_run("20260101T000000Z-aaaaaa", rates=dict.fromkeys(RATES, 1.0))
    add_run("20260201T000000Z-bbbbbb")
    add_run(NEWEST, problems=grid(seqlens=[1024]), rates=dict.fromkeys(RATES, 2.0))
    regenerate(document)
    text = document.read_text()
    assert "run 20260201T000000Z-bbbbbb" in text
    assert NEWEST not in text
    assert "incomplete" not in text


def test_while_no_run_is_complete_the_newest_is_shown_as_such(document, add_run):
    add_run("20260201T000000Z-bbbbbb", problems=grid(seqlens=[512]))
    add_run(NEWEST, problems=grid(seqlens=[1024]))
    regenerate(document)
    text = document.read_text()
    assert NEWEST in text
    assert "An incomplete run: it lacks 90 measurements of a full one." in text


def test_rows_of_other_code_are_marked(document, add_run):
    add_run(NEWEST, rates={"fa1": 40.0, "fa3": 600.0}, source_sha="0" * 64)
    add_run(NEWEST, rates={"fa2": 300.0})
    regenerate(document)
    text = document.read_text()
    assert "| fa1† | fa2 | fa3† |" in text
    assert "† measured on other code than this checkout's." in text


def test_unchecked_rows_do_not_count(document, add_run):
    add_run(NEWEST, rates={"fa3": 600.0}, rel_err=None)
    regenerate(document)
    assert "Nothing measured yet: `python -m benchmarks compare`" in document.read_text()


def test_what_was_not_measured_is_a_dash(add_run, tmp_path):
    add_run(NEWEST, rates={"fa2": 300.0, "fa3": 600.0})
    add_run(NEWEST, problems=grid(seqlens=[512]), rates={"torch-math": 20.0})
    run = comparison.frame(list(rows.read(tmp_path / "results/h200/compare.jsonl")))
    short, *long = comparison.table(run).rows[:6]
    assert short[:7] == ("bfloat16", "64", "full", "512", "300", "600", "20")
    assert {row[6] for row in long} == {comparison.NOTHING}


def test_the_other_suites(document, make_row, tmp_path):
    sha = {version: rows.source_sha(version) for version in GENERATIONS} | {"fa2": "0" * 64}
    ended = {"passed": 120, "failed": 1, "skipped": 2, "seconds": 61.4, "gpu": "NVIDIA H200"}
    rows.append(TestsRow(run="r2", time="2026-01-02", source_sha=sha, **ended), tmp_path / "results")
    for run, ms in (("r1", 0.5), ("r2", 0.0123)):
        host = make_row(run=run, suite="host", pass_="host", call="forward", ms=ms, ms_p20=0.01, ms_p80=0.02)
        rows.append(host, tmp_path / "results")
    regenerate(document)
    text = document.read_text()
    assert "120 passed, 1 failed, 2 skipped in 61 s. Since then fa2 changed." in text
    assert "| fa3 | forward | 12.3 | 10.0 | 20.0 |" in text
    assert "500.0" not in text


def test_bursts_are_the_newest_run_and_stand_in_no_other_table(document, make_row, tmp_path):
    for run, tflops in (("r1", 111.0), ("r2", 222.0)):
        problems = grid() if run == "r1" else grid()[:1]  # nothing makes a run of bursts complete
        for problem in problems:
            burst = make_row("fa3", problem, run=run, tflops=tflops, suite="compare-burst", idle_ms=250)
            rows.append(burst, tmp_path / "results")
    only_gemm = make_row(GEMM, run="r3", tflops=333.0, suite="compare-burst", idle_ms=250)
    rows.append(only_gemm, tmp_path / "results")  # of a run in which nobody was right
    regenerate(document)
    text = document.read_text()
    assert text.count("each turn after 250 ms of rest") == text.count("| 222 |") == 1
    assert "333" not in text
    assert "111" not in text
    assert "`python -m benchmarks compare`" in text, "the other tables have no rows"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: nonsense -->\n<!-- end -->\n", r"page\.md: a block must be one of compare-summary.*nonsense"),
        ("<!-- generated: compare -->\n", r"page\.md: each .* needs a line of its own and an"),
    ],
)
def test_a_place_that_cannot_be_filled_is_an_error(document, text: str, message: str):
    document.write_text(text)
    with pytest.raises(ValueError, match=message):
        regenerate(document)
    assert document.read_text() == text


def test_every_committed_document_can_be_filled(tmp_path):
    with_places = set()
    for document in report.DOCUMENTS:
        copy = tmp_path / document.name
        copy.write_text(document.read_text(encoding="utf-8"), encoding="utf-8")
        report.regenerate([copy], tmp_path / "results", tmp_path)
        if "<!-- generated: " in copy.read_text(encoding="utf-8"):
            with_places.add(document.name)
    assert {"README.md", "results.md"} <= with_places


def test_a_complete_run_lacks_nothing(add_run, tmp_path):
    add_run(NEWEST)
    run = comparison.newest_run(comparison.frame(list(rows.read(tmp_path / "results/h200/compare.jsonl"))))
    assert comparison.missing(run) == []
    assert comparison.gemm_rate(run) == 800.0
    assert GEMM not in comparison.side_by_side(run)


def test_a_table_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="needs 2 cells"):
        Table("t", ["a", "b"]).add("only one")
