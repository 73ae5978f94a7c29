"""The closed forms of docs/io.md, in its letters: what each algorithm costs, computed without running it."""

from dataclasses import dataclass

import torch

from fa_common.masks import Mask
from fa_common.memory import Memory

ACCUMULATOR = 4  # bytes of a float32


@dataclass(frozen=True)
class Visits:
    """Sums over the blocks that one head's loop visits; a block has so many queries and so many keys."""

    pairs: int  # sum of queries * keys
    rows: int  # sum of queries
    columns: int  # sum of keys

    @classmethod
    def of(cls, mask: Mask, tile_m: int, tile_n: int, *, all_of_key_block_0: bool) -> "Visits":
        """Found in the dense mask, block by block: a block with one visible pair is visited."""
        visible = mask.visible(slice(0, mask.seqlen_q), slice(0, mask.seqlen_k))
        visited = [
            (block.shape[0], block.shape[1])
            for rows in visible.split(tile_m)
            for n_block, block in enumerate(rows.split(tile_n, dim=1))
            if block.any() or (all_of_key_block_0 and n_block == 0)
        ]
        return cls(
            pairs=sum(queries * keys for queries, keys in visited),
            rows=sum(queries for queries, _ in visited),
            columns=sum(keys for _, keys in visited),
        )


@dataclass(frozen=True)
class Sizes:
    """One call; it has keys, as without any there is nothing to run."""

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mask: Mask
    dtype: torch.dtype
    softcap: bool
    dlse: bool
    tile_m: int
    tile_n: int

    def visits(self, *, all_of_key_block_0: bool) -> Visits:
        return Visits.of(self.mask, self.tile_m, self.tile_n, all_of_key_block_0=all_of_key_block_0)


def fa1_forward(sizes: Sizes) -> Memory:
    d, e, a, n_q, n_k = _letters(sizes)
    visits = sizes.visits(all_of_key_block_0=True)
    between_visits = (visits.rows - n_q) * (d + 2) * a  # O, row_max, row_sum
    per_head = Memory(
        bytes_read=2 * n_k * d * e + visits.rows * d * e + between_visits,
        bytes_written=between_visits + n_q * (d * e + a),
        matmul_flops=4 * visits.pairs * d,
        non_matmul_flops=(5 + 3 * sizes.softcap) * visits.pairs + (2 * d + 7) * visits.rows + 2 * n_q,
    )
    return _times(sizes.batch * sizes.heads_q, per_head)


def fa2_forward(sizes: Sizes) -> Memory:
    d, e, a, n_q, _ = _letters(sizes)
    visits = sizes.visits(all_of_key_block_0=False)
    per_head = Memory(
        bytes_read=n_q * d * e + 2 * visits.columns * d * e,
        bytes_written=n_q * (d * e + a),
        matmul_flops=4 * visits.pairs * d,
        non_matmul_flops=(5 + 3 * sizes.softcap) * visits.pairs + (d + 5) * visits.rows + (d + 3) * n_q,
    )
    return _times(sizes.batch * sizes.heads_q, per_head)


def fa1_backward(sizes: Sizes) -> Memory:
    d, e, a, n_q, n_k = _letters(sizes)
    visits = sizes.visits(all_of_key_block_0=True)
    between_visits = (visits.rows - n_q) * d * a  # dQ
    per_head = Memory(
        bytes_read=visits.rows * (3 * d * e + (1 + sizes.dlse) * a) + between_visits,
        bytes_written=between_visits + n_q * d * e,
        matmul_flops=10 * visits.pairs * d,
        non_matmul_flops=(5 + 7 * sizes.softcap) * visits.pairs + (2 * d + sizes.dlse) * visits.rows + n_q * d,
    )
    per_key_head = Memory(2 * n_k * d * e, 2 * n_k * d * e, 0, n_k * d)
    return _sum(_times(sizes.batch * sizes.heads_q, per_head), _times(sizes.batch * sizes.heads_kv, per_key_head))


def fa2_backward(sizes: Sizes) -> Memory:
    d, e, a, n_q, n_k = _letters(sizes)
    visits = sizes.visits(all_of_key_block_0=False)
    per_head = Memory(
        bytes_read=n_q * (2 * d * e + sizes.dlse * a + d * a) + visits.rows * (2 * d * e + 2 * a + d * a),
        bytes_written=n_q * (a + d * a + d * e) + visits.rows * d * a,
        matmul_flops=10 * visits.pairs * d,
        non_matmul_flops=(5 + 7 * sizes.softcap) * visits.pairs + d * visits.rows + (3 * d + sizes.dlse) * n_q,
    )
    per_key_head = Memory(2 * n_k * d * e, 2 * n_k * d * e, 0, n_k * d)
    return _sum(_times(sizes.batch * sizes.heads_q, per_head), _times(sizes.batch * sizes.heads_kv, per_key_head))


def _letters(sizes: Sizes) -> tuple[int, int, int, int, int]:
    """d, e (bytes of an input element), a (bytes of an accumulator), N_q, N_k."""
    return sizes.head_dim, sizes.dtype.itemsize, ACCUMULATOR, sizes.mask.seqlen_q, sizes.mask.seqlen_k


def _times(count: int, cost: Memory) -> Memory:
    return Memory(*(count * getattr(cost, name) for name in Memory.__dataclass_fields__))


def _sum(one: Memory, other: Memory) -> Memory:
    return Memory(*(getattr(one, name) + getattr(other, name) for name in Memory.__dataclass_fields__))
