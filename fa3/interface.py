"""FA3 from tensors to tensors: its kernel and how it is launched.

changed since fa2
  - CTAs are persistent, and have a producer warpgroup beside the consumers.
  - A window, a softcap and packed sequences: numbers and tensors that the kernel is given at each launch.
unchanged
  - Everything else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa3 import algorithm
from fa3.config import CAPABILITIES, Config, default_config
from fa_common.compile import KernelKey
from fa_common.generation import Generation, Launch, LaunchShape
from fa_common.problem import Problem


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel. The DSL takes seconds to import, so it is imported with the first kernel, not with fa3."""
    from fa3.forward import compile_forward

    return compile_forward(key, options)


def bind_forward(kernel: Callable, problem: Problem, config: Config, num_sms: int) -> Launch:
    """The launch of `kernel` with the problem's numbers; those that its KernelKey leaves out are ignored."""
    softmax_scale, softcap = problem.softmax_scale, problem.softcap
    left, right = problem.bounds
    num_splits = 1

    def launch(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        counter: Tensor | None = None,
    ) -> None:
        # fmt: off
        kernel(
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, counter,
            softmax_scale, softcap, left, right, num_sms, num_splits,
        )
        # fmt: on

    def launch_counting(q: Tensor, *tensors: Tensor | None) -> None:
        # A counter for each launch: two streams, or two graphs being replayed, must not draw from the same one.
        launch(q, *tensors, torch.zeros(1, dtype=torch.int32, device=q.device))

    return launch_counting if config.scheduler == "dynamic" else launch


def shape_forward(problem: Problem, config: Config, num_sms: int) -> LaunchShape:
    """One CTA for each tile, or with `persistent` as many as run at once; in pairs if clustered.

    A producer warpgroup beside the consumers. How many tiles packed sequences have only the GPU knows: at most one more
    for each sequence than the queries fill.
    """
    cluster_size = 2 if config.cluster else 1
    rows = config.tile_m * cluster_size
    heads, group = (problem.heads_kv, problem.group) if config.pack_gqa else (problem.heads_q, 1)
    if problem.varlen:
        num_m_blocks = problem.total_q * group // rows + problem.batch
    else:
        num_m_blocks = -(-problem.seqlen_q * group // rows) * problem.batch
    num_tiles = num_m_blocks * heads
    num_at_once = num_sms // cluster_size if config.persistent else num_tiles
    num_ctas = min(num_tiles, num_at_once) * cluster_size
    return LaunchShape((num_ctas, 1, 1), 128 * (config.warp_specialized + config.num_consumer_warpgroups))


GENERATION = Generation(
    name="fa3",
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
