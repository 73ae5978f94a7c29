"""What FA3's kernels are built from: tiles, stages and the ideas that can be switched off one at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fa_common.capabilities import Capabilities
from fa_common.problem import Problem
from fa_common.switches import check, switch

CAPABILITIES = Capabilities(
    archs=(90,),
    dtypes=("float16", "bfloat16"),
    head_dims=tuple(range(8, 257, 8)),
    varlen=True,
    window=True,
    softcap=True,
    backward=False,
)
SCHEDULERS = ("static", "dynamic")
SHORT_QUERIES = 16  # up to so many, the query heads of a K/V head are packed into one tile

# FP8 (FA3 3.3). An e4m3 row must be a multiple of 16 bytes, as every load is.
FP8_CAPABILITIES = replace(
    CAPABILITIES,
    dtypes=("float8_e4m3fn",),
    head_dims=tuple(range(16, 257, 16)),
    other_call="8-bit tensors come with scales: call fa3.flash_attn_func with descale_q, descale_k, descale_v",
)
# So many rows of a sequence and head share a scale, where blocks have one.
Q_BLOCK = 64  # of Q: what one warpgroup computes
KV_BLOCK = 128  # of K and of V


@dataclass(frozen=True)
class Config:
    """Everything that changes the code FA3 generates, and nothing else.

    Raises ValueError when a tile does not fit the instructions or a switch lacks what it stands on.
    """

    tile_m: int = 128  # queries per CTA, 64 for each consumer warpgroup
    tile_n: int = 128  # keys per block
    stages: int = 2  # K/V blocks in flight in shared memory
    q_register_steps: int = 0  # how much of Q each warpgroup holds in registers, in 16 columns: read less often then
    scheduler: str = "static"  # which tile a persistent CTA takes next: every n-th, or what an atomic counter says
    tma: bool = switch("TMA loads", "FA3 2.2")  # else cp.async, 16 bytes a thread
    warp_specialized: bool = switch("warp specialization", "FA3 3.1")  # else the computing warps load as well
    setmaxnreg: bool = switch("register reallocation", "FA3 3.1", requires=("warp_specialized",))
    pingpong: bool = switch("ping-pong", "FA3 3.1", requires=("warp_specialized",))
    overlap_gemm_softmax: bool = switch("GEMM-softmax overlap", "FA3 3.2")
    p_in_registers: bool = switch("P in registers", "FA3 code")  # else P V reads P from shared memory
    lazy_rescale: bool = switch("lazy rescale", "FA4")  # of O, only once P would outgrow 2^8
    optimistic_exp: bool = switch(
        "optimistic exponentials", "here", requires=("lazy_rescale", "p_in_registers")
    )  # under the maximum so far, checked afterwards
    polynomial_exp: bool = switch("polynomial exponentials", "FA4", default=False)  # a quarter, off the MUFU pipe
    persistent: bool = switch("persistent CTAs", "FA3 code", requires=("warp_specialized",))
    epilogue_overlap: bool = switch("epilogue overlap", "FA3 code", requires=("persistent",))  # O has its own memory
    lpt_order: bool = switch("longest tiles first", "FA3 code")  # causal: those low in the matrix see the most keys
    cluster: bool = switch("2-CTA multicast", "FA3 code", requires=("tma", "warp_specialized"), default=False)
    two_level_accumulation: bool = switch(
        "two-level accumulation", "DeepSeek-V3 3.3.2", default=False
    )  # each P V apart
    pack_gqa: bool = switch("packed GQA", "FA3 code", default=False)  # a K/V head's query heads are rows of one tile

    def __post_init__(self):
        check(self)
        if self.tile_m not in (64, 128, 192, 256):
            raise ValueError(
                f"tile_m must be 64, 128, 192 or 256 (1 to 4 consumer warpgroups of 64 rows); got {self.tile_m}"
            )
        if self.pingpong and self.tile_m == 64:
            raise ValueError("pingpong=True needs at least two consumer warpgroups, tile_m 128 or more; got tile_m 64")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n must be a multiple of 16 up to 256 (the width of one WGMMA); got {self.tile_n}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1 (a K/V block to load into); got {self.stages}")
        if self.q_register_steps not in (0, 1, 2, 4, 8, 16):
            raise ValueError(
                f"q_register_steps must be 0, 1, 2, 4, 8 or 16 (times 16 columns of Q); got {self.q_register_steps}"
            )
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler must be one of {', '.join(SCHEDULERS)}; got {self.scheduler!r}")
        if self.scheduler == "dynamic" and (self.cluster or not self.persistent or not self.tma):
            raise ValueError(
                "scheduler='dynamic' needs persistent=True, tma=True and cluster=False (the one warp that loads draws "
                "the tiles, for its CTA alone); "
                f"got persistent={self.persistent}, tma={self.tma}, cluster={self.cluster}"
            )

    @property
    def num_consumer_warpgroups(self) -> int:
        return self.tile_m // 64


def default_config(problem: Problem) -> Config:
    """The tiles measured fastest on an H200 at head_dim 64, 128 and 256 for this mask and length (docs/fa3.md).

    In between, and for windows, softcap and packed sequences, tiles that fit and do not spill.
    """
    if problem.group > 1 and problem.seqlen_q <= SHORT_QUERIES:
        return few_queries_config(problem)
    # Tiles of unequal length: whoever is done draws the next one.
    scheduler = "dynamic" if problem.causal or problem.varlen or problem.window != (None, None) else "static"
    is_bounded = problem.softcap > 0 or problem.window != (None, None)
    is_plain = not (problem.varlen or is_bounded)
    # Packed sequences and numbers that bound the scores, both, take more registers than the largest tiles leave.
    is_crowded = problem.varlen and is_bounded
    schedule = partial(Config, scheduler=scheduler)
    if problem.head_dim <= 64:
        if is_crowded:
            return schedule(tile_m=192, tile_n=80, stages=3)
        steps = 1 if is_plain else 0
        if problem.causal or problem.seqlen_k <= 4096:
            # Four consumer warpgroups: the more there are, the better they hide each other's latencies. Of causal tiles
            # they have unequal shares, and taking turns makes them wait for the longest.
            return schedule(tile_m=256, tile_n=64, stages=3, q_register_steps=steps, pingpong=not problem.causal)
        # WGMMA reads Q from shared memory for each 64 keys: on long rows wider blocks outweigh the fourth warpgroup.
        return schedule(tile_m=192, tile_n=128, stages=3, q_register_steps=steps, pingpong=False)
    if problem.head_dim <= 96:
        return schedule(tile_m=192, tile_n=96 if is_plain else 64, stages=2)
    if problem.head_dim <= 128:
        if is_crowded or problem.seqlen_k < 2048:
            # Short rows: few blocks each, of which 192 rows would mask more.
            if is_plain and problem.causal:
                return schedule(tile_m=128, tile_n=64, stages=4, q_register_steps=8)
            return schedule(tile_m=128, tile_n=128, stages=2, q_register_steps=4 if is_plain else 0)
        # 192 rows read each K/V block from L2 a third less often, and power is what limits long rows. Half of Q in
        # registers is read from shared memory no more; where there are none left for it, wider blocks read it less.
        if is_plain:
            return schedule(tile_m=192, tile_n=64, stages=4, q_register_steps=4)
        return schedule(tile_m=192, tile_n=80, stages=3)
    tile_n = 64 if problem.head_dim > 192 else 96 if is_plain else 80
    return schedule(tile_m=128, tile_n=tile_n, stages=2)


def check_fp8_config(config: Config) -> None:
    """That the FP8 kernel can have it. Raises ValueError that names the rule."""
    for name, why in (
        ("tma", "its producer warps turn V around, which TMA brings"),
        ("warp_specialized", "its producer warps turn V around"),
        ("p_in_registers", "there is no 8-bit P in shared memory"),
        ("epilogue_overlap", "O is wider than Q, so it has its own memory"),
    ):
        if not getattr(config, name):
            raise ValueError(f"the FP8 kernel needs {name}=True ({why}); got {name}=False")
    if config.cluster:
        raise ValueError("the FP8 kernel needs cluster=False; got cluster=True")
    if config.tile_n not in (64, 96, 128):
        raise ValueError(
            "the FP8 kernel needs tile_n 64, 96 or 128 (the keys of a block have at most two scales); "
            f"got {config.tile_n}"
        )
    if config.stages < 2:
        raise ValueError(f"the FP8 kernel needs 2 stages or more (one to load, one to turn); got {config.stages}")


def default_fp8_config(problem: Problem, v_by_columns: bool = False) -> Config:
    """The FP8 tiles measured fastest on an H200 at head_dim 64, 128 and 256 (docs/fa3.md); in between, some that fit.

    `v_by_columns` says how V lies; turned around on chip, it takes registers from the consumers. Ping-pong is off but
    once: the products are half as long as in 16 bits, and what limits is the latency of the softmax.
    """
    if problem.group > 1 and problem.seqlen_q <= SHORT_QUERIES:
        return few_queries_fp8_config(problem)
    is_bounded = problem.softcap > 0 or problem.window != (None, None)
    is_crowded = problem.varlen and is_bounded
    is_uneven = problem.causal or problem.varlen or problem.window != (None, None)
    schedule = partial(Config, tile_n=64, stages=4, scheduler="dynamic" if is_uneven else "static", pingpong=False)
    if v_by_columns and not is_bounded and problem.head_dim in (64, 128, 256):
        return _fp8_config_by_columns(problem, schedule)
    # Q in registers where there are some left: S of 64 keys would read it from shared memory all too often.
    steps = 0 if problem.varlen or is_bounded else 4
    if problem.head_dim <= 64:
        if problem.varlen:
            return schedule(tile_m=192)
        if steps and problem.causal:
            return schedule(tile_m=256, stages=6, q_register_steps=steps // 4)  # as in 16 bits
        return schedule(tile_m=192, tile_n=128, stages=5, q_register_steps=steps // 2)
    if problem.head_dim <= 96:
        return schedule(tile_m=192, q_register_steps=steps // 2)
    if problem.head_dim <= 128:
        if problem.head_dim == 128 and steps and problem.seqlen_k >= 4096:
            # Wider blocks cost less a key, and leave no register for Q: for long rows.
            return schedule(tile_m=192, tile_n=96, stages=5)
        return schedule(tile_m=128 if is_crowded else 192, q_register_steps=steps)
    return schedule(tile_m=64 if is_crowded and problem.head_dim > 192 else 128, q_register_steps=steps // 2)


def _fp8_config_by_columns(problem: Problem, schedule: Callable[..., Config]) -> Config:
    """Dense, and with no mask but a causal one."""
    is_long = problem.seqlen_k >= 4096
    if problem.head_dim == 64:
        if problem.seqlen_k >= 8192 and not problem.causal:
            return schedule(tile_m=192, tile_n=128, stages=6, q_register_steps=2, pingpong=True)
        return schedule(tile_m=256, stages=8, q_register_steps=2)
    if problem.head_dim == 128:
        if is_long:
            # Wider blocks cost less a key.
            return schedule(tile_m=192, tile_n=96, stages=5, q_register_steps=0 if problem.causal else 2)
        if problem.seqlen_k >= 2048:
            return schedule(tile_m=192, stages=6, q_register_steps=4)
        return schedule(tile_m=128, tile_n=128, q_register_steps=4)
    if is_long:
        return schedule(tile_m=128, tile_n=96, stages=3)
    return schedule(tile_m=128, q_register_steps=2)


def few_queries_config(problem: Problem) -> Config:
    """For a few queries of many heads (decoding): the heads that share K and V become rows of one tile."""
    tile_m = 64 if problem.seqlen_q * problem.group <= 64 else 128
    tile_n = 128 if problem.head_dim <= 128 else 64
    return Config(
        tile_m=tile_m, tile_n=tile_n, pingpong=tile_m > 64, pack_gqa=True, epilogue_overlap=False, lpt_order=False
    )


def few_queries_fp8_config(problem: Problem) -> Config:
    """The same in FP8, where O never leaves through the memory of Q. More stages are slower (docs/fa3.md)."""
    return replace(few_queries_config(problem), stages=4, epilogue_overlap=True)
