"""A directory of compiled kernels that only its user can write.

An object file is code that this process will run. So the directory must be its user's alone, and a file counts only if
it is whole and was made for exactly the key in hand; any other is made again. Where the directory cannot be used at all
(no home, a read-only one, a full disk), a warning says so and kernels stay in memory.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any


class CacheRefused(PermissionError):
    """The cache directory is not this user's alone: what lies in it could be anyone's code."""


def cache_dir() -> Path:
    """Where kernels are kept: `fa-generations` under $XDG_CACHE_HOME, or under ~/.cache. It may not exist yet.

    Raises RuntimeError for a user without a home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the XDG specification has it: unset, empty and relative paths count for nothing
        base = Path.home() / ".cache"
    return base / "fa-generations"


def make_directory() -> Path:
    """The cache directory, made if need be. Raises CacheRefused; OSError or RuntimeError where it cannot be made."""
    directory = cache_dir()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if not _is_private(status):
        what = (
            f"belongs to user {status.st_uid}, this process runs as user {os.getuid()}"
            if status.st_uid != os.getuid()
            else f"has mode {stat.S_IMODE(status.st_mode):04o}, which lets others write to it"
        )
        raise CacheRefused(
            f"the kernel cache must be a directory that only its user can write; {directory} {what}: "
            f"run `chmod go-w` on it if it is yours, or set XDG_CACHE_HOME to a directory of your own"
        )
    return directory


def usable_directory() -> Path | None:
    """The cache directory; None, with a warning, where it cannot be made. Raises CacheRefused."""
    try:
        return make_directory()
    except CacheRefused:
        raise
    except (OSError, RuntimeError) as error:
        warn_memory_only(error)
        return None


def warn_memory_only(error: Exception) -> None:
    """Says, once for each reason, that this process keeps its kernels to itself."""
    warnings.warn(
        f"kernels are compiled anew in each process, because the kernel cache cannot be used: {error}; "
        f"set XDG_CACHE_HOME to a directory that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


class CacheEntry:
    """The files of one kernel: `<name>.o`, `<name>.json` with its key and the object's checksum, more JSON about it."""

    def __init__(self, directory: Path, title: str, key: dict[str, Any]):
        """`title` begins the files' names, for people; `key`, plain JSON, is all that decides what they hold."""
        self.key = json.loads(json.dumps(key))  # as it will be when it is read back: tuples are lists
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:20]
        # The name is the function's symbol in the object too, so it is an identifier, and no two objects share it.
        self.name = re.sub(r"\W", "_", f"{title}_{digest}")
        self._directory = directory

    @property
    def object(self) -> Path:
        return self._directory / f"{self.name}.o"

    def holds_object(self) -> bool:
        """Whether the object file is whole and made for exactly this key."""
        record, content = self.read(".json"), _read_private(self.object)
        if record is None or content is None:
            return False
        return record.get("sha256") == hashlib.sha256(content).hexdigest()

    def save_object(self, compiled: Any) -> None:
        """Exports a compiled kernel, then writes the record that makes the file count. Raises OSError."""
        with self._replacing(".o") as temporary:
            compiled.export_to_c(str(temporary), function_name=self.name)
            checksum = hashlib.sha256(temporary.read_bytes()).hexdigest()
        self.write(".json", {"sha256": checksum})

    def read(self, suffix: str) -> dict[str, Any] | None:
        """The record in a JSON file of this kernel; None unless it is whole and made for exactly this key."""
        try:
            record = json.loads(_read_private(self._directory / (self.name + suffix)) or b"")
        except ValueError:
            return None
        return record if isinstance(record, dict) and record.get("key") == self.key else None

    def write(self, suffix: str, record: dict[str, Any]) -> None:
        """Writes a record, with the full key in it, to a JSON file of this kernel. Raises OSError."""
        with self._replacing(suffix) as temporary:
            temporary.write_text(json.dumps({"key": self.key, **record}, indent=1), encoding="utf-8")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time make this kernel; the others wait, and then find it made.

        A POSIX lock is not inherited by a fork and ends with its process. Where the file system has none, nobody waits:
        two processes may then make the same kernel, and the files of the later one stay.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context((self._directory / f"{self.name}.lock").open("w"))
                fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _replacing(self, suffix: str) -> Iterator[Path]:
        """A temporary file that takes its final name in one step, so that no reader ever sees half of it."""
        handle, name = tempfile.mkstemp(dir=self._directory, prefix=f".{self.name}-", suffix=suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.replace(self._directory / (self.name + suffix))
        finally:
            temporary.unlink(missing_ok=True)


def _read_private(path: Path) -> bytes | None:
    """The content of a file that this user owns and nobody else can write; None for any other file."""
    try:
        with path.open("rb") as file:
            return file.read() if _is_private(os.fstat(file.fileno())) else None
    except OSError:
        return None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
