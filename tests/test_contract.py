"""The contract, the same for every generation, on a CPU: values, gradients, shapes, views, refusals.

Numbers like FA#1778 name the public report of an input that broke an attention kernel.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa
from fa_common import reference
from fa_common.problem import UnsupportedProblem

VERSIONS = ("fa1", "fa2", "fa3")
every_version = pytest.mark.parametrize("version", VERSIONS)


@dataclass(frozen=True)
class Case:
    """One call: its sizes and its mask."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 16
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16

    def tensors(self):
        q = torch.randn(self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        k, v = torch.randn(2, self.batch, self.seqlen_k, self.heads_kv, self.head_dim)
        return tuple(x.to(self.dtype).requires_grad_() for x in (q, k, v))

    @property
    def options(self):
        return {"causal": self.causal, "window_size": self.window_size, "softcap": self.softcap}


CASES = {
    "full": Case(33, 47),
    "causal": Case(150, 150, causal=True),
    "float16": Case(33, 47, causal=True, dtype=torch.float16),
    "one of each": Case(1, 1, causal=True),
    "one query": Case(1, 131, 6, 1, causal=True),
    "one key": Case(65, 1, causal=True),
    "bottom-right, more keys, FA#436": Case(2, 5, causal=True),
    "bottom-right, fewer keys, FA#436": Case(5, 2, causal=True),
    "bottom-right, one key more, FA#436": Case(5, 6, causal=True),
    "rows without keys, FA#1778": Case(70, 34, causal=True),
    "window without keys, FA#2199": Case(129, 16, window_size=(32, 64)),
    "window": Case(70, 90, window_size=(9, 4)),
    "window by -1": Case(70, 90, window_size=(-1, 4)),
    "causal window": Case(70, 90, causal=True, window_size=(9, 30)),
    "softcap": Case(33, 47, softcap=2.0),
    "softcap and mask": Case(33, 47, causal=True, softcap=1.0),
    "GQA": Case(33, 47, 9, 3, causal=True),
    "MQA": Case(33, 47, 4, 1),
    "head_dim 8": Case(33, 47, head_dim=8),
    "head_dim 72": Case(33, 47, head_dim=72, causal=True),
    "head_dim 104": Case(33, 47, head_dim=104),
    "head_dim 256": Case(9, 11, head_dim=256),
}


def gradients_of(results, tensors, dout, dlse):
    return torch.autograd.grad(results, tensors, (dout, dlse))


def assert_close(results, expected, dtype):
    """Within a few roundings of the 16-bit type, relative to the largest value."""
    for x, exact in zip(results, expected, strict=True):
        assert x.shape == exact.shape
        assert torch.equal(x.isneginf(), exact.isneginf())
        x, exact = (torch.where(exact.isneginf(), 0.0, y.double()) for y in (x, exact))
        bound = 8 * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item() if exact.numel() else 0.0)
        error = (x - exact).abs().max().item() if x.numel() else 0.0
        assert error <= bound, f"error {error:.2e}, bound {bound:.2e}"


def check(version, tensors, options, dout=None):
    """out, LSE and the gradients of a loss on both, against float64."""
    results = fa.flash_attn_func(*tensors, version=version, return_lse=True, **options)
    dout = torch.randn_like(results[0]) if dout is None else dout
    dlse = torch.randn_like(results[1])
    gradients = gradients_of(results, tensors, dout, dlse)
    assert [x.dtype for x in (*results, *gradients)] == [tensors[0].dtype, torch.float32, *(x.dtype for x in tensors)]
    exact = [x.detach() for x in tensors]
    left, right = (None if bound == -1 else bound for bound in options.pop("window_size", (None, None)))
    expected = reference.attention(*exact, window=(left, right), **options)
    expected_gradients = reference.gradients(dout, *exact, window=(left, right), dlse=dlse, **options)
    assert_close((*results, *gradients), (*expected, *expected_gradients), tensors[0].dtype)
    return results


# ---- Values


@every_version
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(version, case):
    check(version, case.tensors(), case.options)


@every_version
@settings(max_examples=15, deadline=None)
@given(
    st.builds(
        Case,
        seqlen_q=st.integers(0, 20),
        seqlen_k=st.integers(0, 20),
        heads_q=st.sampled_from([2, 4]),
        heads_kv=st.sampled_from([1, 2]),
        head_dim=st.sampled_from([8, 24]),
        causal=st.booleans(),
        window_size=st.tuples(*2 * [st.one_of(st.none(), st.integers(-1, 22))]),
        softcap=st.sampled_from([0.0, 3.0]),
        batch=st.integers(0, 2),
        dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    )
)
def test_values_and_gradients_of_whatever_shape(version, case):
    check(version, case.tensors(), case.options)


@every_version
def test_softmax_scale(version):
    check(version, Case(33, 47).tensors(), {"softmax_scale": 0.01})


@every_version
def test_a_window_of_everything_before_is_causal(version):
    """FA#1133."""
    tensors = Case(50, 50).tensors()
    causal = fa.flash_attn_func(*tensors, version=version, causal=True)
    assert torch.equal(fa.flash_attn_func(*tensors, version=version, window_size=(49, 0)), causal)


@every_version
def test_lse_is_the_natural_logarithm_of_the_sum(version):
    """pytorch#181645."""
    q, k, v = Case(3, 20).tensors()
    _, lse = fa.flash_attn_func(0 * q, k, v, version=version, return_lse=True)
    torch.testing.assert_close(lse, torch.full((2, 2, 3), 20.0).log())


@every_version
def test_rows_without_keys(version):
    """FA#1778: out 0, LSE -inf, gradients 0, also for a loss on LSE."""
    tensors = Case(5, 2, causal=True).tensors()
    out, lse = fa.flash_attn_func(*tensors, version=version, causal=True, return_lse=True)
    assert not out[:, :3].any()
    assert lse[..., :3].isneginf().all()
    assert lse[..., 3:].isfinite().all()
    dq, dk, dv = gradients_of((out, lse), tensors, torch.ones_like(out), torch.ones_like(lse))
    assert not dq[:, :3].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@every_version
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)], ids=str)
def test_empty(version, shape):
    """FA#2470, FA#2515, FA#1159: forward and backward."""
    batch, seqlen_q, seqlen_k = shape
    tensors = Case(seqlen_q, seqlen_k, batch=batch).tensors()
    out, lse = fa.flash_attn_func(*tensors, version=version, causal=True, return_lse=True)
    assert torch.equal(out, torch.zeros_like(tensors[0]))
    assert torch.equal(lse, torch.full((batch, 2, seqlen_q), -torch.inf))
    for gradient in gradients_of((out, lse), tensors, torch.ones_like(out), torch.ones_like(lse)):
        assert not gradient.any()


@every_version
def test_a_loss_on_lse_alone(version):
    """FA#1817, FA#889: the gradient of LSE by the scores is P, so that of q is P K, attention with K for V."""
    q, k, v = Case(20, 30).tensors()
    _, lse = fa.flash_attn_func(q, k, v, version=version, causal=True, softmax_scale=0.5, return_lse=True)
    lse.sum().backward()
    with torch.no_grad():
        expected, _ = reference.attention(q, k, k, causal=True, softmax_scale=0.5)
    assert_close([q.grad], [0.5 * expected], torch.bfloat16)
    assert not v.grad.any()


@every_version
def test_a_sequence_does_not_depend_on_its_batch(version):
    """FA#1897."""
    q, k, v = Case(40, 40, batch=8).tensors()
    out, lse = fa.flash_attn_func(q, k, v, version=version, return_lse=True)
    alone, lse_alone = fa.flash_attn_func(q[3:4], k[3:4], v[3:4], version=version, return_lse=True)
    assert torch.equal(alone[0], out[3])
    assert torch.equal(lse_alone[0], lse[3])


# ---- Views


def projection(q, k, v):
    return torch.stack((q, k, v), dim=2).unbind(2)


def heads_before_seqlen(q, k, v):
    return q, k.transpose(1, 2).contiguous().transpose(1, 2), v


def expanded_batch(q, k, v):
    return q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)


def off_by_one(q, k, v):
    return tuple(x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for x in (q, k, v))


def transposed_head_dim(q, k, v):
    return q.mT.contiguous().mT, k, v


def inside_nan(q, k, v):
    return tuple(x.new_full((2, 60, 4, 32), torch.nan)[:, :40, :2, :16].copy_(x) for x in (q, k, v))


@every_version
@pytest.mark.parametrize(
    "view", [projection, heads_before_seqlen, expanded_batch, off_by_one, transposed_head_dim, inside_nan]
)
def test_views_of_the_inputs(version, view):
    """FA#2541, FA#818, FA#2745; FA#1745: a cache longer than its sequence."""
    tensors = [x.detach() for x in Case(40, 40).tensors()]
    views = [x.detach().requires_grad_() for x in view(*tensors)]
    out, _ = check(version, views, {"causal": True})
    copies = (x.detach().clone(memory_format=torch.contiguous_format) for x in views)
    assert torch.equal(fa.flash_attn_func(*copies, version=version, causal=True), out)


@every_version
@pytest.mark.parametrize("view", ["of a sum", "transposed", "of a larger tensor"])
def test_views_of_dout(version, view):
    """FA#325, FA#355, FA#1149, FA#91; with MQA."""
    tensors = Case(20, 30, 4, 1).tensors()
    shape = tensors[0].shape
    if view == "of a sum":
        dout = torch.ones((), dtype=torch.bfloat16).expand(shape)
    elif view == "transposed":
        dout = torch.randn(2, 16, 4, 20).bfloat16().permute(0, 3, 2, 1)
    else:
        dout = torch.full((2, 50, 5, 40), torch.nan).bfloat16()[:, :20, :4, :16]
        dout.copy_(torch.randn(shape))
    check(version, tensors, {}, dout)


# ---- Packed sequences


def packed(lengths_q, lengths_k, heads_q=2, heads_kv=2, head_dim=16, scale=1.0):
    """q, k, v and the arguments that describe their sequences."""
    q = torch.randn(sum(lengths_q), heads_q, head_dim)
    k, v = torch.randn(2, sum(lengths_k), heads_kv, head_dim)
    cu_seqlens = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    tensors = tuple((scale * x).bfloat16().requires_grad_() for x in (q, k, v))
    return tensors, (*cu_seqlens, max(lengths_q), max(lengths_k))


PACKED = {
    "FA#443": ([76, 34, 146], [1, 1, 1], {"heads_q": 1, "heads_kv": 1, "head_dim": 32, "scale": 3.0}),
    "FA#1537": ([1, 0, 1], [3, 0, 5], {"heads_q": 9, "heads_kv": 3, "head_dim": 64}),
    "FA#1619": ([0, 0, 0, 1], [0, 0, 0, 1], {"heads_q": 21, "heads_kv": 7, "head_dim": 120}),
    "FA#1713": ([15, 0, 15], [10, 10, 10], {}),
    "FA#1155": ([5, 9, 3], [0, 64, 0], {}),
    "FA#1254": ([0, 0, 103], [1, 0, 205], {"head_dim": 128}),
    "FA#2391": ([1] * 40, [1, 2] * 20, {}),
    "no sequence": ([], [], {}),
}


@every_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("lengths_q", "lengths_k", "sizes"), PACKED.values(), ids=PACKED)
def test_packed_sequences_are_what_each_is_alone(version, lengths_q, lengths_k, sizes, causal):
    if not lengths_q:
        tensors, sequences = packed([0], [0])
        sequences = (sequences[0][:1], sequences[1][:1], 0, 0)
    else:
        tensors, sequences = packed(lengths_q, lengths_k, **sizes)
    q, k, v = tensors
    out, lse = fa.flash_attn_varlen_func(
        *tensors, *sequences, version=version, causal=causal, softcap=20.0, return_lse=True
    )
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (q.shape[1], q.shape[0]), torch.float32)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = gradients_of((out, lse), tensors, dout, dlse)
    start_q = start_k = 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        queries, keys = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
        start_q, start_k = queries.stop, keys.stop
        alone = [x[rows][None].detach() for x, rows in ((q, queries), (k, keys), (v, keys))]
        expected_out, expected_lse = reference.attention(*alone, causal=causal, softcap=20.0)
        expected = reference.gradients(
            dout[queries][None], *alone, causal=causal, softcap=20.0, dlse=dlse[None, :, queries]
        )
        dq, dk, dv = gradients
        results = (out[queries], lse[:, queries], dq[queries], dk[keys], dv[keys])
        assert_close(results, [x[0] for x in (expected_out, expected_lse, *expected)], torch.bfloat16)


@every_version
def test_keys_of_a_sequence_without_queries_get_exact_zeros(version):
    """FA#1713."""
    tensors, sequences = packed([15, 0, 15], [10, 10, 10])
    out = fa.flash_attn_varlen_func(*tensors, *sequences, version=version)
    _, dk, dv = torch.autograd.grad(out, tensors, torch.ones_like(out))
    for gradient in (dk, dv):
        assert not gradient[10:20].any()
        assert gradient[:10].any()


@every_version
def test_nothing_leaks_from_one_packed_sequence_into_another(version):
    """FA#1745: NaN in the middle one."""
    tensors, sequences = packed([15, 5, 15], [10, 20, 10])
    with torch.no_grad():
        expected = fa.flash_attn_varlen_func(*tensors, *sequences, version=version, causal=True)
        for x, rows in zip(tensors, (slice(15, 20), slice(10, 30), slice(10, 30)), strict=True):
            x[rows] = torch.nan
        out = fa.flash_attn_varlen_func(*tensors, *sequences, version=version, causal=True)
    assert out[15:20].isnan().all()
    for rows in (slice(0, 15), slice(20, 35)):
        assert torch.equal(out[rows], expected[rows])


@every_version
def test_every_output_element_is_written_and_nothing_else(version):
    """FA#1155."""
    tensors, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) = packed([5, 9, 3], [0, 64, 0])
    canary = torch.full((17 + 10, 2, 16), 7.0).bfloat16()
    lse = torch.full((2, 17), 7.0)
    import_module(version).forward(
        *tensors,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        out=canary[5:-5],
        lse=lse,
    )
    assert (canary[:5] == 7).all()
    assert (canary[-5:] == 7).all()
    assert not canary[5:10].any()
    assert not canary[19:22].any()
    assert lse[:, :5].isneginf().all()
    assert lse[:, 5:14].isfinite().all()
    assert lse[:, 14:].isneginf().all()


# ---- The raw calls


@every_version
def test_forward_and_backward_without_autograd(version):
    module = import_module(version)
    tensors = Case(33, 47, 4, 2).tensors()
    expected = module.flash_attn_func(*tensors, causal=True, return_lse=True)
    out, lse = module.forward(*tensors, causal=True)
    assert not out.requires_grad
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = module.backward(dout, *tensors, out, lse, dlse=dlse, causal=True)
    for gradient, exact in zip(gradients, gradients_of(expected, tensors, dout, dlse), strict=True):
        assert torch.equal(gradient, exact)


@every_version
def test_forward_writes_into_given_tensors(version):
    tensors = Case(33, 47).tensors()
    out, lse = torch.empty(2, 2, 33, 16).bfloat16().transpose(1, 2), torch.empty(2, 2, 33)
    results = import_module(version).forward(*tensors, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert torch.equal(out, fa.flash_attn_func(*tensors, version=version))


@every_version
def test_the_tiles_of_a_config_change_the_rounding_only(version):
    tensors = Case(90, 90).tensors()
    config_type = import_module(version).Config
    out = fa.flash_attn_func(*tensors, version=version, config=config_type(tile_n=64), causal=True)
    expected, _ = reference.attention(*(x.detach() for x in tensors), causal=True)
    assert_close([out], [expected], torch.bfloat16)


# ---- Signatures and refusals

FP8_ARGUMENTS = ("descale_q", "descale_k", "descale_v", "out_dtype")  # of fa3's functions


def contract_signature(function):
    """A function's signature without what is fa3's alone."""
    signature = inspect.signature(function)
    shared = [parameter for name, parameter in signature.parameters.items() if name not in FP8_ARGUMENTS]
    return signature.replace(parameters=shared)


def test_every_generation_has_the_same_functions():
    modules = [import_module(version) for version in VERSIONS]
    only_fa3 = {"flash_attn_with_kvcache", "Quantized", "flash_attn_fp8_func", "quantize"}
    *others, newest = (set(module.__all__) for module in modules)
    assert all(names == newest - only_fa3 for names in others)
    assert only_fa3 <= newest
    for name in ("flash_attn_func", "flash_attn_varlen_func", "forward", "backward"):
        assert len({str(contract_signature(getattr(module, name))) for module in modules}) == 1


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_the_front_door_adds_the_version_alone(name):
    own = contract_signature(getattr(import_module("fa3"), name)).parameters
    front = dict(inspect.signature(getattr(fa, name)).parameters)
    assert front.pop("version").default == "auto"
    assert front == dict(own)
    kinds = [parameter.kind for parameter in front.values()]
    tensors = 3 if name == "flash_attn_func" else 7
    assert set(kinds[tensors:]) == {inspect.Parameter.KEYWORD_ONLY}


@every_version
@pytest.mark.parametrize("name", ["dropout_p", "alibi_slopes", "sinks", "attention_mask", "attn_mask", "block_table"])
@pytest.mark.parametrize("door", ["fa", "generation"])
def test_what_does_not_exist_is_named(version, name, door):
    """FA#1251, FA#1666, FA#1895."""
    call = fa.flash_attn_func if door == "fa" else import_module(version).flash_attn_func
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        call(*Case(5, 7).tensors(), **{name: 0.0})


@every_version
def test_no_fourth_positional_argument(version):
    """Elsewhere it is dropout_p: it must not become a softmax_scale."""
    with pytest.raises(TypeError, match="positional arguments"):
        import_module(version).flash_attn_func(*Case(5, 7).tensors(), 0.1)
    with pytest.raises(TypeError, match="positional arguments"):
        fa.flash_attn_func(*Case(5, 7).tensors(), 0.1)


@every_version
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_dim": 59}, UnsupportedProblem, "multiple of 8 up to 256; got 59"),  # FA#1238
        ({"head_dim": 264}, UnsupportedProblem, "multiple of 8 up to 256; got 264"),
        ({"dtype": torch.float32}, UnsupportedProblem, "float16 or bfloat16, not float32"),
        ({"dtype": torch.float64}, UnsupportedProblem, "float16 or bfloat16, not float64"),
        ({"dtype": torch.float8_e5m2}, UnsupportedProblem, "float16 or bfloat16, not float8_e5m2"),
        ({"heads_q": 5, "heads_kv": 2}, ValueError, r"multiple .* got 5 and 2; .*transpose\(1, 2\)"),  # FA#1391
        ({"window_size": (4, -2)}, ValueError, r"got \(4, -2\)"),  # FA#1116
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ],
    ids=str,
)
@pytest.mark.parametrize("door", ["fa", "generation"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no gradient", "gradient"])
def test_refusals_say_why(version, change, error, message, door, requires_grad):
    case = Case(5, 7, **change)
    tensors = [x.detach().requires_grad_(requires_grad) for x in case.tensors()]
    call = fa.flash_attn_func if door == "fa" else import_module(version).flash_attn_func
    with pytest.raises(error, match=message):
        call(*tensors, **case.options, **({"version": version} if door == "fa" else {}))


@every_version
@pytest.mark.parametrize("door", ["fa", "generation"])
def test_a_config_of_another_generation_is_named(version, door):
    other = VERSIONS[VERSIONS.index(version) - 1]
    arguments = {"config": import_module(other).Config()} | ({"version": version} if door == "fa" else {})
    call = fa.flash_attn_func if door == "fa" else import_module(version).flash_attn_func
    for tensors in (Case(5, 7).tensors(), [x.detach() for x in Case(5, 7).tensors()]):
        with pytest.raises(TypeError, match=f"config must be a {version}.Config; got a {other}.Config"):
            call(*tensors, **arguments)
