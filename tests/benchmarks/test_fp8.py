"""FP8 beside bf16, on tensors that a CPU attends to at once and with a timer that only pretends."""

from dataclasses import replace
from io import StringIO

import pandas as pd
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.compare
import benchmarks.without_gpu
import fa3
from benchmarks import comparison, fp8, report, rows
from benchmarks.__main__ import app
from benchmarks.correctness import QUANTIZED_LIMIT, QUANTIZED_OUT_LIMIT, QUANTIZING_LIMIT, limit
from benchmarks.fp8 import NAMES, QUANTIZED, WITH_QUANTIZATION, OnQuantized
from benchmarks.peers import FP8_PEERS, GEMM, PEERS, CudnnFp8
from benchmarks.problems import grid
from benchmarks.timing import Budget
from fa3.config import default_fp8_config
from fa_common.problem import Problem
from fa_common.switches import label

RATES = {None: 700.0, QUANTIZED: 1050.0, WITH_QUANTIZATION: 840.0}
PEER = "cudnn-fp8"


def console() -> Console:
    return Console(file=StringIO(), width=200)


def measure(problems, versions, tmp_path, peers=()) -> tuple[int, list[rows.Row], str]:
    """The command's status, its rows and what it printed."""
    output = console()
    status = fp8.measure(problems, versions, Budget(rounds=1), tmp_path, output, peers)
    return status, list(rows.read(tmp_path / "h200" / "fp8.jsonl")), output.file.getvalue()


@pytest.mark.usefixtures("pretend_gpu")
def test_the_whole_command(cpu_problem, tmp_path):
    status, kept, text = measure([cpu_problem(64), cpu_problem(128, causal=True)], ["fa1", "fa3"], tmp_path)
    assert status == 0, text
    assert [row.version for row in kept] == 2 * [GEMM, "fa3", "fa3", "fa3"]
    assert len({row.run for row in kept}) == 1
    ours = [row for row in kept if row.version != GEMM]
    assert [row.call for row in ours] == 2 * list(NAMES)
    assert [row.dtype for row in ours] == 2 * ["bfloat16", "float8_e4m3fn", "float8_e4m3fn"]
    limits = {None: limit(torch.bfloat16), QUANTIZED: QUANTIZED_LIMIT, WITH_QUANTIZATION: QUANTIZING_LIMIT}
    assert all(0 < row.rel_err < limits[row.call] for row in ours)
    assert ours[0].tflops == ours[1].tflops == ours[2].tflops == pytest.approx(4 * 64 * 64**2 / 1e9)  # in 1 ms
    assert ours[4].tflops == pytest.approx(4 * 64 * 128**2 / 2 / 1e9), "half of it is masked"
    problem = cpu_problem(64)
    config = default_fp8_config(problem, v_by_columns=True)
    assert ours[1].switches_label == label(config)
    assert ours[1].config["tile_n"] == config.tile_n
    assert {row.source_sha for row in ours} == {rows.source_sha("fa3")}
    assert "bfloat16 d=64 full 1 x 64 x 1: cublas-gemm 0  bf16 0  fp8 0  with quantization 0 TFLOP/s" in text
    assert "fa1 fp8 is missing in every problem: it takes float16 or bfloat16, not float8_e4m3fn" in text
    assert "fp8 / bf16" in text


@pytest.mark.usefixtures("pretend_gpu")
def test_bursts_are_kept_by_themselves(cpu_problem, tmp_path):
    output = console()
    fp8.measure([cpu_problem(64)], ["fa3"], Budget(rounds=1, idle_ms=250), tmp_path, output)
    assert not (tmp_path / "h200" / "fp8.jsonl").exists()
    kept = list(rows.read(tmp_path / "h200" / "fp8-burst.jsonl"))
    assert [(row.version, row.idle_ms) for row in kept] == [(GEMM, 250), *[("fa3", 250)] * 3]
    assert "Forward in FP8, fa3, TFLOP/s, each turn after 250 ms of rest" in output.file.getvalue()


@pytest.mark.usefixtures("pretend_gpu")
def test_tensors_are_quantized_before_the_timed_call(cpu_problem, monkeypatch):
    problem = cpu_problem(64)
    [_, on_quantized, quantizing] = fp8.contenders(["fa3"])
    tensors = fp8.random_tensors(problem)
    calls = [one.prepare(problem, *tensors) for one in (on_quantized, quantizing)]
    expected = [call() for call in calls]
    assert torch.equal(*expected), "the same quantisation of the same tensors"

    def refuse(*arguments, **options):
        raise AssertionError("quantised")

    monkeypatch.setattr(fa3, "quantize", refuse)
    monkeypatch.setattr("fa3.fp8.quantize", refuse)
    assert torch.equal(calls[0](), expected[0])
    with pytest.raises(AssertionError, match="quantised"):
        calls[1]()


@pytest.mark.usefixtures("pretend_gpu")
def test_a_wrong_scale_gets_no_row(cpu_problem, monkeypatch, tmp_path):
    def wrong(one, problem, q, k, v):
        made = fa3.quantize(q, k, v)
        return lambda: fa3.flash_attn_func(**made._replace(descale_v=1.1 * made.descale_v)._asdict())

    monkeypatch.setattr(OnQuantized, "prepare", wrong)
    status, kept, text = measure([cpu_problem(64)], ["fa3"], tmp_path)
    assert status == 1
    assert [row.call for row in kept if row.version != GEMM] == [None, WITH_QUANTIZATION]
    assert "fa3 fp8 is missing in every problem: wrong: relative error" in text


@pytest.mark.usefixtures("pretend_gpu", "fake_cudnn")
def test_a_peer_takes_its_turn(cpu_problem, tmp_path):
    status, kept, text = measure([cpu_problem(64), cpu_problem(128, causal=True)], ["fa3"], tmp_path, [PEER])
    assert status == 0, text
    assert [row.version for row in kept] == 2 * [GEMM, "fa3", "fa3", "fa3", PEER]
    for row in kept[4::5]:
        assert (row.dtype, row.call, row.config, row.source_sha) == (fp8.DTYPE, QUANTIZED, None, None)
        assert 0 < row.rel_err < QUANTIZED_OUT_LIMIT
    assert kept[9].tflops == kept[7].tflops, "as many FLOPs as fa3's"
    assert "fp8 0  with quantization 0  cudnn-fp8 0 TFLOP/s" in text
    assert "fp8 / best peer" in text
    assert "cudnn-fp8: a scale for each tensor" in text


@pytest.mark.usefixtures("pretend_gpu")
def test_a_peer_that_is_missing_is_left_out_with_the_reason(cpu_problem, monkeypatch, tmp_path):
    monkeypatch.setitem(FP8_PEERS, PEER, CudnnFp8(PEER, "cudnn_that_nobody_has"))
    status, kept, text = measure([cpu_problem(64)], ["fa3"], tmp_path, [PEER])
    assert status == 0
    assert [row.version for row in kept] == [GEMM, "fa3", "fa3", "fa3"]
    assert "cudnn-fp8 is missing in every problem: `import cudnn_that_nobody_has` fails" in text
    assert "best peer" not in text


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("build", "RuntimeError: no kernel for this head_dim"),
        ("execute", "RuntimeError: no kernel for this head_dim"),
        ("nothing", "wrong: relative error nan"),
    ],
)
def test_a_peer_that_fails_costs_the_others_nothing(
    cpu_problem, fake_cudnn, monkeypatch, tmp_path, broken: str, reason: str
):
    def fail(*arguments, **options):
        raise RuntimeError("no kernel for this head_dim")

    make = fake_cudnn.pygraph

    def make_broken(**context):
        graph = make(**context)
        if broken == "nothing":
            graph.execute = lambda *arguments, **options: None
        else:
            setattr(graph, broken, fail)
        return graph

    monkeypatch.setattr(fake_cudnn, "pygraph", make_broken)
    status, kept, text = measure([cpu_problem(64)], ["fa3"], tmp_path, [PEER])
    assert status == 0, "none of ours failed"
    assert [row.version for row in kept] == [GEMM, "fa3", "fa3", "fa3"]
    assert f"cudnn-fp8 is missing in every problem: {reason}" in text


def test_which_kernel_runs():
    problem = Problem(1, 4096, 4096, 8, 8, 128, causal=True)
    bf16, on_quantized, quantizing = fp8.contenders(["fa3"])
    assert bf16.kernel(problem)[0].dtype == "bfloat16"
    for one in (on_quantized, quantizing):
        key, _ = one.kernel(problem)
        assert (key.dtype, key.causal, key.config) == ("float8_e4m3fn-bfloat16", True, default_fp8_config(problem))
        assert one.why_not(problem) is None
        assert type(one)("fa3", switched={"stages": 3}).config(problem).stages == 3
    assert "head_dim" in on_quantized.why_not(replace(problem, head_dim=72))
    assert len({one.name for one in (bf16, on_quantized, quantizing)}) == 3


@pytest.fixture
def complete(make_row, gemm_row, tmp_path):
    """A run of all the default problems, in tmp_path/results."""
    rows.append(replace(gemm_row, suite="fp8"), tmp_path / "results")
    for problem in grid():
        for way, rate in RATES.items():
            dtype = problem.dtype_name if way is None else fp8.DTYPE
            row = make_row(problem=problem, suite="fp8", call=way, dtype=dtype, tflops=rate)
            rows.append(row, tmp_path / "results")
    return tmp_path


def frame(complete) -> pd.DataFrame:
    return comparison.frame(list(rows.read(complete / "results" / "h200" / "fp8.jsonl")))


def test_the_report_has_rates_and_ratios(complete):
    page = complete / "page.md"
    page.write_text("<!-- generated: fp8 -->\n<!-- end -->\n")
    report.regenerate([page], complete / "results", complete)
    text = page.read_text()
    assert "Forward in FP8, fa3, TFLOP/s. NVIDIA H200" in text
    assert "| fp8 / bf16 | fp8 / with quantization | with quantization / bf16 |" in text
    assert "| 128 | causal | 16384 | 700 | 1050 | 840 | 1.50 | 1.25 | 1.20 |" in text
    assert text.count(" 1.50 |") == len(grid())
    assert "incomplete" not in text


def test_the_report_has_bursts_of_part_of_the_grid(complete, make_row):
    for way, rate in RATES.items():
        row = make_row(suite="fp8-burst", call=way, dtype=fp8.DTYPE if way else "bfloat16", tflops=rate, idle_ms=250)
        rows.append(row, complete / "results")
    page = complete / "page.md"
    page.write_text("<!-- generated: fp8-burst -->\n<!-- end -->\n")
    report.regenerate([page], complete / "results", complete)
    text = page.read_text()
    assert "Forward in FP8, fa3, TFLOP/s, each turn after 250 ms of rest. NVIDIA H200" in text
    assert text.count(" 1.50 |") == text.count("| 128 | full | 16384 | 700 | 1050 | 840 | 1.50 | 1.25 | 1.20 |") == 1
    assert "incomplete" not in text


def test_what_was_not_measured_is_a_dash_and_missing(complete):
    run = frame(complete)
    assert fp8.missing(run) == []
    without_bf16 = run[run.dtype != "bfloat16"]
    assert {row[3] for row in fp8.table(without_bf16).rows} == {"-"}
    assert {row[6:] for row in fp8.table(without_bf16).rows} == {("-", "1.25", "-")}
    assert len(fp8.missing(without_bf16)) == len(grid())


def test_a_measured_peer_has_a_column_and_a_ratio(complete, make_row):
    others = grid()[1:]
    for problem in others:
        row = make_row(PEER, problem=problem, suite="fp8", call=QUANTIZED, dtype=fp8.DTYPE, tflops=1000.0)
        rows.append(row, complete / "results")
    run = frame(complete)
    assert fp8.missing(run) == []
    table = fp8.table(run)
    assert table.columns[3:7] == ["bf16", "fp8", "with quantization", PEER]
    assert table.columns[-1] == "fp8 / best peer"
    assert table.notes[-1].startswith("cudnn-fp8: a scale for each tensor")
    assert table.rows[0][3:] == ("700", "1050", "840", "-", "1.50", "1.25", "1.20", "-")
    assert {line[3:] for line in table.rows[1:]} == {("700", "1050", "840", "1000", "1.50", "1.25", "1.20", "1.05")}

    page = complete / "page.md"
    page.write_text("<!-- generated: fp8 -->\n<!-- end -->\n")
    report.regenerate([page], complete / "results", complete)
    assert "| 128 | causal | 16384 | 700 | 1050 | 840 | 1000 | 1.50 | 1.25 | 1.20 | 1.05 |" in page.read_text()


def test_rows_of_other_code_are_marked(complete):
    run = frame(complete).assign(source_sha="0" * 64)
    assert fp8.table(run).title == "Forward in FP8, fa3†, TFLOP/s"


def test_without_a_gpu_it_shows_errors_and_kernels(no_hopper, monkeypatch, clean_report):
    def reports(ours, kinds, console):
        return {(problem, one.name): clean_report for problem in kinds for one in ours if not one.why_not(problem)}

    monkeypatch.setattr(benchmarks.without_gpu, "kernel_reports", reports)
    arguments = ["compare", "--dtype", "float8_e4m3fn", "--head-dim", "64", "--mask", "causal"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "No speed is measured here: torch sees no CUDA device" in text
    for way, at_most in (("fa3", "1.6e-02"), ("fa3 fp8", "5.0e-02"), ("fa3 with quantization", "1.0e-01")):
        [line] = [x.split() for x in result.output.splitlines() if f"causal   {way}  " in x and at_most in x]
        assert float(line[-2]) < float(at_most)
    assert "bfloat16 64 causal fa3 fp8 168 164 0" in text
    assert "fa2 fp8 is missing in" in text


@pytest.mark.parametrize(
    ("arguments", "peers"),
    [
        (["--dtype", "float8_e4m3fn"], tuple(FP8_PEERS)),
        (["--dtype", "float8_e4m3fn", "--peers", PEER], (PEER,)),
        (["--dtype", "float8_e4m3fn", "--peers", ""], ()),
        ([], tuple(PEERS)),
        (["--peers", "cudnn"], ("cudnn",)),
    ],
)
def test_the_peers_are_those_of_the_dtype(monkeypatch, arguments: list[str], peers: tuple[str, ...]):
    called = {}
    monkeypatch.setattr("benchmarks.machine.why_no_hopper", lambda: None)
    monkeypatch.setattr(fp8, "measure", lambda *given: called.update(peers=given[-1]) or 0)
    monkeypatch.setattr(benchmarks.compare, "compare", lambda problems, who, *given: called.update(peers=who[3:]) or 0)
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    assert tuple(called["peers"]) == peers


@pytest.mark.parametrize(("arguments", "idle_ms"), [([], 0), (["--idle-ms", "250"], 250)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_rest_between_turns_is_as_asked(monkeypatch, dtype: str, arguments: list[str], idle_ms: int):
    budgets = []
    monkeypatch.setattr("benchmarks.machine.why_no_hopper", lambda: None)
    for module, command in ((fp8, "measure"), (benchmarks.compare, "compare")):
        monkeypatch.setattr(module, command, lambda problems, who, budget, *given: budgets.append(budget) or 0)
    result = CliRunner().invoke(app, ["compare", "--dtype", dtype, *arguments])
    assert result.exit_code == 0, result.output
    assert budgets == [Budget(idle_ms=idle_ms)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float8_e4m3fn", "--peers", "cudnn"], "cudnn: the peers in this dtype are cudnn-fp8"),
        (["--peers", PEER], "cudnn-fp8: the peers in this dtype are torch-fa2, cudnn"),
        (["--dtype", "float8_e4m3fn,bfloat16"], "compared alone"),
        (["--dtype", "float8_e4m3fn", "--pass", "bwd"], "only its forward"),
        (["--dtype", "float8_e4m3fn", "--head-dim", "72"], "72: head_dims of FP8 are multiples of 16"),
        (["--dtype", "float8_e5m2"], "float8_e5m2: choose from bfloat16, float16, float8_e4m3fn"),
    ],
)
def test_wrong_options_are_refused(no_hopper, arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
