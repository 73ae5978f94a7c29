"""What is measured: self-attention of fixed size in tokens and width, over head_dim, mask and sequence length."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from benchmarks.rows import Row
from fa_common.problem import Problem
from fa_common.reference import attention, gradients

TOKENS = 16384  # batch * seqlen: every problem reads the same bytes of Q, K and V
WIDTH = 2048  # heads * head_dim

HEAD_DIMS = (64, 128, 256)
MASKS = ("full", "causal")
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (1024, 16384)
DTYPES = ("bfloat16",)

SHAPE_COLUMNS = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "causal")  # of a row


def grid(
    head_dims: Sequence[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    seqlens: Sequence[int] = SEQLENS,
    dtypes: Sequence[str] = DTYPES,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
) -> list[Problem]:
    """The problems of a sweep; within a dtype, head_dim and mask the short sequences come first.

    Left out, `batch` is what makes up TOKENS, `heads` what makes up WIDTH, and `heads_kv` is as many.
    """
    return [
        Problem(
            batch=batch or max(1, TOKENS // seqlen),
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            heads_q=heads or max(1, WIDTH // head_dim),
            heads_kv=heads_kv or heads or max(1, WIDTH // head_dim),
            head_dim=head_dim,
            dtype=getattr(torch, dtype),
            causal=mask == "causal",
        )
        for dtype, head_dim, mask, seqlen in product(dtypes, head_dims, masks, sorted(seqlens))
    ]


def random_tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Normally distributed Q, K and V; the same ones each time for the same problem.

    (batch, seqlen, heads, head_dim), or (total, heads, head_dim) of packed sequences.
    """
    generator = torch.Generator(problem.device).manual_seed(0)

    def draw(seqlen: int, total: int, heads: int) -> Tensor:
        shape = (total, heads, problem.head_dim) if problem.varlen else (problem.batch, seqlen, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device=problem.device).to(problem.dtype)

    return (
        draw(problem.seqlen_q, problem.total_q, problem.heads_q),
        draw(problem.seqlen_k, problem.total_k, problem.heads_kv),
        draw(problem.seqlen_k, problem.total_k, problem.heads_kv),
    )


def random_gradient(problem: Problem) -> Tensor:
    """A normally distributed dO, like q; the same one each time for the same problem."""
    generator = torch.Generator(problem.device).manual_seed(1)
    q = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    shape = (*q, problem.heads_q, problem.head_dim)
    return torch.randn(shape, generator=generator, device=problem.device).to(problem.dtype)


def packing(problem: Problem) -> dict[str, Tensor | int]:
    """What `flash_attn_varlen_func` is told about packed sequences; nothing for a problem without any."""
    if not problem.varlen:
        return {}
    ends_q, ends_k = (list(accumulate(lengths, initial=0)) for lengths in zip(*problem.seqlens, strict=True))
    return {
        "cu_seqlens_q": torch.tensor(ends_q, dtype=torch.int32, device=problem.device),
        "cu_seqlens_k": torch.tensor(ends_k, dtype=torch.int32, device=problem.device),
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
    }


def exact_output(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O by the fp64 reference, like q: one sequence at a time, since K and V in fp64 are four times as large."""
    mathematics = {name: getattr(problem, name) for name in ("softmax_scale", "causal", "window", "softcap")}
    outs = [attention(*one, **mathematics)[0] for one in _sequences(problem, q, k, v)]
    return torch.cat(outs, dim=1)[0] if problem.varlen else torch.cat(outs)


def exact_gradients(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """dQ, dK and dV of `random_gradient` by the fp64 reference, one sequence at a time."""
    mathematics = {name: getattr(problem, name) for name in ("softmax_scale", "causal", "window", "softcap")}
    douts = [dout for dout, _, _ in _sequences(problem, random_gradient(problem), k, v)]
    sequences = zip(douts, _sequences(problem, q, k, v), strict=True)
    found = [gradients(dout, *one, **mathematics) for dout, one in sequences]
    return tuple(torch.cat(ones, dim=1)[0] if problem.varlen else torch.cat(ones) for ones in zip(*found, strict=True))


def _sequences(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Q, K and V of each sequence, (1, seqlen, heads, head_dim)."""
    if not problem.varlen:
        yield from zip(q.split(1), k.split(1), v.split(1), strict=True)
        return
    bounds_q, bounds_k = (pairwise(accumulate(lengths, initial=0)) for lengths in zip(*problem.seqlens, strict=True))
    for (first_q, end_q), (first_k, end_k) in zip(bounds_q, bounds_k, strict=True):
        yield q[None, first_q:end_q], k[None, first_k:end_k], v[None, first_k:end_k]


def kind(problem: Problem) -> str:
    """What sets a problem apart from others of its dtype and size: "full", "causal, GQA 32/8", "window (1024, 0)"."""
    mask = problem.mask_name
    if problem.causal and problem.window != (None, None):
        mask = f"window ({problem.window[0]}, 0)"
    extras = [f"GQA {problem.heads_q}/{problem.heads_kv}"] if problem.group > 1 else []
    extras += ["varlen"] if problem.varlen else []
    extras += [f"softcap {problem.softcap:g}"] if problem.softcap else []
    return ", ".join([mask, *extras])


def size(problem: Problem) -> str:
    """Batch, seqlen and heads: "4 x 4096 x 16", "8 x 1 over 32768 x 32", "6 x up to 8192 x 16"."""
    seqlen = str(problem.seqlen_q)
    if problem.seqlen_k != problem.seqlen_q:
        seqlen += f" over {problem.seqlen_k}"
    return f"{problem.batch} x {'up to ' if problem.varlen else ''}{seqlen} x {problem.heads_q}"


def name(problem: Problem) -> str:
    """One problem in a few words, e.g. "bfloat16 d=128 causal 4 x 4096 x 16" (batch, seqlen, heads)."""
    return f"{problem.dtype_name} d={problem.head_dim} {kind(problem)} {size(problem)}"


def code(problem: Problem) -> tuple:
    """What, of all the problems of a sweep, decides which code runs; their lengths may still decide on its tiles."""
    return problem.dtype, problem.head_dim, kind(problem)


def problem_columns(problem: Problem) -> dict:
    """A problem as columns of a row."""
    window = None if problem.window == (None, None) else list(problem.window)
    shape = {column: getattr(problem, column) for column in SHAPE_COLUMNS}
    lengths = [seqlen_k for _, seqlen_k in problem.seqlens] if problem.varlen else None
    extras = {"lengths": lengths, "softcap": problem.softcap or None}
    return shape | {"dtype": problem.dtype_name, "window": window} | extras


def problem_of(row: Row) -> Problem:
    """The problem that a row was measured on."""
    columns = {column: getattr(row, column) for column in SHAPE_COLUMNS}
    if row.lengths:
        columns |= packed(row.lengths)
    return Problem(
        **columns,
        dtype=getattr(torch, row.dtype),
        window=tuple(row.window or (None, None)),
        softcap=row.softcap or 0.0,
    )


def packed(lengths: Sequence[int]) -> dict:
    """Self-attention over packed sequences of these lengths, as fields of a Problem."""
    return {
        "batch": len(lengths),
        "seqlen_q": max(lengths),
        "seqlen_k": max(lengths),
        "varlen": True,
        "total_q": sum(lengths),
        "total_k": sum(lengths),
        "seqlens": tuple((length, length) for length in lengths),
    }
