"""What an algorithm costs: bytes between HBM and the chip, matmul FLOPs, and every other FLOP.

`algorithm.py` moves tiles only through `Memory.read`, `write` and `atomic_add`, which count their bytes. FLOPs are
watched: under `counted` each torch operator that runs adds what it costs, so the count cannot drift from the code.

    product (`@`, torch.baddbmm)                  2 m n k, the additions into an accumulator included
    elementwise arithmetic, exp, log, tanh, max   1 for each element of the result
    sum, amax                                     1 for each element that is reduced
    compare, select, convert, copy, fill          0
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.baddbmm}
REDUCTIONS = {aten.sum, aten.amax}
MOVES = {aten.masked_fill, aten.where, aten.clone, aten.copy_, aten._to_copy, aten.fill_, aten.zero_}


@dataclass
class Memory:
    """A counter, all zero when new; given to several calls it adds them up.

    Every tile that is read counts, though on a GPU the L2 cache supplies many of them: these are the bytes of a machine
    with on-chip memory for one CTA's tiles and nothing between it and HBM, the model of the FA1 paper.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    matmul_flops: int = 0
    non_matmul_flops: int = 0

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    def read(self, tile: Tensor) -> Tensor:
        """Bring a tile of an HBM tensor on chip: its values in the accumulator's precision."""
        self.bytes_read += tile.nbytes
        return tile.to(accumulator_dtype(tile.dtype), copy=True)

    def write(self, destination: Tensor, tile: Tensor) -> None:
        """Send a tile to its place in an HBM tensor, rounded to that tensor's type."""
        self.bytes_written += destination.nbytes
        destination.copy_(tile)

    def atomic_add(self, destination: Tensor, tile: Tensor) -> None:
        """Add a tile into an HBM tensor that others add to as well: each element is read, added to and written back."""
        self.bytes_read += destination.nbytes
        self.bytes_written += destination.nbytes
        destination.add_(tile)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which products of `dtype` are accumulated and softmax is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """An on-chip tile as an operand of type `dtype`: still of its own type, without the digits that `dtype` has not."""
    return tile.to(dtype).to(tile.dtype)


def counted(algorithm: Callable) -> Callable:
    """Decorate an algorithm so that the FLOPs of a call with `memory=` are added to that memory."""

    @functools.wraps(algorithm)
    def run(*tensors: Tensor, memory: Memory | None = None, **options):
        watch = nullcontext() if memory is None else _FlopWatch(memory)
        with watch:
            return algorithm(*tensors, memory=memory or Memory(), **options)

    return run


class _FlopWatch(TorchDispatchMode):
    """Sees every torch operator that runs inside it."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator in PRODUCTS:
            left = args[1] if operator is aten.baddbmm else args[0]
            self.memory.matmul_flops += 2 * math.prod(result.shape) * left.shape[-1]
        elif operator in REDUCTIONS:
            self.memory.non_matmul_flops += args[0].numel()
        elif torch.Tag.pointwise in func.tags and operator not in MOVES and result.is_floating_point():
            self.memory.non_matmul_flops += result.numel()
        return result
