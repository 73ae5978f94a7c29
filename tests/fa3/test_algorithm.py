"""FA3's algorithm."""

import pytest
import torch

from fa2 import algorithm as fa2_algorithm
from fa3 import algorithm
from tests import closed_forms
from tests.algorithm_contract import COSTS, AlgorithmContract


class TestAlgorithm(AlgorithmContract):
    algorithm = algorithm
    forward_cost = closed_forms.fa2_forward  # another order of issue, the same work
    backward_cost = closed_forms.fa2_backward


@pytest.mark.parametrize("case", COSTS.values(), ids=COSTS)
def test_the_bits_are_fa2s(case):
    q, k, v = case.tensors(torch.bfloat16)
    out, lse = algorithm.forward(q, k, v, config=case.config, **case.options)
    expected = fa2_algorithm.forward(q, k, v, config=case.config, **case.options)
    assert all(torch.equal(x, y) for x, y in zip((out, lse), expected, strict=True))
    gradients, expected = (
        module.backward(q, q, k, v, out, lse, config=case.config, **case.options)
        for module in (algorithm, fa2_algorithm)
    )
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))
