"""FA1's algorithm."""

from fa1 import algorithm
from tests import closed_forms
from tests.algorithm_contract import AlgorithmContract


class TestAlgorithm(AlgorithmContract):
    algorithm = algorithm
    forward_cost = closed_forms.fa1_forward
    backward_cost = closed_forms.fa1_backward
