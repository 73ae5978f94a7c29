"""FA2: the same tiles, another loop (Dao 2023, algorithms 1 and 2).

changed since fa1
  - Queries are the outer loop and its iterations are independent, so the grid spreads them over the GPU (3.2).
  - O stays on chip until its row is complete, un-normalised: one division at the end, fewer non-matmul FLOPs (3.1.1).
  - Only LSE is saved, in place of row_max and row_sum (3.1.1).
  - Blocks that no query sees are skipped; of the others, only those on an edge of the mask are masked (3.1.1).
  - Backward: one CTA per key block; delta is computed once, beforehand; the CTAs meet in dQ, by atomics (3.2).
unchanged
  - The recurrence of row_max, row_sum and O; the recomputation of S and P in the backward.

    keys         0 1 2 3      Each row of this picture is one CTA, for one query block, head and batch. It walks from
    queries 0    <            the last visible block to the first: masked blocks, on the diagonal, come first.
    queries 1    < <
    queries 2    < < <

Upper-case names are tiles on chip, in the accumulator's precision; lower-case names are tensors in HBM. D is delta.
"""

from itertools import product

import torch
from einops import rearrange, repeat
from torch import Tensor

from fa_common.masks import BlockMask, Mask
from fa_common.memory import Memory, accumulator_dtype, counted, rounded


@counted
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    config,
    memory: Memory | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out like q, and lse (batch, heads_q, seqlen_q).

    q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim); window is inclusive,
    None for an unbounded side; config gives tile_m and tile_n; memory, if given, counts what the call costs.
    """
    (seqlen_q, heads_q), (seqlen_k, heads_kv) = q.shape[1:3], k.shape[1:3]
    blocks = BlockMask(Mask(seqlen_q, seqlen_k, causal, window), config.tile_m, config.tile_n)
    q = rearrange(q, "b m h d -> (b h) m d")
    k, v = (repeat(x, "b n h d -> (b h g) n d", g=heads_q // heads_kv) for x in (k, v))
    out, lse = torch.empty_like(q), q.new_empty((*q.shape[:2], 1), dtype=accumulator_dtype(q.dtype))

    for m_block in range(blocks.num_m_blocks):
        queries = blocks.queries(m_block)
        Q = memory.read(q[:, queries])
        O, row_sum = torch.zeros_like(Q), torch.zeros_like(Q[..., :1])
        # Finite: while a row has seen no key, its P is exp(-inf - row_max) = 0 and not exp(-inf + inf) = NaN.
        row_max = torch.full_like(row_sum, torch.finfo(Q.dtype).min)
        for n_block in reversed(blocks.n_blocks(m_block)):
            keys = blocks.keys(n_block)
            K, V = memory.read(k[:, keys]), memory.read(v[:, keys])
            S = softmax_scale * (Q @ K.mT)  # (batch * heads, queries, keys)
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            if not blocks.is_full(m_block, n_block):
                S = S.masked_fill(~blocks.visible(m_block, n_block, S.device), -torch.inf)
            row_max_new = torch.maximum(row_max, S.amax(-1, keepdim=True))
            P = torch.exp(S - row_max_new)
            rescale = torch.exp(row_max - row_max_new)
            row_sum = rescale * row_sum + P.sum(-1, keepdim=True)
            O = torch.baddbmm(rescale * O, rounded(P, v.dtype), V)
            row_max = row_max_new
        # A row's maximum alone adds exp(0) = 1 to row_sum, so the clamp is only for rows that have no key: 0 / 1.
        memory.write(out[:, queries], O / row_sum.clamp(min=1))
        memory.write(lse[:, queries], row_max + torch.log(row_sum))
    lse = rearrange(lse, "(b h) m 1 -> b h m", h=heads_q)
    return rearrange(out, "(b h) m d -> b m h d", h=heads_q).contiguous(), lse


@counted
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    config,
    memory: Memory | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv like q, k, v; dout is the gradient of out and dlse, if given, that of lse."""
    (seqlen_q, heads_q), (seqlen_k, heads_kv) = q.shape[1:3], k.shape[1:3]
    blocks = BlockMask(Mask(seqlen_q, seqlen_k, causal, window), config.tile_m, config.tile_n)
    group = heads_q // heads_kv
    q, out, dout = (rearrange(x, "b m (h g) d -> (b h) g m d", g=group) for x in (q, out, dout))
    k, v = (rearrange(x, "b n h d -> (b h) n d") for x in (k, v))
    lse = rearrange(lse, "b (h g) m -> (b h) g m 1", g=group)
    dlse = None if dlse is None else rearrange(dlse, "b (h g) m -> (b h) g m 1", g=group)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq_acc = torch.empty_like(q, dtype=accumulator_dtype(q.dtype))
    delta = torch.empty_like(lse)

    # Pre-pass over the rows: delta, and dQ cleared for the atomics.
    D = (memory.read(dout) * memory.read(out)).sum(-1, keepdim=True)
    memory.write(delta, D if dlse is None else D - memory.read(dlse))
    memory.write(dq_acc, torch.zeros_like(dq_acc))
    for n_block in range(blocks.num_n_blocks):
        keys = blocks.keys(n_block)
        K, V = memory.read(k[:, keys]), memory.read(v[:, keys])
        dK, dV = torch.zeros_like(K), torch.zeros_like(V)
        # The query heads that share K and V pass by one after another, so dK and dV stay on chip.
        for head, m_block in product(range(group), blocks.m_blocks(n_block)):
            queries = blocks.queries(m_block)
            Q, dO, LSE, D = (memory.read(x[:, head, queries]) for x in (q, dout, lse, delta))
            S = softmax_scale * (Q @ K.mT)  # (batch * heads_kv, queries, keys)
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            P = torch.exp(S - LSE)
            if not blocks.is_full(m_block, n_block):
                P = P.masked_fill(~blocks.visible(m_block, n_block, P.device), 0)
            dV = torch.baddbmm(dV, rounded(P, dout.dtype).mT, dO)
            dP = dO @ V.mT
            dS = P * (dP - D)
            if softcap:
                dS = dS * (1 - (S / softcap) ** 2)
            memory.atomic_add(dq_acc[:, head, queries], rounded(dS, k.dtype) @ K)
            dK = torch.baddbmm(dK, rounded(dS, q.dtype).mT, Q)
        memory.write(dk[:, keys], softmax_scale * dK)
        memory.write(dv[:, keys], dV)
    memory.write(dq, softmax_scale * memory.read(dq_acc))  # Post-pass: dQ in the type of q.
    dq = rearrange(dq, "(b h) g m d -> b m (h g) d", h=heads_kv)
    dk, dv = (rearrange(x, "(b h) n d -> b n h d", h=heads_kv) for x in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()
