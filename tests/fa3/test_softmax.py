"""FA3's exponentials on the FMA pipe: what the polynomial is worth. The kernels that hold it are tested on a GPU."""

import torch

from fa3.softmax import EXP2_COEFFICIENTS, TO_INTEGER


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
