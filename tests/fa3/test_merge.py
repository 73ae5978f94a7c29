"""The kernel that merges splits compiles for sm_90a as it should. Needs no GPU; test_kvcache_gpu.py has its values."""

import subprocess

import pytest
import torch

from fa3.kvcache import build_merge, merge_key
from fa_common.compile import KernelKey, options
from fa_common.isolated import run_isolated
from fa_common.report import find_nvdisasm, report

HEAD_DIMS = (8, 40, 64, 96, 128, 192, 256)


def key_of(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> KernelKey:
    return merge_key(head_dim, dtype)


def title(key: KernelKey) -> str:
    return f"{key.dtype}-d{key.head_dim}"


def cubin_of(key: KernelKey) -> bytes:
    return build_merge(key, f"{options(key)} --keep-cubin").artifacts.CUBIN


@pytest.mark.slow
@pytest.mark.parametrize("key", [*map(key_of, HEAD_DIMS), key_of(128, torch.float16)], ids=title)
def test_the_kernel(key):
    kernel = report(key, build_merge)
    assert not kernel.problems(), "; ".join(kernel.problems())
    assert kernel.stack == 0
    assert kernel.registers <= 64, "eight CTAs on an SM"
    assert kernel.shared_memory < 8192
    assert kernel.why_no_instructions is None


@pytest.mark.slow
@pytest.mark.parametrize("key", [key_of(64), key_of(128), key_of(256)], ids=title)
def test_loads_do_not_wait_for_one_another(key, tmp_path):
    """O of the first splits is on its way before the first LSE is needed: see `Merge.load`."""
    path = tmp_path / "merge.cubin"
    path.write_bytes(run_isolated(cubin_of, key).value)
    listing = subprocess.run([find_nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    before_the_first_shuffle = listing[: listing.index("SHFL")]
    assert before_the_first_shuffle.count("LDG.E.128") == 8
