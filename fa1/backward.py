"""FA1 backward: keys outer, queries inner; S and P are computed again (FA1, algorithm 4).

  - One CTA per head and batch holds a block of K and V, and dK and dV of it in registers, and walks over all queries;
    query heads that share K and V pass one after another.
  - dQ of a query block is read, added to and written back at each visit: in fp32, in global memory, by one instruction
    of the L2 cache (a vector reduction). Of one CTA the order is that of the program, so the sum is repeatable.
  - The warps of a CTA split the keys ("split-K"): each has P and dS of all queries of the tile and its own keys, so dK
    and dV are its own business; its shares of dQ meet those of the others in shared memory, as those of O do.
  - delta = rowsum(dO * O) is computed once for each row, by a kernel before (`prepare`), and not again at each visit;
    the released code kept it too. A kernel behind (`convert`) rounds dQ.
  - kv_splits CTAs share out the key blocks of a head where heads alone do not fill the GPU.

Time to the right, one key block (A is a barrier, the only one of a visit with head_dim up to 64):

    cp.async  | K V Q0 dO0 A Q1 dO1                                | Q2 dO2
    warps     |            A S0  P0  dP0  dS0  dV dK  dQ0 (share) A | M0  S1  P1 ...   M: shares of dQ, summed, go out

shared memory, bytes (16-bit types; width: head_dim, up to whole panels of 64)
    sK, sV      tile_n * width * 2 each         dK and dV leave through them
    sQ, sdO     tile_m * width * 2 * 2 each     two stages
    sdQ         key_warps * tile_m * 64 * 4 * 2 each warp's share of 64 columns, and of the 64 before; dS passes through
    statistics  tile_m * 8 * 2
registers a thread (d = 64, 32 x 128, 4 warps): dK, dV 128, S 32, dP 32, P 16, dS 16; dQ 64 where S and dP were
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from fa1.config import COLUMNS, FLOATS, LANES, ROWS
from fa_common.compile import KernelKey
from fa_common.query_tiles import PREPARE_THREADS, QueryTiles, scratch_tile
from fa_common.tiles import (
    DTYPES,
    PANEL,
    QUAD,
    RowCopy,
    Sequence,
    as_rows_and_columns,
    by_rows,
    cap_scores,
    check_shared_memory,
    fake_lengths,
    fake_rows,
    fake_sequences,
    score_scales,
    shared_pointer,
    tile_layout,
    whole_panels,
)
from fa_common.warp_tiles import (
    LaneRow,
    Share,
    WarpOperand,
    add_four,
    four_floats,
    hide,
    operand_registers,
    round_to_squares,
    store_squares,
    thread_index_anew,
    visible_queries,
    warp_mma,
)

STAGES = 2  # of Q and dO, and of the shares of dQ
DEPTH = 16  # of one mma.sync
STEPS_AT_ONCE = 2  # of 16 columns of dQ
PIECES_AT_ONCE = {4: 4, 8: 1}  # of dQ that a warp sums, by key_warps


@dataclass(frozen=True)
class Work:
    """Which head of K and V this CTA has, and which of its key blocks."""

    head_kv: Int32
    group: Int32  # query heads that share it
    sequence: Sequence
    split: Int32  # this CTA's key blocks: split, split + kv_splits, ...
    first_tile: Int32  # of the sequence's tiles of queries in scratch memory
    bounds: tuple  # keys seen before and behind a query's own position; None: all


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors; of sQ and statistics the first stage. dO lies behind Q, `dO_from_Q` bytes further."""

    sQ: cute.Tensor  # (tile_m, width)
    sK: cute.Tensor  # (tile_n, width)
    sV: cute.Tensor  # (tile_n, width)
    sdQ: cute.Tensor  # (4, lanes, tile_m / 16, 8, key_warps, STAGES) fp32: a warp's share of 64 columns, in pieces
    statistics: cute.Tensor  # LSE in base 2 of tile_m queries, then their delta


@dataclass(frozen=True)
class Products:
    """This warp's five products, over its own keys: operands and accumulators, (MMA, MMA_M, MMA_N) fp32.

    Of q, do, do_t, q_t and ds there is one for each stage.
    """

    mma: cute.TiledMma
    keys: Share
    queries: Share  # all of them
    columns: Share  # of dV, dK and dQ: all of them, unless two warps share the keys
    k: WarpOperand  # S^T = K Q^T
    q: tuple
    v: WarpOperand  # dP^T = V dO^T
    do: tuple
    do_t: tuple  # dV = P^T dO
    q_t: tuple  # dK = dS^T Q
    ds: tuple  # dQ = dS K
    k_t: WarpOperand
    dS_squares: tuple  # where this warp writes dS
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor


class Backward:
    """The kernels for one KernelKey."""

    def __init__(self, key: KernelKey):
        config = key.config
        if key.deterministic and config.kv_splits > 1:
            raise ValueError(
                "deterministic=True needs kv_splits=1 (one CTA adds up all of a query's dQ, in one order); "
                f"got kv_splits={config.kv_splits}: leave config out, or take another version"
            )
        self.config = config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        self.width = whole_panels(key.head_dim)  # of a tile: head_dim and, where that ends inside a panel, zeros
        self.k_steps = -(-key.head_dim // DEPTH)  # of S^T and dP^T
        self.causal, self.window, self.softcap = key.causal, key.window, key.softcap
        self.num_threads = LANES * config.num_warps
        self.keys_per_warp = config.tile_n // config.key_warps
        self.column_warps = config.num_warps // config.key_warps
        self.groups = config.tile_m // ROWS
        packed = key.sequences == "packed"
        self.tiles = QueryTiles(self.dtype, key.head_dim, config.tile_m, self.num_threads, packed)
        self.dq_warps = (config.num_warps // 4, 4)  # of the sum of dQ: warps that split queries, and columns
        # Bytes between tiles that are read alike: one address register serves both.
        self.stage_bytes = config.tile_m * self.width * 2  # of Q, and of dO
        self.dO_from_Q, self.V_from_K = STAGES * self.stage_bytes, config.tile_n * self.width * 2

    @cute.jit
    def __call__(
        self,
        mdO: cute.Tensor,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        statistics: cute.Tensor,
        dq_accum: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_seqlen_q: Int32,
        has_dlse: Int32,
        stream,
    ):
        """Q, K, V, O and their gradients (batch, seqlen, heads, head_dim), LSE and its gradient (batch, heads,
        seqlen_q), or packed; has_dlse says whether mdLSE counts. Scratch, by query head and tile of queries: statistics
        2 * tile_m, dq_accum tile_m * width."""
        mdO, mQ, mK, mV, mO, mdQ, mdK, mdV = [by_rows(t) for t in (mdO, mQ, mK, mV, mO, mdQ, mdK, mdV)]
        cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
        batch = mQ.shape[3] if const_expr(cu_seqlens_q is None) else cu_seqlens_q.shape[0] - 1
        mma = warp_mma(self.dtype)
        self.Storage = self.storage_type()
        check_shared_memory(self.Storage.size_in_bytes(), self.config, self.head_dim)
        scale_tanh, scale_log2 = score_scales(softmax_scale, softcap if const_expr(self.softcap) else None)

        grid = (cute.ceil_div(max_seqlen_q, self.config.tile_m), mQ.shape[2], batch)
        sequences = (mQ, mK, cu_seqlens)
        self.tiles.prepare((mdO, mO, mLSE, mdLSE), (statistics, dq_accum), sequences, has_dlse).launch(
            grid=grid, block=[PREPARE_THREADS, 1, 1], stream=stream
        )
        self.kernel(
            (mdO, mQ, mK, mV, mdK, mdV),
            (statistics, dq_accum),
            cu_seqlens,
            mma,
            (softmax_scale, scale_tanh, scale_log2, window_left, window_right),
        ).launch(
            grid=(self.config.kv_splits, mK.shape[2], batch),
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        self.tiles.convert(mdQ, dq_accum, sequences, mma, self.dq_warps, softmax_scale).launch(
            grid=grid, block=[self.num_threads, 1, 1], stream=stream
        )

    def storage_type(self):
        """Shared memory of the main kernel."""
        tile_m, tile_n, width, dtype = self.config.tile_m, self.config.tile_n, self.width, self.dtype

        @cute.struct
        class Storage:
            sQ_dO: cute.struct.Align[cute.struct.MemRange[dtype, 2 * STAGES * tile_m * width], 1024]
            sK_V: cute.struct.Align[cute.struct.MemRange[dtype, 2 * tile_n * width], 1024]
            sdQ: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * self.config.key_warps * tile_m * PANEL], 1024]
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * 2 * tile_m], 128]

        return Storage

    @cute.kernel
    def kernel(self, tensors: tuple, scratch: tuple, cu_seqlens: tuple, mma: cute.TiledMma, numbers: tuple):
        """Sets up shared memory; then the CTA attends, block of keys by block of keys."""
        mQ, mK = tensors[1], tensors[2]
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        sQ, sK = (
            memory.get_tensor(tile_layout(rows, self.width))
            for memory, rows in ((storage.sQ_dO, self.config.tile_m), (storage.sK_V, self.config.tile_n))
        )
        shared = Shared(
            sQ=sQ,
            sK=sK,
            sV=cute.make_tensor(sK.iterator + self.V_from_K // 2, sK.layout),
            sdQ=storage.sdQ.get_tensor(
                cute.make_layout((FLOATS, LANES, self.groups, PANEL // COLUMNS, self.config.key_warps, STAGES))
            ),
            statistics=storage.statistics.get_tensor(cute.make_layout((2 * self.config.tile_m,))),
        )
        split, head_kv, batch = cute.arch.block_idx()
        sequence = Sequence.of(mQ, mK, cu_seqlens, batch)
        softmax_scale, scale_tanh, scale_log2, left, right = numbers
        bounds = (left, right) if const_expr(self.window) else (None, 0 if const_expr(self.causal) else None)
        group = mQ.shape[2] // mK.shape[2]
        work = Work(head_kv, group, sequence, split, self.tiles.first(sequence), bounds)
        products = self.products(mma, shared)
        self.attend(work, tensors, scratch, shared, products, (softmax_scale, scale_tanh, scale_log2))

    @cute.jit
    def load(self, n_block: Int32, work: Work, tensors: tuple, shared: Shared):
        """Starts the copies of K and V, rows past the end zeroed."""
        mK, mV = tensors[2], tensors[3]
        tile_n = self.config.tile_n
        copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads, thread_index_anew())
        num_rows = work.sequence.seqlen_k - n_block * tile_n
        for m, s in ((mK, shared.sK), (mV, shared.sV)):
            g = cute.local_tile(work.sequence.keys(m, work.head_kv), (tile_n, self.width), (n_block, 0))
            copy.load_rows(copy.of_global(g), copy.of_shared(s), num_rows)

    @cute.jit
    def load_queries(self, place: tuple, work: Work, tensors: tuple, statistics: cute.Tensor, shared: Shared):
        """Starts the copies of a block of Q, dO and its statistics; place is (query block, head of group, stage)."""
        mdO, mQ = tensors[0], tensors[1]
        m_block, head_of_group, stage = place
        tile_m, head = self.config.tile_m, work.head_kv * work.group + head_of_group
        thread = thread_index_anew()
        copy = RowCopy.of(self.dtype, tile_m, self.head_dim, self.num_threads, thread)
        num_rows = work.sequence.seqlen_q - m_block * tile_m
        tsQsQ = copy.of_shared(shared.sQ)
        for m, distance in ((mQ, 0), (mdO, self.dO_from_Q)):
            g = cute.local_tile(work.sequence.queries(m, head), (tile_m, self.width), (m_block, 0))
            address = tsQsQ.iterator.toint() + (stage * self.stage_bytes + distance)
            tss = cute.make_tensor(shared_pointer(self.dtype, address, align=16), tsQsQ.layout)
            copy.load_rows(copy.of_global(g), tss, num_rows)
        if thread < 2 * tile_m // FLOATS:
            source = four_floats(scratch_tile(statistics, head, work.first_tile + m_block).iterator + thread * FLOATS)
            address = shared.statistics.iterator.toint() + (stage * 2 * tile_m + thread * FLOATS) * 4
            target = cute.make_tensor(shared_pointer(Float32, address, align=16), cute.make_layout((FLOATS,)))
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
            )
            cute.copy(atom, source, target)

    @cute.jit
    def attend(self, work: Work, tensors: tuple, scratch: tuple, shared: Shared, products: Products, scales: tuple):
        """Every key block of this CTA against every query block that sees it, of each head of the group.

        scales: softmax_scale, what raw scores are multiplied by before the tanh, and what goes to exp2.
        """
        tile_m, tile_n, kv_splits = self.config.tile_m, self.config.tile_n, self.config.kv_splits
        lengths = (work.sequence.seqlen_q, work.sequence.seqlen_k)
        num_n_blocks = cute.ceil_div(lengths[1], tile_n)
        for i in cutlass.range(cute.ceil_div(num_n_blocks - work.split, kv_splits), unroll=1):
            n_block = work.split + i * kv_splits
            begin, end = visible_queries((n_block * tile_n, tile_n), tile_m, lengths, work.bounds)
            num_visits = (end - begin) * work.group
            products.acc_dV.fill(0.0)
            products.acc_dK.fill(0.0)
            # Every thread has sent off dK and dV of the key block before, which lie where K and V go.
            cute.arch.sync_threads()
            self.load(n_block, work, tensors, shared)
            if num_visits > 0:
                self.load_queries((begin, Int32(0), 0), work, tensors, scratch[0], shared)
            # K, V and the first Q, dO and statistics are one group.
            cute.arch.cp_async_commit_group()
            # They have arrived, for every thread.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            m_block, head_of_group = Int32(begin), Int32(0)
            for pair in cutlass.range(cute.ceil_div(num_visits, STAGES), unroll=1):
                for stage in cutlass.range_constexpr(STAGES):
                    visit = pair * STAGES + stage
                    if visit < num_visits:
                        m_next, head_next = m_block + 1, head_of_group
                        if m_next == end:
                            m_next, head_next = Int32(begin), head_of_group + 1
                        if visit + 1 < num_visits:
                            # All are done with Q and dO of the visit before, whose stage these take.
                            self.load_queries((m_next, head_next, 1 - stage), work, tensors, scratch[0], shared)
                        # The next visit's Q, dO and statistics; this visit waits for them, at its end.
                        cute.arch.cp_async_commit_group()
                        self.block((n_block, m_block, head_of_group, stage), work, scratch, shared, products, scales)
                        m_block, head_of_group = m_next, head_next
            self.store(n_block, work, tensors, shared, products, scales[0])

    def products(self, mma: cute.TiledMma, shared: Shared) -> Products:
        """This warp's operands and accumulators."""
        config, moved = self.config, [stage * self.stage_bytes for stage in range(STAGES)]
        index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        keys, queries, columns = self.shares(index)
        acc_dV, acc_dK = [
            cute.make_rmem_tensor(mma.partition_shape_C((keys.size, columns.size)), Float32) for _ in range(2)
        ]
        k, q = WarpOperand.a(mma, shared.sK, keys), WarpOperand.b(mma, shared.sQ, queries)
        q_t = WarpOperand.b(mma, shared.sQ, columns, transpose=True)
        # dS passes through this warp's own place for its share of dQ.
        first_piece = index // config.key_warps * (PANEL // COLUMNS // self.column_warps)
        ds, dS_squares = [], []
        for stage in range(STAGES):
            place = shared.sdQ[None, None, None, first_piece, index % config.key_warps, stage]
            sdS = cute.make_tensor(
                shared_pointer(self.dtype, place.iterator.toint(), align=128), tile_layout(config.tile_m, PANEL)
            )
            registers = mma.make_fragment_A(mma.partition_shape_A((config.tile_m, self.keys_per_warp)))
            rows = LaneRow.of(sdS, (Int32(0), Int32(0)), by_rows=True)
            ds.append(WarpOperand(rows, queries.steps, False, self.groups, registers))
            dS_squares.append(LaneRow.of(sdS, (Int32(0), Int32(0)), by_rows=False))
        return Products(
            mma=mma,
            keys=keys,
            queries=queries,
            columns=columns,
            k=k,
            q=tuple(q.twin(distance) for distance in moved),
            v=k.twin(self.V_from_K),
            do=tuple(q.twin(self.dO_from_Q + distance) for distance in moved),
            do_t=tuple(q_t.twin(self.dO_from_Q + distance) for distance in moved),
            q_t=tuple(q_t.twin(distance) for distance in moved),
            ds=tuple(ds),
            k_t=WarpOperand(
                LaneRow.of(shared.sK, (keys.first, columns.first), by_rows=True),
                columns.steps,
                True,
                len(columns.steps),
                mma.make_fragment_B(mma.partition_shape_B((columns.size, keys.size))),
            ),
            dS_squares=tuple(dS_squares),
            acc_dV=acc_dV,
            acc_dK=acc_dK,
        )

    def shares(self, index: Int32) -> tuple:
        """(keys, queries, columns) of a warp."""
        config = self.config
        keys = Share.run(config.tile_n, index % config.key_warps, config.key_warps)
        columns = Share.of_each_panel(self.width, index // config.key_warps, self.column_warps)
        columns = Share(columns.first, tuple(step for step in columns.steps if step < self.head_dim))
        return keys, Share.run(config.tile_m, Int32(0), 1), columns

    @cute.jit
    def block(self, place: tuple, work: Work, scratch: tuple, shared: Shared, products: Products, scales: tuple):
        """One visit: the five products of a query block; place is (key block, query block, head of group, stage)."""
        _, m_block, head_of_group, stage = place
        mma, keys, queries = products.mma, products.keys, products.queries
        acc_S, acc_dP = [
            cute.make_rmem_tensor(mma.partition_shape_C((keys.size, queries.size)), Float32) for _ in range(2)
        ]
        rP, rdS = operand_registers(acc_S, self.dtype), operand_registers(acc_dP, self.dtype)
        acc_S.fill(0.0)
        self.multiply(mma, acc_S, products.k, products.q[stage])
        self.probabilities(acc_S, rP, place, (work, keys), shared, scales)
        # dP starts at -delta, so that the product leaves dP - delta.
        delta = self.statistics(2 * stage + 1, shared)
        dP = as_rows_and_columns(acc_dP)
        for c in cutlass.range_constexpr(cute.size(dP, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(dP, mode=[0])):
                dP[r, c] = -delta[c]
        self.multiply(mma, acc_dP, products.v, products.do[stage])
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            acc_dP[i] = acc_dP[i] * acc_S[i]
        round_to_squares(acc_dP, rdS)

        turn = stage * (self.width // PANEL) % STAGES  # whose place in sdQ is free
        local = Share(keys.first, tuple(range(0, self.keys_per_warp, DEPTH)))
        store_squares(rdS, products.dS_squares[turn], (local, queries), transpose=True)
        self.multiply_registers(mma, products.acc_dV, rP, products.do_t[stage], products.columns.steps)
        self.multiply_registers(mma, products.acc_dK, rdS, products.q_t[stage], products.columns.steps)
        # All lanes have written dS before lanes read what others wrote.
        cute.arch.sync_warp()
        ds = products.ds[turn]
        for i in cutlass.range_constexpr(self.keys_per_warp // DEPTH * ds.num_groups):
            ds.load(i % ds.num_groups, i // ds.num_groups)
        # All lanes have read dS before the warp's share of dQ takes its place.
        cute.arch.sync_warp()
        head, tile = work.head_kv * work.group + head_of_group, work.first_tile + m_block
        accum = scratch_tile(scratch[1], head, tile).iterator
        for panel in cutlass.range_constexpr(self.width // PANEL):
            self.share_dq(panel, (turn + panel) % STAGES, ds, shared, products)
            if const_expr(panel == self.width // PANEL - 1):
                # The next visit's Q, dO and statistics have arrived for this thread; with the barrier, for every one.
                cute.arch.cp_async_wait_group(0)
            # Every warp's share of these columns is in shared memory. Two barriers on it is overwritten.
            cute.arch.sync_threads()
            self.add_to_dq(panel, (turn + panel) % STAGES, accum, shared)

    def multiply(self, mma: cute.TiledMma, acc: cute.Tensor, a: WarpOperand, b: WarpOperand) -> None:
        """acc += A B^T, the depth head_dim."""
        for k_step in range(self.k_steps):
            for i in range(a.num_groups):
                a.load(i, k_step)
            self.multiply_k_step(mma, acc, a.registers[None, None, k_step], b, (k_step, range(b.num_groups)))

    def multiply_registers(
        self, mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: WarpOperand, steps: tuple
    ) -> None:
        """acc += A B^T, A already in registers; steps are those 16s of b's share that acc has."""
        groups = [b.steps.index(step) for step in steps]
        for k_step in range(cute.size(rA, mode=[2])):
            self.multiply_k_step(mma, acc, rA[None, None, k_step], b, (k_step, groups))

    def multiply_k_step(
        self, mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: WarpOperand, place: tuple
    ) -> None:
        """acc += A B^T over one k-step of 16, for some groups of 16 columns of B^T; place: (k-step, groups)."""
        acc_groups = cute.logical_divide(acc, (None, None, 2))  # (MMA, MMA_M, (2, groups))
        b_groups = cute.logical_divide(b.registers, (None, 2, None))  # (MMA, (2, groups), MMA_K)
        k_step, groups = place
        for i, group in enumerate(groups):
            b.load(group, k_step)
            acc_group = acc_groups[None, None, (None, i)]
            cute.gemm(mma, acc_group, rA, b_groups[None, (None, group), k_step], acc_group)

    def statistics(self, number: int, shared: Shared) -> list:
        """LSE in base 2 or delta of this thread's columns of S^T: the number-th tile_m numbers."""
        first = number * self.config.tile_m + cute.arch.lane_idx() % QUAD * 2
        address = shared.statistics.iterator.toint() + first * 4
        pairs = [
            cute.make_tensor(shared_pointer(Float32, address + c * 4, align=8), cute.make_layout((2,))).load()
            for c in range(0, self.config.tile_m, COLUMNS)
        ]
        return [pair[i] for pair in pairs for i in range(2)]

    @cute.jit
    def probabilities(
        self, acc_S: cute.Tensor, rP: cute.Tensor, place: tuple, whose: tuple, shared: Shared, scales: tuple
    ):
        """Turns S^T into P^T, rounded in rP; acc_S becomes what dS is a multiple of: P, times the softcap's slope."""
        (n_block, m_block, _, stage), (work, keys), (_, scale_tanh, scale_log2) = place, whose, scales
        lse = self.statistics(2 * stage, shared)
        if const_expr(self.softcap):
            cap_scores(acc_S, scale_tanh)
        S = as_rows_and_columns(acc_S)
        acc_P = acc_S
        if const_expr(self.softcap):
            acc_P = cute.make_rmem_tensor_like(acc_S)
        P = as_rows_and_columns(acc_P)
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                p = cute.math.exp2(S[r, c] * scale_log2 - lse[c], fastmath=True)
                if const_expr(self.softcap):
                    S[r, c] = 1.0 - S[r, c] * S[r, c]
                P[r, c] = p
        self.mask(acc_P, (m_block * self.config.tile_m, n_block * self.config.tile_n), work, keys)
        if const_expr(self.softcap):
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                acc_S[i] = acc_S[i] * acc_P[i]
        round_to_squares(acc_P, rP)

    @cute.jit
    def mask(self, acc_P: cute.Tensor, origin: tuple, work: Work, keys: Share):
        """Hides the keys that a query does not see; without a mask only the last key block has some, past the end."""
        (query, key), lengths = origin, (work.sequence.seqlen_q, work.sequence.seqlen_k)
        if const_expr(self.causal or self.window):
            hide(acc_P, (query, key + keys.first), lengths, work.bounds)
        else:
            if key + self.config.tile_n > lengths[1]:
                hide(acc_P, (query, key + keys.first), lengths, work.bounds)

    def share_dq(self, panel: int, place: int, ds: WarpOperand, shared: Shared, products: Products) -> None:
        """dQ = dS K of all queries and this warp's keys, 64 columns of it (a half, if two warps share the keys), into
        this warp's place in shared memory."""
        index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first_piece = index // self.config.key_warps * (PANEL // COLUMNS // self.column_warps)
        sdQ = shared.sdQ[None, cute.arch.lane_idx(), None, None, index % self.config.key_warps, place]
        columns = [step for step in products.columns.steps if step // PANEL == panel]
        for first in range(0, len(columns), STEPS_AT_ONCE):
            steps = columns[first : first + STEPS_AT_ONCE]
            shape = products.mma.partition_shape_C((self.config.tile_m, DEPTH * len(steps)))
            acc_dQ = cute.make_rmem_tensor(shape, Float32)
            acc_dQ.fill(0.0)
            self.multiply_registers(products.mma, acc_dQ, ds.registers, products.k_t, steps)
            for n in range(2 * len(steps)):
                for m in range(self.groups):
                    piece = cute.make_tensor(acc_dQ[None, m, n].iterator, cute.make_layout((FLOATS,)))
                    cute.autovec_copy(piece, sixteen_bytes(sdQ[None, m, first_piece + 2 * first + n]))

    @cute.jit
    def add_to_dq(self, panel: cutlass.Constexpr, place: cutlass.Constexpr, accum: cute.Pointer, shared: Shared):
        """Sums the warps' shares of 64 columns and adds them to dQ in global memory; each thread's part lies as the
        accumulators of `convert` do."""
        thread = thread_index_anew()
        index, lane = cute.arch.make_warp_uniform(thread // LANES), thread % LANES
        query_warps, column_warps = self.dq_warps
        groups, pieces = self.groups // query_warps, PANEL // COLUMNS // column_warps
        # Some at a time: the compiler would read the shares of all pieces at once, and spill.
        at_once = min(PIECES_AT_ONCE[self.config.key_warps], pieces * groups)
        for first in cutlass.range(0, pieces * groups, at_once, unroll=1):
            for i in cutlass.range_constexpr(at_once):
                number = first + i
                row = index % query_warps * groups + number % groups
                column = index // query_warps * pieces + number // groups
                # A panel may end in the middle: nobody has multiplied what lies behind.
                if const_expr((panel + 1) * PANEL <= self.head_dim) or panel * PANEL + column * COLUMNS < self.head_dim:
                    total = self.sum_shares(shared.sdQ[None, lane, row, column, None, place])
                    place_of_four = (panel * pieces * groups + number) * self.num_threads + thread
                    add_four(accum + place_of_four * FLOATS, total)

    def sum_shares(self, shares: cute.Tensor) -> list:
        """Four elements of dQ, summed over the warps; shares is (4, key_warps)."""
        total = [Float32(0.0)] * FLOATS
        for w in range(self.config.key_warps):
            share = cute.make_rmem_tensor((FLOATS,), Float32)
            cute.autovec_copy(sixteen_bytes(shares[None, w]), share)
            total = [total[i] + share[i] for i in range(FLOATS)]
        return total

    @cute.jit
    def store(
        self, n_block: Int32, work: Work, tensors: tuple, shared: Shared, products: Products, softmax_scale: Float32
    ):
        """Scales dK, and sends dK and dV through sK and sV, so that whole 128-byte rows go out."""
        mdK, mdV = tensors[4], tensors[5]
        thread, tile_n = thread_index_anew(), self.config.tile_n
        keys, _, columns = self.shares(thread // LANES)
        for i in cutlass.range_constexpr(cute.size(products.acc_dK)):
            products.acc_dK[i] = products.acc_dK[i] * softmax_scale
        # Behind the last visit's barrier every warp is done with K and V.
        for acc, s in ((products.acc_dK, shared.sK), (products.acc_dV, shared.sV)):
            rounded = operand_registers(acc, self.dtype)
            round_to_squares(acc, rounded)
            rows = LaneRow.of(s, (keys.first, columns.first), by_rows=True, lane=thread % LANES)
            store_squares(rounded, rows, (keys, columns), transpose=False)
        # All of dK and dV is in shared memory before threads read what others wrote.
        cute.arch.sync_threads()
        copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads, thread)
        num_rows = work.sequence.seqlen_k - n_block * tile_n
        for m, s in ((mdK, shared.sK), (mdV, shared.sV)):
            g = cute.local_tile(work.sequence.keys(m, work.head_kv), (tile_n, self.width), (n_block, 0))
            copy.store_rows(copy.of_shared(s), copy.of_global(g), num_rows)


def sixteen_bytes(t: cute.Tensor) -> cute.Tensor:
    """Four floats in shared memory, known to be aligned."""
    return cute.make_tensor(shared_pointer(Float32, t.iterator.toint(), align=16), cute.make_layout((FLOATS,)))


def compile_backward(key: KernelKey, options: str = ""):
    """Compiles the kernels of `key` for sm_90a, launched by one call with the arguments of `Backward.__call__`."""
    kernels, dtype, head_dim = Backward(key), DTYPES[key.dtype], key.head_dim
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, num_tiles = (cute.sym_int() for _ in range(6))
    queries, keys = (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim)
    lse, lengths = (heads_q, seqlen_q), None
    if key.sequences == "packed":
        lengths = fake_lengths(cute.sym_int())
    else:
        queries, keys, lse = (batch, *queries), (batch, *keys), (batch, *lse)
    return cute.compile(
        kernels,
        *(fake_sequences(dtype, shape) for shape in (queries, queries, keys, keys, queries)),
        fake_rows(lse),
        fake_rows(lse),
        *(fake_sequences(dtype, shape) for shape in (queries, keys, keys)),
        *kernels.tiles.fake_scratch(heads_q, num_tiles),
        lengths,
        lengths,
        *(Float32(1.0), Float32(1.0)),
        *(Int32(1) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
