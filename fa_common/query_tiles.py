"""What a backward keeps in global memory for each tile of queries: LSE and delta beforehand, the sum of dQ until it is
complete. Both are fp32, for whole tiles, so that whoever works on a tile asks no questions about where rows end.

    statistics   (heads_q, tiles, 2 * tile_m)      LSE in base 2 of each row, then delta = rowsum(dO * O) - dLSE
    dq_accum     (heads_q, tiles, tile_m * width)  each thread's accumulator registers by fours, thread after thread

`num_query_tiles` (fa_common/generation.py) says how many tiles there are, and which are a sequence's.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor

from fa_common.tiles import RowCopy, Sequence, tile_layout, whole_panels
from fa_common.warp_tiles import (
    LaneRow,
    Share,
    four_floats,
    operand_registers,
    round_to_squares,
    store_squares,
)

PREPARE_THREADS = 256
THREADS_A_ROW = 8  # of a RowCopy


@dataclass(frozen=True)
class QueryTiles:
    """The kernels before and after the one that computes gradients, for its tiles."""

    dtype: type
    head_dim: int
    tile_m: int
    num_threads: int  # of the kernel that adds up dQ, and so of `convert`
    packed: bool

    @property
    def width(self) -> int:
        return whole_panels(self.head_dim)

    def first(self, sequence: Sequence) -> Int32:
        """The sequence's first tile: `num_query_tiles` says why there."""
        if self.packed:
            return (sequence.offset_q + sequence.batch * self.tile_m) // self.tile_m
        return sequence.batch * cute.ceil_div(sequence.seqlen_q, self.tile_m)

    def fake_scratch(self, heads_q, num_tiles) -> tuple:
        """What statistics and dq_accum are compiled as: contiguous, read and written 16 bytes at a time."""
        return tuple(
            make_fake_compact_tensor(Float32, (heads_q, num_tiles, size), stride_order=(2, 1, 0), assumed_align=16)
            for size in (2 * self.tile_m, self.tile_m * self.width)
        )

    @cute.kernel
    def prepare(self, tensors: tuple, scratch: tuple, sequences: tuple, has_dlse: Int32):
        """Statistics of tile_m queries, zeros in their part of dq_accum; tensors are dO, O, LSE, dLSE.

        A row that does not exist or sees no key gets LSE = inf: its P is exp2(S - inf) = 0, whatever S is.
        """
        statistics, dq_accum = scratch
        m_block, head, batch = cute.arch.block_idx()
        sequence = Sequence.of(*sequences, batch)
        if m_block * self.tile_m < sequence.seqlen_q:
            tile = self.first(sequence) + m_block
            self.write_statistics(tensors, scratch_tile(statistics, head, tile), sequence, (m_block, head), has_dlse)
            accum = scratch_tile(dq_accum, head, tile).iterator
            zeros = cute.make_rmem_tensor((4,), Float32)
            zeros.fill(0.0)
            for i in cutlass.range_constexpr(self.tile_m * self.width // (4 * PREPARE_THREADS)):
                cute.autovec_copy(zeros, four_floats(accum + (i * PREPARE_THREADS + cute.arch.thread_idx()[0]) * 4))

    @cute.jit
    def write_statistics(
        self, tensors: tuple, statistics: cute.Tensor, sequence: Sequence, place: tuple, has_dlse: Int32
    ):
        """LSE and delta of a tile's rows, eight threads to a row; place is (query block, head)."""
        mdO, mO, mLSE, mdLSE = tensors
        (m_block, head), tile_m = place, self.tile_m
        num_rows = sequence.seqlen_q - m_block * tile_m
        copy = RowCopy.of(self.dtype, tile_m, self.head_dim, PREPARE_THREADS)
        tgO, tgdO = [
            copy.of_global(cute.local_tile(sequence.queries(m, head), (tile_m, self.width), (m_block, 0)))
            for m in (mO, mdO)
        ]
        shape = cute.product_each(tgO.shape)  # (16 B, rows, panels)
        rO, rdO = cute.make_rmem_tensor(shape, self.dtype), cute.make_rmem_tensor(shape, self.dtype)
        for i in cutlass.range_constexpr(shape[1]):
            for panel in cutlass.range_constexpr(shape[2]):
                if copy.exists(i, panel, num_rows):
                    cute.copy(copy.synchronous, tgO[None, i, panel], rO[None, i, panel])
                    cute.copy(copy.synchronous, tgdO[None, i, panel], rdO[None, i, panel])
                else:
                    rO[None, i, panel].fill(0)
                    rdO[None, i, panel].fill(0)
        lse, dlse = sequence.statistics(mLSE, head), sequence.statistics(mdLSE, head)
        for i in cutlass.range_constexpr(shape[1]):
            row, column = copy.pieces[0, i, 0]
            products = rO[None, i, None].load().to(Float32) * rdO[None, i, None].load().to(Float32)
            total = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            delta = cute.arch.warp_reduction_sum(total, threads_in_group=THREADS_A_ROW)
            if column == 0:
                lse_log2, delta_less = Float32.inf, Float32(0.0)
                if row < num_rows:
                    row_lse = lse[m_block * tile_m + row]
                    if row_lse != -Float32.inf:
                        lse_log2, delta_less = row_lse * math.log2(math.e), delta
                        if has_dlse != 0:
                            delta_less = delta - dlse[m_block * tile_m + row]
                statistics[row] = lse_log2
                statistics[tile_m + row] = delta_less

    @cute.kernel
    def convert(
        self,
        mdQ: cute.Tensor,
        dq_accum: cute.Tensor,
        sequences: tuple,
        mma: cute.TiledMma,
        warps: cutlass.Constexpr,
        scale: Float32,
    ):
        """dQ, scaled, in the type of Q: threads take what lies as their accumulators did, and rows go out whole.

        `warps` is how many warps split (queries, columns) of dQ.
        """
        m_block, head, batch = cute.arch.block_idx()
        sequence = Sequence.of(*sequences, batch)
        layout = tile_layout(self.tile_m, self.width)
        sdQ = cutlass.memory.SmemAllocator().allocate_tensor(self.dtype, layout, byte_alignment=1024)
        num_rows = sequence.seqlen_q - m_block * self.tile_m
        if num_rows > 0:
            queries, columns = dq_shares(self.tile_m, self.width, warps)
            acc_dQ = cute.make_rmem_tensor(mma.partition_shape_C((queries.size, columns.size)), Float32)
            tile = self.first(sequence) + m_block
            accum = scratch_tile(dq_accum, head, tile).iterator + cute.arch.thread_idx()[0] * 4
            by_fours = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, cute.size(acc_dQ) // 4)))
            for i in cutlass.range_constexpr(cute.size(acc_dQ) // 4):
                cute.autovec_copy(four_floats(accum + i * self.num_threads * 4), by_fours[None, i])
            for i in cutlass.range_constexpr(cute.size(acc_dQ)):
                acc_dQ[i] = acc_dQ[i] * scale
            rounded = operand_registers(acc_dQ, self.dtype)
            round_to_squares(acc_dQ, rounded)
            rows = LaneRow.of(sdQ, (queries.first, columns.first), by_rows=True)
            store_squares(rounded, rows, (queries, columns), transpose=False)
            # All of dQ is in shared memory before threads read what others wrote.
            cute.arch.sync_threads()
            copy = RowCopy.of(self.dtype, self.tile_m, self.head_dim, self.num_threads)
            gdQ = cute.local_tile(sequence.queries(mdQ, head), (self.tile_m, self.width), (m_block, 0))
            copy.store_rows(copy.of_shared(sdQ), copy.of_global(gdQ), num_rows)


def scratch_tile(scratch: cute.Tensor, head: Int32, tile: Int32) -> cute.Tensor:
    """A tile's part of statistics or dq_accum; 64-bit offsets."""
    return scratch[head, Int64(tile), None]


def dq_shares(tile_m: int, width: int, warps: tuple) -> tuple:
    """(queries, columns) of dQ that this warp has, where `warps` split them."""
    index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    queries = Share.run(tile_m, index % warps[0], warps[0])
    return queries, Share.of_each_panel(width, index // warps[0], warps[1])


@dataclass(frozen=True)
class Turns:
    """An order among the CTAs that add to a tile: int32 (1 + heads_q * tiles,), all zeros before.

    First a counter, from which each CTA draws its number as it starts: whoever it waits for has then started, so that
    no CTA waits for one that finds no room. Behind it, for each tile, how many have added to it.
    """

    counts: cute.Tensor

    @cute.jit
    def draw(self, number: cute.Pointer) -> Int32:
        """This CTA's number; `number` is four bytes of shared memory."""
        drawn = cute.make_tensor(number, cute.make_layout((1,)))
        if cute.arch.thread_idx()[0] == 0:
            drawn[0] = cute.arch.atomic_add(self.counts.iterator, Int32(1), sem="relaxed", scope="gpu")
        # Thread 0 has written the number before all threads read it.
        cute.arch.sync_threads()
        own = drawn[0]
        # All threads have read the number before this memory is used for something else.
        cute.arch.sync_threads()
        return own

    @cute.jit
    def wait(self, tile: Int32, turn: Int32):
        """Until `turn` CTAs have added to a tile."""
        if cute.arch.thread_idx()[0] == 0:
            count = self.counts.iterator + (1 + tile)
            now = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
            while now != turn:
                now = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
        # Thread 0 has seen what they added, all threads may add to it.
        cute.arch.sync_threads()

    @cute.jit
    def pass_on(self, tile: Int32):
        """This CTA has added to a tile."""
        # Each thread's additions are visible before thread 0 says so.
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            count = self.counts.iterator + (1 + tile)
            cute.arch.red(count, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
