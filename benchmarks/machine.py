"""What this machine is: its GPU and why it cannot run the kernels, driver and package versions."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

HOPPER = (9, 0)
CPU = "CPU"  # in a GPU's place, where the algorithms ran


def why_no_hopper() -> str | None:
    """Why the kernels cannot run on the current device, as one clause; None if they can."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        return f"the kernels are built for sm_90a, {gpu()} is sm_{capability[0]}{capability[1]}"
    return None


def gpu() -> str:
    """The current device's name as the driver gives it, e.g. "NVIDIA H200"."""
    return torch.cuda.get_device_name()


def package(name: str) -> str | None:
    """An installed distribution's version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver() -> str | None:
    """The NVIDIA driver's version, or None where there is none to ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None


def facts() -> dict[str, str | None]:
    """The columns that say where a row was measured, by their names in `rows.Row`."""
    return {"gpu": gpu(), "torch": torch.__version__, "dsl": package("nvidia-cutlass-dsl"), "driver": driver()}


def facts_without_gpu() -> dict[str, str | None]:
    """The same where the algorithms run: neither a compiler nor a driver has a part in it."""
    return {"gpu": CPU, "torch": torch.__version__, "dsl": None, "driver": None}


def python() -> str:
    """The interpreter and platform, for people."""
    return f"{platform.python_version()} ({platform.machine()}, {platform.system()})"
