from benchmarks.gpu_tests import row_of
from benchmarks.rows import source_sha
from fa import GENERATIONS

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests">
  <testsuite name="pytest" errors="1" failures="2" skipped="3" tests="20" time="61.4" timestamp="t" hostname="h"/>
</testsuites>
"""


def test_a_row_says_how_the_tests_ended_and_on_which_code():
    row = row_of(JUNIT, 70.0, "NVIDIA H200")
    assert (row.passed, row.failed, row.skipped, row.seconds) == (14, 3, 3, 70.0)
    assert row.source_sha == {version: source_sha(version) for version in GENERATIONS}
    assert row.suite == "tests"
