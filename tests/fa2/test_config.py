"""What an FA2 Config may be, and what every problem gets by default. Needs no GPU."""

from dataclasses import replace
from itertools import product

import pytest

from fa2.config import CAPABILITIES, Config, default_config, split_k_bytes, split_k_tile
from fa2.interface import GENERATION, build_forward, shape_forward
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT, report
from fa_common.switches import ladder, switches, without

MASKS = ({}, {"causal": True}, {"window": (100, 30)}, {"softcap": 30.0}, {"varlen": True, "causal": True})
LENGTHS = (1, 512, 1024, 4096, 16384)


def problems_of(head_dim: int) -> list[Problem]:
    return [Problem(4, seqlen, seqlen, 8, 2, head_dim, **mask) for seqlen, mask in product(LENGTHS, MASKS)]


def shared_memory(config: Config, head_dim: int) -> int:
    """Bytes: Q, stages of K and V, and without split_q where the warps meet."""
    tile_m, tile_n, _ = config.tile(head_dim)
    width = -(-head_dim // 64) * 64
    if not config.split_q:
        return split_k_bytes(tile_m, tile_n, width, config.stages)
    return 2 * width * (tile_m + 2 * config.stages * tile_n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_m": 0}, r"tile_m must be a multiple of 16 \* num_warps = 64 .* got 0$"),
        ({"tile_m": 96}, r"tile_m must be a multiple of 16 \* num_warps = 64 .* got 96$"),
        ({"tile_n": 40}, r"tile_n must be a multiple of 16 .* got 40$"),
        ({"tile_n": 48, "num_warps": 8}, r"tile_n must be .* of 32; got 48$"),
        ({"num_warps": 1}, r"num_warps must be even .* got 1$"),
        ({"stages": 0}, r"stages must be at least 1 .* got 0$"),
        ({"ctas_per_sm": 0}, r"ctas_per_sm must be at least 1; got 0$"),
    ],
    ids=str,
)
def test_what_is_refused_and_why(change, message):
    with pytest.raises(ValueError, match=message):
        Config(**change)


@pytest.mark.parametrize("name", [switch.name for switch in switches(Config)])
def test_each_switch_can_be_turned_alone(name):
    config = without(Config(), name)
    assert [switch.name for switch in switches(config) if not getattr(config, switch.name)] == [name]
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        replace(Config(), **{name: 1})


def test_the_ladder_starts_with_all_off():
    rungs = ladder(Config())
    assert [text for text, _ in rungs] == ["all off", *(f"+ {one.metadata['label']}" for one in switches(Config))]
    assert rungs[-1][1] == Config()


@pytest.mark.parametrize("head_dim", CAPABILITIES.head_dims)
def test_the_default_of_every_problem_fits_with_every_switch(head_dim):
    for problem in problems_of(head_dim):
        config = default_config(problem)
        for variant in [config, *(rung for _, rung in ladder(config))]:
            assert shared_memory(variant, head_dim) <= SHARED_MEMORY_LIMIT, (variant, problem)


@pytest.mark.parametrize(("head_dim", "stages"), list(product((64, 72, 128, 192, 256), (1, 2))))
def test_without_split_q_the_tile_is_fa1s(head_dim, stages):
    tile_m, tile_n, num_warps = split_k_tile(head_dim, stages)
    assert (tile_m, num_warps) == (32 if head_dim <= 64 else 16, 4)
    assert tile_n % (16 * num_warps) == 0
    width = -(-head_dim // 64) * 64
    assert split_k_bytes(tile_m, tile_n, width, stages) <= SHARED_MEMORY_LIMIT
    assert tile_n == 256 or split_k_bytes(tile_m, 2 * tile_n, width, stages) > SHARED_MEMORY_LIMIT


def test_the_default_depends_on_nothing_that_a_batch_changes():
    """The same row in another batch, or with other heads beside it, must give the same bits."""
    for head_dim in (64, 128, 256):
        for problem in problems_of(head_dim):
            config = default_config(problem)
            assert default_config(replace(problem, batch=1, total_q=None, total_k=None)) == config
            assert default_config(replace(problem, heads_q=24, heads_kv=6)) == config


def test_the_grid_without_sequence_parallelism_is_heads_and_batch():
    problem = Problem(3, 1000, 1000, 8, 2, 64)
    config = default_config(problem)
    assert shape_forward(problem, config, 132).grid == (-(-1000 // config.tile_m), 8, 3)
    assert shape_forward(problem, without(config, "parallel_seqlen"), 132).grid == (1, 8, 3)
    assert shape_forward(problem, without(config, "split_q"), 132).grid == (-(-1000 // 32), 8, 3)


@pytest.mark.parametrize("name", ["parallel_seqlen", "separate_masking"])
def test_a_block_has_fewer_keys_where_registers_are_short(name):
    assert Config(tile_n=48).tile(128) == (128, 48, 4)
    config = without(Config(tile_n=48), name)
    assert [config.tile(head_dim).tile_n for head_dim in (64, 72, 128, 136)] == [48, 32, 32, 48]
    assert without(Config(tile_n=128, num_warps=8), name).tile(128) == (128, 128, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "split_q"])
def test_shared_memory_is_what_the_kernel_asks_for(name):
    problem = Problem(1, 512, 512, 8, 8, 64)
    config = default_config(problem) if name is None else without(default_config(problem), name)
    kernel = report(GENERATION.forward_key(problem, config), build_forward)
    assert 0 <= kernel.shared_memory - shared_memory(config, 64) < 128
