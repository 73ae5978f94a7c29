"""FA1 from tensors to tensors: its kernel, how it is launched and what that needs beside the tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa1 import algorithm
from fa1.config import (
    CAPABILITIES,
    FLOATS,
    LANES,
    ROWS,
    BackwardConfig,
    Config,
    default_backward_config,
    default_config,
    whole_pieces,
)
from fa_common.compile import KernelKey
from fa_common.generation import Generation, Launch, LaunchBackward, LaunchShape, Saved, num_query_tiles
from fa_common.problem import Problem


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel. The DSL takes seconds to import, so it is imported with the first kernel, not with fa1."""
    from fa1.forward import compile_forward

    return compile_forward(key, options)


def bind_forward(kernel: Callable, problem: Problem, config: Config, num_sms: int) -> Launch:
    """The launch of `kernel` with the problem's numbers; those that its KernelKey leaves out are ignored.

    With a workspace: O, m and l go to HBM at each visit, and have a slot for each query block.
    """
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds)
    slots = (problem.heads_q, num_query_tiles(problem, config.tile_m))
    shape_of_O = (*slots, config.tile_m // ROWS, whole_pieces(problem.head_dim, config.num_warps), LANES, FLOATS)
    shape_of_statistics = (*slots, config.tile_m, 2)

    def launch(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> None:
        o_acc, statistics = lse.new_empty(shape_of_O), lse.new_empty(shape_of_statistics)
        kernel(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, o_acc, statistics, *numbers)

    return launch


def shape_forward(problem: Problem, config: Config, num_sms: int) -> LaunchShape:
    """One CTA for each head and batch, as in the paper, times q_splits."""
    return LaunchShape((config.q_splits, problem.heads_q, problem.batch), 32 * config.num_warps)


def build_backward(key: KernelKey, options: str = "") -> Any:
    """Compiles the backward's kernels, which one call launches."""
    from fa1.backward import compile_backward

    return compile_backward(key, options)


def bind_backward(kernel: Callable, problem: Problem, config: BackwardConfig, num_sms: int) -> LaunchBackward:
    """The launch of the backward's kernels, with scratch memory: by query head and tile of queries, LSE and delta, and
    dQ in fp32."""
    num_tiles = num_query_tiles(problem, config.tile_m)
    width = -(-problem.head_dim // 64) * 64  # of the kernel's tiles
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, problem.seqlen_q)
    heads = problem.heads_q

    def launch(saved: Saved, gradients: tuple, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
        *tensors, lse, dlse = saved
        statistics = lse.new_empty((heads, num_tiles, 2 * config.tile_m))
        dq_accum = lse.new_empty((heads, num_tiles, config.tile_m * width))
        # fmt: off
        kernel(
            *tensors, lse, lse if dlse is None else dlse, *gradients, statistics, dq_accum,
            cu_seqlens_q, cu_seqlens_k, *numbers, int(dlse is not None),
        )
        # fmt: on

    return launch


GENERATION = Generation(
    name="fa1",
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
