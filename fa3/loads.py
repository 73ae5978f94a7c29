"""How blocks of Q, K and V travel from global to shared memory: by TMA, or row by row with cp.async.

TMA copies boxes of a tensor whose size its descriptor fixes at launch: rows past the tensor's end become zeros in
shared memory, and are not stored. A sequence inside a packed tensor, or the used part of a cache, ends earlier than its
tensor: what follows is another sequence's, or garbage that may be NaN, and 0 * NaN is NaN. So such a tensor is
described with one mode more, `last`, that steps by rows as well:

    address = base - rows * stride + row' * stride + last * stride
    row'    = rows - length + row        last = offset + length

Row `row` of a sequence of `length` rows from `offset` on lies at base + (offset + row) * stride, as it should; and
row' reaches the tensor's end exactly where the sequence ends. A box must not lie wholly behind that end: TMA then
faults (seen on an H200; it seems to look up the moved base). Hence an empty sequence is taken to have one row, and of a
cluster, whose CTAs load half a block each, no CTA loads a half without rows.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fa3.config import Config
from fa3.products import ROWS
from fa3.scheduler import NUM_PLACES, Tile, Work
from fa3.sync import THREADS_PER_WARPGROUP, NamedBarrier, Pipes
from fa_common.tiles import KeyBlocks

BOTH_CTAS = 0b11  # of a cluster, a bit each: a copy reaches both


@dataclass(frozen=True)
class Shared:
    """Shared-memory tensors; the last mode counts warpgroups (sQ, sP), places of O, or stages (sK, sV)."""

    sQ: cute.Tensor  # (64, width, warpgroups)
    sK: cute.Tensor  # (tile_n, width, stages)
    sV: cute.Tensor  # (width, tile_n, stages): V^T, as P V wants its B operand
    sV_rows: cute.Tensor | None  # (tile_n, width, stages): the same memory as TMA fills it, if V^T is made from it
    sP: cute.Tensor | None  # (64, tile_n, warpgroups), unless p_in_registers
    sO: cute.Tensor  # (64, columns, warpgroups * places): sQ's memory, once Q is done with, unless epilogue_overlap

    @staticmethod
    def of(storage, layouts: tuple, owns_O: bool, turns_values: bool) -> "Shared":
        layout_Q, layout_K, layout_V, layout_P, layout_O = layouts
        memory_O = storage.sO.data_ptr() if owns_O else storage.sQ.data_ptr()
        sV, sV_rows = storage.sV.get_tensor(layout_V.outer, swizzle=layout_V.inner), None
        if turns_values:
            sV_rows = storage.sV.get_tensor(layout_K.outer, swizzle=layout_K.inner)
        return Shared(
            sQ=storage.sQ.get_tensor(layout_Q.outer, swizzle=layout_Q.inner),
            sK=storage.sK.get_tensor(layout_K.outer, swizzle=layout_K.inner),
            sV=sV,
            sV_rows=sV_rows,
            sP=None if layout_P is None else storage.sP.get_tensor(layout_P.outer, swizzle=layout_P.inner),
            sO=cute.make_tensor(cute.recast_ptr(memory_O, layout_O.inner), layout_O.outer),
        )


def storage_type(config: Config, dtypes: tuple, layouts: tuple, owns_O: bool, turns_values: bool) -> type:
    """A CTA's shared memory; dtypes are those of Q, K, V and P, and of O."""
    dtype, dtype_O = dtypes
    layout_Q, layout_K, layout_V, layout_P, layout_O = layouts
    size_of_P = 0 if layout_P is None else cute.cosize(layout_P)
    size_of_O = cute.cosize(layout_O) if owns_O else 0

    @cute.struct
    class Storage:
        q_barriers: cute.struct.MemRange[Int64, 2 * config.num_consumer_warpgroups]
        k_barriers: cute.struct.MemRange[Int64, 2 * config.stages]
        v_barriers: cute.struct.MemRange[Int64, 2 * config.stages]
        transposed_barriers: cute.struct.MemRange[Int64, 2 * config.stages if turns_values else 0]
        ring_barriers: cute.struct.MemRange[Int64, 2 * NUM_PLACES]
        ring: cute.struct.MemRange[Int32, NUM_PLACES]
        # 128-byte swizzle atoms repeat every 1024 bytes.
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_Q)], 1024]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_K)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_V)], 1024]
        sP: cute.struct.Align[cute.struct.MemRange[dtype, size_of_P], 1024]
        sO: cute.struct.Align[cute.struct.MemRange[dtype_O, size_of_O], 1024]

    return Storage


def tma_atom(op, tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple, num_multicast: int = 1) -> tuple:
    """(atom, tensor of coordinates) of copies of `tile` between global memory and one stage of `layout`."""
    return cpasync.make_tiled_tma_atom(op, tensor, cute.select(layout, mode=[0, 1]), tile, num_multicast=num_multicast)


def with_fours(mK: cute.Tensor) -> cute.Tensor:
    """(rows, head_dim, heads, batch) with its rows, a multiple of 4, as (4, rows / 4)."""
    rows, stride = mK.shape[0], mK.stride[0]
    layout = cute.make_layout(((4, rows // 4), *mK.shape[1:]), stride=((stride, 4 * stride), *mK.stride[1:]))
    return cute.make_tensor(mK.iterator, layout)


def half_of_keys(layout_K: cute.ComposedLayout, tile_n: int, width: int) -> tuple:
    """(layout, tile) of a TMA box that has two of every four keys of a block: half the rows of a stage of sK."""
    half = cute.composition(layout_K.outer, (tile_n // 2, width))
    return cute.make_composed_layout(layout_K.inner, layout_K.offset, half), ((2, tile_n // 4), width)


def halves_of_keys(sK: cute.Tensor, gK: cute.Tensor, tile_n: int) -> list:
    """Both boxes of a block, (rows of sK, blocks of K): keys 4i and 4i + 1 lie before all keys 4i + 2 and 4i + 3.

    gK is ((4, rows / 4), head_dim). So P's columns come out in the order of V's keys: see e4m3.py.
    """
    width = cute.size(sK, mode=[1])
    return [
        (
            cute.local_tile(sK, (tile_n // 2, width), (half, 0, None)),
            cute.local_tile(gK, ((2, tile_n // 4), width), ((half, None), 0)),
        )
        for half in range(2)
    ]


def with_moving_end(t: cute.Tensor) -> cute.Tensor:
    """(rows, head_dim, heads[, batch]) as (rows, head_dim, heads, (rows + 1[, batch])), its base moved (see above)."""
    rows, stride = t.shape[0], t.stride[0]
    moved = t.iterator.toint() - Int64(rows) * stride * (t.element_type.width // 8)
    pointer = cute.make_ptr(t.element_type, moved, cute.AddressSpace.gmem, assumed_align=16)
    last, step = rows + 1, stride
    if cute.rank(t) == 4:
        last, step = (last, t.shape[3]), (step, t.stride[3])
    layout = cute.make_layout((*t.shape[:3], last), stride=(*t.stride[:3], step))
    return cute.make_tensor(pointer, layout)


def sequences_of_q(sequences: str) -> str:
    """How Q's and O's sequences lie: a cache's lengths are those of K and V alone."""
    return "packed" if sequences == "packed" else "dense"


def rows_of(mT: cute.Tensor, sequences: str, head: Int32, batch: Int32, rows: tuple, rows_mode: int = 0) -> cute.Tensor:
    """The (rows, head_dim) coordinates of one sequence and head; `rows` is its (offset, length) in mT.

    mT is a TMA tensor, made `with_moving_end` unless `sequences` is "dense". V^T has its rows in mode 1.
    """
    if sequences == "dense":
        return mT[None, None, head, batch]
    total, (offset, length) = mT.shape[rows_mode], rows
    offset, length = cutlass.min(offset, total - 1), cutlass.max(length, 1)
    last = (offset + length, batch) if sequences == "cached" else offset + length
    before = total - length
    return cute.domain_offset((before, 0) if rows_mode == 0 else (0, before), mT[None, None, head, last])


@dataclass(frozen=True)
class RowGather:
    """Copies rows that lie anywhere, 16 bytes at a time, into a swizzled tile: cp.async by all of `num_threads`.

    The query heads that share a K/V head (pack_gqa) make rows of one tile that no single TMA box holds.
    """

    atom: cute.CopyAtom
    thread: cute.TiledCopy
    pieces: cute.Tensor  # coordinates (row, column) of this thread's pieces, (16 B, rows, columns)
    rows_at_once: int  # by all threads

    @staticmethod
    def of(dtype: type, tile: tuple, num_threads: int, thread_index: Int32) -> "RowGather":
        """For a tile of (rows, columns), columns a multiple of 32."""
        piece = 128 // dtype.width  # elements of 16 bytes
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
        )
        across = next(n for n in (8, 4, 2) if tile[1] % (n * piece) == 0)  # threads along a row, 16 bytes each
        thread = cute.make_tiled_copy_tv(
            atom, cute.make_ordered_layout((num_threads // across, across), order=(1, 0)), cute.make_layout((1, piece))
        ).get_slice(thread_index)
        return RowGather(atom, thread, thread.partition_S(cute.make_identity_tensor(tile)), num_threads // across)

    @cute.jit
    def load(self, mT: cute.Tensor, coordinate_of, num_columns: cutlass.Constexpr, s: cute.Tensor):
        """Starts copying into `s`, (rows, columns). `coordinate_of(row)` is whether the row exists, and its place
        in mT, (row, head[, batch]); rows and columns that do not exist become zeros."""
        tSs = self.thread.partition_D(s)
        num_rows = cute.size(s, mode=[0])
        for i in cutlass.range_constexpr(cute.size(self.pieces, mode=[1])):
            row_of_tile = self.pieces[0, i, 0][0]
            exists, (row, *head_and_batch) = coordinate_of(row_of_tile)
            # Threads that do not divide the rows evenly reach past the tile in the end.
            if const_expr(num_rows % self.rows_at_once == 0) or row_of_tile < num_rows:
                for c in cutlass.range_constexpr(cute.size(self.pieces, mode=[2])):
                    column = self.pieces[0, i, c][1]
                    if exists & (column < num_columns):
                        piece = mT.iterator + mT.layout((row, column, *head_and_batch))
                        source = cute.make_tensor(
                            cute.make_ptr(mT.element_type, piece.toint(), cute.AddressSpace.gmem, assumed_align=16),
                            tSs[None, i, c].layout,
                        )
                        cute.copy(self.atom, source, tSs[None, i, c])
                    else:
                        tSs[None, i, c].fill(0)


@cute.jit
def gather_queries(work: Work, tile: Tile, share: tuple, mQ: cute.Tensor, sQ: cute.Tensor):
    """A warpgroup's 64 rows of Q by its own threads: without TMA, or a K/V head's query heads side by side.

    `share` is (warpgroup, first row).
    """
    warpgroup, first_row = share
    thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
    gather = RowGather.of(sQ.element_type, (ROWS, cute.size(sQ, mode=[1])), THREADS_PER_WARPGROUP, thread)

    def place_of(row: Int32) -> tuple:
        return work.place_of(tile, first_row + row)

    # All four warps have done with the rows of the tile before.
    barrier = NamedBarrier.ROWS + warpgroup
    cute.arch.barrier(barrier_id=barrier, number_of_threads=THREADS_PER_WARPGROUP)
    gather.load(mQ, place_of, mQ.shape[1], sQ)
    cute.arch.cp_async_commit_group()
    # Each thread's own copies have arrived and are visible to WGMMA; then those of all four warps.
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=THREADS_PER_WARPGROUP)


@dataclass(frozen=True)
class TmaLoads:
    """One tile's loads by TMA, for one warp: each call waits for the stage and starts a copy."""

    config: Config
    pipes: Pipes
    atoms: tuple  # of Q (None with pack_gqa), K, V
    queries: tuple | None  # (TMA, warpgroups) of sQ, (TMA, m_blocks of 64) of Q
    keys: list  # of each box of a block (TMA, stages) of sK and (TMA, n_blocks) of K
    values: list
    rows_q: tuple  # (first, last) block of 64 rows of the tile, of the sequence
    halves: "Halves | None"  # of a cluster and a moving end

    @staticmethod
    def of(work: Work, tile: Tile, atoms: tuple, tensors: tuple, shared: Shared, pipes: Pipes) -> "TmaLoads":
        config, sequences = work.facts.config, work.facts.sequences
        (mQ, mK, mV), (tma_Q, tma_K, tma_V) = tensors, atoms
        width, tile_n = work.facts.width, config.tile_n
        rank, cluster_size = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()), work.facts.cluster_size
        of_keys = (sequences, work.head_kv(tile), tile.batch, (tile.offset_k, tile.seqlen_k))
        gK = rows_of(mK, *of_keys)
        if const_expr(work.facts.v_by_columns):
            boxes_K = halves_of_keys(shared.sK, gK, tile_n)
        else:
            boxes_K = [(shared.sK, cute.local_tile(gK, (tile_n, width), (None, 0)))]
        if const_expr(work.facts.turns_values):
            sV, gV = shared.sV_rows, cute.local_tile(rows_of(mV, *of_keys), (tile_n, width), (None, 0))
        else:
            sV, gV = shared.sV, cute.local_tile(rows_of(mV, *of_keys, rows_mode=1), (width, tile_n), (0, None))
        queries = None
        if const_expr(tma_Q is not None):
            of_queries = (sequences_of_q(sequences), tile.head, tile.batch, (tile.offset_q, tile.seqlen_q))
            gQ = cute.local_tile(rows_of(mQ, *of_queries), (ROWS, width), (None, 0))
            queries = tma_partition(tma_Q, shared.sQ, gQ)
        num_warpgroups, halves = config.num_consumer_warpgroups, None
        if const_expr(config.cluster and sequences != "dense"):
            halves = Halves(
                num_blocks=cute.ceil_div(cutlass.max(tile.seqlen_k - rank * (tile_n // 2), 0), tile_n),
                first_of_keys=tma_partition(tma_K, *boxes_K[0], 0, cluster_size)[1],
                first_of_values=tma_partition(tma_V, sV, gV, 0, cluster_size)[1],
            )
        return TmaLoads(
            config,
            pipes,
            atoms,
            queries,
            keys=[tma_partition(tma_K, s, g, rank, cluster_size) for s, g in boxes_K],
            values=[tma_partition(tma_V, sV, gV, rank, cluster_size)],
            rows_q=(tile.m_block * num_warpgroups, cute.ceil_div(tile.seqlen_q, ROWS) - 1),
            halves=halves,
        )

    @cute.jit
    def load_q(self, phase: Int32):
        """64 rows for each consumer warpgroup, as soon as it has done with those of the tile before."""
        if const_expr(self.queries is not None):
            (tQsQ, tQgQ), (first, last) = self.queries, self.rows_q
            for w in cutlass.range_constexpr(self.config.num_consumer_warpgroups):
                state = self.pipes.q_state(w, phase)
                # Warpgroup w has released its rows; the full barrier is told how many bytes to expect.
                self.pipes.q.producer_acquire(state)
                # A warpgroup that has no row takes others' and stores nothing: no box lies wholly behind a moving end.
                source, full = tQgQ[None, cutlass.min(first + w, last)], self.pipes.q.producer_get_barrier(state)
                cute.copy(self.atoms[0], source, tQsQ[None, w], tma_bar_ptr=full)

    def load_k(self, n_block: Int32, state: pipeline.PipelineState) -> None:
        first = None if self.halves is None else self.halves.first_of_keys
        self.load_block(self.pipes.k, self.atoms[1], self.keys, first, n_block, state)

    def load_v(self, n_block: Int32, state: pipeline.PipelineState) -> None:
        first = None if self.halves is None else self.halves.first_of_values
        self.load_block(self.pipes.v, self.atoms[2], self.values, first, n_block, state)

    def load_block(self, pipe, atom: cute.CopyAtom, boxes: list, first, n_block: Int32, state) -> None:
        """A key block, or of a cluster this CTA's half of it into every CTA; `first`: the block's first half."""
        # Every consumer warp has released what this stage held; the full barrier is told how many bytes to expect.
        pipe.producer_acquire(state)
        multicast = {"mcast_mask": Int16(BOTH_CTAS)} if self.config.cluster else {}
        full = pipe.producer_get_barrier(state)
        # All boxes of a block count down the same barrier, which expects the bytes of the whole stage.
        for smem, gmem in boxes:
            if first is None:
                cute.copy(atom, gmem[None, n_block], smem[None, state.index], tma_bar_ptr=full, **multicast)
            else:
                self.halves.copy(atom, (gmem, first), n_block, smem[None, state.index], full)


@dataclass(frozen=True)
class Halves:
    """What a CTA of a cluster loads of the last block of a moving end, which may hold no key of its half: the first
    half's keys once more, which the mask hides there."""

    num_blocks: Int32  # of the sequence, in which this CTA's half has a key
    first_of_keys: cute.Tensor  # (TMA, n_blocks) of K, as the other CTA loads it
    first_of_values: cute.Tensor

    @cute.jit
    def copy(self, atom: cute.CopyAtom, sources: tuple, n_block: Int32, smem: cute.Tensor, full: cute.Pointer):
        own, first = sources
        if n_block < self.num_blocks:
            cute.copy(atom, own[None, n_block], smem, tma_bar_ptr=full, mcast_mask=Int16(BOTH_CTAS))
        else:
            cute.copy(atom, first[None, n_block], smem, tma_bar_ptr=full, mcast_mask=Int16(BOTH_CTAS))


def tma_partition(atom: cute.CopyAtom, s: cute.Tensor, g: cute.Tensor, rank: Int32 = 0, num_ctas: int = 1) -> tuple:
    """Both sides of a TMA copy as (TMA, tiles); CTA `rank` of `num_ctas` copies its part."""
    return cpasync.tma_partition(
        atom, rank, cute.make_layout(num_ctas), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
    )


@dataclass(frozen=True)
class CpAsyncLoads:
    """One tile's K and V by cp.async (tma off), for all threads that load; each warpgroup gathers its own Q."""

    gather: RowGather
    pipes: Pipes
    tensors: tuple  # K (rows, head_dim, heads[, batch]), V^T (head_dim, rows, ...)
    shared: Shared
    tile: Tile
    place: tuple  # (head[, batch]) of K and V
    head_dim: int

    @staticmethod
    def of(work: Work, tile: Tile, tensors: tuple, shared: Shared, pipes: Pipes, threads: tuple) -> "CpAsyncLoads":
        """`threads` is (this one, how many load)."""
        sK, (_, mK, mV) = shared.sK, tensors
        thread, num_threads = threads
        gather = RowGather.of(sK.element_type, (cute.size(sK, mode=[0]), cute.size(sK, mode=[1])), num_threads, thread)
        batch = (tile.batch,) if work.facts.sequences != "packed" else ()
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, *range(2, cute.rank(mV))]))
        return CpAsyncLoads(gather, pipes, (mK, mV), shared, tile, (work.head_kv(tile), *batch), mK.shape[1])

    def load_q(self, phase: Int32) -> None:
        """Nothing: see gather_queries."""

    def load_k(self, n_block: Int32, state: pipeline.PipelineState) -> None:
        self.load_block(self.pipes.k, self.tensors[0], self.shared.sK[None, None, state.index], n_block, state)

    def load_v(self, n_block: Int32, state: pipeline.PipelineState) -> None:
        sVt = self.shared.sV[None, None, state.index]
        sV = cute.make_tensor(sVt.iterator, cute.select(sVt.layout, mode=[1, 0]))
        self.load_block(self.pipes.v, self.tensors[1], sV, n_block, state)

    def load_block(self, pipe, mT: cute.Tensor, s: cute.Tensor, n_block: Int32, state) -> None:
        tile, first = self.tile, n_block * cute.size(s, mode=[0])

        def place_of(row: Int32) -> tuple:
            return first + row < tile.seqlen_k, (tile.offset_k + first + row, *self.place)

        # Every consumer has released what this stage held.
        pipe.producer_acquire(state)
        self.gather.load(mT, place_of, self.head_dim, s)
        # The full barrier counts this thread in once its copies so far have landed.
        pipe.producer_commit(state)


# ---- Without a producer: the computing warps load (warp_specialized off)


@cute.jit
def load_first(config: cutlass.Constexpr, loads: TmaLoads | CpAsyncLoads | None, blocks: KeyBlocks, q_phase: Int32):
    """Q, a block of K for each stage, and of V for each but one, which `load_ahead` fills.

    Returns how far K and V are loaded.
    """
    k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    if const_expr(not config.warp_specialized):
        is_loading = const_expr(not config.tma) or cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        if is_loading:
            loads.load_q(q_phase ^ 1)
        for i in cutlass.range_constexpr(config.stages):
            n_block = blocks.end - 1 - i
            if n_block >= blocks.begin:
                if is_loading:
                    loads.load_k(n_block, k_state)
                k_state.advance()
                if const_expr(i < config.stages - 1):
                    if is_loading:
                        loads.load_v(n_block, v_state)
                    v_state.advance()
    return k_state, v_state


@cute.jit
def load_ahead(
    config: cutlass.Constexpr, loads: TmaLoads | CpAsyncLoads | None, n_block: Int32, begin: Int32, states: tuple
):
    """K of block n and V of block n + 1 are done with, and make room for those `stages` on."""
    k_state, v_state = states
    if const_expr(not config.warp_specialized):
        is_loading = const_expr(not config.tma) or cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        k_block, v_block = n_block - config.stages, n_block + 1 - config.stages
        if k_block >= begin:
            if is_loading:
                loads.load_k(k_block, k_state)
            k_state.advance()
        if v_block >= begin:
            if is_loading:
                loads.load_v(v_block, v_state)
            v_state.advance()
    return k_state, v_state
