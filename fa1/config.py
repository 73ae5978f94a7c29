"""What FA1's kernels are built from: tiles, where K and V stay, and how many CTAs share a head."""

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


ROWS, COLUMNS = 16, 8  # of one mma.sync's accumulator: a piece, of O say
LANES, FLOATS = 32, 4  # that hold it: each lane two of row lane / 4 and two of row lane / 4 + 8


def whole_pieces(head_dim: int, num_warps: int) -> int:
    """How many pieces of 8 columns hold head_dim, as many for each warp."""
    return -(-head_dim // (COLUMNS * num_warps)) * num_warps


@dataclass(frozen=True)
class Config:
    """Everything that changes the code of FA1's forward, and nothing else.

    Raises ValueError when a tile does not fit the instructions: one `mma.sync` covers 16 queries, and each warp takes
    `tile_n / num_warps` keys, 16 at a time.
    """

    tile_m: int = 16  # queries per inner visit
    tile_n: int = 256  # keys per outer block, shared out over the warps ("split-K")
    num_warps: int = 4
    kv_in_registers: bool = True  # each warp's keys and values, for a whole key block; else read again at each visit
    share_stages: int = 2  # visits whose shares of O have their own shared memory; 1 costs a barrier more
    q_splits: int = 1  # CTAs that share one head's queries; 1 = the paper's grid of batch x heads

    def __post_init__(self):
        if self.num_warps not in (2, 4, 8):
            raise ValueError(f"num_warps must be 2, 4 or 8 (they share the columns of O evenly); got {self.num_warps}")
        rows = 4 * self.num_warps  # that the CTA copies at a time
        if self.tile_m % 16 or self.tile_m % rows:
            raise ValueError(f"tile_m must be a multiple of 16 (rows of one mma.sync) and of {rows}; got {self.tile_m}")
        if self.tile_n % (16 * self.num_warps):
            raise ValueError(
                f"tile_n must be a multiple of 16 * num_warps = {16 * self.num_warps} (each warp takes its own keys, "
                f"16 per mma.sync); got {self.tile_n}"
            )
        if self.share_stages not in (1, 2):
            raise ValueError(
                f"share_stages must be 1 or 2 (this visit's and the one before's); got {self.share_stages}"
            )
        if self.q_splits < 1:
            raise ValueError(f"q_splits must be at least 1 (the paper's grid); got {self.q_splits}")


def default_config(problem: Problem) -> Config:
    """Tiles that fit and do not spill, and enough query splits for two CTAs on each of 132 SMs.

    The paper's grid has batch * heads CTAs. The released FA1 code splits the queries further when those do not fill the
    GPU; so does this default, in powers of two, so that few kernels are compiled, and down to 128 queries a split.
    `Config(q_splits=1)` is the paper.
    """
    ctas, q_splits = problem.batch * problem.heads_q, 1
    while ctas * q_splits < 2 * 132 - 8 and q_splits * 128 < problem.seqlen_q:
        q_splits *= 2
    is_plain = not (problem.varlen or problem.softcap or problem.window != (None, None))
    if problem.head_dim <= 64:
        return Config(tile_m=16, tile_n=256, q_splits=q_splits)
    if problem.head_dim <= 128 and is_plain:
        return Config(tile_m=16, tile_n=128, q_splits=q_splits)
    # With the numbers of a window or a softcap the registers have no room for K and V; beyond 128 columns neither.
    return Config(tile_m=16, tile_n=128, kv_in_registers=False, share_stages=1, q_splits=q_splits)
