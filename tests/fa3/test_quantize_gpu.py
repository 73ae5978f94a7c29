"""Quantisation on a Hopper GPU: bits against the algorithm in PyTorch, every layout, and nothing written elsewhere.

Without rotation the two divide and round alike. With it they do where the Hadamard factor is a power of two; where it
is not, fp32 rounds it at another place, and a value may come out as its neighbour in e4m3. The algorithm runs on the
CPU: on a GPU, PyTorch divides by 448 by multiplying with its rounded reciprocal.
"""

import pytest
import torch
from torch import Tensor

from fa3 import algorithm, quantize_launch
from fa3.config import KV_BLOCK, Q_BLOCK
from fa3.fp8 import random_signs
from fa3.fp8_launch import strides_by_columns
from fa3.quantize_launch import prepare
from fa_common.problem import Problem

pytestmark = pytest.mark.gpu

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 144, 192, 240, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALES = ("block", "head", "tensor")
BLOCKS = (Q_BLOCK, KV_BLOCK, KV_BLOCK)
SEQLENS = ((1, 1), (63, 127), (64, 128), (65, 129), (300, 513), (1000, 77), (9, 16), (64, 144), (130, 1072))
CANARY = 1e4  # in no tensor, and more than any of them holds

every_scale = pytest.mark.parametrize("scales", SCALES)
rotated_or_not = pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])


def make(
    seqlens: tuple[int, int] = (300, 513),
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v whose rows, heads and sequences have maxima of their own."""
    return tuple(
        (torch.randn(batch, n, h, head_dim, device="cuda") * torch.rand(batch, n, h, 1, device="cuda") * 8).to(dtype)
        for n, h in zip((seqlens[0], seqlens[1], seqlens[1]), (heads[0], heads[1], heads[1]), strict=True)
    )


def expected(tensors: tuple[Tensor, ...], scales: str, hadamard: bool) -> tuple[Tensor, ...]:
    """What a prepared run returns, by the algorithm, on the CPU."""
    q, k, v = (x.cpu() for x in tensors)
    heads_kv, signs = k.shape[2], signs_of(q, hadamard)
    if hadamard:
        q, k = (algorithm.rotate(x, signs) for x in (q, k))
    made = [algorithm.quantize(x, scales, heads_kv, block) for x, block in zip((q, k, v), BLOCKS, strict=True)]
    values, descales = zip(*made, strict=True)
    return *values, *descales


def signs_of(q: Tensor, hadamard: bool) -> Tensor | None:
    return random_signs(q.shape[-1], 0, q.device) if hadamard else None


def places(values: Tensor) -> Tensor:
    """e4m3 numbers as their places in the numbers' order: neighbours are 1 apart."""
    bits = values.contiguous().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def check(results: tuple[Tensor, ...], tensors: tuple[Tensor, ...], scales: str, hadamard: bool, name="") -> None:
    head_dim = tensors[0].shape[-1]
    is_exact = not hadamard or (head_dim & -head_dim).bit_length() % 2  # an even power of two has a root that is one
    results, reference = [x.cpu() for x in results], expected(tensors, scales, hadamard)
    for what, x, y in zip("qkv", results[:3], reference[:3], strict=True):
        assert (x.dtype, x.shape) == (torch.float8_e4m3fn, y.shape), (name, what)
        strides = strides_by_columns(y.shape) if what == "v" else None
        assert x.stride() == strides if strides else x.is_contiguous(), (name, what)
        steps = (places(x) - places(y)).abs()
        if is_exact or what == "v":
            assert not steps.any(), f"{name}: {what} differs in {steps.count_nonzero()} of {steps.numel()} values"
        else:
            assert (steps <= 1).all(), f"{name}: {what} is {steps.max()} steps off"
            assert steps.sum() <= 1 + 1e-3 * steps.numel(), f"{name}: {what} differs in {steps.sum()} values"
    for what, x, y in zip("qkv", results[3:], reference[3:], strict=True):
        assert x.shape == y.shape, (name, what, x.shape)
        tolerance = 0 if is_exact or what == "v" else 1e-6
        torch.testing.assert_close(x, y, rtol=tolerance, atol=0, msg=lambda m, w=what: f"{name} descale_{w}: {m}")


def run(
    tensors: tuple[Tensor, ...], scales: str, hadamard: bool, *, cu_seqlens=(None, None), max_seqlens=(None, None)
) -> tuple[Tensor, ...]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    problem = Problem.from_tensors(*tensors, **dict(zip(names, (*cu_seqlens, *max_seqlens), strict=True)))
    return prepare(problem, tensors, scales, signs_of(tensors[0], hadamard))(tensors, cu_seqlens)


# ---- Values


@every_scale
@rotated_or_not
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, hadamard, scales):
    for num_keys in (513, 528):  # V by rows, and by columns
        tensors = make((300, num_keys), head_dim=head_dim)
        check(run(tensors, scales, hadamard), tensors, scales, hadamard, num_keys)


@every_scale
@rotated_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype, hadamard, scales):
    for head_dim in (64, 256):
        for seqlens in SEQLENS:
            tensors = make(seqlens, (4, 1), head_dim, dtype)
            check(run(tensors, scales, hadamard), tensors, scales, hadamard, (head_dim, seqlens))


@every_scale
def test_a_long_sequence(scales):
    tensors = make((16_384, 16_384), (16, 16), 128, batch=1)
    check(run(tensors, scales, True), tensors, scales, True)


@every_scale
@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_same_bits_at_every_run(head_dim, scales):
    tensors = make(head_dim=head_dim)
    for first, second in zip(run(tensors, scales, True), run(tensors, scales, True), strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


# ---- Numbers that are not ordinary


@every_scale
@pytest.mark.parametrize("head_dim", [64, 256])
def test_zeros_have_scale_1(head_dim, scales):
    tensors = make((200, 300), head_dim=head_dim)
    for x in tensors:
        x[0, :128] = 0
        x[1] = 0
    results = run(tensors, scales, False)
    check(results, tensors, scales, False)
    if scales != "tensor":
        assert all((descale[1] == 1).all() for descale in results[3:])
    assert all(not x[1].float().any() for x in results[:3])


@pytest.mark.parametrize("head_dim", [64, 256])
def test_what_is_below_the_smallest_maximum_counts_as_zeros(head_dim):
    tensors = tuple(torch.full((1, 100, 2, head_dim), 2.0**-120, device="cuda") for _ in range(3))
    results = run(tensors, "block", False)
    assert all((descale == 1).all() for descale in results[3:])
    assert all(not x.float().any() for x in results[:3])


@rotated_or_not
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_nan_and_infinity_take_their_block_and_no_other(head_dim, number, hadamard):
    tensors = make((300, 300), (2, 2), head_dim)
    clean = run(tensors, "block", hadamard)
    for x in tensors:
        x[1, 130, 1, 5] = number
    results = run(tensors, "block", hadamard)
    for x, before, descale, block in zip(results[:3], clean[:3], results[3:], BLOCKS, strict=True):
        first = 130 // block * block
        rows = slice(first, first + block)
        assert descale[1, 1, 130 // block].isnan()
        assert descale.isnan().sum() == 1
        assert x[1, rows, 1].float().isnan().all()
        is_other = torch.ones(x.shape, dtype=torch.bool, device="cuda")
        is_other[1, rows, 1] = False
        assert torch.equal(x.view(torch.uint8)[is_other], before.view(torch.uint8)[is_other])


@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_nan_takes_all_that_share_its_scale(scales):
    tensors = make((300, 300), (4, 2))
    tensors[0][1, 130, 3, 5] = torch.nan
    q, k, _, descale_q, descale_k, _ = run(tensors, scales, False)
    assert descale_q.isnan().sum() == 1
    assert descale_k.isfinite().all()
    assert q[1, :, 2:].float().isnan().all()
    assert q[0].float().isnan().all() == (scales == "tensor")
    assert k.float().isfinite().all()


# ---- Layouts


@every_scale
@pytest.mark.parametrize("head_dim", [48, 128, 256])
def test_strides(head_dim, scales):
    """Heads before rows, slices of wider rows, one tensor of all three, a broadcast batch; and what must be copied."""
    q, k, v = make((150, 150), (4, 4), head_dim)
    together = torch.stack((q, k, v), 2)
    wider = torch.full((*q.shape[:-1], head_dim + 16), CANARY, dtype=q.dtype, device="cuda")
    wider[..., :head_dim] = q
    odd = torch.full((*k.shape[:-1], head_dim + 1), CANARY, dtype=k.dtype, device="cuda")
    odd[..., :head_dim] = k
    views = {
        "heads first": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        "one tensor": together.unbind(2),
        "wider": (wider[..., :head_dim], k, v),
        "odd": (q, odd[..., :head_dim], v),
        "broadcast": (q[:1].expand_as(q), k, v[:1].expand_as(v)),
        "columns first": (q.mT.contiguous().mT, k, v),
    }
    for name, tensors in views.items():
        check(run(tensors, scales, False), tensors, scales, False, name)


@every_scale
@rotated_or_not
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_packed(head_dim, hadamard, scales):
    lengths_q, lengths_k = (1, 0, 130, 64, 300), (128, 77, 0, 1, 513)
    tensors = tuple(x[0] for x in make((sum(lengths_q), sum(lengths_k)), (6, 2), head_dim, batch=1))
    bounds = tuple(
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
        for lengths in (lengths_q, lengths_k)
    )
    # Longer than any sequence: blocks that none has.
    results = run(tensors, scales, hadamard, cu_seqlens=bounds, max_seqlens=(400, 600))
    if scales == "tensor":
        check([x[None] for x in results[:3]] + [*results[3:]], [x[None] for x in tensors], scales, hadamard)
        return
    num_blocks = (-(-400 // Q_BLOCK), -(-600 // KV_BLOCK), -(-600 // KV_BLOCK))
    for i in range(len(lengths_q)):
        rows = [slice(*(int(bound) for bound in cu[i : i + 2])) for cu in (bounds[0], bounds[1], bounds[1])]
        one = [x[None, r] for x, r in zip(tensors, rows, strict=True)]
        descales = [x[i : i + 1] for x in results[3:]]
        if scales == "block":
            used = [-(-x.shape[1] // block) for x, block in zip(one, BLOCKS, strict=True)]
            for descale, number, most in zip(descales, used, num_blocks, strict=True):
                assert descale.shape[-1] == most
                assert (descale[..., number:] == 1).all()
            descales = [x[..., :number] for x, number in zip(descales, used, strict=True)]
        values = [x[None, r].contiguous() for x, r in zip(results[:3], rows, strict=True)]
        if strides := strides_by_columns(values[2].shape):
            values[2] = torch.empty_strided(values[2].shape, strides, dtype=values[2].dtype).copy_(values[2])
        check([*values, *descales], one, scales, hadamard, i)


@every_scale
def test_empty(scales):
    for batch, seqlens in ((0, (9, 9)), (2, (0, 9)), (2, (9, 0))):
        tensors = make(seqlens, batch=batch)
        check(run(tensors, scales, False), tensors, scales, False, (batch, seqlens))


# ---- Memory, streams, graphs


@every_scale
@pytest.mark.parametrize("num_keys", [129, 144], ids=["V by rows", "V by columns"])
@pytest.mark.parametrize("head_dim", [48, 256])
def test_nothing_around_the_results_is_written(head_dim, num_keys, scales, monkeypatch):
    """Every result in the middle of a buffer of its own, whose margins keep what they held."""
    buffers, margin = [], 4096

    def allocation(shape, dtype, device, strides=None):
        def allocate():
            size = torch.Size(shape).numel() * dtype.itemsize
            buffer = torch.full((margin + size + margin,), 0xA5, dtype=torch.uint8, device=device)
            buffers.append((buffer, size))
            tensor = buffer[margin : margin + size].view(dtype)
            return tensor.as_strided(shape, strides) if strides else tensor.view(shape)

        return allocate

    tensors = make((65, num_keys), head_dim=head_dim)
    with monkeypatch.context() as patched:
        patched.setattr(quantize_launch, "allocation", allocation)
        results = run(tensors, scales, True)
    assert len(buffers) == 6
    for buffer, size in buffers:
        assert (buffer[:margin] == 0xA5).all()
        assert (buffer[margin + size :] == 0xA5).all()
    check(results, tensors, scales, True)


@every_scale
def test_another_stream_and_a_graph(scales):
    tensors = make()
    run(tensors, scales, True)  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = run(tensors, scales, True)
    torch.cuda.current_stream().wait_stream(stream)
    check(results, tensors, scales, True)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(tensors, scales, True)
    for x in tensors:
        x.mul_(-0.5)
    graph.replay()
    check(results, tensors, scales, True)
