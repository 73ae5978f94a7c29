"""What stands between a call and its kernel: here the kernel is a Python function, and CPU tensors pass for a GPU's."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

import fa_common.generation as generation_module
from fa2 import algorithm
from fa_common import reference
from fa_common.capabilities import Capabilities
from fa_common.generation import ALIGNMENT, Generation, LaunchShape
from fa_common.problem import Problem, UnsupportedProblem

CPU_INDEX = -1  # what get_device() says of a CPU tensor


@dataclass(frozen=True)
class Config:
    tile_m: int = 16
    tile_n: int = 16


@dataclass(frozen=True)
class OtherConfig:
    tile_m: int = 16
    tile_n: int = 16


def launch(kernel, q, k, v, out, lse, softmax_scale):
    kernel(q, k, v, out, lse, softmax_scale)


STUB = Generation(
    name="stub",
    config_type=Config,
    default_config=lambda problem: Config(tile_n=8 * problem.group),
    capabilities=Capabilities(
        archs=(90,),
        dtypes=("float16", "bfloat16"),
        head_dims=(16,),
        varlen=False,
        window=False,
        softcap=False,
        backward=False,
    ),
    algorithm=algorithm,
    build_forward=lambda key, options: None,
    launch_forward=launch,
    shape_forward=lambda problem, config: LaunchShape((1, problem.heads_q, problem.batch), 128),
)


class Gpu:
    """Stands in for the GPU: makes kernels that compute by the reference, and keeps what they were given."""

    def __init__(self):
        self.keys = []  # of the kernels loaded
        self.launches = []  # the tensors of each launch
        self.devices = []  # that were made current for a launch

    def load(self, key, build):
        self.keys.append(key)

        @torch.no_grad()
        def kernel(q, k, v, out, lse, softmax_scale):
            self.launches.append((q, k, v, out, lse))
            exact = reference.attention(q, k, v, softmax_scale=softmax_scale, causal=key.causal)
            out.copy_(exact[0])
            lse.copy_(exact[1])

        return kernel

    @contextmanager
    def device(self, index):
        self.devices.append(index)
        yield


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    from_tensors = Problem.from_tensors

    def from_tensors_on_gpu(*tensors, **arguments):
        return replace(from_tensors(*tensors, **arguments), device="cuda", arch=90)

    monkeypatch.setattr(Problem, "from_tensors", from_tensors_on_gpu)
    monkeypatch.setattr(generation_module, "load", gpu.load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU_INDEX)
    monkeypatch.setattr(torch.cuda, "device", gpu.device)
    STUB._runs.clear()
    yield gpu
    STUB._runs.clear()


def qkv(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_kv=2, head_dim=16):
    q = torch.randn(batch, seqlen_q, heads_q, head_dim).half()
    k, v = torch.randn(2, batch, seqlen_k, heads_kv, head_dim).half()
    return q, k, v


def assert_exact(results, tensors, **options):
    """That float16 results are the reference's, but for a few roundings."""
    expected = reference.attention(*tensors, **options)
    torch.testing.assert_close(results[0].double(), expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(results[1].double(), expected[1], rtol=1e-6, atol=1e-6)


def misaligned(x):
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


# ---- The way to the kernel


def test_a_call_launches_its_kernel(gpu):
    q, k, v = qkv()
    out, lse = STUB.flash_attn_func(q, k, v, causal=True, softmax_scale=0.5, return_lse=True)
    assert_exact((out, lse), (q, k, v), causal=True, softmax_scale=0.5)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 5), torch.float32)
    [key] = gpu.keys
    assert (key.version, key.direction, key.arch) == ("stub", "forward", "sm_90a")
    assert (key.dtype, key.head_dim, key.causal, key.config) == ("float16", 16, True, Config(tile_n=16))
    assert gpu.devices == [], "the device of the tensors is the current one already"
    assert torch.equal(STUB.flash_attn_func(q, k, v, causal=True, softmax_scale=0.5), out)


def test_a_kernel_is_chosen_once_for_calls_alike(gpu):
    for _ in range(3):
        STUB.forward(*qkv())
    assert len(gpu.keys) == 1
    assert len(gpu.launches) == 3
    q, k, v = qkv()
    for i, arguments in enumerate(({"causal": True}, {"softmax_scale": 0.1}, {"config": Config(8, 8)}), start=2):
        STUB.forward(q, k, v, **arguments)
        assert len(gpu.keys) == i
    STUB.forward(q[:1], k[:1], v[:1])
    STUB.forward(*qkv(seqlen_k=8))
    assert len(gpu.keys) == 6


def test_the_memory_of_choices_is_bounded(gpu, monkeypatch):
    monkeypatch.setattr(generation_module, "MAX_RUNS", 3)
    for seqlen in range(1, 9):
        tensors = qkv(seqlen_q=seqlen)
        assert_exact(STUB.forward(*tensors), tensors)
        assert len(STUB._runs) <= 3


def test_a_given_config_is_what_is_compiled(gpu):
    STUB.flash_attn_func(*qkv(), config=Config(32, 64))
    assert gpu.keys[0].config == Config(32, 64)


def test_on_another_device_than_the_current_one_that_becomes_current(gpu, monkeypatch):
    """FA#54, FA#1782."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    tensors = qkv()
    assert_exact(STUB.forward(*tensors), tensors)
    assert gpu.devices == [CPU_INDEX]


@pytest.mark.parametrize("lengths", [(2, 0, 7), (2, 5, 0), (0, 5, 7)], ids=["no queries", "no keys", "no batch"])
def test_without_a_score_nothing_is_launched(gpu, lengths):
    batch, seqlen_q, seqlen_k = lengths
    out, lse = STUB.forward(*qkv(batch, seqlen_q, seqlen_k))
    assert torch.equal(out, torch.zeros(batch, seqlen_q, 4, 16, dtype=torch.float16))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))
    assert gpu.keys == []


# ---- Views

READABLE = {
    "contiguous": lambda x: x,
    "projection": lambda x: torch.stack((x, x), dim=2)[:, :, 1],
    "heads before seqlen": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "wider head_dim": lambda x: torch.cat((x, x), dim=-1)[..., :16],
    "expanded batch": lambda x: x[:1].expand(2, -1, -1, -1),
}
UNREADABLE = {
    "transposed head_dim": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every other column": lambda x: torch.stack((x, x), dim=-1)[..., 0],
    "rows of 17": lambda x: torch.cat((x, x), dim=-1)[..., :17].contiguous()[..., :16],
    "expanded head_dim": lambda x: x[..., :1].expand(-1, -1, -1, 16),
    "off by one": misaligned,
}


@pytest.mark.parametrize("position", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("view", [*READABLE, *UNREADABLE])
def test_only_what_no_kernel_can_read_is_copied(gpu, view, position):
    """FA#2541, FA#818, FA#2745: never misread."""
    tensors = list(qkv())
    tensors[position] = (READABLE | UNREADABLE)[view](tensors[position])
    assert_exact(STUB.forward(*tensors), tensors)
    launched = gpu.launches[0][:3]
    copied = [x.data_ptr() != given.data_ptr() for x, given in zip(launched, tensors, strict=True)]
    assert copied == [view in UNREADABLE and i == position for i in range(3)]
    for x in launched:
        assert x.data_ptr() % ALIGNMENT == 0
        assert x.stride(-1) == 1
        assert all(stride * 2 % ALIGNMENT == 0 for stride in x.stride()[:-1])


def test_alignment_is_looked_at_in_each_call(gpu):
    q, k, v = qkv()
    STUB.forward(q, k, v)
    STUB.forward(misaligned(q), k, v)
    assert len(gpu.keys) == 1, "same shapes and strides"
    assert gpu.launches[1][0].data_ptr() % ALIGNMENT == 0


def test_a_stride_that_no_element_uses_is_repaired_too(gpu):
    q, k, v = qkv(batch=1)
    q = q.as_strided(q.shape, (3, *q.stride()[1:]))
    assert_exact(STUB.forward(q, k, v), (q, k, v))
    assert gpu.launches[0][0].stride(0) % 8 == 0


# ---- Outputs


def test_given_outputs_are_written(gpu):
    q, k, v = qkv()
    out, lse = torch.empty(2, 4, 5, 16, dtype=q.dtype).transpose(1, 2), torch.empty(2, 4, 5)
    results = STUB.forward(q, k, v, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert_exact(results, (q, k, v))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"out": torch.empty(2, 5, 4, 8).half()}, r"out must be torch.float16 of shape \(2, 5, 4, 16\) on cpu; got"),
        ({"out": torch.empty(2, 5, 4, 16)}, "out must be torch.float16 .* got torch.float32"),
        ({"out": torch.empty(2, 5, 16, 4).half().mT}, "out must have a last stride of 1"),
        ({"out": torch.empty(2, 5, 4, 17).half()[..., :16]}, "positive multiples of 16 bytes"),
        ({"out": torch.empty(1, 5, 4, 16).half().expand(2, 5, 4, 16)}, "positive multiples of 16 bytes"),
        ({"out": misaligned(torch.empty(2, 5, 4, 16).half())}, "out must be aligned to 16 bytes"),
        ({"lse": torch.empty(2, 5, 4)}, r"lse must be torch.float32 of shape \(2, 4, 5\)"),
        ({"lse": torch.empty(2, 4, 5).half()}, "lse must be torch.float32"),
        ({"lse": torch.empty(2, 5, 4).mT}, "lse must be contiguous"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(gpu, outputs, message):
    with pytest.raises(ValueError, match=message):
        STUB.forward(*qkv(), **outputs)
    assert gpu.launches == []


# ---- Refusals

LACKING = {
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 30.0},
}


@pytest.mark.parametrize("argument", LACKING.values(), ids=LACKING)
def test_what_the_kernels_lack_is_refused_by_name(gpu, argument):
    [name] = argument
    with pytest.raises(UnsupportedProblem, match=f"stub cannot run this problem: .*{name.removesuffix('_size')}"):
        STUB.flash_attn_func(*qkv(), **argument)


def test_a_head_dim_without_a_kernel_is_refused(gpu):
    with pytest.raises(UnsupportedProblem, match="kernels for head_dim 16 and none yet for 24"):
        STUB.forward(*qkv(head_dim=24))


def test_packed_sequences_are_refused(gpu):
    q, k, v = (x.flatten(0, 1) for x in qkv(seqlen_k=5))
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32)
    with pytest.raises(UnsupportedProblem, match="no varlen kernel yet"):
        STUB.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 5, 5)


@pytest.mark.parametrize("needy", [0, 1, 2])
def test_a_gradient_that_no_kernel_computes_is_refused_at_the_call(gpu, needy):
    tensors = qkv()
    tensors[needy].requires_grad_()
    with pytest.raises(UnsupportedProblem, match=r"no backward kernel yet: call under torch.no_grad\(\) or detach\(\)"):
        STUB.flash_attn_func(*tensors)
    with torch.no_grad():
        assert_exact(STUB.flash_attn_func(*tensors, return_lse=True), tensors)
    assert_exact(STUB.flash_attn_func(*(x.detach() for x in tensors), return_lse=True), tensors)
    out, lse = STUB.forward(*tensors)
    assert not out.requires_grad, "forward is outside autograd"
    with pytest.raises(UnsupportedProblem, match="no backward kernel yet"):
        STUB.backward(out, *tensors, out, lse)


def test_a_config_of_another_type_is_named(gpu):
    with pytest.raises(TypeError, match=r"must be a tests.Config; got a tests.OtherConfig; leave it out for stub's"):
        STUB.flash_attn_func(*qkv(), config=OtherConfig())
    with pytest.raises(TypeError, match=r"got a builtins.dict"):
        STUB.flash_attn_func(*qkv(), config={"tile_m": 16})


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [(0, [1.0], "q must be a torch.Tensor; got list"), (2, None, "v must be a torch.Tensor; got NoneType")],
)
@pytest.mark.parametrize("call", [STUB.flash_attn_func, STUB.forward], ids=["flash_attn_func", "forward"])
def test_what_is_no_tensor_is_named(gpu, call, position, wrong, message):
    tensors = list(qkv())
    tensors[position] = wrong
    with pytest.raises(TypeError, match=message):
        call(*tensors)


def test_what_cannot_be_hashed_is_named(gpu):
    with pytest.raises(TypeError, match="window_size must be a tuple"):
        STUB.flash_attn_func(*qkv(), window_size=[1, 1])


# ---- On a CPU


def test_first_calls_from_many_threads_agree():
    """FA#637."""
    STUB._runs.clear()
    tensors = qkv()
    results, start = [], threading.Barrier(8)

    def call():
        start.wait()
        results.append(STUB.flash_attn_func(*tensors, causal=True, return_lse=True))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert_exact(results[0], tensors, causal=True)
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": torch.zeros(2, 5, 4, 16)}, "dout must be torch.float16"),
        ({"out": torch.zeros(2, 5, 4, 8).half()}, "out must be torch.float16 of shape"),
        ({"lse": torch.zeros(2, 5, 4)}, r"lse must be torch.float32 of shape \(2, 4, 5\)"),
        ({"dlse": torch.zeros(2, 4, 5).half()}, "dlse must be torch.float32"),
    ],
)
def test_backward_checks_what_it_is_given(change, message):
    q, k, v = qkv()
    out, lse = STUB.forward(q, k, v)
    arguments = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    with pytest.raises(ValueError, match=message):
        STUB.backward(**arguments | change)
