"""FA1: exact attention that never writes S or P to HBM (Dao et al. 2022, algorithms 1 and 4).

A block of keys stays on chip while all query blocks pass by. Softmax needs a whole row and a block shows only a part,
so each row carries its maximum and sum so far, and what was computed under an old maximum is rescaled to the new one.
The backward does not read P either: it computes S again, and P = exp(S - LSE).

    queries      0 1 2 3      One CTA per batch and head walks this picture row by row. O, normalised, goes to HBM and
    keys 0       > > > >      back at each visit, with row_max and row_sum; so does dQ in the backward. K, V, dK and dV
    keys 1         > > >      stay on chip. Causal: blocks above the diagonal are skipped, every other one is masked.
    keys 2           > >

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
    # Without any key block nobody visits a query: zeros and -inf stay.
    out, lse = torch.zeros_like(q), q.new_full((*q.shape[:2], 1), -torch.inf, dtype=accumulator_dtype(q.dtype))
    o_acc, max_acc, sum_acc = torch.empty_like(q, dtype=lse.dtype), torch.empty_like(lse), torch.empty_like(lse)

    for n_block in range(blocks.num_n_blocks):
        keys = blocks.keys(n_block)
        K, V = memory.read(k[:, keys]), memory.read(v[:, keys])
        # Key block 0 visits every query block: that initialises O, row_max and row_sum.
        for m_block in blocks.m_blocks(n_block) if n_block else range(blocks.num_m_blocks):
            queries = blocks.queries(m_block)
            Q = memory.read(q[:, queries])
            if n_block == 0:
                O, row_sum = torch.zeros_like(Q), torch.zeros_like(Q[..., :1])
                # Finite: while a row has seen no key, its P is exp(-inf - row_max) = 0 and not exp(-inf + inf) = NaN.
                row_max = torch.full_like(row_sum, torch.finfo(Q.dtype).min)
            else:
                O, row_max, row_sum = (memory.read(x[:, queries]) for x in (o_acc, max_acc, sum_acc))
            S = softmax_scale * (Q @ K.mT)  # (batch * heads, queries, keys)
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            S = S.masked_fill(~blocks.visible(m_block, n_block, S.device), -torch.inf)
            row_max_new = torch.maximum(row_max, S.amax(-1, keepdim=True))
            P = torch.exp(S - row_max_new)
            rescale = torch.exp(row_max - row_max_new)
            row_sum_new = rescale * row_sum + P.sum(-1, keepdim=True)
            # The last visit divided O by row_sum: multiply by it, add P V, divide by the new one. A row's maximum alone
            # adds exp(0) = 1 to row_sum, so the clamp is only for rows that have no key: 0 / 1.
            O = torch.baddbmm(rescale * row_sum * O, rounded(P, v.dtype), V) / row_sum_new.clamp(min=1)
            if n_block < max(blocks.n_blocks(m_block), default=0):
                for x, tile in ((o_acc, O), (max_acc, row_max_new), (sum_acc, row_sum_new)):
                    memory.write(x[:, queries], tile)
            else:
                memory.write(out[:, queries], O)
                memory.write(lse[:, queries], row_max_new + torch.log(row_sum_new))
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
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    dq_acc = torch.empty_like(q, dtype=accumulator_dtype(q.dtype))

    for n_block in range(blocks.num_n_blocks):
        keys = blocks.keys(n_block)
        K, V = memory.read(k[:, keys]), memory.read(v[:, keys])
        dK, dV = torch.zeros_like(K), torch.zeros_like(V)
        # Key block 0 visits every query block: that initialises dQ. Heads that share K and V pass by one after another.
        m_blocks = blocks.m_blocks(n_block) if n_block else range(blocks.num_m_blocks)
        for head, m_block in product(range(group), m_blocks):
            queries = blocks.queries(m_block)
            Q, O, dO, LSE = (memory.read(x[:, head, queries]) for x in (q, out, dout, lse))
            dQ = memory.read(dq_acc[:, head, queries]) if n_block else torch.zeros_like(Q)
            D = (dO * O).sum(-1, keepdim=True)
            D = D if dlse is None else D - memory.read(dlse[:, head, queries])
            S = softmax_scale * (Q @ K.mT)  # (batch * heads_kv, queries, keys)
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            P = torch.exp(S - LSE).masked_fill(~blocks.visible(m_block, n_block, S.device), 0)
            dV = torch.baddbmm(dV, rounded(P, dout.dtype).mT, dO)
            dP = dO @ V.mT
            dS = P * (dP - D)
            if softcap:
                dS = dS * (1 - (S / softcap) ** 2)
            dQ = torch.baddbmm(dQ, rounded(dS, k.dtype), K)
            if n_block < max(blocks.n_blocks(m_block), default=0):
                memory.write(dq_acc[:, head, queries], dQ)
            else:
                memory.write(dq[:, head, queries], softmax_scale * dQ)
            dK = torch.baddbmm(dK, rounded(dS, q.dtype).mT, Q)
        memory.write(dk[:, keys], softmax_scale * dK)
        memory.write(dv[:, keys], dV)
    dq = rearrange(dq, "(b h) g m d -> b m (h g) d", h=heads_kv)
    dk, dv = (rearrange(x, "(b h) n d -> b n h d", h=heads_kv) for x in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()
