"""Without split_q: the warps of a CTA split the keys of a block, as FA1's do, and meet in shared memory (FA2 3.3).

Each warp has the scores of all the CTA's queries with its own keys. For every block a row's maximum, its sum and O are
therefore put together from all warps, in two meetings:

    warps     | S  maxima | 1 | P  sums  P V -> sO | 2 | O = w * O + shares |

A thread merges the same elements of O in every block, 16 bytes at a time, and keeps them in its registers: O goes to
HBM once, at the end, as with split_q.

shared memory, bytes
    sO          num_warps * tile_m * (width + 8) * 4    each warp's share of O, fp32; 8 against bank conflicts
    statistics  tile_m * (2 * num_warps + 1) * 4
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa2.config import SHARE_PAD
from fa2.softmax import OnlineSoftmax, inverse_of
from fa_common.tiles import as_rows_and_columns, quad_max, quad_sum, row_sum_of

FLOATS = 4  # of 16 bytes: what one thread merges of O at a time


def split_k_memory(tile_m: int, width: int, num_warps: int) -> int:
    """Floats of shared memory that a SplitK takes."""
    return tile_m * (num_warps * (width + SHARE_PAD) + 2 * num_warps + 1)


@dataclass(frozen=True)
class Merged:
    """This thread's part of O and its rows' sums, over all warps."""

    O: cute.Tensor  # (FLOATS, pieces) fp32
    row_sum: cute.Tensor  # (pieces,) fp32: of the row that each piece lies in

    def normalized(self, i: int, deferred: bool) -> cute.TensorSSA:
        """The i-th piece of O divided by its row's sum; unless deferred it has been."""
        O = self.O[None, i].load()
        return O * inverse_of(self.row_sum[i]) if deferred else O


@dataclass(frozen=True)
class SplitK:
    """Where the warps meet: fp32 tensors in shared memory."""

    sO: cute.Tensor  # (tile_m, width, num_warps): each warp's P V of this block
    warp_max: cute.Tensor  # (tile_m, num_warps): each warp's maximum over its keys
    warp_sum: cute.Tensor  # (tile_m, num_warps): each warp's sum of P
    row: cute.Tensor  # (tile_m,): what O must be rescaled by; in the end the row maxima

    @staticmethod
    def of(memory, tile_m: int, width: int, num_warps: int) -> "SplitK":
        """In `memory`, split_k_memory(...) floats."""
        pitch = width + SHARE_PAD
        start = memory.data_ptr()
        shares = cute.make_layout((tile_m, width, num_warps), stride=(pitch, 1, tile_m * pitch))
        by_warp = cute.make_layout((tile_m, num_warps))
        behind = tile_m * pitch * num_warps
        return SplitK(
            sO=cute.make_tensor(start, shares),
            warp_max=cute.make_tensor(start + behind, by_warp),
            warp_sum=cute.make_tensor(start + (behind + tile_m * num_warps), by_warp),
            row=cute.make_tensor(start + (behind + 2 * tile_m * num_warps), cute.make_layout((tile_m,))),
        )

    @property
    def num_threads(self) -> int:
        return 32 * cute.size(self.sO, mode=[2])

    def start(self) -> Merged:
        """O and the sums before the first block."""
        num_pieces = cute.size(self.sO, mode=[0]) * cute.size(self.sO, mode=[1]) // FLOATS // self.num_threads
        merged = Merged(
            cute.make_rmem_tensor((FLOATS, num_pieces), Float32), cute.make_rmem_tensor((num_pieces,), Float32)
        )
        merged.O.fill(0.0)
        merged.row_sum.fill(0.0)
        return merged

    def place(self, i: int) -> tuple[Int32, Int32]:
        """(row, first column) of this thread's i-th piece of O."""
        pieces_per_row = cute.size(self.sO, mode=[1]) // FLOATS
        piece = cute.arch.thread_idx()[0] + i * self.num_threads
        return piece // pieces_per_row, piece % pieces_per_row * FLOATS

    @cute.jit
    def step(self, softmax: OnlineSoftmax, acc_S: cute.Tensor, tScS: cute.Tensor):
        """Turns this warp's scores into P = exp(scale * (S - row_max)), in place; row_max is that of all warps."""
        S, cS = as_rows_and_columns(acc_S), as_rows_and_columns(tScS)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            row_max = quad_max(S[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
            if lane % 4 == 0:
                self.warp_max[cS[r, 0][0], warp] = row_max
        # Every warp's maxima are in warp_max before any warp puts them together.
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            row, row_max = cS[r, 0][0], softmax.row_max[r]
            for w in cutlass.range_constexpr(cute.size(self.warp_max, mode=[1])):
                row_max = cute.arch.fmax(row_max, self.warp_max[row, w])
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            no_key = row_max == -Float32.inf
            shift = Float32(0.0) if no_key else row_max * softmax.scale_log2
            fall = Float32(0.0) if no_key else softmax.row_max[r] - row_max
            S[r, None].store(cute.math.exp2(S[r, None].load() * softmax.scale_log2 - shift, fastmath=True))
            warp_sum = quad_sum(row_sum_of(S, r))
            if lane % 4 == 0:
                self.warp_sum[row, warp] = warp_sum
                if warp == 0:
                    self.row[row] = cute.math.exp2(fall * softmax.scale_log2, fastmath=True)
            softmax.row_max[r] = row_max

    def share(self, acc_O: cute.Tensor, tOcO: cute.Tensor) -> None:
        """Writes this warp's P V of a block to shared memory."""
        O, cO = as_rows_and_columns(acc_O), as_rows_and_columns(tOcO)
        sO = self.sO[None, None, cute.arch.warp_idx()]
        for r in range(cute.size(O, mode=[0])):
            for c in range(0, cute.size(O, mode=[1]), 2):
                row, column = cO[r, c]
                pair = cute.make_tensor(sO[row, None].iterator + column, cute.make_layout((2,)))
                pair[0], pair[1] = O[r, c], O[r, c + 1]

    @cute.jit
    def merge(self, merged: Merged, deferred: cutlass.Constexpr):
        """O = rescale * O + the warps' shares, and the sums likewise; unless deferred, O is kept divided by the sum."""
        # Every warp's share of O and of the sums, and the rescaling, are in shared memory.
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(cute.size(merged.row_sum)):
            row, column = self.place(i)
            old_sum, rescale = merged.row_sum[i], self.row[row]
            row_sum = old_sum * rescale
            # An O that was divided by its sum weighs as much.
            total = merged.O[None, i].load() * (rescale if const_expr(deferred) else row_sum)
            for w in cutlass.range_constexpr(cute.size(self.warp_sum, mode=[1])):
                row_sum = row_sum + self.warp_sum[row, w]
                share = cute.make_rmem_tensor((FLOATS,), Float32)
                cute.autovec_copy(cute.local_tile(self.sO[row, None, w], (FLOATS,), (column // FLOATS,)), share)
                total = total + share.load()
            merged.row_sum[i] = row_sum
            merged.O[None, i].store(total if const_expr(deferred) else total * inverse_of(row_sum))

    @cute.jit
    def publish_maxima(self, softmax: OnlineSoftmax, tScS: cute.Tensor):
        """Leaves the row maxima in `row`, for the threads that write LSE."""
        cS = as_rows_and_columns(tScS)
        # Every thread has merged the last block: nobody reads the rescaling any more.
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] < 32 and cute.arch.lane_idx() % 4 == 0:
            for r in cutlass.range_constexpr(cute.size(cS, mode=[0])):
                self.row[cS[r, 0][0]] = softmax.row_max[r]
        # Warp 0's maxima are in shared memory before others read them.
        cute.arch.sync_threads()
