"""FA3 FP8: e4m3 values and their scales from 16-bit (or fp32) Q, K and V, rotated on the way, in one pass over HBM.

A block of rows of one head shares a scale, amax / 448, so whoever converts it needs its maximum first. A CTA therefore
keeps a tile of 128 rows in registers between the two: one block of K or V, two halves that are a block each of Q.

    HBM -> load -> rotate (Q, K) -> maximum -> store -> HBM        2 bytes an element in, 1 out, with scales="block"
    HBM -> load -> rotate (Q, K) -> maximum -> amax                one scale for a head or a tensor: two launches,
    HBM -> load -> rotate (Q, K) -> amax -> store -> HBM           twice "in"

A thread has 16 columns (a piece: 16 bytes of e4m3) of 4 rows that lie 32 apart. A row of head_dim = 16 n takes n
threads and a CTA 32 n, so every head_dim that is a multiple of 16 keeps every thread busy. head_dim 128:

    thread   0        1        2   ..   7        8        9   ..           lanes 0 to 7 share row 0, lanes 8 to 15
    row 0    0..15    16..31   ..       112..127                           row 1; a warp has 4 rows, 8 warps have 32.
    row 1                                        0..15    16..31 ..        Then rows 32 to 63, 64 to 95, 96 to 127.

Rotate is the Hadamard transform, butterfly by butterfly: the four lowest bits of the column lie within a thread, the
others are bits of the lane, so the partner is one shuffle away. A head_dim of m * 2^p is m transforms of length 2^p;
2^p divides 16 n, so its threads are neighbours in one warp. The factor 2^(-p/2) that makes it orthonormal is left to
the descale, which costs nothing.

    head_dim     CTAs of a tile   a thread's values   its registers   an SM's CTAs, their loads in flight
    up to 128    1                64, in fp32         80              3 of 256 threads (head_dim 128), 96 KiB
    up to 256    2, a cluster     32, in fp32         64              2 of 512 threads (head_dim 256), 64 KiB

One CTA with a whole tile of head_dim 256 would fill its SM, whose loads would then wait for the stores before. Of the
two, each has 64 rows, and writes its warps' maxima to both. Shared memory holds nothing but those maxima.

One launch for Q, K and V: short sequences are bound by launches, and long ones lose nothing, since the CTAs take the
tensors one after the other. Which one is its own a CTA learns from its number, and selects address and strides.

Numbers: x / scale as fp32 division rounds it, then to nearest even: the bits of algorithm.py, whose divisions these
are, where the Hadamard factor is a power of two; elsewhere its rounding shows. A NaN or an infinity makes NaN of its
scale and of all the values that share it.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
import torch
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from torch import Tensor

from fa3.algorithm import E4M3_MAX, SMALLEST_AMAX
from fa3.config import KV_BLOCK, Q_BLOCK
from fa_common.compile import KernelKey, load
from fa_common.generation import readable
from fa_common.tiles import DTYPES, fake_lengths
from fa_common.warp_tiles import thread_index_anew

TILE, HALF = KV_BLOCK, Q_BLOCK  # rows
ROW_STEP = 32  # from one row of a thread to its next: with 32 n threads a CTA, whatever n
ROWS_OF_HALF = HALF // ROW_STEP  # a thread's
PIECE = 16  # columns of a thread: 16 bytes of e4m3
MAX_HEAD_DIM_OF_CTA = 128  # beyond, two CTAs share a tile
REGISTERS = {2: 80, 1: 64}  # a thread's, by the halves of a tile that it has a part of; fp32 takes 16 more
LANES, SM_QUARTERS, QUARTER_REGISTERS = 32, 4, 16_384  # a warp's registers are all in one quarter of an SM
SHARED_MEMORY_PERCENT = 12  # of 228 KiB: 24 CTAs' 1 KiB, head_dim 16, and some
INPUT_DTYPES = DTYPES | {"float32": Float32}
SIGN_BITS = {16: 0x80008000, 32: 0x80000000}  # of 32 bits that hold elements so wide
Q, K, V = range(3)  # tensors, in the order of their tiles


# ---- Host


@dataclass(frozen=True)
class QuantizeConfig:
    """What decides the kernel's code beside the KernelKey's own fields."""

    stage: str  # "block" in one pass; "maximum", then "scale" for larger shares of a scale
    hadamard: bool


def quantize_key(q: Tensor, stage: str, hadamard: bool) -> KernelKey:
    """The kernel for tensors like q."""
    return KernelKey(
        "fa3",
        "quantize",
        str(q.dtype).removeprefix("torch."),
        q.shape[-1],
        causal=False,
        config=QuantizeConfig(stage, hadamard),
        sequences="dense" if q.ndim == 4 else "packed",
    )


def quantize_on_gpu(
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    scales: str,
    signs: Tensor | None = None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    max_seqlens: tuple[int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Quantises Q, K and V to e4m3, on their device's current stream; they have been checked.

    Args:
        tensors: q, k, v, float16, bfloat16 or float32, (batch, seqlen, heads, head_dim), or packed (total, heads,
            head_dim) with cu_seqlens and max_seqlens; head_dim a multiple of 16 up to 256.
        scales: "block", "head" or "tensor".
        signs: float32 (head_dim,) of 1 and -1, by which columns of q and k are multiplied before the Hadamard
            transform; None for neither.
        cu_seqlens: of queries and keys, int32 (batch + 1,).
        max_seqlens: of queries and keys.

    Returns:
        (q, k, v, descale_q, descale_k, descale_v): float8_e4m3fn, contiguous, and float32: scales="block" (batch,
        heads, blocks) with a block for 64 rows of q and 128 of k and v, "head" (batch, heads_kv), "tensor" (1,).
        What no row has, and what has only zeros, gets descale 1.
    """
    tensors = tuple(readable(x) for x in tensors)
    q, k, _ = tensors
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    max_seqlens = max_seqlens or (q.shape[1], k.shape[1])
    values = tuple(torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=q.device) for x in tensors)
    descales = _empty_descales(scales, batch, (q.shape[-2], k.shape[-2]), max_seqlens, q.device)
    if batch == 0:
        return *values, *(descale.fill_(1) for descale in descales)

    heads_kv = k.shape[-2]
    # The kernel's descales are (batch, heads, blocks): one block for a head, and for a tensor one number everywhere.
    targets = descales if scales == "block" else tuple(x[..., None].expand(batch, heads_kv, 1) for x in descales)

    def launch(stage: str, amax: Tensor | None) -> None:
        kernel = load(quantize_key(q, stage, hadamard=signs is not None), build_quantize)
        kernel(*tensors, *values, *targets, amax, signs, *(cu_seqlens or (None, None)), *max_seqlens)

    with torch.cuda.device(q.device):
        if scales == "block":
            launch("block", None)
        else:
            amax = torch.zeros((3, *descales[0].shape), dtype=torch.float32, device=q.device)
            amax = amax if scales == "head" else amax[..., None].expand(3, batch, heads_kv)
            launch("maximum", amax)
            launch("scale", amax)
    return *values, *descales


def _empty_descales(
    scales: str, batch: int, heads: tuple[int, int], max_seqlens: tuple[int, int], device: torch.device
) -> tuple[Tensor, ...]:
    (heads_q, heads_kv), (seqlen_q, seqlen_k) = heads, max_seqlens
    blocks_k = (batch, heads_kv, -(-seqlen_k // TILE))
    shapes = {
        "block": ((batch, heads_q, -(-seqlen_q // HALF)), blocks_k, blocks_k),
        "head": ((batch, heads_kv),) * 3,
        "tensor": ((1,),) * 3,
    }[scales]
    return tuple(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)


def build_quantize(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel of `key` for sm_90a; called as Quantize.__call__ is, without the stream."""
    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
    dtype, packed = INPUT_DTYPES[key.dtype], key.sequences == "packed"
    rows_q, rows_k = (seqlen_q,), (seqlen_k,)  # totals, if packed
    if not packed:
        rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    shapes = [(*rows_q, heads_q, key.head_dim)] + [(*rows_k, heads_kv, key.head_dim)] * 2
    # A descale has its tensor's heads, or those of K and V.
    descales = [make_fake_tensor(Float32, [batch, *_any(2)], stride=_any_stride(3)) for _ in range(3)]
    one_pass = key.config.stage == "block"
    return cute.compile(
        Quantize(key),
        *(_fake_pieces(dtype, shape) for shape in shapes),
        *(_fake_pieces(Float8E4M3FN, shape) for shape in shapes),
        *descales,
        None if one_pass else make_fake_tensor(Float32, (3, batch, heads_kv), stride=_any_stride(3)),
        make_fake_tensor(Float32, (key.head_dim,), stride=(1,), assumed_align=16) if key.config.hadamard else None,
        *((fake_lengths(cute.sym_int()) for _ in range(2)) if packed else (None, None)),
        Int32(0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi " + options,
    )


def _any(number: int) -> tuple:
    return tuple(cute.sym_int() for _ in range(number))


def _any_stride(number: int) -> tuple:
    return tuple(cute.sym_int64() for _ in range(number))


def _fake_pieces(dtype: type, shape: tuple) -> cute.Tensor:
    """Rows of any 64-bit strides that are multiples of 16 bytes, with a unit last one."""
    strides = tuple(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:])
    return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)


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
        self.num_pieces = key.head_dim // PIECE  # of a row
        self.num_threads = self.num_pieces * ROW_STEP
        self.num_warps = self.num_threads // LANES
        self.cluster_size = 1 if key.head_dim <= MAX_HEAD_DIM_OF_CTA else 2
        self.num_halves = 2 // self.cluster_size  # of a tile that a CTA has
        registers = REGISTERS[self.num_halves] + (16 if self.dtype.width == 32 else 0)
        self.ctas_of_sm = QUARTER_REGISTERS // (registers * LANES) * SM_QUARTERS // self.num_warps
        self.transform = key.head_dim & -key.head_dim  # its length, the largest power of two that divides head_dim

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
            grid=(num_tiles * self.cluster_size, 1, 1),
            block=[self.num_threads, 1, 1],
            cluster=(self.cluster_size, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.ctas_of_sm,
            # Percent, of which each CTA takes 1 KiB. The rest is L1: it has the second half of each sector of 32 bytes
            # that a thread's two loads ask for. Unsaid, the DSL asks a GPU.
            preferred_smem_carveout=SHARED_MEMORY_PERCENT,
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
            if const_expr(self.cluster_size == 2 and self.stage != "scale"):
                # To the other CTA: this one has started.
                cute.arch.cluster_arrive_relaxed()
            rX = self.load(inputs, tile)
            values = self.rotate(rX, mSigns, tile)
            if const_expr(self.stage == "maximum"):
                self.raise_amax(values, mAmax, tile)
            else:
                amaxes = self.amaxes(values, mAmax, tile)
                # First what needs most of `tile`: the values have most of the registers until they are stored.
                self.store_descales(amaxes, descales, tile)
                self.store(values, amaxes, outputs, tile)
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
        number = cute.arch.block_idx()[0] // self.cluster_size
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
        return cute.arch.block_idx()[0] % self.cluster_size

    def row(self, thread: Int32, half: int, i: int) -> Int32:
        """A thread's i-th row of this CTA's `half`, counted in the tile."""
        return (half + self.rank) * HALF + i * ROW_STEP + thread // self.num_pieces

    def pieces(self, tensors: tuple, tile: Tile, thread: Int32) -> cute.Tensor:
        """A thread's columns of its rows in the one of three tensors that the tile is of, (PIECE, rows of a half,
        halves)."""
        mT = chosen(tile.tensor, *tensors)
        row = tile.first_row + self.row(thread, 0, 0)
        row_stride = mT.stride[-3]
        gT = mT[row, tile.head, None] if cute.rank(mT) == 3 else mT[tile.batch, row, tile.head, None]
        gT = gT.iterator + thread % self.num_pieces * PIECE
        return cute.make_tensor(
            gT,
            cute.make_layout(
                (PIECE, ROWS_OF_HALF, self.num_halves), stride=(1, row_stride * ROW_STEP, row_stride * HALF)
            ),
        )

    @cute.jit
    def load(self, inputs: tuple, tile: Tile) -> cute.Tensor:
        """This thread's pieces; 0 past the sequence's end. All loads are issued before the first value is used."""
        rX = cute.make_rmem_tensor((PIECE, ROWS_OF_HALF, self.num_halves), self.dtype)
        rX.fill(0)
        thread = cute.arch.thread_idx()[0]
        gX = self.pieces(inputs, tile, thread)
        for half in cutlass.range_constexpr(self.num_halves):
            for i in cutlass.range_constexpr(ROWS_OF_HALF):
                if self.row(thread, half, i) < tile.num_rows:
                    cute.autovec_copy(vector(gX[None, i, half]), rX[None, i, half])
        # For the compiler: no load moves across, down to where its values are used.
        cute.arch.sync_warp()
        return rX

    @cute.jit
    def rotate(self, rX: cute.Tensor, mSigns: cute.Tensor | None, tile: Tile) -> cute.Tensor:
        """The values in fp32; those of Q and K times signs, and Hadamard transformed but for the factor."""
        values = cute.make_rmem_tensor(rX.shape, Float32)
        if const_expr(self.hadamard):
            if tile.tensor == V:
                values.store(rX.load().to(Float32))
            else:
                signs = self.sign_bits(mSigns)
                for half in cutlass.range_constexpr(self.num_halves):
                    for i in cutlass.range_constexpr(ROWS_OF_HALF):
                        x, rotated = rX[None, i, half], values[None, i, half]
                        self.flip(x, signs)
                        rotated.store(x.load().to(Float32))
                        self.transform_piece(rotated)
                        # For the compiler: one piece after the other. At once, in 80 registers, they would spill.
                        cute.arch.sync_warp()
        else:
            values.store(rX.load().to(Float32))
        return values

    @cute.jit
    def sign_bits(self, mSigns: cute.Tensor) -> cute.Tensor:
        """The signs of this thread's columns, as words that flip those of a piece."""
        column = cute.arch.thread_idx()[0] % self.num_pieces * PIECE
        signs = cute.make_rmem_tensor(PIECE, Float32)
        gSigns = cute.make_ptr(Float32, (mSigns.iterator + column).toint(), cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(gSigns, cute.make_layout(PIECE)), signs)
        as_elements = cute.make_rmem_tensor(PIECE, self.dtype)
        as_elements.store(signs.load().to(self.dtype))
        words = cute.recast_tensor(as_elements, Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] & Uint32(SIGN_BITS[self.dtype.width])
        return words

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
        for bit in cutlass.range_constexpr(int(math.log2(self.transform // PIECE))):
            # The partner's is a where this lane's is b.
            own = Float32(1 - 2 * (cute.arch.lane_idx() >> bit & 1))
            for i in cutlass.range_constexpr(PIECE):
                x[i] = cute.math.fma(x[i], own, cute.arch.shuffle_sync_bfly(x[i], offset=1 << bit))

    @cute.jit
    def maxima(self, values: cute.Tensor) -> tuple:
        """max |x| of both halves of the tile, as bits, which for numbers that are not negative have the numbers' order;
        NaN is the largest."""
        layout = cute.make_layout((self.num_warps, 2))
        sMax = cutlass.memory.SmemAllocator().allocate_tensor(Int32, layout, byte_alignment=16)
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        if const_expr(self.cluster_size == 2):
            # The other CTA has started, so that its shared memory may be written.
            cute.arch.cluster_wait()
        for half in cutlass.range_constexpr(self.num_halves):
            largest = Float32(0.0)
            for i in cutlass.range_constexpr(ROWS_OF_HALF):
                largest = cute.math.absf(values[None, i, half].load()).reduce(cute.ReductionOp.MAX, largest, 0)
            largest = cute.arch.warp_redux_sync(Float32(largest).bitcast(Int32), "max")
            # Lane i writes to CTA i of the cluster.
            if lane < self.cluster_size:
                place = sMax[warp, None].iterator + (half + self.rank) * self.num_warps
                if const_expr(self.cluster_size == 2):
                    there = cute.arch.map_dsmem_ptr(place, lane).toint()
                    place = cute.make_ptr(Int32, there, cute.AddressSpace.smem, assumed_align=4)
                cute.arch.store(place, largest, ss="cta" if self.cluster_size == 1 else "cluster")
        # Every warp of the tile has written its maxima, here and in the other CTA.
        if const_expr(self.cluster_size == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        found = (sMax[cutlass.min(lane, self.num_warps - 1), half] for half in range(2))
        return tuple(cute.arch.warp_redux_sync(x, "max") for x in found)

    @cute.jit
    def raise_amax(self, values: cute.Tensor, mAmax: cute.Tensor, tile: Tile):
        """Stage "maximum": the tile's goes to its head, or tensor."""
        first, second = self.maxima(values)
        if (cute.arch.thread_idx()[0] == 0) & (self.rank == 0):
            amax = mAmax.iterator + cute.crd2idx((tile.tensor, tile.batch, tile.scale_head), mAmax.layout)
            amax = cute.recast_ptr(amax, dtype=Int32)
            cute.arch.red(amax, cutlass.max(first, second), op="max", dtype="s32", sem="relaxed", scope="gpu")

    @cute.jit
    def amaxes(self, values: cute.Tensor, mAmax: cute.Tensor | None, tile: Tile) -> tuple:
        """The maximum under which each of this CTA's halves is scaled."""
        if const_expr(self.stage == "scale"):
            return self.given_amaxes(mAmax, tile)
        first, second = self.maxima(values)
        if tile.tensor != Q:
            first = cutlass.max(first, second)
            second = first
        if const_expr(self.cluster_size == 2):
            return ((first if self.rank == 0 else second).bitcast(Float32),)
        return first.bitcast(Float32), second.bitcast(Float32)

    def given_amaxes(self, mAmax: cute.Tensor, tile: Tile) -> tuple:
        """What stage "maximum" found."""
        return (mAmax[tile.tensor, tile.batch, tile.scale_head],) * self.num_halves

    @cute.jit
    def store(self, values: cute.Tensor, amaxes: tuple, outputs: tuple, tile: Tile):
        """Divides by the scale, rounds to e4m3, and writes the rows that exist."""
        thread = thread_index_anew()  # without: its rows wait in registers, and 8 B spill at head_dim 48
        gX8 = self.pieces(outputs, tile, thread)
        for half in cutlass.range_constexpr(self.num_halves):
            scale = scale_of(amaxes[half])
            reciprocal = reciprocal_of(scale)
            for i in cutlass.range_constexpr(ROWS_OF_HALF):
                quotients = cute.make_rmem_tensor(PIECE, Float32)
                for c in cutlass.range_constexpr(PIECE):
                    quotients[c] = divide(values[c, i, half], scale, reciprocal)
                rX8 = cute.make_rmem_tensor(PIECE, Float8E4M3FN)
                rX8.store(quotients.load().to(Float8E4M3FN))
                if self.row(thread, half, i) < tile.num_rows:
                    cute.autovec_copy(rX8, vector(gX8[None, i, half]))

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


def divide(x: Float32, y: Float32, reciprocal: Float32) -> Float32:
    """x / y, correctly rounded: the product may be off by a unit, which its remainder, exact in one FMA, puts right.

    Three instructions, where a division has eight and a branch; y is far from both ends of the normal numbers.
    """
    quotient = x * reciprocal
    remainder = cute.math.fma(-quotient, y, x)
    return cute.math.fma(remainder, reciprocal, quotient)


def reciprocal_of(y: Float32) -> Float32:
    """1 / y, of what the hardware approximates one Newton step further."""
    approximate = cute.arch.rcp_approx(y)
    return cute.math.fma(cute.math.fma(-y, approximate, Float32(1.0)), approximate, approximate)


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
