"""Which output tile a CTA computes next (FA3 3.1 and the released code's schedulers).

A tile is one query block of one head and sequence. Tiles are numbered; a CTA takes the number of its own position in
the grid first, and then

    persistent off   none: the grid has as many CTAs as there are tiles
    static           every grid-th number; with `lpt_order` there and back (0 1 2 | 2 1 0), so that nobody always draws
                     the longer tile of a round
    dynamic          whatever number an atomic counter in global memory gives; the producer warp asks, one tile ahead,
                     and tells the consumers through shared memory

How numbers are dealt out decides what is read from L2 and when the last CTA ends:

    full             query blocks of a head one after the other: neighbours read the same K and V
    lpt_order        causal tiles low in the matrix see the most keys. Longest processing time first: the last query
                     blocks of a section of heads, then the last but one, ...; then the next section. A section's K
                     and V stay in L2
"""

import math
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.arch import WARP_SIZE

from fa3.config import Config
from fa_common.tiles import KeyBlocks, visible_blocks

SECTION_BYTES = 24 * 2**20  # of K and V: half of the H200's 50 MB L2, since Q and O pass through it too
NUM_PLACES = 2  # of the ring of tile numbers
NO_TILE = -1  # the number after the last


@dataclass(frozen=True)
class Facts:
    """What a kernel's tiles and masks depend on and is known when it is compiled."""

    config: Config
    width: int  # of a tile: head_dim, padded
    causal: bool
    window: bool
    softcap: bool
    sequences: str  # "dense", "packed" (cu_seqlens) or "cached" (lengths of K and V alone)
    splits: bool
    is_8_bit: bool = False  # Q, K and V
    v_by_columns: bool = False  # V has its keys next to each other in memory; else its head_dim

    @property
    def cluster_size(self) -> int:
        return 2 if self.config.cluster else 1

    @property
    def turns_values(self) -> bool:
        """Whether V is turned around on chip: 8-bit products want its keys next to each other."""
        return self.is_8_bit and not self.v_by_columns

    @property
    def lpt_order(self) -> bool:
        return self.config.lpt_order and self.causal

    def heads_and_group(self, mQ: cute.Tensor, mK: cute.Tensor) -> tuple:
        """(heads that tiles are counted by, rows of a tile for each query)."""
        if self.config.pack_gqa:
            return mK.shape[2], mQ.shape[2] // mK.shape[2]
        return mQ.shape[2], Int32(1)


@dataclass(frozen=True)
class Tile:
    """One output tile: its place, and the sequence it belongs to."""

    m_block: Int32
    head: Int32  # of Q; with pack_gqa of K and V
    batch: Int32
    split: Int32  # which share of the keys, of num_splits
    offset_q: Int32  # row of the sequence's first query in Q; 0 unless packed
    offset_k: Int32
    seqlen_q: Int32  # queries of the sequence
    seqlen_k: Int32


@dataclass(frozen=True)
class Sizes:
    """What the tiles are numbered from, known at run time."""

    batch: Int32
    heads: Int32  # as Tile.head counts them
    seqlen_q: Int32  # dense and cached
    seqlen_k: Int32  # dense; cached: the cache's capacity
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None  # cached: (batch,) lengths in use, None if all is used
    num_splits: Int32
    section: Int32  # how many heads, of all sequences, lpt_order takes together
    lacking: Int32  # of the first section's heads
    group: Int32  # rows of a tile that belong to one query: 1, with pack_gqa the query heads of a K/V head


@dataclass(frozen=True)
class Scheduler:
    """Numbers tiles and deals them out to this CTA (with `cluster` to this pair of CTAs)."""

    facts: Facts
    sizes: Sizes
    position: Int32  # of this CTA in the grid
    num_positions: Int32
    num_m_blocks: Int32  # of a sequence; packed: unused
    num_tiles: Int32

    @staticmethod
    def of(facts: Facts, sizes: Sizes) -> "Scheduler":
        num_m_blocks = cute.ceil_div(sizes.seqlen_q * sizes.group, facts.config.tile_m * facts.cluster_size)
        scheduler = Scheduler(
            facts,
            sizes,
            position=cute.arch.block_idx()[0] // facts.cluster_size,
            num_positions=cute.arch.grid_dim()[0] // facts.cluster_size,
            num_m_blocks=num_m_blocks,
            num_tiles=num_m_blocks * sizes.heads * sizes.batch * sizes.num_splits,
        )
        if facts.sequences == "packed":
            return replace(scheduler, num_tiles=scheduler.count_packed())
        return scheduler

    def first(self) -> Int32:
        return self.or_none(self.position)

    def or_none(self, number: Int32) -> Int32:
        """The number, or NO_TILE if there is no such tile. Who is told so need not keep num_tiles: a register less."""
        return cutlass.select_(number < self.num_tiles, number, Int32(NO_TILE))

    def following(self, number: Int32) -> Int32:
        """The static schedule's next number: the same position of the next round, or its mirror image."""
        if not self.facts.config.persistent:
            return Int32(NO_TILE)
        if not self.facts.lpt_order:
            return self.or_none(number + self.num_positions)
        # There and back: position p of round r has the number r * P + p, or r * P + P - 1 - p if r is odd.
        round_number, place = number // self.num_positions, number % self.num_positions
        return self.or_none((round_number + 1) * self.num_positions + self.num_positions - 1 - place)

    @cute.jit
    def ask(self, counter: cute.Tensor) -> Int32:
        """The dynamic schedule's next number: what all CTAs together have drawn so far. For one whole warp."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        # The first round was dealt by position.
        return self.or_none(cute.arch.shuffle_sync(number, 0) + self.num_positions)

    @cute.jit
    def tile(self, number: Int32) -> Tile:
        """The tile of a number below num_tiles. For whole warps: packed sequences are searched by all lanes."""
        sizes = self.sizes
        if const_expr(self.facts.sequences == "packed"):
            batch, number = self.find_sequence(number)
            offset_q, offset_k = sizes.cu_seqlens_q[batch], sizes.cu_seqlens_k[batch]
            seqlen_q, seqlen_k = sizes.cu_seqlens_q[batch + 1] - offset_q, sizes.cu_seqlens_k[batch + 1] - offset_k
            num_m_blocks = self.m_blocks_of(seqlen_q)
            m_block, head = self.place(number, num_m_blocks, sizes.heads, Int32(0))
            return Tile(self.member(m_block), head, batch, Int32(0), offset_q, offset_k, seqlen_q, seqlen_k)
        split = number % sizes.num_splits
        number = number // sizes.num_splits
        m_block, head = self.place(number, self.num_m_blocks, sizes.section, sizes.lacking)
        head, batch = head % sizes.heads, head // sizes.heads
        seqlen_k = sizes.seqlen_k
        if const_expr(sizes.cu_seqlens_k is not None):
            seqlen_k = sizes.cu_seqlens_k[batch]
        return Tile(self.member(m_block), head, batch, split, Int32(0), Int32(0), sizes.seqlen_q, seqlen_k)

    def place(self, number: Int32, num_m_blocks: Int32, section: Int32, lacking: Int32) -> tuple:
        """(m_block, head) of a number below that of the tiles."""
        if not self.facts.lpt_order:
            return number % num_m_blocks, number // num_m_blocks
        # Numbers count as if the heads that the first section lacks were there and came before all.
        section_number = (number + lacking * num_m_blocks) // (section * num_m_blocks)
        heads_here = section - cutlass.select_(section_number == 0, lacking, Int32(0))
        first_head = cutlass.max(section_number * section - lacking, 0)
        inside = number - first_head * num_m_blocks
        return num_m_blocks - 1 - inside // heads_here, first_head + inside % heads_here

    def member(self, m_block: Int32) -> Int32:
        """This CTA's query block of those that its cluster computes together."""
        if self.facts.cluster_size == 1:
            return m_block
        return m_block * self.facts.cluster_size + cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    # ---- Packed sequences: tiles are numbered sequence by sequence

    def m_blocks_of(self, seqlen_q: Int32) -> Int32:
        return cute.ceil_div(seqlen_q * self.sizes.group, self.facts.config.tile_m * self.facts.cluster_size)

    @cute.jit
    def tiles_of(self, batch: Int32) -> Int32:
        """How many tiles sequence `batch` has; none if there is no such sequence."""
        num_tiles = Int32(0)
        if batch < self.sizes.batch:
            cu_seqlens = self.sizes.cu_seqlens_q
            num_tiles = self.m_blocks_of(cu_seqlens[batch + 1] - cu_seqlens[batch]) * self.sizes.heads
        return num_tiles

    @cute.jit
    def count_packed(self) -> Int32:
        """All tiles of all sequences: each lane counts every 32nd sequence."""
        num_tiles = Int32(0)
        lane = cute.arch.lane_idx()
        for first in cutlass.range(0, self.sizes.batch, WARP_SIZE, unroll=1):
            num_tiles += self.tiles_of(first + lane)
        return cute.arch.warp_reduction_sum(num_tiles)

    @cute.jit
    def find_sequence(self, number: Int32):
        """(the sequence that has tile `number`, the number within it); 32 sequences at a time, one a lane."""
        lane = cute.arch.lane_idx()
        first, before = Int32(0), Int32(0)  # of the sequences in question; tiles before theirs
        count = self.tiles_of(first + lane)
        up_to = self.sum_up_to_lane(count)
        together = cute.arch.shuffle_sync(up_to, WARP_SIZE - 1)
        while before + together <= number:
            first, before = first + WARP_SIZE, before + together
            count = self.tiles_of(first + lane)
            up_to = self.sum_up_to_lane(count)
            together = cute.arch.shuffle_sync(up_to, WARP_SIZE - 1)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + up_to <= number))
        return first + passed, number - before - cute.arch.shuffle_sync(up_to - count, passed)

    @cute.jit
    def sum_up_to_lane(self, x: Int32) -> Int32:
        """The sum of x over the lanes up to and including this one."""
        lane = cute.arch.lane_idx()
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(x, offset=2**step, mask_and_clamp=0)
            x = x + (below if lane >= 2**step else Int32(0))
        return x


def heads_of_section(head_bytes: Int32, group: Int32, num_heads: Int32) -> Int32:
    """How many of num_heads query heads make a section, given the bytes of one head's K and V, which `group` share.

    The first section has what the others leave. The last is whole: a small one would be a few long tiles, begun when
    all other CTAs run out of short ones.
    """
    in_l2 = cutlass.max(SECTION_BYTES // head_bytes, 1) * group
    return cute.ceil_div(num_heads, cutlass.max(num_heads // in_l2, 1))


def grid_size(facts: Facts, tensors: tuple, num_splits: Int32, num_sms: Int32) -> Int32:
    """CTAs to launch: one for each tile, or as many as run at once; with `cluster` whole pairs.

    `tensors` is Q and K, (rows, head_dim, heads[, batch]), and cu_seqlens_q. How many tiles packed sequences have only
    the GPU knows: each may end inside one.
    """
    mQ, mK, cu_seqlens_q = tensors
    rows = facts.config.tile_m * facts.cluster_size
    heads, group = facts.heads_and_group(mQ, mK)
    if facts.sequences == "packed":
        num_m_blocks = mQ.shape[0] * group // rows + cu_seqlens_q.shape[0] - 1
    else:
        num_m_blocks = cute.ceil_div(mQ.shape[0] * group, rows) * mQ.shape[3]
    num_tiles = num_m_blocks * heads * num_splits
    if facts.config.persistent:
        num_tiles = cutlass.min(num_tiles, num_sms // facts.cluster_size)
    return num_tiles * facts.cluster_size


@dataclass(frozen=True)
class TileRing:
    """How the producer warp tells the consumers which tile number it drew (dynamic schedule): two places, so that it
    can draw the next while the consumers still work on this one.

    full: the producer warp has written the number. empty: every consumer warp has read it.
    """

    numbers: cute.Tensor  # (places,) in shared memory
    pipe: pipeline.PipelineAsync

    @staticmethod
    def of(storage, num_consumer_threads: int) -> "TileRing":
        numbers = storage.ring.get_tensor(cute.make_layout((NUM_PLACES,)))
        pipe = pipeline.PipelineAsync.create(
            barrier_storage=storage.ring_barriers.data_ptr(),
            num_stages=NUM_PLACES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARP_SIZE),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_consumer_threads),
            defer_sync=True,
        )
        return TileRing(numbers, pipe)

    @cute.jit
    def tell(self, number: Int32, state: pipeline.PipelineState):
        """The producer warp: waits until every consumer has read what this place held, then writes."""
        # Every consumer warp has read the number that this place held.
        self.pipe.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            self.numbers[state.index] = number
        # The lanes arrive one by one, lane 0 behind its own store.
        self.pipe.producer_commit(state)
        state.advance()
        return state

    @cute.jit
    def hear(self, state: pipeline.PipelineState):
        """A consumer warp: (the number, the next state)."""
        # The producer warp has written the number.
        self.pipe.consumer_wait(state)
        number = self.numbers[state.index]
        self.pipe.consumer_release(state)
        state.advance()
        return number, state


@dataclass(frozen=True)
class Work:
    """What there is to compute, and the numbers that all tiles share."""

    facts: Facts
    scheduler: Scheduler
    counter: cute.Tensor | None  # of the dynamic schedule, in global memory
    bounds: tuple  # (left, right): how many keys before and behind its own position a query sees; None (static): all
    group: Int32  # query heads for each K/V head
    scale_tanh: Float32  # softcap: what raw scores are multiplied by before the tanh
    scale_log2: Float32  # what scores are multiplied by before exp2

    @staticmethod
    def of(facts: Facts, tensors: tuple, sequences: tuple, numbers: tuple) -> "Work":
        """From Q and K, (rows, head_dim, heads[, batch]), and what the kernel was given besides."""
        mQ, mK = tensors
        cu_seqlens_q, cu_seqlens_k, counter = sequences
        softmax_scale, softcap, window_left, window_right, num_splits = numbers
        heads, group = facts.heads_and_group(mQ, mK)
        batch = cu_seqlens_q.shape[0] - 1 if facts.sequences == "packed" else mQ.shape[3]
        seqlen_k = cute.size(mK, mode=[0])
        head_bytes = 2 * (1 if facts.is_8_bit else 2) * facts.width * seqlen_k
        num_heads = heads * batch
        section = heads_of_section(head_bytes, mQ.shape[2] // mK.shape[2], num_heads)
        sizes = Sizes(
            batch=batch,
            heads=heads,
            seqlen_q=mQ.shape[0],
            seqlen_k=seqlen_k,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            num_splits=num_splits,
            section=section,
            lacking=cute.ceil_div(num_heads, section) * section - num_heads,
            group=group,
        )
        bounds = (None, Int32(0) if facts.causal else None)
        return Work(
            facts=facts,
            scheduler=Scheduler.of(facts, sizes),
            counter=counter,
            bounds=(window_left, window_right) if facts.window else bounds,
            group=mQ.shape[2] // mK.shape[2],
            # Softcap replaces the score by softcap * tanh(scale * S / softcap): tanh is taken in place, the factor
            # before it goes to the exponential.
            scale_tanh=softmax_scale / softcap if facts.softcap else Float32(1.0),
            scale_log2=(softcap if facts.softcap else softmax_scale) * math.log2(math.e),
        )

    @property
    def packs(self) -> bool:
        """Whether the rows of a tile are a K/V head's query heads side by side."""
        return self.facts.config.pack_gqa

    def key_blocks(self, tile: Tile, first_row: Int32, num_rows: int) -> KeyBlocks:
        """The key blocks that rows of a tile see; of a split those in its share, one at least, if only to mask it."""
        blocks = self.seen_blocks(tile, first_row, num_rows)
        if not self.facts.splits:
            return blocks
        # The share is the tile's, lest its warpgroups, which see different blocks, take different shares of them.
        share_begin, share_end = self.share_of(self.seen_blocks(tile, *self.rows_of(tile)), tile)
        is_before, is_behind = blocks.end <= share_begin, blocks.begin >= share_end
        begin = cutlass.select_(is_behind, share_end - 1, cutlass.max(blocks.begin, share_begin))
        end = cutlass.select_(is_before, share_begin + 1, cutlass.min(blocks.end, share_end))
        full_begin = cutlass.min(cutlass.max(blocks.full_begin, begin), end)
        return KeyBlocks(begin, full_begin, cutlass.max(cutlass.min(blocks.full_end, end), full_begin), end)

    def all_key_blocks(self, tile: Tile) -> KeyBlocks:
        """Those that some row of the tile sees; of both tiles in a cluster, whose CTAs load a part of each block."""
        return self.key_blocks(tile, *self.rows_of(tile))

    def rows_of(self, tile: Tile) -> tuple[Int32, int]:
        """The first of a tile's rows and how many they are, in a cluster both tiles'."""
        rows = self.facts.config.tile_m * self.facts.cluster_size
        return tile.m_block // self.facts.cluster_size * rows, rows

    def seen_blocks(self, tile: Tile, first_row: Int32, num_rows: int) -> KeyBlocks:
        """The key blocks that rows of a tile see, of all splits."""
        queries = (first_row, num_rows)
        if self.packs:
            first = first_row // self.group
            queries = (first, (first_row + num_rows - 1) // self.group - first + 1)
        blocks = visible_blocks(queries, self.facts.config.tile_n, (tile.seqlen_q, tile.seqlen_k), self.bounds)
        right, tile_n = self.bounds[1], self.facts.config.tile_n
        if self.facts.config.optimistic_exp and right is not None:
            # A block whose last key is the last of the first query counts as masked: there that query has seen no key
            # yet, and its exponentials cannot be optimistic.
            last_key = cutlass.max(queries[0] + right + tile.seqlen_k - tile.seqlen_q, 0)
            full_end = cutlass.min(blocks.full_end, last_key // tile_n)
            blocks = replace(blocks, full_end=cutlass.max(full_end, blocks.full_begin))
        return blocks

    def share_of(self, blocks: KeyBlocks, tile: Tile) -> tuple[Int32, Int32]:
        """(begin, end) of one of num_splits even shares; an empty one is a block behind the last key, which the mask
        hides."""
        share = cute.ceil_div(blocks.end - blocks.begin, self.scheduler.sizes.num_splits)
        begin = blocks.begin + tile.split * share
        end = cutlass.min(blocks.end, begin + share)
        behind, is_empty = cute.ceil_div(tile.seqlen_k, self.facts.config.tile_n), begin >= end
        return cutlass.select_(is_empty, behind, begin), cutlass.select_(is_empty, behind + 1, end)

    def place_of(self, tile: Tile, row: Int32) -> tuple:
        """(whether it exists, (row, head[, batch]) in Q and O) of a row of a tile's sequence."""
        batch = (tile.batch,) if self.facts.sequences != "packed" else ()
        query, head = self.query_and_head(tile, row)
        return query < tile.seqlen_q, (tile.offset_q + query, head, *batch)

    def query_and_head(self, tile: Tile, row: Int32) -> tuple[Int32, Int32]:
        """Which query of which query head a row of a tile's sequence is."""
        if not self.packs:
            return row, tile.head
        return row // self.group, tile.head * self.group + row % self.group

    def head_kv(self, tile: Tile) -> Int32:
        return tile.head if self.packs else tile.head // self.group

    def existing_block(self, n_block: Int32, tile: Tile) -> Int32:
        """The block to load: an empty split's lies behind the last key and may be any, since all of it is masked."""
        if not self.facts.splits:
            return n_block
        return cutlass.min(n_block, cutlass.max(cute.ceil_div(tile.seqlen_k, self.facts.config.tile_n), 1) - 1)
