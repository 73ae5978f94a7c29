"""Which (query, key) pairs attend, and which blocks of them a tiled loop has to visit.

Every mask here is a band of diagonals: query i sees key j if `first_diagonal <= j - i <= last_diagonal`. Causal masks
and windows are aligned bottom-right, so that the last query faces the last key whatever the two lengths are. Runs of
queries or keys are slices with a start and a stop, ready to index a tensor.

    3 queries, 5 keys    causal       window (1, 0)    window (0, 1)
                         # # # . .    . # # . .        . . # # .
                         # # # # .    . . # # .        . . . # #
                         # # # # #    . . . # #        . . . . #
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """The visible pairs of one sequence.

    `window` is (left, right): how many keys before and after its own position a query sees besides it, None for all.
    `causal` narrows right to 0. Raises ValueError for a negative bound.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)

    def __post_init__(self):
        if any(bound is not None and bound < 0 for bound in self.window):
            raise ValueError(f"window bounds must be at least 0, got {self.window}; give None for an unbounded side")

    @property
    def first_diagonal(self) -> int:
        """The lowest key - query that is visible, never below what the lengths allow."""
        left = self.window[0]
        return -self.seqlen_q if left is None else max(self.seqlen_k - self.seqlen_q - left, -self.seqlen_q)

    @property
    def last_diagonal(self) -> int:
        """The highest key - query that is visible, never above what the lengths allow."""
        right = 0 if self.causal else self.window[1]
        return self.seqlen_k if right is None else min(self.seqlen_k - self.seqlen_q + right, self.seqlen_k)

    @property
    def num_pairs(self) -> int:
        """How many pairs are visible, without visiting them."""
        return self._num_pairs_up_to(self.last_diagonal) - self._num_pairs_up_to(self.first_diagonal - 1)

    def visible(self, queries: slice, keys: slice, device: torch.device | str | None = None) -> Tensor:
        """True where a query sees a key, (queries, keys)."""
        i = torch.arange(queries.start, queries.stop, device=device)
        j = torch.arange(keys.start, keys.stop, device=device)
        diagonal = j - i[:, None]
        return (self.first_diagonal <= diagonal) & (diagonal <= self.last_diagonal)

    def sees_all(self, queries: slice, keys: slice) -> bool:
        """Whether each of `queries` sees each of `keys`; a key past the sequence's end is seen by none."""
        lowest, highest = keys.start - (queries.stop - 1), keys.stop - 1 - queries.start
        return keys.stop <= self.seqlen_k and self.first_diagonal <= lowest and highest <= self.last_diagonal

    def keys_seen_by(self, queries: slice) -> slice:
        """The keys that at least one of `queries` sees: they lie together, as the band has no holes."""
        start = _clamp(queries.start + self.first_diagonal, 0, self.seqlen_k)
        return slice(start, _clamp(queries.stop + self.last_diagonal, start, self.seqlen_k))

    def queries_seeing(self, keys: slice) -> slice:
        """The queries that see at least one of `keys`."""
        start = _clamp(keys.start - self.last_diagonal, 0, self.seqlen_q)
        return slice(start, _clamp(keys.stop - self.first_diagonal, start, self.seqlen_q))

    def _num_pairs_up_to(self, last_diagonal: int) -> int:
        # Query i sees clamp(i + last_diagonal + 1, 0, seqlen_k) keys. Summed over the queries, what the lower bound
        # leaves is a difference of two triangles; the upper bound takes the same off again, seqlen_k further on.
        def staircase(diagonal: int) -> int:
            return _triangle(self.seqlen_q + diagonal) - _triangle(diagonal)

        return staircase(last_diagonal) - staircase(last_diagonal - self.seqlen_k)


@dataclass(frozen=True)
class BlockMask:
    """A mask cut into blocks of tile_m queries by tile_n keys; the last block of either kind may be short."""

    mask: Mask
    tile_m: int
    tile_n: int

    @property
    def num_m_blocks(self) -> int:
        return _ceil_div(self.mask.seqlen_q, self.tile_m)

    @property
    def num_n_blocks(self) -> int:
        return _ceil_div(self.mask.seqlen_k, self.tile_n)

    def queries(self, m_block: int) -> slice:
        """The queries of a block."""
        return slice(m_block * self.tile_m, min((m_block + 1) * self.tile_m, self.mask.seqlen_q))

    def keys(self, n_block: int) -> slice:
        """The keys of a block."""
        return slice(n_block * self.tile_n, min((n_block + 1) * self.tile_n, self.mask.seqlen_k))

    def n_blocks(self, m_block: int) -> range:
        """The key blocks of which a query block sees at least one pair."""
        return _blocks(self.mask.keys_seen_by(self.queries(m_block)), self.tile_n)

    def m_blocks(self, n_block: int) -> range:
        """The query blocks that see at least one pair of a key block."""
        return _blocks(self.mask.queries_seeing(self.keys(n_block)), self.tile_m)

    def is_full(self, m_block: int, n_block: int) -> bool:
        """Whether the block needs no mask: it holds tile_n keys, and each of its queries sees them all."""
        keys = slice(n_block * self.tile_n, (n_block + 1) * self.tile_n)
        return self.mask.sees_all(self.queries(m_block), keys)

    def visible(self, m_block: int, n_block: int, device: torch.device | str | None = None) -> Tensor:
        """True where a query of the block sees a key of it, (queries, keys)."""
        return self.mask.visible(self.queries(m_block), self.keys(n_block), device)


def _blocks(run: slice, tile: int) -> range:
    """The blocks of `tile` positions that a run of positions touches."""
    return range(run.start // tile, _ceil_div(run.stop, tile)) if run.start < run.stop else range(0)


def _clamp(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _triangle(n: int) -> int:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2 if n > 0 else 0
