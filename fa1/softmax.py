"""FA1's online softmax: the warps of a CTA share a row, and its statistics come from and go back to HBM.

Each warp holds its own keys' scores ("split-K"), so a row's maximum and sum are put together in shared memory. The
statistics of the keys seen so far, m and l, were written to HBM by the visit before. O there is normalised by that l:
adding this block weighs the old O with l * exp(m - m_new) and divides by the new l, at every visit.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of


@dataclass(frozen=True)
class OnlineSoftmax:
    """One visit's statistics, in shared memory, fp32."""

    warp_max: cute.Tensor  # (tile_m, num_warps): each warp's maximum over its keys
    warp_sum: cute.Tensor  # (tile_m, num_warps): each warp's sum of P
    row_max: cute.Tensor  # (tile_m,): m_new, over all keys seen so far
    old_weight: cute.Tensor  # (tile_m,): l * exp(m - m_new), what the old O weighs
    scale_log2: Float32  # softmax_scale * log2(e)

    @cute.jit
    def step(self, acc_S: cute.Tensor, tScS: cute.Tensor, gMax: cute.Tensor, gSum: cute.Tensor, rows: tuple):
        """Turns this warp's scores into P = exp(scale * (S - m_new)), in place, and leaves the row statistics in shared
        memory; the caller's next barrier publishes them.

        gMax, gSum: m and l of this tile's rows in HBM, (tile_m,). rows: (how many of them exist, whether HBM holds
        their statistics yet).
        """
        S, cS = as_rows_and_columns(acc_S), as_rows_and_columns(tScS)
        num_rows, visited = rows
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        num_warps = cute.size(self.warp_max, mode=[1])
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            row_max = quad_max(S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
            if lane % 4 == 0:
                self.warp_max[cS[r, 0][0], warp] = row_max
        # Every warp's maxima are in warp_max before any warp puts them together.
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            row = cS[r, 0][0]
            old_max, old_sum = self.old_statistics(gMax, gSum, row, visited & (row < num_rows))
            row_max = old_max
            for w in cutlass.range_constexpr(num_warps):
                row_max = cute.arch.fmax(row_max, self.warp_max[row, w])
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            shift = Float32(0.0) if row_max == -Float32.inf else row_max * self.scale_log2
            S[r, None].store(cute.math.exp2(S[r, None].load() * self.scale_log2 - shift, fastmath=True))
            warp_sum = quad_sum(row_sum_of(S, r))
            if lane % 4 == 0:
                self.warp_sum[row, warp] = warp_sum
                if warp == 0:
                    self.row_max[row] = row_max
                    self.old_weight[row] = old_sum * cute.math.exp2(old_max * self.scale_log2 - shift, fastmath=True)

    @cute.jit
    def old_statistics(self, gMax: cute.Tensor, gSum: cute.Tensor, row: Int32, known: Boolean):
        """(m, l) of a row as HBM holds them; (-inf, 0) before its first visit."""
        old_max, old_sum = -Float32.inf, Float32(0.0)
        if known:
            old_max, old_sum = gMax[row], gSum[row]
        return old_max, old_sum

    @cute.jit
    def row_sum(self, row: Int32) -> Float32:
        """l_new of a row: what was summed before, at the new maximum, and every warp's share of this block."""
        row_sum = self.old_weight[row]
        for w in cutlass.range_constexpr(cute.size(self.warp_sum, mode=[1])):
            row_sum = row_sum + self.warp_sum[row, w]
        return row_sum
