"""FA3 forward: FA2's loop on Hopper's own machinery.

changed since fa2
  - Loads are TMA copies into a ring of stages, issued by one producer warp (FA3 3.1).
  - The products are WGMMA: a warpgroup multiplies 64 rows straight from shared memory.
  - Producer and consumers have their own register budgets (setmaxnreg).
  - Ping-pong: warpgroups take turns at the tensor cores, so that one's softmax hides under another's products (3.1).
  - Inside a warpgroup, P V of the last block runs under the softmax of this one (3.2).
  - Optionally two CTAs form a cluster, and each loads half of every K/V block for both (multicast).
unchanged
  - One CTA per query block, head and batch; queries outer, keys inner, from the last visible block to the first.
  - O un-normalised in registers, one division at the end, only LSE saved; only the last visible block and those on the
    diagonal are masked.

Time to the right, two consumer warpgroups (S = Q K of a block, P = softmax of it, O = P V of it):

    producer  | Q K3 V3 K2 V2 | K1 V1     | K0 V0     |
    tensor    | S3 S3' | S2 O3 S2' O3' | S1 O2 S1' O2' | S0 O1 S0' O1' | O0 O0'
    softmax 0 |     P3 |       P2      |      P1       |      P0       |
    softmax 1 |        P3'   |      P2'      |      P1'      |      P0'

shared memory, bytes (16-bit types; stages s; width: head_dim, up to 64, 96, 128, 192 or 256)
    sQ      tile_m * width * 2             each consumer warpgroup's 64 rows apart; O leaves through the same rows
    sK, sV  tile_n * width * 2 * s each
registers a consumer thread (d = 128, 192 x 80, 160 of them): O 64, S 40, P 20
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from fa3.softmax import OnlineSoftmax, rescale_rows
from fa3.sync import PRODUCER_WARP, THREADS_PER_WARPGROUP, WARPS_PER_WARPGROUP, NamedBarrier, register_budget
from fa_common.compile import KernelKey
from fa_common.tiles import (
    DTYPES,
    as_operand_a,
    as_rows_and_columns,
    check_shared_memory,
    fake_rows,
    fake_sequences,
    mask_scores,
    round_to_operand_a,
    visible_blocks,
)

ROWS = 64  # of one WGMMA: the queries of one consumer warpgroup
WIDTHS = (64, 96, 128, 192, 256)  # of a tile


@dataclass(frozen=True)
class Tile:
    """Which output tile this CTA computes, and which key blocks it sees."""

    m_block: Int32
    warpgroup: Int32  # which consumer warpgroup this thread belongs to; -1: the producer
    head: Int32
    head_kv: Int32
    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    num_blocks: Int32  # visible key blocks, walked from the last to the first
    num_full: Int32  # the first so many of them need no mask


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors; the last mode counts warpgroups (sQ, sO) or stages (sK, sV)."""

    sQ: cute.Tensor  # (64, width, warpgroups)
    sK: cute.Tensor  # (tile_n, width, stages)
    sV: cute.Tensor  # (width, tile_n, stages): V^T, as P V wants its B operand
    sO: cute.Tensor  # sQ's memory, once Q is done with


@dataclass(frozen=True)
class Pipes:
    """Full and empty barriers between the producer warp and the consumer warpgroups."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


@dataclass(frozen=True)
class Products:
    """One warpgroup's two products: the instructions, their operands and their accumulators."""

    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K) descriptors
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, stages) descriptors
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, stages) descriptors
    acc_S: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    rP: cute.Tensor  # (MMA, MMA_M, MMA_K) 16-bit, the same thread's share of acc_S
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N) fp32
    tScS: cute.Tensor  # (MMA, MMA_M, MMA_N) coordinates (query, key) of acc_S inside the warpgroup's tile


class Forward:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        # Tiles are as wide as the next width that WGMMA layouts like; TMA loads zeros past head_dim and stores nothing.
        self.width = next(width for width in WIDTHS if width >= key.head_dim)
        self.causal = key.causal
        self.num_consumers = key.config.num_consumer_warpgroups
        self.num_threads = THREADS_PER_WARPGROUP * (1 + self.num_consumers)
        self.registers = register_budget(self.num_consumers)
        self.cluster_size = 2 if key.config.cluster else 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        softmax_scale: Float32,
        stream,
    ):
        """Q, K, V, O (batch, seqlen, heads, head_dim), LSE (batch, heads, seqlen_q)."""
        tile_m, tile_n, stages, dtype = self.config.tile_m, self.config.tile_n, self.config.stages, self.dtype
        # (batch, seqlen, heads, head_dim) -> (seqlen, head_dim, heads, batch); V once more, (head_dim, seqlen, ...).
        mQ, mK, mO = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (mQ, mK, mO)]
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[3, 1, 2, 0]))

        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        mma_qk = sm90.make_trivial_tiled_mma(dtype, dtype, K, K, Float32, (1, 1, 1), (ROWS, tile_n))
        mma_pv = sm90.make_trivial_tiled_mma(
            dtype, dtype, K, MN, Float32, (1, 1, 1), (ROWS, self.width), warpgroup.OperandSource.RMEM
        )
        layout_Q = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, tile_n, self.width), dtype, self.num_consumers)
        layout_K = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, tile_n, self.width), dtype, stages)
        layout_V = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (ROWS, self.width, tile_n), dtype, stages)
        layout_O = sm90.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (ROWS, self.width), self.num_consumers)

        tma_Q, mQ = self.tma(cpasync.CopyBulkTensorTileG2SOp(), mQ, layout_Q, (ROWS, self.width))
        tma_K, mK = self.tma(self.kv_op(), mK, layout_K, (tile_n, self.width), self.cluster_size)
        tma_V, mV = self.tma(self.kv_op(), mV, layout_V, (self.width, tile_n), self.cluster_size)
        tma_O, mO = self.tma(cpasync.CopyBulkTensorTileS2GOp(), mO, layout_O, (ROWS, self.width))

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            # 128-byte swizzle atoms repeat every 1024 bytes.
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_Q)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_K)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_V)], 1024]

        check_shared_memory(Storage.size_in_bytes(), self.config, self.head_dim)
        self.Storage = Storage

        num_m_blocks = cute.ceil_div(mQ.shape[0], tile_m)
        grid = (cute.round_up(num_m_blocks, self.cluster_size), mQ.shape[2], mQ.shape[3])
        self.kernel(
            (tma_Q, tma_K, tma_V, tma_O),
            (mQ, mK, mV, mO, mLSE),
            (layout_Q, layout_K, layout_V, layout_O),
            (mma_qk, mma_pv),
            softmax_scale * math.log2(math.e),
        ).launch(
            grid=grid,
            block=[self.num_threads, 1, 1],
            cluster=(self.cluster_size, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def tma(self, op, tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple, num_multicast: int = 1) -> tuple:
        """(atom, tensor of coordinates) of copies of `tile` between global memory and one stage of `layout`."""
        return cpasync.make_tiled_tma_atom(
            op, tensor, cute.select(layout, mode=[0, 1]), tile, num_multicast=num_multicast
        )

    def kv_op(self):
        """The TMA load of K and V: into this CTA, or into every CTA of the cluster."""
        if self.config.cluster:
            return cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.CopyBulkTensorTileG2SOp()

    @cute.kernel
    def kernel(self, tma: tuple, tensors: tuple, layouts: tuple, mmas: tuple, scale_log2: Float32):
        """Sets up shared memory and barriers; then one warp loads, and the consumer warpgroups attend and store."""
        mQ, mK, _, _, _ = tensors
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == PRODUCER_WARP:
            for atom in tma:
                cpasync.prefetch_descriptor(atom)

        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        shared = self.shared_tensors(storage, layouts)
        pipes = self.pipelines(storage, layouts)

        block, head, batch = cute.arch.block_idx()
        # Causal tiles low in the matrix see the most keys; they start first, so that the last wave is short.
        m_block = cute.arch.grid_dim()[0] - 1 - block if const_expr(self.causal) else block
        seqlen_q, seqlen_k = mQ.shape[0], mK.shape[0]
        tile_m, tile_n, seqlens = self.config.tile_m, self.config.tile_n, (seqlen_q, seqlen_k)
        _, num_full = visible_blocks(m_block * tile_m, tile_m, tile_n, seqlens, self.causal)
        # The CTAs of a cluster walk the same key blocks, since each loads a share of every one.
        cluster_m = tile_m * self.cluster_size
        num_blocks, _ = visible_blocks(
            m_block // self.cluster_size * cluster_m, cluster_m, tile_n, seqlens, self.causal
        )
        head_kv = head // (mQ.shape[2] // mK.shape[2])
        warpgroup_index = warp_index // WARPS_PER_WARPGROUP - 1
        tile = Tile(m_block, warpgroup_index, head, head_kv, batch, seqlen_q, seqlen_k, num_blocks, num_full)

        producer_registers, consumer_registers = self.registers
        if warp_index < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == PRODUCER_WARP:
                self.load(tile, tma, tensors, shared, pipes)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            products, softmax = self.attend(tile, mmas, shared, pipes, scale_log2)
            self.store(tile, tma, tensors, shared, products, softmax)

    def shared_tensors(self, storage, layouts: tuple) -> Shared:
        layout_Q, layout_K, layout_V, layout_O = layouts
        sQ = storage.sQ.get_tensor(layout_Q.outer, swizzle=layout_Q.inner)
        return Shared(
            sQ=sQ,
            sK=storage.sK.get_tensor(layout_K.outer, swizzle=layout_K.inner),
            sV=storage.sV.get_tensor(layout_V.outer, swizzle=layout_V.inner),
            sO=cute.make_tensor(cute.recast_ptr(sQ.iterator, layout_O.inner), layout_O.outer),
        )

    def pipelines(self, storage, layouts: tuple) -> Pipes:
        """Each stage has a full barrier, which TMA's bytes complete, and an empty one, at which every consumer warp
        arrives: those of all CTAs in the cluster, since TMA writes a block into all of them. Q, loaded once, is never
        released.

        The pipeline is told threads and counts one arrival a warp and CTA of the cluster, which lies along M of its
        (V, M, N, K) layout: B operands, K and V, are what CTAs along M share.
        """

        def make(barriers, layout, num_stages, copies, cluster_size):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=num_stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=pipeline.CooperativeGroup(
                    pipeline.Agent.Thread, self.num_consumers * THREADS_PER_WARPGROUP
                ),
                tx_count=copies * cute.size_in_bytes(self.dtype, cute.select(layout, mode=[0, 1])),
                cta_layout_vmnk=cute.make_layout((1, cluster_size, 1, 1)),
                mcast_mode_mn=(0, 1),
                enable_multicast_signaling=True,
                defer_sync=True,
            )

        layout_Q, layout_K, layout_V, _ = layouts
        pipes = Pipes(
            q=make(storage.q_barriers, layout_Q, 1, self.num_consumers, 1),
            k=make(storage.k_barriers, layout_K, self.config.stages, 1, self.cluster_size),
            v=make(storage.v_barriers, layout_V, self.config.stages, 1, self.cluster_size),
        )
        # Every barrier is initialised, in all CTAs of the cluster, before anyone waits or copies.
        cluster_layout = cute.make_layout((1, self.cluster_size, 1, 1))
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_layout, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_layout)
        return pipes

    @cute.jit
    def load(self, tile: Tile, tma: tuple, tensors: tuple, shared: Shared, pipes: Pipes):
        """The producer warp: Q once, then K and V, last visible block first."""
        tile_n, width = self.config.tile_n, self.width
        tma_Q, tma_K, tma_V, _ = tma
        mQ, mK, mV, _, _ = tensors
        gQ = cute.local_tile(mQ[None, None, tile.head, tile.batch], (ROWS, width), (None, 0))
        gK = cute.local_tile(mK[None, None, tile.head_kv, tile.batch], (tile_n, width), (None, 0))
        gV = cute.local_tile(mV[None, None, tile.head_kv, tile.batch], (width, tile_n), (0, None))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tQsQ, tQgQ = self.partition(tma_Q, shared.sQ, gQ)  # (TMA, warpgroups), (TMA, m_blocks of 64)
        tKsK, tKgK = self.partition(tma_K, shared.sK, gK, rank, self.cluster_size)  # (TMA, stages), (TMA, n_blocks)
        tVsV, tVgV = self.partition(tma_V, shared.sV, gV, rank, self.cluster_size)

        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        # Never waits, Q being loaded once: it tells the full barrier how many bytes to expect.
        pipes.q.producer_acquire(q_state)
        for w in cutlass.range_constexpr(self.num_consumers):
            m_block = tile.m_block * self.num_consumers + w
            cute.copy(tma_Q, tQgQ[None, m_block], tQsQ[None, w], tma_bar_ptr=pipes.q.producer_get_barrier(q_state))
        for i in cutlass.range(tile.num_blocks, unroll=1):
            n_block = tile.num_blocks - 1 - i
            # Waits until every consumer warp has released what this stage held; then TMA fills it.
            pipes.k.producer_acquire(kv_state)
            k_full = pipes.k.producer_get_barrier(kv_state)
            self.load_block(tma_K, tKgK[None, n_block], tKsK[None, kv_state.index], k_full)
            # The same for V, whose stage is released later than K's.
            pipes.v.producer_acquire(kv_state)
            v_full = pipes.v.producer_get_barrier(kv_state)
            self.load_block(tma_V, tVgV[None, n_block], tVsV[None, kv_state.index], v_full)
            kv_state.advance()
        if const_expr(self.config.cluster):
            # The other CTA's consumers arrive at these barriers too: this CTA must not end before their last arrival.
            v_state = kv_state.clone()
            pipes.k.producer_tail(kv_state)
            pipes.v.producer_tail(v_state)

    def load_block(self, atom: cute.CopyAtom, g: cute.Tensor, s: cute.Tensor, full_barrier: cute.Pointer) -> None:
        """Starts a TMA copy of a key block, or of this CTA's share of it into every CTA of the cluster."""
        if self.config.cluster:
            every_cta = cutlass.Int16(2**self.cluster_size - 1)
            cute.copy(atom, g, s, tma_bar_ptr=full_barrier, mcast_mask=every_cta)
        else:
            cute.copy(atom, g, s, tma_bar_ptr=full_barrier)

    def partition(self, atom: cute.CopyAtom, s: cute.Tensor, g: cute.Tensor, rank: Int32 = 0, num_ctas: int = 1):
        """Both sides of a TMA copy as (TMA, tiles); CTA `rank` of `num_ctas` copies its share."""
        return cpasync.tma_partition(
            atom, rank, cute.make_layout(num_ctas), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
        )

    @cute.jit
    def attend(self, tile: Tile, mmas: tuple, shared: Shared, pipes: Pipes, scale_log2: Float32):
        """One consumer warpgroup: 64 queries against every visible key block.

        Returns O, un-normalised, and its statistics.
        """
        products = self.products(tile, mmas, shared)
        softmax = OnlineSoftmax.start(
            cute.size(as_rows_and_columns(products.acc_O), mode=[0]), scale_log2, self.config.lazy_rescale
        )
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        block = self.block_overlapped if const_expr(self.config.overlap_gemm_softmax) else self.block_in_order

        # The producer's TMA has written this CTA's Q.
        pipes.q.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
        self.open_first_gate(tile)
        k_state = self.first_scores(tile, products, softmax, pipes, k_state)
        # From the last key block but one to the first: the masked blocks, then those every query sees whole.
        num_left = tile.num_blocks - 1
        num_full = cutlass.min(tile.num_full, num_left)
        for i in cutlass.range(num_left - num_full, unroll=1):
            k_state, v_state = block(num_left - 1 - i, True, tile, products, softmax, pipes, (k_state, v_state))
        for i in cutlass.range(num_full, unroll=1):
            k_state, v_state = block(num_full - 1 - i, False, tile, products, softmax, pipes, (k_state, v_state))
        self.last_product(products, pipes, v_state)
        return products, softmax

    def products(self, tile: Tile, mmas: tuple, shared: Shared) -> Products:
        """This thread's operands and accumulators of S = Q K^T and O = P V."""
        mma_qk, mma_pv = mmas
        thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        thread_qk, thread_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
        acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, self.config.tile_n)), Float32)
        acc_O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.width)), Float32)
        acc_O.fill(0.0)
        return Products(
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            tSrQ=mma_qk.make_fragment_A(thread_qk.partition_A(shared.sQ))[None, None, None, tile.warpgroup],
            tSrK=mma_qk.make_fragment_B(thread_qk.partition_B(shared.sK)),
            tOrV=mma_pv.make_fragment_B(thread_pv.partition_B(shared.sV)),
            acc_S=acc_S,
            rP=cute.make_rmem_tensor(as_operand_a(acc_S.layout), self.dtype),
            acc_O=acc_O,
            tScS=thread_qk.partition_C(cute.make_identity_tensor((ROWS, self.config.tile_n))),
        )

    @cute.jit
    def first_scores(self, tile: Tile, products: Products, softmax: OnlineSoftmax, pipes: Pipes, k_state):
        """S and P of the last visible block; there is no P V to run beside it yet."""
        # TMA has written K of this block.
        pipes.k.consumer_wait(k_state)
        self.wait_at_gate(tile)
        self.issue_scores(products, k_state)
        self.open_next_gate(tile)
        # S is done: it is readable, and this stage of K may be refilled.
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        self.mask(tile.num_blocks - 1, tile, products)
        softmax.step(products.acc_S)  # O is still zero: nothing to rescale
        round_to_operand_a(products.acc_S, products.rP)
        k_state.advance()
        return k_state

    @cute.jit
    def block_in_order(
        self,
        n_block: Int32,
        masked: cutlass.Constexpr,
        tile: Tile,
        products: Products,
        softmax: OnlineSoftmax,
        pipes: Pipes,
        states: tuple,
    ):
        """S of block n and O += P V of block n + 1; both are finished before the softmax begins."""
        k_state, v_state = states
        # TMA has written K of n and V of n + 1.
        pipes.k.consumer_wait(k_state)
        pipes.v.consumer_wait(v_state)
        self.wait_at_gate(tile)
        self.issue_scores(products, k_state)
        self.issue_output(products, v_state)
        self.open_next_gate(tile)
        # Both products are done: S and O are readable, and the stages of K and V may be refilled.
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        pipes.v.consumer_release(v_state)
        if const_expr(masked):
            self.mask(n_block, tile, products)
        rescale, rises = softmax.step(products.acc_S)
        round_to_operand_a(products.acc_S, products.rP)
        if rises:
            rescale_rows(products.acc_O, rescale)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def block_overlapped(
        self,
        n_block: Int32,
        masked: cutlass.Constexpr,
        tile: Tile,
        products: Products,
        softmax: OnlineSoftmax,
        pipes: Pipes,
        states: tuple,
    ):
        """S of block n and O += P V of block n + 1; the softmax of n runs while P V is still in the tensor cores."""
        k_state, v_state = states
        # TMA has written K of n and V of n + 1.
        pipes.k.consumer_wait(k_state)
        pipes.v.consumer_wait(v_state)  # loaded before K of n: no wait in practice, and none while holding the gate
        self.wait_at_gate(tile)
        self.issue_scores(products, k_state)
        self.issue_output(products, v_state)
        self.open_next_gate(tile)
        # All but the newest product, P V, are done: S is readable and this stage of K may be refilled.
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        if const_expr(masked):
            self.mask(n_block, tile, products)
        rescale, rises = softmax.step(products.acc_S)
        # This branch also holds the exponentials above the wait below; without it ptxas moves the wait up to the row
        # maxima, and nothing overlaps (docs/dsl-notes.md).
        if rises:
            # P V is done: O may be rescaled.
            warpgroup.wait_group(0)
            rescale_rows(products.acc_O, rescale)
        # P V is done: rP may be overwritten, and this stage of V refilled.
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        round_to_operand_a(products.acc_S, products.rP)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def last_product(self, products: Products, pipes: Pipes, v_state):
        """O += P V of key block 0, whose scores the loop left in rP."""
        # TMA has written V of block 0.
        pipes.v.consumer_wait(v_state)
        self.issue_output(products, v_state)
        # O is complete, and nothing reads V any more: in a cluster the other CTA's producer waits to hear so.
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)

    def issue_scores(self, products: Products, k_state) -> None:
        """Starts S = Q K^T and commits it as one group; nobody may touch acc_S before the group is waited for."""
        tSrK = products.tSrK[None, None, None, k_state.index]
        self.issue(products.mma_qk, products.acc_S, products.tSrQ, tSrK, accumulate=False)

    def issue_output(self, products: Products, v_state) -> None:
        """Starts O += P V and commits it as one group; nobody may touch rP or acc_O before the group is waited for."""
        tOrV = products.tOrV[None, None, None, v_state.index]
        self.issue(products.mma_pv, products.acc_O, products.rP, tOrV, accumulate=True)

    def issue(self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
        # Registers written by ordinary instructions (acc, rP) are visible to the WGMMAs that follow.
        warpgroup.fence()
        # A fresh atom each time: ACCUMULATE is set on the Python object; of one made outside a loop, the loop's value
        # would not dominate its later uses.
        atom = cute.make_mma_atom(mma.op)
        for k_step in range(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or k_step > 0)
            cute.gemm(atom, acc, a[None, None, k_step], b[None, None, k_step], acc)
        warpgroup.commit_group()

    def mask(self, n_block: Int32, tile: Tile, products: Products) -> None:
        first_query = tile.m_block * self.config.tile_m + tile.warpgroup * ROWS
        origin = (first_query, n_block * self.config.tile_n)
        mask_scores(products.acc_S, products.tScS, origin, (tile.seqlen_q, tile.seqlen_k), self.causal)

    @cute.jit
    def open_first_gate(self, tile: Tile):
        """The last warpgroup lets the first one through; from then on each lets the next one through.

        Its last opening of gate 0 finds nobody waiting; barriers end with the CTA.
        """
        if const_expr(self.config.pingpong):
            if tile.warpgroup == self.num_consumers - 1:
                self.open_next_gate(tile)

    @cute.jit
    def wait_at_gate(self, tile: Tile):
        """Until the warpgroup before this one, in the ring, has issued its products."""
        if const_expr(self.config.pingpong):
            cute.arch.barrier(
                barrier_id=NamedBarrier.GATE + tile.warpgroup, number_of_threads=2 * THREADS_PER_WARPGROUP
            )

    @cute.jit
    def open_next_gate(self, tile: Tile):
        """This warpgroup's products are issued: the next one, in the ring, may issue its own behind them."""
        if const_expr(self.config.pingpong):
            next_warpgroup = (tile.warpgroup + 1) % self.num_consumers
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrier.GATE + next_warpgroup, number_of_threads=2 * THREADS_PER_WARPGROUP
            )

    @cute.jit
    def store(self, tile: Tile, tma: tuple, tensors: tuple, shared: Shared, products: Products, softmax: OnlineSoftmax):
        """Normalises, writes LSE, and sends O through this warpgroup's 64 rows of sQ, which nobody else reads."""
        mO, mLSE = tensors[3], tensors[4]
        lse = softmax.finish(products.acc_O)
        tScS = as_rows_and_columns(products.tScS)
        first_row = tile.m_block * self.config.tile_m + tile.warpgroup * ROWS
        if tScS[0, 0][1] == 0:  # one lane of the quad that shares the row
            for r in cutlass.range_constexpr(cute.size(lse)):
                row = first_row + tScS[r, 0][0]
                if row < tile.seqlen_q:
                    mLSE[tile.batch, tile.head, row] = lse[r]

        rO = cute.make_rmem_tensor_like(products.acc_O, self.dtype)
        rO.store(products.acc_O.load().to(self.dtype))
        sO = shared.sO[None, None, tile.warpgroup]
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        thread_copy = cute.make_tiled_copy_C(stmatrix, products.mma_pv).get_slice(
            cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        )
        cute.copy(stmatrix, thread_copy.retile(rO), thread_copy.partition_D(sO))
        # What these threads wrote becomes visible to TMA; then all four warps of the warpgroup have written.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.OUTPUT + tile.warpgroup, number_of_threads=THREADS_PER_WARPGROUP)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
            gO = cute.local_tile(mO[None, None, tile.head, tile.batch], (ROWS, self.width), (None, 0))
            tOsO, tOgO = self.partition(tma[3], sO, gO)
            # TMA drops the rows past seqlen_q.
            cute.copy(tma[3], tOsO, tOgO[None, tile.m_block * self.num_consumers + tile.warpgroup])
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory must outlive the CTA's reads of it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def compile_forward(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a; called as (q, k, v, out, lse, softmax_scale)."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    dtype, head_dim = DTYPES[key.dtype], key.head_dim
    return cute.compile(
        Forward(key),
        fake_sequences(dtype, (batch, seqlen_q, heads_q, head_dim)),
        fake_sequences(dtype, (batch, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (batch, seqlen_k, heads_kv, head_dim)),
        fake_sequences(dtype, (batch, seqlen_q, heads_q, head_dim)),
        fake_rows((batch, heads_q, seqlen_q)),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
