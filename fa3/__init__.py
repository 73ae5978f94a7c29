"""FlashAttention-3, for Hopper.

Jay Shah, Ganesh Bikshandi, Ying Zhang, Vijay Thakkar, Pradeep Ramani, Tri Dao. "FlashAttention-3: Fast and Accurate
Attention with Asynchrony and Low-precision". NeurIPS 2024. https://arxiv.org/abs/2407.08608

changed since fa2
  - The tensor memory accelerator (TMA) loads K and V into a ring of stages in shared memory.
  - Warp specialisation: a producer issues the loads, consumer warpgroups compute, each with its own register budget
    (section 3.1).
  - The products are WGMMA, asynchronous and straight from shared memory.
  - Ping-pong: one warpgroup's softmax runs under another's products (section 3.1).
  - Inside a warpgroup, the softmax of a block runs under P V of the block before (section 3.2).
  - CTAs are persistent: each computes tile after tile, and stores one while it loads the next.
  - FP8, with a scale for each block of rows and incoherent processing (section 3.3).
  - From elsewhere: O is rescaled only when it must be (lazy rescale, FA4); K and V by multicast (off by default).
  - On a GPU too: windows, softcap, packed sequences, decoding with a cache.

unchanged
  - The loop: queries outer and over the grid, O in registers and not normalised, only LSE saved, hidden blocks skipped.
    fa2 to fa3 is purely the machine.

config.py     what the kernels are built from, and what they can do
algorithm.py  the loops, forward and backward, in plain PyTorch: start here
softmax.py    the online softmax on register tiles
forward.py    the forward kernel; the backward has none yet
scheduler.py  which tile a CTA computes next, and which key blocks it sees
loads.py      Q, K and V into shared memory, by TMA or cp.async
products.py   the two products, as WGMMA
epilogue.py   O and LSE out to global memory
sync.py       warp roles, barriers, register budgets
interface.py  tensors in, tensors out
fp8.py        the same for q, k and v in e4m3; how they get there
kvcache.py    the same for decoding with a cache of K and V, in 16 bits or e4m3; keys in splits
merge.py      the kernel that makes one result of those of the splits
"""

from fa3.config import CAPABILITIES, Config
from fa3.fp8 import Quantized, flash_attn_fp8_func, quantize
from fa3.interface import backward, flash_attn_func, flash_attn_varlen_func, forward
from fa3.kvcache import flash_attn_with_kvcache
from fa_common.package import keep_functions

__all__ = [
    "CAPABILITIES",
    "Config",
    "Quantized",
    "backward",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "forward",
    "quantize",
]

keep_functions(__name__)
