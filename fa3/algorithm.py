"""FA3: the same loop, another machine (Shah et al. 2024, algorithms 2 and 3).

changed since fa2
  - S of the next block is issued before P V of the current one, so that softmax and a product run at once (3.2).
  - The backward issues S and dP together; dV runs while dS is computed, and a warp of its own adds dQ (B.1).
  - FP8: Q, K and V in e4m3, a scale for each block of rows, Q and K rotated so that no entry sticks out (3.3).
  - What plain PyTorch cannot show: TMA loads by a producer warp, WGMMA, two warpgroups that take turns (3.1).
  - From elsewhere (Flash-Decoding, split-KV): a few queries' keys in splits, merged afterwards.
unchanged
  - The loops, the recurrence, the bytes and the FLOPs: all of fa2's mathematics, in another order of issue.

    products   S2     S1 O2  S0 O1  O0      Time to the right; key blocks 2, 1, 0. While softmax turns S1 into P1, the
    softmax       P2     P1     P0          tensor cores still work on O2, the P V of block 2.

Upper-case names are tiles on chip, in the accumulator's precision; lower-case names are tensors in HBM. D is delta.
"""

from itertools import product

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor
from torch.nn.functional import pad

from fa3.config import KV_BLOCK, Q_BLOCK
from fa_common.masks import BlockMask, Mask
from fa_common.memory import Memory, accumulator_dtype, counted, rounded

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
# P of the largest score. Below it e4m3 has 14 powers of two with all their digits, below 1 it would have only 6; above
# it the next power of two is past the largest number.
P_MAX = 256.0
SMALLEST_AMAX = 2.0**-100  # less counts as zero: the scale and its reciprocal must be normal numbers


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
        P, V = Q[..., :0], Q[:, :0]  # no key yet: the first P V adds nothing
        for n_block in reversed(blocks.n_blocks(m_block)):
            keys = blocks.keys(n_block)
            K = memory.read(k[:, keys])
            S = softmax_scale * (Q @ K.mT)  # (batch * heads, queries, keys), issued first
            O = torch.baddbmm(O, rounded(P, v.dtype), V)  # of the block before: issued behind S, runs under the softmax
            V = memory.read(v[:, keys])
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            if not blocks.is_full(m_block, n_block):
                S = S.masked_fill(~blocks.visible(m_block, n_block, S.device), -torch.inf)
            row_max_new = torch.maximum(row_max, S.amax(-1, keepdim=True))
            P = torch.exp(S - row_max_new)
            rescale = torch.exp(row_max - row_max_new)
            row_sum = rescale * row_sum + P.sum(-1, keepdim=True)
            O = rescale * O  # only now: P V of the block before, under the old maximum, has arrived
            row_max = row_max_new
        O = torch.baddbmm(O, rounded(P, v.dtype), V)
        # A row's maximum alone adds exp(0) = 1 to row_sum, so the clamp is only for rows that have no key: 0 / 1.
        memory.write(out[:, queries], O / row_sum.clamp(min=1))
        memory.write(lse[:, queries], row_max + torch.log(row_sum))
    lse = rearrange(lse, "(b h) m 1 -> b h m", h=heads_q)
    return rearrange(out, "(b h) m d -> b m h d", h=heads_q).contiguous(), lse


@counted
def forward_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_splits: int,
    softmax_scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    config,
    memory: Memory | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward` of few queries with the keys they see shared out, num_splits ways, so that a GPU has enough to do.

    Each split attends to its even share of the key blocks as if it were all, here in one step; `merge` does the rest.
    """
    seqlen_q, (seqlen_k, heads_kv) = q.shape[1], k.shape[1:3]
    mask = Mask(seqlen_q, seqlen_k, causal, window)
    q = rearrange(q, "b m (h g) d -> (b h) g m d", h=heads_kv)  # the query heads that share K and V are rows of one Q
    k, v = (rearrange(x, "b n h d -> (b h) 1 n d") for x in (k, v))
    Q = memory.read(q)
    outs = Q.new_zeros((num_splits, *Q.shape))
    lses = Q.new_full((*outs.shape[:-1], 1), -torch.inf)

    n_blocks = BlockMask(mask, seqlen_q, config.tile_n).n_blocks(0)
    share = max(1, -(-len(n_blocks) // num_splits))
    for split, first in enumerate(range(0, len(n_blocks), share)):  # splits past the last key block have no key
        blocks = n_blocks[first : first + share]
        keys = slice(blocks[0] * config.tile_n, min((blocks[-1] + 1) * config.tile_n, seqlen_k))
        K, V = memory.read(k[:, :, keys]), memory.read(v[:, :, keys])
        S = softmax_scale * (Q @ K.mT)  # (batch * heads_kv, group, queries, keys)
        if softcap:
            S = softcap * torch.tanh(S / softcap)
        S = S.masked_fill(~mask.visible(slice(0, seqlen_q), keys, S.device), -torch.inf)
        row_max = S.amax(-1, keepdim=True).clamp(min=torch.finfo(S.dtype).min)  # finite, as in forward
        P = torch.exp(S - row_max)
        row_sum = P.sum(-1, keepdim=True)
        memory.write(outs[split], rounded(P, v.dtype) @ V / row_sum.clamp(min=1))
        memory.write(lses[split], row_max + torch.log(row_sum))
    O, LSE = merge(memory.read(outs), memory.read(lses))
    out, lse = torch.empty_like(q), torch.empty_like(LSE)
    memory.write(out, O)
    memory.write(lse, LSE)
    lse = rearrange(lse, "(b h) g m 1 -> b (h g) m", h=heads_kv)
    return rearrange(out, "(b h) g m d -> b m (h g) d", h=heads_kv).contiguous(), lse


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys from those over each split's, (splits, ..., head_dim) and (splits, ..., 1).

    Of the whole row sum, exp(lse), a split holds exp(lse_s). One without a key has lse -inf and counts nothing.
    """
    lse = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - lse.clamp(min=torch.finfo(lse.dtype).min))  # no key at all: exp(-inf - finite) = 0
    return (shares * outs).sum(0), lse


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
            dP = dO @ V.mT  # issued right behind S: runs under the exponentials
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            P = torch.exp(S - LSE)
            if not blocks.is_full(m_block, n_block):
                P = P.masked_fill(~blocks.visible(m_block, n_block, P.device), 0)
            dV = torch.baddbmm(dV, rounded(P, dout.dtype).mT, dO)  # runs under dS
            dS = P * (dP - D)
            if softcap:
                dS = dS * (1 - (S / softcap) ** 2)
            memory.atomic_add(dq_acc[:, head, queries], rounded(dS, k.dtype) @ K)  # a warp of its own adds dQ
            dK = torch.baddbmm(dK, rounded(dS, q.dtype).mT, Q)
        memory.write(dk[:, keys], softmax_scale * dK)
        memory.write(dv[:, keys], dV)
    memory.write(dq, softmax_scale * memory.read(dq_acc))  # Post-pass: dQ in the type of q.
    dq = rearrange(dq, "(b h) g m d -> b m (h g) d", h=heads_kv)
    dk, dv = (rearrange(x, "(b h) n d -> b n h d", h=heads_kv) for x in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# ---- FP8


@counted
def forward_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descale_q: Tensor,
    descale_k: Tensor,
    descale_v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    config,
    out_dtype: torch.dtype = torch.bfloat16,
    memory: Memory | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward` of q, k and v in e4m3 that stand for their products with descale_q, descale_k and descale_v.

    These are float32 (batch, heads, blocks): a scale for each Q_BLOCK rows of q, each KV_BLOCK rows of k and v.

    P V has no place for a factor of each key's own, so V's scale is a factor of P: its logarithm is added to the
    scores. O then adds up in units of V's e4m3 values, and row_sum takes the scale back out of each P.
    """
    (seqlen_q, heads_q), (seqlen_k, heads_kv) = q.shape[1:3], k.shape[1:3]
    blocks = BlockMask(Mask(seqlen_q, seqlen_k, causal, window), config.tile_m, config.tile_n)
    q = rearrange(q, "b m h d -> (b h) m d")
    k, v = (repeat(x, "b n h d -> (b h g) n d", g=heads_q // heads_kv) for x in (k, v))
    descale_q = rearrange(descale_q, "b h n -> (b h) n")
    descale_k, descale_v = (repeat(x, "b h n -> (b h g) n", g=heads_q // heads_kv) for x in (descale_k, descale_v))
    out, lse = torch.empty_like(q, dtype=out_dtype), q.new_empty((*q.shape[:2], 1), dtype=torch.float32)

    for m_block in range(blocks.num_m_blocks):
        queries = blocks.queries(m_block)
        Q, scale_q = memory.read(q[:, queries]), row_scales(descale_q, queries, Q_BLOCK, memory)
        O, row_sum = torch.zeros_like(Q), torch.zeros_like(Q[..., :1])
        row_max = torch.full_like(row_sum, torch.finfo(Q.dtype).min)
        P, V = Q[..., :0], Q[:, :0]
        for n_block in reversed(blocks.n_blocks(m_block)):
            keys = blocks.keys(n_block)
            K = memory.read(k[:, keys])
            scale_k, scale_v = (row_scales(x, keys, KV_BLOCK, memory).mT for x in (descale_k, descale_v))
            S = softmax_scale * scale_q * scale_k * (Q @ K.mT)  # (batch * heads, queries, keys)
            # In fp32, with two_level_accumulation or without. Tensor cores keep fewer bits: benchmarks/tensor_cores.py
            # emulates them, in thirty times the time.
            O = torch.baddbmm(O, rounded(P, v.dtype), V)
            V = memory.read(v[:, keys])
            if softcap:
                S = softcap * torch.tanh(S / softcap)
            S = S + torch.log(scale_v)
            if not blocks.is_full(m_block, n_block):
                S = S.masked_fill(~blocks.visible(m_block, n_block, S.device), -torch.inf)
            row_max_new = torch.maximum(row_max, S.amax(-1, keepdim=True))
            P = P_MAX * torch.exp(S - row_max_new)
            rescale = torch.exp(row_max - row_max_new)
            row_sum = rescale * row_sum + (P / scale_v).sum(-1, keepdim=True)
            O = rescale * O
            row_max = row_max_new
        O = torch.baddbmm(O, rounded(P, v.dtype), V)
        memory.write(out[:, queries], O / row_sum.masked_fill(row_sum == 0, 1))  # 0 / 1 for a row without a key
        memory.write(lse[:, queries], row_max + torch.log(row_sum / P_MAX))
    lse = rearrange(lse, "(b h) m 1 -> b h m", h=heads_q)
    return rearrange(out, "(b h) m d -> b m h d", h=heads_q).contiguous(), lse


def row_scales(descale: Tensor, rows: slice, block: int, memory: Memory) -> Tensor:
    """The scale of each of `rows`, (batch * heads, rows, 1), from that of each `block` rows."""
    first = rows.start // block
    scales = memory.read(descale[:, first : (rows.stop - 1) // block + 1])
    return scales[:, torch.arange(rows.start, rows.stop, device=descale.device) // block - first, None]


def quantize(x: Tensor, scales: str, heads_kv: int, block: int) -> tuple[Tensor, Tensor]:
    """x (batch, seqlen, heads, head_dim) as e4m3 values and the float32 scales to multiply them with.

    `scales` says which entries share one, and so what is the shape: "tensor" (1,), all; "head" (batch, heads_kv), a
    sequence's head of K and V, or the heads of Q that read it; "block" (batch, heads, blocks), `block` rows of a head.
    """
    batch, seqlen, heads, _ = x.shape
    x = x.float()
    if scales == "tensor":
        largest = x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1)
        of_rows = scale = scale_of(largest)
    elif scales == "head":
        grouped = rearrange(x.abs(), "b m (h g) d -> b h (m g d)", h=heads_kv)
        scale = scale_of(grouped.amax(-1) if seqlen else grouped.new_zeros(batch, heads_kv))
        of_rows = repeat(scale, "b h -> b 1 (h g) 1", g=heads // heads_kv)
    else:
        padded = pad(x.abs(), (0, 0, 0, 0, 0, -seqlen % block))
        scale = scale_of(reduce(padded, "b (n r) h d -> b h n", "max", r=block))
        of_rows = repeat(scale, "b h n -> b (n r) h 1", r=block)[:, :seqlen]
    return to_e4m3(x / of_rows), scale


def scale_of(largest: Tensor) -> Tensor:
    """What to divide by so that `largest` becomes the largest e4m3 number; 1 where there is nothing but zeros."""
    return (largest / E4M3_MAX).masked_fill(largest < SMALLEST_AMAX, 1)


def to_e4m3(x: Tensor) -> Tensor:
    """x rounded to nearest even, as cvt.rn.satfinite does it: beyond 448, infinity included, 448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """x times `signs` (head_dim,), then an orthonormal Hadamard transform over head_dim, float32.

    It spreads an outlier over its row, and applied to Q and K both it leaves Q K^T as it is. A head_dim that is no
    power of two is transformed in runs of the largest power of two that divides it.
    """
    head_dim = x.shape[-1]
    run = head_dim & -head_dim
    x = x.float() * signs
    half = 1
    while half < run:
        left, right = rearrange(x, "... (n two half) -> two ... n half", two=2, half=half)
        x = rearrange([left + right, left - right], "two ... n half -> ... (n two half)")
        half *= 2
    return x / run**0.5
