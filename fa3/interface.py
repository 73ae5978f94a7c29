"""FA3 from tensors to tensors: its kernel and how it is launched.

changed since fa2
  - CTAs come in clusters if switched on, and have a producer warpgroup beside the consumers.
unchanged
  - Everything else.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa3 import algorithm
from fa3.config import CAPABILITIES, Config, default_config
from fa_common.compile import KernelKey
from fa_common.generation import Generation, LaunchShape
from fa_common.problem import Problem


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel. The DSL takes seconds to import, so it is imported with the first kernel, not with fa3."""
    from fa3.forward import compile_forward

    return compile_forward(key, options)


def launch_forward(
    kernel: Callable, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float
) -> None:
    """Runs the kernel over q, k, v, (batch, seqlen, heads, head_dim)."""
    kernel(q, k, v, out, lse, softmax_scale)


def shape_forward(problem: Problem, config: Config) -> LaunchShape:
    """One CTA for each query block, head and batch, in whole clusters; a producer warpgroup beside the consumers."""
    cluster_size = 2 if config.cluster else 1
    num_m_blocks = -(-problem.seqlen_q // (config.tile_m * cluster_size)) * cluster_size
    return LaunchShape((num_m_blocks, problem.heads_q, problem.batch), 128 * (1 + config.num_consumer_warpgroups))


GENERATION = Generation(
    name="fa3",
    config_type=Config,
    default_config=default_config,
    capabilities=CAPABILITIES,
    algorithm=algorithm,
    build_forward=build_forward,
    launch_forward=launch_forward,
    shape_forward=shape_forward,
)
flash_attn_func = GENERATION.flash_attn_func
flash_attn_varlen_func = GENERATION.flash_attn_varlen_func
forward = GENERATION.forward
backward = GENERATION.backward
