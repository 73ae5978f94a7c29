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
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa3.config import Config
from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of

NO_KEY = -1e30  # shift of a row that has seen no key: below any score, and finite, since -inf minus -inf is NaN
RISE = 8.0  # log2 of how far P may outgrow 1; 256 is far from overflow in fp16, and sums of P are fp32
HEIGHT_8_BIT = 4.0  # log2 of a row's largest P when its shift is set, in e4m3: up to RISE, the middle of its range
# Of 2^f on -0.5 <= f <= 0.5, lowest power first: of all of this degree the least largest relative error, 2.6e-6.
EXP2_COEFFICIENTS = (
    0.9999992614437784,
    0.6931218146828062,
    0.24024744830310973,
    0.05591786076154043,
    0.009570101967653413,
)
TO_INTEGER = 1.5 * 2.0**23  # added to a small number it leaves no bits behind the point: rounds to an integer
MANTISSA_BITS = 23
EXP2_LOWEST = -126.0  # its exponent is the least of a normal fp32


@dataclass(frozen=True)
class BlockScales:
    """What a block's 8-bit scores and values stand for."""

    before_cap: Float32 | None  # times this, if a softcap follows
    scores: Float32  # times this in the exponential; 1 with a softcap
    bias: Float32  # log2 of V's scale: a P so much larger weighs V's numbers as they are
    weight: Float32  # 1 / V's scale: what such a P counts in the row sum


@dataclass(frozen=True)
class OnlineSoftmax:
    """The running statistics of this thread's rows, (rows,) fp32 each."""

    shift: cute.Tensor  # row_max in base 2, what scores are lowered by; up to RISE behind, if lazy
    row_sum: cute.Tensor  # this thread's columns only, until `finish`
    scale_log2: Float32  # softmax_scale * log2(e)
    lazy: bool  # else every block takes the new maximum and rescales
    polynomial: bool  # a quarter of the exponentials on the FMA pipe
    height: float = 0.0  # log2 of a row's largest P when its shift is set
    bias: Float32 | None = None  # of 8-bit tensors: added to this block's scores, in base 2
    weight: Float32 | None = None  # and what P then counts in the row sum

    @staticmethod
    def start(num_rows: int, scale_log2: Float32, config: Config) -> "OnlineSoftmax":
        shift, row_sum = (cute.make_rmem_tensor(num_rows, Float32) for _ in range(2))
        shift.fill(NO_KEY)
        row_sum.fill(0.0)
        return OnlineSoftmax(shift, row_sum, scale_log2, config.lazy_rescale, config.polynomial_exp)

    def of_block(self, scales: "BlockScales | None") -> "OnlineSoftmax":
        """The same rows, for a block of keys whose K and V are 8-bit numbers times these scales."""
        if scales is None:
            return self
        height = HEIGHT_8_BIT if self.lazy else RISE
        scale_log2 = self.scale_log2 * scales.scores
        return replace(self, scale_log2=scale_log2, height=height, bias=scales.bias, weight=scales.weight)

    @cute.jit
    def step(self, acc_S: cute.Tensor) -> tuple[cute.Tensor, Boolean]:
        """Turns scores into P = exp(scale * S - shift), in place.

        Returns what O must be multiplied by, (rows,), and whether any row of this warp needs it.
        """
        S = as_rows_and_columns(acc_S)
        num_rows = cute.size(S, mode=[0])
        thread_max = [S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0) for r in range(num_rows)]
        rises = self.any_row_rises(thread_max)
        rescale = cute.make_rmem_tensor_like(self.shift)
        rescale.fill(1.0)
        if rises:
            for r in cutlass.range_constexpr(num_rows):
                shift = cute.arch.fmax(self.shift[r], self.shift_for(quad_max(thread_max[r])))
                rescale[r] = cute.math.exp2(self.shift[r] - shift, fastmath=True)
                self.row_sum[r] = self.row_sum[r] * rescale[r]
                self.shift[r] = shift
        for r in cutlass.range_constexpr(num_rows):
            self.exponentiate(S, r)
            row_sum = row_sum_of(S, r)
            self.row_sum[r] = self.row_sum[r] + (row_sum if const_expr(self.weight is None) else row_sum * self.weight)
        return rescale, rises

    def shift_for(self, score: Float32) -> Float32:
        """The shift under which the P of this score is 2^height."""
        shift = score * self.scale_log2
        return shift if self.bias is None else shift + (self.bias - self.height)

    def shift_here(self, r: int) -> Float32:
        """What scale_log2 * S is lowered by in this block."""
        return self.shift[r] if self.bias is None else self.shift[r] - self.bias

    @cute.jit
    def exponentiate(self, S: cute.Tensor, r: cutlass.Constexpr):
        """S = 2^(scale_log2 * S - shift) in row r, every fourth column on the FMA pipe if `polynomial`."""
        if const_expr(not self.polynomial):
            S[r, None].store(cute.math.exp2(S[r, None].load() * self.scale_log2 - self.shift_here(r), fastmath=True))
        else:
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                x = S[r, c] * self.scale_log2 - self.shift_here(r)
                S[r, c] = polynomial_exp2(x) if const_expr(c % 4 == 3) else cute.math.exp2(x, fastmath=True)

    def any_row_rises(self, thread_max: list) -> Boolean:
        """Whether the maximum of some row of this warp no longer serves its new scores.

        Each lane compares its own columns, so that the quads need not exchange their maxima unless one does.
        """
        if not self.lazy:
            return self.scale_log2 > 0.0  # always, but the compiler must not know: see Forward.block_overlapped
        rises = Boolean(False)
        for r, score in enumerate(thread_max):
            rises = rises | (score * self.scale_log2 > self.shift_here(r) + RISE)
        return cute.arch.vote_any_sync(rises)

    @cute.jit
    def finish(self, acc_O: cute.Tensor) -> cute.Tensor:
        """Divides O by the row sums, in place; returns LSE, (rows,): natural log, -inf for a row without a key."""
        O = as_rows_and_columns(acc_O)
        lse = cute.make_rmem_tensor_like(self.shift)
        for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
            row_sum = quad_sum(self.row_sum[r])
            no_key = row_sum == 0.0
            O[r, None].store(O[r, None].load() * cute.arch.rcp_approx(row_sum))
            if no_key:
                O[r, None].fill(0.0)  # whatever V held: 0 * NaN is NaN
            log2_sum = cute.math.log2(row_sum, fastmath=True)
            lse[r] = -Float32.inf if no_key else (self.shift[r] + log2_sum) * math.log(2.0)
        return lse


@cute.jit
def polynomial_exp2(x: Float32) -> Float32:
    """2^x on the FMA pipe, for x up to 127; 0 below EXP2_LOWEST."""
    shifted = x + TO_INTEGER
    fraction = x - (shifted - TO_INTEGER)
    *lower, power = EXP2_COEFFICIENTS
    power = Float32(power)
    for coefficient in reversed(lower):
        power = power * fraction + coefficient
    # The last bits of `shifted` are the integer: added to the exponent of 2^fraction.
    power = (power.bitcast(Int32) + (shifted.bitcast(Int32) << MANTISSA_BITS)).bitcast(Float32)
    return Float32(0.0) if x < EXP2_LOWEST else power


@cute.jit
def rescale_rows(acc_O: cute.Tensor, rescale: cute.Tensor):
    """O *= rescale, row by row: moves what was accumulated under the old maximum to the new one."""
    O = as_rows_and_columns(acc_O)
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        O[r, None].store(O[r, None].load() * rescale[r])
