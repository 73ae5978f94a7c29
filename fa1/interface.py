"""FA1 from tensors to tensors: its kernel, how it is launched and what that needs beside the tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa1 import algorithm
from fa1.config import CAPABILITIES, Config, default_config
from fa_common.compile import KernelKey
from fa_common.generation import Generation, Launch, LaunchShape
from fa_common.problem import Problem


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel. The DSL takes seconds to import, so it is imported with the first kernel, not with fa1."""
    from fa1.forward import compile_forward

    return compile_forward(key, options)


def bind_forward(kernel: Callable, problem: Problem, config: Config, num_sms: int) -> Launch:
    """The launch of `kernel`, with a workspace: O and its statistics go to HBM at each visit."""
    batch, heads, seqlen_q, softmax_scale = problem.batch, problem.heads_q, problem.seqlen_q, problem.softmax_scale

    def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: None) -> None:
        o_acc = q.new_empty((batch, heads, seqlen_q, problem.head_dim), dtype=torch.float32)
        row_max, row_sum = q.new_empty((2, batch, heads, seqlen_q), dtype=torch.float32)
        kernel(q, k, v, out, lse, o_acc, row_max, row_sum, softmax_scale)

    return launch


def shape_forward(problem: Problem, config: Config, num_sms: int) -> LaunchShape:
    """One CTA for each head and batch, as in the paper, times q_splits."""
    return LaunchShape((config.q_splits, problem.heads_q, problem.batch), 32 * config.num_warps)


GENERATION = Generation(
    name="fa1",
    config_type=Config,
    default_config=default_config,
    capabilities=CAPABILITIES,
    algorithm=algorithm,
    build_forward=build_forward,
    bind_forward=bind_forward,
    shape_forward=shape_forward,
)
flash_attn_func = GENERATION.flash_attn_func
flash_attn_varlen_func = GENERATION.flash_attn_varlen_func
forward = GENERATION.forward
backward = GENERATION.backward
