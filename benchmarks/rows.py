"""Measurements as data: one JSON object a line, in `benchmarks/results/<gpu>/<suite>.jsonl`, appended and never edited.

Rows of one `run` were measured in one process, interleaved, and only they are compared with each other.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement of one version on one problem. Times are in ms a call; `None` is "does not apply"."""

    run: str
    suite: str
    version: str  # fa1, fa2, fa3 or a peer
    config: dict | None = None  # a generation's Config; peers have none
    switches_label: str | None = None
    pass_: str  # "fwd", "bwd" or "fwd+bwd", "host" for the host's time; the JSON key is `pass`
    dtype: str  # "bfloat16", "float16" or "float8_e4m3fn"
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool
    window: list[int | None] | None = None
    ms: float  # median
    ms_p20: float
    ms_p80: float
    tflops: float | None = None
    pct_of_gemm: float | None = None  # of a bf16 GEMM timed in turn with this row
    rel_err: float | None = None  # ||out - exact|| / ||exact|| on the tensors that were timed
    gpu: str
    sm_clock_mhz: float | None = None  # median, read while the GPU was busy with this row
    power_w: float | None = None
    torch: str
    dsl: str | None
    driver: str | None
    time: str  # ISO 8601
    source_sha: str | None = None  # see `source_sha`; peers have none
    # Only in rows of suites that need them.
    # `host`: which function; `decode`: "graph" or "eager"; `sustained`: "burst" or "sustained"; `fp8`: "quantized"
    # before the call, or "with quantization" in it
    call: str | None = None
    softcap: float | None = None
    lengths: list[int] | None = None  # of packed sequences, for queries and keys alike; seqlen_q is the longest
    tb_per_s: float | None = None  # bytes of K and V over the time
    seconds: float | None = None  # how long the GPU was kept busy with this version
    idle_ms: int | None = None  # how long it was idle before each turn of this version


EXTRAS = ("call", "softcap", "lengths", "tb_per_s", "seconds", "idle_ms")  # left out of a row that has none


@dataclass(frozen=True, kw_only=True)
class TestsRow:
    """One run of the GPU tests."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    run: str
    suite: str = "tests"
    time: str
    source_sha: dict[str, str]  # of each generation
    passed: int
    failed: int
    skipped: int
    seconds: float
    gpu: str


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """The error of one way to compute attention, against fp64."""

    run: str
    suite: str = "accuracy"
    version: str  # a generation, or "standard"
    dtype: str
    scales: str | None  # FP8 only: "tensor", "head" or "block"
    hadamard: bool | None  # FP8 only
    inputs: str  # how Q, K and V are distributed: "normal", "outliers" or "positive"
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    rmse: float
    max_err: float
    cosine: float
    gpu: str  # "CPU" where the algorithms ran and not the kernels
    torch: str
    dsl: str | None
    driver: str | None
    time: str
    source_sha: str | None  # None of "standard"
    two_level: bool | None = None  # fa3's FP8 only: each P V a sum of its own; None in rows that did not tell


@dataclass(frozen=True, kw_only=True)
class QuantizeRow:
    """One measurement of quantising Q, K and V. Times are in ms a call."""

    run: str
    suite: str = "quantize"
    version: str
    dtype: str  # what is quantised
    scales: str  # "tensor", "head" or "block"
    hadamard: bool
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    ms: float  # median
    ms_p20: float
    ms_p80: float
    gb_per_s: float  # the inputs read once and the results written once, over the time
    pct_of_copy: float  # of the rate of a copy on the device, timed in turn with this row, that moves as many bytes
    rel_err: float  # the largest ||x - exact|| / ||exact|| of q, k and v, x the numbers that e4m3 and scales stand for
    gpu: str
    sm_clock_mhz: float | None
    power_w: float | None
    torch: str
    dsl: str | None
    driver: str | None
    time: str
    source_sha: str


AnyRow = Row | TestsRow | AccuracyRow | QuantizeRow
# By suite; every other has a Row.
KINDS: dict[str, type[AnyRow]] = {"tests": TestsRow, "accuracy": AccuracyRow, "quantize": QuantizeRow}


def new_run() -> str:
    """An identifier of this process's measurements; later runs sort after earlier ones."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def now() -> str:
    """The time as rows write it: ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def path_of(suite: str, gpu: str, results: Path = RESULTS) -> Path:
    """The file that holds a suite's rows for a GPU, e.g. `results/h200/compare.jsonl` for "NVIDIA H200"."""
    return results / gpu.removeprefix("NVIDIA ").lower().replace(" ", "-") / f"{suite}.jsonl"


def append(row: AnyRow, results: Path = RESULTS) -> None:
    """Adds a row to its suite's file and flushes it to disk, so that an interrupted sweep keeps what it measured.

    Raises ValueError for a NaN or an infinity: neither is JSON, and neither is a measurement.
    """
    record = {name.rstrip("_"): value for name, value in asdict(row).items()}
    record = {name: value for name, value in record.items() if value is not None or name not in EXTRAS}
    line = json.dumps(record, allow_nan=False) + "\n"
    path = path_of(row.suite, row.gpu, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Iterator[AnyRow]:
    """Every row of a file, oldest first; a file that does not exist has none.

    Raises ValueError naming the file and line for a line that is no row.
    """
    if not path.exists():
        return
    kind = KINDS.get(path.stem, Row)
    names = {field.name.rstrip("_"): field.name for field in fields(kind)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield kind(**{names[key]: value for key, value in json.loads(line).items()})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: needs one JSON object with the fields of {kind.__name__}, got {line[:80]!r} "
                f"({type(error).__name__}: {error}); delete the line or restore the file from git"
            ) from error


def newest_run(path: Path, missing: Callable[[list[AnyRow]], Sequence[str]]) -> list[AnyRow] | None:
    """The rows of the run in a file that lacks least, of several the newest; None if there is none."""
    runs: dict[str, list[AnyRow]] = {}
    for row in read(path):
        runs.setdefault(row.run, []).append(row)
    return min((runs[run] for run in sorted(runs, reverse=True)), key=lambda run: len(missing(run)), default=None)


def source_sha(version: str, root: Path = ROOT) -> str:
    """A hash of the code a generation runs: the `*.py` files under its package and under `fa_common`.

    Blank lines and comment lines do not count, so that a row stays fresh when only a comment changes.
    """
    digest = hashlib.sha256()
    files = [path for package in (version, "fa_common") for path in (root / package).rglob("*.py")]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
        code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
        digest.update(f"{name}\n{code}".encode())
    return digest.hexdigest()
