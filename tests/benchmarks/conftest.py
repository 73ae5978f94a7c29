"""Measurements that nobody measured: rows, problems small enough for a CPU, and a timer that only pretends."""

import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import compare
from benchmarks.peers import FP8_PEERS, GEMM, CudnnFp8, Gemm
from benchmarks.problems import problem_columns
from benchmarks.rows import Row, source_sha
from benchmarks.telemetry import Reading
from fa import GENERATIONS
from fa_common.problem import Problem
from fa_common.report import KernelReport

FACTS = {"gpu": "NVIDIA H200", "torch": "2.11.0", "dsl": "4.8.1", "driver": "580.1"}


class FakeTimer:
    """Remembers who was launched, in order; `milliseconds` says how long each call takes."""

    def __init__(self, milliseconds: Callable[[Callable], float] = lambda call: 1.0):
        self.milliseconds = milliseconds
        self.bursts: list[tuple[Callable, int]] = []
        self.loops: list[tuple[Callable, int, float]] = []
        self.rests: list[tuple[int, int]] = []  # how long, and before which burst

    def settle(self, call: Callable, estimate_ms: float) -> Callable:
        return call

    def burst(self, call: Callable, launches: int) -> tuple[list[float], Reading]:
        self.bursts.append((call, launches))
        return [self.milliseconds(call)] * launches, Reading(1700.0, 600.0)

    def rest(self, ms: int) -> None:
        self.rests.append((ms, len(self.bursts)))

    def captured(self, call: Callable) -> Callable | None:
        return lambda: call()

    def loop(self, call: Callable, launches: int, seconds: float) -> tuple[list[float], list[Reading]]:
        """A loop that begins fast on a cool GPU."""
        self.loops.append((call, launches, seconds))
        ms = self.milliseconds(call)
        return [ms, ms, 2 * ms, 2 * ms], [Reading(1980.0, 700.0)] * 2 + [Reading(1500.0, 690.0)] * 2


class SmallGemm(Gemm):
    SIZE = 16
    FLOPS = 2 * SIZE**3


class Described:
    """A tensor of a cuDNN graph."""

    def __init__(self, dim=None, stride=None, data_type=None, name=""):
        self.dim, self.stride, self.data_type, self.name, self.output = dim, stride, data_type, name, False

    def __getattr__(self, setter: str) -> Callable[[Any], "Described"]:
        field = setter.removeprefix("set_")
        if field == setter or field not in vars(self):
            raise AttributeError(setter)
        return lambda value: (setattr(self, field, value), self)[1]


class FakeCudnnGraph:
    """Attention in FP8 as cuDNN's graph describes it, of what it is told of its tensors and of nothing else."""

    def __init__(self, **context):
        self.context, self.is_built = context, False

    def tensor(self, dim, stride, data_type, name):
        return Described(dim, stride, data_type, name)

    def sdpa_fp8(self, **arguments):
        self.arguments, self.results = arguments, tuple(Described() for _ in range(3))
        O, max_P, max_O = self.results
        return O, None, max_P, max_O

    def build(self, modes):
        self.is_built = True

    def get_workspace_size(self):
        return 0

    def execute(self, buffers, workspace, handle):
        assert self.is_built
        assert handle.stream == torch.cuda.current_stream().cuda_stream

        def view(described: Described) -> Tensor:
            return buffers[described].as_strided(described.dim, described.stride)

        given = {name: view(x).float() for name, x in self.arguments.items() if isinstance(x, Described)}
        q, k, v = (given[name] * given[f"descale_{name}"] for name in "qkv")
        S = self.arguments["attn_scale"] * q @ k.mT
        if self.arguments["use_causal_mask"]:
            S = S.masked_fill(torch.ones_like(S).triu(1).bool(), -torch.inf)
        P = (torch.softmax(S, -1) * given["scale_s"]).to(torch.float8_e4m3fn).float() * given["descale_s"]
        O = self.results[0]
        assert O.output
        view(O).copy_((P @ v * given["scale_o"]).to(torch.float8_e4m3fn))


@pytest.fixture
def fake_cudnn(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """nvidia-cudnn-frontend on the CPU, installed; `graphs` holds those that were made, `stream` is torch's current."""
    stream = SimpleNamespace(cuda_stream=1)
    module = SimpleNamespace(
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        create_handle=lambda: SimpleNamespace(stream=0),
        set_stream=lambda handle, stream: setattr(handle, "stream", stream),
        pygraph=lambda **context: module.graphs.append(FakeCudnnGraph(**context)) or module.graphs[-1],
        graphs=[],
        stream=stream,
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setitem(FP8_PEERS, "cudnn-fp8", CudnnFp8("cudnn-fp8", "cudnn"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return module


@pytest.fixture
def fake_timer() -> type[FakeTimer]:
    return FakeTimer


@pytest.fixture
def small_gemm() -> Gemm:
    return SmallGemm("cpu")


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, small_gemm: Gemm) -> dict:
    """A machine on which the commands measure, on CPU tensors and with a timer that pretends; what is unfit there."""
    unfit = {}
    monkeypatch.setattr(compare.machine, "facts", lambda: FACTS)
    monkeypatch.setattr(compare, "DeviceTimer", lambda telemetry: FakeTimer())
    monkeypatch.setattr(compare, "Gemm", lambda: small_gemm)
    monkeypatch.setattr(compare.probe, "unfit", lambda ours, problems: unfit)
    return unfit


@pytest.fixture
def cpu_problem() -> Callable[..., Problem]:
    """A problem that an algorithm solves at once."""

    def make(seqlen: int = 64, causal: bool = False, **others) -> Problem:
        shape = {"batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": 1, "heads_kv": 1, "head_dim": 64}
        return Problem(**shape, causal=causal, device="cpu", arch=None, **others)

    return make


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """A row of suite `compare`, of the current sources, with whatever is given changed."""

    def make(version: str = "fa3", problem: Problem | None = None, **changed) -> Row:
        problem = problem or Problem(batch=1, seqlen_q=16384, seqlen_k=16384, heads_q=16, heads_kv=16, head_dim=128)
        columns = problem_columns(problem) | FACTS
        columns |= {"run": "20260101T000000Z-aaaaaa", "suite": "compare", "version": version, "pass_": "fwd"}
        columns |= {"ms": 1.0, "ms_p20": 0.9, "ms_p80": 1.1, "tflops": 600.0, "pct_of_gemm": 75.0, "rel_err": 2e-3}
        columns |= {"sm_clock_mhz": 1700.0, "power_w": 600.0, "time": "2026-01-01T00:00:00+00:00"}
        columns["source_sha"] = source_sha(version) if version in GENERATIONS else None
        return Row(**columns | changed)

    return make


@pytest.fixture
def gemm_row(make_row: Callable[..., Row]) -> Row:
    return make_row(GEMM, tflops=800.0, pct_of_gemm=100.0, head_dim=8192)


@pytest.fixture
def clean_report() -> KernelReport:
    """A kernel that there is nothing to say against."""
    return KernelReport(
        registers=168,
        shared_memory=164 * 1024,
        stack=0,
        spill_stores=0,
        spill_loads=0,
        barriers=4,
        instructions=Counter(HGMMA=16, UTMALDG=5, MUFU=70, FFMA=200),
    )


@pytest.fixture
def no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, wherever the test runs."""
    monkeypatch.setattr("benchmarks.machine.why_no_hopper", lambda: "torch sees no CUDA device")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
