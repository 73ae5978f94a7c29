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
