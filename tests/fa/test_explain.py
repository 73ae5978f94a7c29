"""explain(): which generation, why, and what its kernel is like. The compiler's report is a stand-in."""

from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import fa
from fa_common.isolated import IsolatedFailure
from fa_common.problem import Problem
from fa_common.report import KernelReport

explain_module = import_module("fa.explain")  # the package's attribute of that name is the function

REPORT = KernelReport(
    registers=128,
    shared_memory=100_000,
    stack=0,
    spill_stores=0,
    spill_loads=0,
    barriers=3,
    instructions=Counter({"HGMMA": 48, "MUFU": 200, "FADD": 752}),
)


@pytest.fixture
def report(monkeypatch):
    """report(**changes) is what the compiler reports from then on; its `keys` are the kernels asked for."""

    def change(**changes):
        change.made = replace(REPORT, **changes)

    def stand_in(key, build):
        change.keys.append(key)
        if isinstance(change.made, Exception):
            raise change.made
        return change.made

    change.made, change.keys = REPORT, []
    monkeypatch.setattr(explain_module, "report", stand_in)
    return change


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(80): CPU tensors pass for those of an sm_80 GPU."""
    from_tensors = Problem.from_tensors

    def change(arch):
        monkeypatch.setattr(
            Problem, "from_tensors", lambda *x, **y: replace(from_tensors(*x, **y), device="cuda", arch=arch)
        )

    return change


def qkv(batch=2, seqlen=1024, heads_q=8, heads_kv=2, head_dim=128, dtype=torch.bfloat16):
    q = torch.zeros(batch, seqlen, heads_q, head_dim, dtype=dtype)
    k, v = torch.zeros(2, batch, seqlen, heads_kv, head_dim, dtype=dtype)
    return q, k, v


def test_a_call_on_a_hopper_gpu(report, on_gpu, capsys):
    on_gpu(90)
    explanation = fa.explain(*qkv(), causal=True)
    text = capsys.readouterr().out
    assert text == f"{explanation}\n"
    lines = text.splitlines()
    assert lines[:5] == [
        "bfloat16, batch 2, seqlen 1024 x 1024, heads 8 / 2, head_dim 128, causal, sm_90",
        "fa3 runs, the newest generation that fits: its kernel",
        "  fa1  fits",
        "  fa2  fits",
        "  fa3  fits",
    ]
    assert "on a Hopper GPU" not in text
    assert "128 a thread at launch, 0 bytes spilled" in text
    assert "100,000 of 232,448 bytes a CTA" in text
    assert "1,000, of them HGMMA 48, MUFU 200" in text
    assert f"{4 * 128 * 8 * 2 * 1024**2 / 2 / 1e9:.3f} GFLOP in matrix products (fwd)" in text
    assert f"at least {explanation.problem.bytes() / 1e6:.3f} MB, " in text
    assert "problem" not in text
    [key] = report.keys
    assert (key.version, key.dtype, key.head_dim, key.causal) == ("fa3", "bfloat16", 128, True)
    assert explanation.kernel.config == key.config


def test_the_grid_and_its_waves(report):
    kernel = fa.explain(*qkv(), version="fa2").kernel
    blocks = -(-1024 // kernel.config.tile_m)
    assert kernel.launch.grid == (blocks, 8, 2)
    assert kernel.launch.num_ctas == blocks * 16
    assert kernel.waves == blocks * 16 / (132 * kernel.ctas_per_sm)
    assert f"grid          {blocks} x 8 x 2 = {blocks * 16} CTAs of" in str(fa.explain(*qkv(), version="fa2"))


@pytest.mark.parametrize(
    ("changes", "ctas"),
    [
        ({"registers": 168, "shared_memory": 200_000}, 1),  # shared memory
        ({"registers": 168, "shared_memory": 100_000}, 2),
        ({"registers": 255, "shared_memory": 1_000}, 2),  # registers: 128 threads of 256 each, half of the file
        ({"registers": 128, "shared_memory": 1_000}, 4),
        ({"registers": 16, "shared_memory": 0}, 16),  # threads
    ],
)
def test_how_many_ctas_an_sm_holds(report, changes, ctas):
    report(**changes)
    kernel = fa.explain(*qkv(), version="fa1").kernel
    assert kernel.launch.num_threads == 128
    assert kernel.ctas_per_sm == ctas


def test_a_kernel_that_no_sm_holds_is_told(report):
    report(registers=255)
    assert "CTAs of 384 threads, too large for an SM" in str(fa.explain(*qkv(), version="fa3"))


@pytest.mark.parametrize("version", ["fa1", "fa2", "fa3"])
def test_a_call_on_a_cpu_tells_of_the_algorithm_and_of_the_kernel(report, version):
    explanation = fa.explain(*qkv(), version=version)
    assert explanation.version == version
    assert explanation.asked_for == version
    assert f"{version} runs, as asked for: {version}/algorithm.py, exact and slow" in str(explanation)
    assert f"kernel        {version} forward, sm_90a" in str(explanation)
    assert report.keys[0].version == version


def test_use_counts_as_asked_for(report):
    with fa.use("fa2"):
        assert "fa2 runs, as asked for" in str(fa.explain(*qkv()))
        assert "fa1 runs, as asked for" in str(fa.explain(*qkv(), version="fa1"))


def test_what_runs_on_a_cpu(report):
    explanation = fa.explain(*qkv(), softcap=30.0, version="fa2")
    text = str(explanation)
    assert explanation.version == "fa2"
    assert set(explanation.reasons.values()) == {None}
    assert "fa2 runs, as asked for: fa2/algorithm.py, exact and slow" in text
    assert "softcap 30.0, CPU" in text
    assert "GFLOP" in text


def test_a_refused_call_is_explained_too(report, on_gpu):
    on_gpu(80)
    explanation = fa.explain(*qkv())
    assert explanation.version is None
    assert "refused: no generation fits\n  fa1  its kernels run on sm_90, this GPU is sm_80" in str(explanation)
    assert "on a Hopper GPU\n  fa1  fits" in str(explanation)
    assert explanation.kernel.version == "fa3"
    assert "refused: fa1 does not fit" in str(fa.explain(*qkv(), version="fa1"))
    assert fa.explain(*qkv(dtype=torch.float32)).kernel is None


def test_gradients_count_as_work(report):
    q, k, v = qkv()
    q.requires_grad_()
    text = str(fa.explain(q, k, v))
    assert "with gradient" in text
    assert f"{3.5 * 4 * 128 * 8 * 2 * 1024**2 / 1e9:.3f} GFLOP in matrix products (fwd+bwd)" in text


def test_without_a_score_no_kernel_is_launched(report):
    explanation = fa.explain(*qkv(seqlen=0))
    assert explanation.version == "fa3"
    assert explanation.kernel is None
    assert "0.000 GFLOP" in str(explanation)
    assert report.keys == []


def test_packed_sequences(report):
    """On a GPU too, where the problem alone does not know the lengths."""
    q, k, v = (x.flatten(0, 1) for x in qkv(seqlen=100))
    cu_seqlens = torch.tensor([0, 50, 200], dtype=torch.int32)
    sequences = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 150, "max_seqlen_k": 150}
    on_cpu = fa.explain(q, k, v, **sequences)
    assert on_cpu.problem.pairs == 50**2 + 150**2
    assert "batch 2, seqlen up to 150 x 150, 200 x 200 in all" in str(on_cpu)
    from_tensors = Problem.from_tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "from_tensors", lambda *x, **y: replace(from_tensors(*x, **y), seqlens=None))
        assert fa.explain(q, k, v, **sequences).problem == on_cpu.problem


@pytest.mark.parametrize(
    ("options", "described", "kind"),
    [
        ({"window_size": (64, 3)}, "window (64, 3)", (False, True, False)),
        ({"causal": True, "window_size": (64, None)}, "causal, window (64, None)", (False, True, False)),
        ({"softcap": 30.0, "causal": True}, "causal, softcap 30.0", (True, False, True)),
    ],
    ids=str,
)
def test_the_kernel_of_a_window_or_a_softcap(report, options, described, kind):
    text = str(fa.explain(*qkv(), **options))
    assert described in text
    [key] = report.keys
    assert (key.version, key.causal, key.window, key.softcap, key.sequences) == ("fa3", *kind, "dense")


def test_the_kernel_of_packed_sequences(report, on_gpu):
    on_gpu(90)
    q, k, v = (x.flatten(0, 1) for x in qkv(seqlen=100))
    cu_seqlens = torch.tensor([0, 50, 200], dtype=torch.int32)
    sequences = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 150, "max_seqlen_k": 150}
    explanation = fa.explain(q, k, v, **sequences)
    assert explanation.version == "fa3"
    assert report.keys[0].sequences == "packed"
    assert explanation.kernel.launch.num_ctas <= 132
    unknown = replace(explanation, problem=replace(explanation.problem, seqlens=None))
    assert "work          unknown, it depends on the sequences' lengths" in str(unknown)
    assert "HBM           at least" in str(unknown)


def test_a_given_config_is_explained(report):
    config = fa.GENERATIONS["fa3"].config_type(pingpong=False, stages=1)
    explanation = fa.explain(*qkv(), config=config)
    assert explanation.kernel.config == config
    assert "stages 1" in str(explanation)
    assert "switches      without ping-pong" in str(explanation)
    with pytest.raises(TypeError, match=r"must be a fa2.Config; got a fa3.Config"):
        fa.explain(*qkv(), config=config, version="fa2")
    with pytest.raises(TypeError, match=r"must be a fa3.Config"):
        fa.explain(*qkv(), config=fa.GENERATIONS["fa1"].config_type(), softcap=3.0)


def test_what_a_good_kernel_must_not_have_is_told(report):
    report(spill_stores=16, spill_loads=24, stack=16)
    text = str(fa.explain(*qkv()))
    assert "16 bytes spilled" in text
    assert "problem       the kernel spills 16 bytes and reads 24 back" in text


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'cutlass'"), IsolatedFailure("it raised")])
def test_a_kernel_that_does_not_compile_here(report, error):
    report.made = error
    explanation = fa.explain(*qkv())
    assert explanation.kernel.report is None
    assert explanation.kernel.waves is None
    assert f"not compiled  {error}" in str(explanation)
    assert "CTAs of" in str(explanation)


def test_without_a_disassembler(report):
    report(instructions=Counter(), why_no_instructions="there is no nvdisasm")
    assert "instructions  unknown: there is no nvdisasm" in str(fa.explain(*qkv()))


def test_wrong_arguments_are_refused_as_by_the_call():
    with pytest.raises(ValueError, match="version must be one of"):
        fa.explain(*qkv(), version="fa9")
    with pytest.raises(TypeError, match="softmax_scale must be a Python number"):
        fa.explain(*qkv(), softmax_scale="1")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        fa.explain(*qkv(), dropout_p=0.0)


@pytest.mark.slow
def test_a_kernel_as_the_compiler_made_it():
    explanation = fa.explain(*qkv(head_dim=64), version="fa2")
    assert explanation.kernel.why_no_report is None
    assert explanation.kernel.report.registers > 0
    assert explanation.kernel.ctas_per_sm >= 1
    assert "HMMA" in str(explanation)
