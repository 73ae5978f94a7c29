"""What 8-bit floats change on chip: P rounded into an operand, V turned around, quotients rounded by `quantize`.

WGMMA takes 8-bit operands only with the product's depth contiguous. Of Q, K and P it is; P V wants V's columns, the
keys of each next to each other. And lane q of a quad holds, of each 16 keys of S, columns 2q, 2q+1, 2q+8 and 2q+9,
where the A operand of an 8-bit product has it hold slots 4q to 4q+3 of its depth. So that P goes from one to the other
without a shuffle, keys change places:

    V by columns   in S: TMA puts keys 4i and 4i+1 of a block of K into the first half of its rows, and 4i+2 and 4i+3
                   into the second (loads.py). A lane's columns 2i, 2i+1 of both halves are then four keys in a row.
    V by rows      in V, which the producer's warps transpose in shared memory, in place, once TMA has brought it:

                   slot   4q  4q+1  4q+2  4q+3      of each 16 keys, for q = 0 to 3
                   key    2q  2q+1  2q+8  2q+9

ldmatrix.trans moves 16-bit pieces: of V two neighbouring columns of one key. Byte permutes part them, and a lane holds,
for two columns, four keys each, which stmatrix writes as four bytes of a row of V^T.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint16, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import WARP_SIZE
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import T, dsl_user_op

from fa3.sync import WARPS_PER_WARPGROUP
from fa_common.tiles import shared_pointer

CHUNK = 16  # bytes that a lane of ldmatrix points to
LOW_BYTES, HIGH_BYTES = 0x6420, 0x7531  # of two registers, as prmt counts them: every other byte
WHOLE_ATOM = 128  # bytes of a swizzled row, at most


@dsl_user_op
def rounded_quad(a: Float32, b: Float32, c: Float32, d: Float32, *, loc=None, ip=None) -> Uint32:
    """Four fp32 values rounded to e4m3, to nearest even and saturating, packed into one register, `a` lowest.

    Inline assembly for the same reason as `fa_common.tiles.rounded_pair`.
    """
    packed = llvm.inline_asm(
        T.i32(),
        [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)],
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Uint32(packed)


def round_to_e4m3(acc: cute.Tensor, rP: cute.Tensor, in_halves: bool) -> None:
    """Rounds an accumulator ((2, 2, N/8), 1, 1) into rP, an 8-bit A operand ((4, 2, 2), 1, N/32).

    in_halves: the accumulator's columns are keys in the order of products.queries_and_keys, and rP's in their own.
    """
    words = cute.recast_tensor(cute.make_tensor(rP.iterator, cute.make_layout(cute.size(rP))), Uint32)
    for pair_of_eights in range(cute.size(words) // 2):
        for row in range(2):
            # Two columns of one group of eight, then the two of the next, or of the one half a block further.
            first = (4 if in_halves else 8) * pair_of_eights + 2 * row
            second = first + (cute.size(acc) // 2 if in_halves else 4)
            quad = (acc[i] for i in (first, first + 1, second, second + 1))
            words[2 * pair_of_eights + row] = rounded_quad(*quad)


def rounded_quotients(values: cute.Tensor, scale: Float32, reciprocal: Float32) -> cute.Tensor:
    """values / scale in e4m3."""
    quotients = cute.make_rmem_tensor_like(values)
    for c in range(cute.size(values)):
        quotients[c] = divide(values[c], scale, reciprocal)
    rX8 = cute.make_rmem_tensor(cute.size(values), Float8E4M3FN)
    rX8.store(quotients.load().to(Float8E4M3FN))
    return rX8


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


def atom_bytes(row_bytes: int) -> int:
    """How much of a row lies together in shared memory, swizzled: the widest of 128, 64, 32 bytes that divides it."""
    return next(size for size in (WHOLE_ATOM, 64, 32) if row_bytes % size == 0)


def chunk_address(base: Int32, row: Int32, chunk: Int32, row_bytes: int) -> Int32:
    """Where a 16-byte chunk lies in rows of 128, 64 or 32 bytes, one after the other from `base`, a multiple of 1024.

    Chunk c of row r stands at place c XOR (r / rows per 128 bytes): of the same row another chunk is one XOR away, and
    rows a multiple of 8 further are an addition.
    """
    place = chunk ^ (row * row_bytes // WHOLE_ATOM % (row_bytes // CHUNK))
    return base + row * row_bytes + place * CHUNK


def chunk_at(address: Int32) -> cute.Tensor:
    """16 bytes of shared memory, as ldmatrix and stmatrix take them: 8 pairs."""
    return cute.make_tensor(shared_pointer(Uint16, address, align=CHUNK), cute.make_layout((CHUNK // 2,)))


def load_bytes(s: cute.Tensor, r: cute.Tensor, num_steps: int, thread: Int32) -> None:
    """The first 32 * num_steps columns of a warpgroup's 64 rows, as an 8-bit A operand ((4, 2, 2), 1, steps).

    Four bytes of a row are to ldmatrix two 16-bit numbers, and each lane gets those that it has in the operand.
    """
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), Uint16)
    steps = cute.recast_tensor(cute.make_tensor(r.iterator, cute.make_layout((CHUNK, num_steps))), Uint16)
    columns, rows = atom_bytes(cute.size(s, mode=[1])), cute.size(s, mode=[0])
    # Lanes 0 to 15 point to the 16 rows of their warp, at a step's first 16 bytes, and the others at its last 16.
    row, half = thread // WARP_SIZE * 16 + thread % 16, thread % WARP_SIZE // 16
    address = chunk_address(s.iterator.toint(), row, half, columns)
    for step in range(num_steps):
        panel, first = divmod(2 * CHUNK * step, columns)
        cute.copy(load, chunk_at((address ^ first) + panel * columns * rows), steps[None, step])


@dataclass(frozen=True)
class Transposition:
    """V (tile_n, width) becomes V^T (width, tile_n) in the same shared memory, keys reordered as above.

    For the 128 threads of a warpgroup. V lies in panels, rows of up to 128 bytes, and V^T in slabs, of up to 128 keys.
    With one slab (tile_n 32, 64 or 128) a panel and its own rows of V^T are the same bytes, so that a panel at a time
    is enough to hold in registers: 32 of them at 128 x 128. With more, all of V is held.
    """

    source: Int32  # where a thread's first piece of 16 columns lies, from the first byte on
    target: Int32  # where its row of V^T goes
    low_bytes: Uint32  # which bytes of two registers make the first and the second row of V^T
    high_bytes: Uint32
    tile_n: int
    width: int

    @staticmethod
    def of(tile_n: int, width: int, thread: Int32) -> "Transposition":
        lane, warp_index = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
        columns, keys_of_slab = atom_bytes(width), atom_bytes(tile_n)
        # A warp has 32 keys of a slab and, with fewer than 128 of them, a part of the columns, 16 at a time.
        key_groups = keys_of_slab // WARP_SIZE
        num_pieces = columns // CHUNK * key_groups // WARPS_PER_WARPGROUP
        assert num_pieces, "some warps would have nothing of a panel"
        keys, first_piece = warp_index % key_groups, warp_index // key_groups * num_pieces
        # To ldmatrix lane l points to key l of 32; to stmatrix, to a row of V^T and to 16 of the keys. The second four
        # of a matrix's rows are odd where the first are even: so all eight lie in banks of their own.
        matrix, is_second = lane // 8, lane // 4 % 2
        row = first_piece * CHUNK + 2 * (lane % 8) + (matrix % 2 ^ is_second)
        swaps = lane >= WARP_SIZE // 2  # it holds columns of such a row
        low, high = Uint32(LOW_BYTES), Uint32(HIGH_BYTES)
        return Transposition(
            chunk_address(Int32(0), keys * WARP_SIZE + lane, first_piece, columns),
            chunk_address(Int32(0), row, keys * 2 + matrix // 2, keys_of_slab),
            cutlass.select_(swaps, high, low),
            cutlass.select_(swaps, low, high),
            tile_n,
            width,
        )

    @cute.jit
    def run(self, base: Int32, sync: cutlass.Constexpr):
        """Turns the V at `base`, a multiple of 128 bytes, around; `sync` is the barrier of all 128 threads."""
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), Uint16)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Uint16)
        columns, keys_of_slab = atom_bytes(self.width), atom_bytes(self.tile_n)
        num_panels, num_slabs = self.width // columns, self.tile_n // keys_of_slab
        num_pieces = (
            columns // CHUNK * (keys_of_slab // WARP_SIZE) // WARPS_PER_WARPGROUP
        )  # of a panel and slab, that a warp has
        held = num_panels if num_slabs > 1 else 1  # panels at a time
        for first_panel in cutlass.range_constexpr(0, num_panels, held):
            places = [(first_panel + panel, slab) for panel in range(held) for slab in range(num_slabs)]
            pieces = [cute.make_rmem_tensor((CHUNK // 2,), Uint16) for _ in range(num_pieces * len(places))]
            for i in cutlass.range_constexpr(len(pieces)):
                (panel, slab), piece = places[i // num_pieces], i % num_pieces
                offset = (panel * self.tile_n + slab * keys_of_slab) * columns
                cute.copy(load, chunk_at(((base + self.source) ^ (piece * CHUNK)) + offset), pieces[i])
            # Every warp has read its pieces: they may be overwritten.
            sync()
            for i in cutlass.range_constexpr(len(pieces)):
                (panel, slab), piece = places[i // num_pieces], i % num_pieces
                words = cute.recast_tensor(pieces[i], Uint32)
                for half in cutlass.range_constexpr(2):
                    first, second = words[2 * half], words[2 * half + 1]
                    words[2 * half] = cute.arch.prmt(first, second, self.low_bytes)
                    words[2 * half + 1] = cute.arch.prmt(first, second, self.high_bytes)
                offset = (slab * self.width + panel * columns + piece * CHUNK) * keys_of_slab
                cute.copy(store, pieces[i], chunk_at(base + self.target + offset))


@dataclass(frozen=True)
class RowsToTurn:
    """V's rows in shared memory as a warp reads columns from them, 64 keys of 16 columns at a time:

        lane 4i + q   register m   keys 16q + 2m, 16q + 2m + 1 of columns 2i, 2i + 1      m = 0 to 7, by two loads

    A lane thus has 16 keys in a row of two columns, which are one store of 16 bytes each: a quad's four are 64 keys.
    """

    base: Int32  # a multiple of 128
    num_rows: int
    num_chunks: int  # of a row

    @property
    def chunks_of_panel(self) -> int:
        """Rows lie in panels of up to 128 bytes."""
        return min(WHOLE_ATOM // CHUNK, 1 << (self.num_chunks - 1).bit_length())

    @property
    def size(self) -> int:
        """In bytes."""
        return -(-self.num_chunks // self.chunks_of_panel) * self.num_rows * self.chunks_of_panel * CHUNK

    def place(self, row: Int32, chunk: Int32) -> Int32:
        """Where 16 columns of a row lie. What one instruction reads (rows 0, 1, 16, 17, 32, ...) or writes (rows next
        to each other) is spread over all banks, from 64 columns on."""
        swap = (row & 1) << 2 ^ row & 2 ^ row >> 4 & 3
        panel, chunk = chunk // self.chunks_of_panel, chunk % self.chunks_of_panel
        place = (panel * self.num_rows + row) * self.chunks_of_panel + (chunk ^ swap % self.chunks_of_panel)
        return self.base + place * CHUNK

    @cute.jit
    def pairs_of_columns(self, first_row: Int32, chunk: Int32) -> cute.Tensor:
        """This lane's 16 keys of two columns, (4, 2) words, of the 64 from first_row on."""
        load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), Uint16)
        # A lane points to row lane % 8 of matrix m = lane / 8; eight keys further lie the second four.
        lane = cute.arch.lane_idx()
        address = self.place(first_row + lane % 8 // 2 * 16 + lane // 8 * 2 + lane % 2, chunk)
        loaded = cute.make_rmem_tensor((CHUNK // 2, 2), Uint16)
        for i in cutlass.range_constexpr(2):
            cute.copy(load, chunk_at(address + i * 8 * self.chunks_of_panel * CHUNK), loaded[None, i])
        pairs, columns = cute.recast_tensor(loaded, Uint32), cute.make_rmem_tensor((4, 2), Uint32)
        for word in cutlass.range_constexpr(4):
            first, second = pairs[2 * word], pairs[2 * word + 1]
            columns[word, 0] = cute.arch.prmt(first, second, LOW_BYTES)
            columns[word, 1] = cute.arch.prmt(first, second, HIGH_BYTES)
        return columns
