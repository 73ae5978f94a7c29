"""Decoding, on caches that a CPU reads at once and with a timer that only pretends."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import decode, report, rows
from benchmarks.__main__ import app
from benchmarks.problems import size
from benchmarks.timing import Budget
from fa_common.reference import attention


def right(q, k_cache, v_cache, *, causal, out, num_splits=0):
    """What `flash_attn_with_kvcache` promises, by the reference."""
    out.copy_(attention(q, k_cache, v_cache, causal=causal)[0])


@pytest.fixture
def with_kvcache(monkeypatch):
    """A generation that has the function, as `right` or as the test says."""

    def install(function=right):
        monkeypatch.setattr(decode.Cached, "_function", staticmethod(function))

    return install


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(decode, "MIN_COPIES_BYTES", 3 * 2 * 40 * 2 * 64 * 2)  # three copies of the first
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
        calls.append((k.data_ptr(), arguments.get("num_splits")))
        right(q, k, v, **arguments)

    with_kvcache(counted)
    monkeypatch.setattr(decode, "EveryCall", lambda telemetry: fake_timer())
    output = Console(file=StringIO(), width=200)
    status = decode.measure(small, ["fa3", "torch-sdpa"], 7, Budget(rounds=1), tmp_path, output)
    assert status == 0, output.file.getvalue()
    kept = list(rows.read(tmp_path / "h200" / "decode.jsonl"))
    ways = [(version, way) for version in ("fa3", "torch-sdpa") for way in ("eager", "graph")]
    assert [(row.version, row.call) for row in kept] == 2 * ways
    for row in kept:
        assert 0 < row.rel_err < 1e-2
        assert (row.seqlen_q, row.seqlen_k, row.heads_q, row.heads_kv) == (1, 40, 4, 2)
        assert row.ms == pytest.approx(1 / decode.MIN_CALLS)  # that many calls in 1 ms
        assert row.tb_per_s == pytest.approx(2 * row.batch * 40 * 2 * 64 * 2 * decode.MIN_CALLS / 1e9)
    assert {splits for _, splits in calls} == {7}
    first_problem = [pointer for pointer, _ in calls[: 1 + decode.MIN_CALLS]]
    assert len(set(first_problem)) == 3, "the calls go over the copies"
    assert "fa3 250.0 us, 0.00 TB/s  torch-sdpa 250.0 us, 0.00 TB/s" in output.file.getvalue()
    assert "fa3† us" not in output.file.getvalue()


@pytest.mark.usefixtures("pretend_gpu")
def test_a_wrong_version_is_not_timed_and_one_that_is_missing_is_no_failure(small, with_kvcache, monkeypatch, tmp_path):
    output = Console(file=StringIO(), width=200)
    assert decode.Cached("fa2").why_not(small[0]).startswith("`from fa2.kvcache import flash_attn_with_kvcache` fails")
    with_kvcache(lambda q, k, v, *, causal, out: out.zero_())
    monkeypatch.setattr(decode, "EveryCall", decode.compare.DeviceTimer)
    assert decode.measure(small, ["fa3"], 0, Budget(rounds=1), tmp_path, output) == 1
    assert "fa3 is missing in every problem: wrong: relative error" in output.file.getvalue()
    assert not (tmp_path / "h200" / "decode.jsonl").exists()


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
    assert [row.call for row in rows.read(tmp_path / "h200" / "decode.jsonl")] == ["eager"]


def test_the_report_has_times_and_rates(make_row, tmp_path):
    for version, ms in (("fa3", 0.1), ("torch-sdpa", 0.15), ("flash-attn-4", 0.2)):
        for problem in decode.cells():
            for way, factor in (("graph", 1), ("eager", 2)):
                rate = decode.cache_bytes(problem) / ms / 1e9
                row = make_row(version, problem, suite="decode", call=way, ms=factor * ms, tb_per_s=rate)
                rows.append(row, tmp_path / "results")
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: decode -->\n<!-- end -->\n")
    report.regenerate([page], tmp_path / "results", tmp_path)
    text = page.read_text()
    assert "Decoding, bfloat16, heads 32/8, head_dim 128, 1 query a sequence. NVIDIA H200" in text
    line = "| 8 | 8192 | 268 | 100.0 | 150.0 | 200.0 | 2.68 | 1.79 | 1.34 | 200.0 | 300.0 | 400.0 | 1.50 |"
    assert line in text
    assert "incomplete" not in text


def test_without_a_gpu_it_shows_the_plan_and_the_errors(no_hopper, with_kvcache):
    with_kvcache()
    result = CliRunner().invoke(app, ["decode", "--seqlen", "1024,131072"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "No speed is measured here: torch sees no CUDA device" in text
    assert "bfloat16 128 full, GQA 32/8 64 x 1 over 131072 x 32 34359.7" in text
    for version in ("fa3", "torch-sdpa"):
        assert f"{version} on this CPU, bfloat16 d=128 full, GQA 32/8 2 x 1 over 200 x 32: relative error" in text


def test_without_a_gpu_a_wrong_result_is_a_failure(no_hopper, with_kvcache):
    with_kvcache(lambda q, k, v, *, causal, out: torch.ones_like(out))
    assert CliRunner().invoke(app, ["decode"]).exit_code == 1


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
