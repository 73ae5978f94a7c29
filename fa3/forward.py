"""FA3 forward: FA2's loop on Hopper's own machinery.

changed since fa2
  - Loads are TMA copies into a ring of stages, issued by one producer warp (FA3 3.1).
  - The products are WGMMA: a warpgroup multiplies 64 rows straight from shared memory.
  - Producer and consumers have their own register budgets (setmaxnreg).
  - Ping-pong: warpgroups take turns at the tensor cores, so that one's softmax hides under another's products (3.1).
  - Inside a warpgroup, P V of the last block runs under the softmax of this one (3.2).
  - CTAs are persistent: as many as run at once, each takes tile after tile (scheduler.py), and O leaves while the next
    tile's Q, K and V arrive.
  - Optionally two CTAs form a cluster, and each loads half of every K/V block for both (multicast); and the query heads
    that share K and V are rows of one tile (pack_gqa).
  - Windows, softcap, packed sequences, caches of which a part is used, and keys split among CTAs.
unchanged
  - A tile is one query block of one head and sequence; keys inner, from the last visible block to the first.
  - O un-normalised in registers, one division at the end, only LSE saved; only blocks that some query does not see
    whole are masked.

Time to the right, two consumer warpgroups (S = Q K of a block, P = softmax of it, O = P V of it):

    producer  | Q K3 V3 K2 V2 | K1 V1     | K0 V0     |
    tensor    | S3 S3' | S2 O3 S2' O3' | S1 O2 S1' O2' | S0 O1 S0' O1' | O0 O0'
    softmax 0 |     P3 |       P2      |      P1       |      P0       |
    softmax 1 |        P3'   |      P2'      |      P1'      |      P0'

shared memory, bytes (16-bit types; stages s; width: head_dim, up to 64, 96, 128, 192 or 256)
    sQ      tile_m * width * 2             each consumer warpgroup's 64 rows apart
    sK, sV  tile_n * width * 2 * s each
    sP      tile_m * tile_n * 2            unless P stays in registers
    sO      tile_m * min(width, 128) * 2   with epilogue_overlap; else O leaves through sQ
registers a consumer thread (d = 128, 192 x 80, 160 of them): O 64, S 40, P 20
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from fa3.epilogue import piece_of, store_lse, store_rows, store_tile
from fa3.loads import (
    CpAsyncLoads,
    Shared,
    TmaLoads,
    gather_queries,
    half_of_keys,
    load_ahead,
    load_first,
    storage_type,
    tma_atom,
    with_fours,
    with_moving_end,
)
from fa3.products import ROWS, Products
from fa3.scheduler import NO_TILE, NUM_PLACES, Facts, Tile, Work, grid_size
from fa3.softmax import KeyScales, OnlineSoftmax, parts
from fa3.sync import (
    PRODUCER_WARP,
    REGISTERS,
    REGISTERS_COPYING,
    THREADS_PER_WARPGROUP,
    WARPS_PER_WARPGROUP,
    Gates,
    Pipes,
    register_budget,
)
from fa_common.compile import KernelKey
from fa_common.tiles import (
    DTYPES,
    KeyBlocks,
    cap_scores,
    check_shared_memory,
    fake_lengths,
    fake_rows,
    fake_sequences,
    mask_scores,
)

WIDTHS = (64, 96, 128, 192, 256)  # of a tile
ROWS_PER_THREAD = 2  # of a warpgroup's 64: see fa_common/tiles.py


@dataclass(frozen=True)
class Share:
    """A consumer warpgroup's share of a tile: 64 rows, and what it takes part in."""

    work: Work
    tile: Tile
    warpgroup: Int32
    first_row: Int32  # of the tile's sequence; with pack_gqa, of its queries' heads
    pipes: Pipes
    gates: Gates
    loads: TmaLoads | CpAsyncLoads | None  # unless others load (warp_specialized)
    descales: Any  # of 8-bit tensors, those of the tile's sequence and head; None otherwise


class Forward:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype, self.dtype_O = self.dtypes(key)
        self.head_dim = key.head_dim
        # Tiles are as wide as the next width that WGMMA layouts like; TMA loads zeros past head_dim and stores nothing.
        self.width = next(width for width in WIDTHS if width >= key.head_dim)
        self.window, self.softcap = key.window, key.softcap
        self.sequences, self.splits = key.sequences, key.splits
        self.facts = Facts(key.config, self.width, key.causal, key.window, key.softcap, key.sequences, key.splits)
        self.num_consumers = key.config.num_consumer_warpgroups
        self.num_producers = 1 if key.config.warp_specialized else 0  # warpgroups
        self.num_threads = THREADS_PER_WARPGROUP * (self.num_producers + self.num_consumers)
        self.has_busy_producer = not key.config.tma  # all its four warps have something to do
        self.registers = REGISTERS if key.config.tma else REGISTERS_COPYING
        self.cluster_size = self.facts.cluster_size
        # Rows that no TMA box holds: a warpgroup gathers its own from Q, and stores O from its registers.
        self.gathers_queries = key.config.pack_gqa or not key.config.tma
        self.stores_directly = self.gathers_queries or key.splits
        self.owns_O = key.config.epilogue_overlap and not self.stores_directly  # memory for O beside Q's
        # Else O leaves through sQ, and the next tile's Q has to wait until it has.
        self.frees_queries_early = key.config.epilogue_overlap or self.stores_directly

    def dtypes(self, key: KernelKey) -> tuple[type, type]:
        """Of Q, K and V, and of O."""
        return DTYPES[key.dtype], DTYPES[key.dtype]

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
        counter: cute.Tensor | None,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        num_sms: Int32,
        num_splits: Int32,
        stream,
    ):
        """Q, K, V, O (batch, seqlen, heads, head_dim), LSE (batch, heads, seqlen_q); packed sequences (total, heads,
        head_dim) and (heads, total); with splits O and LSE are fp32, their first mode the split."""
        sequences = (cu_seqlens_q, cu_seqlens_k, counter)
        numbers = (softmax_scale, softcap, window_left, window_right, num_splits)
        self.launch((mQ, mK, mV, mO, mLSE), sequences, numbers, num_sms, stream)

    @cute.jit
    def launch(self, tensors: tuple, sequences: tuple, numbers: tuple, num_sms: Int32, stream, descales=None):
        """Makes instructions, layouts and TMA descriptors, and launches."""
        tile_n, stages, dtype, width = self.config.tile_n, self.config.stages, self.dtype, self.width
        (mQ, mK, mV, mO), mLSE = self.views(*tensors[:4]), tensors[4]
        grid = grid_size(self.facts, (mQ, mK, sequences[0]), numbers[-1], num_sms)

        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        p_source = warpgroup.OperandSource.RMEM if self.config.p_in_registers else warpgroup.OperandSource.SMEM
        mma_qk, mma_rqk = (
            sm90.make_trivial_tiled_mma(dtype, dtype, K, K, Float32, (1, 1, 1), (ROWS, tile_n), q_source)
            for q_source in (warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM)
        )
        v_major, v_order = (MN, LayoutEnum.COL_MAJOR) if self.dtype.width == 16 else (K, LayoutEnum.ROW_MAJOR)
        mma_pv, mma_piece = (
            sm90.make_trivial_tiled_mma(dtype, dtype, K, v_major, Float32, (1, 1, 1), (ROWS, columns), p_source)
            for columns in (width, piece_of(width))
        )
        layout_Q = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, tile_n, width), dtype, self.num_consumers)
        layout_K = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, tile_n, width), dtype, stages)
        layout_V = sm90.make_smem_layout_b(v_order, (ROWS, width, tile_n), dtype, stages)
        layout_P = None
        if const_expr(not self.config.p_in_registers):
            layout_P = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, width, tile_n), dtype, self.num_consumers)
        piece = piece_of(width)
        # With memory of its own O has two places, one to write and one for TMA to read; in sQ room for all its pieces.
        places = self.num_consumers * (min(2, width // piece) if self.owns_O else width // piece)
        layout_O = sm90.make_smem_layout_epi(self.dtype_O, LayoutEnum.ROW_MAJOR, (ROWS, piece), places)

        tma_Q, tma_K, tma_V, tma_O = None, None, None, None
        if const_expr(not self.gathers_queries):
            tma_Q, mQ = tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mQ, layout_Q, (ROWS, width))
        if const_expr(self.config.tma):
            kv_op = cpasync.CopyBulkTensorTileG2SOp()
            if const_expr(self.config.cluster):
                kv_op = cpasync.CopyBulkTensorTileG2SMulticastOp()
            box_K = box_V = (layout_K, (tile_n, width))
            if const_expr(self.facts.v_by_columns):
                mK, box_K = with_fours(mK), half_of_keys(layout_K, tile_n, width)
            if const_expr(not self.facts.turns_values):
                box_V = (layout_V, (width, tile_n))
            tma_K, mK = tma_atom(kv_op, mK, *box_K, self.cluster_size)
            tma_V, mV = tma_atom(kv_op, mV, *box_V, self.cluster_size)
        if const_expr(not self.stores_directly):
            tma_O, mO = tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mO, layout_O, (ROWS, piece))

        layouts = (layout_Q, layout_K, layout_V, layout_P, layout_O)
        dtypes, turns_values = (dtype, self.dtype_O), self.facts.turns_values
        self.Storage = storage_type(self.config, dtypes, layouts, self.owns_O, turns_values)
        check_shared_memory(self.Storage.size_in_bytes(), self.config, self.head_dim)

        self.kernel(
            (tma_Q, tma_K, tma_V, tma_O),
            (mQ, mK, mV, mO, mLSE),
            sequences,
            layouts,
            (mma_qk, mma_rqk, mma_pv, mma_piece),
            numbers,
            descales,
        ).launch(
            grid=(grid, 1, 1),
            block=[self.num_threads, 1, 1],
            cluster=(self.cluster_size, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def views(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor) -> tuple:
        """Each as (seqlen, head_dim, heads, batch), V^T as (head_dim, seqlen, ...), as TMA and WGMMA count them.

        Packed: (total, head_dim, heads). With splits O has them as its last mode.
        """
        packed = self.sequences == "packed"
        modes = [0, 2, 1] if packed else [1, 3, 2, 0]
        modes_O = [mode + 1 for mode in modes] + [0] if self.splits else modes
        mQ, mK, mV = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (mQ, mK, mV))
        mO = cute.make_tensor(mO.iterator, cute.select(mO.layout, mode=modes_O))
        if packed and not self.gathers_queries:
            mQ = with_moving_end(mQ)
        if packed and not self.stores_directly:
            mO = with_moving_end(mO)
        if self.sequences != "dense" and self.config.tma:
            mK, mV = with_moving_end(mK), with_moving_end(mV)
        if not self.facts.turns_values:
            mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, *range(2, cute.rank(mV))]))
        return mQ, mK, mV, mO

    @cute.kernel
    def kernel(
        self, tma: tuple, tensors: tuple, sequences: tuple, layouts: tuple, mmas: tuple, numbers: tuple, descales
    ):
        """Sets up shared memory and barriers; then some load, and the consumer warpgroups attend and store."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == PRODUCER_WARP:
            for atom in tma:
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)

        if const_expr(self.splits):
            # Every CTA has started: the merge kernel may be launched. Until all have ended it waits, by itself.
            cute.arch.griddepcontrol_launch_dependents()

        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        shared = Shared.of(storage, layouts, self.owns_O, self.facts.turns_values)
        pipes = Pipes.of(self.config, storage, self.dtype, layouts[:3], self.facts.turns_values)
        work = Work.of(self.facts, tensors[:2], sequences, numbers)

        if const_expr(not self.config.warp_specialized):
            self.consume(work, tma, tensors, shared, pipes, mmas, descales)
        else:
            producer_registers, consumer_registers = register_budget(self.num_consumers, self.registers)
            if warp_index < WARPS_PER_WARPGROUP:
                if const_expr(self.config.setmaxnreg):
                    cute.arch.setmaxregister_decrease(producer_registers)
                # One warp starts TMA's copies; cp.async takes all four.
                if const_expr(self.has_busy_producer) or warp_index == PRODUCER_WARP:
                    self.load(work, tma, tensors, shared, pipes)
            else:
                if const_expr(self.config.setmaxnreg):
                    cute.arch.setmaxregister_increase(consumer_registers)
                self.consume(work, tma, tensors, shared, pipes, mmas, descales)

    @cute.jit
    def load(self, work: Work, tma: tuple, tensors: tuple, shared: Shared, pipes: Pipes):
        """The producer: tile after tile, each tile's Q once, K and V last visible block first."""
        scheduler = work.scheduler
        q_phase = Int32(1)  # the empty barriers' phase before their first: to wait for it takes no time
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, NUM_PLACES)
        number = scheduler.first()
        while number != NO_TILE:
            tile = scheduler.tile(number)
            loads = self.loads(work, tile, tma, tensors, shared, pipes)
            blocks = work.all_key_blocks(tile)
            for i in cutlass.range(blocks.end - blocks.begin, unroll=1):
                n_block = work.existing_block(blocks.end - 1 - i, tile)
                loads.load_k(n_block, kv_state)
                if i == 0:
                    loads.load_q(q_phase)  # behind the first K, whose place is free earlier
                loads.load_v(n_block, kv_state)
                kv_state.advance()
            q_phase ^= 1
            if const_expr(self.config.scheduler == "dynamic"):
                number = scheduler.ask(work.counter)
                ring_state = pipes.ring.tell(number, ring_state)
            else:
                number = scheduler.following(number)
        if const_expr(self.config.cluster):
            # The other CTA's consumers arrive at these barriers too: this CTA must not end before their last arrival.
            v_state = kv_state.clone()
            pipes.k.producer_tail(kv_state)
            pipes.v.producer_tail(v_state)

    def loads(self, work: Work, tile: Tile, tma: tuple, tensors: tuple, shared: Shared, pipes: Pipes):
        """A tile's loads, by the instructions that the config asks for."""
        if self.config.tma:
            return TmaLoads.of(work, tile, tma[:3], tensors[:3], shared, pipes)
        num_warpgroups = self.num_producers or self.num_consumers
        threads = (cute.arch.thread_idx()[0], num_warpgroups * THREADS_PER_WARPGROUP)
        return CpAsyncLoads.of(work, tile, tensors[:3], shared, pipes, threads)

    @cute.jit
    def consume(self, work: Work, tma: tuple, tensors: tuple, shared: Shared, pipes: Pipes, mmas: tuple, descales):
        """A consumer warpgroup: tile after tile, 64 rows of each."""
        scheduler = work.scheduler
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_index = warp_index // WARPS_PER_WARPGROUP - self.num_producers
        gates = Gates(self.config.pingpong, self.num_consumers, warpgroup_index)
        gates.open_first()
        sQ, sO = shared.sQ[None, None, warpgroup_index], shared.sO
        sP = None if const_expr(shared.sP is None) else shared.sP[None, None, warpgroup_index]
        q_phase = Int32(0)
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, NUM_PLACES)
        number = scheduler.first()
        while number != NO_TILE:
            tile = scheduler.tile(number)
            loads = None
            if const_expr(not self.config.warp_specialized):
                loads = self.loads(work, tile, tma, tensors, shared, pipes)
            first_row = tile.m_block * self.config.tile_m + warpgroup_index * ROWS
            scales = self.descales_of(descales, work, tile, first_row)
            share = Share(work, tile, warpgroup_index, first_row, pipes, gates, loads, scales)
            row_scales = None if const_expr(scales is None) else scales.rows
            operands = (sQ, shared.sK, shared.sV, sP)
            products = Products.of(mmas, operands, row_scales, warpgroup_index, self.facts)
            softmax = OnlineSoftmax.start(ROWS_PER_THREAD, work.scale_log2, self.facts)
            if const_expr(self.gathers_queries):
                gather_queries(work, tile, (warpgroup_index, first_row), tensors[0], sQ)
            k_state, v_state = self.attend(share, products, softmax, (q_phase, k_state, v_state))
            self.store(share, (tma[3], tensors[3]), tensors[4], sO, products, softmax)
            if const_expr(not self.frees_queries_early):
                # O has left through these rows of sQ: the producer may load the next tile's Q into them.
                pipes.q.consumer_release(pipes.q_state(warpgroup_index, q_phase))
            q_phase ^= 1
            if const_expr(self.config.scheduler == "dynamic"):
                number, ring_state = pipes.ring.hear(ring_state)
            else:
                number = scheduler.following(number)
        # Shared memory must outlive the last store's reads of it; a thread that has started none does not wait.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def attend(self, share: Share, products: Products, softmax: OnlineSoftmax, states: tuple):
        """One consumer warpgroup: 64 queries against every key block that one of them sees.

        Leaves O, un-normalised, in products.
        """
        q_phase, k_state, v_state = states
        work, tile, pipes = share.work, share.tile, share.pipes
        blocks, all_blocks = work.key_blocks(tile, share.first_row, ROWS), work.all_key_blocks(tile)
        begin, last = all_blocks.begin, blocks.end - 1
        if const_expr(share.descales is not None):
            share.descales.load(last)
        # These change nothing if a producer loads.
        ahead = load_first(self.config, share.loads, all_blocks, q_phase)

        if const_expr(not self.gathers_queries):
            # TMA has written this warpgroup's rows of Q.
            pipes.q.consumer_wait(pipes.q_state(share.warpgroup, q_phase))
        products.load_queries()
        for i in cutlass.range(all_blocks.end - blocks.end, unroll=1):
            k_state, v_state = self.pass_over(share, (k_state, v_state))
            ahead = load_ahead(self.config, share.loads, all_blocks.end - 1 - i, begin, ahead)
        k_state = self.first_scores(blocks, share, products, softmax, k_state)
        ahead = load_ahead(self.config, share.loads, last, begin, ahead)
        # From the last key block but one to the first: masked blocks, those that every query sees whole, and with a
        # window masked ones again.
        full_end = cutlass.min(blocks.full_end, last)
        full_begin = cutlass.min(blocks.full_begin, full_end)
        for i in cutlass.range(last - full_end, unroll=1):
            k_state, v_state = self.block(last - 1 - i, True, share, products, softmax, (k_state, v_state))
            ahead = load_ahead(self.config, share.loads, last - 1 - i, begin, ahead)
        for i in cutlass.range(full_end - full_begin, unroll=1):
            k_state, v_state = self.block(full_end - 1 - i, False, share, products, softmax, (k_state, v_state))
            ahead = load_ahead(self.config, share.loads, full_end - 1 - i, begin, ahead)
        if const_expr(self.window):
            for i in cutlass.range(full_begin - blocks.begin, unroll=1):
                k_state, v_state = self.block(full_begin - 1 - i, True, share, products, softmax, (k_state, v_state))
                ahead = load_ahead(self.config, share.loads, full_begin - 1 - i, begin, ahead)
        if const_expr(not self.gathers_queries and self.frees_queries_early):
            # No product reads Q any more: the producer may load the next tile's.
            pipes.q.consumer_release(pipes.q_state(share.warpgroup, q_phase))
        v_state = self.last_product(products, pipes, v_state)
        if const_expr(self.window):
            for i in cutlass.range(blocks.begin - begin, unroll=1):
                k_state, v_state = self.pass_over(share, (k_state, v_state))
                ahead = load_ahead(self.config, share.loads, blocks.begin - 1 - i, begin, ahead)
        return k_state, v_state

    @cute.jit
    def pass_over(self, share: Share, states: tuple):
        """Takes part in a key block that only other warpgroups' queries see."""
        k_state, v_state = states
        pipes = share.pipes
        share.gates.wait()
        share.gates.open_next()
        # A stage may be released only once it has been filled.
        pipes.wait(pipes.k, k_state)
        pipes.k.consumer_release(k_state)
        pipes.wait(pipes.v, v_state)
        pipes.v.consumer_release(v_state)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def first_scores(self, blocks: KeyBlocks, share: Share, products: Products, softmax: OnlineSoftmax, k_state):
        """S and P of the last visible block; there is no P V to run beside it yet."""
        pipes, scales = share.pipes, self.block_scales(blocks.end - 1, share)
        # K of this block has been loaded.
        pipes.wait(pipes.k, k_state)
        share.gates.wait()
        products.issue_scores(k_state.index)
        share.gates.open_next()
        # S is done: it is readable, and this stage of K may be refilled.
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        products.scale_rows()
        self.prepare_scores(blocks.end - 1, share, products, blocks.is_masked(blocks.end - 1), scales)
        softmax.of_block(scales).step(products.acc_S)  # O is still zero: nothing to rescale
        products.round_scores()
        k_state.advance()
        return k_state

    @cute.jit
    def block(
        self,
        n_block: Int32,
        masked: cutlass.Constexpr,
        share: Share,
        products: Products,
        softmax: OnlineSoftmax,
        states: tuple,
    ):
        """S of block n and O += P V of block n + 1.

        With overlap_gemm_softmax P V is in the tensor cores while the softmax of n runs; else both are finished first.
        """
        k_state, v_state = states
        pipes, scales = share.pipes, self.block_scales(n_block, share)
        # K of n and V of n + 1 have been loaded.
        pipes.wait(pipes.k, k_state)
        pipes.wait(pipes.v, v_state)  # loaded before K of n: no wait in practice, and none while holding the gate
        share.gates.wait()
        products.issue_scores(k_state.index)
        products.issue_output(v_state.index)
        share.gates.open_next()
        # S is done, and readable; overlapping, the newest product, P V, may not be.
        warpgroup.wait_group(1 if self.config.overlap_gemm_softmax else 0)
        products.scale_rows()
        softmax = softmax.of_block(scales)
        if const_expr(self.is_optimistic(masked)):
            sums = softmax.optimistic_step(products.acc_S)
            # It never is. But a branch holds the exponentials above the wait below; without it ptxas moves the wait up
            # to before them, and nothing overlaps (docs/dsl-notes.md).
            if softmax.factor(0) < 0.0:
                warpgroup.wait_group(0)
            # P V is done: P may be overwritten, and this stage of V refilled.
            warpgroup.wait_group(0)
            pipes.v.consumer_release(v_state)
            products.add_block()
            products.round_scores()
            self.check(softmax, sums, products, k_state.index)
            # Nobody asks for S again: this stage of K may be refilled.
            pipes.k.consumer_release(k_state)
        else:
            # S is done: this stage of K may be refilled.
            pipes.k.consumer_release(k_state)
            self.prepare_scores(n_block, share, products, masked, scales)
            rescale, rises = softmax.step(products.acc_S)
            # This branch does so as well.
            if rises:
                # P V is done: O may be rescaled.
                warpgroup.wait_group(0)
                products.rescale(rescale)
            # P V is done: as above.
            warpgroup.wait_group(0)
            pipes.v.consumer_release(v_state)
            products.add_block()
            products.round_scores()
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    def is_optimistic(self, masked: bool) -> bool:
        """Only for blocks that every query sees: of others some row may see its first key. A softcap has bent the
        scores, which `scores_again` does not know."""
        return self.config.optimistic_exp and not masked and not self.softcap

    @cute.jit
    def check(self, softmax: OnlineSoftmax, sums: cute.Tensor, products: Products, stage: Int32):
        """Mends P of a block, and O, if the optimistic exponentials were too optimistic."""
        if softmax.outgrown(sums):
            products.rescale(softmax.lower(products.acc_S, sums, lambda: products.scores_again(stage)))
            products.round_scores()
        softmax.count(sums)

    @cute.jit
    def last_product(self, products: Products, pipes: Pipes, v_state):
        """O += P V of the first key block, whose scores the loop left as P."""
        # V of that block has been loaded.
        pipes.wait(pipes.v, v_state)
        products.issue_output(v_state.index)
        # O is complete, and nothing reads V any more: in a cluster the other CTA's producer waits to hear so.
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        products.add_block()
        v_state.advance()
        return v_state

    @cute.jit
    def prepare_scores(
        self, n_block: Int32, share: Share, products: Products, masked, scales: tuple[KeyScales, ...] | None
    ):
        """Softcap and mask: what stands between S = Q K^T and the softmax."""
        tile = share.tile
        if const_expr(self.softcap):
            scale = share.work.scale_tanh
            for part, S in enumerate(parts(products.acc_S, scales, self.facts.v_by_columns)):
                cap_scores(S, scale if scales is None else scale * scales[part].before_cap)
        if masked:
            origin = (share.first_row, n_block * self.config.tile_n)
            seqlens = (tile.seqlen_q, tile.seqlen_k)
            group = share.work.group if const_expr(self.config.pack_gqa) else None
            mask_scores(products.acc_S, products.tScS, origin, seqlens, share.work.bounds, group)

    def descales_of(self, descales, work: Work, tile: Tile, first_row: Int32) -> None:
        """16-bit tensors have none; neither have their blocks (forward_fp8.py)."""

    def block_scales(self, n_block: Int32, share: Share) -> None: ...

    @cute.jit
    def store(
        self,
        share: Share,
        destination: tuple,
        mLSE: cute.Tensor,
        sO: cute.Tensor,
        products: Products,
        softmax: OnlineSoftmax,
    ):
        """Normalises; writes LSE and O. `destination` is the TMA store of O, if that takes it, and its tensor."""
        lse = softmax.finish(products.acc_O)
        place = (share.work, share.tile, share.first_row)
        store_lse(*place, lse, products, mLSE)
        if const_expr(self.stores_directly):
            store_rows(*place, products, destination[1])
        else:
            store_tile(*place, products, sO, destination)


def compile_forward(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a; called as (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, counter,
    softmax_scale, softcap, window_left, window_right, num_sms, num_splits), see Forward.__call__."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, num_splits = (cute.sym_int() for _ in range(6))
    dtype, head_dim = DTYPES[key.dtype], key.head_dim
    packed = key.sequences == "packed"
    batch_and = () if packed else (batch,)
    splits_and = (num_splits,) if key.splits else ()
    lengths_q = fake_lengths(cute.sym_int()) if packed else None
    lengths_k = {"dense": None, "packed": lengths_q and fake_lengths(lengths_q.shape[0]), "cached": fake_lengths(batch)}
    counter = fake_lengths(1) if key.config.scheduler == "dynamic" else None
    return cute.compile(
        Forward(key),
        fake_sequences(dtype, (*batch_and, seqlen_q, heads_q, head_dim)),
        fake_sequences(dtype, (*batch_and, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (*batch_and, seqlen_k, heads_kv, head_dim)),
        fake_sequences(Float32 if key.splits else dtype, (*splits_and, *batch_and, seqlen_q, heads_q, head_dim)),
        fake_rows((*splits_and, *batch_and, heads_q, seqlen_q)),
        lengths_q,
        lengths_k[key.sequences],
        counter,
        Float32(1.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
