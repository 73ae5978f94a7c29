"""Decoding, on caches that a CPU reads at once and with a timer that only pretends."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fa3
from benchmarks import comparison, decode, report, rows
from benchmarks.__main__ import app
from benchmarks.accuracy import dequantized
from benchmarks.correctness import QUANTIZED_LIMIT
from benchmarks.fp8 import DTYPE, in_fp8
from benchmarks.problems import random_tensors, size
from benchmarks.timing import Budget
from fa_common.reference import attention

FP8 = torch.float8_e4m3fn


def right(q, k_cache, v_cache, *, causal, out, num_splits=0, out_dtype=None, **descales):
    """What `flash_attn_with_kvcache` promises, by the reference."""
    tensors = (q, k_cache, v_cache)
    if q.dtype == FP8:
        assert out.dtype == out_dtype
        tensors = dequantized(fa3.Quantized(*tensors, **descales))
    out.copy_(attention(*tensors, causal=causal)[0])


@pytest.fixture
def with_kvcache(monkeypatch):
    """A generation that has the function, as `right` or as the test says."""

    def install(function=right):
        monkeypatch.setattr(decode.Cached, "_function", staticmethod(function))

    return install


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(decode, "MIN_COPIES_BYTES", 3 * 2 * 40 * 2 * 64)  # three copies of the first, in e4m3
    problems = decode.cells([1, 2], [40], heads=4, heads_kv=2, head_dim=64)
    return [replace(problem, device="cpu", arch=None) for problem in problems]


def test_the_default_caches_fit():
    cells = decode.cells()
    assert len(cells) == 12
    assert max(map(decode.cache_bytes, cells)) == 2 * 64 * 131072 * 8 * 128 * 2
    assert {problem.causal for problem in cells} == {False}
    assert {problem.causal for problem in decode.cells(seqlen_q=4)} == {True}


def test_a_cache_that_does_not_fit_is_left_out():
    assert [size(p) for p in decode.cells([64, 512], [131072])] == ["64 x 1 over 131072 x 32"]
    with pytest.raises(ValueError, match="a cache of at most 40 GB"):
        decode.cells([512], [131072])


@pytest.mark.usefixtures("pretend_gpu")
def test_the_whole_command(small, with_kvcache, monkeypatch, fake_timer, tmp_path):
    calls = []

    def counted(q, k, v, **arguments):
        calls.append((k.dtype, k.data_ptr(), arguments.get("num_splits")))
        right(q, k, v, **arguments)

    with_kvcache(counted)
    monkeypatch.setattr(decode, "EveryCall", lambda telemetry: fake_timer())
    output = Console(file=StringIO(), width=250)
    status = decode.measure(small, ["fa3", "torch-sdpa"], 7, Budget(rounds=1), tmp_path, output)
    assert status == 0, output.file.getvalue()
    kept = list(rows.read(tmp_path / "h200" / "decode.jsonl"))
    who = [("fa3", "bfloat16"), ("fa3", DTYPE), ("torch-sdpa", "bfloat16")]
    ways = [(*one, way) for one in who for way in ("eager", "graph")]
    assert [(row.version, row.dtype, row.call) for row in kept] == 2 * ways
    for row in kept:
        itemsize = 1 if row.dtype == DTYPE else 2
        assert 0 < row.rel_err < 1e-2
        assert (row.seqlen_q, row.seqlen_k, row.heads_q, row.heads_kv) == (1, 40, 4, 2)
        assert row.ms == pytest.approx(1 / decode.MIN_CALLS)  # that many calls in 1 ms
        assert row.tb_per_s == pytest.approx(2 * row.batch * 40 * 2 * 64 * itemsize * decode.MIN_CALLS / 1e9)
    assert {splits for *_, splits in calls} == {7}
    for dtype in (torch.bfloat16, FP8):
        pointers = [pointer for called, pointer, _ in calls if called == dtype]
        assert len(set(pointers[: 1 + decode.MIN_CALLS])) == 3, "the first problem's calls go over the copies"
    rates = "fa3 250.0 us, 0.00 TB/s  fa3 fp8 250.0 us, 0.00 TB/s  torch-sdpa 250.0 us, 0.00 TB/s"
    assert rates in output.file.getvalue()
    assert "fa3† us" not in output.file.getvalue()


@pytest.mark.usefixtures("pretend_gpu")
def test_a_wrong_version_is_not_timed_and_one_that_is_missing_is_no_failure(small, with_kvcache, monkeypatch, tmp_path):
    output = Console(file=StringIO(), width=200)
    assert decode.Cached("fa2").why_not(small[0]).startswith("`from fa2.kvcache import flash_attn_with_kvcache` fails")
    with_kvcache(lambda q, k, v, *, out, **arguments: out.zero_())
    monkeypatch.setattr(decode, "EveryCall", decode.compare.DeviceTimer)
    assert decode.measure(small, ["fa3"], 0, Budget(rounds=1), tmp_path, output) == 1
    for who in ("fa3", "fa3 fp8"):
        assert f"{who} is missing in every problem: wrong: relative error" in output.file.getvalue()
    assert not (tmp_path / "h200" / "decode.jsonl").exists()


@pytest.mark.usefixtures("pretend_gpu")
def test_a_wrong_scale_gets_no_row(small, with_kvcache, monkeypatch, fake_timer, tmp_path):
    def wrong(*tensors, descale_v=None, **arguments):
        if descale_v is not None:
            arguments["descale_v"] = 1.1 * descale_v
        right(*tensors, **arguments)

    with_kvcache(wrong)
    monkeypatch.setattr(decode, "EveryCall", lambda telemetry: fake_timer())
    output = Console(file=StringIO(), width=200)
    assert decode.measure(small, ["fa3"], 0, Budget(rounds=1), tmp_path, output) == 1
    assert {row.dtype for row in rows.read(tmp_path / "h200" / "decode.jsonl")} == {"bfloat16"}
    assert f"fa3 fp8 is missing in every problem: wrong: relative error 1.0e-01, at most {QUANTIZED_LIMIT:.1e}" in (
        output.file.getvalue()
    )


@pytest.mark.usefixtures("pretend_gpu")
def test_what_fp8_has_not_costs_the_16_bit_cache_nothing(with_kvcache, monkeypatch, fake_timer, tmp_path):
    with_kvcache()
    monkeypatch.setattr(decode, "EveryCall", lambda telemetry: fake_timer())
    monkeypatch.setattr(decode, "FP8_CAPABILITIES", replace(decode.FP8_CAPABILITIES, dtypes=("float8_e5m2",)))
    [problem] = decode.cells([1], [40], heads=4, heads_kv=2, head_dim=72)
    output = Console(file=StringIO(), width=200)
    problems = [replace(problem, device="cpu", arch=None)]
    assert decode.measure(problems, ["fa3"], 0, Budget(rounds=1), tmp_path, output) == 0
    assert {row.dtype for row in rows.read(tmp_path / "h200" / "decode.jsonl")} == {"bfloat16"}
    assert "fa3 fp8 is missing in every problem: it takes" in output.file.getvalue()


def test_a_cache_in_e4m3_is_quantized_before_the_timed_call_and_lies_by_rows(small, with_kvcache, monkeypatch):
    called = []
    with_kvcache(lambda *tensors, **arguments: called.append(tensors))
    [_, on_quantized] = decode.contenders(["fa3"])
    problem = replace(small[0], seqlen_k=48)  # V of so many keys is quantised by columns
    tensors = random_tensors(problem)
    call = on_quantized.prepare(problem, *tensors)
    made = fa3.quantize(*tensors)
    assert not made.v.is_contiguous()
    monkeypatch.setattr(fa3, "quantize", None)
    call()
    [given] = called
    for x, expected in zip(given, made[:3], strict=True):
        assert x.is_contiguous()
        assert torch.equal(x.float(), expected.float())


def test_probes_that_run_at_once_leave_the_largest_cache_out(monkeypatch, tmp_path):
    class Prepared(Exception):
        pass

    def prepare(everyone, problems, *arguments):
        raise Prepared([one.name for one in everyone], max(map(decode.cache_bytes, problems)))

    monkeypatch.setattr(decode.compare, "prepare", prepare)
    with pytest.raises(Prepared) as prepared:
        decode.measure(decode.cells(), ["fa3", "torch-sdpa"], 0, Budget(), tmp_path, Console(file=StringIO()))
    assert prepared.value.args == (["fa3", "fa3 fp8", "torch-sdpa"], 2 * 64 * 32768 * 8 * 128 * 2)


def test_what_cannot_be_captured_is_timed_eagerly_alone(
    small, with_kvcache, monkeypatch, fake_timer, pretend_gpu, tmp_path
):
    class NoGraphs(fake_timer):
        def captured(self, call):
            return None

    with_kvcache()
    monkeypatch.setattr(decode, "EveryCall", lambda telemetry: NoGraphs())
    output = Console(file=StringIO(), width=200)
    assert decode.measure(small[:1], ["fa3"], 0, Budget(rounds=1), tmp_path, output) == 0
    assert [row.call for row in rows.read(tmp_path / "h200" / "decode.jsonl")] == 2 * ["eager"]


@pytest.fixture
def add_run(make_row, tmp_path):
    """Appends a run of all the default problems to tmp_path/results, with or without a cache in e4m3."""

    def add(*, with_fp8: bool, **changed):
        times = [("fa3", 0.1, False), ("fa3", 0.0625, True), ("torch-sdpa", 0.15, False), ("flash-attn-4", 0.2, False)]
        for version, ms, quantized in times:
            for problem in decode.cells() if with_fp8 or not quantized else []:
                given = in_fp8(problem) if quantized else problem
                for way, factor in (("graph", 1), ("eager", 2)):
                    rate = decode.cache_bytes(given) / ms / 1e9
                    columns = {"suite": "decode", "call": way, "ms": factor * ms, "tb_per_s": rate} | changed
                    rows.append(make_row(version, given, **columns), tmp_path / "results")

    return add


def block(tmp_path) -> str:
    """What a page shows of the rows."""
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: decode -->\n<!-- end -->\n")
    report.regenerate([page], tmp_path / "results", tmp_path)
    return page.read_text()


def test_the_report_has_times_and_rates(add_run, tmp_path):
    add_run(with_fp8=True)
    text = block(tmp_path)
    assert "Decoding, bfloat16, heads 32/8, head_dim 128, 1 query a sequence. NVIDIA H200" in text
    assert "| fa3 us | fa3 fp8 us | torch-sdpa us | flash-attn-4 us | fa3 TB/s | fa3 fp8 TB/s |" in text
    assert "| flash-attn-4 eager us | fa3 / best peer | fp8 / bf16 |" in text
    times, rates = "100.0 | 62.5 | 150.0 | 200.0", "2.68 | 2.15 | 1.79 | 1.34"
    assert f"| 8 | 8192 | 268 | {times} | {rates} | 200.0 | 125.0 | 300.0 | 400.0 | 1.50 | 1.60 |" in text
    assert "fp8: q, K and V in e4m3" in text
    assert "incomplete" not in text


def test_a_run_without_fp8_is_shown_as_incomplete(add_run, tmp_path):
    add_run(with_fp8=False)
    text = block(tmp_path)
    assert "| 8 | 8192 | 268 | 100.0 | 150.0 | 200.0 | 2.68 | 1.79 | 1.34 | 200.0 | 300.0 | 400.0 | 1.50 |" in text
    assert "fp8" not in text
    assert "An incomplete run: it lacks 12 measurements of a full one." in text


def test_rows_of_other_code_are_marked(add_run, tmp_path):
    add_run(with_fp8=True, source_sha="0" * 64)
    text = block(tmp_path)
    assert "| fa3† us | fa3 fp8† us | torch-sdpa us |" in text
    assert "fa3† / best peer" in text


def test_what_was_not_measured_is_a_dash(add_run, tmp_path):
    add_run(with_fp8=True)
    run = comparison.frame(list(rows.read(tmp_path / "results" / "h200" / "decode.jsonl")))
    lacking = decode.table(run[(run.version != "fa3") | (run.dtype == DTYPE) | (run.batch > 1)])
    assert {row[3:5] + row[-2:] for row in lacking.rows if row[0] == "1"} == {("-", "62.5", "-", "-")}
    assert {row[2:5] + row[-2:] for row in lacking.rows if row[:2] == ("8", "8192")} == {
        ("268", "100.0", "62.5", "1.50", "1.60")
    }


def test_without_a_gpu_it_shows_the_plan_and_the_errors(no_hopper, with_kvcache):
    with_kvcache()
    result = CliRunner().invoke(app, ["decode", "--seqlen", "1024,131072"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "No speed is measured here: torch sees no CUDA device" in text
    assert "bfloat16 128 full, GQA 32/8 64 x 1 over 131072 x 32 34359.7" in text
    for version in ("fa3", "fa3 fp8", "torch-sdpa"):
        assert f"{version} on this CPU, bfloat16 d=128 full, GQA 32/8 2 x 1 over 200 x 32: relative error" in text


def test_without_a_gpu_a_wrong_result_is_a_failure(no_hopper, with_kvcache):
    with_kvcache(lambda q, k, v, *, out, **arguments: out.fill_(1))
    result = CliRunner().invoke(app, ["decode"])
    assert result.exit_code == 1
    assert "fa3 fp8 on this CPU" in result.output


def test_without_a_gpu_the_algorithms_are_right(no_hopper):
    result = CliRunner().invoke(app, ["decode", "--seqlen-q", "3", "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    assert "fa3 fp8 on this CPU, float16 d=128 causal, GQA 32/8 2 x 3 over 200 x 32: relative error" in " ".join(
        result.output.split()
    )


def test_without_a_gpu_a_head_dim_that_fp8_has_not_is_no_failure(no_hopper, with_kvcache):
    with_kvcache()
    result = CliRunner().invoke(app, ["decode", "--head-dim", "72"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "fa3 on this CPU" in result.output
    assert "fa3 fp8 is missing: it has kernels for head_dim 16, 32" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads-kv", "5"], "must be a positive multiple"),
        (["--batch", "512", "--seqlen", "131072"], "a cache of at most 40 GB"),
        (["--dtype", "float64"], "choose from bfloat16, float16"),
        (["--versions", "fa1"], "fa1: choose from fa3"),
    ],
)
def test_wrong_options_are_refused(no_hopper, arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["decode", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
