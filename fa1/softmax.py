"""FA1's online softmax: the warps of a CTA share a row, and its statistics come from and go back to HBM.

Each warp holds its own keys' scores ("split-K") and takes P under the maximum of those (FA1, algorithm 1, line 10: the
block's own maximum, corrected later). The correction comes with the merge: a warp's share of O weighs exp(m_w - m_new).
The statistics of the keys seen so far, m and l, were written to HBM by the visit before. O there is normalised by that
l: adding this block weighs the old O with l * exp(m - m_new), and divides by the new l, at every visit.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of


@dataclass(frozen=True)
class RowWeights:
    """What a row's shares of O weigh, already divided by its new sum, and its new statistics."""

    old: Float32  # of the O in HBM
    warps: tuple  # of each warp's share
    row_max: Float32  # m_new, of the raw scores
    row_sum: Float32  # l_new

    def lse(self, scale_log2: Float32) -> Float32:
        """Natural log; -inf for a row without a key."""
        lse = (self.row_max * scale_log2 + cute.math.log2(self.row_sum, fastmath=True)) * math.log(2.0)
        return cutlass.select_(self.row_sum == 0.0, -Float32.inf, lse)


@dataclass(frozen=True)
class OnlineSoftmax:
    """A visit's statistics, in shared memory, fp32: (num_warps, tile_m, stages) each."""

    warp_max: cute.Tensor  # each warp's maximum over its keys, of the raw scores
    warp_sum: cute.Tensor  # each warp's sum of P
    scale_log2: Float32  # what scores are multiplied by before exp2

    @cute.jit
    def step(self, acc_S: cute.Tensor, tScS: cute.Tensor, first_row: Int32, stage: cutlass.Constexpr):
        """Turns this warp's scores into P = exp(scale * (S - m_w)), in place, m_w the maximum over this warp's keys,
        and leaves the row statistics in shared memory; the caller's next barrier publishes them."""
        S, cS = as_rows_and_columns(acc_S), as_rows_and_columns(tScS)
        warp = cute.arch.warp_idx()
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            scores = S[r, None].load()
            row_max = quad_max(scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
            # A row that sees no key of this warp: -inf minus -inf would be NaN.
            shift = Float32(0.0) if row_max == -Float32.inf else row_max * self.scale_log2
            S[r, None].store(cute.math.exp2(scores * self.scale_log2 - shift, fastmath=True))
            row_sum = quad_sum(row_sum_of(S, r))
            if cute.arch.lane_idx() % 4 == 0:
                self.warp_max[warp, first_row + cS[r, 0][0], stage] = row_max
                self.warp_sum[warp, first_row + cS[r, 0][0], stage] = row_sum

    @cute.jit
    def weights(self, row: Int32, stage: cutlass.Constexpr, old_max: Float32, old_sum: Float32) -> RowWeights:
        """How a row is put together: the O seen so far, of statistics (old_max, old_sum), and every warp's share."""
        num_warps = cute.size(self.warp_max, mode=[0])
        warp_max, warp_sum = (cute.make_rmem_tensor((num_warps,), Float32) for _ in range(2))
        cute.autovec_copy(self.warp_max[None, row, stage], warp_max)
        cute.autovec_copy(self.warp_sum[None, row, stage], warp_sum)
        row_max = old_max
        for w in cutlass.range_constexpr(num_warps):
            row_max = cute.arch.fmax(row_max, warp_max[w])
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        shift = Float32(0.0) if row_max == -Float32.inf else row_max * self.scale_log2
        old = old_sum * cute.math.exp2(old_max * self.scale_log2 - shift, fastmath=True)
        rises = [cute.math.exp2(warp_max[w] * self.scale_log2 - shift, fastmath=True) for w in range(num_warps)]
        row_sum = old
        for w in cutlass.range_constexpr(num_warps):
            row_sum = row_sum + rises[w] * warp_sum[w]
        inverse = Float32(0.0) if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
        return RowWeights(old * inverse, tuple(rise * inverse for rise in rises), row_max, row_sum)
