"""FlashAttention-1, for Hopper.

Tri Dao, Daniel Y. Fu, Stefano Ermon, Atri Rudra, Christopher Re. "FlashAttention: Fast and Memory-Efficient Exact
Attention with IO-Awareness". NeurIPS 2022. https://arxiv.org/abs/2205.14135

changed since standard attention, softmax(Q K^T) V in three passes over HBM
  - S and P are never in HBM: they are computed tile by tile on chip, and the softmax is computed online (algorithm 1).
    The footprint falls from O(N^2) to O(N); the traffic stays quadratic, Theta(N^2 d^2 / M) for an on-chip memory of M,
    with a far smaller constant (theorem 2).
  - Keys are the outer loop, queries the inner one. O is kept normalised; with its row maximum m and row sum l it goes
    to HBM and back at each visit.
  - One CTA per batch and head. The warps of a CTA split the keys of a block ("split-K") and meet in shared memory.
  - The backward reads no P: it computes S again, and P from S and the statistics (algorithm 4).

unchanged
  - The result: exact attention, out and its gradients.

config.py     what the kernels are built from, and what they can do
algorithm.py  the loops, forward and backward, in plain PyTorch: start here
softmax.py    the online softmax on register tiles
forward.py    the forward kernel
backward.py   the backward's kernels
interface.py  tensors in, tensors out
"""

from fa1.config import CAPABILITIES, Config
from fa1.interface import backward, flash_attn_func, flash_attn_varlen_func, forward
from fa_common.package import keep_functions

__all__ = ["CAPABILITIES", "Config", "backward", "flash_attn_func", "flash_attn_varlen_func", "forward"]

keep_functions(__name__)
