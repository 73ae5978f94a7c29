"""Capabilities: what is lacking is named, with the reason, in one clause."""

from dataclasses import replace

import pytest
import torch

from fa_common.capabilities import Capabilities
from fa_common.problem import Problem

LITTLE = Capabilities(
    archs=(90,),
    dtypes=("float16", "bfloat16"),
    head_dims=(64, 128),
    varlen=False,
    window=False,
    softcap=False,
    backward=False,
)
EVERYTHING = replace(LITTLE, head_dims=(64, 96, 128), varlen=True, window=True, softcap=True, backward=True)
PROBLEM = Problem(batch=1, seqlen_q=128, seqlen_k=128, heads_q=2, heads_kv=2, head_dim=64)

LACKING = {
    "window": ({"window": (16, 3)}, "window (16, 3)"),
    "causal window": ({"causal": True, "window": (16, None)}, "causal, window (16, None)"),
    "softcap": ({"softcap": 30.0}, "softcap=30.0"),
    "varlen": ({"varlen": True, "seqlens": ((128, 128),)}, "varlen"),
    "backward": ({"needs_grad": True}, "backward kernel yet: call under torch.no_grad()"),
    "head_dim": ({"head_dim": 96}, "head_dim 64 or 128 and none yet for 96"),
}


@pytest.mark.parametrize(("change", "named"), LACKING.values(), ids=LACKING)
def test_what_the_kernels_lack_is_named(change, named):
    problem = replace(PROBLEM, **change)
    assert named in LITTLE.why_not(problem)
    assert EVERYTHING.why_not(problem) is None
    assert LITTLE.why_not(replace(problem, device="cpu", arch=None)) is None, "the algorithm has it all"


def test_what_they_have_is_not_refused():
    assert LITTLE.why_not(PROBLEM) is None
    assert LITTLE.why_not(replace(PROBLEM, causal=True, heads_kv=1, head_dim=128, dtype=torch.float16)) is None


def test_another_gpu_is_named():
    assert "sm_90, this GPU is sm_80" in LITTLE.why_not(replace(PROBLEM, arch=80))
    assert "sm_90 or sm_100, this GPU is sm_80" in replace(LITTLE, archs=(90, 100)).why_not(replace(PROBLEM, arch=80))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_another_dtype_is_named(dtype, device):
    reason = EVERYTHING.why_not(replace(PROBLEM, dtype=dtype, device=device))
    assert f"float16 or bfloat16, not {str(dtype).removeprefix('torch.')}" in reason
