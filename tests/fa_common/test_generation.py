"""What stands between a call and its kernel: here the kernel is a Python function, and CPU tensors pass for a GPU's."""

import functools
import threading
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import fa_common.generation as generation_module
from fa2 import algorithm
from fa_common import reference
from fa_common.capabilities import Capabilities
from fa_common.generation import ALIGNMENT, Generation, LaunchShape
from fa_common.problem import Problem, UnsupportedProblem


@dataclass(frozen=True)
class Config:
    tile_m: int = 16
    tile_n: int = 16


@dataclass(frozen=True)
class OtherConfig:
    tile_m: int = 16
    tile_n: int = 16


def bind(kernel, problem, config, num_sms):
    return functools.partial(kernel, problem, num_sms)


def make_generation(name, **capabilities):
    little = {"varlen": False, "window": False, "softcap": False, "backward": False}
    return Generation(
        name=name,
        config_type=Config,
        default_config=lambda problem: Config(tile_n=8 * problem.group),
        capabilities=Capabilities(
            archs=(90,), dtypes=("float16", "bfloat16"), head_dims=(16,), **little | capabilities
        ),
        algorithm=algorithm,
        build_forward=lambda key, options: None,
        bind_forward=bind,
        shape_forward=lambda problem, config, num_sms: LaunchShape((1, problem.heads_q, problem.batch), 128),
    )


STUB = make_generation("stub")
ABLE = make_generation("able", varlen=True, window=True, softcap=True)


class Gpu:
    """Stands in for the GPU: makes kernels that compute by the reference, and keeps what they were given."""

    def __init__(self):
        self.keys = []  # of the kernels loaded
        self.launches = []  # the tensors of each launch
        self.num_sms = []  # that each launch was bound to

    def load(self, key, build):
        self.keys.append(key)

        @torch.no_grad()
        def kernel(problem, num_sms, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k):
            refuse(key, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
            self.launches.append((q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k))
            self.num_sms.append(num_sms)
            mathematics = {name: getattr(problem, name) for name in ("softmax_scale", "causal", "window", "softcap")}
            if cu_seqlens_q is None:
                exact = reference.attention(q, k, v, **mathematics)
                out.copy_(exact[0])
                lse.copy_(exact[1])
                return
            bounds = (pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
            for queries, keys in zip(*bounds, strict=True):
                queries, keys = slice(*queries), slice(*keys)
                exact = reference.attention(q[None, queries], k[None, keys], v[None, keys], **mathematics)
                out[queries], lse[:, queries] = exact[0][0], exact[1][0]

        return kernel


def refuse(key, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k):
    """Raises ValueError where a compiled kernel does: nothing else stands between it and memory that is not there."""
    assert (cu_seqlens_q is None) == (cu_seqlens_k is None) == (key.sequences == "dense")
    *batch, seqlen, heads, _ = q.shape
    for x in (q, k, v, out):
        if (x.ndim, x.dtype, x.shape[-1]) != (q.ndim, getattr(torch, key.dtype), key.head_dim):
            raise ValueError("Mismatched Tensor")
        if x.data_ptr() % ALIGNMENT:
            raise ValueError("Misaligned Tensor data")
        # Strides of 0 pass, and any where there is one element.
        strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]
        if x.stride(-1) != 1 or any(stride * x.itemsize % ALIGNMENT for stride in strides[:-1]):
            raise ValueError("Invalid strides")
    if k.shape != v.shape or out.shape != q.shape or lse.shape != (*batch, heads, seqlen):
        raise ValueError("Mismatched shape")
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError("Mismatched Tensor")
    for x in (cu_seqlens_q, cu_seqlens_k):
        if x is not None and (x.dtype != torch.int32 or x.shape != cu_seqlens_q.shape or not x.is_contiguous()):
            raise ValueError("Mismatched Tensor")


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
    forget()
    yield gpu
    forget()


def forget():
    STUB._runs.clear()
    ABLE._runs.clear()


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
    assert (key.window, key.softcap, key.sequences) == (False, False, "dense")
    assert gpu.num_sms == [132]
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"causal": True}, (True, False, False)),
        ({"window_size": (2, 1)}, (False, True, False)),
        ({"window_size": (2, 0)}, (False, True, False)),
        ({"causal": True, "window_size": (2, None)}, (False, True, False)),
        ({"causal": True, "window_size": (6, 3)}, (True, False, False)),  # 6 of 7 keys on the left bound nothing
        ({"softcap": 3.0}, (False, False, True)),
    ],
    ids=str,
)
def test_a_kernel_is_compiled_for_the_kind_of_mask(gpu, options, expected):
    """Not for its numbers: they come with each launch."""
    tensors = qkv()
    results = ABLE.flash_attn_func(*tensors, **options, return_lse=True)
    window = options.pop("window_size", (None, None))
    assert_exact(results, tensors, window=window, **options)
    [key] = gpu.keys
    assert (key.causal, key.window, key.softcap) == expected


def test_numbers_belong_to_the_run(gpu):
    tensors = qkv()
    for window in ((2, 1), (1, 1), (2, 1)):
        assert_exact(ABLE.forward(*tensors, window_size=window), tensors, window=window)
    assert len(gpu.keys) == 2
    assert gpu.keys[0] == gpu.keys[1]


@pytest.mark.parametrize("lengths", [(2, 0, 7), (2, 5, 0), (0, 5, 7)], ids=["no queries", "no keys", "no batch"])
def test_without_a_score_nothing_is_launched(gpu, lengths):
    batch, seqlen_q, seqlen_k = lengths
    out, lse = STUB.forward(*qkv(batch, seqlen_q, seqlen_k))
    assert torch.equal(out, torch.zeros(batch, seqlen_q, 4, 16, dtype=torch.float16))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))
    assert gpu.keys == []


# ---- Packed sequences


def pack(lengths_q, lengths_k):
    """q, k, v and their cu_seqlens."""
    q, k, v = (x[0] for x in qkv(1, sum(lengths_q), sum(lengths_k)))
    cu_seqlens = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    return q, k, v, *cu_seqlens


def test_packed_sequences_are_launched(gpu):
    q, k, v, *cu_seqlens = pack([3, 2, 5], [4, 1, 6])
    out, lse = ABLE.flash_attn_varlen_func(q, k, v, *cu_seqlens, 5, 6, causal=True, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (4, 10), torch.float32)
    assert_exact((out[None, 5:], lse[None, :, 5:]), (q[None, 5:], k[None, 5:], v[None, 5:]), causal=True)
    [key] = gpu.keys
    assert (key.sequences, key.causal, key.head_dim) == ("packed", True, 16)
    assert all(x is y for x, y in zip(gpu.launches[0][5:], cu_seqlens, strict=True)), "as they were given"


def test_what_lengths_are_does_not_matter_to_a_run(gpu):
    for lengths in ([3, 2, 5], [1, 4, 5], [5, 0, 5]):
        q, k, v, *cu_seqlens = pack(lengths, lengths)
        out, lse = ABLE.flash_attn_varlen_func(q, k, v, *cu_seqlens, 5, 5, return_lse=True)
        assert_exact((out[None, 5:], lse[None, :, 5:]), (q[None, 5:], k[None, 5:], v[None, 5:]))
    assert len(gpu.keys) == len(ABLE._runs) == 1
    assert not any(isinstance(x, torch.Tensor) for key in ABLE._runs for x in key), "no tensor is kept alive"
    ABLE.flash_attn_varlen_func(*pack([4, 6], [4, 6]), 6, 6)
    ABLE.flash_attn_varlen_func(*pack([4, 6], [4, 6]), 7, 7)
    assert len(ABLE._runs) == 3, "another batch, another bound of the lengths"


def test_bounds_of_sequences_may_lie_anywhere(gpu):
    q, k, v, *cu_seqlens = pack([3, 2], [4, 1])
    expected = ABLE.flash_attn_varlen_func(q, k, v, *cu_seqlens, 3, 4)
    cu_seqlens = [misaligned(x) for x in cu_seqlens]
    assert torch.equal(ABLE.flash_attn_varlen_func(q, k, v, *cu_seqlens, 3, 4), expected)
    assert all(x is y for x, y in zip(gpu.launches[1][5:], cu_seqlens, strict=True))


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([0, 0], [3, 4]), ([3, 4], [0, 0]), ([], [])],
    ids=["no queries", "no keys", "no batch"],
)
def test_without_a_score_nothing_packed_is_launched(gpu, lengths_q, lengths_k):
    q, k, v, *cu_seqlens = pack(lengths_q, lengths_k)
    out, lse = ABLE.flash_attn_varlen_func(q, k, v, *cu_seqlens, 4, 4, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((4, len(q)), -torch.inf))
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
    assert gpu.launches[0][3].is_contiguous(), "out, whatever the strides of q"
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": lambda x: x[:, :, :1]}, "k and v must have one shape"),
        ({"v": lambda x: x.float()}, "q, k and v must have one dtype"),
        ({"k": lambda x: x.bfloat16()}, "q, k and v must have one dtype"),
        ({"out": lambda x: x[:, 1:]}, "out must be torch.float16 of shape"),
        ({"lse": lambda x: x.double()}, "lse must be torch.float32"),
    ],
)
def test_what_a_kernel_refuses_is_named(gpu, change, message):
    """Once a call is prepared the kernel alone sees that another one is wrong."""
    q, k, v = qkv()
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": torch.empty(2, 4, 5)}
    STUB.forward(**tensors)
    [(name, changed)] = change.items()
    wrong = changed(tensors[name])
    wrong = wrong.as_strided(wrong.shape, tensors[name].stride())  # what the prepared call is found by stays
    with pytest.raises(ValueError, match=message):
        STUB.forward(**tensors | {name: wrong})
    assert len(gpu.launches) == 1
    assert len(STUB._runs) == 1


def test_bounds_of_another_type_are_named(gpu):
    q, k, v, *cu_seqlens = pack([3, 2], [4, 1])
    ABLE.flash_attn_varlen_func(q, k, v, *cu_seqlens, 3, 4)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be int32; got torch\.int64"):
        ABLE.flash_attn_varlen_func(q, k, v, cu_seqlens[0], cu_seqlens[1].long(), 3, 4)
    with pytest.raises(ValueError, match="must describe the same number of sequences"):
        ABLE.flash_attn_varlen_func(q, k, v, cu_seqlens[0], cu_seqlens[1][[0, 0, 1, 2]], 3, 4)
    assert len(ABLE._runs) == 1


def test_another_error_of_a_kernel_passes(gpu, monkeypatch):
    def load(key, build):
        def kernel(*arguments):
            raise ValueError("of its own")

        return kernel

    monkeypatch.setattr(generation_module, "load", load)
    with pytest.raises(ValueError, match="of its own"):
        STUB.forward(*qkv())


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
