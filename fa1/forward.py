"""FA1 forward: attention in tiles, so that S and P never reach HBM (FA1, algorithm 1).

  - Keys outer, queries inner: one CTA per head and batch holds a block of K and V and walks over all queries.
  - O is kept normalised and goes back to HBM at each visit, with its row maximum m and row sum l.
  - The warps of a CTA split the keys of a block ("split-K"): each multiplies all queries of the tile with its own keys,
    which stay in its registers; the shares of O meet in shared memory, and each warp merges some columns.
  - cp.async into swizzled shared memory, ldmatrix, mma.sync m16n8k16.
  - Where this departs from the released FA1 code: docs/fa1.md.

Time to the right, one key block (S = Q K of a visit, P = softmax of it, O = P V of it; | is a barrier):

    cp.async  K V Q0 | Q1          | Q2             | Q3             | ...
    warps            | S0 P0 O0    | M0 S1 P1 O1    | M1 S2 P2 O2    | M2 ...     M: shares and old O become the new O
    HBM              | ^O0 m0 l0   | vO0 ^O1 m1 l1  | vO1 ^O2 m2 l2  | vO2 ...    (^ read, v written)

shared memory, bytes (16-bit types; width: head_dim, up to whole panels of 64; columns: up to 8 a warp)
    sK, sV  tile_n * width * 2 each
    sQ      tile_m * width * 2 * 2                   this visit's queries and the next one's
    sO      num_warps * tile_m * columns * 4 * 2     each warp's share of O, fp32, of this visit and the one before;
                                                     in the place of sK and sV with kv_in_registers
    statistics  num_warps * tile_m * 2 * 4 * 2
registers a thread (d = 64, 16 x 256, 4 warps): K 64, V 64, S 32, P 16, O 32
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fa1.config import COLUMNS, FLOATS, LANES, ROWS, whole_pieces
from fa1.softmax import OnlineSoftmax
from fa_common.compile import KernelKey
from fa_common.tiles import (
    DTYPES,
    Operand,
    RowCopy,
    Sequence,
    as_operand_a,
    by_rows,
    cap_scores,
    check_shared_memory,
    fake_lengths,
    fake_rows,
    fake_sequences,
    mask_scores,
    round_to_operand_a,
    score_scales,
    tile_layout,
    whole_panels,
)
from fa_common.warp_tiles import thread_index_anew

STAGES = 2  # of sQ: this visit's queries and the next one's
COLUMNS_AT_ONCE = 64  # of O


@dataclass(frozen=True)
class Tile:
    """Which head this CTA computes, and which of its queries."""

    head: Int32
    head_kv: Int32
    sequence: Sequence
    split: Int32  # this CTA's query blocks: split, split + q_splits, ...
    num_m_blocks: Int32  # of the whole sequence
    first_slot: Int32  # of the sequence's query blocks in the workspaces
    bounds: tuple  # (left, right): how many keys before and behind its own position a query sees; None (static): all


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors."""

    sQ: cute.Tensor  # (tile_m, width, STAGES)
    sK: cute.Tensor  # (tile_n, width)
    sV: cute.Tensor  # (tile_n, width)
    sO: cute.Tensor  # (4, lanes, num_warps, columns / 8, tile_m / 16, share_stages) fp32: the warps' shares
    sOld: cute.Tensor  # (4, lanes, columns / 8, tile_m / 16) fp32: O as HBM holds it, each lane's own pieces
    sStatistics: cute.Tensor  # (2, tile_m, STAGES) fp32: m and l as HBM holds them


@dataclass(frozen=True)
class Copies:
    """This thread's share of the copies."""

    q: RowCopy
    kv: RowCopy
    tQgQ: cute.Tensor  # (16 B, rows, panels, m_blocks)
    tQsQ: tuple  # (16 B, rows, panels) of each stage
    tKgK: cute.Tensor  # (16 B, rows, panels, n_blocks)
    tKsK: cute.Tensor
    tVgV: cute.Tensor
    tVsV: cute.Tensor


@dataclass(frozen=True)
class Products:
    """This warp's two products, over its own keys: a visit's queries pass 16 at a time, O's columns 64 at a time."""

    mma: cute.TiledMma
    q: tuple  # (tile_m, width) of each stage
    k: Operand  # (tile_n / num_warps, width)
    v: Operand  # (width, tile_n / num_warps)
    acc_S: cute.Tensor  # (MMA, 1, MMA_N) fp32
    rP: cute.Tensor  # (MMA, 1, MMA_K) 16-bit, the same thread's share of acc_S
    acc_O: cute.Tensor  # (MMA, 1, MMA_N) fp32
    tScS: cute.Tensor  # (MMA, 1, MMA_N) coordinates (query of 16, this warp's key) of acc_S


class Forward:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        self.width = whole_panels(key.head_dim)  # of a tile: head_dim and, where that ends inside a panel, zeros
        self.causal, self.window, self.softcap = key.causal, key.window, key.softcap
        self.num_threads = LANES * key.config.num_warps
        self.keys_per_warp = key.config.tile_n // key.config.num_warps
        self.pieces_per_warp = whole_pieces(key.head_dim, key.config.num_warps) // key.config.num_warps
        self.columns = COLUMNS * self.pieces_per_warp * key.config.num_warps  # of O: head_dim, as many for each warp
        self.groups = key.config.tile_m // ROWS
        self.k_steps = -(-key.head_dim // 16)  # of S = Q K^T

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        mAcc: cute.Tensor,
        mStatistics: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        stream,
    ):
        """Q, K, V, O (batch, seqlen, heads, head_dim), LSE (batch, heads, seqlen_q); packed sequences (total, heads,
        head_dim) and (heads, total).

        Workspaces, uninitialised, fp32, with a slot for each query block: O in pieces, (heads, slots, tile_m / 16,
        columns / 8, lanes, 4), m and l (heads, slots, tile_m, 2).
        """
        tile_m, tile_n, num_warps, dtype = self.config.tile_m, self.config.tile_n, self.config.num_warps, self.dtype
        mQ, mK, mV, mO = (by_rows(t) for t in (mQ, mK, mV, mO))
        # One warp by itself; two m16n8k16 side by side along the keys, so that one ldmatrix.x4 feeds both.
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), (1, 1, 1), permutation_mnk=(16, 16, 16)
        )
        layout_Q, layout_K = tile_layout(tile_m, self.width), tile_layout(tile_n, self.width)
        layout_O = cute.make_layout(
            (FLOATS, LANES, num_warps, self.columns // COLUMNS, self.groups, self.config.share_stages)
        )
        size_of_K, size_of_O = cute.cosize(layout_K), cute.cosize(layout_O)
        # K and V, once in registers, make room for the shares of O: two fp32 need as much as four of a 16-bit type.
        size_of_KV = max(2 * size_of_K, 2 * size_of_O) if self.config.kv_in_registers else 2 * size_of_K
        size_of_O = 0 if self.config.kv_in_registers else size_of_O

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_Q) * STAGES], 128]
            sKV: cute.struct.Align[cute.struct.MemRange[dtype, size_of_KV], 128]
            sO: cute.struct.Align[cute.struct.MemRange[Float32, size_of_O], 128]
            sOld: cute.struct.Align[cute.struct.MemRange[Float32, tile_m * self.columns], 128]
            sStatistics: cute.struct.Align[cute.struct.MemRange[Float32, 2 * tile_m * STAGES], 16]
            warp_max: cute.struct.Align[cute.struct.MemRange[Float32, num_warps * tile_m * STAGES], 16]
            warp_sum: cute.struct.Align[cute.struct.MemRange[Float32, num_warps * tile_m * STAGES], 16]

        check_shared_memory(Storage.size_in_bytes(), self.config, self.head_dim)
        self.Storage = Storage

        num_sequences = mQ.shape[3] if const_expr(cu_seqlens_q is None) else cu_seqlens_q.shape[0] - 1
        self.kernel(
            (mQ, mK, mV, mO, mLSE),
            (cu_seqlens_q, cu_seqlens_k),
            (mAcc, mStatistics),
            (layout_Q, layout_K, layout_O),
            mma,
            (score_scales(softmax_scale, softcap if const_expr(self.softcap) else None), window_left, window_right),
        ).launch(
            grid=(self.config.q_splits, mQ.shape[2], num_sequences),
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # without: ptxas aims at three CTAs on an SM, 168 registers, and spills
        )

    @cute.kernel
    def kernel(
        self, tensors: tuple, cu_seqlens: tuple, workspaces: tuple, layouts: tuple, mma: cute.TiledMma, numbers: tuple
    ):
        """Sets up shared memory; then the CTA attends, block of keys by block of keys."""
        mQ, mK = tensors[0], tensors[1]
        tile_m, num_warps = self.config.tile_m, self.config.num_warps
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        layout_Q, layout_K, layout_O = layouts
        memory_K, memory_O = storage.sKV.data_ptr(), storage.sO.data_ptr()
        if const_expr(self.config.kv_in_registers):
            memory_O = cute.recast_ptr(memory_K, dtype=Float32)
        shared = Shared(
            sQ=storage.sQ.get_tensor(cute.append(layout_Q, cute.make_layout(STAGES, stride=cute.cosize(layout_Q)))),
            sK=cute.make_tensor(memory_K, layout_K),
            sV=cute.make_tensor(memory_K + cute.cosize(layout_K), layout_K),
            sO=cute.make_tensor(memory_O, layout_O),
            sOld=storage.sOld.get_tensor(cute.make_layout((FLOATS, LANES, self.columns // COLUMNS, self.groups))),
            sStatistics=storage.sStatistics.get_tensor(cute.make_layout((2, tile_m, STAGES))),
        )
        (scale_tanh, scale_log2), window_left, window_right = numbers
        by_warp = cute.make_layout((num_warps, tile_m, STAGES))
        softmax = OnlineSoftmax(storage.warp_max.get_tensor(by_warp), storage.warp_sum.get_tensor(by_warp), scale_log2)

        split, head, batch = cute.arch.block_idx()
        sequence = Sequence.of(mQ, mK, cu_seqlens, batch)
        num_m_blocks = cute.ceil_div(sequence.seqlen_q, tile_m)
        first_slot = batch * num_m_blocks
        if const_expr(cu_seqlens[0] is not None):
            first_slot = sequence.offset_q // tile_m + batch  # each sequence before may end inside a block
        bounds = (None, 0 if self.causal else None)
        bounds = (window_left, window_right) if const_expr(self.window) else bounds
        head_kv = head // (mQ.shape[2] // mK.shape[2])
        tile = Tile(head, head_kv, sequence, split, num_m_blocks, first_slot, bounds)

        copies = self.load(tile, tensors, shared)
        self.attend(tile, tensors, workspaces, self.products(mma, shared), shared, copies, (softmax, scale_tanh))

    @cute.jit
    def load(self, tile: Tile, tensors: tuple, shared: Shared) -> Copies:
        """This thread's share of every copy the loop will make."""
        tile_m, tile_n, width = self.config.tile_m, self.config.tile_n, self.width
        mQ, mK, mV, _, _ = tensors
        gQ = cute.local_tile(tile.sequence.queries(mQ, tile.head), (tile_m, width), (None, 0))
        gK = cute.local_tile(tile.sequence.keys(mK, tile.head_kv), (tile_n, width), (None, 0))
        gV = cute.local_tile(tile.sequence.keys(mV, tile.head_kv), (tile_n, width), (None, 0))
        q_copy = RowCopy.of(self.dtype, tile_m, self.head_dim, self.num_threads)
        kv_copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads)
        return Copies(
            q=q_copy,
            kv=kv_copy,
            tQgQ=q_copy.of_global(gQ),
            tQsQ=tuple(q_copy.of_shared(shared.sQ[None, None, stage]) for stage in range(STAGES)),
            tKgK=kv_copy.of_global(gK),
            tKsK=kv_copy.of_shared(shared.sK),
            tVgV=kv_copy.of_global(gV),
            tVsV=kv_copy.of_shared(shared.sV),
        )

    @cute.jit
    def attend(
        self,
        tile: Tile,
        tensors: tuple,
        workspaces: tuple,
        products: Products,
        shared: Shared,
        copies: Copies,
        softmax: tuple,
    ):
        """Every key block against every query block of this CTA that sees it."""
        tile_n, q_splits = self.config.tile_n, self.config.q_splits
        # Without any key there is still one block, in which nobody sees anything: zeros and -inf are written.
        for n_block in cutlass.range(cutlass.max(cute.ceil_div(tile.sequence.seqlen_k, tile_n), 1), unroll=1):
            m_begin, m_end = self.visits(n_block, tile)
            if m_begin < m_end:
                # Every warp is done with K, V and Q of the key block before, and with its last shares of O.
                cute.arch.sync_threads()
                self.load_keys(n_block, tile, products, copies, m_begin)
            for i in cutlass.range(cute.ceil_div(m_end - m_begin, STAGES * q_splits), unroll=1):
                for stage in cutlass.range_constexpr(STAGES):
                    m_block = m_begin + (i * STAGES + stage) * q_splits
                    if m_block < m_end:
                        place = (n_block, m_block, m_end, stage)
                        self.block(place, tile, tensors, workspaces, (products, shared, copies), softmax)

    def visits(self, n_block: Int32, tile: Tile) -> tuple:
        """The query blocks of this CTA that see a key of block n: from the first on, every q_splits-th, before the end.

        Block 0 is also visited by those that see no key at all, so that every row of O is written.
        """
        tile_m, tile_n, q_splits = self.config.tile_m, self.config.tile_n, self.config.q_splits
        (left, right), shift = tile.bounds, tile.sequence.seqlen_k - tile.sequence.seqlen_q
        begin, end = 0, tile.num_m_blocks
        if const_expr(right is not None):
            # The last of tile_m queries sees the keys up to its position + shift + right.
            begin = cutlass.max(n_block * tile_n - shift - right, 0) // tile_m
            begin = cutlass.min(begin, n_block * tile.num_m_blocks)
        if const_expr(left is not None):
            # The first one sees those from its position + shift - left on.
            end = cutlass.min(end, (cutlass.max((n_block + 1) * tile_n - shift + left, 0) + tile_m - 1) // tile_m)
        passed = (cutlass.max(begin - tile.split, 0) + q_splits - 1) // q_splits  # of this CTA's blocks
        return tile.split + passed * q_splits, end

    def products(self, mma: cute.TiledMma, shared: Shared) -> Products:
        """This thread's operands and accumulators of S = Q K^T and O = P V."""
        keys, lane = self.keys_per_warp, cute.arch.lane_idx()
        first_key = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * keys
        acc_S = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, keys)), Float32)
        return Products(
            mma=mma,
            q=tuple(Operand.a(mma, shared.sQ[None, None, stage], lane) for stage in range(STAGES)),
            k=Operand.b(mma, shared.sK, lane, rows=(first_key, keys)),
            v=Operand.b(mma, shared.sV, lane, rows=(first_key, keys), transpose=True),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(as_operand_a(acc_S.layout), self.dtype),
            acc_O=cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS_AT_ONCE)), Float32),
            tScS=mma.get_slice(lane).partition_C(cute.make_identity_tensor((ROWS, keys))),
        )

    @cute.jit
    def load_keys(self, n_block: Int32, tile: Tile, products: Products, copies: Copies, m_block: Int32):
        """Brings a key block and its first queries on chip."""
        num_keys = tile.sequence.seqlen_k - n_block * self.config.tile_n
        load_rows_in_a_loop(copies.kv, copies.tKgK[None, None, None, n_block], copies.tKsK, num_keys)
        load_rows_in_a_loop(copies.kv, copies.tVgV[None, None, None, n_block], copies.tVsV, num_keys)
        self.load_queries(0, m_block, tile, copies)
        # K, V and the first queries are one group, which has arrived for every thread behind the barrier.
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if const_expr(self.config.kv_in_registers):
            for operand, k_steps in ((products.k, self.k_steps), (products.v, self.keys_per_warp // 16)):
                for k_step in cutlass.range_constexpr(k_steps):
                    for i in cutlass.range_constexpr(operand.num_groups):
                        operand.load(i, k_step)
            # Every warp has its keys and values in registers before shares of O take their place.
            cute.arch.sync_threads()

    @cute.jit
    def load_queries(self, stage: cutlass.Constexpr, m_block: Int32, tile: Tile, copies: Copies):
        """Starts the copy of one query block."""
        num_rows = tile.sequence.seqlen_q - m_block * self.config.tile_m
        copies.q.load_rows(copies.tQgQ[None, None, None, m_block], copies.tQsQ[stage], num_rows)

    @cute.jit
    def block(self, place: tuple, tile: Tile, tensors: tuple, workspaces: tuple, working_set: tuple, numbers: tuple):
        """One visit: S, P and O of a query block against the key block on chip, merged into O in HBM.

        place: (n_block, m_block, where the query blocks end, stage).
        """
        (n_block, m_block, m_end, stage), (softmax, scale_tanh) = place, numbers
        products, shared, copies = working_set
        # This visit's Q has arrived for every thread, and all are done with the queries that lie where the next go.
        if m_block + self.config.q_splits < m_end:
            self.load_queries((stage + 1) % STAGES, m_block + self.config.q_splits, tile, copies)
        first, last = self.first_and_last_visit(m_block, tile)
        if n_block > first:
            self.read(m_block, stage, tile, workspaces, shared)
        # The queries of the next visit, O, m and l of this one; this visit waits for the group, at its end.
        cute.arch.cp_async_commit_group()
        for group in cutlass.range_constexpr(self.groups):
            self.multiply_keys(products, products.q[stage], group)
            if const_expr(self.softcap):
                cap_scores(products.acc_S, scale_tanh)
            self.mask(n_block, m_block * self.config.tile_m + group * ROWS, tile, products)
            softmax.step(products.acc_S, products.tScS, group * ROWS, stage)
            round_to_operand_a(products.acc_S, products.rP)
            if const_expr(self.config.share_stages == 1 and group == 0):
                # Every warp has merged the shares of the visit before; this visit's take their place.
                cute.arch.sync_threads()
            share_stage = stage % self.config.share_stages
            sO = shared.sO[None, None, cute.arch.warp_idx(), None, group, share_stage]
            self.share_values(products, sO)
        # The next visit's queries, O, m and l have arrived, for this thread; with the barrier, for every thread.
        cute.arch.cp_async_wait_group(0)
        # Every warp's shares of O and row statistics are in shared memory. Two visits on they are overwritten; the next
        # visit's barrier lies between.
        cute.arch.sync_threads()
        self.store((m_block, stage, n_block > first, n_block == last), tile, tensors, workspaces, shared, softmax)

    def first_and_last_visit(self, m_block: Int32, tile: Tile) -> tuple:
        """The key blocks at which a query block's O begins and is complete."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        (left, right), seqlen_k = tile.bounds, tile.sequence.seqlen_k
        facing = m_block * tile_m + seqlen_k - tile.sequence.seqlen_q
        first, end = 0, seqlen_k
        if const_expr(left is not None):
            first = cutlass.max(facing - left, 0) // tile_n
        if const_expr(right is not None):
            end = cutlass.min(seqlen_k, facing + tile_m + right)
        return first, (cutlass.max(end, 1) + tile_n - 1) // tile_n - 1

    @cute.jit
    def read(self, m_block: Int32, stage: cutlass.Constexpr, tile: Tile, workspaces: tuple, shared: Shared):
        """Starts the copies of a query block's O, m and l, as the visit before wrote them.

        By cp.async: the compiler would put off loads into registers until there is no time left.
        """
        mAcc, mStatistics = workspaces
        copy = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
        )
        thread = thread_index_anew()  # without: up to 20 B spilled
        lane, warp_index, slot = thread % LANES, thread // LANES, Int64(tile.first_slot + m_block)
        for group in cutlass.range_constexpr(self.groups):
            for i in cutlass.range_constexpr(self.pieces_per_warp):
                piece = warp_index * self.pieces_per_warp + i
                source = aligned(mAcc[tile.head, slot, group, piece, lane, None], 16)
                cute.copy(copy, source, aligned(shared.sOld[None, lane, piece, group], 16))
        if thread < self.config.tile_m // 2:  # two rows each
            source = aligned(four_of(mStatistics[tile.head, slot, None, None], thread), 16)
            target = aligned(four_of(shared.sStatistics[None, None, stage], thread), 16)
            cute.copy(copy, source, target)

    def multiply_keys(self, products: Products, q: Operand, group: int) -> None:
        """S = Q K^T of 16 queries and this warp's keys."""
        products.acc_S.fill(0.0)
        queries = cute.logical_divide(q.registers, (None, 1, None))  # (MMA, (1, groups), MMA_K)
        for k_step in range(self.k_steps):
            q.load(group, k_step)
            rQ = queries[None, (None, group), k_step]
            self.multiply_k_step(products, products.acc_S, rQ, products.k, (k_step, range(products.k.num_groups)))

    def share_values(self, products: Products, sO: cute.Tensor) -> None:
        """O = P V of 16 queries and this warp's keys, its share, into shared memory: (4, lanes, columns / 8)."""
        groups_at_once, num_groups = COLUMNS_AT_ONCE // 16, cute.size(sO, mode=[2]) // 2
        for first in range(0, num_groups, groups_at_once):
            groups = range(first, min(first + groups_at_once, num_groups))
            products.acc_O.fill(0.0)
            for k_step in range(self.keys_per_warp // 16):
                self.multiply_k_step(
                    products, products.acc_O, products.rP[None, None, k_step], products.v, (k_step, groups)
                )
            for i in range(2 * len(groups)):
                piece = cute.make_tensor(products.acc_O[None, 0, i].iterator, cute.make_layout(FLOATS))
                cute.autovec_copy(piece, aligned(sO[None, cute.arch.lane_idx(), 2 * first + i], 16))

    def multiply_k_step(self, products: Products, acc: cute.Tensor, rA: cute.Tensor, b: Operand, place: tuple) -> None:
        """acc += A B^T over one k-step of 16, for some groups of 16 columns of B^T; place: (k-step, groups)."""
        acc_groups = cute.logical_divide(acc, (None, None, 2))  # (MMA, 1, (2, groups))
        b_groups = cute.logical_divide(b.registers, (None, 2, None))  # (MMA, (2, groups), MMA_K)
        k_step, groups = place
        for i, group in enumerate(groups):
            if not self.config.kv_in_registers:
                b.load(group, k_step)
            acc_group = acc_groups[None, None, (None, i)]
            cute.gemm(products.mma, acc_group, rA, b_groups[None, (None, group), k_step], acc_group)

    @cute.jit
    def mask(self, n_block: Int32, first_row: Int32, tile: Tile, products: Products):
        """Hides the keys that a query does not see; without a mask only the last key block has some, past the end."""
        first_key = n_block * self.config.tile_n + cute.arch.warp_idx() * self.keys_per_warp
        origin, seqlens = (first_row, first_key), (tile.sequence.seqlen_q, tile.sequence.seqlen_k)
        if const_expr(self.causal or self.window):
            mask_scores(products.acc_S, products.tScS, origin, seqlens, tile.bounds)
        else:
            if (n_block + 1) * self.config.tile_n > tile.sequence.seqlen_k:
                mask_scores(products.acc_S, products.tScS, origin, seqlens, tile.bounds)

    @cute.jit
    def store(
        self,
        place: tuple,
        tile: Tile,
        tensors: tuple,
        workspaces: tuple,
        shared: Shared,
        softmax: OnlineSoftmax,
    ):
        """Merges the warps' shares into O and writes O, m and l back to HBM; on a row's last visit out and LSE instead.

        Each warp merges the columns whose old O it read itself. m and l cross threads: between this visit's write and
        the next visit's read lies a barrier. place: (m_block, stage, whether it was visited before, whether it
        will not be again).
        """
        m_block, stage, is_visited, is_last = place
        lane, warp_index = cute.arch.lane_idx(), cute.arch.warp_idx()
        for group in cutlass.range_constexpr(self.groups):
            rows = [group * ROWS + half * 8 + lane // 4 for half in range(2)]
            old = [self.old_statistics(shared.sStatistics[None, row, stage], is_visited) for row in rows]
            weights = [softmax.weights(row, stage, *old[half]) for half, row in enumerate(rows)]
            # Two pieces at a time: the compiler would read the shares of all at once, and spill.
            at_once = 2 - self.pieces_per_warp % 2
            for first in cutlass.range(0, self.pieces_per_warp, at_once, unroll=1):
                for i in cutlass.range_constexpr(at_once):
                    piece = warp_index * self.pieces_per_warp + first + i
                    rO = cute.make_rmem_tensor((FLOATS,), Float32)
                    rO.fill(0.0)
                    if is_visited:
                        cute.autovec_copy(aligned(shared.sOld[None, lane, piece, group], 16), rO)
                    shares = shared.sO[None, lane, None, piece, group, stage % self.config.share_stages]
                    self.merge(shares, rO, weights)
                    self.store_piece(rO, (m_block, group, piece), is_last, tile, tensors, workspaces)
            if (warp_index == 0) & (lane % 4 == 0):
                self.store_statistics((m_block, rows), weights, is_last, tile, (tensors, workspaces), softmax)

    @cute.jit
    def old_statistics(self, statistics: cute.Tensor, is_visited: Boolean):
        """(m, l) of a row as HBM held them; (-inf, 0) before its first visit."""
        row_max, row_sum = -Float32.inf, Float32(0.0)
        if is_visited:
            row_max, row_sum = statistics[0], statistics[1]
        return row_max, row_sum

    @cute.jit
    def store_piece(
        self, rO: cute.Tensor, place: tuple, is_last: Boolean, tile: Tile, tensors: tuple, workspaces: tuple
    ):
        """A lane's four elements of O to the workspace, or rounded to out; place is (m_block, group, piece)."""
        (m_block, group, piece), lane = place, cute.arch.lane_idx()
        if is_last:
            gO, column = tile.sequence.queries(tensors[3], tile.head), piece * COLUMNS + lane % 4 * 2
            for half in cutlass.range_constexpr(2):
                query = m_block * self.config.tile_m + group * ROWS + half * 8 + lane // 4
                if (query < tile.sequence.seqlen_q) & (column < self.head_dim):
                    pair = cute.make_rmem_tensor((2,), self.dtype)
                    pair[0], pair[1] = rO[2 * half].to(self.dtype), rO[2 * half + 1].to(self.dtype)
                    cute.autovec_copy(pair, aligned(cute.local_tile(gO[query, None], (2,), (column // 2,)), 4))
        else:
            target = workspaces[0][tile.head, Int64(tile.first_slot + m_block), group, piece, lane, None]
            cute.autovec_copy(rO, aligned(target, 16))

    @cute.jit
    def store_statistics(
        self, place: tuple, weights: list, is_last: Boolean, tile: Tile, tensors: tuple, softmax: OnlineSoftmax
    ):
        """m and l of a lane's two rows to the workspace, or LSE; place is (m_block, the rows)."""
        (m_block, rows), ((*_, mLSE), (_, mStatistics)) = place, tensors
        gLSE = tile.sequence.statistics(mLSE, tile.head)
        for half in cutlass.range_constexpr(2):
            query = m_block * self.config.tile_m + rows[half]
            if is_last:
                if query < tile.sequence.seqlen_q:
                    gLSE[query] = weights[half].lse(softmax.scale_log2)
            else:
                gStatistics = mStatistics[tile.head, Int64(tile.first_slot + m_block), rows[half], None]
                gStatistics[0], gStatistics[1] = weights[half].row_max, weights[half].row_sum

    def merge(self, shares: cute.Tensor, O: cute.Tensor, weights: list) -> None:
        """A lane's four elements of O, two of either row: the old O and every warp's share, each by its weight."""
        total = [O[i] * weights[i // 2].old for i in range(FLOATS)]
        for w in range(self.config.num_warps):
            share = cute.make_rmem_tensor((FLOATS,), Float32)
            cute.autovec_copy(aligned(shares[None, w], 16), share)
            total = [total[i] + share[i] * weights[i // 2].warps[w] for i in range(FLOATS)]
        for i in range(FLOATS):
            O[i] = total[i]


@cute.jit
def load_rows_in_a_loop(copy: RowCopy, g: cute.Tensor, s: cute.Tensor, num_rows: Int32):
    """`RowCopy.load_rows`, not unrolled: the compiler would keep each row's offset in registers during the visits."""
    for i in cutlass.range(cute.size(s, mode=[1]), unroll=1):
        for panel in cutlass.range_constexpr(cute.size(s, mode=[2])):
            if copy.exists(i, panel, num_rows):
                cute.copy(copy.asynchronous, g[None, i, panel], s[None, i, panel])
            else:
                s[None, i, panel].fill(0)


def four_of(t: cute.Tensor, number: Int32) -> cute.Tensor:
    """The number-th four elements of a contiguous tensor."""
    return cute.make_tensor(t.iterator + number * FLOATS, cute.make_layout((FLOATS,)))


def aligned(t: cute.Tensor, num_bytes: int) -> cute.Tensor:
    """A tensor that is known to be aligned: offsets known at run time only do not say so, and copies would go by 4."""
    pointer = cute.make_ptr(t.element_type, t.iterator.toint(), t.memspace, assumed_align=num_bytes)
    return cute.make_tensor(pointer, t.layout)


def compile_forward(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a.

    Called as (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, o_acc, statistics, softmax_scale, softcap, left, right).
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, slots = (cute.sym_int() for _ in range(6))
    dtype, head_dim, config = DTYPES[key.dtype], key.head_dim, key.config
    sequences_q, sequences_k, rows, lengths = (batch, seqlen_q), (batch, seqlen_k), (batch, heads_q, seqlen_q), None
    if key.sequences == "packed":
        sequences_q, sequences_k, rows = (seqlen_q,), (seqlen_k,), (heads_q, seqlen_q)
        lengths = fake_lengths(cute.sym_int())
    pieces = (config.tile_m // ROWS, whole_pieces(head_dim, config.num_warps), LANES, FLOATS)
    return cute.compile(
        Forward(key),
        fake_sequences(dtype, (*sequences_q, heads_q, head_dim)),
        fake_sequences(dtype, (*sequences_k, heads_kv, head_dim)),
        fake_sequences(dtype, (*sequences_k, heads_kv, head_dim)),
        fake_sequences(dtype, (*sequences_q, heads_q, head_dim)),
        fake_rows(rows),
        lengths,
        lengths,
        *(
            make_fake_compact_tensor(Float32, shape, stride_order=tuple(range(len(shape)))[::-1], assumed_align=16)
            for shape in ((heads_q, slots, *pieces), (heads_q, slots, config.tile_m, 2))
        ),
        Float32(1.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
