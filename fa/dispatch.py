"""Which generation runs a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

import fa1.interface
import fa2.interface
import fa3.interface
from fa_common.generation import Generation, Prepared
from fa_common.problem import Problem, UnsupportedProblem, Window

AUTO = "auto"

# Oldest first: this order is the story, and "auto" walks it backwards.
GENERATIONS: dict[str, Generation] = {
    module.GENERATION.name: module.GENERATION for module in (fa1.interface, fa2.interface, fa3.interface)
}

_version: ContextVar[str] = ContextVar("version", default=AUTO)
_choices = Prepared()  # the generation of each kind of call


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    version: str = AUTO,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * Q K^T) V by the generation of choice, exact, and differentiable in q, k and v.

    q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim), float16 or bfloat16.
    `version` is "fa1", "fa2", "fa3", or "auto" for what `use` says, by default the newest generation that fits. Other
    arguments, and what is returned, are those of every generation: see `fa3.flash_attn_func`.

    Raises ValueError for an unknown version, UnsupportedProblem for what the generation lacks, with those that have it.
    """
    generation = _generation(version, q, k, v, (causal, window_size, softcap))
    return generation.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        config=config,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    version: str = AUTO,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` over packed sequences of different lengths: see `fa3.flash_attn_varlen_func`."""
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    generation = _generation(version, q, k, v, (causal, window_size, softcap), sequences)
    return generation.flash_attn_varlen_func(
        q,
        k,
        v,
        *sequences,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_lse,
        config=config,
    )


@contextmanager
def use(version: str) -> Iterator[None]:
    """Inside the block, calls whose version is "auto" run `version`; a call that names another version keeps its own.

    The choice is the thread's or the async task's own, and blocks nest. A function compiled by torch.compile keeps the
    version it was traced under. Raises ValueError for an unknown version.
    """
    _check_version(version)
    token = _version.set(version)
    try:
        yield
    finally:
        _version.reset(token)


def select(*subject: Problem | Tensor, version: str = AUTO, **arguments: Any) -> str:
    """The name of the generation that runs `select(problem)`, or `select(q, k, v, causal=True)` as in flash_attn_func.

    Raises UnsupportedProblem with the reasons if the version asked for, or with "auto" every one, cannot run it.
    """
    posed = len(subject) == 1 and isinstance(subject[0], Problem) and not arguments
    problem = subject[0] if posed else Problem.from_tensors(*subject, **arguments)
    version = resolve(version)
    reasons = why_not(problem)
    fitting = [name for name, reason in reasons.items() if reason is None]
    if version == AUTO and fitting:
        return fitting[-1]
    if version in fitting:
        return version
    if version == AUTO:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reversed(reasons.items()))
        raise UnsupportedProblem(f"no generation can run this problem{lines}")
    others = [f"{' and '.join(fitting)} can"] if fitting else []
    for name, generation in GENERATIONS.items():
        if name != version and (other_call := generation.other_call(problem)):
            others.append(f"{name} can: {other_call}")
    others = "; ".join(others) or "no other generation can"
    raise UnsupportedProblem(f"{version} cannot run this problem: {reasons[version]}; {others}")


def why_not(problem: Problem) -> dict[str, str | None]:
    """Each generation's reason against the problem, oldest first; None where it fits."""
    return {name: generation.why_not(problem) for name, generation in GENERATIONS.items()}


# torch.compile cannot trace a context variable: it takes the version for a constant of the graph.
@torch.compiler.assume_constant_result
def _version_in_use() -> str:
    return _version.get()


def resolve(version: str) -> str:
    """The version that a call asks for: its own, or if that is "auto" the one that `use` has set."""
    _check_version(version)
    return _version_in_use() if version == AUTO else version


def _check_version(version: str) -> None:
    if version != AUTO and version not in GENERATIONS:
        raise ValueError(f"version must be one of {', '.join(GENERATIONS)}, {AUTO}; got {version!r}")


def _generation(
    version: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: tuple[bool, Window, float],
    sequences: tuple[Tensor, Tensor, int, int] | None = None,
) -> Generation:
    """The generation that runs such a call: chosen at the first, looked up at the next ones."""
    version = resolve(version)
    if torch.compiler.is_compiling():
        return GENERATIONS[_select(version, q, k, v, mask, sequences) if version == AUTO else version]
    try:
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        # Of packed sequences only the longest matter: they tell which bounds of a window hide something.
        longest = sequences and sequences[2:]
        key = (version, needs_grad, q.shape, q.dtype, q.device, k.shape, mask, longest)
        generation = _choices.get(key)
    except (AttributeError, TypeError):  # no tensor, or an argument that cannot be hashed: the checks name it
        return GENERATIONS[_select(version, q, k, v, mask, sequences)]
    if generation is None:
        generation = GENERATIONS[_select(version, q, k, v, mask, sequences)]
        _choices.keep(key, generation)
    return generation


def _select(version: str, q: Tensor, k: Tensor, v: Tensor, mask: tuple, sequences: tuple | None) -> str:
    arguments = dict(zip(("causal", "window_size", "softcap"), mask, strict=True))
    if sequences is not None:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        arguments |= zip(names, sequences, strict=True)
    return select(q, k, v, version=version, **arguments)
