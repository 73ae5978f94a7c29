"""Attention by its definition, in float64: what every generation is compared with.

    S = softmax_scale * Q K^T, softcapped to softcap * tanh(S / softcap), -inf where a query does not see a key
    LSE = log sum exp S        P = exp(S - LSE)        O = P V

A row without any key has out 0, LSE -inf and gradients 0.
"""

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from torch import Tensor

from fa_common.masks import Mask

# Scores held at a time, 8 bytes each: long sequences are worked off in slices of queries.
MAX_SCORES = 2**27


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse), both float64: out like q, lse (batch, heads_q, seqlen_q).

    q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim), any type and device.
    """
    problem = _Problem(q, k, v, softmax_scale, causal, window, softcap)
    out = torch.empty_like(problem.q)
    lse = torch.empty_like(out[..., 0])
    for queries in problem.slices_of_queries():
        S, visible, _ = problem.scores(queries)
        lse[..., queries] = torch.logsumexp(S, dim=-1)
        P = _probabilities(S, lse[..., queries], visible)
        out[..., queries, :] = einsum(P, problem.v, "b h g m n, b h n d -> b h g m d")
    return rearrange(out, "b h g m d -> b m (h g) d"), rearrange(lse, "b h g m -> b (h g) m")


def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv), float64, like q, k, v, of a loss whose gradients are dout and, if given, dlse."""
    problem = _Problem(q, k, v, softmax_scale, causal, window, softcap)
    group = problem.q.shape[2]
    dout = rearrange(dout.double(), "b m (h g) d -> b h g m d", g=group)
    dlse = None if dlse is None else rearrange(dlse.double(), "b (h g) m -> b h g m", g=group)
    dq, dk, dv = torch.empty_like(problem.q), torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    for queries in problem.slices_of_queries():
        S, visible, slope = problem.scores(queries)
        P = _probabilities(S, torch.logsumexp(S, dim=-1), visible)
        dO = dout[..., queries, :]
        dv += einsum(P, dO, "b h g m n, b h g m d -> b h n d")
        dP = einsum(dO, problem.v, "b h g m d, b h n d -> b h g m n")
        # The softmax's own derivative takes off the mean of dP under P; that of LSE by S is P.
        delta = (P * dP).sum(-1)
        if dlse is not None:
            delta = delta - dlse[..., queries]
        dS = problem.softmax_scale * slope * P * (dP - delta[..., None])
        dq[..., queries, :] = einsum(dS, problem.k, "b h g m n, b h n d -> b h g m d")
        dk += einsum(dS, problem.q[..., queries, :], "b h g m n, b h g m d -> b h n d")
    dk, dv = (rearrange(x, "b h n d -> b n h d") for x in (dk, dv))
    return rearrange(dq, "b h g m d -> b m (h g) d"), dk, dv


class _Problem:
    """The inputs in float64, with the query heads that share a key head in a dimension of their own."""

    def __init__(self, q, k, v, softmax_scale, causal, window, softcap):
        self.q = rearrange(q.double(), "b m (h g) d -> b h g m d", h=k.shape[2])
        self.k, self.v = (rearrange(x.double(), "b n h d -> b h n d") for x in (k, v))
        self.softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self.softcap = softcap
        self.mask = Mask(q.shape[1], k.shape[1], causal, window)

    def slices_of_queries(self) -> Iterator[slice]:
        batch, heads_kv, group, seqlen_q, _ = self.q.shape
        scores_per_query = max(1, batch * heads_kv * group * self.mask.seqlen_k)
        step = max(1, MAX_SCORES // scores_per_query)
        for start in range(0, seqlen_q, step):
            yield slice(start, min(start + step, seqlen_q))

    def scores(self, queries: slice) -> tuple[Tensor, Tensor, Tensor | float]:
        """S (batch, heads_kv, group, queries, keys), where it is visible (queries, keys), and the softcap's slope."""
        S = self.softmax_scale * einsum(self.q[..., queries, :], self.k, "b h g m d, b h n d -> b h g m n")
        slope = 1.0
        if self.softcap:
            tanh = torch.tanh(S / self.softcap)
            S, slope = self.softcap * tanh, 1 - tanh**2
        visible = self.mask.visible(queries, slice(0, self.mask.seqlen_k), S.device)
        return S.masked_fill(~visible, -torch.inf), visible, slope


def _probabilities(S: Tensor, lse: Tensor, visible: Tensor) -> Tensor:
    # Where nothing is visible S - LSE is -inf + inf: the mask, not the exponential, makes P zero.
    return torch.exp(S - lse[..., None]).masked_fill(~visible, 0)
