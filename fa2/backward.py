"""FA2 backward: one CTA per key block, which recomputes S and P from LSE.

changed since fa1
  - The key blocks are spread over the grid, as the query blocks of the forward are (FA2 3.2). The CTAs of a head meet
    in dQ: they add to it in fp32, in global memory, by atomics; a last kernel rounds the sum.
  - delta = rowsum(dO * O) is computed once, beforehand, not once a visit.
  - Of the statistics P needs one number a row, LSE: P = exp(S - LSE).
  - Blocks that the mask hides are skipped, and of the others only those on its edge are masked.
unchanged
  - S and P are recomputed, the five products, dK and dV in registers; cp.async, ldmatrix, mma.sync.

Three kernels, one after the other:
    prepare   delta and LSE in base 2 of each query, dQ's accumulator cleared (fa_common/query_tiles.py, as convert)
    kernel    S^T = K Q^T   P = exp2(S - LSE)   dP^T = V dO^T   dS = P (dP - delta)   dV += P^T dO   dK += dS^T Q
              dQ = dS K
    convert   dQ, scaled, in the type of Q

S and dP are computed transposed, keys along the rows: P^T and dS^T then are A operands of dV and dK. Time to the right:

    cp.async  | K V Q0 dO0 | Q1 dO1                        | Q2 dO2
    warps     |          A | S0  P0  dP0  dS0 | dV0 dK0 b dQ0 A | S1  P1  ...

A is a barrier of the CTA; b, an mbarrier, waits for the dS of all warps, long since there. `key_warps` warps split
the keys; if others split the queries beside them, P^T and dS^T meet in shared memory, behind a barrier of those alone.

deterministic: dK and dV have one order in any case, one CTA adds up the query heads that share them. For dQ, each key
block waits for its turn at a query block; turns are those of the key blocks. A CTA draws its key block from a counter
when it starts, so whatever it waits for has started: no deadlock. It costs one number a query block, and the waiting,
where a second kernel with queries outer would cost two more products.

shared memory, bytes (16-bit types; width: head_dim, up to whole panels of 64)
    sK, sV     tile_n * width * 2 each          dK and dV leave through them
    sQ, sdO    tile_m * width * 2 * 2 each      two stages
    sdS, sP    tile_m * tile_n * 2 each         sP only if warps split the queries
    statistics tile_m * 8 * 2
registers a thread (d = 128, 64 x 128, 8 warps): dK, dV 128, S 32, dP 32, P 16; dQ 32 where S was
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from fa_common.compile import KernelKey
from fa_common.query_tiles import PREPARE_THREADS, QueryTiles, Turns, dq_shares, scratch_tile
from fa_common.tiles import (
    DTYPES,
    RowCopy,
    Sequence,
    as_rows_and_columns,
    by_rows,
    cap_scores,
    check_shared_memory,
    fake_lengths,
    fake_rows,
    fake_sequences,
    multiply,
    multiply_registers,
    score_scales,
    shared_pointer,
    whole_panels,
)
from fa_common.warp_tiles import (
    LaneRow,
    Share,
    WarpOperand,
    add_four,
    first_key_block,
    four_floats,
    hide,
    is_masked,
    numbers_of_columns,
    operand_registers,
    round_to_squares,
    store_squares,
    thread_index_anew,
    twin_tiles,
    visible_queries,
    warp_mma,
)

THREADS_PER_WARP = 32
STAGES = 2  # of Q and dO: those of the next block travel under the products of this one
# Named barrier FIRST_KEY_BARRIER + g (0 is `__syncthreads`): the num_warps / key_warps warps, 32 threads each, that
# share the g-th part of the keys have written their P and dS.
FIRST_KEY_BARRIER = 1


@dataclass(frozen=True)
class Work:
    """Which keys this CTA has, and which query blocks see them."""

    n_block: Int32
    head_kv: Int32
    group: Int32  # query heads that share them
    sequence: Sequence
    first_tile: Int32  # of the sequence's tiles of queries in scratch memory
    begin: Int32  # query blocks [begin, end) see some of the keys
    end: Int32
    bounds: tuple  # keys seen before and behind a query's own position; None: all


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors; of sQ and statistics the first stage. `Distances` says where sdO and sP are."""

    sQ: cute.Tensor  # (tile_m, width)
    sK: cute.Tensor  # (tile_n, width)
    sV: cute.Tensor  # (tile_n, width)
    sdS: cute.Tensor  # (tile_m, tile_n)
    statistics: cute.Tensor  # LSE in base 2 of tile_m queries, then their delta
    dS_complete: cute.Pointer  # mbarrier; each warp arrives when its part of dS is written


@dataclass(frozen=True)
class Distances:
    """Bytes between tiles that are read alike, known at compile time: one address register serves both."""

    dO_from_Q: int
    V_from_K: int
    P_from_dS: int


@dataclass(frozen=True)
class Shares:
    """What this warp has of each mode."""

    keys: Share  # of S^T, dP^T, dV, dK
    queries: Share  # of S^T, dP^T
    columns: Share  # of dV, dK
    dq_queries: Share
    dq_columns: Share


@dataclass(frozen=True)
class Products:
    """This warp's five products: operands and accumulators, (MMA, MMA_M, MMA_N) fp32."""

    mma: cute.TiledMma
    shares: Shares
    k: WarpOperand  # S^T = K Q^T
    q: WarpOperand
    v: WarpOperand  # dP^T = V dO^T
    do: WarpOperand
    p_t: WarpOperand  # dV = P^T dO; P^T and dS^T are read from shared memory only if warps split the queries
    do_t: WarpOperand
    ds_t: WarpOperand  # dK = dS^T Q
    q_t: WarpOperand
    ds: WarpOperand  # dQ = dS K
    k_t: WarpOperand
    P_squares: LaneRow  # where this warp writes P and dS
    dS_squares: LaneRow
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor


@dataclass(frozen=True)
class Scales:
    """What scores are multiplied by."""

    softmax_scale: Float32
    scale_tanh: Float32  # raw scores to the tanh, with a softcap
    scale_log2: Float32  # scores, or the tanh, to the exponential


class Backward:
    """The kernels for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.config = key.config
        self.dtype = DTYPES[key.dtype]
        self.head_dim = key.head_dim
        self.width = whole_panels(key.head_dim)  # of a tile: head_dim and, where that ends inside a panel, zeros
        self.causal, self.window, self.softcap = key.causal, key.window, key.softcap
        self.deterministic = key.deterministic
        self.num_threads = THREADS_PER_WARP * key.config.num_warps
        packed = key.sequences == "packed"
        self.tiles = QueryTiles(self.dtype, key.head_dim, key.config.tile_m, self.num_threads, packed)
        self.dq_warps = (key.config.query_warps, key.config.num_warps // key.config.query_warps)
        self.stage_bytes = key.config.tile_m * self.width * 2
        self.distances = Distances(
            dO_from_Q=STAGES * self.stage_bytes,
            V_from_K=key.config.tile_n * self.width * 2,
            P_from_dS=key.config.tile_m * key.config.tile_n * 2,
        )
        self.splits_queries = key.config.num_warps > key.config.key_warps

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
        turns: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_seqlen_q: Int32,
        max_seqlen_k: Int32,
        has_dlse: Int32,
        stream,
    ):
        """Q, K, V, O and their gradients (batch, seqlen, heads, head_dim), LSE and its gradient (batch, heads,
        seqlen_q), or packed; has_dlse says whether mdLSE counts. Scratch, by query head and tile of queries: statistics
        2 * tile_m, dq_accum tile_m * width, turns 1, behind the counter of CTAs."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        mdO, mQ, mK, mV, mO, mdQ, mdK, mdV = [by_rows(t) for t in (mdO, mQ, mK, mV, mO, mdQ, mdK, mdV)]
        cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
        batch = mQ.shape[3] if const_expr(cu_seqlens_q is None) else cu_seqlens_q.shape[0] - 1
        mma = warp_mma(self.dtype)
        self.Storage = self.storage_type()
        check_shared_memory(self.Storage.size_in_bytes(), self.config, self.head_dim)
        scale_tanh, scale_log2 = score_scales(softmax_scale, softcap if const_expr(self.softcap) else None)

        grid = (cute.ceil_div(max_seqlen_q, tile_m), mQ.shape[2], batch)
        sequences = (mQ, mK, cu_seqlens)
        self.tiles.prepare((mdO, mO, mLSE, mdLSE), (statistics, dq_accum), sequences, has_dlse).launch(
            grid=grid, block=[PREPARE_THREADS, 1, 1], stream=stream
        )
        self.kernel(
            (mdO, mQ, mK, mV, mdK, mdV, statistics),
            (statistics, dq_accum, turns),
            cu_seqlens,
            mma,
            (softmax_scale, scale_tanh, scale_log2, window_left, window_right),
        ).launch(
            grid=(cute.ceil_div(max_seqlen_k, tile_n), mK.shape[2], batch),
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
        queries, keys, scores = STAGES * tile_m * width, tile_n * width, tile_m * tile_n

        @cute.struct
        class Storage:
            sQ_dO: cute.struct.Align[cute.struct.MemRange[dtype, 2 * queries], 1024]
            sK_V: cute.struct.Align[cute.struct.MemRange[dtype, 2 * keys], 1024]
            sdS_P: cute.struct.Align[cute.struct.MemRange[dtype, scores * (1 + self.splits_queries)], 1024]
            statistics: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * 2 * tile_m], 128]
            dS_complete: cute.struct.MemRange[cutlass.Int64, 1]

        return Storage

    @cute.kernel
    def kernel(self, tensors: tuple, scratch: tuple, cu_seqlens: tuple, mma: cute.TiledMma, numbers: tuple):
        """Sets up shared memory; then all warps load, attend and store together."""
        mQ, mK = tensors[1], tensors[2]
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        shared = self.shared(storage)
        n_block, head_kv, batch = self.place(scratch[2], shared)
        sequence = Sequence.of(mQ, mK, cu_seqlens, batch)
        softmax_scale, scale_tanh, scale_log2, left, right = numbers
        bounds = (left, right) if const_expr(self.window) else (None, 0 if const_expr(self.causal) else None)
        if n_block * self.config.tile_n < sequence.seqlen_k:
            keys = (n_block * self.config.tile_n, self.config.tile_n)
            lengths = (sequence.seqlen_q, sequence.seqlen_k)
            begin, end = visible_queries(keys, self.config.tile_m, lengths, bounds)
            group = mQ.shape[2] // mK.shape[2]
            work = Work(n_block, head_kv, group, sequence, self.tiles.first(sequence), begin, end, bounds)
            self.load(work, tensors, shared)
            scales = Scales(softmax_scale, scale_tanh, scale_log2)
            products = self.attend(work, tensors, scratch, shared, mma, scales)
            self.store(work, tensors, shared, products, softmax_scale)

    @cute.jit
    def shared(self, storage) -> Shared:
        """The tensors in shared memory, and the mbarrier ready for use behind the next barrier of the CTA."""
        shape_Q, shape_K = (self.config.tile_m, self.width), (self.config.tile_n, self.width)
        sQ, _ = twin_tiles(storage.sQ_dO, shape_Q, self.distances.dO_from_Q)
        sK, sV = twin_tiles(storage.sK_V, shape_K, self.distances.V_from_K)
        sdS, _ = twin_tiles(storage.sdS_P, (self.config.tile_m, self.config.tile_n), self.distances.P_from_dS)
        dS_complete = storage.dS_complete.data_ptr()
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(dS_complete, self.config.num_warps)
        # Its first user comes behind the barrier at the top of `attend`'s loop.
        cute.arch.mbarrier_init_fence()
        return Shared(
            sQ=sQ,
            sK=sK,
            sV=sV,
            sdS=sdS,
            statistics=storage.statistics.get_tensor(cute.make_layout((2 * self.config.tile_m,))),
            dS_complete=dS_complete,
        )

    @cute.jit
    def place(self, turns: cute.Tensor | None, shared: Shared) -> tuple:
        """(key block, head of K and V, batch entry) of this CTA."""
        n_block, head_kv, batch = cute.arch.block_idx()
        if const_expr(self.deterministic):
            drawn = Turns(turns).draw(cute.recast_ptr(shared.statistics.iterator, dtype=Int32))
            num_n_blocks, num_heads, _ = cute.arch.grid_dim()
            n_block = drawn % num_n_blocks
            head_kv = drawn // num_n_blocks % num_heads
            batch = drawn // num_n_blocks // num_heads
        return n_block, head_kv, batch

    @cute.jit
    def load(self, work: Work, tensors: tuple, shared: Shared):
        """Starts the copies of K and V, rows past the end zeroed, and of the first block of Q and dO."""
        mK, mV = tensors[2], tensors[3]
        tile_n = self.config.tile_n
        copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads)
        num_rows = work.sequence.seqlen_k - work.n_block * tile_n
        for m, s in ((mK, shared.sK), (mV, shared.sV)):
            g = cute.local_tile(work.sequence.keys(m, work.head_kv), (tile_n, self.width), (work.n_block, 0))
            copy.load_rows(copy.of_global(g), copy.of_shared(s), num_rows)
        if work.end > work.begin:
            self.load_queries((self.first_block(work), Int32(0), Int32(0)), work, tensors, shared)
        # K, V and the first block of Q and dO are one group; the first `block` waits for it.
        cute.arch.cp_async_commit_group()

    def first_block(self, work: Work) -> Int32:
        """Where the walk over the query blocks begins: each key block elsewhere, lest all add to one part of dQ."""
        if self.deterministic or not self.config.stagger:
            return work.begin
        return work.begin + work.n_block % cutlass.max(work.end - work.begin, 1)

    @cute.jit
    def load_queries(self, place: tuple, work: Work, tensors: tuple, shared: Shared):
        """Starts the copies of a block of Q, dO and its statistics; place is (query block, head of group, stage)."""
        mdO, mQ, statistics = tensors[0], tensors[1], tensors[6]
        m_block, head_of_group, stage = place
        tile_m, head = self.config.tile_m, work.head_kv * work.group + head_of_group
        copy = RowCopy.of(self.dtype, tile_m, self.head_dim, self.num_threads)
        num_rows = work.sequence.seqlen_q - m_block * tile_m
        tsQsQ = copy.of_shared(shared.sQ)
        for m, distance in ((mQ, 0), (mdO, self.distances.dO_from_Q)):
            g = cute.local_tile(work.sequence.queries(m, head), (tile_m, self.width), (m_block, 0))
            tgg, tss = copy.of_global(g), tsQsQ
            address = tsQsQ.iterator.toint() + stage * self.stage_bytes + distance
            tss = cute.make_tensor(shared_pointer(self.dtype, address, align=16), tss.layout)
            if num_rows >= tile_m:
                copy.load(tgg, tss)
            else:
                copy.load_rows(tgg, tss, num_rows)
        thread = cute.arch.thread_idx()[0]
        if thread < 2 * tile_m // 4:
            source = four_floats(scratch_tile(statistics, head, work.first_tile + m_block).iterator + thread * 4)
            address = shared.statistics.iterator.toint() + (stage * 2 * tile_m + thread * 4) * 4
            target = cute.make_tensor(shared_pointer(Float32, address, align=16), cute.make_layout((4,)))
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
            )
            cute.copy(atom, source, target)

    @cute.jit
    def attend(self, work: Work, tensors: tuple, scratch: tuple, shared: Shared, mma: cute.TiledMma, scales: Scales):
        """The CTA's keys against every query block that sees them, of each head of the group. Returns dK and dV."""
        products = self.products(mma, shared)
        m_block, head_of_group, first = self.first_block(work), Int32(0), self.first_block(work)
        num_blocks = (work.end - work.begin) * work.group
        for i in cutlass.range(num_blocks, unroll=1):
            m_next = m_block + 1
            if m_next == work.end:
                m_next = work.begin
            head_next = head_of_group + 1 if m_next == first else head_of_group
            stage = i % STAGES
            # Q, dO and statistics of this block have arrived for every thread; every warp is done with the block
            # before it, whose stage, P and dS are written next.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if i + 1 < num_blocks:
                self.load_queries((m_next, head_next, 1 - stage), work, tensors, shared)
            # The next block of Q and dO; its turn of this loop waits for it.
            cute.arch.cp_async_commit_group()
            self.block((m_block, head_of_group, stage), i % 2, work, scratch, shared, products, scales)
            m_block, head_of_group = m_next, head_next
        return products

    def products(self, mma: cute.TiledMma, shared: Shared) -> Products:
        """This warp's operands and accumulators."""
        shares = self.shares(cute.arch.make_warp_uniform(cute.arch.warp_idx()))
        acc_dV, acc_dK = [
            cute.make_rmem_tensor(mma.partition_shape_C((shares.keys.size, shares.columns.size)), Float32)
            for _ in range(2)
        ]
        acc_dV.fill(0.0)
        acc_dK.fill(0.0)
        k, q = WarpOperand.a(mma, shared.sK, shares.keys), WarpOperand.b(mma, shared.sQ, shares.queries)
        q_t = WarpOperand.b(mma, shared.sQ, shares.columns, transpose=True)
        # P and dS are stored with queries as rows.
        dS_squares = LaneRow.of(shared.sdS, (shares.queries.first, shares.keys.first), by_rows=False)
        ds_t = WarpOperand.a(mma, shared.sdS, shares.keys, transpose=True)
        return Products(
            mma=mma,
            shares=shares,
            k=k,
            q=q,
            v=k.twin(self.distances.V_from_K),
            do=q.twin(self.distances.dO_from_Q),
            p_t=ds_t.twin(self.distances.P_from_dS),
            do_t=q_t.twin(self.distances.dO_from_Q),
            ds_t=ds_t,
            q_t=q_t,
            ds=WarpOperand.a(mma, shared.sdS, shares.dq_queries),
            k_t=WarpOperand.b(mma, shared.sK, shares.dq_columns, transpose=True),
            P_squares=dS_squares.twin(self.distances.P_from_dS),
            dS_squares=dS_squares,
            acc_dV=acc_dV,
            acc_dK=acc_dK,
        )

    def shares(self, index: Int32) -> Shares:
        """Of a warp: keys by index mod key_warps, queries of S^T and columns of dK and dV by the rest; so for dQ."""
        config = self.config
        others = config.num_warps // config.key_warps
        dq_queries, dq_columns = dq_shares(config.tile_m, self.width, self.dq_warps)
        return Shares(
            keys=Share.run(config.tile_n, index % config.key_warps, config.key_warps),
            queries=Share.run(config.tile_m, index // config.key_warps, others),
            columns=Share.of_each_panel(self.width, index // config.key_warps, others),
            dq_queries=dq_queries,
            dq_columns=dq_columns,
        )

    @cute.jit
    def block(
        self,
        place: tuple,
        phase: Int32,
        work: Work,
        scratch: tuple,
        shared: Shared,
        products: Products,
        scales: Scales,
    ):
        """The five products of one query block."""
        m_block, _, stage = place
        mma, shares, moved = products.mma, products.shares, stage * self.stage_bytes
        acc_S, acc_dP = [
            cute.make_rmem_tensor(mma.partition_shape_C((shares.keys.size, shares.queries.size)), Float32)
            for _ in range(2)
        ]
        rP, rdS = operand_registers(acc_S, self.dtype), operand_registers(acc_dP, self.dtype)
        acc_S.fill(0.0)
        multiply(mma, acc_S, products.k, products.q.shifted(moved))
        lse = numbers_of_columns(shared.statistics, stage * 2 * self.config.tile_m, shares.queries)
        self.probabilities(acc_S, rP, lse, m_block, (work, shares), scales)
        if const_expr(self.splits_queries):
            store_squares(rP, products.P_squares, (shares.keys, shares.queries), transpose=True)
        # dP starts at -delta, so that the product leaves dP - delta.
        delta = numbers_of_columns(shared.statistics, (stage * 2 + 1) * self.config.tile_m, shares.queries)
        dP = as_rows_and_columns(acc_dP)
        for c in cutlass.range_constexpr(cute.size(dP, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(dP, mode=[0])):
                dP[r, c] = -delta[c]
        multiply(mma, acc_dP, products.v, products.do.shifted(moved))
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            acc_dP[i] = acc_dP[i] * acc_S[i]
        round_to_squares(acc_dP, rdS)
        store_squares(rdS, products.dS_squares, (shares.keys, shares.queries), transpose=True)
        self.announce(shared)

        if const_expr(self.splits_queries):
            multiply(mma, products.acc_dV, products.p_t, products.do_t.shifted(moved))
            multiply(mma, products.acc_dK, products.ds_t, products.q_t.shifted(moved))
        else:
            multiply_registers(mma, products.acc_dV, rP, products.do_t.shifted(moved))
            multiply_registers(mma, products.acc_dK, rdS, products.q_t.shifted(moved))
        # Every warp has written its part of dS.
        cute.arch.mbarrier_wait(shared.dS_complete, phase)
        acc_dQ = cute.make_rmem_tensor(mma.partition_shape_C((shares.dq_queries.size, shares.dq_columns.size)), Float32)
        acc_dQ.fill(0.0)
        multiply(mma, acc_dQ, products.ds, products.k_t)
        self.add_to_dq(acc_dQ, place, work, scratch)

    @cute.jit
    def probabilities(
        self, acc_S: cute.Tensor, rP: cute.Tensor, lse: list, m_block: Int32, whose: tuple, scales: Scales
    ):
        """Turns S^T into P^T, rounded in rP; acc_S becomes what dS is a multiple of: P, times the softcap's slope."""
        work, shares = whose
        if const_expr(self.softcap):
            cap_scores(acc_S, scales.scale_tanh)
        S = as_rows_and_columns(acc_S)
        acc_P = acc_S
        if const_expr(self.softcap):
            acc_P = cute.make_rmem_tensor_like(acc_S)
        P = as_rows_and_columns(acc_P)
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
                p = cute.math.exp2(S[r, c] * scales.scale_log2 - lse[c], fastmath=True)
                if const_expr(self.softcap):
                    S[r, c] = 1.0 - S[r, c] * S[r, c]
                P[r, c] = p
        query, key = m_block * self.config.tile_m, work.n_block * self.config.tile_n
        lengths = (work.sequence.seqlen_q, work.sequence.seqlen_k)
        if is_masked((query, key), (self.config.tile_m, self.config.tile_n), lengths, work.bounds):
            hide(acc_P, (query + shares.queries.first, key + shares.keys.first), lengths, work.bounds)
        if const_expr(self.softcap):
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                acc_S[i] = acc_S[i] * acc_P[i]
        round_to_squares(acc_P, rP)

    @cute.jit
    def announce(self, shared: Shared):
        """This warp's part of dS is written: for its partners of the same keys, and for all warps."""
        # All lanes have written theirs.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            # For dQ, which every warp multiplies from all of dS.
            cute.arch.mbarrier_arrive(shared.dS_complete)
        if const_expr(self.splits_queries):
            config = self.config
            # The warps that share these keys have written all of their P and dS, for dV and dK.
            cute.arch.barrier(
                barrier_id=FIRST_KEY_BARRIER + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % config.key_warps,
                number_of_threads=THREADS_PER_WARP * (config.num_warps // config.key_warps),
            )

    @cute.jit
    def add_to_dq(self, acc_dQ: cute.Tensor, place: tuple, work: Work, scratch: tuple):
        """Adds a block's dQ to the sum of all key blocks; each thread's share lies as its accumulator does."""
        statistics, dq_accum, turns = scratch
        m_block, head_of_group, _ = place
        head, tile = work.head_kv * work.group + head_of_group, work.first_tile + m_block
        turn_tile = head * statistics.shape[1] + tile
        if const_expr(self.deterministic):
            lengths = (work.sequence.seqlen_q, work.sequence.seqlen_k)
            first = first_key_block(m_block * self.config.tile_m, self.config.tile_n, lengths, work.bounds)
            Turns(turns).wait(turn_tile, work.n_block - first)
        accum = scratch_tile(dq_accum, head, tile).iterator + cute.arch.thread_idx()[0] * 4
        for i in cutlass.range_constexpr(cute.size(acc_dQ) // 4):
            add_four(accum + i * self.num_threads * 4, [acc_dQ[4 * i + j] for j in range(4)])
        if const_expr(self.deterministic):
            Turns(turns).pass_on(turn_tile)

    @cute.jit
    def store(self, work: Work, tensors: tuple, shared: Shared, products: Products, softmax_scale: Float32):
        """Scales dK, and sends dK and dV through sK and sV, so that whole 128-byte rows go out."""
        mdK, mdV = tensors[4], tensors[5]
        thread = thread_index_anew()  # without: 8 B spilled across the loop
        tile_n, shares = self.config.tile_n, self.shares(thread // THREADS_PER_WARP)
        first = (shares.keys.first, shares.columns.first)
        for i in cutlass.range_constexpr(cute.size(products.acc_dK)):
            products.acc_dK[i] = products.acc_dK[i] * softmax_scale
        # Every copy has arrived, also where no query block came, and every warp is done with K and V.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for acc, s in ((products.acc_dK, shared.sK), (products.acc_dV, shared.sV)):
            rounded = operand_registers(acc, self.dtype)
            round_to_squares(acc, rounded)
            rows = LaneRow.of(s, first, by_rows=True, lane=thread % THREADS_PER_WARP)
            store_squares(rounded, rows, (shares.keys, shares.columns), transpose=False)
        # All of dK and dV is in shared memory before threads read what others wrote.
        cute.arch.sync_threads()
        copy = RowCopy.of(self.dtype, tile_n, self.head_dim, self.num_threads, thread)
        num_rows = work.sequence.seqlen_k - work.n_block * tile_n
        for m, s in ((mdK, shared.sK), (mdV, shared.sV)):
            g = cute.local_tile(work.sequence.keys(m, work.head_kv), (tile_n, self.width), (work.n_block, 0))
            copy.store_rows(copy.of_shared(s), copy.of_global(g), num_rows)


def compile_backward(key: KernelKey, options: str = ""):
    """Compiles the kernels of `key` for sm_90a, launched by one call with the arguments of `Backward.__call__`."""
    kernels, dtype, head_dim = Backward(key), DTYPES[key.dtype], key.head_dim
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, num_tiles = (cute.sym_int() for _ in range(6))
    queries, keys, lse = (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, head_dim), (heads_q, seqlen_q)
    lengths = fake_lengths(cute.sym_int())
    if key.sequences != "packed":
        queries, keys, lse, lengths = (batch, *queries), (batch, *keys), (batch, *lse), None
    return cute.compile(
        kernels,
        *(fake_sequences(dtype, shape) for shape in (queries, queries, keys, keys, queries)),
        fake_rows(lse),
        fake_rows(lse),
        *(fake_sequences(dtype, shape) for shape in (queries, keys, keys)),
        *kernels.tiles.fake_scratch(heads_q, num_tiles),
        fake_lengths(cute.sym_int()) if key.deterministic else None,
        lengths,
        lengths,
        *(Float32(1.0), Float32(1.0)),
        *(Int32(1) for _ in range(5)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )
