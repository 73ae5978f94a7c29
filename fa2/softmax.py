"""FA2's online softmax: O stays un-normalised, and one LSE a row is all that is saved.

changed since fa1
  - O is divided by the row sum once, at the end (FA2 3.1); a new maximum only rescales it.
  - A row's statistics live in registers for the whole loop; they leave as one number, LSE = max + log(sum).
  - A warp owns whole rows, so maxima and sums need no shared memory, only the four lanes of a quad.
unchanged
  - base 2, one row maximum and one row sum per row.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of


@dataclass(frozen=True)
class OnlineSoftmax:
    """The running statistics of this thread's rows."""

    row_max: cute.Tensor  # (rows,) fp32, of the scores before they are scaled
    row_sum: cute.Tensor  # (rows,) fp32, this thread's columns only, until `finish`
    scale_tanh: Float32  # with a softcap: what raw scores are multiplied by before the tanh
    scale_log2: Float32  # what scores, capped or not, are multiplied by before exp2
    deferred: bool  # O is divided once, at the end; else it is kept divided by `whole_sum`
    whole_sum: cute.Tensor  # (rows,) fp32, unless deferred: row_sum of the four lanes together

    @staticmethod
    def start(num_rows: int, scale_tanh: Float32, scale_log2: Float32, deferred: bool) -> "OnlineSoftmax":
        row_max = cute.make_rmem_tensor(num_rows, Float32)
        row_sum = cute.make_rmem_tensor(num_rows, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        whole_sum = cute.make_rmem_tensor_like(row_sum)
        whole_sum.fill(0.0)
        return OnlineSoftmax(row_max, row_sum, scale_tanh, scale_log2, deferred, whole_sum)

    @cute.jit
    def step(self, acc_S: cute.Tensor, masked: cutlass.Constexpr) -> tuple[cute.Tensor, Boolean]:
        """Turns scores into P = exp(scale * (S - row_max)), in place.

        Returns what O must be multiplied by, (rows,), and whether any row of this warp needs it: else all are 1.
        """
        S = as_rows_and_columns(acc_S)
        rescale, rises = cute.make_rmem_tensor_like(self.row_max), Boolean(False)
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            scores = S[r, None].load()
            row_max = quad_max(scores.reduce(cute.ReductionOp.MAX, self.row_max[r], 0))
            shift = row_max * self.scale_log2
            row_rises = row_max > self.row_max[r]
            # `rescale` is then exactly 1 where the maximum stays; a difference of products, an FMA, is not.
            fall = self.row_max[r] - row_max
            if const_expr(masked):
                # A row that has seen no key yet: -inf minus -inf would be NaN.
                shift = Float32(0.0) if row_max == -Float32.inf else shift
                fall = fall if row_rises else Float32(0.0)
            rises = rises | row_rises
            rescale[r] = cute.math.exp2(fall * self.scale_log2, fastmath=True)
            S[r, None].store(cute.math.exp2(scores * self.scale_log2 - shift, fastmath=True))
            self.row_sum[r] = self.row_sum[r] * rescale[r] + row_sum_of(S, r)
            self.row_max[r] = row_max
        return rescale, cute.arch.vote_any_sync(rises)

    def weights(self, rescale: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Not deferred: what O weighs before P V is added, l * exp(m - m_new), and what it is multiplied by after, 1 /
        l_new; (rows,) each."""
        weight, inverse = cute.make_rmem_tensor_like(rescale), cute.make_rmem_tensor_like(rescale)
        for r in range(cute.size(rescale)):
            weight[r] = self.whole_sum[r] * rescale[r]
            self.whole_sum[r] = quad_sum(self.row_sum[r])
            inverse[r] = inverse_of(self.whole_sum[r])
        return weight, inverse

    @cute.jit
    def finish(self, acc_O: cute.Tensor) -> cute.Tensor:
        """Divides O by the row sums, in place, if that was deferred; returns LSE, (rows,): natural log, -inf for a row
        without a key."""
        O = as_rows_and_columns(acc_O)
        lse = cute.make_rmem_tensor_like(self.row_max)
        for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
            row_sum = quad_sum(self.row_sum[r])
            if const_expr(self.deferred):
                O[r, None].store(O[r, None].load() * inverse_of(row_sum))
            lse[r] = log_sum_exp(self.row_max[r], row_sum, self.scale_log2)
        return lse


@cute.jit
def inverse_of(row_sum: Float32) -> Float32:
    """1 / row_sum; 0 for a row that has seen no key."""
    return Float32(0.0) if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)


@cute.jit
def log_sum_exp(row_max: Float32, row_sum: Float32, scale_log2: Float32) -> Float32:
    """LSE of a row, natural log; -inf for a row that has seen no key."""
    log2_sum = cute.math.log2(row_sum, fastmath=True)
    return -Float32.inf if row_sum == 0.0 else (row_max * scale_log2 + log2_sum) * math.log(2.0)


@cute.jit
def rescale_rows(acc_O: cute.Tensor, rescale: cute.Tensor):
    """O *= rescale, row by row: moves what was accumulated under the old maximum to the new one."""
    O = as_rows_and_columns(acc_O)
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        O[r, None].store(O[r, None].load() * rescale[r])
