"""Memory accesses of every kernel on a Hopper GPU, watched by NVIDIA's compute-sanitizer."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.rows import ROOT

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer")
FOUND = 99  # its exit code
TIMEOUT_S = 240


# initcheck does not see what TMA writes: of fa1 and fa2 alone.
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer, of the CUDA toolkit, is not on the PATH")
@pytest.mark.parametrize(
    ("tool", "versions"), [("memcheck", ()), ("initcheck", ("fa1", "fa2"))], ids=["memcheck", "initcheck"]
)
def test_no_bad_access(tool, versions):
    """Out of bounds or misaligned, or a read of what nobody has written, results included."""
    # Torch hands out parts of large allocations: without its cache each tensor is one, with bounds of its own.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    watched = [sys.executable, "-m", "tests.memory_sweep", *versions]
    run = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), *watched],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    errors = [line for line in run.stdout.splitlines() if line.startswith("=========")]
    if any("not supported" in line for line in errors):
        pytest.skip(f"compute-sanitizer does not run here: {errors[:3]}")
    assert run.returncode == 0, "\n".join(errors[:30] + run.stderr.splitlines()[-10:])
    assert "results without NaN" in run.stdout
