"""FA1 forward: attention in tiles, so that S and P never reach HBM (FA1, algorithm 1).

  - Keys outer, queries inner: one CTA per head and batch holds a block of K and V and walks over all queries.
  - O is kept normalised and goes back to HBM at each visit, with its row maximum m and row sum l.
  - The warps of a CTA split the keys of a block ("split-K"): each multiplies all queries of the tile with its own keys,
    and maxima, sums and O are put together in shared memory.
  - cp.async into swizzled shared memory, ldmatrix, mma.sync m16n8k16.
  - Where this departs from the released FA1 code: docs/fa1.md.

Time to the right, key block n (S = Q K of a visit, P = softmax of it, O = P V of it, summed over the warps):

    cp.async  | K V  Q0 | Q1                    | Q2                    | Q3 ...
    warps     |         | S   P   O   merge     | S   P   O   merge     | S   P   O   merge
    HBM       |         |     ^m l    ^O0 vO0 m l     ^m l    ^O1 vO1 m l     ^m l    ^O2 ...      (^ read, v written)

shared memory, bytes (16-bit types; width: head_dim, up to whole panels of 64)
    sK, sV  tile_n * width * 2 each
    sQ      tile_m * width * 2 * 2                          this visit's queries and the next one's
    sO      num_warps * tile_m * (width + 8) * 4            each warp's share of O, fp32; 8 against bank conflicts
    statistics  tile_m * (2 * num_warps + 2) * 4
registers a thread (d = 128, 16 x 256, 4 warps): O 64, S 32, P 16
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_stream

from fa1.softmax import OnlineSoftmax
from fa_common.compile import KernelKey
from fa_common.tiles import (
    DTYPES,
    Operand,
    RowCopy,
    as_operand_a,
    as_rows_and_columns,
    check_shared_memory,
    fake_accumulator,
    fake_rows,
    fake_sequences,
    mask_scores,
    multiply,
    multiply_registers,
    round_to_operand_a,
    tile_layout,
    whole_panels,
)

THREADS_PER_WARP = 32
Q_STAGES = 2  # this visit's queries and the next one's
PAD = 8  # floats after each row of sO: four rows of a store then fall into different banks
FLOATS = 4  # of 16 bytes: what one thread moves of O at a time


@dataclass(frozen=True)
class Tile:
    """Which head this CTA computes, and which of its queries."""

    head: Int32
    head_kv: Int32
    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    m_begin: Int32  # this CTA's query blocks: m_begin .. m_end - 1
    m_end: Int32


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors."""

    sQ: cute.Tensor  # (tile_m, width, Q_STAGES)
    sK: cute.Tensor  # (tile_n, width)
    sV: cute.Tensor  # (tile_n, width)
    sO: cute.Tensor  # (tile_m, width, num_warps) fp32


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
    """This warp's two products, over its own keys: the instruction, the operands and the accumulators."""

    mma: cute.TiledMma
    q: tuple  # (tile_m, width) of each stage
    k: Operand  # (tile_n / num_warps, width)
    v: Operand  # (width, tile_n / num_warps)
    acc_S: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    rP: cute.Tensor  # (MMA, MMA_M, MMA_K) 16-bit, the same thread's share of acc_S
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    tScS: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, this warp's key) of acc_S
    tOcO: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, column) of acc_O


class Forward:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        self.width = whole_panels(key.head_dim)  # of a tile: head_dim and, where that ends inside a panel, zeros
        self.causal = key.causal
        self.bounds = (None, 0 if key.causal else None)  # keys seen before and behind a query's own; None: all
        self.num_threads = THREADS_PER_WARP * key.config.num_warps
        self.keys_per_warp = key.config.tile_n // key.config.num_warps

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mAcc: cute.Tensor,
        mMax: cute.Tensor,
        mSum: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Q, K, V, O (batch, seqlen, heads, head_dim), LSE (batch, heads, seqlen_q).

        Workspaces, uninitialised: O in fp32 (batch, heads, seqlen_q, head_dim), m and l (batch, heads, seqlen_q).
        """
        tile_m, tile_n, num_warps, dtype = self.config.tile_m, self.config.tile_n, self.config.num_warps, self.dtype
        # (batch, seqlen, heads, head_dim) -> (seqlen, head_dim, heads, batch).
        mQ, mK, mV, mO = [
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (mQ, mK, mV, mO)
        ]
        # One warp by itself; two m16n8k16 side by side along the keys, so that one ldmatrix.x4 feeds both.
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), (1, 1, 1), permutation_mnk=(16, 16, 16)
        )
        layout_Q, layout_K = tile_layout(tile_m, self.width), tile_layout(tile_n, self.width)
        row = self.width + PAD
        layout_O = cute.make_layout((tile_m, self.width, num_warps), stride=(row, 1, tile_m * row))

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_Q) * Q_STAGES], 128]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_K)], 128]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_K)], 128]
            sO: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layout_O)], 128]
            warp_max: cute.struct.MemRange[Float32, tile_m * num_warps]
            warp_sum: cute.struct.MemRange[Float32, tile_m * num_warps]
            row_max: cute.struct.MemRange[Float32, tile_m]
            old_weight: cute.struct.MemRange[Float32, tile_m]

        check_shared_memory(Storage.size_in_bytes(), self.config, self.head_dim)
        self.Storage = Storage

        grid = (self.config.q_splits, mQ.shape[2], mQ.shape[3])
        self.kernel(
            (mQ, mK, mV, mO, mLSE),
            (mAcc, mMax, mSum),
            (layout_Q, layout_K, layout_O),
            mma,
            softmax_scale * math.log2(math.e),
        ).launch(
            grid=grid,
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,  # all registers to one CTA; without: ptxas aims at three and spills (d = 64: 12 bytes)
        )

    @cute.kernel
    def kernel(self, tensors: tuple, workspaces: tuple, layouts: tuple, mma: cute.TiledMma, scale_log2: Float32):
        """Sets up shared memory; then the CTA attends, block of keys by block of keys."""
        mQ, mK = tensors[0], tensors[1]
        tile_m, num_warps = self.config.tile_m, self.config.num_warps
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        layout_Q, layout_K, layout_O = layouts
        shared = Shared(
            sQ=storage.sQ.get_tensor(cute.append(layout_Q, cute.make_layout(Q_STAGES, stride=cute.cosize(layout_Q)))),
            sK=storage.sK.get_tensor(layout_K),
            sV=storage.sV.get_tensor(layout_K),
            sO=storage.sO.get_tensor(layout_O),
        )
        by_warp = cute.make_layout((tile_m, num_warps))
        softmax = OnlineSoftmax(
            warp_max=storage.warp_max.get_tensor(by_warp),
            warp_sum=storage.warp_sum.get_tensor(by_warp),
            row_max=storage.row_max.get_tensor(cute.make_layout((tile_m,))),
            old_weight=storage.old_weight.get_tensor(cute.make_layout((tile_m,))),
            scale_log2=scale_log2,
        )

        # Causal splits differ in work: a later one has more visits. The paper's grid has one split and no such choice.
        split, head, batch = cute.arch.block_idx()
        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        num_m_blocks = cute.ceil_div(seqlen_q, tile_m)
        blocks_per_split = cute.ceil_div(num_m_blocks, self.config.q_splits)
        m_begin = split * blocks_per_split
        m_end = cutlass.min(m_begin + blocks_per_split, num_m_blocks)
        head_kv = head // (mQ.shape[2] // mK.shape[2])
        tile = Tile(head, head_kv, batch, seqlen_q, seqlen_k, m_begin, m_end)

        copies = self.load(tile, tensors, shared)
        self.attend(tile, tensors, workspaces, mma, shared, copies, softmax)

    @cute.jit
    def load(self, tile: Tile, tensors: tuple, shared: Shared) -> Copies:
        """This thread's share of every copy the loop will make."""
        tile_m, tile_n, width = self.config.tile_m, self.config.tile_n, self.width
        mQ, mK, mV, _, _ = tensors
        gQ = cute.local_tile(mQ[None, None, tile.head, tile.batch], (tile_m, width), (None, 0))
        gK = cute.local_tile(mK[None, None, tile.head_kv, tile.batch], (tile_n, width), (None, 0))
        gV = cute.local_tile(mV[None, None, tile.head_kv, tile.batch], (tile_n, width), (None, 0))
        q_copy = RowCopy.of(self.dtype, tile_m, self.head_dim, self.num_threads)
        kv_copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads)
        return Copies(
            q=q_copy,
            kv=kv_copy,
            tQgQ=q_copy.of_global(gQ),
            tQsQ=tuple(q_copy.of_shared(shared.sQ[None, None, stage]) for stage in range(Q_STAGES)),
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
        mma: cute.TiledMma,
        shared: Shared,
        copies: Copies,
        softmax: OnlineSoftmax,
    ):
        """Every key block against every query block of this CTA that sees it."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        products = self.products(mma, shared)
        for n_block in cutlass.range(cute.ceil_div(tile.seqlen_k, tile_n), unroll=1):
            m_first = tile.m_begin
            if const_expr(self.causal):
                # Query i sees the keys up to i + seqlen_k - seqlen_q. Key block 0 visits every query, so that each row
                # of O is written, also one without any key.
                first_query = n_block * tile_n - tile.seqlen_k + tile.seqlen_q
                if n_block > 0:
                    m_first = cutlass.max(tile.m_begin, cutlass.max(first_query, 0) // tile_m)
            if m_first < tile.m_end:
                # Every warp is done with K, V and Q of the key block before.
                cute.arch.sync_threads()
                num_keys = tile.seqlen_k - n_block * tile_n
                copies.kv.load_rows(copies.tKgK[None, None, None, n_block], copies.tKsK, num_keys)
                copies.kv.load_rows(copies.tVgV[None, None, None, n_block], copies.tVsV, num_keys)
                self.load_queries(0, m_first, tile, copies)
            for i in cutlass.range(cute.ceil_div(tile.m_end - m_first, Q_STAGES), unroll=1):
                for stage in cutlass.range_constexpr(Q_STAGES):
                    m_block = m_first + i * Q_STAGES + stage
                    if m_block < tile.m_end:
                        self.block(
                            n_block, m_block, stage, tile, tensors, workspaces, (products, shared, copies), softmax
                        )

    def products(self, mma: cute.TiledMma, shared: Shared) -> Products:
        """This thread's operands and accumulators of S = Q K^T and O = P V, both over its warp's keys."""
        tile_m, keys, width = self.config.tile_m, self.keys_per_warp, self.width
        lane = cute.arch.lane_idx()
        first_key = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * keys
        thread_mma = mma.get_slice(lane)
        acc_S = cute.make_rmem_tensor(mma.partition_shape_C((tile_m, keys)), Float32)
        return Products(
            mma=mma,
            q=tuple(Operand.a(mma, shared.sQ[None, None, stage], lane) for stage in range(Q_STAGES)),
            k=Operand.b(mma, shared.sK, lane, rows=(first_key, keys)),
            v=Operand.b(mma, shared.sV, lane, rows=(first_key, keys), transpose=True),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(as_operand_a(acc_S.layout), self.dtype),
            acc_O=cute.make_rmem_tensor(mma.partition_shape_C((tile_m, width)), Float32),
            tScS=thread_mma.partition_C(cute.make_identity_tensor((tile_m, keys))),
            tOcO=thread_mma.partition_C(cute.make_identity_tensor((tile_m, width))),
        )

    @cute.jit
    def load_queries(self, stage: cutlass.Constexpr, m_block: Int32, tile: Tile, copies: Copies):
        """Starts the copy of one query block."""
        num_rows = tile.seqlen_q - m_block * self.config.tile_m
        copies.q.load_rows(copies.tQgQ[None, None, None, m_block], copies.tQsQ[stage], num_rows)
        # With the first queries of a key block go its K and V; the visit of these queries waits for the group.
        cute.arch.cp_async_commit_group()

    @cute.jit
    def block(
        self,
        n_block: Int32,
        m_block: Int32,
        stage: cutlass.Constexpr,
        tile: Tile,
        tensors: tuple,
        workspaces: tuple,
        working_set: tuple,
        softmax: OnlineSoftmax,
    ):
        """One visit: S, P and O of a query block against the key block in shared memory, merged into O in HBM."""
        products, shared, copies = working_set
        tile_m = self.config.tile_m
        # K, V and this visit's Q have arrived for every thread; every thread has merged the visit before, so that sO,
        # the statistics and the other stage of sQ may be written again.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if m_block + 1 < tile.m_end:
            self.load_queries((stage + 1) % Q_STAGES, m_block + 1, tile, copies)
        products.acc_S.fill(0.0)
        multiply(products.mma, products.acc_S, products.q[stage], products.k)
        first_key = n_block * self.config.tile_n + cute.arch.warp_idx() * self.keys_per_warp
        mask_scores(
            products.acc_S, products.tScS, (m_block * tile_m, first_key), (tile.seqlen_q, tile.seqlen_k), self.bounds
        )
        _, mMax, mSum = workspaces
        gMax = cute.local_tile(mMax[tile.batch, tile.head, None], (tile_m,), (m_block,))
        gSum = cute.local_tile(mSum[tile.batch, tile.head, None], (tile_m,), (m_block,))
        num_rows = tile.seqlen_q - m_block * tile_m
        softmax.step(products.acc_S, products.tScS, gMax, gSum, (num_rows, n_block > 0))
        round_to_operand_a(products.acc_S, products.rP)
        products.acc_O.fill(0.0)
        multiply_registers(products.mma, products.acc_O, products.rP, products.v)
        self.share(products, shared)
        # Every warp's share of O and the row statistics are in shared memory; every warp has read the others' maxima.
        cute.arch.sync_threads()
        self.store(n_block, m_block, tile, tensors, workspaces, shared, softmax)

    def share(self, products: Products, shared: Shared) -> None:
        """Writes this warp's share of O to shared memory."""
        O, cO = as_rows_and_columns(products.acc_O), as_rows_and_columns(products.tOcO)
        sO = shared.sO[None, None, cute.arch.warp_idx()]
        for r in range(cute.size(O, mode=[0])):
            for c in range(0, cute.size(O, mode=[1]), 2):
                row, column = cO[r, c]
                pair = cute.make_tensor(sO[row, None].iterator + column, cute.make_layout((2,)))
                pair[0], pair[1] = O[r, c], O[r, c + 1]

    @cute.jit
    def store(
        self,
        n_block: Int32,
        m_block: Int32,
        tile: Tile,
        tensors: tuple,
        workspaces: tuple,
        shared: Shared,
        softmax: OnlineSoftmax,
    ):
        """Merges the warps' shares into O and writes O, m and l back to HBM; on a row's last visit out and LSE instead.

        A thread reads and writes the same elements of O at every visit. m and l cross threads: between this visit's
        write and the next visit's read lies at least the barrier at the start of that visit.
        """
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        mAcc, mMax, mSum = workspaces
        mO, mLSE = tensors[3], tensors[4]
        last_block = cute.ceil_div(tile.seqlen_k, tile_n) - 1
        if const_expr(self.causal):
            last_key = (m_block + 1) * tile_m - 1 + tile.seqlen_k - tile.seqlen_q
            last_block = cutlass.min(last_block, cutlass.max(last_key, 0) // tile_n)
        pieces_per_row = self.width // FLOATS
        for i in cutlass.range_constexpr(tile_m * pieces_per_row // self.num_threads):
            piece = cute.arch.thread_idx()[0] + i * self.num_threads
            row, column = piece // pieces_per_row, piece % pieces_per_row
            query = m_block * tile_m + row
            if (query < tile.seqlen_q) & (column * FLOATS < self.head_dim):
                gAcc = cute.local_tile(mAcc[tile.batch, tile.head, query, None], (FLOATS,), (column,))
                row_sum = softmax.row_sum(row)
                no_key = row_sum == 0.0
                inverse = Float32(0.0) if no_key else cute.arch.rcp_approx(row_sum)
                rO = self.merge(shared, row, column, gAcc, (softmax.old_weight[row], n_block > 0))
                rO.store(rO.load() * inverse)
                if n_block == last_block:
                    gO = cute.local_tile(mO[query, None, tile.head, tile.batch], (FLOATS,), (column,))
                    rounded = cute.make_rmem_tensor((FLOATS,), self.dtype)
                    rounded.store(rO.load().to(self.dtype))
                    cute.autovec_copy(rounded, gO)
                else:
                    cute.autovec_copy(rO, gAcc)
                if column == 0:
                    if n_block == last_block:
                        log2_sum = cute.math.log2(row_sum, fastmath=True)
                        lse = (softmax.row_max[row] * softmax.scale_log2 + log2_sum) * math.log(2.0)
                        mLSE[tile.batch, tile.head, query] = -Float32.inf if no_key else lse
                    else:
                        mMax[tile.batch, tile.head, query] = softmax.row_max[row]
                        mSum[tile.batch, tile.head, query] = row_sum

    @cute.jit
    def merge(self, shared: Shared, row: Int32, column: Int32, gAcc: cute.Tensor, old: tuple) -> cute.Tensor:
        """Four elements of O before the division: the old O by its weight, plus every warp's share.

        old: (the weight, whether HBM holds an O yet).
        """
        weight, visited = old
        rO = cute.make_rmem_tensor((FLOATS,), Float32)
        rO.fill(0.0)
        if visited:
            cute.autovec_copy(gAcc, rO)
        total = rO.load() * weight
        for w in cutlass.range_constexpr(self.config.num_warps):
            share = cute.make_rmem_tensor((FLOATS,), Float32)
            cute.autovec_copy(cute.local_tile(shared.sO[row, None, w], (FLOATS,), (column,)), share)
            total = total + share.load()
        rO.store(total)
        return rO


def compile_forward(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a.

    Called as (q, k, v, out, lse, o_acc, row_max, row_sum, softmax_scale).
    """
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    dtype, head_dim = DTYPES[key.dtype], key.head_dim
    return cute.compile(
        Forward(key),
        fake_sequences(dtype, (batch, seqlen_q, heads_q, head_dim)),
        fake_sequences(dtype, (batch, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (batch, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (batch, seqlen_q, heads_q, head_dim)),
        fake_rows((batch, heads_q, seqlen_q)),
        fake_accumulator((batch, heads_q, seqlen_q, head_dim)),
        fake_rows((batch, heads_q, seqlen_q)),
        fake_rows((batch, heads_q, seqlen_q)),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
