"""Between a gradient and its kernel: here the kernel is a Python function, and CPU tensors pass for a GPU's."""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import fa_common.generation as generation_module
from fa2 import algorithm
from fa_common import reference
from fa_common.capabilities import Capabilities
from fa_common.generation import ALIGNMENT, Generation, LaunchShape, num_query_tiles
from fa_common.problem import Problem, UnsupportedProblem


@dataclass(frozen=True)
class Config:
    tile_m: int = 16
    tile_n: int = 16


@dataclass(frozen=True)
class BackwardConfig:
    tile_m: int = 16
    tile_n: int = 32


def bind_forward(kernel, problem, config, num_sms):
    def launch(q, k, v, out, lse, *_):
        exact = reference.attention(q, k, v, **mathematics(problem))
        out.copy_(exact[0])
        lse.copy_(exact[1])

    return launch


def bind_backward(kernel, problem, config, num_sms):
    return lambda *tensors: kernel(problem, config, *tensors)


def make_generation(name, **kernels):
    return Generation(
        name=name,
        config_type=Config,
        default_config=lambda problem: Config(),
        capabilities=Capabilities(
            archs=(90,),
            dtypes=("float16", "bfloat16"),
            head_dims=(16,),
            varlen=True,
            window=True,
            softcap=True,
            backward=True,
        ),
        algorithm=algorithm,
        build_forward=lambda key, options: None,
        bind_forward=bind_forward,
        shape_forward=lambda problem, config, num_sms: LaunchShape((1, 1, 1), 128),
        **kernels,
    )


SLOPE = make_generation(
    "slope",
    backward_config_type=BackwardConfig,
    default_backward_config=lambda problem: BackwardConfig(tile_m=32),
    build_backward=lambda key, options: None,
    bind_backward=bind_backward,
)


def mathematics(problem):
    return {name: getattr(problem, name) for name in ("softmax_scale", "causal", "window", "softcap")}


class Gpu:
    """Stands in for the GPU: makes kernels that compute by the reference, and keeps what they were given."""

    def __init__(self):
        self.keys = []  # of the kernels loaded
        self.saved = []  # of each launch of a backward

    def load(self, key, build):
        self.keys.append(key)

        def kernel(problem, config, saved, gradients, cu_seqlens_q, cu_seqlens_k):
            self.saved.append(saved)
            for x in (*saved[:5], *gradients):
                assert x.stride(-1) == 1
                assert not any(stride * x.itemsize % ALIGNMENT for stride in x.stride()[:-1])
                assert x.data_ptr() % ALIGNMENT == 0
            assert saved.lse.is_contiguous()
            assert saved.dlse is None or saved.dlse.is_contiguous()
            options = mathematics(problem)
            if cu_seqlens_q is None:
                exact = reference.gradients(*saved[:4], dlse=saved.dlse, **options)
                for gradient, values in zip(gradients, exact, strict=True):
                    gradient.copy_(values)
                return
            bounds = (pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
            for queries, keys in zip(*bounds, strict=True):
                queries, keys = slice(*queries), slice(*keys)
                slices = (queries, queries, keys, keys)
                tensors = [x[None, run] for x, run in zip(saved[:4], slices, strict=True)]
                exact = reference.gradients(*tensors, **options)
                for gradient, run, values in zip(gradients, slices[1:], exact, strict=True):
                    gradient[run] = values[0]

        return kernel


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    from_tensors = Problem.from_tensors

    def from_tensors_on_gpu(*tensors, **arguments):
        return replace(from_tensors(*tensors, **arguments), device="cuda", arch=90, seqlens=None)

    monkeypatch.setattr(Problem, "from_tensors", from_tensors_on_gpu)
    monkeypatch.setattr(generation_module, "load", gpu.load)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield gpu
    SLOPE._runs.clear()
    SLOPE._launches_backward.clear()


def qkv(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_kv=2):
    q = torch.randn(batch, seqlen_q, heads_q, 16).half()
    k, v = torch.randn(2, batch, seqlen_k, heads_kv, 16).half()
    return q, k, v


def assert_exact(gradients, dout, tensors, **options):
    expected = reference.gradients(dout, *tensors, **options)
    for gradient, tensor, values in zip(gradients, tensors, expected, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        torch.testing.assert_close(gradient.double(), values, rtol=2e-3, atol=2e-3)


def test_a_gradient_launches_its_kernel(gpu):
    tensors = [x.requires_grad_() for x in qkv()]
    out, lse = SLOPE.flash_attn_func(*tensors, causal=True, softcap=3.0, deterministic=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    assert_exact(gradients, dout, [x.detach() for x in tensors], causal=True, softcap=3.0, dlse=dlse)
    forward, backward = gpu.keys
    assert backward == replace(forward, direction="backward", config=BackwardConfig(tile_m=32), deterministic=True)
    assert not forward.deterministic


def test_a_kernel_is_chosen_once_for_gradients_alike(gpu):
    q, k, v = qkv()
    out, lse = SLOPE.forward(q, k, v)
    for _ in range(3):
        SLOPE.backward(out, q, k, v, out, lse)
    assert [key.direction for key in gpu.keys] == ["forward", "backward"]
    SLOPE.backward(out, q, k, v, out, lse, deterministic=True)
    assert len(gpu.keys) == 3


def test_either_config_is_taken(gpu):
    q, k, v = qkv()
    out, lse = SLOPE.forward(q, k, v)
    for config, expected in (
        (BackwardConfig(64, 64), BackwardConfig(64, 64)),
        (Config(64, 64), BackwardConfig(tile_m=32)),  # the forward's
        (None, BackwardConfig(tile_m=32)),
    ):
        gpu.keys.clear()
        SLOPE._launches_backward.clear()
        SLOPE.backward(out, q, k, v, out, lse, config=config)
        assert gpu.keys[0].config == expected
    with pytest.raises(TypeError, match=r"must be a tests.Config; got a builtins.dict"):
        SLOPE.backward(out, q, k, v, out, lse, config={})
    with pytest.raises(TypeError, match=r"must be a tests.Config; got a tests.BackwardConfig"):
        SLOPE.forward(q, k, v, config=BackwardConfig())


@pytest.mark.parametrize("view", ["expanded", "transposed", "slice", "off by one", "last stride"])
def test_a_dout_of_any_strides(gpu, view):
    """FA#325, FA#355, FA#1149, FA#91."""
    q, k, v = qkv()
    out, lse = SLOPE.forward(q, k, v)
    dout = torch.randn_like(out)
    if view == "expanded":
        dout = torch.ones((), dtype=out.dtype).expand(out.shape)
    elif view == "transposed":
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    elif view == "slice":
        dout = torch.randn(2, 5, 4, 19).half()[..., :16]
    elif view == "off by one":
        dout = dout.new_empty(dout.numel() + 1)[1:].view(dout.shape).copy_(dout)
    else:
        dout = dout.transpose(1, 3).contiguous().transpose(1, 3)
    assert_exact(SLOPE.backward(dout, q, k, v, out, lse), dout, (q, k, v))


def test_a_dlse_of_any_strides(gpu):
    q, k, v = qkv()
    out, lse = SLOPE.forward(q, k, v)
    dlse = torch.randn(2, 5, 4).mT
    gradients = SLOPE.backward(out, q, k, v, out, lse, dlse=dlse)
    assert_exact(gradients, out, (q, k, v), dlse=dlse)


def test_packed_sequences(gpu):
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in qkv(seqlen_k=5))
    cu_seqlens_q = torch.tensor([0, 3, 10], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 6, 10], dtype=torch.int32)
    key = SLOPE.backward_key(Problem(2, 7, 6, 4, 2, 16, varlen=True), BackwardConfig())
    assert (key.direction, key.sequences) == ("backward", "packed")
    dout = torch.randn_like(q)
    out, lse = torch.empty_like(q), torch.empty(4, 10)
    gradients = SLOPE.backward(
        dout,
        *(x.detach() for x in (q, k, v)),
        out.detach(),
        lse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=7,
        max_seqlen_k=6,
    )
    for queries, keys in ((slice(0, 3), slice(0, 6)), (slice(3, 10), slice(6, 10))):
        some = [x.detach()[None, run] for x, run in ((q, queries), (k, keys), (v, keys))]
        found = [x[None, run] for x, run in zip(gradients, (queries, keys, keys), strict=True)]
        assert_exact(found, dout[None, queries], some)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=str)
def test_without_any_score_nothing_is_launched(gpu, sizes):
    """FA#2470, FA#2515, FA#1159."""
    q, k, v = qkv(*sizes)
    out, lse = SLOPE.forward(q, k, v)
    for gradient, x in zip(SLOPE.backward(out, q, k, v, out, lse), (q, k, v), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))
    assert not gpu.keys


def test_on_a_cpu_the_backwards_tiles_are_the_algorithms():
    q, k, v = qkv(seqlen_q=40, seqlen_k=50)
    out, lse = SLOPE.forward(q, k, v)
    for config in (BackwardConfig(32, 16), Config(16, 32), None):
        assert_exact(SLOPE.backward(out, q, k, v, out, lse, config=config), out, (q, k, v))


def test_a_promise_of_gradients_needs_a_kernel():
    with pytest.raises(ValueError, match="promise's capabilities promise a backward kernel"):
        make_generation("promise")


def test_without_a_kernel_gradients_are_refused(gpu):
    import fa3

    if fa3.CAPABILITIES.backward:
        pytest.skip("fa3 has a backward kernel")
    q, k, v = (torch.zeros(1, 4, 1, 64).half() for _ in range(3))
    with pytest.raises(UnsupportedProblem, match="fa3 cannot run this problem: it has no backward kernel"):
        fa3.backward(q, q, k, v, q, torch.zeros(1, 1, 4))


@pytest.mark.parametrize("tile_m", [16, 64])
def test_no_tile_holds_queries_of_two_sequences(tile_m):
    lengths = [1, 0, 63, 64, 65, 0, 200, 7]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    taken = []
    for b, (start, end) in enumerate(pairwise(bounds)):
        first = (start + b * tile_m) // tile_m
        taken += range(first, first + -(-(end - start) // tile_m))
    assert len(set(taken)) == len(taken)
    problem = Problem(len(lengths), 200, 1, 1, 1, 64, varlen=True, total_q=bounds[-1], total_k=1)
    assert max(taken) < num_query_tiles(problem, tile_m)
    assert num_query_tiles(Problem(3, 65, 1, 1, 1, 64), 64) == 6
