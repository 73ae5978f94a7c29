"""What the doctor measures on a GPU, with the CPU in its place; what it says without one is in test_commands."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from benchmarks import doctor
from benchmarks.contenders import Ours
from benchmarks.peers import PEERS
from benchmarks.timing import Timing
from fa import GENERATIONS

TORCH = ["torch-sdpa", "torch-math"]  # the peers that a CPU has


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, cpu_problem):
    facts = {"gpu": "NVIDIA H200", "torch": torch.__version__, "dsl": None, "driver": None}
    monkeypatch.setattr(doctor, "TINY", cpu_problem())
    monkeypatch.setattr(doctor.machine, "facts", lambda: facts)
    monkeypatch.setattr(doctor, "host_time", lambda call, synchronize: Timing(0.01, 0.009, 0.011))
    for name, peer in PEERS.items():
        monkeypatch.setattr(peer, "why_not", lambda problem, name=name: None if name == "torch-math" else "not here")

    def load(key, build):
        algorithm = GENERATIONS[key.version].forward

        def kernel(q, k, v, out, lse, *scratch_and_scale):
            algorithm(q, k, v, out=out, lse=lse)

        return kernel

    monkeypatch.setattr(doctor, "load", load)


@pytest.mark.usefixtures("on_the_cpu")
def test_each_way_to_call_each_version_is_a_row():
    measured = doctor.measure_host([Ours(version) for version in GENERATIONS], Console(file=StringIO()))
    ways = ["flash_attn_func", "forward", "forward(out=, lse=)", "the kernel alone"]
    ours = [(version, way) for version in GENERATIONS for way in ways]
    assert [(row.version, row.call) for row in measured] == [*ours, *((peer, "public function") for peer in TORCH)]
    for row in measured:
        assert (row.suite, row.pass_, row.ms, row.tflops) == ("host", "host", 0.01, None)
        assert row.rel_err < 1e-2
    assert doctor.host_table(measured).rows[0] == ("fa1", "flash_attn_func", "10.0", "9.0", "11.0")


@pytest.mark.usefixtures("on_the_cpu")
def test_what_is_wrong_is_said_and_not_timed(monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(
        doctor, "ways_to_call", lambda ours, q, k, v: [("one way", lambda: lambda: v), ("another", fail)]
    )
    output = Console(file=StringIO(), width=160)
    assert [row.version for row in doctor.measure_host([Ours("fa2")], output)] == TORCH
    assert "fa2, one way, is wrong: relative error" in output.file.getvalue()
    assert "fa2, another, fails: RuntimeError: no such kernel" in output.file.getvalue()
