"""Bursts and loops, with a timer that only pretends."""

from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.without_gpu
from benchmarks import report, rows, sustained
from benchmarks.__main__ import app
from benchmarks.peers import GEMM
from benchmarks.timing import Budget


@pytest.mark.usefixtures("pretend_gpu")
def test_the_whole_command(cpu_problem, tmp_path):
    output = Console(file=StringIO(), width=200)
    status = sustained.measure(cpu_problem(), ["fa2", "fa3"], 10.0, Budget(rounds=1), tmp_path, output)
    assert status == 0, output.file.getvalue()
    kept = list(rows.read(tmp_path / "h200" / "sustained.jsonl"))
    everyone = [GEMM, "fa2", "fa3"]
    assert [(row.version, row.call) for row in kept] == [
        *((version, "burst") for version in everyone),
        *((version, "sustained") for version in everyone),
    ]
    for burst, loop in zip(kept[:3], kept[3:], strict=True):
        assert loop.ms == 2 * burst.ms
        assert (loop.seconds, loop.sm_clock_mhz, loop.power_w) == (10.0, 1500.0, 690.0)
        assert burst.seconds is None
    assert kept[-1].pct_of_gemm == pytest.approx(100 * kept[-1].tflops / kept[3].tflops)
    text = " ".join(output.file.getvalue().split())
    assert "a burst and 10 s without a pause" in text
    assert "fa3 0 0 50% 1500 690 0 to 0" in text


def test_a_wrong_version_does_not_loop(pretend_gpu, cpu_problem, tmp_path):
    problem = cpu_problem()
    pretend_gpu["fa3", problem] = "no answer within 30 s"
    output = Console(file=StringIO(), width=200)
    assert sustained.measure(problem, ["fa3"], 10.0, Budget(rounds=1), tmp_path, output) == 1
    assert {row.version for row in rows.read(tmp_path / "h200" / "sustained.jsonl")} == {GEMM}
    assert "fa3 is missing in every problem: no answer within 30 s" in output.file.getvalue()


def test_the_report_has_burst_and_loop(make_row, gemm_row, tmp_path):
    for version in ("fa3", "cudnn", "flash-attn-4"):
        for call, tflops in (("burst", 700.0), ("sustained", 630.0)):
            row = make_row(version, suite="sustained", call=call, tflops=tflops, seconds=10.0)
            rows.append(row, tmp_path / "results")
    rows.append(rows.Row(**vars(gemm_row) | {"suite": "sustained", "call": "burst"}), tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: sustained -->\n<!-- end -->\n")
    report.regenerate([page], tmp_path / "results", tmp_path)
    text = page.read_text()
    assert "| fa3 | 700 | 630 | 90% | 1700 | 600 | 573 to 700 |" in text
    assert "| cublas-gemm | 800 | - | - | - | - | - |" in text
    assert "incomplete" not in text


def test_without_a_gpu_it_shows_the_kernel(no_hopper, monkeypatch, clean_report):
    def reports(ours, kinds, console):
        return {(problem, one.name): clean_report for problem in kinds for one in ours}

    monkeypatch.setattr(benchmarks.without_gpu, "kernel_reports", reports)
    result = CliRunner().invoke(app, ["sustained", "--causal"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "No speed is measured here: torch sees no CUDA device" in text
    assert "bfloat16 128 causal fa3 168 164 0" in text


def test_one_problem_is_needed(no_hopper):
    result = CliRunner().invoke(app, ["sustained", "--mask", "full,causal"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "one mask and one dtype are needed" in result.output
