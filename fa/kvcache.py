"""Decoding with a cache of K and V, by the generation that has it."""

import torch
from torch import Tensor

import fa3.kvcache
from fa.dispatch import AUTO, resolve
from fa_common.problem import UnsupportedProblem, Window

REASON = "it takes no cache of K and V, because it cannot split the keys of a few queries among CTAs; fa3 can"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    version: str = AUTO,
    cache_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    num_splits: int = fa3.kvcache.AUTOMATIC,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries over the used part of a cache of K and V: see `fa3.flash_attn_with_kvcache`.

    `version` is "fa3", or "auto" for what `use` says, by default fa3.

    Raises ValueError for an unknown version, UnsupportedProblem for "fa1" and "fa2", which do not have it.
    """
    version = resolve(version)
    if version not in (AUTO, "fa3"):
        raise UnsupportedProblem(f"{version} cannot run this problem: {REASON}")
    return fa3.kvcache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_lse,
        out=out,
        lse=lse,
        descale_q=descale_q,
        descale_k=descale_k,
        descale_v=descale_v,
        out_dtype=out_dtype,
    )
