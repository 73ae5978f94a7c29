"""Every kernel that a user gets by default compiles for sm_90a, spills nothing, and holds the instructions that its
generation stands for. Needs no GPU."""

import importlib
from itertools import product

import pytest
import torch

from fa_common.compile import KernelKey
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT, report

AMPERE = {"HMMA", "LDGSTS", "LDSM"}  # mma.sync, cp.async, ldmatrix
HOPPER = {"HGMMA", "UTMALDG", "UTMASTG"}  # WGMMA, TMA loads, TMA stores
HAS = {"fa1": AMPERE, "fa2": AMPERE, "fa3": HOPPER}
HAS_NOT = {"fa1": HOPPER, "fa2": HOPPER, "fa3": AMPERE}

# Each width that a tile can have, and head_dims that end inside their tile.
HEAD_DIMS = {64: ("float16", "bfloat16"), 128: ("float16", "bfloat16"), 256: ("float16", "bfloat16")}
HEAD_DIMS |= dict.fromkeys((40, 72, 96, 136, 192, 200), ("bfloat16",))
# A default may depend on the length and on how well the GPU is filled.
SMALL, LARGE = (1, 512, 512, 8, 8), (64, 4096, 4096, 32, 32)


def default_kernels() -> list[KernelKey]:
    keys = {}  # a dict keeps their order
    for version in HAS:
        generation = importlib.import_module(f"{version}.config")
        for head_dim, causal, sizes in product(HEAD_DIMS, (False, True), (SMALL, LARGE)):
            for dtype in HEAD_DIMS[head_dim]:
                problem = Problem(*sizes, head_dim, dtype=getattr(torch, dtype), causal=causal)
                config = generation.default_config(problem)
                keys[KernelKey(version, "forward", dtype, head_dim, causal, config)] = None
    return list(keys)


def title(key: KernelKey) -> str:
    return f"{key.version}-{key.dtype}-d{key.head_dim}-{'causal' if key.causal else 'full'}"


@pytest.mark.slow
@pytest.mark.parametrize("key", default_kernels(), ids=title)
def test_default_kernel(key: KernelKey):
    kernel = report(key, importlib.import_module(f"{key.version}.interface").build_forward)
    assert not kernel.problems(), "; ".join(kernel.problems())
    assert kernel.shared_memory <= SHARED_MEMORY_LIMIT
    assert kernel.stack == 0

    assert kernel.why_no_instructions is None
    instructions = set(kernel.instructions)
    assert HAS[key.version] <= instructions
    assert not HAS_NOT[key.version] & instructions
    assert not {"LDL", "STL"} & instructions
    # One setmaxnreg gives registers away and one takes them; ptxas may drop both, and the consumers would spill.
    assert kernel.instructions["USETMAXREG"] == (2 if key.version == "fa3" else 0)
