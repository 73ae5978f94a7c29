"""What the counter counts, operator by operator."""

import pytest
import torch

from fa_common.memory import Memory, counted, rounded

A = torch.rand(3, 4, 5)


def flops(computation) -> tuple[int, int]:
    """(matmul, non-matmul) FLOPs of calling `computation`."""
    memory = Memory()
    counted(lambda memory: computation())(memory=memory)
    return memory.matmul_flops, memory.non_matmul_flops


def test_read_counts_bytes_and_widens():
    memory, hbm = Memory(), torch.ones(4, 6, dtype=torch.bfloat16)
    tile = memory.read(hbm[1:3])
    assert (memory.bytes_read, memory.bytes_written) == (2 * 6 * 2, 0)
    assert tile.dtype == torch.float32
    assert memory.read(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_a_tile_on_chip_is_another_place_than_hbm():
    hbm = torch.ones(4)
    Memory().read(hbm).zero_()
    assert torch.equal(hbm, torch.ones(4))


def test_a_broadcast_tile_counts_as_often_as_it_is_read():
    memory = Memory()
    memory.read(torch.ones(1, 5).expand(3, 5))
    assert memory.bytes_read == 3 * 5 * 4


def test_write_counts_bytes_of_the_destination_and_rounds():
    memory, hbm = Memory(), torch.zeros(4, dtype=torch.bfloat16)
    memory.write(hbm[:2], torch.full((2,), 1.001))
    assert (memory.bytes_read, memory.bytes_written) == (0, 2 * 2)
    assert hbm.tolist() == [1, 1, 0, 0]


def test_atomic_add_reads_and_writes():
    memory, hbm = Memory(), torch.ones(4)
    memory.atomic_add(hbm[:3], torch.ones(3))
    assert (memory.bytes_read, memory.bytes_written, memory.bytes_moved) == (12, 12, 24)
    assert hbm.tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("computation", "expected"),
    [
        (lambda: A @ A.mT, 2 * 3 * 4 * 4 * 5),
        (lambda: A[0] @ A[0].mT, 2 * 4 * 4 * 5),
        (lambda: torch.baddbmm(A, A @ A.mT, A), 2 * (2 * 3 * 4 * 4 * 5)),
        (lambda: torch.baddbmm(A, A[..., :0], A[:, :0]), 0),
    ],
    ids=["product", "one matrix", "product into an accumulator", "product over nothing"],
)
def test_matmul_flops(computation, expected):
    assert flops(computation) == (expected, 0)


@pytest.mark.parametrize(
    ("computation", "expected"),
    [
        (lambda: 2.0 * A, 60),
        (lambda: A * A + A, 120),
        (lambda: A - A.amax(-1, keepdim=True), 60 + 60),
        (lambda: A.sum(-1, keepdim=True), 60),
        (lambda: (A / 2).exp().log().tanh(), 240),
        (lambda: torch.maximum(A[..., 0], A[..., 1]).clamp(min=1), 12 + 12),
        (lambda: 1 - A**2, 120),
        (lambda: Memory().atomic_add(torch.zeros(4), torch.ones(4)), 4),
    ],
    ids=["scale", "multiply, add", "amax, subtract", "sum", "functions", "max of rows", "square", "atomic"],
)
def test_non_matmul_flops(computation, expected):
    assert flops(computation) == (0, expected)


def test_moving_and_choosing_is_free():
    hidden = torch.ones(4, 5, dtype=torch.bool)
    memory = Memory()
    assert flops(lambda: A.masked_fill(~hidden, 0)) == (0, 0)
    assert flops(lambda: A.mT.contiguous().fill_(1).zero_()) == (0, 0)
    assert flops(lambda: rounded(A, torch.bfloat16)) == (0, 0)
    assert flops(lambda: memory.write(torch.empty_like(A), memory.read(A))) == (0, 0)
    assert flops(lambda: torch.arange(4) + torch.arange(5)[:, None] <= 3) == (0, 0)


def test_several_calls_add_up_and_a_call_without_memory_counts_nothing():
    @counted
    def double(x, *, memory=None):
        return 2 * memory.read(x)

    memory = Memory()
    double(A, memory=memory)
    double(A)
    double(A, memory=memory)
    assert memory == Memory(bytes_read=2 * 240, non_matmul_flops=2 * 60)


def test_rounded_loses_digits_and_keeps_the_type():
    tile = rounded(torch.tensor([1.001, 3.0]), torch.bfloat16)
    assert tile.dtype == torch.float32
    assert tile.tolist() == [1, 3]
