"""Every FP8 kernel that a user gets by default compiles for sm_90a, spills nothing, and holds FP8's instructions."""

from itertools import product

import pytest
import torch

from fa3.config import default_fp8_config
from fa3.fp8_launch import build_forward, forward_key
from fa_common.compile import KernelKey
from fa_common.problem import Problem
from fa_common.report import SHARED_MEMORY_LIMIT, report

HEAD_DIMS = (64, 96, 128, 192, 256)
SIZES, SHORT, MEDIUM, LONG = ((4, seqlen, seqlen, 16, 4) for seqlen in (4096, 1024, 2048, 16384))
KINDS = {
    "window": {"window": (512, 64)},
    "causal softcap": {"causal": True, "softcap": 30.0},
    "packed causal": {"varlen": True, "causal": True},
    "packed window softcap": {"varlen": True, "window": (512, 64), "softcap": 30.0},
}
EXPECTED = {"QGMMA", "UTMALDG", "UTMASTG"}  # WGMMA of e4m3, TMA loads, TMA stores
OTHERS = {"HGMMA", "HMMA", "LDGSTS"}  # 16-bit products, loads without TMA


def kernels() -> list:
    def kernel(
        title: str, head_dim: int, out_dtype=torch.bfloat16, sizes: tuple = SIZES, v_by_columns: bool = False, **options
    ):
        problem = Problem(*sizes, head_dim, dtype=torch.float8_e4m3fn, **options)
        key = forward_key(problem, default_fp8_config(problem, v_by_columns), out_dtype, v_by_columns)
        return pytest.param(key, id=f"d{head_dim}-{title}{', V by columns' if v_by_columns else ''}")

    return [
        *(
            kernel("causal" if causal else "full", d, v_by_columns=v_by_columns, causal=causal)
            for d, causal, v_by_columns in product(HEAD_DIMS, (False, True), (False, True))
        ),
        *(kernel(title, 128, **options) for title, options in KINDS.items()),
        *(kernel("window", d, v_by_columns=True, **KINDS["window"]) for d in HEAD_DIMS),
        *(kernel("causal softcap", d, v_by_columns=True, **KINDS["causal softcap"]) for d in HEAD_DIMS),
        *(kernel("short", d, sizes=SHORT, v_by_columns=True) for d in (64, 128, 256)),
        kernel("medium", 128, sizes=MEDIUM, v_by_columns=True),
        kernel("long", 64, sizes=LONG, v_by_columns=True),
        kernel("packed window softcap", 256, **KINDS["packed window softcap"]),
        kernel("float16 out", 64, torch.float16),
        kernel("short", 128, sizes=SHORT),
        kernel("short causal", 256, sizes=SHORT, causal=True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("key", kernels())
def test_default_kernel(key: KernelKey):
    kernel = report(key, build_forward)
    assert not kernel.problems(), "; ".join(kernel.problems())  # spills, local memory, ptxas' remarks (C75..)
    assert kernel.shared_memory <= SHARED_MEMORY_LIMIT
    assert kernel.why_no_instructions is None
    instructions = set(kernel.instructions)
    assert instructions >= EXPECTED
    assert not instructions & OTHERS
    # One setmaxnreg gives registers away and one takes them; ptxas may drop both, and the consumers would spill.
    assert kernel.instructions["USETMAXREG"] == 2
