"""What every test can rely on: a kernel cache of this run's own, one seed, and no `gpu` test where there is no GPU."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.machine import why_no_hopper

WORKER = "PYTEST_XDIST_WORKER"  # set in the processes among which xdist shares out the tests
TEMPORARY_CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-cache", metavar="DIR", help="keep compiled kernels in DIR from one run to the next")


def pytest_configure(config: pytest.Config) -> None:
    if WORKER in os.environ:
        torch.set_num_threads(1)  # the workers share the cores
        return
    # Each kernel is compiled once a run: the workers inherit this variable.
    directory = config.getoption("--kernel-cache")
    if directory is None:
        config.stash[TEMPORARY_CACHE] = tempfile.TemporaryDirectory(prefix="fa-generations-tests-")
        directory = config.stash[TEMPORARY_CACHE].name
    os.environ["XDG_CACHE_HOME"] = str(Path(directory).resolve())


def pytest_unconfigure(config: pytest.Config) -> None:
    if TEMPORARY_CACHE in config.stash:
        config.stash[TEMPORARY_CACHE].cleanup()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_hopper()):
        pytest.skip(f"needs a Hopper GPU: {reason}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
