import hashlib
import json
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.rows import ROOT, TestsRow
from fa import GENERATIONS

# What a row's JSON must hold, word for word: other programs read it.
COLUMNS = """
    run suite version config switches_label pass dtype batch seqlen_q seqlen_k heads_q heads_kv head_dim causal window
    ms ms_p20 ms_p80 tflops pct_of_gemm rel_err gpu sm_clock_mhz power_w torch dsl driver time source_sha
"""


def test_a_row_comes_back_as_it_was_written(make_row, tmp_path: Path):
    row = make_row(config={"tile_m": 128, "pingpong": True}, window=[128, None], causal=True)
    rows.append(row, tmp_path)
    assert list(rows.read(tmp_path / "h200" / "compare.jsonl")) == [row]


def test_a_row_has_exactly_the_agreed_columns(make_row, tmp_path: Path):
    rows.append(make_row(), tmp_path)
    record = json.loads((tmp_path / "h200" / "compare.jsonl").read_text())
    assert list(record) == COLUMNS.split()
    assert record["pass"] == "fwd"


def test_a_host_row_says_what_was_called(make_row, tmp_path: Path):
    row = make_row(suite="host", pass_="host", call="forward")
    rows.append(row, tmp_path)
    assert json.loads((tmp_path / "h200" / "host.jsonl").read_text())["call"] == "forward"
    assert list(rows.read(tmp_path / "h200" / "host.jsonl")) == [row]


def test_a_row_has_further_columns_only_where_they_say_something(make_row, tmp_path: Path):
    row = make_row(suite="shapes", lengths=[64, 1], softcap=50.0)
    rows.append(row, tmp_path)
    record = json.loads((tmp_path / "h200" / "shapes.jsonl").read_text())
    assert set(record) == {*COLUMNS.split(), "lengths", "softcap"}
    assert list(rows.read(tmp_path / "h200" / "shapes.jsonl")) == [row]


def test_a_tests_row_comes_back_as_it_was_written(tmp_path: Path):
    sha = dict.fromkeys(GENERATIONS, "0" * 64)
    row = TestsRow(run="r", time="t", source_sha=sha, passed=3, failed=0, skipped=1, seconds=1.5, gpu="NVIDIA H200")
    rows.append(row, tmp_path)
    assert list(rows.read(tmp_path / "h200" / "tests.jsonl")) == [row]


def test_rows_are_appended_in_order(make_row, tmp_path: Path):
    for ms in (3.0, 1.0, 2.0):
        rows.append(make_row(ms=ms), tmp_path)
    assert [row.ms for row in rows.read(tmp_path / "h200" / "compare.jsonl")] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_measurement(make_row, tmp_path: Path, value: float):
    with pytest.raises(ValueError, match="JSON"):
        rows.append(make_row(ms=value), tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("line", ['{"run": ', '{"run": "r"}', '{"unknown": 1}', "[]"])
def test_a_line_that_is_no_row_is_named(make_row, tmp_path: Path, line: str):
    rows.append(make_row(), tmp_path)
    path = tmp_path / "h200" / "compare.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"compare\.jsonl:2: needs one JSON object"):
        list(rows.read(path))


def test_no_file_is_no_rows(tmp_path: Path):
    assert list(rows.read(tmp_path / "compare.jsonl")) == []


@pytest.mark.parametrize(("gpu", "directory"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3")])
def test_each_gpu_has_a_directory(gpu: str, directory: str):
    assert rows.path_of("compare", gpu, Path("results")) == Path("results", directory, "compare.jsonl")


def test_later_runs_sort_after_earlier_ones(monkeypatch: pytest.MonkeyPatch):
    assert rows.new_run()[:16] <= rows.new_run()[:16]
    assert rows.new_run() != rows.new_run()


def sha_by_definition(version: str, root: Path) -> str:
    """The definition once more, built up as one string."""
    fed = ""
    files = {path.relative_to(root).as_posix(): path for path in root.glob("**/*.py")}
    for name in sorted(name for name in files if name.startswith((f"{version}/", "fa_common/"))):
        kept = []
        for line in files[name].read_bytes().decode().split("\n"):
            text = line.rstrip()
            if text.strip() and text.strip()[0] != "#":
                kept.append(text)
        fed += name + "\n" + "\n".join(kept)
    return hashlib.sha256(fed.encode()).hexdigest()


@pytest.mark.parametrize("version", GENERATIONS)
def test_source_sha_is_what_it_is_defined_to_be(version: str):
    assert rows.source_sha(version) == sha_by_definition(version, ROOT)


def test_source_sha_changes_with_the_code_and_with_nothing_else(tmp_path: Path):
    for name in ("fa9/a.py", "fa9/inner/b.py", "fa_common/c.py", "fa8/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    before = rows.source_sha("fa9", tmp_path)
    assert before == sha_by_definition("fa9", tmp_path)

    (tmp_path / "fa9/a.py").write_text("# a comment\n\n  # another\nx = 1   \n\n")
    (tmp_path / "fa9/notes.txt").write_text("not code")
    (tmp_path / "fa8/d.py").write_text("x = 2\n")
    assert rows.source_sha("fa9", tmp_path) == before

    for name in ("fa9/a.py", "fa9/inner/b.py", "fa_common/c.py"):
        (tmp_path / name).write_text("x = 2  # a comment\n")
        after = rows.source_sha("fa9", tmp_path)
        assert after != before
        before = after
