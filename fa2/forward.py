"""FA2 forward: FA1's tiles, with the loops exchanged.

changed since fa1
  - Queries outer: one CTA per query block, head and batch, so that long rows fill the GPU on their own (FA2 3.2).
  - O stays in registers, un-normalised; one division at the end, and only LSE is saved (3.1).
  - Each warp owns whole query rows ("split-Q"): warps never exchange anything inside the loop (3.3).
  - Key blocks that no query of the tile sees are skipped, and only blocks on an edge are masked (3.1).
unchanged
  - cp.async into swizzled shared memory, ldmatrix, mma.sync m16n8k16; S and P never leave the SM.

Time to the right (S = Q K of a block, P = softmax of it, O = P V of it):

    cp.async  | Q K3 | V3 | K2      | V2 | K1      | V1 | K0      | V0 |
    warps     |      | S3 | P3 O3   | S2 | P2 O2   | S1 | P1 O1   | S0 | P0 O0

shared memory, bytes (16-bit types; width: head_dim, up to whole panels of 64)
    sQ      tile_m * width * 2             O leaves through the same rows
    sK, sV  tile_n * width * 2 each
registers a thread (d = 128, 128 x 128, 8 warps): O 64, S 64, P 32
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_stream

from fa2.softmax import OnlineSoftmax, rescale_rows
from fa_common.compile import KernelKey
from fa_common.tiles import (
    DTYPES,
    KeyBlocks,
    Operand,
    RowCopy,
    Sequence,
    as_operand_a,
    as_rows_and_columns,
    by_rows,
    cap_scores,
    check_shared_memory,
    fake_lengths,
    fake_rows,
    fake_sequences,
    mask_scores,
    multiply,
    multiply_registers,
    round_to_operand_a,
    score_scales,
    store_accumulator,
    tile_layout,
    visible_blocks,
    whole_panels,
)

THREADS_PER_WARP = 32


@dataclass(frozen=True)
class Tile:
    """Which output tile this CTA computes, and which key blocks it sees."""

    m_block: Int32
    head: Int32
    head_kv: Int32
    sequence: Sequence
    blocks: KeyBlocks  # walked from the last to the first
    bounds: tuple  # (left, right): how many keys before and behind its own position a query sees; None (static): all


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors."""

    sQ: cute.Tensor  # (tile_m, width)
    sK: cute.Tensor  # (tile_n, width)
    sV: cute.Tensor  # (tile_n, width)


@dataclass(frozen=True)
class Copies:
    """This thread's share of the copies of K and V."""

    kv: RowCopy
    tKgK: cute.Tensor  # (16 B, rows, panels, n_blocks)
    tKsK: cute.Tensor  # (16 B, rows, panels)
    tVgV: cute.Tensor
    tVsV: cute.Tensor


@dataclass(frozen=True)
class Products:
    """This warp's two products: the instruction, the operands and the accumulators."""

    mma: cute.TiledMma
    q: Operand  # (tile_m, width)
    k: Operand  # (tile_n, width)
    v: Operand  # (width, tile_n)
    acc_S: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    rP: cute.Tensor  # (MMA, MMA_M, MMA_K) 16-bit, the same thread's share of acc_S
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    tScS: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, key) of acc_S inside the tile


class Forward:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        self.width = whole_panels(key.head_dim)  # of a tile: head_dim and, where that ends inside a panel, zeros
        self.causal, self.window, self.softcap = key.causal, key.window, key.softcap
        self.packed = key.sequences == "packed"
        self.num_threads = THREADS_PER_WARP * key.config.num_warps

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
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_seqlen_q: Int32,
        stream,
    ):
        """Q, K, V, O (batch, seqlen, heads, head_dim), LSE (batch, heads, seqlen_q); packed sequences (total, heads,
        head_dim) and (heads, total), with cu_seqlens, (batch + 1,)."""
        tile_m, tile_n, dtype = self.config.tile_m, self.config.tile_n, self.dtype
        batch = cu_seqlens_q.shape[0] - 1 if const_expr(self.packed) else mQ.shape[0]
        mQ, mK, mV, mO = [by_rows(t) for t in (mQ, mK, mV, mO)]
        # Warps side by side along the queries; two m16n8k16 side by side along the keys: one ldmatrix.x4 feeds both.
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)),
            (self.config.num_warps, 1, 1),
            permutation_mnk=(16 * self.config.num_warps, 16, 16),
        )
        layout_Q = tile_layout(tile_m, self.width)
        layout_K = tile_layout(tile_n, self.width)

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_Q)], 128]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_K)], 128]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_K)], 128]

        check_shared_memory(Storage.size_in_bytes(), self.config, self.head_dim)
        self.Storage = Storage

        bounds = (window_left, window_right) if const_expr(self.window) else (None, 0 if self.causal else None)
        self.kernel(
            (mQ, mK, mV, mO, mLSE),
            (cu_seqlens_q, cu_seqlens_k),
            (layout_Q, layout_K),
            mma,
            score_scales(softmax_scale, softcap if const_expr(self.softcap) else None),
            bounds,
        ).launch(
            grid=(cute.ceil_div(max_seqlen_q, tile_m), mQ.shape[2], batch),
            block=[self.num_threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, tensors: tuple, cu_seqlens: tuple, layouts: tuple, mma: cute.TiledMma, scales: tuple, bounds: tuple
    ):
        """Sets up shared memory; then all warps load, attend and store together."""
        mQ, mK = tensors[0], tensors[1]
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        layout_Q, layout_K = layouts
        shared = Shared(
            sQ=storage.sQ.get_tensor(layout_Q), sK=storage.sK.get_tensor(layout_K), sV=storage.sV.get_tensor(layout_K)
        )
        block, head, batch = cute.arch.block_idx()
        # Causal tiles low in the matrix see the most keys; they start first, so that the last wave is short.
        m_block = block if const_expr(not self.causal) else cute.arch.grid_dim()[0] - 1 - block
        sequence = Sequence.of(mQ, mK, cu_seqlens, batch)
        # The grid is for the longest of packed sequences: the whole CTA passes over a tile that its own has not.
        if const_expr(not self.packed) or m_block * self.config.tile_m < sequence.seqlen_q:
            blocks = self.key_blocks(m_block, sequence, bounds)
            tile = Tile(m_block, head, head // (mQ.shape[2] // mK.shape[2]), sequence, blocks, bounds)
            copies = self.load(tile, tensors, shared)
            products, softmax = self.attend(tile, mma, shared, copies, scales)
            self.store(tile, tensors, shared, products, softmax)

    @cute.jit
    def key_blocks(self, m_block: Int32, sequence: Sequence, bounds: tuple) -> KeyBlocks:
        """The key blocks that a query block visits, and which of them it sees whole."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        return visible_blocks((m_block * tile_m, tile_m), tile_n, (sequence.seqlen_q, sequence.seqlen_k), bounds)

    @cute.jit
    def load(self, tile: Tile, tensors: tuple, shared: Shared) -> Copies:
        """Starts the copies of Q and of the last visible block of K, rows past the end zeroed; returns the rest."""
        tile_m, tile_n, width, sequence = self.config.tile_m, self.config.tile_n, self.width, tile.sequence
        mQ, mK, mV, _, _ = tensors
        gQ = cute.local_tile(sequence.queries(mQ, tile.head), (tile_m, width), (tile.m_block, 0))
        gK = cute.local_tile(sequence.keys(mK, tile.head_kv), (tile_n, width), (None, 0))
        gV = cute.local_tile(sequence.keys(mV, tile.head_kv), (tile_n, width), (None, 0))
        q_copy = RowCopy.of(self.dtype, tile_m, self.head_dim, self.num_threads)
        kv_copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads)
        copies = Copies(
            kv=kv_copy,
            tKgK=kv_copy.of_global(gK),
            tKsK=kv_copy.of_shared(shared.sK),
            tVgV=kv_copy.of_global(gV),
            tVsV=kv_copy.of_shared(shared.sV),
        )
        tQgQ, tQsQ = q_copy.of_global(gQ), q_copy.of_shared(shared.sQ)
        q_copy.load_rows(tQgQ, tQsQ, sequence.seqlen_q - tile.m_block * tile_m)
        n_block = tile.blocks.end - 1
        tKgK = copies.tKgK[None, None, None, n_block]
        kv_copy.load_rows(tKgK, copies.tKsK, sequence.seqlen_k - n_block * tile_n)
        # Q and the last visible block of K are one group; the first `block` waits for it.
        cute.arch.cp_async_commit_group()
        return copies

    @cute.jit
    def attend(self, tile: Tile, mma: cute.TiledMma, shared: Shared, copies: Copies, scales: tuple):
        """The CTA's queries against every visible key block. Returns O, un-normalised, and its statistics."""
        products = self.products(mma, shared)
        num_rows = cute.size(as_rows_and_columns(products.acc_O), mode=[0])
        softmax = OnlineSoftmax.start(num_rows, *scales)
        blocks = tile.blocks
        # From the last key block to the first: masked blocks, those that every query sees whole, and with a window
        # masked ones again.
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            self.block(blocks.end - 1 - i, True, tile, products, softmax, copies)
        for i in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
            self.block(blocks.full_end - 1 - i, False, tile, products, softmax, copies)
        if const_expr(self.window):
            for i in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                self.block(blocks.full_begin - 1 - i, True, tile, products, softmax, copies)
        return products, softmax

    def products(self, mma: cute.TiledMma, shared: Shared) -> Products:
        """This thread's operands and accumulators of S = Q K^T and O = P V."""
        tile_m, tile_n, width = self.config.tile_m, self.config.tile_n, self.width
        thread = cute.arch.thread_idx()[0]
        thread_mma = mma.get_slice(thread)
        acc_S = cute.make_rmem_tensor(mma.partition_shape_C((tile_m, tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mma.partition_shape_C((tile_m, width)), Float32)
        acc_O.fill(0.0)
        return Products(
            mma=mma,
            q=Operand.a(mma, shared.sQ, thread),
            k=Operand.b(mma, shared.sK, thread),
            v=Operand.b(mma, shared.sV, thread, transpose=True),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(as_operand_a(acc_S.layout), self.dtype),
            acc_O=acc_O,
            tScS=thread_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n))),
        )

    @cute.jit
    def block(
        self,
        n_block: Int32,
        masked: cutlass.Constexpr,
        tile: Tile,
        products: Products,
        softmax: OnlineSoftmax,
        copies: Copies,
    ):
        """S, P and O += P V of key block n; V of n travels under S, K of n - 1 under the softmax and P V."""
        # K of n has arrived for every thread, and every warp is done with V of n + 1, whose place V of n takes.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.load_values(n_block, masked, tile, copies)
        products.acc_S.fill(0.0)
        multiply(products.mma, products.acc_S, products.q, products.k)
        # V of n has arrived for every thread, and every warp is done with K of n, whose place K of n - 1 takes.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if n_block > tile.blocks.begin:
            copies.kv.load(copies.tKgK[None, None, None, n_block - 1], copies.tKsK)
        # K of n - 1; the next `block` waits for it.
        cute.arch.cp_async_commit_group()
        self.prepare_scores(n_block, masked, tile, products, softmax)
        rescale, rises = softmax.step(products.acc_S, masked)
        round_to_operand_a(products.acc_S, products.rP)
        if rises:
            rescale_rows(products.acc_O, rescale)
        multiply_registers(products.mma, products.acc_O, products.rP, products.v)

    @cute.jit
    def load_values(self, n_block: Int32, masked: cutlass.Constexpr, tile: Tile, copies: Copies):
        """Starts the copy of V of block n; the masked blocks hold the ragged one, whose missing rows become zeros."""
        tVgV = copies.tVgV[None, None, None, n_block]
        if const_expr(masked):
            num_rows = tile.sequence.seqlen_k - n_block * self.config.tile_n
            copies.kv.load_rows(tVgV, copies.tVsV, num_rows)
        else:
            copies.kv.load(tVgV, copies.tVsV)
        # V of n; this `block` waits for it when S is done.
        cute.arch.cp_async_commit_group()

    @cute.jit
    def prepare_scores(
        self, n_block: Int32, masked: cutlass.Constexpr, tile: Tile, products: Products, softmax: OnlineSoftmax
    ):
        """Softcap and mask: what stands between S = Q K^T and the softmax."""
        if const_expr(self.softcap):
            cap_scores(products.acc_S, softmax.scale_tanh)
        if const_expr(masked):
            origin = (tile.m_block * self.config.tile_m, n_block * self.config.tile_n)
            seqlens = (tile.sequence.seqlen_q, tile.sequence.seqlen_k)
            mask_scores(products.acc_S, products.tScS, origin, seqlens, tile.bounds)

    @cute.jit
    def store(self, tile: Tile, tensors: tuple, shared: Shared, products: Products, softmax: OnlineSoftmax):
        """Normalises, writes LSE, and sends O through sQ, so that whole 128-byte rows go out."""
        mO, mLSE = tensors[3], tensors[4]
        lse = softmax.finish(products.acc_O)
        cS = as_rows_and_columns(products.tScS)
        first_row = tile.m_block * self.config.tile_m
        num_rows = tile.sequence.seqlen_q - first_row
        gLSE = tile.sequence.statistics(mLSE, tile.head)
        if cS[0, 0][1] == 0:  # one lane of the quad that shares the row
            for r in cutlass.range_constexpr(cute.size(lse)):
                if cS[r, 0][0] < num_rows:
                    gLSE[first_row + cS[r, 0][0]] = lse[r]

        # A warp overwrites only the rows of sQ that it alone read.
        rO = cute.make_rmem_tensor_like(products.acc_O, self.dtype)
        rO.store(products.acc_O.load().to(self.dtype))
        store_accumulator(rO, products.tScS, shared.sQ, products.q.rows_apart)
        # Every warp's rows of O are in shared memory before threads read rows of other warps.
        cute.arch.sync_threads()
        gO = tile.sequence.queries(mO, tile.head)
        gO = cute.local_tile(gO, (self.config.tile_m, self.width), (tile.m_block, 0))
        copy = RowCopy.of(self.dtype, self.config.tile_m, self.head_dim, self.num_threads)
        copy.store_rows(copy.of_shared(shared.sQ), copy.of_global(gO), num_rows)


def compile_forward(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a; called as (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale,
    softcap, window_left, window_right, max_seqlen_q), see Forward.__call__."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, num_bounds = (cute.sym_int() for _ in range(6))
    dtype, head_dim = DTYPES[key.dtype], key.head_dim
    packed = key.sequences == "packed"
    batch_and = () if packed else (batch,)
    return cute.compile(
        Forward(key),
        fake_sequences(dtype, (*batch_and, seqlen_q, heads_q, head_dim)),
        fake_sequences(dtype, (*batch_and, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (*batch_and, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (*batch_and, seqlen_q, heads_q, head_dim)),
        fake_rows((*batch_and, heads_q, seqlen_q)),
        fake_lengths(num_bounds) if packed else None,
        fake_lengths(num_bounds) if packed else None,
        Float32(1.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
