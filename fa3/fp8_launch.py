"""From checked e4m3 tensors on a GPU to the kernel that attends to them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa3.config import Config, check_fp8_config
from fa_common.compile import KernelKey, load
from fa_common.generation import allocation, is_unreadable, readable
from fa_common.problem import Problem, lse_shape

# (q, k, v, descales, cu_seqlens_q, cu_seqlens_k); the last two are None unless sequences are packed
Run = Callable[[Tensor, Tensor, Tensor, tuple, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


def prepare(
    problem: Problem,
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    expand: Sequence[Callable[[Tensor | None], Tensor]],
    out_dtype: torch.dtype,
) -> Run:
    """Compiles or loads the kernel and makes every choice of a call whose tensors are laid out like these.

    Each of `expand` makes (batch, heads, blocks) of the descale of q, k or v that a call is given.
    """
    v_by_columns = lies_by_columns(v)
    kernel = load(forward_key(problem, config, out_dtype, v_by_columns), build_forward)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, num_sms, 1)  # no splits
    expand_q, expand_k, expand_v = expand
    must_copy = any(map(is_unreadable, (q, k) if v_by_columns else (q, k, v)))
    allocate_out = allocation(q.shape, out_dtype, q.device)
    allocate_lse = allocation(lse_shape(q), torch.float32, q.device)
    # A counter for each launch, as in interface.py.
    new_counter = functools.partial(torch.zeros, 1, dtype=torch.int32, device=q.device)
    is_dynamic = config.scheduler == "dynamic"

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descales: tuple[Tensor | None, Tensor | None, Tensor | None],
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if must_copy:
            q, k, v = readable(q), readable(k), v if v_by_columns else readable(v)
        descale_q, descale_k, descale_v = descales
        scales = (expand_q(descale_q), expand_k(descale_k), expand_v(descale_v))
        out, lse = allocate_out(), allocate_lse()
        counter = new_counter() if is_dynamic else None
        kernel(q, k, v, out, lse, *scales, cu_seqlens_q, cu_seqlens_k, counter, *numbers)
        return out, lse

    return run


def lies_by_columns(v: Tensor) -> bool:
    """Whether V (batch, seqlen, heads, head_dim) has its keys, not its head_dim, next to each other, and the kernel
    takes it so: its other strides are multiples of 16, and seqlen is one of 4, as such keys come by fours (loads.py).
    """
    if v.ndim != 4 or v.shape[1] % 4:
        return False
    batch, key, head, column = v.stride()
    return key == 1 != column and batch % 16 == head % 16 == column % 16 == 0


def strides_by_columns(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides with which `quantize` makes V of this shape so; None if it makes rows, for which any length will do.

    Packed sequences begin anywhere, and their keys would come by fours from there.
    """
    if len(shape) != 4 or shape[1] == 0 or shape[1] % 16:
        return None
    _, seqlen, heads, head_dim = shape
    return heads * head_dim * seqlen, 1, head_dim * seqlen, seqlen


def quantized_by_columns(problem: Problem) -> bool:
    """Whether `quantize` makes the V of a problem so."""
    shape = (problem.batch, problem.seqlen_k, problem.heads_kv, problem.head_dim)
    return not problem.varlen and strides_by_columns(shape) is not None


def forward_key(problem: Problem, config: Config, out_dtype: torch.dtype, v_by_columns: bool) -> KernelKey:
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
        v_by_columns=v_by_columns,
    )


def build_forward(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel; as in interface.py, the DSL is imported with the first one."""
    from fa3.forward_fp8 import compile_forward_fp8

    return compile_forward_fp8(key, options)
