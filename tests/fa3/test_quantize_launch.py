"""What the host of the quantising kernels gives them, on a CPU, where the kernels are Python functions."""

import pytest
import torch

from fa3 import quantize_launch
from fa_common.problem import Problem

BATCH, HEADS, HEADS_KV = 2, 4, 2


@pytest.fixture
def launches(monkeypatch):
    """(stage, arguments) of each launch."""
    launches = []

    def load(key, build):
        return lambda *arguments: launches.append((key.config.stage, arguments))

    monkeypatch.setattr(quantize_launch, "load", load)
    return launches


def tensors(batch=BATCH):
    return tuple(torch.randn(batch, n, h, 32) for n, h in ((150, HEADS), (300, HEADS_KV), (300, HEADS_KV)))


def prepare(given, scales, signs=None):
    return quantize_launch.prepare(Problem.from_tensors(*given), given, scales, signs)


@pytest.mark.parametrize(
    ("scales", "stages", "strides"),
    [
        ("block", ["block"], [(12, 3, 1), (6, 3, 1), (6, 3, 1)]),
        ("head", ["maximum", "scale"], [(2, 1, 0)] * 3),
        ("tensor", ["maximum", "scale"], [(0, 0, 0)] * 3),
    ],
)
def test_a_run_launches(launches, scales, stages, strides):
    given, signs = tensors(), torch.ones(32)
    run = prepare(given, scales, signs)
    assert launches == []
    first, second = run(given, (None, None)), run(given, (None, None))
    assert [stage for stage, _ in launches] == 2 * stages
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(first, second, strict=True))
    assert all(x.dtype == torch.float8_e4m3fn and x.is_contiguous() for x in first[:3])
    for _, arguments in launches[: len(stages)]:
        assert all(x is y for x, y in zip(arguments, (*given, *first[:3]), strict=False))
        for target, made in zip(arguments[6:9], first[3:], strict=True):
            assert (target.ndim, target.data_ptr(), made.dtype) == (3, made.data_ptr(), torch.float32)
        assert [x.stride() for x in arguments[6:9]] == strides
        amax = arguments[9]
        assert (amax is None) == (scales == "block")
        assert amax is None or (amax.shape == (3, BATCH, HEADS_KV) and not amax.any())
        assert arguments[10:] == (signs, None, None, 150, 300)


@pytest.mark.parametrize("scales", ["block", "head", "tensor"])
def test_what_the_kernels_cannot_read_is_copied(launches, scales):
    q, k, v = tensors()
    given = (q, k.mT.contiguous().mT, v)
    prepare(given, scales)(given, (None, None))
    for _, arguments in launches:
        assert [x is y for x, y in zip(arguments[:3], given, strict=True)] == [True, False, True]
        assert torch.equal(arguments[1], k)
        assert arguments[1].is_contiguous()


def test_packed_sequences(launches):
    given = tuple(x[0] for x in tensors())
    bounds = (torch.tensor([0, 50, 150], dtype=torch.int32), torch.tensor([0, 1, 300], dtype=torch.int32))
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    problem = Problem.from_tensors(*given, **dict(zip(names, (*bounds, 100, 299), strict=True)))
    results = quantize_launch.prepare(problem, given, "block", None)(given, bounds)
    [(_, arguments)] = launches
    assert arguments[10:] == (None, *bounds, 100, 299)
    assert [x.shape for x in results[3:]] == [(2, 4, 2), (2, 2, 3), (2, 2, 3)]


@pytest.mark.parametrize("scales", ["block", "head", "tensor"])
def test_without_a_batch_nothing_is_launched(launches, scales):
    given = tensors(batch=0)
    results = prepare(given, scales)(given, (None, None))
    assert launches == []
    assert [x.shape for x in results[:3]] == [x.shape for x in given]
    assert all((x == 1).all() for x in results[3:])
