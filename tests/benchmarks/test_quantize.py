"""Quantisation as what is measured, on tensors small enough for a CPU and with a timer that only pretends."""

from functools import partial
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

import fa3
from benchmarks import quantize, report, rows
from benchmarks.__main__ import app
from benchmarks.correctness import QUANTIZATION_LIMIT
from benchmarks.quantize import WAYS
from benchmarks.timing import Budget
from fa3.fp8 import SCALES

NUM_BYTES = 3 * 64 * 64 * (2 + 1)  # of cpu_problem(64)


def is_quantize(call) -> bool:
    return isinstance(call, partial) and call.func is fa3.quantize


@pytest.fixture
def run(pretend_gpu, monkeypatch, fake_timer, cpu_problem, tmp_path):
    """Runs the command on one problem, a copy taking 1 ms and quantising 4; its status, its rows, what it printed."""

    def measure():
        timer = fake_timer(lambda call: 4.0 if is_quantize(call) else 1.0)
        monkeypatch.setattr(quantize, "DeviceTimer", lambda telemetry: timer)
        console = Console(file=StringIO(), width=200)
        status = quantize.measure([cpu_problem(64)], Budget(rounds=1), tmp_path, console)
        return status, list(rows.read(tmp_path / "h200" / "quantize.jsonl")), console.file.getvalue()

    return measure


def test_the_whole_command(run):
    status, kept, text = run()
    assert status == 0, text
    assert [quantize.way_of(row) for row in kept] == list(WAYS)
    assert len({row.run for row in kept}) == 1
    for row in kept:
        assert (row.version, row.dtype, row.head_dim, row.source_sha) == ("fa3", "bfloat16", 64, rows.source_sha("fa3"))
        assert row.gb_per_s == pytest.approx(NUM_BYTES / 4e-3 / 1e9)
        assert row.pct_of_copy == pytest.approx(25)
        assert 0 < row.rel_err < QUANTIZATION_LIMIT
        assert (row.sm_clock_mhz, row.power_w) == (1700.0, 600.0)
    assert "bfloat16 d=64 full 1 x 64 x 1: block, rotated 0  block 0  head, rotated 0" in text
    assert "25 %" in text


def test_a_wrong_way_gets_no_row(run, monkeypatch):
    right = fa3.quantize

    def wrong(*tensors, scales, hadamard):
        made = right(*tensors, scales=scales, hadamard=hadamard)
        return made._replace(descale_k=1.2 * made.descale_k) if scales == "head" else made

    monkeypatch.setattr(fa3, "quantize", wrong)
    status, kept, text = run()
    assert status == 1
    assert {row.scales for row in kept} == {"block", "tensor"}
    assert "wrong by more than 6.2e-02: bfloat16 d=64 full 1 x 64 x 1, head, rotated: 2.0e-01" in text


def test_the_report_has_the_newest_complete_run(run, tmp_path):
    _, [row, *_], _ = run()
    (tmp_path / "h200" / "quantize.jsonl").unlink()
    for name, ms in (("r1", 0.8), ("r2", 0.4)):
        for problem in quantize.problems_of():
            shape = {column: getattr(problem, column) for column in ("batch", "seqlen_q", "seqlen_k", "head_dim")}
            heads = {"heads_q": problem.heads_q, "heads_kv": problem.heads_kv}
            for scales, hadamard in WAYS:
                changed = {"run": name, "ms": ms, "scales": scales, "hadamard": hadamard, "gb_per_s": 3000.0}
                rows.append(rows.QuantizeRow(**vars(row) | shape | heads | changed), tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: quantize -->\n<!-- end -->\n")
    report.regenerate([page], tmp_path, tmp_path)
    text = page.read_text()
    assert "Quantising bfloat16, fa3. NVIDIA H200, torch 2.11.0; run r2" in text
    assert "| 128 | 1 x 16384 x 16 | block | yes | 400.0 | 3000 | 300 to 300 | 25 % |" in text
    assert "incomplete" not in text
    assert "†" not in text


def test_an_incomplete_run_and_one_of_other_code_say_so(run):
    _, kept, text = run()
    total = len(WAYS) * len(quantize.problems_of())
    assert f"it lacks {total} measurements of a full one" in text
    stale = [rows.QuantizeRow(**vars(row) | {"source_sha": "0" * 64}) for row in kept]
    assert quantize.table(stale).title == "Quantising bfloat16, fa3†"


def test_every_kind_of_scales_is_a_way():
    assert {scales for scales, _ in WAYS} == set(SCALES)


def test_without_a_gpu_it_shows_the_plan_and_the_errors(no_hopper):
    arguments = ["quantize", "--head-dim", "48", "--seqlen", "1024", "--dtype", "float16"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    [line] = [line.split() for line in result.output.splitlines() if "float16" in line]
    assert line[:8] == ["float16", "48", "16", "x", "1024", "x", "42", "297"]
    assert all(0 < float(x) < QUANTIZATION_LIMIT for x in line[8:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--dtype", "float32"], "choose from bfloat16, float16"), (["--head-dim", "24"], "multiples of 16")],
)
def test_wrong_options_are_refused(no_hopper, arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["quantize", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
