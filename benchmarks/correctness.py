"""Who may be timed: only a version whose output is right, on the very tensors that are timed."""

import torch
from torch import Tensor


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact|| over every element; NaN where out holds one."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def limit(dtype: torch.dtype) -> float:
    """The largest relative error of a right result: twice the spacing of the type's numbers at 1.

    Rounding P and O to the type costs about half a spacing. A wrong mask, scale or tile costs many times the limit.
    """
    return 2 * torch.finfo(dtype).eps
