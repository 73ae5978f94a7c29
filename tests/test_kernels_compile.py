"""Every kernel that a user gets by default compiles for sm_90a, spills nothing, and holds the instructions that its
generation stands for; so does FA3's with each of its switches turned, and any two of them. Needs no GPU."""

import importlib
from dataclasses import replace
from itertools import product

import pytest
import torch

from fa3.config import Config
from fa_common.compile import KernelKey
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT, KernelReport, report
from fa_common.switches import label, ladder, switches, without
from tests.switch_pairs import covering

VERSIONS = ("fa1", "fa2", "fa3")
AMPERE = {"HMMA", "LDGSTS", "LDSM"}  # mma.sync, cp.async, ldmatrix
HOPPER = {"HGMMA", "UTMALDG", "UTMASTG"}  # WGMMA, TMA loads, TMA stores

# Each width that a tile can have, and head_dims that end inside their tile.
HEAD_DIMS = (64, 128, 256)
OTHER_HEAD_DIMS = (40, 72, 96, 136, 192, 200)
MASKS = {"full": False, "causal": True}
# A default may depend on the length and on how well the GPU is filled.
SMALL, LARGE = (1, 512, 512, 8, 8), (64, 4096, 4096, 32, 32)
DECODING, FEW_QUERIES = (64, 1, 4096, 32, 8), (64, 16, 4096, 32, 4)
# Beside plain attention: what takes most registers, and what fa3 has tiles of its own for.
KINDS = {
    "window": (LARGE, {"window": (512, 64)}),
    "causal softcap": (LARGE, {"causal": True, "softcap": 30.0}),
    "packed causal": (LARGE, {"varlen": True, "causal": True}),
    "packed window softcap": (LARGE, {"varlen": True, "window": (512, 64), "softcap": 30.0}),
}
FA3_KINDS = KINDS | {
    "softcap": (LARGE, {"softcap": 30.0}),
    "packed": (LARGE, {"varlen": True}),
    "decoding": (DECODING, {}),
    "few queries": (FEW_QUERIES, {"causal": True}),
    "packed few queries": (FEW_QUERIES, {"varlen": True, "causal": True}),
}
# A base that leaves room for what each idea takes more of when it is off.
BASE = Config(tile_m=128, tile_n=64)


def default_key(version: str, problem: Problem) -> KernelKey:
    generation = importlib.import_module(f"{version}.interface").GENERATION
    return generation.forward_key(problem, generation.default_config(problem))


def default_kernels() -> list:
    keys = {}  # a dict keeps their order

    def add(version: str, title: str, sizes: tuple, head_dim: int, dtype: str = "bfloat16", **options) -> None:
        key = default_key(version, Problem(*sizes, head_dim, dtype=getattr(torch, dtype), **options))
        keys[key] = f"{version}-{dtype}-d{head_dim}-{title}"

    for version, head_dim, (title, causal) in product(VERSIONS, HEAD_DIMS, MASKS.items()):
        add(version, title, SMALL, head_dim, causal=causal)
        add(version, title, LARGE, head_dim, causal=causal)
        add(version, title, LARGE, head_dim, "float16", causal=causal)
    for version, (i, head_dim) in product(VERSIONS, enumerate(OTHER_HEAD_DIMS)):
        add(version, ("full", "causal")[i % 2], LARGE, head_dim, causal=bool(i % 2))
    for version, head_dim in product(VERSIONS, HEAD_DIMS):
        for title, (sizes, options) in (FA3_KINDS if version == "fa3" else KINDS).items():
            add(version, title, sizes, head_dim, **options)
    return [pytest.param(key, id=title) for key, title in keys.items()]


# Of the backward: what has most numbers in registers.
BACKWARD_KINDS = {
    "window": {"window": (512, 64)},
    "causal deterministic": {"causal": True, "deterministic": True},
    "packed causal": {"varlen": True, "causal": True},
    "packed window softcap deterministic": {
        "varlen": True,
        "window": (512, 64),
        "softcap": 30.0,
        "deterministic": True,
    },
}


def default_backward_kernels() -> list:
    keys = {}
    for version in VERSIONS:
        generation = importlib.import_module(f"{version}.interface").GENERATION
        if not generation.capabilities.backward:
            continue

        def add(title, head_dim, dtype="bfloat16", generation=generation, **options):
            problem = Problem(*LARGE, head_dim, dtype=getattr(torch, dtype), **options)
            if generation.why_not(problem) is None:
                key = generation.backward_key(problem, generation.default_backward_config(problem))
                keys[key] = f"{generation.name}-{dtype}-d{head_dim}-{title}"

        for head_dim, (title, causal) in product(HEAD_DIMS, MASKS.items()):
            add(title, head_dim, causal=causal)
        add("causal", 64, "float16", causal=True)
        for i, head_dim in enumerate(OTHER_HEAD_DIMS):
            add(("causal", "full")[i % 2], head_dim, causal=not i % 2)
        for head_dim, (title, options) in product(HEAD_DIMS, BACKWARD_KINDS.items()):
            add(title, head_dim, **options)
    return [pytest.param(key, id=title) for key, title in keys.items()]


def turned() -> list:
    """BASE with one switch turned, each in its turn, and with all off."""
    variants = {"all off": ladder(BASE)[0][1]}
    for switch in switches(BASE):
        is_on = getattr(BASE, switch.name)
        title = f"{'without' if is_on else 'with'} {switch.metadata['label']}"
        variants[title] = without(BASE, switch.name) if is_on else replace(BASE, **{switch.name: True})
    return [
        pytest.param(KernelKey("fa3", "forward", "bfloat16", 128, True, config), id=title)
        for title, config in variants.items()
    ]


def check(key: KernelKey) -> KernelReport:
    kernel = report(key, getattr(importlib.import_module(f"{key.version}.interface"), f"build_{key.direction}"))
    assert not kernel.problems(), "; ".join(kernel.problems())
    assert kernel.shared_memory <= SHARED_MEMORY_LIMIT
    assert kernel.stack == 0

    assert kernel.why_no_instructions is None
    instructions, expected = set(kernel.instructions), expected_instructions(key)
    assert expected <= instructions
    assert not (AMPERE | HOPPER) - expected & instructions
    assert not {"LDL", "STL"} & instructions
    # One setmaxnreg gives registers away and one takes them; ptxas may drop both, and the consumers would spill.
    reallocates = key.version == "fa3" and key.config.setmaxnreg
    assert kernel.instructions["USETMAXREG"] == (2 if reallocates else 0)
    return kernel


def expected_instructions(key: KernelKey) -> set[str]:
    """Of AMPERE and HOPPER."""
    if key.version != "fa3":
        return AMPERE
    # Rows that are no box of a tensor are gathered by cp.async, and stored from registers.
    gathers = key.config.pack_gqa or not key.config.tma
    loads = {"UTMALDG"} if key.config.tma else set()
    queries = {"LDSM"} if key.config.q_register_steps else set()
    return {"HGMMA", *loads, *queries, "LDGSTS" if gathers else "UTMASTG"}


@pytest.mark.slow
@pytest.mark.parametrize("key", default_kernels())
def test_default_kernel(key: KernelKey):
    check(key)


@pytest.mark.slow
@pytest.mark.parametrize("key", default_backward_kernels())
def test_default_backward_kernel(key: KernelKey):
    check(key)


@pytest.mark.slow
@pytest.mark.parametrize("key", turned())
def test_kernel_with_a_switch_turned(key: KernelKey):
    check(key)


@pytest.mark.slow
@pytest.mark.parametrize("config", covering(BASE), ids=label)
def test_kernel_with_any_two_switches(config: Config):
    check(KernelKey("fa3", "forward", "bfloat16", 64, True, config))
