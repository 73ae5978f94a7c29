"""From checked e4m3 tensors on a GPU to the kernel that attends to them."""

import functools
from typing import Any

import torch
from torch import Tensor

from fa3.config import Config, check_fp8_config
from fa_common.compile import KernelKey, load
from fa_common.generation import ALIGNMENT, CONTIGUOUS, is_unreadable
from fa_common.problem import Problem, lse_shape


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    config: Config,
    out_dtype: torch.dtype,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of e4m3 q, k and v; descales are (batch, heads, blocks) each."""
    q, k, v = (_readable(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
    kernel = load(forward_key(problem, config, out_dtype), build_forward)
    # A counter for each launch, as in interface.py.
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if config.scheduler == "dynamic" else None
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, _num_sms(q.device))
    kernel(q, k, v, out, lse, *descales, cu_seqlens_q, cu_seqlens_k, counter, *numbers)
    return out, lse


def forward_key(problem: Problem, config: Config, out_dtype: torch.dtype) -> KernelKey:
    """The kernel; its dtype names those of q, k, v and of out. Raises ValueError for a config it cannot have."""
    check_fp8_config(config)
    windowed = problem.window != (None, None)
    out_name = str(out_dtype).removeprefix("torch.")
    return KernelKey(
        version="fa3",
        direction="forward",
        dtype=f"{problem.dtype_name}-{out_name}",
        head_dim=problem.head_dim,
        causal=problem.causal and not windowed,  # as in Generation.forward_key
        config=config,
        window=windowed,
        softcap=problem.softcap > 0,
        sequences="packed" if problem.varlen else "dense",
    )


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel; as in interface.py, the DSL is imported with the first one."""
    from fa3.forward_fp8 import compile_forward_fp8

    return compile_forward_fp8(key, options)


def _readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that TMA can read."""
    if is_unreadable(tensor) or tensor.data_ptr() % ALIGNMENT:
        return tensor.clone(memory_format=CONTIGUOUS)
    return tensor


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
