"""The emulated sums, against what can be worked out by hand."""

import pytest
import torch

from benchmarks.tensor_cores import FRACTION_BITS, STEP, TensorCores, add_products
from fa3.algorithm import to_e4m3


def of_one_sum(total: float, a: list[float], b: list[float]) -> float:
    shape = (1, 1, 1), (1, 1, len(a)), (1, len(b), 1)
    return add_products(*(torch.tensor(x).reshape(s) for x, s in zip(([total], a, b), shape, strict=True))).item()


def test_what_needs_few_bits_is_exact():
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randint(-8, 9, (2, n, 40), generator=generator).float() for n in (5, 7))
    C = torch.randint(-64, 65, (2, 5, 7), generator=generator).float()
    assert torch.equal(add_products(C, A, B.mT), torch.baddbmm(C, A, B.mT))


def test_products_below_the_last_bit_of_the_sum_are_lost_one_by_one():
    ones = [1.0] * STEP
    large = 2.0**FRACTION_BITS
    assert of_one_sum(large, ones, ones) == large + STEP
    assert of_one_sum(2 * large, ones, ones) == 2 * large, "together they would have been 16 of its last bits"
    assert of_one_sum(2 * large, [2.0] * STEP, ones) == 2 * large + 2 * STEP


def test_a_large_product_cuts_off_the_sum():
    assert of_one_sum(1.75, [256.0], [64.0]) == 256 * 64
    assert of_one_sum(3.75, [256.0], [64.0]) == 256 * 64 + 2
    assert of_one_sum(-3.75, [256.0], [64.0]) == 256 * 64 - 2, "toward zero"


def test_each_step_is_aligned_by_itself():
    small, ones = [0.25] * STEP, [1.0] * STEP
    assert of_one_sum(0.0, [*small, 256.0], [*ones, 2.0]) == 512 + 0.25 * STEP
    assert of_one_sum(0.0, [256.0, *small[1:]], [256.0, *ones[1:]]) == 256 * 256, "all of it in the large one's step"


def test_nothing_to_add_leaves_the_sum():
    C = torch.randn(1, 3, 5)
    assert torch.equal(add_products(C, C[..., :0], torch.zeros(1, 0, 5)), C)
    zeros = torch.zeros(1, 2, 2)
    assert not add_products(zeros, zeros, zeros).any()


@pytest.mark.parametrize("two_levels", [False, True])
def test_inside_the_mode_products_are_those_of_tensor_cores(two_levels):
    generator = torch.Generator().manual_seed(0)
    A, B = (to_e4m3(torch.rand(2, n, 64, generator=generator)).float() for n in (3, 4))
    C = 1000 * torch.rand(2, 3, 4, generator=generator)
    zeros = torch.zeros_like(C)
    with TensorCores(two_levels):
        product, total = A @ B.mT, torch.baddbmm(C, A, B.mT)
        untouched = C.exp() / A.sum()
    assert torch.equal(product, add_products(zeros, A, B.mT))
    assert torch.equal(total, C + product if two_levels else add_products(C, A, B.mT))
    assert torch.equal(untouched, C.exp() / A.sum())
    assert (total < torch.baddbmm(C, A, B.mT)).all()
