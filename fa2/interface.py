"""FA2 from tensors to tensors: its kernel and how it is launched.

changed since fa1
  - No workspace: O, row_max and row_sum never leave the CTA that computes them.
unchanged
  - Everything else.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa2 import algorithm
from fa2.config import CAPABILITIES, Config, default_config
from fa_common.compile import KernelKey
from fa_common.generation import Generation, Launch, LaunchShape
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
    """One CTA for each query block, head and batch."""
    num_m_blocks = -(-problem.seqlen_q // config.tile_m)
    return LaunchShape((num_m_blocks, problem.heads_q, problem.batch), 32 * config.num_warps)


GENERATION = Generation(
    name="fa2",
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
