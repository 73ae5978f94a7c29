"""What a call on e4m3 tensors is given: their types, the scales that go with them, and the errors if one is wrong."""

from collections.abc import Callable

import torch
from torch import Tensor

from fa3.config import FP8_CAPABILITIES, KV_BLOCK, Q_BLOCK
from fa_common.problem import Problem, UnsupportedProblem

E4M3 = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16)

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k and v; None is 1


# ---- What scales become


def expansions(problem: Problem, descales: Descales, device: torch.device) -> list[Callable[[Tensor | None], Tensor]]:
    """What makes (batch, heads, blocks) of scales shaped like each of these, with stride 0 where several share one.

    Views, except of the scales of the heads of k and v for more query heads.
    """
    one = _one(device) if any(x is None for x in descales) else None
    return [
        _expansion(descale, one, shape)
        for descale, shape in zip(descales, _scale_shapes(problem).values(), strict=True)
    ]


def _expansion(
    descale: Tensor | None, one: Tensor | None, of_blocks: tuple[int, int, int]
) -> Callable[[Tensor | None], Tensor]:
    if descale is None:
        ones = one.expand(of_blocks)
        return lambda _: ones
    if descale.shape == of_blocks:
        return lambda x: x
    if descale.ndim < 2:
        return lambda x: x.as_strided(of_blocks, (0, 0, 0))  # takes two thirds of the time of `expand`
    (_, heads_kv), (_, heads, _) = descale.shape, of_blocks
    if heads == heads_kv:
        return lambda x: x.as_strided(of_blocks, (*x.stride(), 0))
    return lambda x: x.repeat_interleave(heads // heads_kv, 1).as_strided(of_blocks, (heads, 1, 0))


def _one(device: torch.device) -> Tensor:
    """The scale 1, which any stream may read: a copy from the CPU waits until it is there. A capture cannot wait."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.ones((), device=device)
    return torch.ones(()).to(device)


def _scale_shapes(problem: Problem) -> dict[str, tuple[int, int, int]]:
    """(batch, heads, blocks) of each tensor's scales."""
    blocks_q, blocks_k = -(-problem.seqlen_q // Q_BLOCK), -(-problem.seqlen_k // KV_BLOCK)
    of_keys = (problem.batch, problem.heads_kv, blocks_k)
    return {
        "descale_q": (problem.batch, problem.heads_q, blocks_q),
        "descale_k": of_keys,
        "descale_v": of_keys,
    }


# ---- Checks


def check_types(q: Tensor, k: Tensor, v: Tensor, out_dtype: torch.dtype) -> None:
    """That q, k and v are all e4m3, and out may be what is asked for; that they are tensors at all a Problem checks."""
    dtypes = [x.dtype for x in (q, k, v) if isinstance(x, Tensor)]
    if E4M3 in dtypes and set(dtypes) != {E4M3}:
        names = ", ".join(map(str, dtypes))
        raise ValueError(f"q, k and v must all be {E4M3}; got {names}; quantize(q, k, v) makes all three")
    if dtypes and dtypes[0] in OUT_DTYPES:
        raise ValueError(
            f"descale_q, descale_k, descale_v and out_dtype are for {E4M3} tensors; got {dtypes[0]}; leave them out, "
            "or quantize(q, k, v) first"
        )
    if dtypes and dtypes[0] != E4M3:
        name = str(dtypes[0]).removeprefix("torch.")
        raise UnsupportedProblem(
            f"fa3 cannot run this problem: it takes float8_e4m3fn, float16 or bfloat16, not {name}: "
            "quantize(q, k, v) makes float8_e4m3fn"
        )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be torch.bfloat16 or torch.float16; got {out_dtype}; convert out afterwards")


def check_problem(problem: Problem) -> None:
    """That fp8 has this head_dim, and a kernel where the tensors are."""
    if problem.head_dim not in FP8_CAPABILITIES.head_dims:
        raise UnsupportedProblem(
            f"fp8 attention takes head_dims that are multiples of 16 up to 256; got {problem.head_dim}; pad q, k and v "
            "with zeros, given the softmax_scale of the head_dim before padding"
        )
    if problem.device != "cpu" and problem.arch not in FP8_CAPABILITIES.archs:
        raise UnsupportedProblem(
            f"fp8 attention runs on sm_90, this GPU is sm_{problem.arch}: move q, k and v there, or to the CPU"
        )


def check_scales(problem: Problem, descales: Descales, device: torch.device) -> None:
    """That each may be the scale of its tensor, which is on `device`."""
    for (name, shape), descale in zip(_scale_shapes(problem).items(), descales, strict=True):
        _check_scale(name, descale, problem, device, shape)


def _check_scale(
    name: str, descale: Tensor | None, problem: Problem, device: torch.device, of_blocks: tuple[int, int, int]
) -> None:
    if descale is None:
        return
    if not isinstance(descale, Tensor):
        raise TypeError(f"{name} must be a float32 tensor, or None for 1; got {type(descale).__name__}")
    if descale.dtype != torch.float32:
        raise ValueError(f"{name} must be float32; got {descale.dtype}; convert with .to(torch.float32)")
    if descale.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}; got {descale.device}; move with .to(device)")
    of_heads = (problem.batch, problem.heads_kv)
    if descale.shape not in ((), (1,), of_heads, of_blocks):
        raise ValueError(
            f"{name} must be () or (1,) for one scale, {of_heads} for one of each sequence and head of k and v, or "
            f"{of_blocks} for one of each block; got {tuple(descale.shape)}; quantize(q, k, v) makes them"
        )
    if problem.device == "cpu" and not (descale.isfinite() & (descale > 0)).all():
        raise ValueError(f"{name} must be positive and finite; got {descale.min().item()} to {descale.max().item()}")


def want_gradient(*tensors: Tensor | None) -> bool:
    """Whether one of them requires a gradient; what is no tensor the checks name."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
