"""What FA2's kernels are built from: tiles and warps."""

from dataclasses import dataclass

from fa_common.capabilities import Capabilities
from fa_common.problem import Problem

CAPABILITIES = Capabilities(
    archs=(90,),
    dtypes=("float16", "bfloat16"),
    head_dims=tuple(range(8, 257, 8)),
    varlen=True,
    window=True,
    softcap=True,
    backward=False,
)


@dataclass(frozen=True)
class Config:
    """Everything that changes the code FA2 generates, and nothing else.

    Raises ValueError when a tile does not fit the instructions: each warp owns `tile_m / num_warps` queries
    ("split-Q"), 16 per `mma.sync`, and walks the keys 16 at a time.
    """

    tile_m: int = 128  # queries per CTA, shared out over the warps
    tile_n: int = 128  # keys per block
    num_warps: int = 8

    def __post_init__(self):
        rows = 4 * self.num_warps  # that the CTA copies at a time
        if self.tile_m % (16 * self.num_warps):
            raise ValueError(
                f"tile_m must be a multiple of 16 * num_warps = {16 * self.num_warps} (each warp owns whole rows, "
                f"16 per mma.sync); got {self.tile_m}"
            )
        if self.tile_n % 16 or self.tile_n % rows:
            raise ValueError(f"tile_n must be a multiple of 16 (one mma.sync's depth) and of {rows}; got {self.tile_n}")


def default_config(problem: Problem) -> Config:
    """The tiles measured fastest on an H200 for this head_dim, among those that do not spill."""
    # Timed at head_dim 64 and 128; beyond 128, tiles that fit and do not spill.
    if problem.head_dim <= 64:
        return Config(tile_m=128, tile_n=64, num_warps=4)
    if problem.head_dim <= 128:
        return Config(tile_m=128, tile_n=128, num_warps=8)
    return Config(tile_m=128, tile_n=32, num_warps=8)


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
        if self.tile_n % 64 or self.tile_n % rows or self.tile_n // self.key_warps not in (16, 32, 64):
            raise ValueError(
                f"tile_n must be a multiple of 64 (a panel) and of {rows}, and 16, 32 or 64 times key_warps = "
                f"{self.key_warps}; got {self.tile_n}"
            )
        others = self.num_warps // self.key_warps
        if self.tile_m % rows or self.tile_m % (16 * others) or self.tile_m % (16 * self.query_warps):
            raise ValueError(
                f"tile_m must be a multiple of {rows}, of 16 * num_warps / key_warps = {16 * others} and of "
                f"16 * query_warps = {16 * self.query_warps}; got {self.tile_m}"
            )


def default_backward_config(problem: Problem) -> BackwardConfig:
    """The backward's tiles for this head_dim."""
    if problem.head_dim <= 64:
        return BackwardConfig(tile_m=64, tile_n=128, num_warps=8, key_warps=8, query_warps=4)
    if problem.head_dim <= 128:
        return BackwardConfig(tile_m=64, tile_n=128, num_warps=8, key_warps=4, query_warps=2)
    return BackwardConfig(tile_m=64, tile_n=64, num_warps=8, key_warps=4, query_warps=2)
