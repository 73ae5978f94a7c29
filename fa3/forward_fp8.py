"""FA3 forward on 8-bit floats (FA3 3.3): Q, K and V are e4m3 numbers times scales.

changed since forward.py
  - WGMMA multiplies e4m3, twice as many numbers an instruction; sums are fp32, O is 16-bit.
  - 8-bit products want V's keys next to each other (e4m3.py). If they are, as `quantize` lays them out, all that
    changes is which row of K goes where (loads.py). If V lies by rows, the producer is a whole warpgroup: one warp
    starts TMA's copies, and all four turn V around.
  - Scores are multiplied by the scales of Q and K. V's scale is a bias of the scores: a P so much larger weighs V's
    numbers as they are, so that O adds up across blocks of different scales at no cost (softmax.py).
  - A row's largest P is raised to 2^3 or 2^4, by the width of a block, and no sum of a thread's P of a row may pass
    448, the largest e4m3 number: so no P does.
unchanged
  - The schedule: the loop, the barriers, ping-pong, overlap, the schedulers.

V by rows, time to the right, four stages (S = Q K of a block, P = softmax of it, O = P V of it, T = V of it turned
around); by columns the producer and the tensor cores are as in forward.py:

    producer warp 0 | Q K3 V3 K2 V2 K1 | T3 K0 V1 | T2 V0 | T1 | T0
    warps 1 to 3    |                  | T3       | T2    | T1 | T0
    tensor          |           S3 S3' |    S2 O3 S2' O3' | S1 O2 S1' O2' | S0 O1 S0' O1' | O0 O0'
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.arch import WARP_SIZE
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa3.config import KV_BLOCK, Q_BLOCK
from fa3.e4m3 import Transposition
from fa3.forward import ROWS_PER_THREAD, Forward, Share
from fa3.loads import Shared, TmaLoads
from fa3.products import row_of_thread
from fa3.scheduler import NO_TILE, NUM_PLACES, Tile, Work
from fa3.softmax import KeyScales
from fa3.sync import PRODUCER_WARP, REGISTERS_TRANSPOSING, THREADS_PER_WARPGROUP, NamedBarrier, Pipes
from fa_common.compile import KernelKey
from fa_common.tiles import DTYPES, fake_lengths, fake_rows, fake_sequences

PART = 32  # keys that share a scale whatever the tile


@dataclass(frozen=True)
class Descales:
    """The scales of one tile: of its rows of Q, and of every block of K and V of its head.

    Each lane holds what the softmax needs for one of the loop's blocks, 32 in a row, made all at once; a block's come
    by shuffles. Read for each block anew, they cost two dozen instructions, and ptxas puts the wait for a load from L2
    between the WGMMAs of S.
    """

    factor: Float32  # softmax_scale * log2(e), unless a softcap follows, times the scale of Q, if all rows have one
    rows: cute.Tensor | None  # else (pack_gqa) the scale of Q of each row of this thread
    k: cute.Tensor  # (blocks,) fp32, in global memory
    v: cute.Tensor
    held: cute.Tensor  # (2, 1 or 2): factor and bias (KeyScales) of a block's first key, and of its last
    tile_n: int
    last_block: Int32  # with a scale, of the sequence

    def load(self, n_block: Int32) -> None:
        """Of the 32 blocks, n_block among them, that begin at a multiple of 32."""
        for i, block in enumerate(self.blocks_of(n_block // WARP_SIZE * WARP_SIZE + cute.arch.lane_idx())):
            block = cutlass.min(block, self.last_block)
            self.held[0, i] = self.factor * self.k[block]
            self.held[1, i] = cute.math.log2(self.v[block], fastmath=True)

    def blocks_of(self, n_block: Int32) -> list[Int32]:
        """The blocks with a scale that lie in one of the loop: one, or two."""
        first_key = n_block * self.tile_n
        keys = [first_key] if KV_BLOCK % self.tile_n == 0 else [first_key, first_key + self.tile_n - 1]
        return [key // KV_BLOCK for key in keys]

    @cute.jit
    def of(self, n_block: Int32) -> list[list[Float32]]:
        """(factor, bias) of a block's first key, and of its last. Blocks come from the last to the first."""
        if n_block % WARP_SIZE == WARP_SIZE - 1:
            self.load(n_block)
        kinds, blocks = (range(size) for size in self.held.shape)
        return [[cute.arch.shuffle_sync(self.held[kind, i], n_block % WARP_SIZE) for kind in kinds] for i in blocks]

    def part_is_behind(self, n_block: Int32, part: int) -> Boolean:
        """Whether a part of a block lies in the second of two blocks with a scale."""
        return n_block * self.tile_n % KV_BLOCK + part * PART >= KV_BLOCK


class ForwardFp8(Forward):
    """The kernel for one KernelKey, whose dtype names O's type too: "float8_e4m3fn-bfloat16"."""

    def __init__(self, key: KernelKey):
        super().__init__(key)
        self.facts = replace(self.facts, is_8_bit=True, v_by_columns=key.v_by_columns)

    def dtypes(self, key: KernelKey) -> tuple[type, type]:
        return Float8E4M3FN, DTYPES[key.dtype.partition("-")[2]]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        descale_q: cute.Tensor,
        descale_k: cute.Tensor,
        descale_v: cute.Tensor,
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
        """As Forward's; the descales are (batch, heads, blocks) fp32, of any strides."""
        sequences = (cu_seqlens_q, cu_seqlens_k, counter)
        numbers = (softmax_scale, softcap, window_left, window_right, num_splits)
        descales = (descale_q, descale_k, descale_v)
        self.launch((mQ, mK, mV, mO, mLSE), sequences, numbers, num_sms, stream, descales)

    def descales_of(self, descales: tuple, work: Work, tile: Tile, first_row: Int32) -> Descales:
        """Those of a warpgroup's 64 rows, and of its head's K and V."""
        descale_q, descale_k, descale_v = descales
        factor, rows = Float32(1.0) if self.softcap else work.scale_log2, None
        last_q_block = descale_q.shape[2] - 1  # a warpgroup may have no row
        if const_expr(self.config.pack_gqa):
            rows = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
            for r in range(ROWS_PER_THREAD):
                query, head = work.query_and_head(tile, first_row + row_of_thread(r))
                rows[r] = descale_q[tile.batch, head, cutlass.min(query // Q_BLOCK, last_q_block)]
        else:
            factor = factor * descale_q[tile.batch, tile.head, cutlass.min(first_row // Q_BLOCK, last_q_block)]
        k, v = (t[tile.batch, work.head_kv(tile), None] for t in (descale_k, descale_v))
        num_blocks = 1 if KV_BLOCK % self.config.tile_n == 0 else 2
        held = cute.make_rmem_tensor((2, num_blocks), Float32)
        return Descales(factor, rows, k, v, held, self.config.tile_n, cutlass.max(tile.seqlen_k - 1, 0) // KV_BLOCK)

    def block_scales(self, n_block: Int32, share: Share) -> tuple[KeyScales, ...]:
        scales = [self.key_scales(share.work, *numbers) for numbers in share.descales.of(n_block)]
        if len(scales) == 1:
            return tuple(scales)
        first, last = scales
        is_behind = [share.descales.part_is_behind(n_block, part) for part in range(self.config.tile_n // PART)]
        return tuple(last.instead_of(first, condition) for condition in is_behind)

    def key_scales(self, work: Work, factor: Float32, bias: Float32) -> KeyScales:
        before_cap, factor = (factor, work.scale_log2) if self.softcap else (None, factor)
        return KeyScales(before_cap, factor, bias, cute.math.exp2(-bias, fastmath=True))


class TurningForwardFp8(ForwardFp8):
    """V by rows: the producer, a whole warpgroup, turns each block of it around once TMA has brought it."""

    def __init__(self, key: KernelKey):
        super().__init__(key)
        if key.config.tile_n == 96 and self.width == 96:
            raise ValueError(
                "the FP8 kernel needs tile_n 64 or 128 at head_dim 80 and 96 (what V's 96 keys make there does not "
                f"share out among four warps); got 96 at {key.head_dim}"
            )
        self.has_busy_producer, self.registers = True, REGISTERS_TRANSPOSING
        # To load a block of V takes the stage of one that many stages before it, and its P V comes an iteration after
        # its S. With two stages of distance no warp waits for the slowest warpgroup before it turns the next block.
        self.blocks_ahead = max(1, key.config.stages - 2)

    @cute.jit
    def load(self, work: Work, tma: tuple, tensors: tuple, shared: Shared, pipes: Pipes):
        """The producer warpgroup: one warp loads, ahead of what all four then turn around."""
        scheduler = work.scheduler
        is_loading = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == PRODUCER_WARP
        q_phase = Int32(1)  # as in Forward.load
        k_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        v_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.stages)
        landed_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        told_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, NUM_PLACES)
        heard_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, NUM_PLACES)
        transposition = Transposition.of(self.config.tile_n, self.width, cute.arch.thread_idx()[0])
        number = scheduler.first()
        while number != NO_TILE:
            tile = scheduler.tile(number)
            loads = self.loads(work, tile, tma, tensors, shared, pipes)
            blocks = work.all_key_blocks(tile)
            if is_loading:
                k_state, v_state = self.load_first_blocks(work, tile, loads, q_phase, k_state, v_state)
            for i in cutlass.range(blocks.end - blocks.begin, unroll=1):
                self.transpose(transposition, shared, pipes, landed_state)
                landed_state.advance()
                if is_loading:
                    v_block = blocks.end - 1 - i - self.blocks_ahead
                    if v_block > blocks.begin:
                        loads.load_k(work.existing_block(v_block - 1, tile), k_state)
                        k_state.advance()
                    if v_block >= blocks.begin:
                        loads.load_v(work.existing_block(v_block, tile), v_state)
                        v_state.advance()
            q_phase ^= 1
            if const_expr(self.config.scheduler == "dynamic"):
                # The loading warp draws for all: the other three hear it as the consumers do.
                if is_loading:
                    number = scheduler.ask(work.counter)
                    told_state = pipes.ring.tell(number, told_state)
                else:
                    number, heard_state = pipes.ring.hear(heard_state)
            else:
                number = scheduler.following(number)

    @cute.jit
    def load_first_blocks(self, work: Work, tile: Tile, loads: TmaLoads, q_phase: Int32, k_state, v_state):
        """A tile's Q, as many blocks of V as are loaded ahead, and one of K more."""
        blocks = work.all_key_blocks(tile)
        for i in cutlass.range_constexpr(self.blocks_ahead + 1):
            n_block = blocks.end - 1 - i
            if n_block >= blocks.begin:
                existing = work.existing_block(n_block, tile)
                loads.load_k(existing, k_state)
                k_state.advance()
                if const_expr(i == 0):
                    loads.load_q(q_phase)
                if const_expr(i < self.blocks_ahead):
                    loads.load_v(existing, v_state)
                    v_state.advance()
        return k_state, v_state

    @cute.jit
    def transpose(self, transposition: Transposition, shared: Shared, pipes: Pipes, state):
        """V of one stage, once TMA has brought it, becomes V^T for the consumers."""

        def everyone_has_read() -> None:
            # The four producer warps hold their pieces of the panel in registers.
            cute.arch.barrier(barrier_id=NamedBarrier.VALUES, number_of_threads=THREADS_PER_WARPGROUP)

        # The bytes of V have arrived.
        pipes.v.landed.consumer_wait(state)
        base = shared.sV_rows.iterator.toint() + state.index * (self.config.tile_n * self.width)
        transposition.run(base, everyone_has_read)
        # What each thread wrote becomes visible to WGMMA; then one lane counts its warp towards "all of V^T is there".
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            pipes.v.transposed.producer_commit(state)


def compile_forward_fp8(key: KernelKey, options: str = ""):
    """Compiles the kernel of `key` for sm_90a; called as (q, k, v, out, lse, descale_q, descale_k, descale_v,
    cu_seqlens_q, cu_seqlens_k, counter, softmax_scale, softcap, window_left, window_right, num_sms, num_splits)."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, num_splits = (cute.sym_int() for _ in range(6))
    head_dim, packed = key.head_dim, key.sequences == "packed"
    batch_and = () if packed else (batch,)
    splits_and = (num_splits,) if key.splits else ()
    lengths_q = fake_lengths(cute.sym_int()) if packed else None
    lengths_k = {"dense": None, "packed": lengths_q and fake_lengths(lengths_q.shape[0]), "cached": fake_lengths(batch)}
    kernel = ForwardFp8(key) if key.v_by_columns else TurningForwardFp8(key)
    return cute.compile(
        kernel,
        fake_bytes((*batch_and, seqlen_q, heads_q, head_dim)),
        fake_bytes((*batch_and, seqlen_k, heads_kv, head_dim)),
        fake_bytes((*batch_and, seqlen_k, heads_kv, head_dim), unit_mode=1 if key.v_by_columns else -1),
        fake_sequences(
            Float32 if key.splits else kernel.dtype_O, (*splits_and, *batch_and, seqlen_q, heads_q, head_dim)
        ),
        fake_rows((*splits_and, *batch_and, heads_q, seqlen_q)),
        fake_scales(),
        fake_scales(),
        fake_scales(),
        lengths_q,
        lengths_k[key.sequences],
        fake_lengths(1) if key.config.scheduler == "dynamic" else None,
        Float32(1.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )


def fake_bytes(shape: tuple, unit_mode: int = -1) -> cute.Tensor:
    """As fa_common.tiles.fake_sequences, of e4m3: 16 bytes are 16 of them. The stride of `unit_mode` is 1."""
    strides = [cute.sym_int64(divisibility=16) for _ in shape]
    strides[unit_mode] = 1
    return make_fake_tensor(Float8E4M3FN, shape, stride=tuple(strides), assumed_align=16)


def fake_scales() -> cute.Tensor:
    """(batch, heads, blocks) fp32, of any strides: 0 where several share one. 32 bits: they are few."""
    shape, strides = (tuple(cute.sym_int() for _ in range(3)) for _ in range(2))
    return make_fake_tensor(Float32, shape, stride=strides, assumed_align=4)
