"""interface.py of each generation: what its kernel is given, and how it is launched."""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

from fa_common.problem import Problem

VERSIONS = ("fa1", "fa2", "fa3")
PROBLEM = Problem(batch=2, seqlen_q=1000, seqlen_k=500, heads_q=4, heads_kv=2, head_dim=64)


def interface(version):
    return import_module(f"{version}.interface")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernel_gets_the_tensors_in_order(version):
    q, k, v, out = (torch.empty(2, 9, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    lse = torch.empty(2, 4, 9)
    given = []
    interface(version).launch_forward(lambda *arguments: given.append(arguments), q, k, v, out, lse, 0.5)
    [(*tensors, softmax_scale)] = given
    assert softmax_scale == 0.5
    assert all(x is y for x, y in zip(tensors, (q, k, v, out, lse), strict=False))
    workspaces = tensors[5:]
    assert [tuple(x.shape) for x in workspaces] == ([(2, 4, 9, 64), (2, 4, 9), (2, 4, 9)] if version == "fa1" else [])
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in workspaces)
    assert len({x.data_ptr() for x in workspaces}) == len(workspaces)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seqlen_q", [1, 128, 1000])
def test_the_grid_covers_every_query_head_and_batch(version, seqlen_q):
    problem = replace(PROBLEM, seqlen_q=seqlen_q)
    config = interface(version).default_config(problem)
    launch = interface(version).shape_forward(problem, config)
    blocks, heads, batch = launch.grid
    assert (heads, batch) == (4, 2)
    assert launch.num_ctas == blocks * 8
    assert launch.num_threads % 32 == 0
    if version == "fa1":
        assert blocks == config.q_splits
    else:
        assert (blocks - 1) * config.tile_m < seqlen_q <= blocks * config.tile_m


def test_a_cluster_is_whole():
    config = interface("fa3").Config(tile_m=128, cluster=True)
    assert interface("fa3").shape_forward(replace(PROBLEM, seqlen_q=129 + 128), config).grid == (4, 4, 2)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_package_exports_its_interface(version):
    package, module = import_module(version), interface(version)
    assert package.flash_attn_func == module.GENERATION.flash_attn_func
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
