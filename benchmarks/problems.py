"""What is measured: self-attention of fixed size in tokens and width, over head_dim, mask and sequence length."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from benchmarks.rows import Row
from fa_common.problem import Problem

TOKENS = 16384  # batch * seqlen: every problem reads the same bytes of Q, K and V
WIDTH = 2048  # heads * head_dim

HEAD_DIMS = (64, 128)
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
) -> list[Problem]:
    """The problems of a sweep; within a dtype, head_dim and mask the short sequences come first.

    Left out, `batch` is what makes up TOKENS and `heads` what makes up WIDTH.
    """
    return [
        Problem(
            batch=batch or max(1, TOKENS // seqlen),
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            heads_q=heads or max(1, WIDTH // head_dim),
            heads_kv=heads or max(1, WIDTH // head_dim),
            head_dim=head_dim,
            dtype=getattr(torch, dtype),
            causal=mask == "causal",
        )
        for dtype, head_dim, mask, seqlen in product(dtypes, head_dims, masks, sorted(seqlens))
    ]


def random_tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Normally distributed Q, K and V; the same ones each time for the same problem."""
    generator = torch.Generator(problem.device).manual_seed(0)

    def draw(seqlen: int, heads: int) -> Tensor:
        shape = (problem.batch, seqlen, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device=problem.device).to(problem.dtype)

    return (
        draw(problem.seqlen_q, problem.heads_q),
        draw(problem.seqlen_k, problem.heads_kv),
        draw(problem.seqlen_k, problem.heads_kv),
    )


def name(problem: Problem) -> str:
    """One problem in a few words, e.g. "bfloat16 d=128 causal 4 x 4096 x 16" (batch, seqlen, heads)."""
    shape = f"{problem.batch} x {problem.seqlen_q} x {problem.heads_q}"
    return f"{problem.dtype_name} d={problem.head_dim} {problem.mask_name} {shape}"


def problem_columns(problem: Problem) -> dict:
    """A problem as columns of a row."""
    window = None if problem.window == (None, None) else list(problem.window)
    shape = {column: getattr(problem, column) for column in SHAPE_COLUMNS}
    return shape | {"dtype": problem.dtype_name, "window": window}


def problem_of(row: Row) -> Problem:
    """The problem that a row of self-attention was measured on."""
    columns = {column: getattr(row, column) for column in SHAPE_COLUMNS}
    return Problem(**columns, dtype=getattr(torch, row.dtype), window=tuple(row.window or (None, None)))
