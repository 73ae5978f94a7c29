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
    backward=True,
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
    if problem.head_dim <= 64:
        return Config(tile_m=16, tile_n=256, q_splits=q_splits)
    if problem.head_dim in (96, 128) and not problem.varlen:
        return Config(tile_m=16, tile_n=128, q_splits=q_splits)
    # Beyond 128 columns the registers have no room for K and V, nor beyond 64 with what packed sequences need, or what
    # rows need that end inside a group of 32 columns.
    return Config(tile_m=16, tile_n=128, kv_in_registers=False, share_stages=1, q_splits=q_splits)


@dataclass(frozen=True)
class BackwardConfig:
    """Everything that changes the code of FA1's backward, and nothing else.

    `key_warps` warps split the keys of a block ("split-K"); if there are twice as many warps, two share the keys and
    each has half of the columns of dK, dV and dQ. Raises ValueError when a tile does not fit the instructions.
    """

    tile_m: int = 32  # queries per inner visit
    tile_n: int = 128  # keys per outer block
    num_warps: int = 4
    key_warps: int = 4
    kv_splits: int = 1  # CTAs that share one head's key blocks; 1 = the paper's grid of batch x heads

    def __post_init__(self):
        if self.num_warps not in (4, 8):
            raise ValueError(f"num_warps must be 4 or 8 (they share out the sum of dQ evenly); got {self.num_warps}")
        if self.key_warps not in (self.num_warps, self.num_warps // 2):
            raise ValueError(
                f"key_warps must be num_warps or half of it (two warps share keys then); got {self.key_warps} of "
                f"{self.num_warps}"
            )
        if self.tile_m < 1 or self.tile_m % 32:
            raise ValueError(f"tile_m must be a multiple of 32 (rows copied at a time); got {self.tile_m}")
        if self.tile_n not in (16 * self.key_warps, 32 * self.key_warps, 64 * self.key_warps):
            raise ValueError(f"tile_n must be 16, 32 or 64 times key_warps = {self.key_warps}; got {self.tile_n}")
        if self.kv_splits < 1:
            raise ValueError(f"kv_splits must be at least 1 (the paper's grid); got {self.kv_splits}")


def default_backward_config(problem: Problem) -> BackwardConfig:
    """Tiles that fit and do not spill, and enough splits of the keys to fill 132 SMs, unless the sum of dQ must have
    one order: that is the paper's grid.

    Splits double until a wave of CTAs is full (two on an SM with four warps), while each has a key block.
    """
    # With a window or packed sequences four warps would spill.
    is_small = problem.head_dim <= 64 and problem.window == (None, None) and not problem.varlen
    tile_n, kv_splits = 128 if problem.head_dim <= 128 else 64, 1
    ctas, enough = problem.batch * problem.heads_kv, (256 if is_small else 128)
    while not problem.deterministic and ctas * kv_splits < enough and kv_splits * tile_n < problem.seqlen_k:
        kv_splits *= 2
    if is_small:
        return BackwardConfig(32, tile_n, num_warps=4, key_warps=4, kv_splits=kv_splits)
    key_warps = 8 if problem.head_dim <= 128 else 4
    return BackwardConfig(32, tile_n, num_warps=8, key_warps=key_warps, kv_splits=kv_splits)
