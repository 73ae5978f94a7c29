"""interface.py of each generation: what its kernel is given, and how it is launched."""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

from fa_common.problem import UNBOUNDED, Problem

VERSIONS = ("fa1", "fa2", "fa3")
PROBLEM = Problem(batch=2, seqlen_q=1000, seqlen_k=500, heads_q=4, heads_kv=2, head_dim=64)


def interface(version):
    return import_module(f"{version}.interface")


def launched(version, problem, tensors, config=None, num_sms=132):
    """What the kernel is called with."""
    given = []
    config = interface(version).default_config(problem) if config is None else config
    launch = interface(version).bind_forward(lambda *arguments: given.append(arguments), problem, config, num_sms)
    assert launch(*tensors) is None
    [arguments] = given
    return arguments


def dense_tensors():
    q, k, v, out = (torch.empty(2, 9, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    return q, k, v, out, torch.empty(2, 4, 9), None, None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernel_gets_the_tensors_in_order(version):
    problem = Problem(batch=2, seqlen_q=9, seqlen_k=9, heads_q=4, heads_kv=4, head_dim=64, softmax_scale=0.5)
    tensors = dense_tensors()
    given = launched(version, problem, tensors)
    assert all(x is y for x, y in zip(given, tensors[:5], strict=False))
    if version == "fa1":
        workspaces = given[7:9]
        assert given[5:7] == (None, None)
        assert [tuple(x.shape) for x in workspaces] == [(4, 2, 1, 8, 32, 4), (4, 2, 16, 2)]
        assert all(x.dtype == torch.float32 and x.is_contiguous() for x in workspaces)
        assert len({x.data_ptr() for x in workspaces}) == len(workspaces)
        assert given[9:] == (0.5, 0.0, UNBOUNDED, UNBOUNDED)
    elif version == "fa2":
        assert given[5:] == (None, None, 0.5, 0.0, UNBOUNDED, UNBOUNDED, 9)
    else:
        assert given[5:] == (None, None, None, 0.5, 0.0, UNBOUNDED, UNBOUNDED, 132, 1)


@pytest.mark.parametrize(
    ("change", "bounds"),
    [
        ({}, (UNBOUNDED, UNBOUNDED)),
        ({"causal": True}, (UNBOUNDED, 0)),
        ({"window": (64, 3)}, (64, 3)),
        ({"window": (0, None)}, (0, UNBOUNDED)),
        ({"window": (None, 7)}, (UNBOUNDED, 7)),
        ({"causal": True, "window": (64, None)}, (64, 0)),
    ],
    ids=str,
)
def test_the_bounds_of_a_window_are_numbers(change, bounds):
    given = launched("fa3", replace(PROBLEM, softcap=30.0, **change), dense_tensors())
    assert given[9:12] == (30.0, *bounds)
    assert all(isinstance(bound, int) for bound in given[10:12])


def test_packed_sequences_come_with_their_bounds():
    q, k, v, out = (torch.empty(18, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    cu_seqlens_q, cu_seqlens_k = torch.tensor([[0, 9, 18]] * 2, dtype=torch.int32)
    tensors = (q, k, v, out, torch.empty(4, 18), cu_seqlens_q, cu_seqlens_k)
    given = launched("fa3", replace(PROBLEM, varlen=True, total_q=18, total_k=18), tensors)
    assert all(x is y for x, y in zip(given, tensors, strict=False))


def test_each_launch_counts_its_own_tiles():
    """A counter that two launches share would give each a part of the tiles."""
    config = replace(interface("fa3").default_config(PROBLEM), scheduler="dynamic")
    counters = []
    launch = interface("fa3").bind_forward(lambda *arguments: counters.append(arguments[7]), PROBLEM, config, 132)
    for _ in range(2):
        launch(*dense_tensors())
    assert counters[0].data_ptr() != counters[1].data_ptr()
    assert all(x.dtype == torch.int32 and x.tolist() == [0] for x in counters)


def shape(version, problem, num_sms=132, **changes):
    config = replace(interface(version).default_config(problem), **changes)
    return interface(version).shape_forward(problem, config, num_sms), config


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seqlen_q", [1, 128, 1000])
def test_the_grid_covers_every_query_head_and_batch(version, seqlen_q):
    problem = replace(PROBLEM, seqlen_q=seqlen_q)
    one_tile_each = {"persistent": False, "epilogue_overlap": False, "pack_gqa": False} if version == "fa3" else {}
    launch, config = shape(version, problem, **one_tile_each)
    num_m_blocks = config.q_splits if version == "fa1" else -(-seqlen_q // config.tile_m)
    assert launch.num_ctas == num_m_blocks * 8
    assert launch.num_threads % 32 == 0


def test_persistent_ctas_are_no_more_than_run_at_once():
    for num_sms, num_ctas in ((132, 64), (64, 64), (60, 60)):
        assert shape("fa3", PROBLEM, num_sms, tile_m=128)[0].grid == (num_ctas, 1, 1)


def test_a_cluster_is_whole():
    assert shape("fa3", replace(PROBLEM, seqlen_q=129 + 128), tile_m=128, cluster=True)[0].grid == (32, 1, 1)
    assert shape("fa3", PROBLEM, 31, tile_m=128, cluster=True)[0].grid == (30, 1, 1)


def test_packed_heads_share_a_tile():
    assert shape("fa3", replace(PROBLEM, seqlen_q=60), tile_m=128, pack_gqa=True)[0].num_ctas == 4


def test_packed_sequences_may_each_end_inside_a_tile():
    problem = replace(PROBLEM, varlen=True, total_q=1000, total_k=1000)
    assert shape("fa3", problem, tile_m=128)[0].num_ctas == (1000 // 128 + 2) * 4


@pytest.mark.parametrize("version", VERSIONS)
def test_the_package_exports_its_interface(version):
    package, module = import_module(version), interface(version)
    assert package.flash_attn_func == module.flash_attn_func
    assert package.Config is module.GENERATION.config_type
    assert package.CAPABILITIES is module.GENERATION.capabilities
    assert module.GENERATION.name == version
    assert package.__doc__.splitlines()[0] == f"FlashAttention-{version[-1]}, for Hopper."


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernel_module_does_not_replace_the_function_of_its_name(version):
    package = import_module(version)
    module = import_module(f"{version}.forward")
    assert isinstance(module, ModuleType)
    assert package.forward is interface(version).forward
