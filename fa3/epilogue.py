"""How a tile's O and LSE leave: by TMA through shared memory, or row by row from registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warp

from fa3.loads import rows_of, sequences_of_q, tma_partition
from fa3.products import ROWS, Products
from fa3.scheduler import Tile, Work
from fa3.sync import THREADS_PER_WARPGROUP, WARPS_PER_WARPGROUP, NamedBarrier
from fa_common.tiles import as_rows_and_columns

PIECE = 64  # columns


@cute.jit
def store_lse(work: Work, tile: Tile, first_row: Int32, lse: cute.Tensor, products: Products, mLSE: cute.Tensor):
    """lse, (rows of this thread,), into mLSE ([split,] [batch,] heads, rows)."""
    tScS = as_rows_and_columns(products.tScS)
    if tScS[0, 0][1] == 0:  # one lane of the quad that shares the row
        for r in cutlass.range_constexpr(cute.size(lse)):
            exists, (row, head, *batch) = work.place_of(tile, first_row + tScS[r, 0][0])
            split = (tile.split,) if const_expr(work.facts.splits) else ()
            if exists:
                mLSE[(*split, *batch, head, row)] = lse[r]


@cute.jit
def store_rows(work: Work, tile: Tile, first_row: Int32, products: Products, mO: cute.Tensor):
    """O from registers, two neighbouring columns at a time: rows that are no box of O, or fp32.

    mO is (rows, head_dim, heads[, batch][, split]).
    """
    O, tScO = as_rows_and_columns(products.acc_O), as_rows_and_columns(products.tScO)
    split = (tile.split,) if const_expr(work.facts.splits) else ()
    for r in cutlass.range_constexpr(cute.size(O, mode=[0])):
        exists, (row, head, *batch) = work.place_of(tile, first_row + tScO[r, 0][0])
        if exists:
            for c in cutlass.range_constexpr(0, cute.size(O, mode=[1]), 2):
                column = tScO[r, c][1]
                if column < mO.shape[1]:
                    pair = cute.make_rmem_tensor(2, mO.element_type)
                    pair[0], pair[1] = O[r, c].to(mO.element_type), O[r, c + 1].to(mO.element_type)
                    place = mO.iterator + mO.layout((row, column, head, *batch, *split))
                    pointer = cute.make_ptr(
                        mO.element_type,
                        place.toint(),
                        cute.AddressSpace.gmem,
                        assumed_align=2 * mO.element_type.width // 8,
                    )
                    cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))


def piece_of(width: int) -> int:
    """How many columns of O leave at once: a swizzled row of 16-bit numbers, where that divides the width."""
    return PIECE if width % PIECE == 0 else width


@cute.jit
def store_tile(work: Work, tile: Tile, first_row: Int32, products: Products, sO: cute.Tensor, destination: tuple):
    """O of one warpgroup through shared memory, 64 columns after the other.

    sO is (64, columns, warpgroups * places): with fewer places than pieces a place is written again once TMA has read
    it. `destination` is the TMA store and its tensor.
    """
    tma_O, mO = destination
    config, sequences = work.facts.config, work.facts.sequences
    barrier = NamedBarrier.ROWS + products.warpgroup
    is_storing_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0
    columns, num_places = cute.size(sO, mode=[1]), cute.size(sO, mode=[2]) // config.num_consumer_warpgroups
    rO = cute.make_rmem_tensor_like(products.acc_O, sO.element_type)
    rO.store(products.acc_O.load().to(sO.element_type))
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), sO.element_type)
    thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
    copy = cute.make_tiled_copy_C(stmatrix, products.mma_piece).get_slice(thread)
    num_pieces = cute.size(rO) * THREADS_PER_WARPGROUP // (ROWS * columns)
    for piece in cutlass.range_constexpr(num_pieces):
        place = products.warpgroup * num_places + piece % num_places
        if const_expr(config.epilogue_overlap):
            if is_storing_warp:
                # TMA has read what this place held; then all four warps may overwrite it.
                cute.arch.cp_async_bulk_wait_group(num_places - 1, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=THREADS_PER_WARPGROUP)
        share = cute.size(rO) // num_pieces
        rows_and_columns = cute.make_layout(((2, 2, share // 4), 1, 1))  # an accumulator of these columns alone
        rPiece = cute.make_tensor(rO.iterator + piece * share, rows_and_columns)
        cute.copy(stmatrix, copy.retile(rPiece), copy.partition_D(sO[None, None, place]))
        # What these threads wrote becomes visible to TMA; then all four warps of the warpgroup have written.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=THREADS_PER_WARPGROUP)
        # No box may lie wholly behind a moving end: a warpgroup without a row stores nothing.
        if is_storing_warp & (first_row < tile.seqlen_q):
            rows = rows_of(mO, sequences_of_q(sequences), tile.head, tile.batch, (tile.offset_q, tile.seqlen_q))
            gO = cute.local_tile(rows, (ROWS, columns), (None, piece))
            tOsO, tOgO = tma_partition(tma_O, sO, gO)
            # TMA drops the rows past the sequence's end, and the columns past head_dim.
            cute.copy(tma_O, tOsO[None, place], tOgO[None, first_row // ROWS])
        if is_storing_warp:
            # A group for each piece, an empty one too: the waits above count groups.
            cute.arch.cp_async_bulk_commit_group()
    if const_expr(not config.epilogue_overlap) and is_storing_warp:
        # TMA has read O out of sQ.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
