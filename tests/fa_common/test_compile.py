import dataclasses
import json
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fa_common.compile as compilation
from fa_common.compile import KernelKey, cache_entry, load, precompile, stats
from fa_common.disk_cache import CacheEntry, CacheRefused, cache_dir
from fa_common.isolated import run_isolated
from tests.fa_common.toy.config import Config
from tests.fa_common.toy.forward import compile_forward

KEY = KernelKey("tests.fa_common.toy", "forward", "float32", 64, False, Config())
OTHER_KEY = dataclasses.replace(KEY, config=Config(threads=64))


class CountedBuild:
    """`compile_forward`, and how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, key, options):
        self.calls += 1
        return compile_forward(key, options)


def never_build(key, options):
    raise AssertionError(f"compiled again: {key}")


def load_and_count(key: KernelKey) -> int:
    load(key, compile_forward)
    return stats().compiled


def abort_build(key, options):
    os.abort()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory, not yet made, and a process that has loaded nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget(monkeypatch)
    return cache_dir()


def forget(monkeypatch) -> None:
    """Makes this process as good as new."""
    monkeypatch.setattr(compilation, "_kernels", {})
    monkeypatch.setattr(compilation, "_compile_seconds", [])
    compilation._sources_sha.cache_clear()


def files(cache: Path) -> set[str]:
    return {path.suffix for path in cache.iterdir()}


def test_memory_gives_the_same_function():
    build = CountedBuild()
    assert load(KEY, build) is load(KEY, build)
    assert build.calls == 1


def test_disk_serves_the_next_process(monkeypatch):
    load(KEY, compile_forward)
    forget(monkeypatch)
    assert callable(load(KEY, never_build))


def test_each_key_has_its_kernel():
    build = CountedBuild()
    assert load(KEY, build) is not load(OTHER_KEY, build)
    assert build.calls == 2


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({}, "float32_d64_full"),
        ({"causal": True}, "float32_d64_causal"),
        ({"window": True}, "float32_d64_window"),
        ({"softcap": True}, "float32_d64_full_softcap"),
        ({"causal": True, "sequences": "packed"}, "float32_d64_causal_packed"),
        ({"splits": True}, "float32_d64_full_splits"),
    ],
    ids=str,
)
def test_each_kind_of_kernel_has_its_files(change, title):
    path = cache_entry(dataclasses.replace(KEY, **change)).object
    assert path.name.startswith(f"tests_fa_common_toy_forward_{title}_")
    assert (path == cache_entry(KEY).object) == (not change)


def test_a_kernel_that_does_not_compile_is_tried_again():
    with pytest.raises(AssertionError, match="compiled again"):
        load(KEY, never_build)
    assert callable(load(KEY, compile_forward))


def test_stats_count_what_is_there(monkeypatch, cache):
    assert stats() == compilation.CacheStats(cache, None, 0, 0, 0, 0, 0)
    load(KEY, compile_forward)
    after = stats()
    assert (after.objects, after.in_memory, after.compiled) == (1, 1, 1)
    assert after.size > 0
    assert after.compile_seconds > 0
    forget(monkeypatch)
    load(KEY, never_build)
    assert (stats().in_memory, stats().compiled) == (1, 0)


def cut(entry: CacheEntry) -> None:
    entry.object.write_bytes(entry.object.read_bytes()[:-100])


def flip_a_bit(entry: CacheEntry) -> None:
    content = bytearray(entry.object.read_bytes())
    content[len(content) // 2] ^= 1
    entry.object.write_bytes(content)


def remove_object(entry: CacheEntry) -> None:
    entry.object.unlink()


def remove_key(entry: CacheEntry) -> None:
    entry.object.with_suffix(".json").unlink()


def garble_key(entry: CacheEntry) -> None:
    entry.object.with_suffix(".json").write_text("{")


def nest_key(entry: CacheEntry) -> None:
    entry.object.with_suffix(".json").write_text("[1]")


def name_another_key(entry: CacheEntry) -> None:
    path = entry.object.with_suffix(".json")
    record = json.loads(path.read_text())
    record["key"]["head_dim"] = 128
    path.write_text(json.dumps(record))


def let_others_write(entry: CacheEntry) -> None:
    entry.object.chmod(0o666)


@pytest.mark.parametrize(
    "damage", [cut, flip_a_bit, remove_object, remove_key, garble_key, nest_key, name_another_key, let_others_write]
)
def test_a_damaged_kernel_is_compiled_again(monkeypatch, damage):
    load(KEY, compile_forward)
    damage(cache_entry(KEY))
    forget(monkeypatch)
    build = CountedBuild()
    load(KEY, build)
    assert build.calls == 1
    forget(monkeypatch)
    load(KEY, never_build)  # and is whole again


def test_nothing_half_written_is_left(cache):
    load(KEY, compile_forward)
    assert files(cache) == {".o", ".json", ".lock"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_directory_is_its_users_alone(cache, umask):
    before = os.umask(umask)
    try:
        load(KEY, compile_forward)
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in cache.glob("*.[oj]*"))


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_can_write_is_refused(cache, mode):
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(CacheRefused, match=rf"{cache} has mode {mode:04o}.*chmod go-w.*XDG_CACHE_HOME"):
        load(KEY, never_build)
    assert "lets others write" in stats().why_unused


def test_a_directory_of_another_user_is_refused(monkeypatch, cache):
    cache.mkdir(mode=0o700)
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(CacheRefused, match=rf"belongs to user {somebody - 1}, this process runs as user {somebody}"):
        load(KEY, never_build)


def test_a_relative_cache_home_does_not_count(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache_dir() == Path.home() / ".cache" / "fa-generations"


def test_without_a_directory_kernels_stay_in_memory(monkeypatch, tmp_path):
    home = tmp_path / "a file, not a directory"
    home.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    build = CountedBuild()
    with pytest.warns(RuntimeWarning, match="the kernel cache cannot be used.*Not a directory.*set XDG_CACHE_HOME"):
        kernel = load(KEY, build)
    assert load(KEY, build) is kernel
    assert build.calls == 1
    assert "Not a directory" in stats().why_unused
    with pytest.warns(RuntimeWarning, match="the kernel cache cannot be used"):
        assert precompile([(KEY, never_build)]) == {}


def test_on_a_full_disk_kernels_stay_in_memory(monkeypatch, cache):
    def disk_full(entry, compiled):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CacheEntry, "save_object", disk_full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert load(KEY, compile_forward) is load(KEY, never_build)
    assert files(cache) == {".lock"}


def test_threads_compile_each_kernel_once():
    build = CountedBuild()
    start = threading.Barrier(8)

    def first_call(i: int):
        start.wait()
        return load((KEY, OTHER_KEY)[i % 2], build)

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(first_call, range(8)))
    assert len(set(map(id, kernels))) == 2
    assert build.calls == 2


def test_processes_compile_each_kernel_once():
    with ThreadPoolExecutor(3) as pool:
        compiled = list(pool.map(lambda _: run_isolated(load_and_count, KEY).value, range(3)))
    assert sum(compiled) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("key", "build"), [(KEY, never_build), (OTHER_KEY, compile_forward)], ids=["disk", "compile"])
def test_a_fork_is_not_held_up_by_a_lock_of_its_parent(monkeypatch, key, build):
    load(KEY, compile_forward)
    forget(monkeypatch)
    with compilation._lock:  # as if another thread were compiling
        child = multiprocessing.get_context("fork").Process(target=load, args=(key, build))
        child.start()
        child.join(60)
    child.kill()
    assert child.exitcode == 0


def test_precompile_fills_the_disk_and_names_what_failed(monkeypatch):
    broken = dataclasses.replace(KEY, config=Config(threads=96))
    failures = precompile([(KEY, compile_forward), (broken, abort_build), (OTHER_KEY, compile_forward)], workers=3)
    assert list(failures) == [broken]
    assert "exit status -6" in str(failures[broken])
    load(KEY, never_build)
    load(OTHER_KEY, never_build)
    assert precompile([(KEY, never_build)]) == {}


@pytest.fixture
def generation(tmp_path, monkeypatch) -> Path:
    """The source file of a generation that a test may edit, named `edited`."""
    package = tmp_path / "sources" / "edited"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(package.parent)
    source = package / "__init__.py"
    source.write_text("tile = 64\n")
    yield source
    sys.modules.pop("edited", None)


def test_edited_sources_are_another_kernel(monkeypatch, generation):
    key = dataclasses.replace(KEY, version="edited")
    before = cache_entry(key)
    generation.write_text("tile = 128\n")
    assert cache_entry(key).name == before.name  # what this process has imported is still the old source
    forget(monkeypatch)
    assert cache_entry(key).name != before.name


def test_sources_edited_while_compiling_are_not_kept(generation, cache):
    def edit_and_build(key, options):
        generation.write_text("tile = 128\n")
        return compile_forward(key, options)

    load(dataclasses.replace(KEY, version="edited"), edit_and_build)
    assert files(cache) == {".lock"}


@pytest.mark.parametrize(
    ("variable", "counts"), [("CUTE_DSL_ENABLE_ASSERTIONS", True), ("CUTE_DSL_ARCH", False), ("FA_TILE_M", False)]
)
def test_the_compilers_environment_belongs_to_the_key(monkeypatch, variable, counts):
    before = cache_entry(KEY).name
    monkeypatch.setenv(variable, "1")
    assert (cache_entry(KEY).name != before) == counts


@pytest.mark.parametrize(
    "changes",
    [
        {"direction": "backward"},
        {"dtype": "bfloat16"},
        {"head_dim": 128},
        {"causal": True},
        {"config": Config(threads=64)},
        {"deterministic": True},
        {"arch": "sm_100a"},
    ],
)
def test_every_part_of_the_key_counts(changes):
    assert cache_entry(dataclasses.replace(KEY, **changes)).name != cache_entry(KEY).name
