"""What FA1's kernels are built from: tiles and the number of query splits."""

from dataclasses import dataclass

from fa_common.capabilities import Capabilities
from fa_common.problem import Problem

CAPABILITIES = Capabilities(
    archs=(90,),
    dtypes=("float16", "bfloat16"),
    head_dims=tuple(range(8, 257, 8)),
    varlen=False,
    window=False,
    softcap=False,
    backward=False,
)


@dataclass(frozen=True)
class Config:
    """Everything that changes the code FA1 generates, and nothing else.

    Raises ValueError when a tile does not fit the instructions: one `mma.sync` covers 16 queries, and each warp takes
    `tile_n / num_warps` keys, 16 at a time.
    """

    tile_m: int = 16  # queries per inner visit
    tile_n: int = 256  # keys per outer block, shared out over the warps ("split-K")
    num_warps: int = 4
    q_splits: int = 1  # CTAs that share one head's queries; 1 = the paper's grid of batch x heads

    def __post_init__(self):
        rows = 4 * self.num_warps  # that the CTA copies at a time
        if self.tile_m % 16 or self.tile_m % rows:
            raise ValueError(f"tile_m must be a multiple of 16 (rows of one mma.sync) and of {rows}; got {self.tile_m}")
        if self.tile_n % (16 * self.num_warps):
            raise ValueError(
                f"tile_n must be a multiple of 16 * num_warps = {16 * self.num_warps} (each warp takes its own keys, "
                f"16 per mma.sync); got {self.tile_n}"
            )
        if self.q_splits < 1:
            raise ValueError(f"q_splits must be at least 1 (the paper's grid); got {self.q_splits}")


def default_config(problem: Problem) -> Config:
    """The tiles measured fastest on an H200 for this head_dim, and enough query splits for two CTAs on each of 132 SMs.

    The paper's grid has batch * heads CTAs. The released FA1 code splits the queries further when those do not fill the
    GPU; so does this default, in powers of two, so that few kernels are compiled, and down to 128 queries a split.
    `Config(q_splits=1)` is the paper.
    """
    ctas, q_splits = problem.batch * problem.heads_q, 1
    while ctas * q_splits < 2 * 132 and q_splits * 128 < problem.seqlen_q:
        q_splits *= 2
    # Timed at head_dim 64 and 128; beyond, the largest tiles that fit and do not spill.
    tile_m = 32 if problem.head_dim <= 64 else 16
    tile_n = 256 if problem.head_dim <= 128 else 128  # K and V of 256 keys would not fit into shared memory
    return Config(tile_m=tile_m, tile_n=tile_n, q_splits=q_splits)
