"""What an FA3 Config may be, and what every problem gets by default. Needs no GPU."""

from dataclasses import replace
from itertools import product

import pytest

from fa3.config import CAPABILITIES, SHORT_QUERIES, Config, check_fp8_config, default_config
from fa3.interface import GENERATION, build_forward
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT, report
from fa_common.switches import ladder, switches, without

NUM_PLACES = 2  # of the ring of tile numbers
MASKS = (
    {},
    {"causal": True},
    {"window": (100, 30)},
    {"causal": True, "window": (100, None)},
    {"softcap": 30.0},
    {"causal": True, "softcap": 30.0},
    {"window": (100, 30), "softcap": 30.0},
)
# Lengths of Q and of K, heads of Q and of K.
SIZES = (
    (1, 1, 1, 1),
    (1, 512, 8, 8),
    (1, 4096, 32, 8),
    (1, 4096, 71, 1),
    (3, 4096, 21, 7),
    (16, 1024, 32, 8),
    (17, 1024, 32, 8),
    (512, 512, 16, 16),
    (2048, 2048, 32, 4),
    (4096, 4096, 16, 16),
    (16384, 16384, 16, 16),
    (128, 16384, 16, 2),
)


def problems_of(head_dim: int) -> list[Problem]:
    return [
        Problem(4, *sizes, head_dim, varlen=varlen, **mask)
        for sizes, varlen, mask in product(SIZES, (False, True), MASKS)
    ]


def shared_memory(config: Config, head_dim: int) -> int:
    """Bytes: Q of each warpgroup, stages of K and V, P and up to 128 columns of O if they have memory of their own;
    before them barriers and the ring of tile numbers. Swizzled tiles start at multiples of 1,024."""
    width = next(width for width in (64, 96, 128, 192, 256) if width >= head_dim)
    stores_directly = config.pack_gqa or not config.tma
    barriers = 2 * 8 * (config.num_consumer_warpgroups + 2 * config.stages + NUM_PLACES) + 4 * NUM_PLACES
    queries, keys = config.tile_m * width, config.tile_n * width
    elements = queries + 2 * config.stages * keys
    elements += 0 if config.p_in_registers else config.tile_m * config.tile_n
    elements += config.tile_m * min(width, 128) if config.epilogue_overlap and not stores_directly else 0
    return -(-barriers // 1024) * 1024 + 2 * elements


@pytest.mark.parametrize("tile_m", [0, 32, 96, 100, 320])
def test_a_tile_is_whole_warpgroups(tile_m):
    with pytest.raises(ValueError, match=rf"tile_m must be 64, 128, 192 or 256 \(1 to 4 .* got {tile_m}$"):
        Config(tile_m=tile_m)


def test_ping_pong_takes_two():
    with pytest.raises(ValueError, match="pingpong=True needs at least two consumer warpgroups, tile_m 128 or more"):
        Config(tile_m=64)
    assert Config(tile_m=64, pingpong=False).num_consumer_warpgroups == 1


@pytest.mark.parametrize("tile_n", [-16, 0, 8, 24, 100, 272])
def test_a_key_block_is_as_wide_as_one_wgmma(tile_n):
    with pytest.raises(ValueError, match=rf"tile_n must be a multiple of 16 up to 256 .* got {tile_n}$"):
        Config(tile_n=tile_n)


@pytest.mark.parametrize("stages", [-1, 0])
def test_there_is_a_stage_to_load_into(stages):
    with pytest.raises(ValueError, match=rf"stages must be at least 1 .* got {stages}$"):
        Config(stages=stages)


@pytest.mark.parametrize("steps", [-1, 3, 5, 32])
def test_queries_in_registers_are_whole_steps(steps):
    with pytest.raises(ValueError, match=rf"q_register_steps must be 0, 1, 2, 4, 8 or 16 .* got {steps}$"):
        Config(q_register_steps=steps)


def test_schedulers_have_names():
    with pytest.raises(ValueError, match="scheduler must be one of static, dynamic; got 'fastest'"):
        Config(scheduler="fastest")


@pytest.mark.parametrize(
    ("config", "got"),
    [
        (replace(Config(), cluster=True), "persistent=True, tma=True, cluster=True"),
        (without(Config(), "persistent"), "persistent=False, tma=True, cluster=False"),
        (without(Config(), "warp_specialized"), "persistent=False, tma=True, cluster=False"),
        (without(Config(), "tma"), "persistent=True, tma=False, cluster=False"),
        (ladder(Config())[0][1], "persistent=False, tma=False, cluster=False"),
    ],
    ids=["cluster", "not persistent", "not warp-specialized", "no TMA", "all off"],
)
def test_what_the_dynamic_schedule_stands_on(config, got):
    with pytest.raises(ValueError, match=f"scheduler='dynamic' needs persistent=True, tma=True.* got {got}$"):
        replace(config, scheduler="dynamic")


@pytest.mark.parametrize(
    ("name", "need"),
    [(switch.name, need) for switch in switches(Config) for need in switch.metadata["requires"]],
    ids=str,
)
def test_a_switch_needs_what_it_stands_on(name, need):
    config = without(Config(), need)
    with pytest.raises(ValueError, match=rf"{name}=True needs {need}=True; got {need}=False"):
        replace(config, **{name: True})


def test_optimistic_exponentials_go_with_what_they_stand_on():
    """P that outgrew its shift is mended in registers, and a shift that is never behind is a maximum."""
    for need in ("lazy_rescale", "p_in_registers"):
        assert not without(Config(), need).optimistic_exp
    assert without(Config(), "optimistic_exp") == replace(Config(), optimistic_exp=False)


@pytest.mark.parametrize("head_dim", CAPABILITIES.head_dims)
def test_every_default_is_optimistic_and_o_has_memory_of_its_own(head_dim):
    for problem in problems_of(head_dim):
        config = default_config(problem)
        assert config.optimistic_exp
        assert config.epilogue_overlap != config.pack_gqa


@pytest.mark.parametrize("name", [switch.name for switch in switches(Config)])
def test_each_switch_can_be_turned_alone(name):
    is_on = getattr(Config(), name)
    turned = without(Config(), name) if is_on else replace(Config(), **{name: True})
    assert getattr(turned, name) != is_on
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        replace(Config(), **{name: 1})


@pytest.mark.parametrize("config", [Config(), Config(tile_m=192, tile_n=80, stages=3), Config(cluster=True)])
def test_every_rung_of_the_ladder_is_legal(config):
    rungs = ladder(config)
    usual = [switch for switch in switches(config) if getattr(config, switch.name)]
    assert [text for text, _ in rungs] == ["all off", *(f"+ {switch.metadata['label']}" for switch in usual)]
    assert rungs[-1][1] == config
    assert len({rung for _, rung in rungs}) == len(rungs)


@pytest.mark.parametrize("head_dim", CAPABILITIES.head_dims)
def test_the_default_of_every_problem_fits(head_dim):
    for problem in problems_of(head_dim):
        config = default_config(problem)  # it exists, so it is legal
        needed = shared_memory(config, head_dim)
        assert needed <= SHARED_MEMORY_LIMIT, f"{config} needs {needed} bytes for {problem}"


@pytest.mark.parametrize("head_dim", CAPABILITIES.head_dims)
def test_the_default_depends_on_nothing_that_a_batch_changes(head_dim):
    """The same row in another batch, or with other heads beside it, must give the same bits."""
    for problem in problems_of(head_dim):
        config = default_config(problem)
        assert default_config(replace(problem, batch=1, total_q=None, total_k=None)) == config
        more_heads = replace(problem, heads_q=3 * problem.heads_q, heads_kv=3 * problem.heads_kv)
        assert default_config(more_heads) == config


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_few_queries_of_many_heads_share_a_tile(head_dim, group):
    for seqlen_q in (1, SHORT_QUERIES, SHORT_QUERIES + 1):
        config = default_config(Problem(4, seqlen_q, 1024, 2 * group, 2, head_dim))
        assert config.pack_gqa == (group > 1 and seqlen_q <= SHORT_QUERIES)
        if config.pack_gqa:
            assert config.tile_m == (64 if seqlen_q * group <= 64 else 128)


SHORT, LONG = (1, 512, 512, 8, 8), (1, 16384, 16384, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        Problem(*SHORT, 128),
        Problem(*SHORT, 256),
        # Defaults of long rows alone, which tests/test_kernels_compile.py has not.
        Problem(*LONG, 64),
        Problem(*LONG, 128),
        Problem(*LONG, 128, causal=True),
    ],
    ids=str,
)
def test_shared_memory_is_what_the_kernel_asks_for(problem):
    config = default_config(problem)
    kernel = report(GENERATION.forward_key(problem, config), build_forward)
    assert kernel.shared_memory == shared_memory(config, problem.head_dim)
    assert not kernel.problems(), "; ".join(kernel.problems())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tma": False}, "needs tma=True .*TMA brings.*; got tma=False"),
        ({"p_in_registers": False, "optimistic_exp": False}, "the FP8 kernel needs p_in_registers=True"),
        ({"epilogue_overlap": False}, "needs epilogue_overlap=True"),
        ({"cluster": True}, "needs cluster=False; got cluster=True"),
        ({"tile_n": 32}, "needs tile_n 64, 96 or 128 .*; got 32"),
        ({"tile_n": 80}, "needs tile_n 64, 96 or 128 .*; got 80"),
        ({"stages": 1}, "needs 2 stages or more .*; got 1"),
    ],
    ids=str,
)
def test_what_the_fp8_kernel_cannot_have_is_refused(changes, message):
    for tile_n in (64, 96, 128):
        check_fp8_config(Config(tile_n=tile_n))
    with pytest.raises(ValueError, match=message):
        check_fp8_config(Config(**{"tile_n": 64} | changes))
