"""Where lanes read and write in products that split both modes, without a GPU: ldmatrix, stmatrix and mma.sync as the
PTX manual defines them, on 32 lanes at a time, at the addresses that warp_tiles computes."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

import fa_common.warp_tiles as warp_tiles
from fa_common.masks import BlockMask, Mask
from fa_common.tiles import swizzled_offset, whole_panels
from fa_common.warp_tiles import LaneRow, Share

LANES = np.arange(32)
GROUP, PLACE = LANES // 4, LANES % 4  # a lane's row of an 8 by 8 matrix, and which two columns


@pytest.fixture(autouse=True)
def lanes(monkeypatch):
    """The DSL's few calls on addresses, for 32 lanes at a time."""
    stand_in = SimpleNamespace(
        arch=SimpleNamespace(lane_idx=lambda: LANES),
        product_each=lambda shape: shape,
        make_tensor=lambda address, layout: address,
        make_layout=lambda shape: shape,
    )
    monkeypatch.setattr(warp_tiles, "cute", stand_in)
    monkeypatch.setattr(warp_tiles, "shared_pointer", lambda dtype, address, align: address)


class Tile:
    """A (rows, columns) tile in shared memory."""

    BASE = 1024
    element_type = None

    def __init__(self, values: np.ndarray):
        rows, columns = values.shape
        self.shape = (rows, whole_panels(columns))
        self.iterator = SimpleNamespace(toint=lambda: self.BASE)
        self.memory = np.full(rows * self.shape[1], np.nan)
        row, column = np.indices(values.shape)
        self.places = swizzled_offset(row, column // 8 * 8, rows) + column % 8
        self.memory[self.places] = values

    @property
    def values(self) -> np.ndarray:
        return self.memory[self.places]

    def matrices(self, addresses: np.ndarray) -> np.ndarray:
        """Where the four 8 by 8 matrices lie whose rows the 32 lanes name, (4, 8, 8)."""
        assert not (addresses % 16).any()
        return ((addresses - self.BASE) // 2).reshape(4, 8, 1) + np.arange(8)


def ldmatrix(tile: Tile, addresses: np.ndarray, transpose: bool) -> np.ndarray:
    """Registers (32 lanes, 4 matrices, 2)."""
    matrices = tile.memory[tile.matrices(addresses)]
    matrices = matrices.swapaxes(1, 2) if transpose else matrices
    return np.stack([matrices[:, GROUP, 2 * PLACE + i] for i in range(2)], axis=-1).swapaxes(0, 1)


def stmatrix(tile: Tile, addresses: np.ndarray, registers: np.ndarray, transpose: bool) -> None:
    where = tile.matrices(addresses)
    where = where.swapaxes(1, 2) if transpose else where
    for i in range(2):
        tile.memory[where[:, GROUP, 2 * PLACE + i]] = registers[:, :, i].T


def operand_a(registers: np.ndarray) -> np.ndarray:
    """(16, 16) of mma.m16n8k16's first operand; its registers are a0 a1 | a2 a3 | a4 a5 | a6 a7."""
    a = np.empty((16, 16))
    for number in range(4):
        for i in range(2):
            a[GROUP + number % 2 * 8, 2 * PLACE + i + number // 2 * 8] = registers[:, number, i]
    return a


def operand_b(registers: np.ndarray) -> np.ndarray:
    """(16 of N, 16 of K): two of mma.m16n8k16's second operands."""
    b = np.empty((16, 16))
    for number in range(4):
        for i in range(2):
            b[GROUP + number // 2 * 8, 2 * PLACE + i + number % 2 * 8] = registers[:, number, i]
    return b


def read(tile: Tile, share: Share, transpose: bool, kind: str) -> np.ndarray:
    """A warp's operand, (share, depth), by the addresses of WarpOperand.load."""
    first = (0, share.first) if transpose else (share.first, 0)
    depth = tile.shape[0] if transpose else tile.shape[1]
    rows = LaneRow.of(tile, first, by_rows=transpose == (kind == "b"))
    whole = np.empty((share.size, depth))
    for k in range(0, depth, 16):
        for i, step in enumerate(share.steps):
            registers = ldmatrix(tile, rows.at(*((k, step) if transpose else (step, k))), transpose)
            square = operand_a(registers) if kind == "a" else operand_b(registers)
            whole[i * 16 : i * 16 + 16, k : k + 16] = square
    return whole


def positions(share: Share) -> np.ndarray:
    return np.concatenate([share.first + step + np.arange(16) for step in share.steps])


SHARES = [
    *((Share.run, size, number) for size, number in [(128, 8), (128, 4), (128, 2), (64, 4), (64, 2), (64, 1)]),
    *((Share.of_each_panel, size, number) for size in (64, 128, 192, 256) for number in (1, 2, 4)),
]


@pytest.mark.parametrize(("make", "size", "number"), SHARES, ids=lambda x: getattr(x, "__name__", x))
def test_the_shares_of_all_warps_are_the_mode(make, size, number):
    every = np.concatenate([positions(make(size, index, number)) for index in range(number)])
    assert sorted(every) == list(range(size))


@pytest.mark.parametrize("kind", ["a", "b"])
@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(("make", "size", "number"), SHARES, ids=lambda x: getattr(x, "__name__", x))
def test_operands(make, size, number, transpose, kind):
    depth = 128
    values = np.random.default_rng(0).random((size, depth))
    tile = Tile(values.T if transpose else values)
    for index in range(number):
        share = make(size, index, number)
        np.testing.assert_array_equal(read(tile, share, transpose, kind), values[positions(share)])


@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(
    ("keys", "queries"), [((128, 8), (64, 1)), ((128, 4), (64, 2)), ((64, 4), (64, 2)), ((128, 4), (32, 1))]
)
def test_results_come_back_as_they_were(keys, queries, transpose):
    """Every warp writes its squares; together they are the matrix, each thread's registers where mma.sync has them."""
    values = np.random.default_rng(0).random((keys[0], queries[0]))
    columns = whole_panels(keys[0] if transpose else queries[0])
    tile = Tile(np.full((queries[0], columns) if transpose else (keys[0], columns), np.nan))
    for m_index in range(keys[1]):
        for n_index in range(queries[1]):
            share_m, share_n = Share.run(keys[0], m_index, keys[1]), Share.run(queries[0], n_index, queries[1])
            first = (share_n.first, share_m.first) if transpose else (share_m.first, share_n.first)
            rows = LaneRow.of(tile, first, by_rows=not transpose)
            for n in share_n.steps:
                for m in share_m.steps:
                    square = values[share_m.first + m :, share_n.first + n :]
                    registers = np.empty((32, 4, 2))
                    for number in range(4):
                        for i in range(2):
                            registers[:, number, i] = square[GROUP + number % 2 * 8, 2 * PLACE + i + number // 2 * 8]
                    stmatrix(tile, rows.at(*((n, m) if transpose else (m, n))), registers, transpose)
    found = tile.values.T if transpose else tile.values
    np.testing.assert_array_equal(found[:, : queries[0]][: keys[0]], values)


# ---- Masks seen from the keys


@pytest.fixture
def plain_numbers(monkeypatch):
    monkeypatch.setattr(warp_tiles, "cutlass", SimpleNamespace(min=min, max=max))
    monkeypatch.setattr(warp_tiles, "const_expr", lambda value: value)
    monkeypatch.setattr(warp_tiles, "Int32", int)


@pytest.mark.parametrize("tiles", [(64, 128), (64, 64), (32, 128)], ids=str)
def test_blocks_are_those_of_the_mask(plain_numbers, tiles):
    """The query blocks of each key block, which of them are masked, and whose turn it is at a query block."""
    tile_m, tile_n = tiles
    lengths = [1, 2, 63, 64, 65, 127, 130, 257, 300, 513]
    windows = [(None, None), (0, 0), (5, 0), (0, 9), (100, None), (None, 70), (64, 64), (130, 3), (1000, 1000)]
    for seqlens, window in product(product(lengths, lengths), windows):
        blocks = BlockMask(Mask(*seqlens, window=window), tile_m, tile_n)
        seen_by = {m: [] for m in range(blocks.num_m_blocks)}
        for n in range(blocks.num_n_blocks):
            begin, end = warp_tiles.visible_queries((n * tile_n, tile_n), tile_m, seqlens, window)
            assert list(range(begin, end)) == list(blocks.m_blocks(n)), (seqlens, window, n)
            for m in range(begin, end):
                seen_by[m].append(n)
                masked = warp_tiles.is_masked((m * tile_m, n * tile_n), tiles, seqlens, window)
                assert masked or blocks.is_full(m, n), (seqlens, window, m, n)
        for m, seen in seen_by.items():
            first = warp_tiles.first_key_block(m * tile_m, tile_n, seqlens, window)
            assert seen == list(range(first, first + len(seen))), (seqlens, window, m)
