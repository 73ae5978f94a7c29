"""The error lab, on tensors small enough for a CPU."""

from io import StringIO
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fa3
from benchmarks import accuracy, report, rows
from benchmarks.__main__ import app
from benchmarks.accuracy import FP8, INPUTS, METHODS, STANDARD, Method, Size
from benchmarks.rows import AccuracyRow
from fa3.config import check_fp8_config
from fa3.fp8 import SCALES
from fa_common.reference import attention

SMALL = Size(seqlen=96, heads=2, row=640)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[list[AccuracyRow], str]:
    """The rows of a small run without a GPU, and what it printed."""
    directory, console = tmp_path_factory.mktemp("accuracy"), Console(file=StringIO(), width=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.machine.why_no_hopper", lambda: "torch sees no CUDA device")
        status = accuracy.measure([16, 48], directory, directory / "picture.svg", console, **SMALL._asdict())
    assert status == 0, console.file.getvalue()
    assert ElementTree.parse(directory / "picture.svg").getroot().tag.endswith("svg")
    return list(rows.read(directory / "cpu" / "accuracy.jsonl")), console.file.getvalue()


def rmse(run, inputs, method, head_dim=16):
    [row] = [r for r in run if (r.inputs, r.head_dim, accuracy.method_of(r)) == (inputs, head_dim, method)]
    return row.rmse


def test_every_method_has_a_row_for_every_input(measured):
    run, text = measured
    assert [(row.inputs, row.head_dim, accuracy.method_of(row)) for row in run] == [
        (inputs, head_dim, method) for inputs in INPUTS for head_dim in (16, 48) for method in METHODS
    ]
    assert len({row.run for row in run}) == 1
    assert {row.gpu for row in run} == {"CPU"}
    assert {(row.seqlen_q, row.seqlen_k) for row in run} == {(96, 96), (16, 640)}
    assert all((row.source_sha is None) == (row.version == STANDARD) for row in run)
    assert "Errors against fp64, of the algorithms" in text
    assert f"{len(run)} rows of run {run[0].run} in" in text


def test_more_digits_are_nearer(measured):
    run, _ = measured
    for inputs in INPUTS:
        for version in (STANDARD, "fa3"):
            half, brain = (rmse(run, inputs, Method(dtype, version)) for dtype in ("float16", "bfloat16"))
            assert half < brain
    assert rmse(run, "normal", Method("bfloat16", "fa3")) < rmse(
        run, "normal", Method(FP8, "fa3", "block", True, False)
    )
    assert rmse(run, "normal", Method("float16", "fa3")) < rmse(run, "normal", Method("float16", STANDARD))


def test_the_methods():
    assert len(METHODS) == len(set(METHODS)) == 2 * 4 + 3 * 2 + 3 * 2 * 2
    assert {method.scales for method in METHODS} == {None, *SCALES}
    assert Method(FP8, "fa3", "block", True, False).label == "fa3 fp8 block, rotated"
    assert Method(FP8, "fa3", "block", False, True).label == "fa3 fp8 block, two levels"
    assert Method("float16", "fa2").label == "fa2 float16"
    assert set(accuracy.PAPER) <= set(METHODS)


def test_two_levels_are_left_out_where_they_would_spill():
    one, two = (Method(FP8, "fa3", "head", False, levels) for levels in (False, True))
    assert [(one.runs(d), two.runs(d)) for d in (128, 144)] == [(True, True), (True, False)]
    assert not any(d > accuracy.WIDEST_OF_TWO for d in accuracy.HEAD_DIMS), "a complete run has both everywhere"


def test_the_kernel_can_have_the_tile_of_two_levels():
    products = pytest.importorskip("fa3.products")
    assert accuracy.WIDEST_OF_TWO == products.WIDEST_OF_TWO
    check_fp8_config(accuracy.TWO_LEVELS)


def test_a_long_row_drifts_in_one_level_and_not_in_two(measured):
    run, _ = measured
    for scales in SCALES:
        one, two = (rmse(run, "positive", Method(FP8, "fa3", scales, True, levels), 48) for levels in (False, True))
        assert one > 2 * two
        one, two = (rmse(run, "normal", Method(FP8, "fa3", scales, True, levels), 48) for levels in (False, True))
        assert one < 1.1 * two, "short rows of any sign lose little"


@pytest.mark.parametrize("inputs", INPUTS)
def test_inputs_are_the_same_each_time(inputs):
    first, again = (accuracy.tensors(inputs, SMALL, 16, "cpu") for _ in range(2))
    assert all(torch.equal(x, y) and x.dtype == torch.float32 for x, y in zip(first, again, strict=True))


def test_the_outliers_are_one_in_a_thousand():
    q, k, v = accuracy.tensors("outliers", Size(4096, 4, 1), 64, "cpu")
    for x in (q, k, v):
        assert x.abs().max() > 20
        assert x.var().item() == pytest.approx(1 + 100 * 0.001, rel=0.05)
        assert (x.abs() > 6).double().mean().item() == pytest.approx(0.001 * 0.55, rel=0.2)


def test_the_long_row_has_no_sign():
    q, k, v = accuracy.tensors("positive", SMALL, 16, "cpu")
    assert (q.shape[1], k.shape[1]) == (16, 640)
    assert (v >= 0).all()
    assert (k < 0).any()


def test_standard_attention_is_attention():
    q, k, v = torch.randn(3, 2, 50, 3, 16)
    torch.testing.assert_close(accuracy.standard(q, k, v).double(), attention(q, k, v)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scales", SCALES)
def test_dequantized_numbers_are_those_quantized(scales):
    q, k, v = torch.randn(2, 150, 4, 16), *torch.randn(2, 2, 150, 2, 16)
    quantized = fa3.quantize(q, k, v, scales=scales, hadamard=False)
    for x, number in zip((q, k, v), accuracy.dequantized(quantized), strict=True):
        torch.testing.assert_close(number, x, rtol=2**-4, atol=1e-4)


def test_errors():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert accuracy.errors(torch.tensor([3.0, 4.0]), exact) == {"rmse": 0, "max_err": 0, "cosine": 1}
    found = accuracy.errors(torch.tensor([4.0, -3.0]), exact)
    assert found == pytest.approx({"rmse": 5.0, "max_err": 7.0, "cosine": 0.0})


def test_a_wrong_method_is_named(monkeypatch, no_hopper, tmp_path):
    monkeypatch.setattr(accuracy, "METHODS", (Method("float16", STANDARD),))
    monkeypatch.setattr(accuracy, "standard", lambda q, k, v: torch.randn(q.shape))
    console = Console(file=StringIO(), width=200)
    assert accuracy.measure([16], tmp_path, tmp_path / "p.svg", console, **SMALL._asdict()) == 1
    assert "standard float16 is wrong on normal, d=16: cosine" in console.file.getvalue()


def test_a_method_that_breaks_costs_only_its_own_rows(monkeypatch, no_hopper, tmp_path):
    def broken(*tensors, **options):
        raise ValueError("no such tile")

    monkeypatch.setattr(fa3, "flash_attn_func", broken)
    console = Console(file=StringIO(), width=200)
    sizes, choice = SMALL._asdict(), {"dtypes": [FP8], "kinds": ["normal"]}
    assert accuracy.measure([16], tmp_path, tmp_path / "p.svg", console, **choice, **sizes) == 1
    assert {row.version for row in rows.read(tmp_path / "cpu" / "accuracy.jsonl")} == {STANDARD}
    assert "fa3 fp8 block, rotated fails on normal, d=16: ValueError: no such tile" in console.file.getvalue()


def test_every_kernel_is_known_beforehand():
    pytest.importorskip("cutlass")
    size = accuracy.SIZES["cuda"]
    found = {
        method: [key for key, _ in accuracy.kernels(method, "normal", size, 128)]
        for method in METHODS
        if method.runs(128)
    }
    assert found[Method("float16", STANDARD)] == []
    [key] = found[Method("bfloat16", "fa2")]
    assert (key.version, key.dtype, key.head_dim) == ("fa2", "bfloat16", 128)
    quantizing, forward = found[Method(FP8, "fa3", "block", True, True)]
    assert (quantizing.direction, quantizing.dtype, quantizing.config.hadamard) == ("quantize", "float32", True)
    assert (forward.dtype, forward.config) == ("float8_e4m3fn-float16", accuracy.TWO_LEVELS)
    assert [key.config.stage for key in found[Method(FP8, STANDARD, "head", False)]] == ["maximum", "scale"]


# ---- The report


def test_the_report_has_the_errors_and_the_picture(measured, tmp_path):
    run, _ = measured
    for row in run:
        rows.append(row, tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: accuracy -->\n<!-- end -->\n")
    report.regenerate([page], tmp_path / "results", tmp_path)
    text = page.read_text()
    assert f"of the algorithms. CPU, torch {run[0].torch}; run {run[0].run}" in text
    assert "![root mean square errors](accuracy-cpu.svg)" in text
    for sums in ("one", "two"):
        assert f"| outliers | 16 | 96 x 96 x 2 | float8_e4m3fn | fa3 | block | yes | {sums} |" in text
    assert "| outliers | 16 | 96 x 96 x 2 | float8_e4m3fn | standard | block | yes | - |" in text
    assert "an emulation of tensor cores that keep 13 bits" in text
    assert "| 9.1e-03 |" in text
    assert "An incomplete run" in text
    assert (tmp_path / "accuracy-cpu.svg").exists()
    assert report.regenerate([page], tmp_path / "results", tmp_path) == []


def test_rows_of_other_code_are_marked(measured):
    run, _ = measured
    other = [AccuracyRow(**vars(row) | {"source_sha": row.source_sha and "0" * 64}) for row in run]
    assert "†" not in accuracy.table(run).to_markdown()
    assert "| fa3† | block |" in accuracy.table(other).to_markdown()
    assert "standard†" not in accuracy.table(other).to_markdown()


def test_kernels_are_not_said_to_be_emulated(measured):
    run, _ = measured
    of_gpu = [AccuracyRow(**vars(row) | {"gpu": "NVIDIA H200"}) for row in run]
    assert "an emulation" not in accuracy.table(of_gpu).to_markdown()


def test_rows_from_before_the_two_kinds_of_sums_are_still_read(measured, tmp_path):
    run, _ = measured
    old = [AccuracyRow(**vars(row) | {"two_level": None}) for row in run if not row.two_level]
    rows.append(old[-1], tmp_path)
    path = tmp_path / "cpu" / "accuracy.jsonl"
    path.write_text(path.read_text().replace(', "two_level": null', ""))
    assert list(rows.read(path)) == [old[-1]]
    assert "| yes | - |" in accuracy.table(old).to_markdown()


def test_the_run_that_lacks_least_is_shown(measured, tmp_path):
    run, _ = measured
    complete = [
        AccuracyRow(**vars(row) | {"head_dim": {16: 64, 48: 128}[row.head_dim], "run": "20260101"}) for row in run
    ]
    for row in (*complete, *(AccuracyRow(**vars(row) | {"run": "20260201"}) for row in run)):
        rows.append(row, tmp_path)
    newest = accuracy.newest_run(tmp_path / "cpu")
    assert {row.run for row in newest} == {"20260101"}
    assert not accuracy.missing(newest)
    assert accuracy.newest_run(tmp_path / "h200") is None


# ---- The command


def test_the_command(monkeypatch, no_hopper, tmp_path):
    monkeypatch.setattr(accuracy, "METHODS", (Method("float16", "fa3"), Method(FP8, "fa3", "head", True, True)))
    sizes = ["--seqlen", "64", "--heads", "1", "--row", "128", "--head-dim", "16"]
    result = CliRunner().invoke(
        app,
        ["accuracy", *sizes, "--results", str(tmp_path), "--picture", str(tmp_path / "p.svg")],
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    assert len(list(rows.read(tmp_path / "cpu" / "accuracy.jsonl"))) == 3 * 2
    narrow = ["--dtype", FP8, "--inputs", "positive"]
    arguments = [
        "accuracy",
        *sizes,
        *narrow,
        "--results",
        str(tmp_path / "narrow"),
        "--picture",
        str(tmp_path / "p.svg"),
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    [row] = rows.read(tmp_path / "narrow" / "cpu" / "accuracy.jsonl")
    assert (row.dtype, row.inputs) == (FP8, "positive")
    assert "64 x 64 x 1" in result.output


def test_a_head_dim_that_fp8_has_not_is_refused(no_hopper):
    result = CliRunner().invoke(app, ["accuracy", "--head-dim", "64,72"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "72: head_dims of FP8 are multiples of 16 up to 256" in " ".join(result.output.replace("│", " ").split())
