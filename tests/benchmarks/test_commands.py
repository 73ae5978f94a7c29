"""The commands as a user types them, on a machine without a GPU."""

import pytest
from typer.testing import CliRunner

import benchmarks.without_gpu
from benchmarks.__main__ import app
from fa_common.isolated import IsolatedFailure
from fa_common.report import KernelReport

pytestmark = pytest.mark.usefixtures("no_hopper")


def run(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, clean_report: KernelReport) -> dict[str, KernelReport | IsolatedFailure]:
    """What the compiler is said to have made of each version's kernels, clean unless a test says otherwise."""
    made = dict.fromkeys(("fa1", "fa2", "fa3"), clean_report)
    monkeypatch.setattr(
        benchmarks.without_gpu,
        "kernel_reports",
        lambda ours, kinds, console: {(kind, one.name): made[one.name] for kind in kinds for one in ours},
    )
    return made


def test_compare_without_a_gpu_shows_algorithms_and_kernels(kernels):
    result = run("compare", "--head-dim", "64", "--mask", "causal")
    assert result.exit_code == 0, result.output
    assert "No speed is measured here: torch sees no CUDA device" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    algorithms = [line for line in lines if line[:3] == ["bfloat16", "64", "causal"] and "e-03" in line[4]]
    assert [line[3] for line in algorithms] == ["fa1", "fa2", "fa3"]
    assert [
        "bfloat16",
        "64",
        "causal",
        "fa3",
        "168",
        "164",
        "0",
        "0",
        "16",
        "0",
        "0",
        "5",
        "0",
        "0",
        "70",
        "291",
    ] in lines


def test_compare_without_a_gpu_says_what_is_wrong_with_a_kernel(kernels):
    kernels["fa2"] = KernelReport(**vars(kernels["fa2"]) | {"spill_stores": 64, "spill_loads": 64})
    result = run("compare", "--head-dim", "64", "--mask", "full")
    assert "fa2 d=64 full: spills 64 bytes" in result.output


def test_compare_without_a_gpu_shows_a_kernel_that_does_not_compile(kernels):
    kernels["fa1"] = IsolatedFailure("compile_forward raised ValueError: tile_n")
    result = run("compare", "--head-dim", "64", "--mask", "full")
    assert result.exit_code == 1
    assert "fa1 d=64 full does not compile: compile_forward raised ValueError: tile_n" in result.output


@pytest.mark.slow
def test_compare_without_a_gpu_compiles_real_kernels():
    result = run("compare", "--head-dim", "64", "--mask", "full", "--versions", "fa2,fa3")
    assert result.exit_code == 0, result.output
    [fa2, fa3] = (line.split() for line in result.output.splitlines() if "bfloat16" in line and "e-03" not in line)
    assert fa2[:4] == ["bfloat16", "64", "full", "fa2"]
    assert int(fa2[7]) > 0, "HMMA"
    assert int(fa3[8]) > 0, "HGMMA"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fa9"], "fa9: choose from torch-fa2"),
        (["--seqlen", "0"], "positive integers"),
        (["--head-dim", "64,x"], "positive integers"),
        (["--head-dim", "60"], "head_dim must be a multiple of 8"),
        (["--repeats", "0"], "repeats"),
        (["--idle-ms", "-1"], "'--idle-ms'"),
        (["--idle-ms", "nan"], "'--idle-ms'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str):
    result = run("compare", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_doctor_says_what_runs_and_why_not(tmp_path):
    result = run("doctor", "--results", str(tmp_path))
    assert result.exit_code == 0, result.output
    for fact in ("Python", "torch", "nvidia-cutlass-dsl", "kernel cache", "torch sees no CUDA device"):
        assert fact in result.output
    for version in ("fa1", "fa2", "fa3", "torch-fa2", "cudnn", "flash-attn-4"):
        assert version in result.output
    assert "forward alone, float8_e4m3fn, head_dim 16 to 256" in result.output
    assert not list(tmp_path.iterdir())


def test_gpu_tests_need_a_gpu(tmp_path):
    result = run("gpu-tests", "--results", str(tmp_path), "--", "-x")
    assert result.exit_code == 1
    assert "The GPU tests cannot run here: torch sees no CUDA device" in result.output
    assert not list(tmp_path.iterdir())


def test_without_a_command_the_commands_are_listed():
    result = run()
    for command in (
        "compare",
        "ablate",
        "tiles",
        "shapes",
        "sustained",
        "decode",
        "quantize",
        "doctor",
        "gpu-tests",
        "report",
    ):
        assert command in result.output
