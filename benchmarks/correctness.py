"""Who may be timed: only a version whose output is right, on the very tensors that are timed."""

import math

import torch
from torch import Tensor

# FP8 computes with e4m3 numbers. Against the numbers that its inputs stand for, rounding P to e4m3 costs about 2.5e-2;
# against those that they were rounded from, that and the rounding of Q, K and V about 5e-2.
QUANTIZED_LIMIT = 5e-2
QUANTIZING_LIMIT = 1e-1
# Rounding O to e4m3 as well makes 2.5e-2 about 3.8e-2.
QUANTIZED_OUT_LIMIT = 7.5e-2
# e4m3 numbers lie 2^-3 of their power of two apart, so that a rounded one is off by at most 2^-4 of itself.
QUANTIZATION_LIMIT = 2**-4


def relative_error(out: Tensor | tuple[Tensor, ...], exact: Tensor | tuple[Tensor, ...]) -> float:
    """||out - exact|| / ||exact|| over every element, of several tensors the largest; NaN where one holds a NaN."""
    if isinstance(out, Tensor):
        return ((out.double() - exact).norm() / exact.norm()).item()
    errors = [relative_error(one, right) for one, right in zip(out, exact, strict=True)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def limit(dtype: torch.dtype) -> float:
    """The largest relative error of a right result: twice the spacing of the type's numbers at 1.

    Rounding P and O to the type costs about half a spacing. A wrong mask, scale or tile costs many times the limit.
    """
    return 2 * torch.finfo(dtype).eps
