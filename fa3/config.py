"""What FA3's kernels are built from: tiles, stages and the ideas that can be switched off one at a time."""

from dataclasses import dataclass

from fa_common.capabilities import Capabilities
from fa_common.problem import Problem
from fa_common.switches import check, switch

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
    """Everything that changes the code FA3 generates, and nothing else.

    Raises ValueError when a tile does not fit the instructions or a switch lacks what it stands on.
    """

    tile_m: int = 128  # queries per CTA, 64 for each consumer warpgroup
    tile_n: int = 128  # keys per block
    stages: int = 2  # K/V blocks in flight in shared memory
    pingpong: bool = switch("ping-pong", "FA3 3.1")
    overlap_gemm_softmax: bool = switch("GEMM-softmax overlap", "FA3 3.2")
    lazy_rescale: bool = switch("lazy rescale", "FA4")  # of O, only once P would outgrow 2^8
    cluster: bool = switch("2-CTA multicast", "FA3 code", default=False)  # two CTAs load each K/V block for both

    def __post_init__(self):
        check(self)
        if self.tile_m not in (64, 128, 192):
            raise ValueError(
                f"tile_m must be 64, 128 or 192 (1 to 3 consumer warpgroups of 64 rows); got {self.tile_m}"
            )
        if self.pingpong and self.tile_m == 64:
            raise ValueError("pingpong=True needs at least two consumer warpgroups, tile_m 128 or 192; got tile_m 64")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 up to 256 (the width of one WGMMA); got {self.tile_n}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1 (a K/V block to load into); got {self.stages}")

    @property
    def num_consumer_warpgroups(self) -> int:
        return self.tile_m // 64


def default_config(problem: Problem) -> Config:
    """The tiles measured fastest on an H200 for this head_dim, mask and length (docs/fa3.md)."""
    # Timed at head_dim 64, 128 and 256; 96 and 192 take tiles that fit and do not spill.
    if problem.head_dim <= 64:
        # Half the work of d = 128 for each exponential: three warpgroups, so that one is always at the tensor cores.
        return Config(tile_m=192, tile_n=128, stages=2)
    if problem.head_dim <= 96:
        return Config(tile_m=192, tile_n=96, stages=2)
    if problem.head_dim <= 128:
        if problem.causal and problem.seqlen_k < 4096:
            # Short rows: 192 rows would mask three or four blocks of each tile's few.
            return Config(tile_m=128, tile_n=128, stages=2)
        # 192 rows read each K/V block from L2 a third less often, and power is what limits long rows.
        return Config(tile_m=192, tile_n=80, stages=2 if problem.causal else 3)
    return Config(tile_m=128, tile_n=96 if problem.head_dim <= 192 else 64, stages=2)
