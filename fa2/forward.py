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

With several stages K and V of a block arrive together, ahead, behind one barrier. Where a switch is off, another method
takes its place: see __init__.

shared memory, bytes (16-bit types; stages s; width: head_dim, up to whole panels of 64)
    sQ      tile_m * width * 2             O leaves through the same rows
    sK, sV  tile_n * width * 2 * s each
registers a thread (d = 128, 128 x 48, 4 warps): O 128, S 48, P 24
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_stream

from fa2.softmax import OnlineSoftmax, log_sum_exp, rescale_rows
from fa2.split_k import FLOATS, Merged, SplitK, split_k_memory
from fa_common.compile import KernelKey
from fa_common.tiles import (
    DTYPES,
    Backwards,
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
    moved,
    multiply,
    multiply_registers,
    round_to_operand_a,
    score_scales,
    store_accumulator,
    tile_layout,
    times,
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
    sK: cute.Tensor  # (tile_n, width), the first of the stages
    sV: cute.Tensor  # (tile_n, width)
    split_k: SplitK | None  # where warps that split the keys meet


@dataclass(frozen=True)
class Copies:
    """This thread's share of the copies of K and V."""

    kv: RowCopy
    tKgK: Backwards  # (16 B, rows, panels) of block after block, from the last visible one
    tKsK: cute.Tensor  # (16 B, rows, panels), of the first stage
    tVgV: Backwards
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
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32; without split_q this block's P V over this warp's keys
    tScS: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, key) of acc_S inside the tile
    tOcO: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, column) of acc_O
    split_k: SplitK | None  # where the warps meet, without split_q
    merged: Merged | None  # O, put together from all warps, without split_q


class Forward:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        self.width = whole_panels(key.head_dim)  # of a tile: head_dim and, where that ends inside a panel, zeros
        self.causal, self.window, self.softcap = key.causal, key.window, key.softcap
        self.packed = key.sequences == "packed"
        self.tile_m, self.tile_n, self.num_warps = key.config.tile(key.head_dim)
        self.num_threads = THREADS_PER_WARP * self.num_warps
        self.keys_per_warp = self.tile_n if key.config.split_q else self.tile_n // self.num_warps
        self.stage_bytes = 2 * self.tile_n * self.width
        # A method for each way to do it; the switches choose.
        config = key.config
        self.walk_tiles = self.one_tile if config.parallel_seqlen else self.all_tiles
        self.key_blocks = self.visible_blocks if config.skip_masked_blocks else self.all_blocks
        self.walk_blocks = self.walk_by_mask if config.separate_masking else self.walk_masked
        self.load_first = self.load_first_block if config.stages == 1 else self.load_first_stages
        self.block = self.block_in_place if config.stages == 1 else self.block_staged
        self.update = self.update_deferred if config.defer_normalize else self.update_normalized
        self.rescale = self.rescale_by_branch if config.branch_to_rescale else self.rescale_by_predicate
        self.store = self.store_rows
        if not config.split_q:
            self.update, self.store = self.update_split_k, self.store_split_k

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
        tile_m, tile_n, dtype, stages = self.tile_m, self.tile_n, self.dtype, self.config.stages
        batch = cu_seqlens_q.shape[0] - 1 if const_expr(self.packed) else mQ.shape[0]
        mQ, mK, mV, mO = [by_rows(t) for t in (mQ, mK, mV, mO)]
        # Warps side by side along the queries, or each by itself; two m16n8k16 side by side along the keys: one
        # ldmatrix.x4 feeds both.
        warps_m = self.num_warps if self.config.split_q else 1
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)),
            (warps_m, 1, 1),
            permutation_mnk=(16 * warps_m, 16, 16),
        )
        layout_Q = tile_layout(tile_m, self.width)
        layout_K = tile_layout(tile_n, self.width)
        floats = 0 if self.config.split_q else split_k_memory(tile_m, self.width, self.num_warps)

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_Q)], 128]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, stages * cute.cosize(layout_K)], 128]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, stages * cute.cosize(layout_K)], 128]
            meeting: cute.struct.Align[cute.struct.MemRange[Float32, floats], 128]

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
            grid=(cute.ceil_div(max_seqlen_q, tile_m) if self.config.parallel_seqlen else 1, mQ.shape[2], batch),
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,  # said outright, or the DSL asks a GPU how much that is
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
            sQ=storage.sQ.get_tensor(layout_Q),
            sK=storage.sK.get_tensor(layout_K),
            sV=storage.sV.get_tensor(layout_K),
            split_k=None
            if const_expr(self.config.split_q)
            else SplitK.of(storage.meeting, self.tile_m, self.width, self.num_warps),
        )
        _, head, batch = cute.arch.block_idx()
        sequence = Sequence.of(mQ, mK, cu_seqlens, batch)
        place = (head, head // (mQ.shape[2] // mK.shape[2]), sequence)
        self.walk_tiles(place, tensors, shared, mma, (scales, bounds))

    @cute.jit
    def one_tile(self, place: tuple, tensors: tuple, shared: Shared, mma: cute.TiledMma, numbers: tuple):
        """The query block that the grid gives this CTA; `place` is its (head, head_kv, sequence)."""
        block, (_, _, sequence) = cute.arch.block_idx()[0], place
        # Causal tiles low in the matrix see the most keys; they start first, so that the last wave is short.
        m_block = block if const_expr(not self.causal) else cute.arch.grid_dim()[0] - 1 - block
        # The grid is for the longest of packed sequences: the whole CTA passes over a tile that its own has not.
        if const_expr(not self.packed) or m_block * self.tile_m < sequence.seqlen_q:
            self.compute_tile(m_block, place, tensors, shared, mma, numbers)

    @cute.jit
    def all_tiles(self, place: tuple, tensors: tuple, shared: Shared, mma: cute.TiledMma, numbers: tuple):
        """Without parallel_seqlen: every query block of this CTA's head and sequence, one after the other."""
        _, _, sequence = place
        for m_block in cutlass.range(cute.ceil_div(sequence.seqlen_q, self.tile_m), unroll=1):
            self.compute_tile(m_block, place, tensors, shared, mma, numbers)
            # Every thread is done with this tile's shared memory, O's last rows included, before the next tile's load.
            cute.arch.sync_threads()

    @cute.jit
    def compute_tile(
        self,
        m_block: Int32,
        place: tuple,
        tensors: tuple,
        shared: Shared,
        mma: cute.TiledMma,
        numbers: tuple,
    ):
        """One output tile, from Q to O and LSE."""
        (head, head_kv, sequence), (scales, bounds) = place, numbers
        tile = Tile(m_block, head, head_kv, sequence, self.key_blocks(m_block, sequence, bounds), bounds)
        copies = self.load(tile, tensors, shared)
        products, softmax = self.attend(tile, mma, shared, copies, scales)
        self.store(tile, tensors, shared, products, softmax)

    def visible_blocks(self, m_block: Int32, sequence: Sequence, bounds: tuple) -> KeyBlocks:
        """The key blocks that a query block sees, and which of them it sees whole."""
        queries = (m_block * self.tile_m, self.tile_m)
        return visible_blocks(queries, self.tile_n, (sequence.seqlen_q, sequence.seqlen_k), bounds)

    def all_blocks(self, m_block: Int32, sequence: Sequence, bounds: tuple) -> KeyBlocks:
        """Without skip_masked_blocks: all key blocks there are, at least one; those seen whole are the same."""
        seen = self.visible_blocks(m_block, sequence, bounds)
        num_blocks = cutlass.max(cute.ceil_div(sequence.seqlen_k, self.tile_n), 1)
        return KeyBlocks(Int32(0), seen.full_begin, seen.full_end, num_blocks)

    @cute.jit
    def load(self, tile: Tile, tensors: tuple, shared: Shared) -> Copies:
        """Starts the copies of Q and of the first blocks that `block` expects; returns the share in the others."""
        tile_m, tile_n, width, sequence = self.tile_m, self.tile_n, self.width, tile.sequence
        mQ, mK, mV, _, _ = tensors
        gQ = cute.local_tile(sequence.queries(mQ, tile.head), (tile_m, width), (tile.m_block, 0))
        gK = cute.local_tile(sequence.keys(mK, tile.head_kv), (tile_n, width), (None, 0))
        gV = cute.local_tile(sequence.keys(mV, tile.head_kv), (tile_n, width), (None, 0))
        q_copy = RowCopy.of(self.dtype, tile_m, self.head_dim, self.num_threads)
        kv_copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads)
        copies = Copies(
            kv=kv_copy,
            tKgK=Backwards.of(kv_copy.of_global(gK), tile.blocks.end - 1),
            tKsK=kv_copy.of_shared(shared.sK),
            tVgV=Backwards.of(kv_copy.of_global(gV), tile.blocks.end - 1),
            tVsV=kv_copy.of_shared(shared.sV),
        )
        tQgQ, tQsQ = q_copy.of_global(gQ), q_copy.of_shared(shared.sQ)
        q_copy.load_rows(tQgQ, tQsQ, sequence.seqlen_q - tile.m_block * tile_m)
        self.load_first(tile, copies)
        return copies

    @cute.jit
    def load_first_block(self, tile: Tile, copies: Copies):
        """Starts the copy of the last visible block of K, the only one that may be ragged: rows past the end zeroed."""
        n_block = tile.blocks.end - 1
        copies.kv.load_rows(copies.tKgK.next(), copies.tKsK, tile.sequence.seqlen_k - n_block * self.tile_n)
        # Q and the last visible block of K are one group; the first `block` waits for it.
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_first_stages(self, tile: Tile, copies: Copies):
        """Starts the copies of the last visible blocks of K and V, one fewer than there are stages."""
        n_block = tile.blocks.end - 1
        num_rows = tile.sequence.seqlen_k - n_block * self.tile_n
        offset = self.stage_offset(n_block)
        copies.kv.load_rows(copies.tKgK.next(), moved(copies.tKsK, offset), num_rows)
        copies.kv.load_rows(copies.tVgV.next(), moved(copies.tVsV, offset), num_rows)
        # Q and the last visible block of K and V are one group; the first `block` waits for it.
        cute.arch.cp_async_commit_group()
        for i in cutlass.range_constexpr(1, self.config.stages - 1):
            self.load_stage(n_block - i, tile, copies)

    @cute.jit
    def load_stage(self, n_block: Int32, tile: Tile, copies: Copies):
        """Starts the copies of K and V of a block, which is whole, into its stage; of none in front of the first."""
        if n_block >= tile.blocks.begin:
            offset = self.stage_offset(n_block)
            copies.kv.load(copies.tKgK.next(), moved(copies.tKsK, offset))
            copies.kv.load(copies.tVgV.next(), moved(copies.tVsV, offset))
        # K and V of n; its `block` waits for it. A group even if it is empty: groups are counted.
        cute.arch.cp_async_commit_group()

    def stage_offset(self, n_block: Int32) -> Int32:
        """Where K (or V) of a block lies behind the first stage, in bytes."""
        return n_block % self.config.stages * self.stage_bytes

    @cute.jit
    def attend(self, tile: Tile, mma: cute.TiledMma, shared: Shared, copies: Copies, scales: tuple):
        """The CTA's queries against every visible key block. Returns O, un-normalised, and its statistics."""
        products = self.products(mma, shared)
        num_rows = cute.size(as_rows_and_columns(products.acc_S), mode=[0])
        softmax = OnlineSoftmax.start(num_rows, *scales, self.config.defer_normalize)
        if const_expr(self.config.q_in_registers):
            # Q, in the first group, has arrived for every thread.
            cute.arch.cp_async_wait_group(max(self.config.stages - 2, 0))
            cute.arch.sync_threads()
            products.q.load_all()
        self.walk_blocks(tile, products, softmax, copies)
        return products, softmax

    @cute.jit
    def walk_by_mask(self, tile: Tile, products: Products, softmax: OnlineSoftmax, copies: Copies):
        """From the last key block to the first: masked blocks, those that every query sees whole, and with a window
        masked ones again."""
        blocks = tile.blocks
        for i in cutlass.range(blocks.end - blocks.full_end, unroll=1):
            self.block(blocks.end - 1 - i, True, tile, products, softmax, copies)
        for i in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
            self.block(blocks.full_end - 1 - i, False, tile, products, softmax, copies)
        if const_expr(self.window):
            for i in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                self.block(blocks.full_begin - 1 - i, True, tile, products, softmax, copies)

    @cute.jit
    def walk_masked(self, tile: Tile, products: Products, softmax: OnlineSoftmax, copies: Copies):
        """Without separate_masking: from the last key block to the first, each of them masked."""
        blocks = tile.blocks
        for i in cutlass.range(blocks.end - blocks.begin, unroll=1):
            self.block(blocks.end - 1 - i, True, tile, products, softmax, copies)

    def products(self, mma: cute.TiledMma, shared: Shared) -> Products:
        """This thread's operands and accumulators of S = Q K^T and O = P V, over its warp's queries or keys."""
        tile_m, width, keys = self.tile_m, self.width, self.keys_per_warp
        thread = cute.arch.thread_idx()[0] if self.config.split_q else cute.arch.lane_idx()
        rows = (self.first_key_of_warp(), keys)
        thread_mma = mma.get_slice(thread)
        acc_S = cute.make_rmem_tensor(mma.partition_shape_C((tile_m, keys)), Float32)
        acc_O = cute.make_rmem_tensor(mma.partition_shape_C((tile_m, width)), Float32)
        acc_O.fill(0.0)
        return Products(
            mma=mma,
            q=Operand.a(mma, shared.sQ, thread),
            k=Operand.b(mma, shared.sK, thread, rows=rows),
            v=Operand.b(mma, shared.sV, thread, rows=rows, transpose=True),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(as_operand_a(acc_S.layout), self.dtype),
            acc_O=acc_O,
            tScS=thread_mma.partition_C(cute.make_identity_tensor((tile_m, keys))),
            tOcO=thread_mma.partition_C(cute.make_identity_tensor((tile_m, width))),
            split_k=shared.split_k,
            merged=None if self.config.split_q else shared.split_k.start(),
        )

    def first_key_of_warp(self) -> Int32:
        """Where in a block this warp's keys begin."""
        if self.config.split_q:
            return 0
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) * self.keys_per_warp

    @cute.jit
    def block_in_place(
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
        self.scores(products, products.k)
        # V of n has arrived for every thread, and every warp is done with K of n, whose place K of n - 1 takes.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if n_block > tile.blocks.begin:
            copies.kv.load(copies.tKgK.next(), copies.tKsK)
        # K of n - 1; the next `block` waits for it.
        cute.arch.cp_async_commit_group()
        self.prepare_scores(n_block, masked, tile, products, softmax)
        self.update(masked, products, softmax, products.v)

    @cute.jit
    def block_staged(
        self,
        n_block: Int32,
        masked: cutlass.Constexpr,
        tile: Tile,
        products: Products,
        softmax: OnlineSoftmax,
        copies: Copies,
    ):
        """With several stages: K and V of a block arrive together, stages - 1 blocks ahead, behind one barrier."""
        # K and V of n have arrived for every thread, and every warp is done with block n + 1, whose stage is next.
        cute.arch.cp_async_wait_group(self.config.stages - 2)
        cute.arch.sync_threads()
        self.load_stage(n_block - self.config.stages + 1, tile, copies)
        offset = self.stage_offset(n_block)
        self.scores(products, products.k.moved(offset))
        self.prepare_scores(n_block, masked, tile, products, softmax)
        self.update(masked, products, softmax, products.v.moved(offset))

    def scores(self, products: Products, k: Operand) -> None:
        """S = Q K^T."""
        products.acc_S.fill(0.0)
        if self.config.q_in_registers:
            multiply_registers(products.mma, products.acc_S, products.q.registers, k)
        else:
            multiply(products.mma, products.acc_S, products.q, k)

    @cute.jit
    def update_deferred(self, masked: cutlass.Constexpr, products: Products, softmax: OnlineSoftmax, v: Operand):
        """P and O += P V, from S."""
        rescale, rises = softmax.step(products.acc_S, masked)
        round_to_operand_a(products.acc_S, products.rP)
        self.rescale(products.acc_O, rescale, rises)
        multiply_registers(products.mma, products.acc_O, products.rP, v)

    @cute.jit
    def rescale_by_branch(self, acc_O: cute.Tensor, rescale: cute.Tensor, rises: Boolean):
        """O *= rescale where a maximum rose, which it does in ever fewer blocks: a branch, across which ptxas does not
        schedule. Else it mixes the exponentials into P V, and keeps P in fp32 meanwhile (docs/dsl-notes.md)."""
        for _ in cutlass.range(times(rises), unroll=1):
            rescale_rows(acc_O, rescale)

    @cute.jit
    def rescale_by_predicate(self, acc_O: cute.Tensor, rescale: cute.Tensor, rises: Boolean):
        """O *= rescale where a maximum rose: ptxas makes predicates of this `if`, and one block of it all."""
        if rises:
            # For the compiler, nobody waits for data: without it the tile spills at d = 96, full.
            cute.arch.sync_warp()
            rescale_rows(acc_O, rescale)

    @cute.jit
    def update_normalized(self, masked: cutlass.Constexpr, products: Products, softmax: OnlineSoftmax, v: Operand):
        """Without defer_normalize: O enters and leaves a block divided by its row sums, as in FA1."""
        rescale, _ = softmax.step(products.acc_S, masked)
        weight, inverse = softmax.weights(rescale)
        round_to_operand_a(products.acc_S, products.rP)
        self.rescale(products.acc_O, weight, softmax.scale_log2 > 0.0)  # always, which ptxas must not know
        multiply_registers(products.mma, products.acc_O, products.rP, v)
        rescale_rows(products.acc_O, inverse)

    @cute.jit
    def update_split_k(self, masked: cutlass.Constexpr, products: Products, softmax: OnlineSoftmax, v: Operand):
        """Without split_q: P and this warp's share of P V; then the warps put O together."""
        split_k = products.split_k
        split_k.step(softmax, products.acc_S, products.tScS)
        round_to_operand_a(products.acc_S, products.rP)
        products.acc_O.fill(0.0)
        multiply_registers(products.mma, products.acc_O, products.rP, v)
        split_k.share(products.acc_O, products.tOcO)
        split_k.merge(products.merged, self.config.defer_normalize)

    @cute.jit
    def load_values(self, n_block: Int32, masked: cutlass.Constexpr, tile: Tile, copies: Copies):
        """Starts the copy of V of block n; the masked blocks hold the ragged one, whose missing rows become zeros."""
        tVgV = copies.tVgV.next()
        if const_expr(masked):
            num_rows = tile.sequence.seqlen_k - n_block * self.tile_n
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
            origin = (tile.m_block * self.tile_m, n_block * self.tile_n + self.first_key_of_warp())
            seqlens = (tile.sequence.seqlen_q, tile.sequence.seqlen_k)
            mask_scores(products.acc_S, products.tScS, origin, seqlens, tile.bounds)

    @cute.jit
    def store_rows(self, tile: Tile, tensors: tuple, shared: Shared, products: Products, softmax: OnlineSoftmax):
        """Normalises, writes LSE, and sends O through sQ, so that whole 128-byte rows go out."""
        mO, mLSE = tensors[3], tensors[4]
        lse = softmax.finish(products.acc_O)
        cS = as_rows_and_columns(products.tScS)
        first_row = tile.m_block * self.tile_m
        num_rows = tile.sequence.seqlen_q - first_row
        gLSE = tile.sequence.statistics(mLSE, tile.head)
        if cS[0, 0][1] == 0:  # one lane of the quad that shares the row
            for r in cutlass.range_constexpr(cute.size(lse)):
                if cS[r, 0][0] < num_rows:
                    gLSE[first_row + cS[r, 0][0]] = lse[r]

        # A warp overwrites only the rows of sQ that it alone read.
        rO = cute.make_rmem_tensor_like(products.acc_O, self.dtype)
        rO.store(products.acc_O.load().to(self.dtype))
        store_accumulator(rO, products.tOcO, shared.sQ, products.q.rows_apart)
        # Every warp's rows of O are in shared memory before threads read rows of other warps.
        cute.arch.sync_threads()
        gO = tile.sequence.queries(mO, tile.head)
        gO = cute.local_tile(gO, (self.tile_m, self.width), (tile.m_block, 0))
        copy = RowCopy.of(self.dtype, self.tile_m, self.head_dim, self.num_threads)
        copy.store_rows(copy.of_shared(shared.sQ), copy.of_global(gO), num_rows)

    @cute.jit
    def store_split_k(self, tile: Tile, tensors: tuple, shared: Shared, products: Products, softmax: OnlineSoftmax):
        """Without split_q: each thread writes the pieces of O that it merged."""
        mO, mLSE = tensors[3], tensors[4]
        split_k, merged = products.split_k, products.merged
        gO, gLSE = tile.sequence.queries(mO, tile.head), tile.sequence.statistics(mLSE, tile.head)
        split_k.publish_maxima(softmax, products.tScS)
        for i in cutlass.range_constexpr(cute.size(merged.row_sum)):
            row, column = split_k.place(i)
            query = tile.m_block * self.tile_m + row
            if (query < tile.sequence.seqlen_q) & (column < self.head_dim):
                rO = cute.make_rmem_tensor((FLOATS,), self.dtype)
                rO.store(merged.normalized(i, self.config.defer_normalize).to(self.dtype))
                cute.autovec_copy(rO, cute.local_tile(gO[query, None], (FLOATS,), (column // FLOATS,)))
                if column == 0:
                    gLSE[query] = log_sum_exp(split_k.row[row], merged.row_sum[i], softmax.scale_log2)


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
