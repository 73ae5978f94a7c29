"""FA2 from tensors to tensors: its kernel and how it is launched.

changed since fa1
  - No workspace: O, row_max and row_sum never leave the CTA that computes them.
unchanged
  - Everything else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa2 import algorithm
from fa2.config import CAPABILITIES, BackwardConfig, Config, default_backward_config, default_config
from fa_common.compile import KernelKey
from fa_common.generation import Generation, Launch, LaunchBackward, LaunchShape, Saved, num_query_tiles
from fa_common.problem import Problem


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel. The DSL takes seconds to import, so it is imported with the first kernel, not with fa2."""
    from fa2.forward import compile_forward

    return compile_forward(key, options)


def bind_forward(kernel: Callable, problem: Problem, config: Config, num_sms: int) -> Launch:
    """The launch of `kernel` with the problem's numbers; those that its KernelKey leaves out are ignored."""
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, problem.seqlen_q)

    def launch(*tensors: Tensor | None) -> None:
        kernel(*tensors, *numbers)

    return launch


def shape_forward(problem: Problem, config: Config, num_sms: int) -> LaunchShape:
    """One CTA for each query block, head and batch; without parallel_seqlen for each head and batch."""
    tile = config.tile(problem.head_dim)
    num_m_blocks = -(-problem.seqlen_q // tile.tile_m) if config.parallel_seqlen else 1
    return LaunchShape((num_m_blocks, problem.heads_q, problem.batch), 32 * tile.num_warps)


def build_backward(key: KernelKey, options: str = "") -> Any:
    """Compiles the backward's kernels, which one call launches."""
    from fa2.backward import compile_backward

    return compile_backward(key, options)


def bind_backward(kernel: Callable, problem: Problem, config: BackwardConfig, num_sms: int) -> LaunchBackward:
    """The launch of the backward's kernels, with scratch memory: by query head and tile of queries, LSE and delta, dQ
    in fp32, and for a deterministic sum whose turn it is to add to dQ."""
    num_tiles = num_query_tiles(problem, config.tile_m)
    width = -(-problem.head_dim // 64) * 64  # of the kernel's tiles
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, problem.seqlen_q, problem.seqlen_k)
    heads = problem.heads_q

    def launch(saved: Saved, gradients: tuple, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
        *tensors, lse, dlse = saved
        statistics = lse.new_empty((heads, num_tiles, 2 * config.tile_m))
        dq_accum = lse.new_empty((heads, num_tiles, config.tile_m * width))
        turns = None
        if problem.deterministic:
            turns = torch.zeros(1 + heads * num_tiles, dtype=torch.int32, device=lse.device)
        # fmt: off
        kernel(
            *tensors, lse, lse if dlse is None else dlse, *gradients, statistics, dq_accum, turns,
            cu_seqlens_q, cu_seqlens_k, *numbers, int(dlse is not None),
        )
        # fmt: on

    return launch


GENERATION = Generation(
    name="fa2",
    config_type=Config,
    default_config=default_config,
    capabilities=CAPABILITIES,
    algorithm=algorithm,
    build_forward=build_forward,
    bind_forward=bind_forward,
    shape_forward=shape_forward,
    backward_config_type=BackwardConfig,
    default_backward_config=default_backward_config,
    build_backward=build_backward,
    bind_backward=bind_backward,
)
flash_attn_func = GENERATION.flash_attn_func
flash_attn_varlen_func = GENERATION.flash_attn_varlen_func
forward = GENERATION.forward
backward = GENERATION.backward
