"""Register and shared-memory tiles: the views, copies and masks that no generation changed.

Both `mma.sync` (m16n8k16) and WGMMA (m64nNk16) hand a thread its accumulator in the same small pattern: two
neighbouring columns of row r, the same two of row r + 8, then the next eight columns. Four lanes (a quad) share a row.
Everything here follows from that one picture:

    lane 4i + q:   row i      columns 2q, 2q+1 | 8+2q, 8+2q+1 | 16+2q, ...
                   row i + 8  columns 2q, 2q+1 | 8+2q, 8+2q+1 | 16+2q, ...

Helpers without a decorator are plain Python at trace time; those under `cute.jit` hold loops or dynamic conditions.
"""

import math
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op

QUAD = 4  # lanes that share a row of an accumulator
DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def as_rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator fragment ((2, 2[, N/8]), MMA_M, MMA_N), seen as (rows, columns) of this thread."""
    shape, stride = acc.layout.shape, acc.layout.stride
    # WGMMA repeats the pattern inside one instruction: a third entry, N/8, which mma.sync has not.
    rows, columns = (shape[0][1], shape[1]), (shape[0][0], *shape[0][2:], shape[2])
    row_stride, column_stride = (stride[0][1], stride[1]), (stride[0][0], *stride[0][2:], stride[2])
    return cute.make_tensor(acc.iterator, cute.make_layout((rows, columns), stride=(row_stride, column_stride)))


def as_operand_a(acc_layout: cute.Layout) -> cute.Layout:
    """The layout under which an accumulator's registers, once 16-bit, are the A operand of the next product.

    The C fragment of 16 columns is exactly the A fragment of one k-step of 16, so P needs no shuffle:
    WGMMA ((2, 2, N/8), M, N') -> ((2, 2, 2), M, (N/16, N')), mma.sync ((2, 2), M, N) -> ((2, 2, 2), M, N/2).
    """
    if const_expr(cute.rank(acc_layout.shape[0]) == 3):
        halves = cute.logical_divide(acc_layout, ((None, None, 2), None, None))  # ((2, 2, (2, N/16)), M, N')
        (s0, s1, (s2, s3)), s_m, s_n = halves.shape
        (d0, d1, (d2, d3)), d_m, d_n = halves.stride
        return cute.make_layout(((s0, s1, s2), s_m, (s3, s_n)), stride=((d0, d1, d2), d_m, (d3, d_n)))
    halves = cute.logical_divide(acc_layout, (None, None, 2))  # ((2, 2), M, (2, N/2))
    (s0, s1), s_m, (s2, s3) = halves.shape
    (d0, d1), d_m, (d2, d3) = halves.stride
    return cute.make_layout(((s0, s1, s2), s_m, s3), stride=((d0, d1, d2), d_m, d3))


@dsl_user_op
def times(condition: Boolean, *, loc=None, ip=None) -> Int32:
    """1 if it holds, else 0, in a way that hides from the compiler that it is no larger: `for _ in range(times(c))`.

    What ptxas would turn from a branch into predicates stays a branch, across which it does not schedule.
    """
    number = Int32(condition, loc=loc, ip=ip)
    hidden = llvm.inline_asm(
        T.i32(),
        [number.ir_value(loc=loc, ip=ip)],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(hidden)


@dsl_user_op
def rounded_pair(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Uint32:
    """Two fp32 values rounded to `dtype`, packed into one register.

    Inline assembly for the compiler's sake: it moves an ordinary conversion down to where P is used, behind the WGMMAs
    of the next block, which keeps P alive in fp32 too (C7512: all WGMMAs serialised for want of registers).
    """
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    packed = llvm.inline_asm(
        T.i32(),
        [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
        f"cvt.rn.{name}.f32 $0, $1, $2;",
        "=r,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Uint32(packed)


def round_to_operand_a(acc: cute.Tensor, rP: cute.Tensor) -> None:
    """Rounds an accumulator into rP, an A operand laid out by `as_operand_a` over the same registers."""
    # Numbered as the accumulator numbers its elements: rP's own modes count the same registers in another order.
    pairs = cute.recast_tensor(cute.make_tensor(rP.iterator, acc.layout), Uint32)
    for i in range(cute.size(pairs)):
        pairs[i] = rounded_pair(acc[2 * i], acc[2 * i + 1], rP.element_type)


@dataclass(frozen=True)
class KeyBlocks:
    """The key blocks that some queries see: [begin, end); those of [full_begin, full_end) every query sees whole."""

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32

    def is_masked(self, n_block: Int32) -> Boolean:
        """Whether some query does not see the whole block."""
        return (n_block >= self.full_end) | (n_block < self.full_begin)


def visible_blocks(queries: tuple, tile_n: int, seqlens: tuple, bounds: tuple) -> KeyBlocks:
    """The key blocks that `queries`, (first, number), see; at least one, so that a tile without a key writes its zeros.

    `bounds` is (left, right): how many keys before and behind its own position a query sees, None (static) for all;
    causal is (None, 0). Positions are aligned bottom-right: query i faces key i + seqlen_k - seqlen_q.
    """
    (first, number), (seqlen_q, seqlen_k), (left, right) = queries, seqlens, bounds
    facing = first + seqlen_k - seqlen_q
    begin, full_begin, full_end, end = 0, 0, seqlen_k, seqlen_k
    if const_expr(right is not None):
        first_hidden = first + 1 + right + seqlen_k - seqlen_q  # from the first query
        end = cutlass.min(seqlen_k, first_hidden + number - 1)
        full_end = cutlass.min(seqlen_k, first_hidden)
    num_blocks = cutlass.max(cute.ceil_div(end, tile_n), 1)
    num_full = cutlass.max(full_end, 0) // tile_n
    if const_expr(left is None):
        return KeyBlocks(Int32(0), Int32(0), num_full, num_blocks)
    begin = cutlass.min(cutlass.max(facing - left, 0) // tile_n, num_blocks - 1)
    full_begin = cute.ceil_div(cutlass.max(facing + number - 1 - left, 0), tile_n)
    full_begin = cutlass.min(cutlass.max(full_begin, begin), num_blocks)
    return KeyBlocks(begin, full_begin, cutlass.max(num_full, full_begin), num_blocks)


@cute.jit
def mask_scores(
    acc_S: cute.Tensor, tScS: cute.Tensor, origin: tuple, seqlens: tuple, bounds: tuple, group: Int32 | None = None
):
    """Sets the scores of keys that a query does not see to -inf; `origin` is the tile's first (row, key).

    `group` rows belong to one query, one if None. A select for each element, not a branch (docs/dsl-notes.md).
    """
    S, cS = as_rows_and_columns(acc_S), as_rows_and_columns(tScS)
    (first_row, first_key), (seqlen_q, seqlen_k), (left, right) = origin, seqlens, bounds
    for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
        row, column = cS[r, 0]
        query = first_row + row if const_expr(group is None) else (first_row + row) // group
        facing = query + seqlen_k - seqlen_q
        end = seqlen_k
        if const_expr(right is not None):
            # Added up in this order: from `facing` on, fa2 at d = 64 spills 8 bytes.
            end = cutlass.min(seqlen_k, query + 1 + seqlen_k - seqlen_q + right)
        # Counted from this thread's first column; its c-th lies a constant further (see the picture above).
        end = end - first_key - column
        begin = Int32(0) if const_expr(left is None) else facing - left - first_key - column
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            place = cS.layout((r, c))[1] - cS.layout((r, 0))[1]
            hidden = end <= place
            if const_expr(left is not None):
                hidden = hidden | (begin > place)
            S[r, c] = -Float32.inf if hidden else S[r, c]


@cute.jit
def cap_scores(acc_S: cute.Tensor, scale: Float32):
    """S = tanh(scale * S), in place, as 1 - 2 / (1 + exp(2 * scale * S)): tanh.approx is right to 11 bits only, which a
    softcap of 50 makes an error of 2 % in P."""
    twice_log2 = scale * (2.0 * math.log2(math.e))
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        exponential = cute.math.exp2(acc_S[i] * twice_log2, fastmath=True)
        acc_S[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exponential)


def score_scales(softmax_scale: Float32, softcap: Float32 | None) -> tuple:
    """What raw scores are multiplied by before the tanh (1 without a softcap), and what goes to the exponential in base
    2: softcap * tanh(scale * S / softcap) is taken as tanh in place, the factor before it with the exponential."""
    scale_tanh = Float32(1.0) if softcap is None else softmax_scale / softcap
    return scale_tanh, (softmax_scale if softcap is None else softcap) * math.log2(math.e)


def quad_max(x: Float32) -> Float32:
    """The maximum of a quad's four lanes, one instruction a step: warp_reduction_max takes four, for NaN's sake."""
    for offset in (2, 1):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def quad_sum(x: Float32) -> Float32:
    return cute.arch.warp_reduction_sum(x, threads_in_group=QUAD)


@cute.jit
def row_sum_of(p: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """The sum of row r of p (rows, columns): four chains of adds, since one would wait for each of its own results."""
    num_columns = cute.size(p, mode=[1])
    partial = [p[r, c] for c in range(4)]
    for c in cutlass.range_constexpr(4, num_columns):
        partial[c % 4] = partial[c % 4] + p[r, c]
    return (partial[0] + partial[1]) + (partial[2] + partial[3])


def check_shared_memory(num_bytes: int, config, head_dim: int) -> None:
    """Raises ValueError when a CTA's shared memory exceeds what sm_90 has; the compiler would not notice."""
    capacity = cutlass.memory.SmemAllocator.capacity_in_bytes("sm_90")
    if num_bytes > capacity:
        raise ValueError(
            f"{config} needs {num_bytes} bytes of shared memory at head_dim {head_dim}, sm_90 has {capacity}: "
            "take smaller tiles or fewer stages"
        )


# ---- One sequence of a batch, padded or packed (fa1, fa2)


@dataclass(frozen=True)
class Sequence:
    """The queries and keys of one batch entry: where they begin in a packed tensor (0 if not packed), how many."""

    offset_q: Int32
    seqlen_q: Int32
    offset_k: Int32
    seqlen_k: Int32
    batch: Int32

    @staticmethod
    def of(mQ: cute.Tensor, mK: cute.Tensor, cu_seqlens: tuple, batch: Int32) -> "Sequence":
        """mQ and mK are `by_rows`; cu_seqlens is that of the queries and that of the keys, None unless packed."""
        cu_seqlens_q, cu_seqlens_k = cu_seqlens
        if cu_seqlens_q is None:
            return Sequence(Int32(0), mQ.shape[0], Int32(0), mK.shape[0], batch)
        offset_q, offset_k = cu_seqlens_q[batch], cu_seqlens_k[batch]
        return Sequence(
            offset_q, cu_seqlens_q[batch + 1] - offset_q, offset_k, cu_seqlens_k[batch + 1] - offset_k, batch
        )

    def queries(self, mT: cute.Tensor, head: Int32) -> cute.Tensor:
        """(rows, head_dim) of this sequence in a tensor that has a row for each query, `by_rows`."""
        return self.rows(mT, head, self.offset_q)

    def keys(self, mT: cute.Tensor, head: Int32) -> cute.Tensor:
        """(rows, head_dim) of this sequence in a tensor that has a row for each key, `by_rows`."""
        return self.rows(mT, head, self.offset_k)

    def rows(self, mT: cute.Tensor, head: Int32, offset: Int32) -> cute.Tensor:
        if cute.rank(mT) == 4:
            return mT[None, None, head, self.batch]
        return cute.domain_offset((offset, 0), mT[None, None, head])

    def statistics(self, mT: cute.Tensor, head: Int32) -> cute.Tensor:
        """(rows,) of this sequence's queries in LSE and its like, (batch, heads, seqlen_q) or (heads, total_q)."""
        if cute.rank(mT) == 3:
            return mT[self.batch, head, None]
        return cute.domain_offset((self.offset_q,), mT[head, None])


def by_rows(mT: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) as (seqlen, head_dim, heads, batch); packed (total, heads, head_dim) as (total,
    head_dim, heads)."""
    modes = [1, 3, 2, 0] if cute.rank(mT) == 4 else [0, 2, 1]
    return cute.make_tensor(mT.iterator, cute.select(mT.layout, mode=modes))


# ---- What kernels are compiled for: every size dynamic but head_dim


def fake_sequences(dtype: type, shape: tuple) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim), or with other first modes, of any 16-byte aligned strides, 64-bit, with a unit
    last one."""
    strides = tuple(cute.sym_int64(divisibility=8) for _ in shape[1:])
    return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)


def fake_rows(shape: tuple) -> cute.Tensor:
    """Contiguous fp32, the last mode innermost: LSE and other statistics of a row."""
    return make_fake_compact_tensor(Float32, shape, stride_order=tuple(reversed(range(len(shape)))))


def fake_lengths(size) -> cute.Tensor:
    """(size,) int32: lengths, or sums of lengths."""
    return make_fake_compact_tensor(Int32, (size,))


# ---- Ampere-style tiles: cp.async into swizzled shared memory, ldmatrix out of it (fa1, fa2)
#
# A (rows, columns) tile of a 16-bit type lies in panels of 64 columns, each row of a panel 128 bytes. Inside a row the
# 16-byte chunk c stands at place c XOR (row mod 8), so that the eight rows one ldmatrix phase reads hit all 32 banks.
# Steps of eight rows or of a panel leave that XOR alone: they are immediate offsets. A step of 16 columns flips bits of
# it: one more XOR with a constant. The copies below say so outright. Left to a swizzled layout, the compiler kept an
# address register for each ldmatrix of a loop, up to 80, and spilled (docs/dsl-notes.md).

PANEL = 64  # columns of a 128-byte row
CHUNK = 8  # elements of 16 bytes


def whole_panels(num_columns: int) -> int:
    """The columns of a tile that holds `num_columns`: whole panels."""
    return -(-num_columns // PANEL) * PANEL


def tile_layout(rows: int, columns: int) -> cute.Layout:
    """(rows, columns) in panels, before the XOR."""
    return cute.make_layout((rows, (PANEL, columns // PANEL)), stride=(PANEL, (1, rows * PANEL)))


def swizzled_offset(row: Int32, column: Int32, rows: int) -> Int32:
    """Where element (row, column) of a tile lies, in elements; column must be a multiple of 8."""
    place = (column % PANEL // CHUNK) ^ (row % 8)
    return column // PANEL * (rows * PANEL) + row * PANEL + place * CHUNK


def shared_pointer(dtype: type, address: Int32, align: int) -> cute.Pointer:
    """A pointer from a byte address that is known to be aligned (`Pointer.align` would round it up, at run time)."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align)


def moved(pieces: cute.Tensor, num_bytes: Int32) -> cute.Tensor:
    """A thread's pieces of a shared tile, so many bytes further: in another stage. A multiple of 128."""
    pointer = shared_pointer(pieces.element_type, pieces.iterator.toint() + num_bytes, align=16)
    return cute.make_tensor(pointer, pieces.layout)


@dataclass(frozen=True)
class Backwards:
    """This thread's pieces of a global tile, block after block, from some block down to the first.

    One address that steps down, carried through the loop. The compiler would compute it anew from head, batch and
    strides in every block: a tenth of fa2's instructions.
    """

    address: cute.Tensor  # (1,) Int64, in registers
    step: Int64  # bytes from one block to the next
    dtype: type
    layout: cute.Layout  # of a block's pieces, (16 B, rows, panels)

    @staticmethod
    def of(pieces: cute.Tensor, n_block: Int32) -> "Backwards":
        """From pieces (16 B, rows, panels, n_blocks), beginning at `n_block`."""
        address = cute.make_rmem_tensor((1,), Int64)
        address[0] = pieces[None, None, None, n_block].iterator.toint()
        step = Int64(pieces.stride[3]) * (pieces.element_type.width // 8)
        return Backwards(address, step, pieces.element_type, cute.select(pieces.layout, mode=[0, 1, 2]))

    def next(self) -> cute.Tensor:
        """The pieces of this block; the next call gives those of the block before it."""
        pointer = cute.make_ptr(self.dtype, self.address[0], cute.AddressSpace.gmem, assumed_align=16)
        self.address[0] = self.address[0] - self.step
        return cute.make_tensor(pointer, self.layout)


@dataclass(frozen=True)
class RowCopy:
    """This thread's share of copying a (rows, columns) tile between global and shared memory, 16 bytes at a time.

    Eight threads take a 128-byte row. `num_threads / 8` rows at a time is a multiple of eight: one XOR serves them all.
    A tile is whole panels; the columns of the last one that global memory has not are zeros in shared memory.
    """

    asynchronous: cute.CopyAtom  # cp.async, global to shared
    synchronous: cute.CopyAtom  # 16-byte loads and stores
    thread: cute.TiledCopy
    pieces: cute.Tensor  # coordinates (row, column) of this thread's 16-byte pieces, (16 B, rows, panels)
    num_columns: int  # that global memory has

    @staticmethod
    def of(dtype: type, rows: int, num_columns: int, num_threads: int, thread: Int32 | None = None) -> "RowCopy":
        asynchronous = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
        )
        synchronous = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
        thread = cute.make_tiled_copy_tv(
            asynchronous, cute.make_ordered_layout((num_threads // 8, 8), order=(1, 0)), cute.make_layout((1, CHUNK))
        ).get_slice(cute.arch.thread_idx()[0] if thread is None else thread)
        pieces = thread.partition_S(cute.make_identity_tensor((rows, whole_panels(num_columns))))
        return RowCopy(asynchronous, synchronous, thread, pieces, num_columns)

    def of_global(self, g: cute.Tensor) -> cute.Tensor:
        """This thread's pieces of a global (rows, columns, ...) tile: (16 B, rows, panels, ...)."""
        return self.thread.partition_S(g)

    def of_shared(self, s: cute.Tensor) -> cute.Tensor:
        """This thread's pieces of a shared tile, XOR included: (16 B, rows, panels)."""
        row, column = self.pieces[0, 0, 0]
        offset = swizzled_offset(row, column, cute.size(s, mode=[0]))
        pointer = shared_pointer(s.element_type, s.iterator.toint() + offset * 2, align=16)
        return cute.make_tensor(pointer, self.thread.partition_D(s).layout)

    @cute.jit
    def load(self, g: cute.Tensor, s: cute.Tensor):
        """Starts copying all rows of a tile into shared memory; both arguments are this thread's pieces."""
        for panel in cutlass.range_constexpr(cute.size(s, mode=[2])):
            if const_expr(self.is_whole(panel)):
                cute.copy(self.asynchronous, g[None, None, panel], s[None, None, panel])
            else:
                if self.pieces[0, 0, panel][1] < self.num_columns:
                    cute.copy(self.asynchronous, g[None, None, panel], s[None, None, panel])
                else:
                    s[None, None, panel].fill(0)

    @cute.jit
    def load_rows(self, g: cute.Tensor, s: cute.Tensor, num_rows: Int32):
        """Starts copying the first `num_rows` rows and zeroes the others: stale shared memory might be NaN, and 0 * NaN
        is NaN."""
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            for panel in cutlass.range_constexpr(cute.size(s, mode=[2])):
                if self.exists(i, panel, num_rows):
                    cute.copy(self.asynchronous, g[None, i, panel], s[None, i, panel])
                else:
                    s[None, i, panel].fill(0)

    @cute.jit
    def store_rows(self, s: cute.Tensor, g: cute.Tensor, num_rows: Int32):
        """Copies the first `num_rows` rows of a shared tile out to global memory."""
        for i in cutlass.range_constexpr(cute.size(s, mode=[1])):
            for panel in cutlass.range_constexpr(cute.size(s, mode=[2])):
                if self.exists(i, panel, num_rows):
                    piece = cute.make_rmem_tensor_like(s[None, i, panel])
                    cute.copy(self.synchronous, s[None, i, panel], piece)
                    cute.copy(self.synchronous, piece, g[None, i, panel])

    def is_whole(self, panel: int) -> bool:
        """Whether global memory has every column of a panel."""
        return (panel + 1) * PANEL <= self.num_columns

    def exists(self, i: int, panel: int, num_rows: Int32) -> Boolean:
        """Whether global memory has this thread's piece of its i-th row, of `num_rows` in all, in a panel."""
        row, column = self.pieces[0, i, panel]
        return row < num_rows if self.is_whole(panel) else (row < num_rows) & (column < self.num_columns)


@dataclass(frozen=True)
class Operand:
    """One operand of an mma.sync product: where this lane's ldmatrix reads, and the registers it fills."""

    atom: cute.CopyAtom
    address: Int32  # of this lane's first 16 bytes, XOR included
    num_rows: int  # of the shared tile
    rows_apart: int  # rows from one ldmatrix to the next
    transpose: bool  # the product's depth runs along the tile's rows (V), not its columns (Q, K)
    filled: cute.Tensor  # `registers`, as ldmatrix fills them: (ldmatrix, MMA_M or MMA_N, MMA_K)
    registers: cute.Tensor  # (MMA, MMA_M or MMA_N, MMA_K)

    @staticmethod
    def a(mma: cute.TiledMma, s: cute.Tensor, thread: Int32) -> "Operand":
        """The (M, K) operand; warps lie side by side along M."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), s.element_type)
        copy = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
        registers = mma.make_fragment_A(mma.get_slice(thread).partition_A(s))
        shape = cute.product_each(s.shape)
        row, column = copy.partition_S(cute.make_identity_tensor(shape))[0, 0, 0]
        address = s.iterator.toint() + swizzled_offset(row, column, shape[0]) * 2
        rows_apart = shape[0] // cute.size(registers, mode=[1])
        return Operand(atom, address, shape[0], rows_apart, False, copy.retile(registers), registers)

    @staticmethod
    def b(
        mma: cute.TiledMma, s: cute.Tensor, thread: Int32, rows: tuple | None = None, transpose: bool = False
    ) -> "Operand":
        """The (N, K) operand from an (N, K) tile, or, transposed, from a (K, N) one.

        rows: (first, number) of the tile's rows to use, a multiple of 16 each; all of them by default.
        """
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), s.element_type)
        copy = cute.make_tiled_copy_B(atom, mma).get_slice(thread)
        num_rows, num_columns = cute.product_each(s.shape)
        first_row, rows_used = rows or (0, num_rows)
        shape = (num_columns, rows_used) if transpose else (rows_used, num_columns)
        coordinates = copy.partition_S(cute.make_identity_tensor(shape))[0, 0, 0]
        row, column = reversed(coordinates) if transpose else coordinates
        address = s.iterator.toint() + swizzled_offset(first_row + row, column, num_rows) * 2
        registers = mma.make_fragment_B(mma.partition_shape_B(shape))
        return Operand(atom, address, num_rows, 16, transpose, copy.retile(registers), registers)

    def moved(self, num_bytes: Int32) -> "Operand":
        """The same operand, so many bytes further in shared memory: in another stage. A multiple of 128."""
        return replace(self, address=self.address + num_bytes)

    def load_all(self) -> None:
        """Reads every ldmatrix.x4 of it."""
        for k_step in range(cute.size(self.registers, mode=[2])):
            for i in range(self.num_groups):
                self.load(i, k_step)

    def load(self, i: int, k_step: int) -> None:
        """Reads one ldmatrix.x4: 16 rows of M or N, the i-th such group, by the 16 of a k-step."""
        row, column = (k_step * 16, i * 16) if self.transpose else (i * self.rows_apart, k_step * 16)
        # The XOR is on byte addresses: the tile starts at a multiple of 128 bytes.
        address = self.address ^ (column % PANEL * 2)
        address = address + (column // PANEL * (self.num_rows * PANEL) + row * PANEL) * 2
        source = shared_pointer(self.registers.element_type, address, align=16)
        cute.copy(self.atom, cute.make_tensor(source, cute.make_layout((CHUNK,))), self.filled[None, i, k_step])

    @property
    def num_groups(self) -> int:
        """How many ldmatrix.x4 one k-step takes."""
        return cute.size(self.filled, mode=[1])


def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: Operand, b: Operand) -> None:
    """acc += A B^T, both operands from shared memory."""
    for k_step in range(cute.size(a.registers, mode=[2])):
        for i in range(a.num_groups):
            a.load(i, k_step)
        multiply_k_step(mma, acc, a.registers[None, None, k_step], b, k_step)


def multiply_registers(mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: Operand) -> None:
    """acc += A B^T, A already in registers."""
    for k_step in range(cute.size(rA, mode=[2])):
        multiply_k_step(mma, acc, rA[None, None, k_step], b, k_step)


def multiply_k_step(mma: cute.TiledMma, acc: cute.Tensor, rA: cute.Tensor, b: Operand, k_step: int) -> None:
    """acc += A B^T over one k-step of 16; rA is (MMA, MMA_M).

    Sixteen columns of acc at a time, each ldmatrix next to the products that use it: fewer registers wait.
    """
    acc_groups = cute.logical_divide(acc, (None, None, 2))  # (MMA, MMA_M, (2, groups))
    b_groups = cute.logical_divide(b.registers, (None, 2, None))  # (MMA, (2, groups), MMA_K)
    for i in range(b.num_groups):
        b.load(i, k_step)
        acc_group = acc_groups[None, None, (None, i)]
        cute.gemm(mma, acc_group, rA, b_groups[None, (None, i), k_step], acc_group)


def store_accumulator(acc: cute.Tensor, tCcC: cute.Tensor, s: cute.Tensor, rows_apart: int) -> None:
    """Writes an accumulator fragment, already 16-bit, into a shared tile; `rows_apart` as in `Operand`.

    tCcC: coordinates (row, column) of the fragment's elements.
    """
    fragment = as_rows_and_columns(acc)
    num_rows = cute.product_each(s.shape)[0]
    first_row, first_column = as_rows_and_columns(tCcC)[0, 0]
    first = swizzled_offset(first_row, 0, num_rows) + first_column
    for r in range(cute.size(fragment, mode=[0])):
        for c in range(0, cute.size(fragment, mode=[1]), 2):
            row, column = r % 2 * 8 + r // 2 * rows_apart, c * 4  # see the picture at the top
            offset = column // PANEL * (num_rows * PANEL) + row * PANEL
            address = s.iterator.toint() + (first ^ (column % PANEL)) * 2 + offset * 2
            pair = cute.make_tensor(shared_pointer(s.element_type, address, align=4), cute.make_layout((2,)))
            source = fragment[r, None]
            pair[0], pair[1] = source[c], source[c + 1]
