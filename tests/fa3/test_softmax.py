"""FA3's softmax in numbers: what the polynomial is worth, and how far P may grow. Kernels are tested on a GPU."""

from dataclasses import replace

import pytest
import torch

from fa3.algorithm import E4M3_MAX
from fa3.config import Config
from fa3.softmax import (
    EXP2_COEFFICIENTS,
    EXP2_HIGHEST,
    EXP2_LOWEST,
    LANES_OF_ROW,
    MANTISSA_BITS,
    RISE,
    TO_INTEGER,
    KeyScales,
    OnlineSoftmax,
)

ONE = KeyScales(before_cap=None, factor=1.0, bias=0.0, weight=1.0)


def test_the_polynomial_is_as_exact_as_it_says():
    fraction = torch.linspace(-0.5, 0.5, 100_001, dtype=torch.float64)
    power = sum(coefficient * fraction**degree for degree, coefficient in enumerate(EXP2_COEFFICIENTS))
    assert (power / 2**fraction - 1).abs().max() < 2.7e-6


def test_adding_the_large_number_rounds_to_an_integer():
    x = torch.linspace(-126, 10, 100_003)
    shifted = x + TO_INTEGER
    assert torch.equal(shifted - TO_INTEGER, x.round())
    last_bits = shifted.view(torch.int32) - torch.tensor(TO_INTEGER).view(torch.int32)
    assert torch.equal(last_bits, x.round().int())


def polynomial_exp2(x: torch.Tensor) -> torch.Tensor:
    """As the kernel takes it, in fp32, between EXP2_LOWEST and EXP2_HIGHEST."""
    shifted = x + TO_INTEGER
    fraction = x - (shifted - TO_INTEGER)
    power = sum(coefficient * fraction**degree for degree, coefficient in enumerate(EXP2_COEFFICIENTS))
    return (power.view(torch.int32) + (shifted.view(torch.int32) << MANTISSA_BITS)).view(torch.float32)


def test_the_exponent_holds_from_the_lowest_to_the_highest():
    """Optimistic exponentials may be taken of numbers up to the highest; beyond it they are infinite."""
    x = torch.linspace(EXP2_LOWEST, EXP2_HIGHEST, 100_003)
    assert (polynomial_exp2(x).double() / 2 ** x.double() - 1).abs().max() < 4e-6


def softmax_of(tile_n: int, lazy: bool = True) -> OnlineSoftmax:
    """Without its registers."""
    return OnlineSoftmax(None, None, 1.0, tile_n // LANES_OF_ROW, lazy, polynomial=False)


@pytest.mark.parametrize("tile_n", [16, 64, 96, 128, 256])
def test_the_sum_of_equal_scores_is_no_alarm(tile_n):
    """A thread's sum of a row's P, each of them the largest there is when a shift is set."""
    softmax = softmax_of(tile_n)
    assert softmax.limit == 2**RISE
    assert softmax.num_columns * 2**softmax.height <= softmax.limit


@pytest.mark.parametrize("tile_n", [64, 96, 128])
def test_eight_bits_use_as_much_of_their_range_as_equal_scores_leave(tile_n):
    softmax = softmax_of(tile_n).of_block((ONE,))
    assert softmax.limit == E4M3_MAX
    assert softmax.num_columns * 2**softmax.height <= E4M3_MAX < softmax.num_columns * 2 ** (softmax.height + 1)
    assert softmax_of(tile_n, lazy=False).of_block((ONE,)).height == RISE


def test_a_softmax_of_16_bits_has_no_scales():
    softmax = softmax_of(Config().tile_n)
    assert softmax.of_block(None) is softmax
    assert softmax.of_block((ONE, ONE)) == replace(softmax.of_block((ONE,)), scales=(ONE, ONE))
