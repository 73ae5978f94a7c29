"""What FA2's kernels are built from: tiles and warps."""

from dataclasses import dataclass
from typing import NamedTuple

from fa_common.capabilities import Capabilities
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT
from fa_common.switches import check, switch

CAPABILITIES = Capabilities(
    archs=(90,),
    dtypes=("float16", "bfloat16"),
    head_dims=tuple(range(8, 257, 8)),
    varlen=True,
    window=True,
    softcap=True,
    backward=True,
)
PANEL = 64  # columns; a tile is whole panels wide
SHARE_PAD = 8  # floats after each row of a warp's share of O: four rows of a store then fall into different banks


class CtaTile(NamedTuple):
    """What one CTA works on."""

    tile_m: int  # queries
    tile_n: int  # keys per block
    num_warps: int


@dataclass(frozen=True)
class Config:
    """Everything that changes the code FA2's forward generates, and nothing else.

    All switches off is what FA1 costs, in FA2's order of loops. Raises ValueError when a tile does not fit the
    instructions: each warp owns `tile_m / num_warps` queries, 16 per `mma.sync`, and walks the keys 16 at a time.

    Without split_q a CTA has the tile of `split_k_tile`, FA1's: every warp then holds O of all the CTA's queries, and
    tile_m of them would not fit into its registers. Without parallel_seqlen or separate_masking a block may have fewer
    keys: see `tile`.
    """

    tile_m: int = 128  # queries per CTA, shared out over the warps
    tile_n: int = 64  # keys per block
    num_warps: int = 4
    stages: int = 1  # blocks of K and V in shared memory; from 2 on, a block has one barrier instead of two
    q_in_registers: bool = False  # else Q is read from shared memory for every block
    branch_to_rescale: bool = True  # O, where a maximum rose; else by predicates, under which other tiles do not spill
    ctas_per_sm: int = 1  # for how many the registers must suffice
    parallel_seqlen: bool = switch("query blocks over the grid", "FA2 3.2")  # else one CTA walks all of a head's
    split_q: bool = switch("split-Q", "FA2 3.3")  # else the warps split the keys of a block and meet in shared memory
    defer_normalize: bool = switch("one division at the end", "FA2 3.1")  # else O is normalised after every block
    skip_masked_blocks: bool = switch("hidden blocks skipped", "FA2 3.1")  # else every block of keys is computed
    separate_masking: bool = switch("masks at edges only", "FA2 3.1")  # else every block is masked

    def __post_init__(self):
        check(self)
        rows = 4 * self.num_warps  # that the CTA copies at a time
        if self.num_warps < 1 or self.tile_m < 1 or self.tile_m % (16 * self.num_warps):
            raise ValueError(
                f"tile_m must be a multiple of 16 * num_warps = {16 * self.num_warps} (each warp owns whole rows, "
                f"16 per mma.sync); got {self.tile_m}"
            )
        if self.tile_n < 1 or self.tile_n % 16 or self.tile_n % rows:
            raise ValueError(f"tile_n must be a multiple of 16 (one mma.sync's depth) and of {rows}; got {self.tile_n}")
        if rows % 8:
            raise ValueError(
                f"num_warps must be even (copies take a multiple of 8 rows at a time); got {self.num_warps}"
            )
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1 (a block of K and V to load into); got {self.stages}")
        if self.ctas_per_sm < 1:
            raise ValueError(f"ctas_per_sm must be at least 1; got {self.ctas_per_sm}")

    def tile(self, head_dim: int) -> CtaTile:
        """The tile of a CTA: the fields, or without split_q FA1's.

        Without parallel_seqlen the loop over query blocks takes registers of its own, and without separate_masking the
        mask does in every block. With 32 rows a warp and up to 128 columns there are none left: a block then has 64
        keys at most, and 32 with more than 64 columns.
        """
        if not self.split_q:
            return split_k_tile(head_dim, self.stages)
        is_full = head_dim <= 128 and self.tile_m > 16 * self.num_warps
        if is_full and not (self.parallel_seqlen and self.separate_masking):
            return CtaTile(self.tile_m, min(self.tile_n, 64 if head_dim <= 64 else 32), self.num_warps)
        return CtaTile(self.tile_m, self.tile_n, self.num_warps)


def split_k_tile(head_dim: int, stages: int) -> CtaTile:
    """FA1's tile: four warps, as many queries as a warp can hold O of, and up to 64 keys for each warp, as many as
    shared memory holds beside each warp's share of O."""
    width, num_warps = -(-head_dim // PANEL) * PANEL, 4
    tile_m, tile_n = 32 if width <= 64 else 16, 64 * num_warps
    while tile_n > 16 * num_warps and split_k_bytes(tile_m, tile_n, width, stages) > SHARED_MEMORY_LIMIT:
        tile_n //= 2
    return CtaTile(tile_m, tile_n, num_warps)


def split_k_bytes(tile_m: int, tile_n: int, width: int, stages: int, num_warps: int = 4) -> int:
    """Shared memory without split_q: Q and stages of K and V, 16-bit; fp32 shares of O, maxima and sums of each warp,
    and each row's rescaling."""
    queries, keys = tile_m * width * 2, stages * 2 * tile_n * width * 2
    return queries + keys + 4 * tile_m * (num_warps * (width + SHARE_PAD) + 2 * num_warps + 1)


def default_config(problem: Problem) -> Config:
    """Of those that do not spill, the tiles measured fastest on an H200 at head_dim 64, 128 and 256 (docs/fa2.md)."""
    if problem.head_dim <= 64:
        if problem.head_dim == 64 and problem.dtype_name == "bfloat16" and problem.window == (None, None):
            return Config(tile_m=128, tile_n=96, branch_to_rescale=False)  # of the others some would spill
        return Config(tile_m=128, tile_n=64)
    if problem.head_dim <= 128:
        # 32 rows a warp: each ldmatrix of K or V feeds twice as many mma.sync as with 16.
        return Config(tile_m=128, tile_n=48, branch_to_rescale=False)
    if problem.head_dim > 192 and not problem.causal and problem.seqlen_k >= 4096:
        # Eight warps share K and V; of few keys, or under a mask, the shorter tiles of two CTAs waste less.
        return Config(tile_m=128, tile_n=64, num_warps=8, branch_to_rescale=False)
    return Config(tile_m=64, tile_n=64, branch_to_rescale=False)


@dataclass(frozen=True)
class BackwardConfig:
    """Everything that changes the code of FA2's backward, and nothing else.

    In S^T, dP^T, dV and dK `key_warps` warps split the keys; the others split the queries of S^T and dP^T, and the
    columns of dV and dK. In dQ `query_warps` warps split the queries, and the others the columns. Raises ValueError
    when a tile does not fit the instructions.
    """

    tile_m: int = 64  # queries per block
    tile_n: int = 128  # keys per CTA
    num_warps: int = 8
    key_warps: int = 4
    query_warps: int = 2
    stagger: bool = True  # key blocks begin at different query blocks, lest all add to one part of dQ at a time

    def __post_init__(self):
        rows = 4 * self.num_warps  # that the CTA copies at a time
        for name in ("key_warps", "query_warps"):
            number = getattr(self, name)
            if number < 1 or self.num_warps % number or self.num_warps // number not in (1, 2, 4):
                raise ValueError(
                    f"{name} must be num_warps, a half or a quarter of it: the others share out panels of 64 columns, "
                    f"16 at least; got {number} of {self.num_warps}"
                )
        if (
            self.tile_n < 1
            or self.tile_n % 64
            or self.tile_n % rows
            or self.tile_n // self.key_warps not in (16, 32, 64)
        ):
            raise ValueError(
                f"tile_n must be a multiple of 64 (a panel) and of {rows}, and 16, 32 or 64 times key_warps = "
                f"{self.key_warps}; got {self.tile_n}"
            )
        others = self.num_warps // self.key_warps
        multiples = (32, rows, 16 * others, 16 * self.query_warps)
        if self.tile_m < 1 or any(self.tile_m % multiple for multiple in multiples):
            raise ValueError(
                f"tile_m must be a multiple of 32 and of {rows} (rows copied at a time), of 16 * num_warps / key_warps "
                f"= {16 * others} and of 16 * query_warps = {16 * self.query_warps}; got {self.tile_m}"
            )


def default_backward_config(problem: Problem) -> BackwardConfig:
    """Of those that do not spill, the tiles measured fastest on an H200 at head_dim 64, 128 and 256 (docs/fa2.md)."""
    is_bounded, is_capped = problem.window != (None, None), problem.softcap > 0
    if problem.head_dim <= 64:
        # Small CTAs, several on an SM: one's products run while another waits at its barrier. With 32 keys a warp each
        # ldmatrix of Q and dO feeds twice as many mma.sync as with 16.
        if is_bounded or is_capped:
            return BackwardConfig(tile_m=64, tile_n=64, num_warps=4, key_warps=4, query_warps=4)
        return BackwardConfig(tile_m=32, tile_n=128, num_warps=4, key_warps=4, query_warps=2)
    if problem.head_dim > 192 and is_bounded and is_capped:
        return BackwardConfig(tile_m=32, tile_n=64, num_warps=8, key_warps=4, query_warps=2)
    if problem.head_dim > 128:
        return BackwardConfig(tile_m=64, tile_n=64, num_warps=8, key_warps=2, query_warps=2)
    # A window's bounds, a softcap, where a packed sequence lies or whose turn it is: plain kernels' registers are full.
    if is_bounded or is_capped or (problem.causal and (problem.deterministic or problem.varlen)):
        return BackwardConfig(tile_m=64, tile_n=64, num_warps=8, key_warps=4, query_warps=2)
    return BackwardConfig(tile_m=64, tile_n=128, num_warps=8, key_warps=4, query_warps=2)
