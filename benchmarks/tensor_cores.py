"""An emulation of how Hopper's tensor cores add up FP8 products, for an algorithm that runs on a CPU.

    the sum so far   1101.1011
    a product           0.0101 1101    cut off below the last bit of the larger, not rounded: where all signs agree,
    the next sum     1110.0000         that only ever takes away, and the larger the sum, the more of each product

One WGMMA step takes STEP products of each sum. They and the sum so far are aligned to the largest of them, and bits
more than FRACTION_BITS below its leading one are dropped. The DeepSeek-V3 report (arXiv 2412.19437) found about 14 bits
kept on an H800, the leading one included (3.3.2), and says how they are aligned (3.5.2). NVIDIA documents none of this:
what a kernel loses, only a GPU shows.

It takes some thirty times as long as the algorithm does, so algorithm.py itself adds up in fp32. Here its products are
replaced from outside, and all else stays.
"""

from torch import Tensor, frexp, ldexp, maximum, ones_like
from torch.utils._python_dispatch import TorchDispatchMode

from fa_common.memory import aten

STEP = 32  # products that one WGMMA of 8-bit numbers adds to each sum
FRACTION_BITS = 13  # kept behind the leading bit


class TensorCores(TorchDispatchMode):
    """Inside it `A @ B` and `torch.baddbmm(C, A, B)` of A and B with e4m3 values add up as tensor cores do.

    With two_levels the sum of a baddbmm is one by itself, and C is added to it in fp32.
    """

    def __init__(self, two_levels: bool):
        super().__init__()
        self.two_levels = two_levels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        if operator is aten.bmm or (operator is aten.baddbmm and self.two_levels):
            A, B = args[-2:]
            product = add_products(A.new_zeros(*A.shape[:-1], B.shape[-1]), A, B)
            return product if operator is aten.bmm else args[0] + product
        if operator is aten.baddbmm:
            return add_products(*args)
        return func(*args, **(kwargs or {}))


def add_products(total: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """total + A @ B, (batch, m, n), (batch, m, k) and (batch, k, n), STEP of k at a time."""
    for first in range(0, A.shape[-1], STEP):
        columns, rows = A[..., first : first + STEP], B[..., first : first + STEP, :]
        # One product of each sum at a time: all at once would be STEP times the memory, and slower.
        pairs = [(a[..., None], b[..., None, :]) for a, b in zip(columns.unbind(-1), rows.unbind(-2), strict=True)]
        largest = total.abs()
        for a, b in pairs:
            largest = maximum(largest, (a * b).abs_())
        last_bit = frexp(largest).exponent - 1 - FRACTION_BITS
        unit, per_unit = (ldexp(ones_like(total), exponent) for exponent in (last_bit, -last_bit))
        total = (total * per_unit).trunc_()
        for a, b in pairs:
            total += (a * b).mul_(per_unit).trunc_()
        total = total * unit
    return total
