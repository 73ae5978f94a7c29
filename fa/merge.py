"""Attention over a set of keys from attention over its parts."""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, from the (out, lse) that the same queries got over disjoint parts of the keys.

    A part counts by its share of the whole row sum, exp(lse_part - lse): the online softmax's step from one key block
    to the next, between whole calls. Differentiable, LSE too. For ring parallelism, shared prefixes, split keys.

    Args:
        outs: each (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim).
        lses: each float32 (batch, heads, seqlen_q), or (heads, total_q).

    Returns:
        out, added up in the dtype of lse and rounded to that of the parts, and lse. A query that saw no key in any part
        has out 0 and lse -inf.

    Raises:
        ValueError: not as many outs as lses, none, or shapes that differ or do not belong together.
    """
    _check(outs, lses)
    lse_parts = torch.stack(tuple(lses))
    row_max = lse_parts.detach().amax(0)
    row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)  # else a row without keys would compute -inf + inf
    weights = torch.exp(lse_parts - row_max)
    row_sum = weights.sum(0)
    no_key = row_sum == 0
    row_sum = row_sum.masked_fill(no_key, 1.0)  # the division and the logarithm, and their gradients, stay finite
    lse = (row_max + torch.log(row_sum)).masked_fill(no_key, -torch.inf)
    shares = rearrange(weights / row_sum, "parts ... heads seqlen -> parts ... seqlen heads 1")
    out = sum(share * out for share, out in zip(shares, outs, strict=True))
    return out.to(outs[0].dtype), lse


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge needs one lse for each out, and at least one; got {len(outs)} outs, {len(lses)} lses")
    for out, lse in zip(outs, lses, strict=True):
        *batch, seqlen, heads, _ = outs[0].shape
        if out.shape != outs[0].shape or lse.shape != (*batch, heads, seqlen):
            raise ValueError(
                f"the parts must be alike, out {tuple(outs[0].shape)} with lse {(*batch, heads, seqlen)}; "
                f"got out {tuple(out.shape)} with lse {tuple(lse.shape)}"
            )
