"""The GPU tests as a measurement: run them, and keep how they ended as a row of suite `tests`."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import machine, rows
from benchmarks.rows import RESULTS, ROOT, TestsRow
from fa import GENERATIONS


def run(arguments: Sequence[str] = (), results: Path = RESULTS) -> int:
    """`pytest -m gpu` with further arguments; appends the row and returns pytest's exit status.

    A pytest that dies before it can report leaves no row.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if report.exists():
            rows.append(row_of(report.read_text(encoding="utf-8"), time.monotonic() - start, machine.gpu()), results)
    return status


def row_of(junit: str, seconds: float, gpu: str) -> TestsRow:
    """The row of one finished run, from its JUnit report; an error in a fixture counts as a failure."""
    suites = ElementTree.fromstring(junit).iter("testsuite")
    tests, failed, skipped = (sum(counts) for counts in zip(*(_counts(suite) for suite in suites), strict=True))
    return TestsRow(
        run=rows.new_run(),
        time=rows.now(),
        source_sha={version: rows.source_sha(version) for version in GENERATIONS},
        passed=tests - failed - skipped,
        failed=failed,
        skipped=skipped,
        seconds=seconds,
        gpu=gpu,
    )


def _counts(suite: ElementTree.Element) -> tuple[int, int, int]:
    tests, failures, errors, skipped = (int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped"))
    return tests, failures + errors, skipped
