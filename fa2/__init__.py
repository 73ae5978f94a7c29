"""FlashAttention-2, for Hopper.

Tri Dao. "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning". ICLR 2024.
https://arxiv.org/abs/2307.08691

changed since fa1
  - Queries are the outer loop, keys the inner one, and the query blocks are spread over the grid: a long sequence alone
    fills the GPU (section 3.2).
  - O stays in registers, not normalised, and is divided by the row sum once, at the end: fewer FLOPs outside the matrix
    products. Of the statistics only LSE = m + log(l) is saved (section 3.1).
  - The warps of a CTA split the queries ("split-Q"): they need not meet in shared memory (section 3.3).
  - Blocks that the mask hides are skipped, and of the others only those on its edge are masked (section 3.1).
  - The backward has one CTA per key block and adds up dQ by fp32 atomics (section 3.2).

unchanged
  - The tiles, the online softmax, the recomputation in the backward, the FLOPs of the matrix products; here also the
    instructions (cp.async, ldmatrix, mma.sync), so that fa1 to fa2 is purely the algorithm.

config.py     what the kernels are built from, and what they can do
algorithm.py  the loops, forward and backward, in plain PyTorch: start here
softmax.py    the online softmax on register tiles
forward.py    the forward kernel
backward.py   the backward kernels
interface.py  tensors in, tensors out
"""

from fa2.config import CAPABILITIES, Config
from fa2.interface import backward, flash_attn_func, flash_attn_varlen_func, forward
from fa_common.package import keep_functions

__all__ = ["CAPABILITIES", "Config", "backward", "flash_attn_func", "flash_attn_varlen_func", "forward"]

keep_functions(__name__)
