from dataclasses import replace

import pytest
import torch

from benchmarks.contenders import Ours
from benchmarks.correctness import limit, relative_error
from benchmarks.problems import exact_output, grid, kind, name, packed, packing, problem_columns, problem_of
from benchmarks.problems import random_tensors as draw
from fa_common.problem import Problem
from fa_common.reference import attention

PLAIN = Problem(batch=1, seqlen_q=2048, seqlen_k=2048, heads_q=8, heads_kv=8, head_dim=64)
SHAPES = {
    "full": {},
    "causal": {"causal": True},
    "window (64, 0)": {"causal": True, "window": (64, None)},
    "window (64, 32)": {"window": (64, 32)},
    "full, GQA 8/2": {"heads_kv": 2},
    "full, softcap 50": {"softcap": 50.0},
    "causal, GQA 8/2, varlen": {"causal": True, "heads_kv": 2, **packed([5, 2048, 1])},
}


@pytest.mark.parametrize("text", SHAPES)
def test_a_row_gives_its_problem_back(make_row, text: str):
    problem = replace(PLAIN, **SHAPES[text], **({} if "varlen" in text else {"total_q": None, "total_k": None}))
    assert kind(problem) == text
    assert problem_of(make_row(problem=problem)) == problem


def test_names():
    assert name(replace(PLAIN, seqlen_q=1, batch=8, total_q=None)) == "bfloat16 d=64 full 8 x 1 over 2048 x 8"
    assert name(replace(PLAIN, **packed([5, 70]))) == "bfloat16 d=64 full, varlen 2 x up to 70 x 8"


def test_the_grid_is_16384_tokens_by_2048():
    problems = grid()
    assert len(problems) == 36
    assert {problem.total_q * problem.heads_q * problem.head_dim for problem in problems} == {16384 * 2048}
    [grouped] = grid([128], ["full"], [1024], batch=2, heads=32, heads_kv=8)
    assert (grouped.batch, grouped.heads_q, grouped.heads_kv) == (2, 32, 8)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_algorithm_is_right_on_every_shape(cpu_problem, shape: str):
    fields = {"heads_q": 8, "heads_kv": 8, "total_q": None, "total_k": None} | SHAPES[shape]
    if "varlen" in shape:
        fields |= packed([5, 96, 1])
    problem = replace(cpu_problem(96), **fields)
    tensors = draw(problem)
    out = Ours("fa3").prepare(problem, *tensors)()
    assert relative_error(out, exact_output(problem, *tensors)) < limit(problem.dtype)


def test_the_reference_takes_one_sequence_at_a_time(cpu_problem):
    problem = replace(cpu_problem(32, causal=True), batch=3, total_q=None, total_k=None)
    tensors = draw(problem)
    assert torch.equal(exact_output(problem, *tensors), attention(*tensors, causal=True)[0])


def test_packing_says_where_each_sequence_ends(cpu_problem):
    packed_arguments = packing(replace(cpu_problem(), **packed([5, 70, 1])))
    assert packed_arguments["cu_seqlens_q"].tolist() == [0, 5, 75, 76]
    assert packed_arguments["max_seqlen_k"] == 70
    assert packing(cpu_problem()) == {}
    assert problem_columns(replace(cpu_problem(), **packed([5, 70, 1])))["lengths"] == [5, 70, 1]
