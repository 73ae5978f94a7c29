"""From a kernel's key to the function that launches it.

A kernel is looked for in this process's memory (a dict, no lock), then on disk (an object file, milliseconds), then
compiled (seconds). Two locks guard the compiler: one in each process, because the DSL cannot compile in two threads,
and one among processes for each kernel, so that however many start at once, each kernel is compiled once.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa_common.disk_cache import CacheEntry, cache_dir, make_directory, usable_directory, warn_memory_only
from fa_common.isolated import IsolatedFailure, run_isolated


@dataclass(frozen=True)
class KernelKey:
    """All that decides a kernel's machine code, the toolchain and the sources aside."""

    version: str  # the generation's package, e.g. "fa3"
    direction: str  # "forward", "backward"
    dtype: str  # "bfloat16"
    head_dim: int
    causal: bool
    config: Any  # the generation's frozen Config
    window: bool = False  # whether keys are bounded left and right by numbers known at run time; causal is False then
    softcap: bool = False  # by a number known at run time
    sequences: str = "dense"  # (batch, seqlen, heads, head_dim); "packed": (total, heads, head_dim) with cu_seqlens
    splits: bool = False  # whether the keys are split among CTAs, whose results are yet to be merged
    v_by_columns: bool = False  # whether V's keys, and not its head_dim, lie next to each other: FP8's
    deterministic: bool = False  # backward: whether every sum is added up in one order
    arch: str = "sm_90a"


# build(key, options) compiles with `options="--enable-tvm-ffi " + options`, and lives at the top of a module.
Build = Callable[[KernelKey, str], Any]


@dataclass(frozen=True)
class CacheStats:
    """The cache as this process sees it."""

    directory: Path | None
    why_unused: str | None  # why nothing is kept on disk; None if it is
    objects: int  # kernels on disk, stale ones too
    size: int  # their bytes
    in_memory: int  # kernels that this process has loaded
    compiled: int  # kernels that this process has compiled
    compile_seconds: float  # and how long that took


_kernels: dict[KernelKey, Callable] = {}
_modules: list[Any] = []  # a loaded function is valid only while its module lives
_compile_seconds: list[float] = []
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A lock that another thread holds during a fork would stay locked in the child for ever.
os.register_at_fork(after_in_child=_renew_lock)


def load(key: KernelKey, build: Build) -> Callable:
    """The kernel of `key`, to be called with tensors, positionally; the same function at every call.

    Safe to call from many threads and processes at once. Raises CacheRefused, and whatever `build` raises.
    """
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        if key not in _kernels:
            _kernels[key] = _load_or_compile(key, build)
        return _kernels[key]


def precompile(jobs: Iterable[tuple[KernelKey, Build]], workers: int | None = None) -> dict[KernelKey, IsolatedFailure]:
    """Compiles kernels that are not on disk yet, several at a time; returns what went wrong with those that failed.

    Each is compiled in an interpreter of its own, `workers` at once: by default one a core, but no more than 16, since
    each takes about 1 GB.
    """
    missing = {}
    for key, build in jobs:
        entry = cache_entry(key)
        if entry and not entry.holds_object():
            missing[key] = build

    def compile_one(key: KernelKey) -> IsolatedFailure | None:
        try:
            run_isolated(_load_only, key, missing[key])
        except IsolatedFailure as failure:
            return failure
        return None

    with ThreadPoolExecutor(workers or min(len(os.sched_getaffinity(0)), 16)) as pool:
        failures = dict(zip(missing, pool.map(compile_one, missing), strict=True))
    return {key: failure for key, failure in failures.items() if failure}


def options(key: KernelKey) -> str:
    """The DSL options that every compilation of `key` needs.

    The target is one of them: the variable CUTE_DSL_ARCH counts only if it is set before the first `import cutlass`.
    """
    return f"--gpu-arch={key.arch}"


def cache_entry(key: KernelKey) -> CacheEntry | None:
    """The kernel's files on disk; None, with a warning, where nothing can be kept there. Raises CacheRefused."""
    directory = usable_directory()
    if directory is None:
        return None
    mask = "window" if key.window else "causal" if key.causal else "full"
    kinds = [name for name in ("softcap", "splits", "deterministic") if getattr(key, name)]
    kinds += [key.sequences] * (key.sequences != "dense")
    title = "_".join([key.version, key.direction, key.dtype, f"d{key.head_dim}", mask, *kinds])
    return CacheEntry(directory, title, _identity(key))


def stats() -> CacheStats:
    """What is cached where, and why nothing is if it is so: the directory is put to the test. Never raises."""
    directory, why_unused, sizes = None, None, []
    try:
        directory = cache_dir()
        with tempfile.TemporaryFile(dir=make_directory()):
            sizes = [path.stat().st_size for path in directory.glob("*.o")]
    except (OSError, RuntimeError) as error:
        why_unused = str(error)
    return CacheStats(
        directory=directory,
        why_unused=why_unused,
        objects=len(sizes),
        size=sum(sizes),
        in_memory=len(_kernels),
        compiled=len(_compile_seconds),
        compile_seconds=sum(_compile_seconds),
    )


def _load_only(key: KernelKey, build: Build) -> None:
    load(key, build)


def _load_or_compile(key: KernelKey, build: Build) -> Callable:
    entry = cache_entry(key)
    if entry is None:
        return _compile(key, build)
    kernel = _load_object(entry)
    if kernel is not None:
        return kernel
    with entry.locked():
        # Another process may have compiled it while this one waited for the lock.
        return _load_object(entry) or _compile_and_save(key, build, entry)


def _load_object(entry: CacheEntry) -> Callable | None:
    if not entry.holds_object():
        return None
    from cutlass.cute.runtime import load_module

    try:
        module = load_module(str(entry.object), enable_tvm_ffi=True)
        kernel = getattr(module, entry.name)
    except Exception:  # whole, yet this machine's loader rejects it (made under another C library, say): compile again
        return None
    _modules.append(module)
    return kernel


def _compile_and_save(key: KernelKey, build: Build, entry: CacheEntry) -> Callable:
    compiled = _compile(key, build)
    # Sources edited since this process read them would be kept under a key that is not theirs.
    if _sources_sha.__wrapped__(key.version) == _sources_sha(key.version):
        try:
            entry.save_object(compiled)
        except OSError as error:
            warn_memory_only(error)
    return _load_object(entry) or compiled


def _compile(key: KernelKey, build: Build) -> Callable:
    start = time.perf_counter()
    compiled = build(key, options(key))
    _compile_seconds.append(time.perf_counter() - start)
    return compiled


def _identity(key: KernelKey) -> dict[str, Any]:
    """All that decides what an object file of `key` holds: the key, the sources, the toolchain and its environment."""
    return {
        **asdict(key),
        "config_class": f"{type(key.config).__module__}.{type(key.config).__qualname__}",
        "sources": _sources_sha(key.version),
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "host": platform.machine(),  # the object holds the host's launch code too
        # The DSL takes options from here too (assertions, line info); the architecture it takes from `options`.
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("CUTE_DSL_") and name != "CUTE_DSL_ARCH"
        },
    }


@functools.cache
def _sources_sha(version: str) -> str:
    """A hash of every Python source of the generation's package and of `fa_common`, as they are at the first call."""
    digest = hashlib.sha256()
    for package in (version, "fa_common"):
        for root in importlib.util.find_spec(package).submodule_search_locations:
            for path in sorted(Path(root).rglob("*.py")):
                source = path.read_bytes()
                digest.update(f"{package}/{path.relative_to(root).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()
