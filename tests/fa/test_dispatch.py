"""The front door: which generation runs, who may change that, and what a refusal says."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fa
import fa.dispatch as dispatch
import fa_common.generation as generation_module
from fa_common.generation import Generation

PROBLEM = fa.Problem(batch=2, seqlen_q=128, seqlen_k=128, heads_q=4, heads_kv=4, head_dim=64)


@pytest.fixture
def capable(monkeypatch):
    """capable(fa2={"softcap": True}) changes what generations can do."""

    def change(**changes):
        generations = {
            name: with_capabilities(generation, **changes.get(name, {})) for name, generation in fa.GENERATIONS.items()
        }
        monkeypatch.setattr(dispatch, "GENERATIONS", generations)
        dispatch._choices.clear()

    yield change
    dispatch._choices.clear()


def with_capabilities(generation, **changes):
    twin = object.__new__(Generation)  # no second registration of its torch operators
    twin.__dict__.update(generation.__dict__, capabilities=replace(generation.capabilities, **changes))
    return twin


@pytest.fixture
def ran(monkeypatch):
    """The names of the generations that ran, in order."""
    names = []

    def spy(name, method):
        def run(self, *arguments, **keywords):
            names.append(self.name)
            return method(self, *arguments, **keywords)

        monkeypatch.setattr(Generation, name, run)

    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        spy(name, getattr(Generation, name))
    return names


def qkv(dtype=torch.bfloat16, head_dim=16):
    return tuple(torch.randn(3, 1, 9, 2, head_dim).to(dtype))


# ---- Choice


def test_generations_are_told_oldest_first():
    assert list(fa.GENERATIONS) == ["fa1", "fa2", "fa3"]
    assert [generation.name for generation in fa.GENERATIONS.values()] == list(fa.GENERATIONS)


@pytest.mark.parametrize("version", ["fa1", "fa2", "fa3"])
def test_the_version_asked_for_runs(ran, version):
    tensors = qkv()
    out = fa.flash_attn_func(*tensors, version=version)
    assert ran == [version]
    assert torch.equal(out, fa.GENERATIONS[version].forward(*tensors)[0])


def test_auto_is_the_newest_that_fits(ran, capable):
    fa.flash_attn_func(*qkv())
    assert ran == ["fa3"]
    assert fa.select(PROBLEM) == "fa3"
    capable(fa3={"dtypes": ("float16",), "softcap": False}, fa2={"softcap": False}, fa1={"softcap": True})
    fa.flash_attn_func(*qkv(torch.bfloat16))
    fa.flash_attn_func(*qkv(torch.float16))
    fa.flash_attn_func(*qkv(torch.bfloat16))
    assert ran == ["fa3", "fa2", "fa3", "fa2"]
    assert fa.select(replace(PROBLEM, softcap=2.0)) == "fa1"


def test_a_choice_is_made_once_for_calls_alike(monkeypatch):
    dispatch._choices.clear()
    selected = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *x, **y: selected.append(1) or select(*x, **y))
    for _ in range(3):
        fa.flash_attn_func(*qkv())
    assert len(selected) == 1
    fa.flash_attn_func(*qkv(), causal=True)
    fa.flash_attn_func(*qkv(), version="fa2")
    fa.flash_attn_func(*(x.requires_grad_() for x in qkv()))
    assert len(selected) == 4


def test_the_memory_of_choices_is_bounded(monkeypatch):
    monkeypatch.setattr(generation_module, "MAX_RUNS", 3)
    for window in range(8):
        fa.flash_attn_func(*qkv(), window_size=(window, 1))
        assert len(dispatch._choices) <= 3


def test_select_takes_a_problem_or_tensors():
    assert fa.select(PROBLEM, version="fa2") == "fa2"
    assert fa.select(*qkv(), causal=True, version="fa1") == "fa1"
    with pytest.raises(TypeError, match="missing"):
        fa.select(PROBLEM, causal=True)
    with pytest.raises(TypeError, match="missing"):
        fa.select()


def test_packed_sequences_take_the_same_door(ran):
    q, k, v = (x[0] for x in qkv())
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse = fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, return_lse=True)
    assert (out.shape, lse.shape) == ((9, 2, 16), (2, 9))
    with fa.use("fa1"):
        fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5)
    fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5, version="fa2")
    assert ran == ["fa3", "fa1", "fa2"]


def test_choices_hold_no_tensor():
    dispatch._choices.clear()
    q, k, v = (x[0] for x in qkv())
    for lengths in ([0, 4, 9], [0, 5, 9]):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32)
        fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5)
    fa.flash_attn_func(*qkv())
    assert len(dispatch._choices) == 2
    assert not any(isinstance(part, torch.Tensor) for key in dispatch._choices for part in key)


# ---- use


def test_use_says_what_auto_is(ran):
    with fa.use("fa2"):
        fa.flash_attn_func(*qkv())
        fa.flash_attn_func(*qkv(), version="fa3")
        with fa.use("fa1"):
            fa.flash_attn_func(*qkv())
            with fa.use("auto"):
                fa.flash_attn_func(*qkv())
        fa.flash_attn_func(*qkv())
    fa.flash_attn_func(*qkv())
    assert ran == ["fa2", "fa3", "fa1", "fa3", "fa2", "fa3"]


def test_use_ends_with_an_error():
    with pytest.raises(RuntimeError), fa.use("fa1"):
        raise RuntimeError
    assert fa.select(PROBLEM) == "fa3"


def test_use_is_not_seen_by_other_threads_and_tasks():
    seen = {}

    def look(where):
        seen[where] = fa.select(PROBLEM)

    async def task(version, where):
        with fa.use(version):
            await asyncio.sleep(0)
            look(where)

    async def tasks():
        await asyncio.gather(task("fa1", "one task"), task("fa2", "another task"))

    with fa.use("fa2"):
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
    asyncio.run(tasks())
    assert seen == {"thread": "fa3", "one task": "fa1", "another task": "fa2"}


# ---- Refusals


@pytest.mark.parametrize("version", ["fa4", "FA3", "", None, 3])
def test_an_unknown_version_lists_the_choices(version):
    for call in (lambda: fa.flash_attn_func(*qkv(), version=version), lambda: fa.select(PROBLEM, version=version)):
        with pytest.raises(ValueError, match=f"version must be one of fa1, fa2, fa3, auto; got {version!r}"):
            call()
    with pytest.raises(ValueError, match="fa1, fa2, fa3, auto"), fa.use(version):
        pass


@pytest.mark.parametrize(
    ("version", "before", "behind"),
    [
        ("auto", r"no generation can run this problem\n  fa3: ", r"\n  fa2: it takes float16 or bfloat16, not float8"),
        ("fa1", r"fa1 cannot .*: it takes float16 or bfloat16, not float8_e4m3fn: .*; fa3 can: ", "$"),
        ("fa3", "fa3 cannot run this problem: ", "; no other generation can$"),
    ],
)
def test_8_bit_tensors_are_sent_to_fa3_with_their_scales(version, before, behind):
    q, k, v = (torch.zeros(1, 4, 2, 64).to(torch.float8_e4m3fn) for _ in range(3))
    other_call = "8-bit tensors come with scales: call fa3.flash_attn_func with descale_q, descale_k, descale_v"
    with pytest.raises(fa.UnsupportedProblem, match=f"{before}{other_call}{behind}"):
        fa.flash_attn_func(q, k, v, version=version)


def test_another_call_is_told_beside_the_generations_that_fit(monkeypatch):
    generation = fa.GENERATIONS["fa2"]
    halves = replace(generation.capabilities, dtypes=("float16",), other_call="halves come in pairs: call fa2.pairs")
    twin = with_capabilities(generation)
    twin.__dict__["other_capabilities"] = (halves,)
    monkeypatch.setattr(dispatch, "GENERATIONS", fa.GENERATIONS | {"fa2": twin})
    problem = replace(PROBLEM, dtype=torch.float16)
    assert dispatch.why_not(problem) == {"fa1": None, "fa2": halves.other_call, "fa3": None}
    assert dispatch.why_not(PROBLEM)["fa2"] is None
    assert fa.select(problem) == "fa3"
    with pytest.raises(fa.UnsupportedProblem, match=f"fa2 cannot .*: {halves.other_call}; fa1 and fa3 can$"):
        fa.select(problem, version="fa2")
    lacking = with_capabilities(fa.GENERATIONS["fa1"], dtypes=("bfloat16",))
    monkeypatch.setitem(dispatch.GENERATIONS, "fa1", lacking)
    with pytest.raises(fa.UnsupportedProblem, match=f"fa1 cannot .*; fa3 can; fa2 can: {halves.other_call}$"):
        fa.select(problem, version="fa1")


def test_a_refusal_says_which_generations_have_it(capable):
    softcap = replace(PROBLEM, softcap=2.0)
    lacking = {"fa1": {"softcap": False}, "fa2": {"softcap": False}}
    capable(**lacking)
    with pytest.raises(fa.UnsupportedProblem, match=r"fa1 cannot .*: .*softcap=2.0.*; fa3 can$"):
        fa.select(softcap, version="fa1")
    capable(**lacking, fa3={"softcap": False})
    with pytest.raises(fa.UnsupportedProblem, match=r"fa1 cannot .*: .*softcap=2.0.*; no other generation can$"):
        fa.select(softcap, version="fa1")
    capable(fa1={"softcap": False})
    with pytest.raises(fa.UnsupportedProblem, match=r"; fa2 and fa3 can$"):
        fa.select(softcap, version="fa1")


@pytest.mark.parametrize("change", [{"window": (64, 3)}, {"softcap": 2.0}, {"varlen": True}], ids=str)
def test_what_fa3_alone_has_goes_to_fa3(change, capable):
    problem = replace(PROBLEM, **change)
    [name] = change
    capable(fa1={name: False}, fa2={name: False})
    assert fa.select(problem) == "fa3"
    for version in ("fa1", "fa2"):
        with pytest.raises(fa.UnsupportedProblem, match=rf"{version} cannot .*{name}.*; fa3 can$"):
            fa.select(problem, version=version)


def test_without_any_generation_every_reason_is_told():
    with pytest.raises(fa.UnsupportedProblem, match=r"no generation can .*\n  fa3: .*\n  fa2: .*\n  fa1: .*sm_80"):
        fa.select(replace(PROBLEM, arch=80))
    with pytest.raises(fa.UnsupportedProblem, match="fa1: it takes float16 or bfloat16, not float32"):
        fa.flash_attn_func(*qkv(torch.float32))


def test_a_version_asked_for_is_never_replaced(ran, capable):
    capable(fa1={"dtypes": ("float16",)})
    with pytest.raises(fa.UnsupportedProblem, match=r"fa1 cannot .*; fa2 and fa3 can$"), fa.use("fa1"):
        fa.flash_attn_func(*qkv())
    assert ran == []


@pytest.mark.parametrize(("q", "message"), [(None, "q must be a torch.Tensor; got NoneType"), ([1], "got list")])
def test_what_is_no_tensor_is_named(q, message):
    _, k, v = qkv()
    with pytest.raises(TypeError, match=message):
        fa.flash_attn_func(q, k, v)
    with pytest.raises(TypeError, match="window_size must be a tuple"):
        fa.flash_attn_func(k, k, v, window_size=[1, 2])


# ---- torch.compile


@pytest.mark.parametrize("version", ["auto", "fa1"])
def test_compiled_without_a_break(version):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: fa.flash_attn_func(q, k, v, version=version, causal=True), fullgraph=True, backend=counter
    )
    for seqlen in (5, 9, 17, 40):
        q, k, v = (torch.randn(2, seqlen, 2, 16).bfloat16().requires_grad_() for _ in range(3))
        results = []
        for call in (compiled, lambda *x: fa.flash_attn_func(*x, version=version, causal=True)):
            out = call(q, k, v)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert counter.frame_count == 2


def test_a_compiled_function_keeps_the_version_it_was_traced_under():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: fa.flash_attn_func(q, k, v), backend="eager", fullgraph=True)
    q, k, v = (torch.randn(1, 90, 2, 16).bfloat16() for _ in range(3))
    expected = fa.flash_attn_func(q, k, v, version="fa1")
    with fa.use("fa1"):
        assert torch.equal(compiled(q, k, v), expected)
    assert torch.equal(compiled(q, k, v), expected)
