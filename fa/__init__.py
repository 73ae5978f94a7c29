"""FlashAttention 1, 2 and 3 behind one signature.

    import fa

    out = fa.flash_attn_func(q, k, v, causal=True)                 # the newest generation that fits
    out = fa.flash_attn_func(q, k, v, causal=True, version="fa2")  # that one, or an error with the reason
    fa.explain(q, k, v, causal=True)                               # which one runs, why, and what its kernel is like

`fa1`, `fa2` and `fa3` have the same functions, for those who want one generation only. Decoding with a cache of K and V
(`flash_attn_with_kvcache`) has only fa3.
"""

from fa.dispatch import GENERATIONS, flash_attn_func, flash_attn_varlen_func, select, use
from fa.explain import Explanation, explain
from fa.kvcache import flash_attn_with_kvcache
from fa.merge import merge
from fa_common.problem import Problem, UnsupportedProblem

__all__ = [
    "GENERATIONS",
    "Explanation",
    "Problem",
    "UnsupportedProblem",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge",
    "select",
    "use",
]
