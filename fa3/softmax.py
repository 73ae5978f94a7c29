"""FA3's online softmax: FA2's, on WGMMA accumulators, arranged around products that are still in flight.

changed since fa2
  - O is not rescaled here: while this softmax runs, WGMMA may still be adding P V of the block before into it.
  - Lazy rescale, FA4's idea: a row keeps an old maximum until a score exceeds it by a factor of 2^RISE. P then lies in
    (0, 2^RISE] instead of (0, 1], which changes neither its relative rounding nor, after the division, O; and almost
    every block gets by without exchanging maxima between lanes and without touching O.
  - Optimistic exponentials, an idea of ours: a block that every query sees is exponentiated under the shifts at hand,
    before its maxima are known. The sums of P, needed anyway, tell whether a shift was too low; P, O and the sums are
    then lowered.
unchanged
  - base 2, un-normalised O, one row maximum and one row sum per row; a row lives in four lanes.
"""

import functools
import math
import operator
from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from fa3.algorithm import E4M3_MAX
from fa3.scheduler import Facts
from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of

NO_KEY = -1e30  # shift of a row that has seen no key: below any score, and finite, since -inf minus -inf is NaN
LOST = 2.0**100  # a sum of P from which on its scores count as lost; the factor 2^-127 would be no normal number, and 0
RISE = 8.0  # log2 of how far P may outgrow 1; 256 is far from overflow in fp16, and sums of P are fp32
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
LANES_OF_ROW = 4  # a row of an accumulator lives in a quad
EXP2_LOWEST, EXP2_HIGHEST = -126.0, 127.0  # the exponents of normal fp32 numbers


@dataclass(frozen=True)
class KeyScales:
    """What 8-bit scores and values of some keys of a block stand for."""

    before_cap: Float32 | None  # scores times this, if a softcap follows
    factor: Float32  # and times this, in base 2
    bias: Float32  # log2 of V's scale: a P so much larger weighs V's numbers as they are
    weight: Float32  # 1 / V's scale: what such a P counts in the row sum

    def instead_of(self, other: "KeyScales", condition: Boolean) -> "KeyScales":
        """These, or the other ones unless the condition holds."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return KeyScales(*(None if x is None else cutlass.select_(condition, x, y) for x, y in pairs))


def parts(acc_S: cute.Tensor, scales: tuple[KeyScales, ...] | None, in_halves: bool) -> list[cute.Tensor]:
    """A block's scores as (rows, columns) of this thread, apart for keys of different scales.

    in_halves: the columns are keys in the order of products.queries_and_keys.
    """
    S = as_rows_and_columns(acc_S)
    num_parts = 1 if scales is None else len(scales)
    if in_halves and num_parts > 1:
        num_rows, num_columns = S.shape[0], cute.size(S, mode=[1])
        # Two columns of the first half, the two of the second that are keys behind them, the next two of the first.
        in_order = cute.make_layout((2, 2, num_columns // 4), stride=(1, num_columns // 2, 2))
        S = cute.make_tensor(S.iterator, cute.composition(S.layout, (cute.make_layout(num_rows), in_order)))
    columns = cute.logical_divide(S, (None, cute.size(S, mode=[1]) // num_parts))
    return [columns[None, (None, part)] for part in range(num_parts)]


@dataclass(frozen=True)
class OnlineSoftmax:
    """The running statistics of this thread's rows, (rows,) fp32 each."""

    shift: cute.Tensor  # row_max in base 2, what scores are lowered by; up to RISE behind, if lazy
    row_sum: cute.Tensor  # this thread's columns only, until `finish`
    scale_log2: Float32  # softmax_scale * log2(e)
    num_columns: int  # of a block, that a thread has of each of its rows
    lazy: bool  # else every block takes the new maximum and rescales
    polynomial: bool  # a quarter of the exponentials on the FMA pipe
    limit: float = 2.0**RISE  # what a thread's sum of a row's P in a block may reach: no P is larger then
    height: float = 0.0  # log2 of a row's largest P when its shift is set
    in_halves: bool = False  # see `parts`
    scales: tuple[KeyScales, ...] | None = None  # of 8-bit tensors: those of this block

    @staticmethod
    def start(num_rows: int, scale_log2: Float32, facts: Facts) -> "OnlineSoftmax":
        shift, row_sum = (cute.make_rmem_tensor(num_rows, Float32) for _ in range(2))
        shift.fill(NO_KEY)
        row_sum.fill(0.0)
        config = facts.config
        return OnlineSoftmax(
            shift,
            row_sum,
            scale_log2,
            config.tile_n // LANES_OF_ROW,
            config.lazy_rescale,
            config.polynomial_exp,
            in_halves=facts.v_by_columns,
        )

    def of_block(self, scales: tuple[KeyScales, ...] | None) -> "OnlineSoftmax":
        """The same rows, for a block of keys whose K and V are 8-bit numbers times these scales."""
        if scales is None:
            return self
        # With equal scores a block's sum is below the limit.
        height = float(math.floor(math.log2(E4M3_MAX / self.num_columns))) if self.lazy else RISE
        return replace(self, limit=E4M3_MAX, height=height, scales=scales)

    @cute.jit
    def step(self, acc_S: cute.Tensor) -> tuple[cute.Tensor, Boolean]:
        """Turns scores into P = exp(scale * S - shift), in place.

        Returns what O must be multiplied by, (rows,), and whether any row of this warp needs it.
        """
        S, rows = parts(acc_S, self.scales, self.in_halves), range(cute.size(self.shift))
        highest = [self.highest_score(S, r) for r in rows]
        rises = self.any_row_rises(highest)
        rescale = cute.make_rmem_tensor_like(self.shift)
        rescale.fill(1.0)
        if rises:
            for r in cutlass.range_constexpr(len(rows)):
                rescale[r] = self.raise_row(r, quad_max(highest[r]) - self.height)
        for r in cutlass.range_constexpr(len(rows)):
            self.exponentiate(S, r)
            self.add(r, [row_sum_of(part, r) for part in S])
        return rescale, rises

    # Not in fa2 either: exponentials that wait for no maximum.

    @cute.jit
    def optimistic_step(self, acc_S: cute.Tensor) -> cute.Tensor:
        """Turns scores into P under the shifts at hand, in place: the exponentials wait for no maximum.

        Returns the sums of P, (rows, parts), which tell `outgrown` whether the shifts still served.
        """
        S = parts(acc_S, self.scales, self.in_halves)
        num_rows = cute.size(self.shift)
        sums = cute.make_rmem_tensor((num_rows, len(S)), Float32)
        for r in cutlass.range_constexpr(num_rows):
            self.exponentiate(S, r)
            for part in cutlass.range_constexpr(len(S)):
                sums[r, part] = row_sum_of(S[part], r)
        return sums

    def outgrown(self, sums: cute.Tensor) -> Boolean:
        """Whether some P of this warp may be above the limit."""
        totals = [total(sums, r) for r in range(cute.size(self.shift))]
        return cute.arch.vote_any_sync(functools.reduce(operator.or_, [x > self.limit for x in totals]))

    @cute.jit
    def lower(self, acc_S: cute.Tensor, sums: cute.Tensor, scores_again: cutlass.Constexpr) -> cute.Tensor:
        """Makes P that has outgrown the limit that of a higher shift; returns what O must be multiplied by, (rows,).

        Where a sum is LOST (some score was about 100 above all before, in base 2), `scores_again()` brings S back.
        """
        S = parts(acc_S, self.scales, self.in_halves)
        num_rows = cute.size(self.shift)
        rescale = cute.make_rmem_tensor_like(self.shift)
        # Infinite, or so large that the factor to lower it would be 0.
        lost = [total(sums, r) > LOST for r in range(num_rows)]
        if cute.arch.vote_any_sync(functools.reduce(operator.or_, lost)):
            scores_again()
            for r in cutlass.range_constexpr(num_rows):
                rescale[r] = self.raise_row(r, quad_max(self.highest_score(S, r)) - self.height)
                self.exponentiate(S, r)
                for part in cutlass.range_constexpr(len(S)):
                    sums[r, part] = row_sum_of(S[part], r)
        else:
            for r in cutlass.range_constexpr(num_rows):
                largest = quad_max(highest_of([row_max_of(part, r) for part in S]))
                rise = cute.math.log2(largest, fastmath=True) - self.height
                rescale[r] = self.raise_row(r, self.shift[r] + rise)
                for part in cutlass.range_constexpr(len(S)):
                    S[part][r, None].store(S[part][r, None].load() * rescale[r])
                    sums[r, part] = sums[r, part] * rescale[r]
        return rescale

    def count(self, sums: cute.Tensor) -> None:
        """Adds a block's P, (rows, parts), to the row sums."""
        for r in range(cute.size(self.shift)):
            self.add(r, [sums[r, part] for part in range(cute.size(sums, mode=[1]))])

    def raise_row(self, r: int, shift: Float32) -> Float32:
        """Raises a row's shift, if this one is higher, and what counts under it; returns the factor that O needs."""
        old, new = self.shift[r], cute.arch.fmax(self.shift[r], shift)
        rescale = cute.math.exp2(old - new, fastmath=True)
        self.shift[r], self.row_sum[r] = new, self.row_sum[r] * rescale
        return rescale

    def add(self, r: int, sums: list[Float32]) -> None:
        """Counts in what a block's parts sum up to."""
        for part, row_sum in enumerate(sums):
            weighed = row_sum if self.scales is None else row_sum * self.scales[part].weight
            self.row_sum[r] = self.row_sum[r] + weighed

    def highest_score(self, S: list[cute.Tensor], r: int) -> Float32:
        """Of this thread's columns of row r, in base 2 and as the exponential takes it."""
        scores = [row_max_of(part, r) * self.factor(i) for i, part in enumerate(S)]
        if self.scales is not None:
            scores = [score + scale.bias for score, scale in zip(scores, self.scales, strict=True)]
        return highest_of(scores)

    def factor(self, part: int) -> Float32:
        """What a part's scores are multiplied by."""
        return self.scale_log2 if self.scales is None else self.scales[part].factor

    @cute.jit
    def exponentiate(self, S: list[cute.Tensor], r: cutlass.Constexpr):
        """S = 2^(factor * S - shift) in row r, every fourth column on the FMA pipe if `polynomial`."""
        for part in cutlass.range_constexpr(len(S)):
            P, factor, shift = S[part], self.factor(part), self.shift[r]
            if const_expr(self.scales is not None):
                shift = shift - self.scales[part].bias
            if const_expr(not self.polynomial):
                P[r, None].store(cute.math.exp2(P[r, None].load() * factor - shift, fastmath=True))
            else:
                for c in cutlass.range_constexpr(cute.size(P, mode=[1])):
                    x = P[r, c] * factor - shift
                    P[r, c] = polynomial_exp2(x) if const_expr(c % 4 == 3) else cute.math.exp2(x, fastmath=True)

    def any_row_rises(self, highest: list[Float32]) -> Boolean:
        """Whether the maximum of some row of this warp no longer serves its new scores.

        Each lane compares its own columns, so that the quads need not exchange their maxima unless one does.
        """
        if not self.lazy:
            return self.scale_log2 > 0.0  # always, but the compiler must not know: see Forward.block
        rises = Boolean(False)
        for r, score in enumerate(highest):
            rises = rises | (score > self.shift[r] + RISE)
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


def row_max_of(p: cute.Tensor, r: int) -> Float32:
    """The maximum of row r of p (rows, columns)."""
    return p[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)


def highest_of(scores: list[Float32]) -> Float32:
    return functools.reduce(cute.arch.fmax, scores)


def total(sums: cute.Tensor, r: int) -> Float32:
    """Of all parts (rows, parts) of row r."""
    return functools.reduce(operator.add, [sums[r, part] for part in range(cute.size(sums, mode=[1]))])


@cute.jit
def polynomial_exp2(x: Float32) -> Float32:
    """2^x on the FMA pipe; 0 below EXP2_LOWEST, infinite above EXP2_HIGHEST."""
    shifted = x + TO_INTEGER
    fraction = x - (shifted - TO_INTEGER)
    *lower, power = EXP2_COEFFICIENTS
    power = Float32(power)
    for coefficient in reversed(lower):
        power = power * fraction + coefficient
    # The last bits of `shifted` are the integer: added to the exponent of 2^fraction.
    power = (power.bitcast(Int32) + (shifted.bitcast(Int32) << MANTISSA_BITS)).bitcast(Float32)
    power = Float32(0.0) if x < EXP2_LOWEST else power
    return power if x <= EXP2_HIGHEST else x * Float32.inf  # NaN of a NaN


@cute.jit
def rescale_rows(acc_O: cute.Tensor, rescale: cute.Tensor):
    """O *= rescale, row by row: moves what was accumulated under the old maximum to the new one."""
    O = as_rows_and_columns(acc_O)
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        O[r, None].store(O[r, None].load() * rescale[r])
