"""The shapes beyond the grid: what they are, who their partners are, and the command from end to end."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.without_gpu
from benchmarks import comparison, report, rows, shapes
from benchmarks.__main__ import app
from benchmarks.peers import GEMM
from benchmarks.problems import kind, packed
from benchmarks.timing import Budget

RUN = "20260301T000000Z-cccccc"


def test_the_default_shapes():
    found = {(p.dtype_name, kind(p)) for p in shapes.shapes()}
    assert found == {
        ("float16", "full"),
        ("float16", "causal"),
        ("bfloat16", "full, softcap 50"),
        ("bfloat16", "causal, softcap 50"),
        ("bfloat16", "full, GQA 32/8"),
        ("bfloat16", "causal, GQA 32/8"),
        ("bfloat16", "window (1024, 0)"),
        ("bfloat16", "full, varlen"),
        ("bfloat16", "causal, varlen"),
    }


def test_the_kinds_come_one_after_another():
    def kind_of(shape) -> str:
        if shape.varlen:
            return "varlen"
        if shape.window != (None, None):
            return "window"
        return "gqa" if shape.group > 1 else "softcap" if shape.softcap else "fp16"

    found = list(dict.fromkeys(map(kind_of, shapes.shapes())))
    assert found == list(shapes.KINDS)
    assert found[:3] == ["gqa", "fp16", "varlen"]
    [_, first, *_], *_ = shapes.groups(shapes.shapes())
    assert kind_of(first) == "gqa"
    assert {kind_of(shape) for shape in shapes.shapes(kinds=["softcap", "varlen"])} == {"softcap", "varlen"}


def test_lengths_are_the_same_each_time_and_add_up():
    lengths = shapes.lengths()
    assert lengths == shapes.lengths()
    assert sum(lengths) == shapes.PACKED_TOKENS
    assert 1 <= min(lengths) < max(lengths) <= shapes.LONGEST


@pytest.mark.parametrize("shape", shapes.shapes(head_dims=[64, 128]), ids=kind)
def test_a_partner_is_plain_and_does_as_much(shape):
    plain = shapes.partner(shape)
    assert shapes.partner(plain) == plain
    assert (plain.dtype, kind(plain)) == (torch.bfloat16, "causal" if shape.causal else "full")
    assert plain.flops("fwd") == pytest.approx(shape.flops("fwd"), rel=0.01)
    assert plain.total_q == pytest.approx(shape.total_q, rel=0.1)


def test_a_group_is_a_partner_and_its_shapes():
    groups = shapes.groups(shapes.shapes())
    assert all(shapes.partner(shape) == plain for plain, *others in groups for shape in others)
    assert sum(len(others) for _, *others in groups) == len(shapes.shapes())
    assert len({plain for plain, *_ in groups}) == len(groups)


@pytest.fixture
def small(cpu_problem):
    """One shape of each kind, small enough for a CPU."""
    plain = cpu_problem(64, causal=True)
    gqa = replace(plain, heads_q=4, heads_kv=2)
    varied = {"dtype": torch.float16}, {"softcap": 50.0}, {"window": (8, None)}, packed([3, 40, 21])
    return [*(replace(plain, **fields) for fields in varied), gqa]


@pytest.mark.usefixtures("pretend_gpu")
def test_the_whole_command(small, tmp_path):
    output = Console(file=StringIO(), width=200)
    status = shapes.measure(small, ["fa3", "torch-fa2"], Budget(rounds=1), tmp_path, output)
    text = output.file.getvalue()
    assert status == 0, text
    kept = list(rows.read(tmp_path / "h200" / "shapes.jsonl"))
    assert len({row.run for row in kept}) == 1
    assert [row.version for row in kept].count(GEMM) == 4, "one a group"
    assert len([row for row in kept if row.version == "fa3"]) == len(small) + 4
    [varlen] = [row for row in kept if row.lengths]
    assert (varlen.lengths, varlen.batch, varlen.seqlen_q) == ([3, 40, 21], 3, 40)
    assert varlen.tflops == pytest.approx(4 * 64 * (3**2 + 40**2 + 21**2) / 2 / 1e9)  # in 1 ms
    for shown in ("window (8, 0)", "causal, varlen", "GQA 4/2", "softcap 50", "float16", "3 x up to 40 x 1"):
        assert shown in text
    assert "torch-fa2 is missing in" in text
    assert "Varlen: sequences of 3, 40, 21 tokens." in text


@pytest.fixture
def document(tmp_path, make_row, gemm_row):
    """A page, and a complete run whose shapes reach nine tenths of their partners' rates."""
    for row in (gemm_row, *(make_row(problem=p) for group in shapes.groups(shapes.shapes()) for p in group)):
        rate = row.tflops if row.version == GEMM or not is_shape(row) else 0.9 * row.tflops
        changed = vars(row) | {"run": RUN, "suite": "shapes", "tflops": rate}
        rows.append(rows.Row(**changed), tmp_path / "results")
    path = tmp_path / "page.md"
    path.write_text("<!-- generated: shapes -->\n<!-- end -->\n")
    return path


def is_shape(row) -> bool:
    problem = shapes.problem_of(row)
    return shapes.partner(problem) != problem


def test_the_report_has_the_ratios(document, tmp_path):
    report.regenerate([document], tmp_path / "results", tmp_path)
    text = document.read_text()
    line = "| fa3 | bfloat16 | 128 | window (1024, 0) | 1 x 16384 x 16 | 540 | 491 to 600 | causal 8 x 2017 x 16 |"
    assert f"{line} 600 | 0.90 |" in text
    assert text.count(" 0.90 |") == len(shapes.shapes())
    assert "incomplete" not in text


def test_without_its_partner_a_shape_has_no_ratio(document, tmp_path):
    measured = comparison.frame(list(rows.read(tmp_path / "results" / "h200" / "shapes.jsonl")))
    table = shapes.table(measured[measured.dtype == "float16"])
    assert {row[-2:] for row in table.rows} == {("-", "-")}
    assert shapes.missing(measured) == []
    assert shapes.missing(measured[measured.dtype == "float16"])


def test_without_a_gpu_it_shows_the_plan_the_errors_and_the_kernels(no_hopper, monkeypatch, clean_report):
    def reports(ours, kinds, console):
        return {(problem, one.name): clean_report for problem in kinds for one in ours}

    monkeypatch.setattr(benchmarks.without_gpu, "kernel_reports", reports)
    arguments = ["shapes", "--mask", "causal", "--seqlen", "16384"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "No speed is measured here: torch sees no CUDA device" in text
    assert "bfloat16 128 window (1024, 0) 1 x 16384 x 16 133 causal 8 x 2017 x 16 133" in text
    assert text.count("e-03") + text.count("e-04") == 5, "an error each"
    assert "bfloat16 128 causal, varlen fa3 168 164 0" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "gqa,alibi"], "alibi: choose from gqa, fp16, varlen, window, softcap"),
        (["--kind", "window", "--mask", "full"], "nothing to measure: a window needs mask causal and seqlen 16384"),
    ],
)
def test_wrong_options_are_refused(no_hopper, arguments, message):
    result = CliRunner().invoke(app, ["shapes", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
