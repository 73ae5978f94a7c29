"""FA3's online softmax: FA2's, on WGMMA accumulators, arranged around products that are still in flight.

changed since fa2
  - O is not rescaled here: while this softmax runs, WGMMA may still be adding P V of the block before into it.
  - Lazy rescale, FA4's idea: a row keeps an old maximum until a score exceeds it by a factor of 2^RISE. P then lies in
    (0, 2^RISE] instead of (0, 1], which changes neither its relative rounding nor, after the division, O; and almost
    every block gets by without exchanging maxima between lanes and without touching O.
unchanged
  - base 2, un-normalised O, one row maximum and one row sum per row; a row lives in four lanes.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of

RISE = 8.0  # log2 of how far P may outgrow 1; 256 is far from overflow in fp16, and sums of P are fp32


@dataclass(frozen=True)
class OnlineSoftmax:
    """The running statistics of this thread's rows, (rows,) fp32 each."""

    row_max: cute.Tensor  # of the raw scores Q K^T; up to RISE behind, if lazy
    row_sum: cute.Tensor  # this thread's columns only, until `finish`
    shift: cute.Tensor  # row_max in base 2, what scores are lowered by; 0 for a row that has seen no key
    limit: cute.Tensor  # the largest raw score that row_max still serves
    scale_log2: Float32  # softmax_scale * log2(e)
    lazy: bool  # else every block takes the new maximum and rescales

    @staticmethod
    def start(num_rows: int, scale_log2: Float32, lazy: bool) -> "OnlineSoftmax":
        row_max, row_sum, shift, limit = (cute.make_rmem_tensor(num_rows, Float32) for _ in range(4))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        shift.fill(0.0)
        limit.fill(-Float32.inf)
        return OnlineSoftmax(row_max, row_sum, shift, limit, scale_log2, lazy)

    @cute.jit
    def step(self, acc_S: cute.Tensor) -> tuple[cute.Tensor, Boolean]:
        """Turns scores into P = exp(scale * S - shift), in place.

        Returns what O must be multiplied by, (rows,), and whether any row of this warp needs it.
        """
        S = as_rows_and_columns(acc_S)
        num_rows = cute.size(S, mode=[0])
        thread_max = [S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0) for r in range(num_rows)]
        rises = self.any_row_rises(thread_max)
        rescale = cute.make_rmem_tensor_like(self.row_max)
        rescale.fill(1.0)
        if rises:
            for r in cutlass.range_constexpr(num_rows):
                row_max = cute.arch.fmax(self.row_max[r], quad_max(thread_max[r]))
                # A row that has seen no key yet: -inf minus -inf would be NaN.
                shift = Float32(0.0) if row_max == -Float32.inf else row_max * self.scale_log2
                rescale[r] = cute.math.exp2(self.row_max[r] * self.scale_log2 - shift, fastmath=True)
                self.row_sum[r] = self.row_sum[r] * rescale[r]
                self.row_max[r], self.shift[r] = row_max, shift
                self.limit[r] = row_max + self.headroom()
        for r in cutlass.range_constexpr(num_rows):
            S[r, None].store(cute.math.exp2(S[r, None].load() * self.scale_log2 - self.shift[r], fastmath=True))
            self.row_sum[r] = self.row_sum[r] + row_sum_of(S, r)
        return rescale, rises

    def any_row_rises(self, thread_max: list) -> Boolean:
        """Whether the maximum of some row of this warp no longer serves its new scores.

        Each lane compares its own columns, so that the quads need not exchange their maxima unless one does.
        """
        if not self.lazy:
            return self.scale_log2 > 0.0  # always, but the compiler must not know: see Forward.block_overlapped
        rises = Boolean(False)
        for r, score in enumerate(thread_max):
            rises = rises | (score > self.limit[r])
        return cute.arch.vote_any_sync(rises)

    def headroom(self) -> Float32:
        """How far raw scores may exceed row_max."""
        return RISE * cute.arch.rcp_approx(self.scale_log2)

    @cute.jit
    def finish(self, acc_O: cute.Tensor) -> cute.Tensor:
        """Divides O by the row sums, in place; returns LSE, (rows,): natural log, -inf for a row without a key."""
        O = as_rows_and_columns(acc_O)
        lse = cute.make_rmem_tensor_like(self.row_max)
        for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
            row_sum = quad_sum(self.row_sum[r])
            no_key = row_sum == 0.0
            O[r, None].store(O[r, None].load() * cute.arch.rcp_approx(row_sum))
            if no_key:
                O[r, None].fill(0.0)  # whatever V held: 0 * NaN is NaN
            log2_sum = cute.math.log2(row_sum, fastmath=True)
            lse[r] = -Float32.inf if no_key else (self.row_max[r] * self.scale_log2 + log2_sum) * math.log(2.0)
        return lse


@cute.jit
def rescale_rows(acc_O: cute.Tensor, rescale: cute.Tensor):
    """O *= rescale, row by row: moves what was accumulated under the old maximum to the new one."""
    O = as_rows_and_columns(acc_O)
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        O[r, None].store(O[r, None].load() * rescale[r])
