"""FA3 FP8: e4m3 values and their scales from 16-bit (or fp32) Q, K and V, rotated on the way, in one pass over HBM.

A block of rows of one head shares a scale, amax / 448, so whoever converts it needs its maximum first. Until then its
values stay in registers: those of a tile of 128 rows, one block of K or V, two halves that are a block each of Q.

    HBM -> load -> rotate (Q, K) -> maximum -> store -> HBM        2 bytes an element in, 1 out, with scales="block"
    HBM -> load -> rotate (Q, K) -> maximum -> amax                one scale for a head or a tensor: two launches,
    HBM -> load -> rotate (Q, K) -> amax -> store -> HBM           twice "in"

A thread has 4 pieces of 16 columns (16 bytes of e4m3). Rotated, as many of one row as it can. head_dim 256:

    columns   0..15   16..31   32..47   48..63   64..79   80..95   ..  240..255
    row 0     t 0     t 1      t 2      t 3      t 0      t 1      ..  t 3          a warp has 8 rows,
    row 1     t 4     t 5      t 6      t 7      t 4      t 5      ..  t 7          8 warps the CTA's 64

Rotate is the Hadamard transform, butterfly by butterfly, one for each bit of the column:

    bits 0 to 3   within a piece     registers
    bits 4, 5     between threads    the partner is a lane of the same warp: one shuffle a value
    bits 6, 7     between pieces     registers; with one piece of four rows each they would be two shuffles more

A head_dim of m * 2^p is m transforms of length 2^p, whose threads are neighbours; a thread has no pieces of two. The
factor 2^(-p/2) that makes it orthonormal is left to the descale, which costs nothing. Without rotation a thread has one
piece of each of its rows, and a warp reads whole rows.

    head_dim       CTAs of a tile   a thread's values   its registers   an SM's CTAs, their loads in flight
    up to 128      1                64, in fp32         80              3 of 256 threads (head_dim 128), 96 KiB
    up to 256      2                64, in fp32         80              3 of 256 threads (head_dim 256), 96 KiB
    144, 176, ..   2                32, in fp32         64              3 of 288 threads (head_dim 144), 54 KiB

The last are the odd multiples of 16 beyond 128, whose 64 rows make no whole warps of four pieces a thread. V leaves by
columns where it can, the keys of each next to each other, as 8-bit products want it (e4m3.py).

Two CTAs of a tile, 64 rows each, are a cluster if they need one maximum, that of a block. Each writes its own to the
other's shared memory, and the write itself completes the mbarrier there:

    warp 0          open mailbox, arrive > load > rotate > maxima | wait, send > receive > store
    other warps                   arrive > load > rotate > maxima |              receive > store

    | waits for this CTA's warps, wait for the other CTA's arrival, receive for its number. No wait for Q.

One launch for Q, K and V: short sequences are bound by launches, and long ones lose nothing, since the CTAs take the
tensors one after the other. Which one is its own a CTA learns from its number, and selects address and strides.

Numbers: x / scale as fp32 division rounds it, then to nearest even: the bits of algorithm.py, whose divisions these
are, where the Hadamard factor is a power of two; elsewhere its rounding shows. A NaN or an infinity makes NaN of its
scale and of all the values that share it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float8E4M3FN, Float32, Int32, Uint16, Uint32, const_expr
from cutlass.cute.arch import WARP_SIZE
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from fa3.algorithm import E4M3_MAX, SMALLEST_AMAX
from fa3.config import KV_BLOCK, Q_BLOCK
from fa3.e4m3 import RowsToTurn, chunk_at, divide, reciprocal_of, rounded_quotients
from fa_common.compile import KernelKey
from fa_common.tiles import DTYPES, fake_lengths
from fa_common.warp_tiles import thread_index_anew

TILE, HALF = KV_BLOCK, Q_BLOCK  # rows
PIECE = 16  # columns: 16 bytes of e4m3
PIECES_OF_THREAD = 4  # half as many where that makes no whole warps
MAX_HEAD_DIM_OF_CTA = 128  # beyond, two CTAs share a tile
REGISTERS = {4: 80, 2: 64}  # a thread's, by its pieces; fp32 takes 16 more
SM_QUARTERS, QUARTER_REGISTERS = 4, 16_384  # a warp's registers are all in one quarter of an SM
SM_BYTES = 228 * 1024  # of shared memory and L1
SHARED_MEMORY_PERCENT = 12  # of them: 24 CTAs' 1 KiB, at head_dim 16, their signs and maxima
INPUT_DTYPES = DTYPES | {"float32": Float32}
SIGN_WORDS = {16: Uint16, 32: Uint32}
Q, K, V = range(3)  # tensors, in the order of their tiles


# ---- Host


@dataclass(frozen=True)
class QuantizeConfig:
    """What decides the kernel's code beside the KernelKey's own fields."""

    stage: str  # "block" in one pass; "maximum", then "scale" for larger shares of a scale
    hadamard: bool


def quantize_key(q: Tensor, stage: str, hadamard: bool, v_by_columns: bool) -> KernelKey:
    """The kernel for tensors like q; `v_by_columns` is how the quantised V is to lie."""
    return KernelKey(
        "fa3",
        "quantize",
        str(q.dtype).removeprefix("torch."),
        q.shape[-1],
        causal=False,
        config=QuantizeConfig(stage, hadamard),
        sequences="dense" if q.ndim == 4 else "packed",
        v_by_columns=v_by_columns,
    )


def build_quantize(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel of `key` for sm_90a; called as Quantize.__call__ is, without the stream."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    dtype, packed = INPUT_DTYPES[key.dtype], key.sequences == "packed"
    rows_q, rows_k = (seqlen_q,), (seqlen_k,)  # totals, if packed
    if not packed:
        rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    shapes = [(*rows_q, heads_q, key.head_dim)] + [(*rows_k, heads_kv, key.head_dim)] * 2
    # A descale has its tensor's heads, or those of K and V.
    descales = [make_fake_tensor(Float32, [batch, *_any(2)], stride=_any(3, cute.sym_int64)) for _ in range(3)]
    one_pass = key.config.stage == "block"
    return cute.compile(
        Quantize(key),
        *(_fake_pieces(dtype, shape) for shape in shapes),
        *(_fake_pieces(Float8E4M3FN, shape) for shape in shapes[:2]),
        _fake_pieces(Float8E4M3FN, shapes[2], unit_mode=1 if key.v_by_columns else -1),
        *descales,
        None if one_pass else make_fake_tensor(Float32, (3, batch, heads_kv), stride=_any(3, cute.sym_int64)),
        make_fake_tensor(Float32, (key.head_dim,), stride=(1,), assumed_align=16) if key.config.hadamard else None,
        *((fake_lengths(cute.sym_int()) for _ in range(2)) if packed else (None, None)),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )


def _any(number: int, symbol: Callable = cute.sym_int) -> tuple:
    return tuple(symbol() for _ in range(number))


def _fake_pieces(dtype: type, shape: tuple, unit_mode: int = -1) -> cute.Tensor:
    """Any 64-bit strides that are multiples of 16 bytes, but 1 in `unit_mode`: rows, if that is the last."""
    strides = [cute.sym_int64(divisibility=128 // dtype.width) for _ in shape]
    strides[unit_mode] = 1
    return make_fake_tensor(dtype, shape, stride=tuple(strides), assumed_align=16)


# ---- Device


@dataclass(frozen=True)
class Tile:
    """One tile: of which tensor, where in it, and which of its rows exist."""

    tensor: Int32  # Q, K or V
    batch: Int32
    head: Int32
    scale_head: Int32  # of its descale and amax: with a block's scale its own, else that of K and V
    index: Int32  # in its sequence
    first_row: Int32  # in the tensor: its sequence's, or in a packed one that of all
    num_rows: Int32  # that the sequence has from the tile's first on; none or less: the tile is past its end


class Quantize:
    """The kernel for one KernelKey."""

    def __init__(self, key: KernelKey):
        self.dtype = INPUT_DTYPES[key.dtype]
        self.stage, self.hadamard = key.config.stage, key.config.hadamard
        self.v_by_columns = key.v_by_columns and self.stage != "maximum"
        self.num_pieces = key.head_dim // PIECE  # of a row
        self.transform = key.head_dim & -key.head_dim  # its length, the largest power of two that divides head_dim
        self.ctas_of_tile = 1 if key.head_dim <= MAX_HEAD_DIM_OF_CTA else 2
        self.shares_maximum = self.ctas_of_tile == 2 and self.stage == "block"
        self.num_halves = 2 // self.ctas_of_tile  # of a tile that a CTA has
        pieces = self.num_halves * HALF * self.num_pieces  # the CTA's
        pieces_of_thread = PIECES_OF_THREAD
        if pieces % (pieces_of_thread * WARP_SIZE):
            pieces_of_thread //= 2
        self.num_threads = pieces // pieces_of_thread
        self.num_warps = self.num_threads // WARP_SIZE
        # A thread's pieces of one row: with rotation all of a half that are in one run of the transform.
        most = pieces_of_thread // self.num_halves
        self.pieces_of_row = min(most, self.transform // PIECE) if self.hadamard else 1
        self.rows_of_half = most // self.pieces_of_row
        self.shape = (PIECE, self.pieces_of_row, self.rows_of_half, self.num_halves)  # of a thread's values
        self.threads_of_row = self.num_pieces // self.pieces_of_row
        self.lanes = self.transform // PIECE // self.pieces_of_row  # that have a run of the transform
        registers = REGISTERS[pieces_of_thread] + (16 if self.dtype.width == 32 else 0)
        self.ctas_of_sm = QUARTER_REGISTERS // (registers * WARP_SIZE) * SM_QUARTERS // self.num_warps
        self.turned_bytes = RowsToTurn(0, self.num_halves * HALF, self.num_pieces).size if self.v_by_columns else 0

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mQ8: cute.Tensor,
        mK8: cute.Tensor,
        mV8: cute.Tensor,
        mDescaleQ: cute.Tensor,
        mDescaleK: cute.Tensor,
        mDescaleV: cute.Tensor,
        mAmax: cute.Tensor | None,
        mSigns: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        max_seqlen_q: Int32,
        max_seqlen_k: Int32,
        stream,
    ):
        """Q, K, V and their e4m3 values (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim); descales
        (batch, heads or heads_kv, blocks or 1); amax (3, batch, heads_kv), 0 before stage "maximum"."""
        batch, heads_q, heads_kv = mDescaleQ.shape[0], mQ.shape[-2], mK.shape[-2]
        # A sequence without rows has a tile too, which writes its head's descale.
        tiles_q = cutlass.max(cute.ceil_div(max_seqlen_q, TILE), 1)
        tiles_k = cutlass.max(cute.ceil_div(max_seqlen_k, TILE), 1)
        num_tiles = batch * (heads_q * tiles_q + 2 * heads_kv * tiles_k)
        self.kernel(
            ((mQ, mK, mV), (mQ8, mK8, mV8), (mDescaleQ, mDescaleK, mDescaleV)),
            mAmax,
            mSigns,
            (cu_seqlens_q, cu_seqlens_k),
            (tiles_q, tiles_k),
        ).launch(
            grid=(num_tiles * self.ctas_of_tile, 1, 1),
            block=[self.num_threads, 1, 1],
            cluster=(2 if self.shares_maximum else 1, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.ctas_of_sm,
            # Percent, of which each CTA takes 1 KiB and some, and its rows of V. The rest is L1: it has the second half
            # of each sector of 32 bytes that a thread's two loads ask for. Unsaid, the DSL asks a GPU.
            preferred_smem_carveout=SHARED_MEMORY_PERCENT + -(-100 * self.ctas_of_sm * self.turned_bytes // SM_BYTES),
        )

    @cute.kernel
    def kernel(
        self,
        tensors: tuple,
        mAmax: cute.Tensor | None,
        mSigns: cute.Tensor | None,
        cu_seqlens: tuple,
        num_tiles: tuple,
    ):
        inputs, outputs, descales = tensors
        tile = self.tile(inputs, cu_seqlens, num_tiles, descales[0].shape[0])
        if tile.num_rows > 0:
            mailbox = self.open_mailbox() if const_expr(self.shares_maximum) else None
            rX = self.load(inputs, tile)
            values, largest = self.rotate(rX, mSigns, tile)
            if const_expr(self.stage == "maximum"):
                self.raise_amax(largest, mAmax, tile)
            else:
                amaxes = self.amaxes(largest, mAmax, mailbox, tile)
                # First what needs most of `tile`: the values have most of the registers until they are stored.
                self.store_descales(amaxes, descales, tile)
                if const_expr(not self.v_by_columns):
                    self.store(values, amaxes, outputs, tile)
                else:
                    if tile.tensor == V:
                        self.store_columns(values, amaxes, outputs[V], tile)
                    else:
                        self.store(values, amaxes, (*outputs[:V], outputs[K]), tile)
        else:
            if const_expr(self.stage == "block"):
                self.store_descales((Float32(0.0),) * self.num_halves, descales, tile)
            if const_expr(self.stage == "scale"):
                self.store_descales(self.given_amaxes(mAmax, tile), descales, tile)

    @cute.jit
    def tile(self, inputs: tuple, cu_seqlens: tuple, num_tiles: tuple, batch: Int32) -> Tile:
        """This CTA's tile. Those of Q come first, then K's, then V's; heads next to each other, whose rows are too."""
        mQ, mK, _ = inputs
        (tiles_q, tiles_k), heads_kv = num_tiles, mK.shape[-2]
        number = cute.arch.block_idx()[0] // self.ctas_of_tile
        tiles_of_q, tiles_of_k = batch * mQ.shape[-2] * tiles_q, batch * heads_kv * tiles_k
        tensor = Int32(number >= tiles_of_q) + Int32(number >= tiles_of_q + tiles_of_k)
        number -= pick(tensor, Int32(0), tiles_of_q, tiles_of_q + tiles_of_k)
        heads, tiles = pick(tensor, mQ.shape[-2], heads_kv, heads_kv), pick(tensor, tiles_q, tiles_k, tiles_k)
        head, rest = number % heads, number // heads
        index, batch = rest % tiles, rest // tiles
        if const_expr(cu_seqlens[0] is None):
            offset, seqlen = Int32(0), pick(tensor, mQ.shape[1], mK.shape[1], mK.shape[1])
        else:
            begins, ends = ([cu[i] for cu in cu_seqlens] for i in (batch, batch + 1))
            offset = pick(tensor, begins[0], begins[1], begins[1])
            seqlen = pick(tensor, ends[0], ends[1], ends[1]) - offset
        scale_head = head if const_expr(self.stage == "block") else head // (heads // heads_kv)
        return Tile(tensor, batch, head, scale_head, index, offset + index * TILE, seqlen - index * TILE)

    @property
    def rank(self) -> Int32:
        """Which CTA of the tile this is."""
        return cute.arch.block_idx()[0] % self.ctas_of_tile

    def row(self, thread: Int32, half: int, i: int) -> Int32:
        """A thread's i-th row of this CTA's `half`, counted in the tile."""
        return (half + self.rank) * HALF + i * (HALF // self.rows_of_half) + thread // self.threads_of_row

    def column(self, thread: Int32) -> Int32:
        """The first of a thread's columns; its next piece lies self.lanes pieces further, behind other threads'."""
        thread = thread % self.threads_of_row
        run, lane = thread // self.lanes, thread % self.lanes
        return (run * (self.transform // PIECE) + lane) * PIECE

    def pieces(self, tensors: tuple, tile: Tile, thread: Int32) -> cute.Tensor:
        """A thread's columns of its rows in the one of three tensors that the tile is of, like self.shape."""
        mT = chosen(tile.tensor, *tensors)
        row = tile.first_row + self.row(thread, 0, 0)
        row_stride = mT.stride[-3]
        gT = mT[row, tile.head, None] if cute.rank(mT) == 3 else mT[tile.batch, row, tile.head, None]
        strides = 1, self.lanes * PIECE, row_stride * (HALF // self.rows_of_half), row_stride * HALF
        return cute.make_tensor(gT.iterator + self.column(thread), cute.make_layout(self.shape, stride=strides))

    @cute.jit
    def load(self, inputs: tuple, tile: Tile) -> cute.Tensor:
        """This thread's pieces; 0 past the sequence's end. All loads are issued before the first value is used."""
        rX = cute.make_rmem_tensor(self.shape, self.dtype)
        rX.fill(0)
        thread = cute.arch.thread_idx()[0]
        gX = self.pieces(inputs, tile, thread)
        for half in cutlass.range_constexpr(self.num_halves):
            for i in cutlass.range_constexpr(self.rows_of_half):
                if self.row(thread, half, i) < tile.num_rows:
                    for j in cutlass.range_constexpr(self.pieces_of_row):
                        cute.autovec_copy(vector(gX[None, j, i, half]), rX[None, j, i, half])
        # For the compiler: no load moves across, down to where its values are used.
        cute.arch.sync_warp()
        return rX

    @cute.jit
    def rotate(self, rX: cute.Tensor, mSigns: cute.Tensor | None, tile: Tile) -> tuple:
        """The values in fp32; those of Q and K times signs, and Hadamard transformed but for the factor. And max |x| of
        this thread's part of each half."""
        values = cute.make_rmem_tensor(rX.shape, Float32)
        largest = cute.make_rmem_tensor(self.num_halves, Float32)
        # For the compiler: stage "maximum", which keeps no values, looks for the largest in each branch, the others
        # behind both. The other way around 8 B spill, at head_dim 128 and at 192.
        looks_in_branches = self.hadamard and self.stage == "maximum"
        if const_expr(self.hadamard):
            if tile.tensor == V:
                values.store(rX.load().to(Float32))
                if const_expr(looks_in_branches):
                    self.find_largest(values, largest)
            else:
                sSigns = self.sign_bits(mSigns)
                for j in cutlass.range_constexpr(self.pieces_of_row):
                    signs = self.signs_of_piece(sSigns, j)
                    for half in cutlass.range_constexpr(self.num_halves):
                        for i in cutlass.range_constexpr(self.rows_of_half):
                            x, rotated = rX[None, j, i, half], values[None, j, i, half]
                            self.flip(x, signs)
                            rotated.store(x.load().to(Float32))
                            self.transform_piece(rotated)
                            # For the compiler: one piece after the other. At once, in 80 registers, they would spill.
                            cute.arch.sync_warp()
                for half in cutlass.range_constexpr(self.num_halves):
                    for i in cutlass.range_constexpr(self.rows_of_half):
                        self.transform_row(values[None, None, i, half])
                if const_expr(looks_in_branches):
                    self.find_largest(values, largest)
        else:
            values.store(rX.load().to(Float32))
        if const_expr(self.stage != "scale" and not looks_in_branches):
            self.find_largest(values, largest)
        return values, largest

    def find_largest(self, values: cute.Tensor, largest: cute.Tensor):
        """max |x| of this thread's part of each half."""
        for half in range(self.num_halves):
            x = Float32(0.0)
            for i in range(self.rows_of_half):
                for j in range(self.pieces_of_row):
                    x = cute.math.absf(values[None, j, i, half].load()).reduce(cute.ReductionOp.MAX, x, 0)
            largest[half] = x

    @cute.jit
    def sign_bits(self, mSigns: cute.Tensor) -> cute.Tensor:
        """The sign bit of each column, as wide as an element, in shared memory."""
        word, thread = SIGN_WORDS[self.dtype.width], cute.arch.thread_idx()[0]
        layout = cute.make_layout(self.num_pieces * PIECE)
        sSigns = cutlass.memory.SmemAllocator().allocate_tensor(word, layout, byte_alignment=16)
        if thread < self.num_pieces * PIECE:
            sSigns[thread] = word(mSigns[thread].bitcast(Uint32) >> (32 - self.dtype.width)) & word(
                1 << (self.dtype.width - 1)
            )
        # Every thread has written its column's.
        cute.arch.sync_threads()
        return sSigns

    @cute.jit
    def signs_of_piece(self, sSigns: cute.Tensor, j: int) -> cute.Tensor:
        """Words that flip the signs of this thread's j-th piece of a row."""
        signs = cute.make_rmem_tensor(PIECE, sSigns.element_type)
        column = self.column(cute.arch.thread_idx()[0]) + j * self.lanes * PIECE
        source = cute.make_ptr(
            sSigns.element_type, (sSigns.iterator + column).toint(), cute.AddressSpace.smem, assumed_align=16
        )
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(PIECE)), signs)
        return cute.recast_tensor(signs, Uint32)

    @cute.jit
    def flip(self, x: cute.Tensor, signs: cute.Tensor):
        """A piece times its signs, as sign bits, all those of a register at once."""
        words = cute.recast_tensor(x, Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] ^ signs[i]

    @cute.jit
    def transform_piece(self, x: cute.Tensor):
        """A row's transform, in place, Sylvester's order: for each bit of the column, (a, b) -> (a + b, a - b)."""
        for bit in cutlass.range_constexpr(int(math.log2(PIECE))):
            for i in cutlass.range_constexpr(PIECE):
                if const_expr(not i >> bit & 1):
                    a, b = x[i], x[i + (1 << bit)]
                    x[i], x[i + (1 << bit)] = a + b, a - b
        for bit in cutlass.range_constexpr(int(math.log2(self.lanes))):
            # The partner's is a where this lane's is b.
            own = Float32(1 - 2 * (cute.arch.lane_idx() >> bit & 1))
            for i in cutlass.range_constexpr(PIECE):
                x[i] = cute.math.fma(x[i], own, cute.arch.shuffle_sync_bfly(x[i], offset=1 << bit))

    @cute.jit
    def transform_row(self, x: cute.Tensor):
        """The transform's last steps, between a thread's pieces of one row."""
        for bit in cutlass.range_constexpr(int(math.log2(self.pieces_of_row))):
            for j in cutlass.range_constexpr(self.pieces_of_row):
                if const_expr(not j >> bit & 1):
                    for i in cutlass.range_constexpr(PIECE):
                        a, b = x[i, j], x[i, j + (1 << bit)]
                        x[i, j], x[i, j + (1 << bit)] = a + b, a - b

    @cute.jit
    def maxima(self, largest: cute.Tensor) -> tuple:
        """max |x| of each of this CTA's halves, as bits, which for numbers that are not negative have the numbers'
        order; NaN is the largest."""
        layout = cute.make_layout((self.num_warps, self.num_halves))
        sMax = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, byte_alignment=16)
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        for half in cutlass.range_constexpr(self.num_halves):
            found = cute.arch.warp_redux_sync(Float32(largest[half]).bitcast(Int32), "max")
            if lane == 0:
                sMax[warp, half] = found
        # Every warp has written its maxima before any reads them all. It has also seen the mailbox's barrier made.
        cute.arch.sync_threads()
        found = (sMax[cutlass.min(lane, self.num_warps - 1), half] for half in range(self.num_halves))
        return tuple(cute.arch.warp_redux_sync(x, "max") for x in found)

    @cute.jit
    def open_mailbox(self) -> tuple:
        """Where the other CTA of the tile is to write its maximum: the number, and the mbarrier that tells of it. On
        that arrive thread 0, here, and the 4 bytes."""
        allocator = cutlass.memory.SmemAllocator()
        barrier = allocator.allocate_array(cutlass.Int64, 1)
        number = allocator.allocate_array(Int32, 1)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barrier, 1)
            # The other CTA, once it knows of this one's arrival below, finds the barrier made.
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4)
        # To the other CTA's warp 0, which waits in `exchange`: this CTA runs, and its barrier is made. Relaxed: the
        # fence has ordered the one write that matters; a release would be a MEMBAR.ALL.GPU in every warp.
        cute.arch.cluster_arrive_relaxed()
        return number, barrier

    @cute.jit
    def exchange(self, own: Int32, mailbox: tuple) -> Int32:
        """The larger of this CTA's number and the other's."""
        number, barrier = mailbox
        if cute.arch.warp_idx() == 0:
            # The other CTA has arrived in `open_mailbox`: its shared memory may be written. The others need not wait.
            cute.arch.cluster_wait()
            if cute.arch.lane_idx() == 0:
                cute.arch.store_async_dsmem(number, own, barrier, self.rank ^ 1)
        # The other CTA has written its number here. It also keeps this CTA, and with it the mailbox, until then.
        cute.arch.mbarrier_wait(barrier, 0)
        return cutlass.max(own, number.load())

    @cute.jit
    def raise_amax(self, largest: cute.Tensor, mAmax: cute.Tensor, tile: Tile):
        """Stage "maximum": this CTA's goes to its head, or tensor."""
        found = functools.reduce(cutlass.max, self.maxima(largest))
        if cute.arch.thread_idx()[0] == 0:
            amax = mAmax.iterator + cute.crd2idx((tile.tensor, tile.batch, tile.scale_head), mAmax.layout)
            amax = cute.recast_ptr(amax, dtype=Int32)
            cute.arch.red(amax, found, op="max", dtype="s32", sem="relaxed", scope="gpu")

    @cute.jit
    def amaxes(self, largest: cute.Tensor, mAmax: cute.Tensor | None, mailbox: tuple | None, tile: Tile) -> tuple:
        """The maximum under which each of this CTA's halves is scaled."""
        if const_expr(self.stage == "scale"):
            return self.given_amaxes(mAmax, tile)
        found = self.maxima(largest)
        if tile.tensor != Q:
            # One block: of both halves here, or of this CTA's and the other's.
            largest_of_block = functools.reduce(cutlass.max, found)
            if const_expr(self.shares_maximum):
                largest_of_block = self.exchange(largest_of_block, mailbox)
            found = (largest_of_block,) * self.num_halves
        return tuple(x.bitcast(Float32) for x in found)

    def given_amaxes(self, mAmax: cute.Tensor, tile: Tile) -> tuple:
        """What stage "maximum" found."""
        return (mAmax[tile.tensor, tile.batch, tile.scale_head],) * self.num_halves

    @cute.jit
    def store(self, values: cute.Tensor, amaxes: tuple, outputs: tuple, tile: Tile):
        """Writes the rows that exist."""
        thread = thread_index_anew()  # without: its rows wait in registers, and 8 B spill at head_dim 48
        gX8 = self.pieces(outputs, tile, thread)
        for half in cutlass.range_constexpr(self.num_halves):
            scale = scale_of(amaxes[half])
            reciprocal = reciprocal_of(scale)
            for i in cutlass.range_constexpr(self.rows_of_half):
                for j in cutlass.range_constexpr(self.pieces_of_row):
                    rX8 = rounded_quotients(values[None, j, i, half], scale, reciprocal)
                    if self.row(thread, half, i) < tile.num_rows:
                        cute.autovec_copy(rX8, vector(gX8[None, j, i, half]))

    @cute.jit
    def store_columns(self, values: cute.Tensor, amaxes: tuple, mV8: cute.Tensor, tile: Tile):
        """Turns V around in shared memory and writes 16 keys of a column at a time; seqlen_k is a multiple of 16."""
        memory = cutlass.memory.SmemAllocator().allocate_array(Uint16, self.turned_bytes // 2, byte_alignment=128)
        sV, thread = RowsToTurn(memory.toint(), self.num_halves * HALF, self.num_pieces), thread_index_anew()
        for half in cutlass.range_constexpr(self.num_halves):
            scale = scale_of(amaxes[half])
            reciprocal = reciprocal_of(scale)
            for i in cutlass.range_constexpr(self.rows_of_half):
                row = self.row(thread, half, i) - self.rank * HALF
                for j in cutlass.range_constexpr(self.pieces_of_row):
                    rX8 = rounded_quotients(values[None, j, i, half], scale, reciprocal)
                    chunk = self.column(thread) // PIECE + j * self.lanes
                    cute.autovec_copy(cute.recast_tensor(rX8, Uint16), chunk_at(sV.place(row, chunk)))
        # All rows of V are there.
        cute.arch.sync_threads()
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for n in cutlass.range_constexpr(self.num_pieces * self.num_halves // self.num_warps):
            part = warp_index + n * self.num_warps  # 64 rows of 16 columns
            chunk, first_row = part % self.num_pieces, part // self.num_pieces * HALF
            columns = sV.pairs_of_columns(first_row, chunk)
            key = first_row + self.rank * HALF + lane % 4 * 16
            if key < tile.num_rows:
                for c in cutlass.range_constexpr(2):
                    place = (tile.batch, tile.first_row + key, tile.head, chunk * PIECE + lane // 4 * 2 + c)
                    target = mV8.iterator + cute.crd2idx(place, mV8.layout)
                    target = cute.make_ptr(Uint32, target.toint(), cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(columns[None, c], cute.make_tensor(target, cute.make_layout(PIECE // 4)))

    @cute.jit
    def store_descales(self, amaxes: tuple, descales: tuple, tile: Tile):
        """Writes the tile's descales: of Q's blocks one a half, otherwise one, with which all of a head or a tensor is
        written by its first tiles, every time the same number."""
        mDescale = chosen(tile.tensor, *descales)
        blocks_a_tile = Int32(1)
        if const_expr(self.stage == "block"):
            blocks_a_tile = Int32(2) if tile.tensor == Q else Int32(1)
        factor = Float32(1.0)
        if const_expr(self.hadamard):
            factor = Float32(self.transform**-0.5) if tile.tensor != V else Float32(1.0)
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(self.num_halves):
                half = i + self.rank
                block = tile.index * blocks_a_tile + half
                if (half < blocks_a_tile) & (block < mDescale.shape[2]):
                    descale = scale_of(amaxes[i]) * factor
                    mDescale[tile.batch, tile.scale_head, block] = (
                        Float32(1.0) if amaxes[i] < SMALLEST_AMAX else descale
                    )


@cute.jit
def scale_of(amax: Float32) -> Float32:
    """By which a block is divided; NaN if amax is."""
    scale = divide(amax, Float32(E4M3_MAX), Float32(1 / E4M3_MAX))
    return Float32(1.0) if amax < SMALLEST_AMAX else scale


def vector(piece: cute.Tensor) -> cute.Tensor:
    """A piece in global memory, known to be aligned."""
    pointer = cute.make_ptr(piece.element_type, piece.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(PIECE))


@cute.jit
def pick(tensor: Int32, of_q, of_k, of_v):
    """One of three numbers."""
    return of_q if tensor == Q else (of_k if tensor == K else of_v)


@cute.jit
def chosen(tensor: Int32, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor) -> cute.Tensor:
    """One of three tensors, as a tensor whose address, shape and strides are known at run time."""
    address = pick(tensor, mQ.iterator.toint(), mK.iterator.toint(), mV.iterator.toint())
    pointer = cute.make_ptr(mQ.element_type, address, cute.AddressSpace.gmem, assumed_align=mQ.element_type.width // 8)
    # head_dim and its stride, 1, are static and the same in all three.
    shape, stride = (
        tuple(sizes[0] if isinstance(sizes[0], int) else pick(tensor, *sizes) for sizes in zip(*three, strict=True))
        for three in ((mQ.shape, mK.shape, mV.shape), (mQ.stride, mK.stride, mV.stride))
    )
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
