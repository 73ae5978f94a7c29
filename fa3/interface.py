"""FA3 from tensors to tensors: its kernel and how it is launched.

changed since fa2
  - CTAs are persistent, and have a producer warpgroup beside the consumers.
  - A window, a softcap and packed sequences: numbers and tensors that the kernel is given at each launch.
  - flash_attn_func and flash_attn_varlen_func take e4m3 tensors as well, which fp8.py attends to.
unchanged
  - Everything else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa3 import algorithm, fp8
from fa3.config import CAPABILITIES, FP8_CAPABILITIES, Config, default_config
from fa_common.compile import KernelKey
from fa_common.generation import Generation, Launch, LaunchShape
from fa_common.problem import Problem, Window


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
    other_capabilities=(FP8_CAPABILITIES,),
)
forward = GENERATION.forward
backward = GENERATION.backward


# As GENERATION's own two functions, and in FP8. They run a call by what those run it by, not through them, which would
# cost the host a call more.


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    config: Any = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * Q K^T) V, exact, and differentiable in q, k and v unless they are in FP8.

    q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim), all float16, all
    bfloat16 or all float8_e4m3fn. heads_kv divides heads_q (GQA, MQA); head_dim is a multiple of 8 up to 256, in FP8 of
    16. Mind the order: tensors for PyTorch's scaled_dot_product_attention have heads before seqlen; `transpose(1, 2)`
    them, no copy is made. CUDA tensors run a kernel, CPU tensors algorithm.py: as exact, and slow.

    In FP8, q, k and v stand for their products with descale_q, descale_k and descale_v; `quantize` makes all six. P is
    rounded to float8_e4m3fn too, where the others round it to their own type. A v with a unit stride along its keys, a
    multiple of 4 in number, and other strides that are multiples of 16 is read faster than one of rows.

    Args:
        softmax_scale: head_dim ** -0.5 if None.
        causal: query i sees the keys up to i + seqlen_k - seqlen_q, that is, masks are aligned bottom-right.
        window_size: (left, right), how many keys before and after its own position a query sees, both inclusive;
            None or -1 for no bound.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        deterministic: whether gradients are bitwise repeatable. The forward always is.
        return_lse: whether to return the log-sum-exp of each row of scores too, as differentiable as out.
        config: what the kernel is built from, an fa3.Config; None for the default.
        descale_q, descale_k, descale_v: FP8 only, float32, positive and finite (which is checked on a CPU only). () or
            (1,) is one scale; (batch, heads_kv) one of each sequence and head of k and v, also for the query heads that
            read it; (batch, heads_q, ceil(seqlen_q / 64)) one of each 64 rows of q, and (batch, heads_kv,
            ceil(seqlen_k / 128)) one of each 128 rows of k or v. None is 1.
        out_dtype: FP8 only, the type of out: bfloat16 if None, or float16.

    Returns:
        out, of q's shape and dtype or out_dtype; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) float32,
        natural logarithm. A query that sees no key gets out 0, lse -inf and gradients 0.

    Raises:
        UnsupportedProblem: fa3 lacks it, such as a gradient in FP8; the message says what, and why.
        TypeError, ValueError: an argument is wrong. Dropout, ALiBi, sinks and mask tensors do not exist here: each is a
            TypeError that names the argument.
    """
    arguments = (softmax_scale, causal, window_size, softcap, deterministic, config)
    has_bytes = getattr(q, "itemsize", None) == 1  # quicker than to ask for its type
    if not has_bytes and descale_q is descale_k is descale_v is out_dtype is None:
        out, lse = GENERATION._attend(q, k, v, arguments)
    else:
        out, lse = fp8.attend(q, k, v, arguments, (descale_q, descale_k, descale_v), out_dtype)
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    config: Any = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` over sequences of different lengths, packed one after the other without padding.

    q is (total_q, heads_q, head_dim), k and v are (total_k, heads_kv, head_dim). Sequence i has the queries
    cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys likewise; either may be empty.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), from 0 up to the total, on the device of q.
        max_seqlen_q, max_seqlen_k: no sequence is longer; Python ints.
        descale_q, descale_k, descale_v: as there; the blocks of a sequence count from its start, and max_seqlen_q and
            max_seqlen_k say how many places there are for them.

    Returns:
        out, of q's shape and dtype or out_dtype; with return_lse (out, lse), lse (heads_q, total_q) float32.

    Raises:
        As flash_attn_func. The values in cu_seqlens are checked on a CPU only: on a GPU that would wait for it.
    """
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments = (softmax_scale, causal, window_size, softcap, deterministic, config, *sequences)
    has_bytes = getattr(q, "itemsize", None) == 1  # quicker than to ask for its type
    if not has_bytes and descale_q is descale_k is descale_v is out_dtype is None:
        out, lse = GENERATION._attend(q, k, v, arguments)
    else:
        out, lse = fp8.attend(q, k, v, arguments, (descale_q, descale_k, descale_v), out_dtype)
    return (out, lse) if return_lse else out
