"""Products whose warps split both modes of the result: each warp multiplies on its own, its share by its share.

The backward has five products a block, of three shapes, and every warp takes part in all of them. So here a product is
one warp's (a TiledMma of 32 threads), and a `Share` says which 16s of a mode the warp takes. Tiles in shared memory are
those of fa_common/tiles.py. An ldmatrix.x4 or stmatrix.x4 moves a square of 16 by 16 in four matrices of 8 by 8; its
lanes name the rows of the four in one of two orders, here for the tile's rows (down) and columns (across):

    by rows       0 2      a operand from its own rows (M, K), b operand from (K, N), results to their own rows
                  1 3
    by columns    0 1      b operand from its own rows (N, K), a operand from (K, M), results transposed
                  2 3
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import T, dsl_user_op

from fa_common.tiles import (
    CHUNK,
    PANEL,
    QUAD,
    as_rows_and_columns,
    rounded_pair,
    shared_pointer,
    swizzled_offset,
    tile_layout,
)

FAR = 2**30  # further than any tile reaches
STEP = 16  # rows and columns of an ldmatrix.x4, and the depth of one mma.sync


@dataclass(frozen=True)
class Share:
    """One warp's part of a mode: 16 positions from `first + step` on, for each of `steps`."""

    first: Int32
    steps: tuple[int, ...]

    @staticmethod
    def run(size: int, index: Int32, number: int) -> "Share":
        """The index-th of `number` runs. Of columns, a run must divide a panel or be whole panels."""
        length = size // number
        return Share(index * length, tuple(range(0, length, STEP)))

    @staticmethod
    def of_each_panel(size: int, index: Int32, number: int) -> "Share":
        """The index-th of `number` parts of each panel of 64 columns: even where the panels cannot be shared out."""
        length = PANEL // number
        steps = [panel + step for panel in range(0, size, PANEL) for step in range(0, length, STEP)]
        return Share(index * length, tuple(steps))

    @property
    def size(self) -> int:
        return STEP * len(self.steps)


def warp_mma(dtype: type) -> cute.TiledMma:
    """mma.sync m16n8k16 for one warp, two side by side along N: one ldmatrix.x4 feeds both."""
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), (1, 1, 1), permutation_mnk=(STEP, STEP, STEP)
    )


@dataclass(frozen=True)
class LaneRow:
    """Which 16 bytes of a shared tile this lane names, for each square of 16 by 16 of a warp's share."""

    address: Int32  # of the first square's, XOR included
    num_rows: int  # of the tile
    dtype: type
    offset: int = 0  # bytes, a multiple of 128, from the tile that `address` points into to the one that is meant

    @staticmethod
    def of(s: cute.Tensor, first: tuple, by_rows: bool, lane: Int32 | None = None) -> "LaneRow":
        """`first` is the (row, column) of the warp's first square; `by_rows` is the order of the four matrices."""
        lane = cute.arch.lane_idx() if lane is None else lane
        near, far = lane // 8 % 2 * 8, lane // 16 * 8
        down, across = (near, far) if by_rows else (far, near)
        num_rows = cute.product_each(s.shape)[0]
        offset = swizzled_offset(first[0] + lane % 8 + down, first[1] + across, num_rows)
        return LaneRow(s.iterator.toint() + offset * 2, num_rows, s.element_type)

    def at(self, row: int, column: int) -> cute.Tensor:
        """The 16 bytes of the square that lies (row, column) behind the first.

        A column below 64 flips bits of the chunk's number that are 0 in `address`: adding is an XOR, which commutes
        with that of the swizzle.
        """
        address = self.address ^ (column % PANEL * 2)
        address = address + (self.offset + (column // PANEL * (self.num_rows * PANEL) + row * PANEL) * 2)
        return cute.make_tensor(shared_pointer(self.dtype, address, align=16), cute.make_layout((CHUNK,)))

    def shifted(self, num_bytes: Int32) -> "LaneRow":
        """The same of a tile that lies `num_bytes` further, a multiple of 128."""
        return replace(self, address=self.address + num_bytes)

    def twin(self, num_bytes: int) -> "LaneRow":
        """The same of a tile that always lies `num_bytes` further: an immediate offset, no other registers."""
        return replace(self, offset=self.offset + num_bytes)


@dataclass(frozen=True)
class WarpOperand:
    """A warp's share of one operand: where ldmatrix reads it, and the registers it fills."""

    rows: LaneRow
    steps: tuple[int, ...]  # of the share
    transpose: bool  # the depth runs along the tile's rows, not its columns
    squares: int  # registers of a square of 16 by 16 are 8 elements in a row
    registers: cute.Tensor  # (MMA, MMA_M or MMA_N, MMA_K)

    @staticmethod
    def a(mma: cute.TiledMma, s: cute.Tensor, share: Share, transpose: bool = False) -> "WarpOperand":
        """The (M, K) operand from an (M, K) tile or, transposed, from a (K, M) one; `share` is of M."""
        first, depth = _first_and_depth(s, share, transpose)
        registers = mma.make_fragment_A(mma.partition_shape_A((share.size, depth)))
        return WarpOperand(LaneRow.of(s, first, not transpose), share.steps, transpose, len(share.steps), registers)

    @staticmethod
    def b(mma: cute.TiledMma, s: cute.Tensor, share: Share, transpose: bool = False) -> "WarpOperand":
        """The (N, K) operand from an (N, K) tile or, transposed, from a (K, N) one; `share` is of N."""
        first, depth = _first_and_depth(s, share, transpose)
        registers = mma.make_fragment_B(mma.partition_shape_B((share.size, depth)))
        return WarpOperand(LaneRow.of(s, first, transpose), share.steps, transpose, len(share.steps), registers)

    def load(self, i: int, k_step: int) -> None:
        """Reads one ldmatrix.x4: the share's i-th 16 by the 16 of a k-step."""
        row, column = (k_step * STEP, self.steps[i]) if self.transpose else (self.steps[i], k_step * STEP)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(self.transpose, 4), self.registers.element_type)
        cute.copy(atom, self.rows.at(row, column), square(self.registers, k_step * self.squares + i))

    def shifted(self, num_bytes: Int32) -> "WarpOperand":
        """The same of a tile that lies `num_bytes` further."""
        return replace(self, rows=self.rows.shifted(num_bytes))

    def twin(self, num_bytes: int) -> "WarpOperand":
        """The same of a tile that always lies `num_bytes` further, by the same address registers."""
        return replace(self, rows=self.rows.twin(num_bytes), registers=cute.make_rmem_tensor_like(self.registers))

    @property
    def num_groups(self) -> int:
        """How many ldmatrix.x4 one k-step takes."""
        return self.squares


def square(registers: cute.Tensor, number: int) -> cute.Tensor:
    """The eight elements of a square, as one ldmatrix or stmatrix takes them."""
    return cute.make_tensor(registers.iterator + number * CHUNK, cute.make_layout((CHUNK,)))


def _first_and_depth(s: cute.Tensor, share: Share, transpose: bool) -> tuple:
    num_rows, num_columns = cute.product_each(s.shape)
    return ((Int32(0), share.first), num_rows) if transpose else ((share.first, Int32(0)), num_columns)


def twin_tiles(memory, shape: tuple, num_bytes: int) -> tuple:
    """Two tiles of 16-bit elements in one piece of shared memory, the second `num_bytes` behind the first."""
    first = memory.get_tensor(tile_layout(*shape))
    return first, cute.make_tensor(first.iterator + num_bytes // 2, first.layout)


def numbers_of_columns(s: cute.Tensor, first: Int32, columns: Share) -> list:
    """Of one fp32 number a column in shared memory, from `first` on, those of this thread's columns of a result."""
    address = s.iterator.toint() + (first + columns.first + cute.arch.lane_idx() % QUAD * 2) * 4
    pairs = [
        cute.make_tensor(shared_pointer(Float32, address + c * 4, align=8), cute.make_layout((2,))).load()
        for c in range(0, columns.size, 8)
    ]
    return [pair[i] for pair in pairs for i in range(2)]


def operand_registers(acc: cute.Tensor, dtype: type) -> cute.Tensor:
    """Registers for an accumulator once it is 16-bit, as the A operand of a product, (MMA, MMA_M, MMA_K)."""
    _, num_m, num_n = acc.shape
    shape = ((2, 2, 2), num_m, num_n // 2)
    return cute.make_rmem_tensor(cute.make_layout(shape, stride=((1, 2, 4), CHUNK, CHUNK * num_m)), dtype)


def round_to_squares(acc: cute.Tensor, rounded: cute.Tensor) -> None:
    """Rounds an accumulator ((2, 2), MMA_M, MMA_N) into `operand_registers`."""
    _, num_m, num_n = acc.shape
    pairs = cute.recast_tensor(cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded))), Uint32)
    for n in range(num_n):
        for m in range(num_m):
            for half in range(2):
                low, high = acc[(0, half), m, n], acc[(1, half), m, n]
                place = (n // 2 * num_m + m) * 4 + n % 2 * 2 + half
                pairs[place] = rounded_pair(low, high, rounded.element_type)


def store_squares(rounded: cute.Tensor, rows: LaneRow, shares: tuple, transpose: bool) -> None:
    """Writes `operand_registers` to a shared tile by stmatrix; `shares` are those of M and of N, `rows` is `by_rows`
    unless transposed, when N runs along the tile's rows."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose, 4), rounded.element_type)
    share_m, share_n = shares
    for j, n in enumerate(share_n.steps):
        for i, m in enumerate(share_m.steps):
            row, column = (n, m) if transpose else (m, n)
            cute.copy(atom, square(rounded, j * len(share_m.steps) + i), rows.at(row, column))


@dsl_user_op
def add_four(pointer: cute.Pointer, values: tuple, *, loc=None, ip=None) -> None:
    """Adds four fp32 values to global memory, 16-byte aligned, in one atomic instruction a value (sm_90)."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    operands += [Float32(value).ir_value(loc=loc, ip=ip) for value in values]
    llvm.inline_asm(
        None,
        operands,
        "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def thread_index_anew(*, loc=None, ip=None) -> Int32:
    """The thread's index, read at this place: behind a loop, what depends on it is computed there, where it would
    otherwise wait in registers since before the loop."""
    thread = llvm.inline_asm(
        T.i32(),
        [],
        "mov.u32 $0, %tid.x;",
        "=r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(thread)


def four_floats(pointer: cute.Pointer) -> cute.Tensor:
    """16 aligned bytes of global memory, for one load or store."""
    aligned = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(aligned, cute.make_layout((4,)))


# ---- Masks seen from the keys: what `visible_blocks` and `mask_scores` are from the queries


def visible_queries(keys: tuple, tile_m: int, seqlens: tuple, bounds: tuple) -> tuple:
    """The query blocks [begin, end) that see some of `keys`, (first, number); none if end is begin.

    `seqlens` and `bounds` are those of `visible_blocks`.
    """
    (first, number), (seqlen_q, seqlen_k), (left, right) = keys, seqlens, bounds
    ahead = seqlen_k - seqlen_q  # query i faces key i + ahead
    begin, end = 0, seqlen_q
    if const_expr(right is not None):
        begin = cutlass.max(first - ahead - right, 0) // tile_m
    if const_expr(left is not None):
        last = cutlass.min(first + number, seqlen_k) - 1
        end = cutlass.min(end, last - ahead + left + 1)
    return begin, cutlass.max((end + tile_m - 1) // tile_m, begin)


def first_key_block(first_query: Int32, tile_n: int, seqlens: tuple, bounds: tuple) -> Int32:
    """The first key block that a block of queries sees; it sees all from there to the last that it sees."""
    (seqlen_q, seqlen_k), left = seqlens, bounds[0]
    return Int32(0) if left is None else cutlass.max(first_query + seqlen_k - seqlen_q - left, 0) // tile_n


def is_masked(origin: tuple, tile: tuple, seqlens: tuple, bounds: tuple) -> Boolean:
    """Whether some query of a block does not see all of its keys, or some key does not exist.

    `origin` is the block's first (query, key), `tile` its size.
    """
    (query, key), (tile_m, tile_n), (seqlen_q, seqlen_k), (left, right) = origin, tile, seqlens, bounds
    ahead = seqlen_k - seqlen_q
    masked = key + tile_n > seqlen_k
    if const_expr(right is not None):
        masked = masked | (key + tile_n - 1 > query + ahead + right)
    if const_expr(left is not None):
        masked = masked | (key < query + tile_m - 1 + ahead - left)
    return masked


@cute.jit
def hide(acc_P: cute.Tensor, origin: tuple, seqlens: tuple, bounds: tuple):
    """Sets P^T (keys, queries) of keys that a query does not see to 0; `origin` is the warp's first (query, key).

    P, not S: a hidden score may lie far above LSE, and its exponential be inf, which is thrown away here.
    """
    P = as_rows_and_columns(acc_P)
    (first_query, first_key), (seqlen_q, seqlen_k), (left, right) = origin, seqlens, bounds
    ahead, lane = seqlen_k - seqlen_q, cute.arch.lane_idx()
    first_query = first_query + lane % QUAD * 2
    for r in cutlass.range_constexpr(cute.size(P, mode=[0])):
        key = first_key + lane // QUAD + (r % 2 * 8 + r // 2 * 16)
        # Counted from this thread's first query; its c-th lies a constant further.
        begin = Int32(0) if const_expr(right is None) else key - ahead - right - first_query
        begin = begin if key < seqlen_k else Int32(FAR)
        for c in cutlass.range_constexpr(cute.size(P, mode=[1])):
            place = c // 2 * 8 + c % 2
            hidden = begin > place
            if const_expr(left is not None):
                hidden = hidden | (key - ahead + left - first_query < place)
            P[r, c] = Float32(0.0) if hidden else P[r, c]
