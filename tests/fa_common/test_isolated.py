import os
import time
from pathlib import Path

import pytest

from fa_common.isolated import IsolatedFailure, run_isolated


def speak(words: str) -> int:
    os.write(2, words.encode())
    return len(words)


def where() -> Path:
    return Path.cwd()


def fail() -> None:
    raise ValueError("no such tile")


def test_returns_the_value_and_all_that_the_process_wrote():
    outcome = run_isolated(speak, "spilled 40 bytes")
    assert outcome.value == 16
    assert "spilled 40 bytes" in outcome.output


def test_works_in_a_directory_that_is_gone_afterwards():
    directory = run_isolated(where).value
    assert directory != Path.cwd()
    assert not directory.exists()


def test_hides_every_gpu():
    assert run_isolated(os.getenv, "CUDA_VISIBLE_DEVICES").value == ""


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fail, (), r"fail raised\n(.*\n)*ValueError: no such tile"),
        (os.abort, (), r"abort ended its interpreter with exit status -6"),
        (os._exit, (3,), r"_exit ended its interpreter with exit status 3"),
    ],
)
def test_a_failure_says_what_happened(function, arguments, message):
    with pytest.raises(IsolatedFailure, match=message):
        run_isolated(function, *arguments)


def test_a_hung_function_is_ended():
    with pytest.raises(IsolatedFailure, match="sleep ran longer than 1 s"):
        run_isolated(time.sleep, 60, timeout=1)
