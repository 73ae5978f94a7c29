"""The torch operators: what goes through them, and what torch.compile and autograd make of them."""

from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_common.operators import Arguments, decode, encode, from_operator, to_operator
from fa_common.problem import Problem, UnsupportedProblem

VERSIONS = ("fa1", "fa2", "fa3")
NO_SEQUENCES = (None, None, None, None)
every_version = pytest.mark.parametrize("version", VERSIONS)


@dataclass(frozen=True)
class Config:
    tile: int = 64
    fast: bool = True
    share: float = 0.1
    name: str = 'a "name", {odd}'
    limit: int | None = None


@pytest.fixture
def counter():
    """A backend that compiles autograd's graphs and counts how often it was asked to."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def qkv(seqlen=9, head_dim=16, dtype=torch.bfloat16, requires_grad=True):
    shapes = ((2, seqlen, 4, head_dim), (2, seqlen + 3, 2, head_dim), (2, seqlen + 3, 2, head_dim))
    return tuple(torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes)


def with_gradients(function, tensors):
    """(out, lse, dq, dk, dv) for a loss on out and on LSE."""
    out, lse = function(*tensors)
    weights = torch.linspace(-1, 1, lse.numel()).view(lse.shape)
    loss = out.float().square().sum() + (weights * lse).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)


def assert_same(results, expected):
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


# ---- What goes through


@pytest.mark.parametrize("config", [Config(), Config(1, False, 1 / 3, "", 7), None], ids=str)
def test_a_config_comes_back_from_its_string(config):
    assert decode(encode(config), Config) == config


@every_version
def test_every_config_comes_back_from_its_string(version):
    config_type = import_module(version).Config
    default_config = import_module(f"{version}.config").default_config
    for head_dim in (64, 128, 256):
        config = default_config(Problem(4, 1024, 1024, 8, 8, head_dim))
        assert decode(encode(config), config_type) == config


def test_arguments_come_back_by_name():
    arguments = Arguments(0.5, True, (None, 3), 1.0, True, Config(32), torch.zeros(2), torch.zeros(2), 5, 6)
    assert from_operator(to_operator(arguments), Config) == arguments._asdict()
    dense = (0.5, True, (None, 3), 1.0, True, None)
    assert from_operator(to_operator(dense), Config) == Arguments(*dense)._asdict()


@every_version
def test_torch_finds_nothing_wrong(version):
    operators = getattr(torch.ops, version)
    q, k, v = qkv()
    values = (0.3, False, 3, 4, 5.0, True, encode(import_module(version).Config()), *NO_SEQUENCES)
    torch.library.opcheck(operators.forward.default, (q, k, v, *values))
    out, lse = operators.forward(q, k, v, *values)
    saved = [x.detach() for x in (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse)]
    torch.library.opcheck(operators.backward.default, (*saved, *values))


# ---- torch.compile


@every_version
def test_compiled_without_a_break_for_any_length(version, counter):
    """FA#1435: one graph for the first length, one for all the others, forward and backward."""
    flash_attn_func = import_module(version).flash_attn_func

    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True, window_size=(20, None), return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for seqlen in (5, 9, 17, 40):
        tensors = qkv(seqlen)
        assert_same(with_gradients(compiled, tensors), with_gradients(attend, tensors))
    assert counter.frame_count == 2


@every_version
def test_packed_sequences_compiled_without_a_break(version, counter):
    """FA#2507: another max_seqlen does not compile again and again."""
    flash_attn_varlen_func = import_module(version).flash_attn_varlen_func

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return flash_attn_varlen_func(q, k, v, *sequences, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for longest in range(6, 10):
        q, k, v = qkv(longest)
        tensors = tuple(x[0].detach().requires_grad_() for x in (q, k, v))
        cu_seqlens_q = torch.tensor([0, 2, 2, longest], dtype=torch.int32)
        cu_seqlens_k = torch.tensor([0, 0, 4, longest + 3], dtype=torch.int32)
        sequences = (cu_seqlens_q, cu_seqlens_k, longest - 2, longest - 1)
        results = with_gradients(lambda q, k, v, s=sequences: compiled(q, k, v, *s), tensors)
        assert_same(results, with_gradients(lambda q, k, v, s=sequences: attend(q, k, v, *s), tensors))
    assert counter.frame_count == 2


@pytest.mark.parametrize("made", ["outside", "inside", "before"])
def test_another_config_is_another_graph(counter, made):
    """However the compiler gets to see a Config, it runs with that one, and no number in it becomes symbolic."""
    from fa2 import Config, flash_attn_func

    def attend(q, k, v, config):
        return flash_attn_func(q, k, v, config=config if isinstance(config, Config) else Config(tile_n=config))

    def compiled(q, k, v, tile_n):
        if made == "before":
            config = Config(tile_n=tile_n)
            return torch.compile(lambda q, k, v: attend(q, k, v, config), fullgraph=True, backend=counter)(q, k, v)
        config = Config(tile_n=tile_n) if made == "outside" else tile_n
        return torch.compile(attend, fullgraph=True, backend=counter)(q, k, v, config)

    tensors = qkv(70, requires_grad=False)
    expected = {tile_n: attend(*tensors, tile_n) for tile_n in (32, 64, 128)}
    assert not torch.equal(expected[32], expected[128]), "they round differently: the test can tell them apart"
    for tile_n in (32, 128, 64, 32):
        assert torch.equal(compiled(*tensors, tile_n), expected[tile_n])


def test_a_compiled_call_refuses_too(counter):
    import fa2
    import fa3

    def attend(q, k, v, **arguments):
        return fa3.flash_attn_func(q, k, v, **arguments)

    compiled = torch.compile(attend, backend=counter)
    q, k, v = qkv(requires_grad=False)
    with pytest.raises(TypeError, match=r"must be a fa3.Config; got a fa2.Config"):
        compiled(q, k, v, config=fa2.Config())
    with pytest.raises(ValueError, match="at least 0, or None"):
        compiled(q, k, v, window_size=(-5, 3))
    with pytest.raises(UnsupportedProblem, match="not float32"):
        compiled(q.float(), k.float(), v.float())


# ---- Autograd


@every_version
def test_a_backward_that_no_kernel_has_is_refused_while_compiling(version):
    """Where shapes are propagated, before anything runs."""
    operators = getattr(torch.ops, version)
    values = (None, False, None, None, 0.0, False, "", *NO_SEQUENCES)
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = operators.forward(q, q, q, *values)
        assert (out.shape, out.device, lse.shape, lse.dtype) == (q.shape, q.device, (2, 4, 9), torch.float32)
        if import_module(version).CAPABILITIES.backward:
            operators.backward(out, lse, q, q, q, out, lse, *values)
        else:
            with pytest.raises(UnsupportedProblem, match=f"{version} cannot run this problem: .*no backward kernel"):
                operators.backward(out, lse, q, q, q, out, lse, *values)


def test_a_second_derivative_is_refused():
    from fa3 import flash_attn_func

    q, k, v = qkv()
    out = flash_attn_func(q, k, v)
    [dq] = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"fa3\.backward"):
        dq.float().sum().backward()


@pytest.mark.parametrize("needy", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_for_some_inputs_only(needy):
    from fa3 import flash_attn_func

    every = qkv()
    _, _, *expected = with_gradients(lambda *x: flash_attn_func(*x, return_lse=True), every)
    some = [x.detach().requires_grad_(i in needy) for i, x in enumerate(every)]
    out, lse = flash_attn_func(*some, return_lse=True)
    weights = torch.linspace(-1, 1, lse.numel()).view(lse.shape)
    (out.float().square().sum() + (weights * lse).sum()).backward()
    for i, x in enumerate(some):
        assert (x.grad is None) == (i not in needy)
        assert x.grad is None or torch.equal(x.grad, expected[i])
