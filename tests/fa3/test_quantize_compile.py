"""Every way to quantise compiles for sm_90a, spills nothing, and leaves room for the CTAs that hide its latency."""

import math

import pytest

from fa3.quantize import PIECE, Quantize, QuantizeConfig, build_quantize
from fa_common.compile import KernelKey
from fa_common.report import SHARED_MEMORY_LIMIT, KernelReport, report

REGISTERS_OF_SM = 65_536

# head_dim, stage, hadamard, dtype, sequences
KERNELS = [
    (128, "block", True, "bfloat16", "dense"),
    (128, "block", False, "bfloat16", "dense"),
    (128, "maximum", True, "bfloat16", "dense"),
    (128, "scale", True, "bfloat16", "dense"),
    (128, "block", True, "float32", "dense"),
    (48, "block", True, "float32", "dense"),
    (128, "block", True, "bfloat16", "packed"),
    (64, "block", True, "float16", "dense"),
    (16, "block", True, "bfloat16", "dense"),
    (48, "scale", False, "bfloat16", "packed"),
    (96, "block", True, "bfloat16", "packed"),
    (192, "block", True, "float16", "packed"),
    (240, "maximum", True, "float32", "dense"),
    (256, "block", True, "bfloat16", "dense"),
    (256, "block", True, "float32", "packed"),
    (256, "scale", True, "bfloat16", "dense"),
    # Those that have spilled: values, and beside them a row's numbers, or the largest, where it is not needed yet.
    (48, "block", False, "bfloat16", "dense"),
    (48, "block", True, "bfloat16", "dense"),
    (96, "block", False, "bfloat16", "dense"),
    (112, "block", True, "bfloat16", "dense"),
    (192, "block", True, "bfloat16", "dense"),
    (224, "block", False, "bfloat16", "packed"),
    (224, "block", False, "float16", "packed"),
]
BY_COLUMNS = [
    (16, "block", True, "bfloat16"),
    (48, "block", True, "float32"),
    (64, "block", True, "bfloat16"),
    (80, "scale", False, "float16"),
    (128, "block", True, "bfloat16"),
    (128, "scale", True, "float32"),
    (144, "block", True, "bfloat16"),
    (192, "block", False, "bfloat16"),
    (256, "block", True, "bfloat16"),
    (256, "scale", True, "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "stage", "hadamard", "dtype", "sequences"), KERNELS)
def test_kernel(head_dim: int, stage: str, hadamard: bool, dtype: str, sequences: str):
    hold(head_dim, stage, hadamard, dtype, sequences)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "stage", "hadamard", "dtype"), BY_COLUMNS)
def test_kernel_that_makes_v_by_columns(head_dim: int, stage: str, hadamard: bool, dtype: str):
    kernel = hold(head_dim, stage, hadamard, dtype, v_by_columns=True)
    assert kernel.instructions["LDSM"] == (2 if head_dim > 128 and head_dim % 32 else 4)
    assert kernel.instructions["BAR"]


def hold(
    head_dim: int, stage: str, hadamard: bool, dtype: str, sequences: str = "dense", v_by_columns: bool = False
) -> KernelReport:
    key = KernelKey(
        "fa3",
        "quantize",
        dtype,
        head_dim,
        causal=False,
        config=QuantizeConfig(stage, hadamard),
        sequences=sequences,
        v_by_columns=v_by_columns,
    )
    kernel = report(key, build_quantize)
    assert not kernel.problems(), "; ".join(kernel.problems())
    assert kernel.shared_memory <= SHARED_MEMORY_LIMIT
    assert kernel.why_no_instructions is None
    device = Quantize(key)
    assert kernel.registers * device.num_threads * device.ctas_of_sm <= REGISTERS_OF_SM

    pieces = math.prod(device.shape[1:])  # of a thread, 16 bytes a load and a store
    assert pieces == (2 if head_dim > 128 and head_dim % 32 else 4)
    loads, stores = pieces * (4 if dtype == "float32" else 2), 0 if stage == "maximum" else pieces
    assert kernel.instructions["LDG"] >= loads
    assert kernel.instructions["STG"] >= stores
    # Of the butterflies between pieces of a row those between lanes; the others need no shuffle.
    between_lanes = ((head_dim & -head_dim) // PIECE // device.pieces_of_row).bit_length() - 1 if hadamard else 0
    assert kernel.instructions["SHFL"] == between_lanes * pieces * PIECE
    # The CTAs of a tile wait for each other only where they share a maximum, and never for what is in flight.
    assert kernel.instructions["UCGABAR_WAIT"] == device.shares_maximum == (head_dim > 128 and stage == "block")
    assert not kernel.instructions["MEMBAR"]
    # A division is three instructions: none calls a function.
    assert not kernel.instructions["CALL"]
    return kernel
