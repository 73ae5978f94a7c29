"""FA2's algorithm."""

import pytest

from fa1 import algorithm as fa1_algorithm
from fa2 import algorithm
from fa_common.memory import Memory
from tests import closed_forms
from tests.algorithm_contract import COSTS, AlgorithmContract


class TestAlgorithm(AlgorithmContract):
    algorithm = algorithm
    forward_cost = closed_forms.fa2_forward
    backward_cost = closed_forms.fa2_backward


@pytest.mark.parametrize("case", COSTS.values(), ids=COSTS)
def test_the_forward_moves_and_computes_less_than_fa1s(case):
    tensors, fa1_cost, fa2_cost = case.tensors(), Memory(), Memory()
    fa1_algorithm.forward(*tensors, config=case.config, memory=fa1_cost, **case.options)
    algorithm.forward(*tensors, config=case.config, memory=fa2_cost, **case.options)
    assert fa2_cost.bytes_read < fa1_cost.bytes_read
    assert fa2_cost.bytes_written < fa1_cost.bytes_written
    assert fa2_cost.matmul_flops <= fa1_cost.matmul_flops
    assert fa2_cost.non_matmul_flops < fa1_cost.non_matmul_flops
