"""From checked 16-bit (or fp32) tensors on a GPU to the kernels that quantise them."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fa3.config import KV_BLOCK, Q_BLOCK
from fa3.fp8_launch import strides_by_columns
from fa3.quantize import build_quantize, quantize_key
from fa_common.compile import load
from fa_common.generation import allocation, is_unreadable, readable
from fa_common.problem import Problem

E4M3 = torch.float8_e4m3fn


def prepare(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], scales: str, signs: Tensor | None
) -> Callable[..., tuple[Tensor, ...]]:
    """Compiles or loads the kernels and makes every choice of a call whose tensors are laid out like these.

    Args:
        problem: of the tensors, which have been checked.
        tensors: q, k, v, float16, bfloat16 or float32, (batch, seqlen, heads, head_dim), or packed (total, heads,
            head_dim); head_dim a multiple of 16 up to 256.
        scales: "block", "head" or "tensor".
        signs: float32 (head_dim,) of 1 and -1, by which columns of q and k are multiplied before the Hadamard
            transform; None for neither.

    Returns:
        run(tensors, cu_seqlens), which quantises such tensors on their device's current stream; cu_seqlens are those of
        queries and keys, int32 (batch + 1,), or None and None. It returns (q, k, v, descale_q, descale_k, descale_v):
        float8_e4m3fn, contiguous but for a v that has `strides_by_columns`, and float32: scales="block" (batch, heads,
        blocks) with a block for 64 rows of q and 128 of k and v, "head" (batch, heads_kv), "tensor" (1,). What no row
        has, and what has only zeros, gets descale 1. Raises TypeError or ValueError for what the kernels cannot take,
        with nothing launched.
    """
    device, hadamard = tensors[0].device, signs is not None
    must_copy = any(map(is_unreadable, tensors))
    max_seqlens = problem.seqlen_q, problem.seqlen_k
    of_heads = problem.batch, problem.heads_kv
    of_keys = *of_heads, -(-problem.seqlen_k // KV_BLOCK)
    shapes = {
        "block": ((problem.batch, problem.heads_q, -(-problem.seqlen_q // Q_BLOCK)), of_keys, of_keys),
        "head": (of_heads,) * 3,
        "tensor": ((1,),) * 3,
    }[scales]
    strides_v = strides_by_columns(tensors[2].shape)
    strides = (None, None, strides_v)
    new_values = [allocation(x.shape, E4M3, device, y) for x, y in zip(tensors, strides, strict=True)]
    new_descales = [allocation(shape, torch.float32, device) for shape in shapes]

    def run_on_blocks(tensors: tuple, cu_seqlens: tuple) -> tuple[Tensor, ...]:
        if must_copy:
            tensors = map(readable, tensors)
        values, descales = [new() for new in new_values], [new() for new in new_descales]
        kernel(*tensors, *values, *descales, None, signs, *cu_seqlens, *max_seqlens)
        return *values, *descales

    def run_on_more(tensors: tuple, cu_seqlens: tuple) -> tuple[Tensor, ...]:
        if must_copy:
            tensors = tuple(map(readable, tensors))
        values, descales = [new() for new in new_values], [new() for new in new_descales]
        targets = [x.as_strided((*of_heads, 1), (*strides, 0)) for x in descales]
        amax = new_amax().as_strided((3, *of_heads), (amax_stride, *strides))
        arguments = (*tensors, *values, *targets, amax, signs, *cu_seqlens, *max_seqlens)
        find_maxima(*arguments)
        scale(*arguments)
        return *values, *descales

    if problem.batch == 0:  # nothing to launch
        return lambda *_: (*(new() for new in new_values), *(new().fill_(1) for new in new_descales))
    if scales == "block":
        kernel = load(quantize_key(tensors[0], "block", hadamard, strides_v is not None), build_quantize)
        return run_on_blocks
    find_maxima, scale = (
        load(quantize_key(tensors[0], stage, hadamard, strides_v is not None), build_quantize)
        for stage in ("maximum", "scale")
    )
    # The kernels' descales are (batch, heads, blocks), and amax (3, batch, heads): a head is one block, and a tensor
    # one number everywhere.
    strides = (problem.heads_kv, 1) if scales == "head" else (0, 0)
    new_amax = functools.partial(torch.zeros, (3, *shapes[0]), dtype=torch.float32, device=device)
    amax_stride = math.prod(shapes[0])
    return run_on_more
