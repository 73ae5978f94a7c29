"""Run one function in a fresh interpreter.

The DSL's compiler needs it three times over: a mistake in a kernel can abort the interpreter, its remarks go straight
to the process's own output, and two compilations cannot share a process. Unlike `multiprocessing`, this neither imports
the caller's `__main__` nor forks a process that may hold locks and a CUDA context.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # compiling needs none, and a CUDA context would cost memory on it
_RESULT = "result"  # the child's answer, a file in its working directory
_TAIL = 40  # lines of the child's output that an error quotes


class IsolatedFailure(RuntimeError):
    """The function raised, or its interpreter died or ran out of time; the message says which and quotes its output."""


@dataclass(frozen=True)
class Outcome:
    """What the function returned, and everything its process wrote to stdout and stderr."""

    value: Any
    output: str


def run_isolated(function: Callable, *arguments: Any, timeout: float = 600.0) -> Outcome:
    """Calls `function(*arguments)` in a fresh interpreter, in a temporary working directory, with no GPU in sight.

    `function`, its arguments and its result are pickled, so the function lives at the top of an importable module.
    Raises IsolatedFailure.
    """
    path = [str(Path(entry).absolute()) for entry in sys.path]  # the child works elsewhere
    start = f"import sys; sys.path[:] = {path!r}; from {__name__} import _serve; _serve()"
    name = f"{function.__module__}.{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="fa-generations-") as directory:
        try:
            child = subprocess.run(
                [sys.executable, "-c", start],
                input=pickle.dumps((function, arguments)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=os.environ | _NO_GPU,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            raise IsolatedFailure(f"{name} ran longer than {timeout:.0f} s{_quote(output)}") from None
        output = child.stdout.decode(errors="replace")
        if child.returncode:
            raise IsolatedFailure(f"{name} ended its interpreter with exit status {child.returncode}{_quote(output)}")
        value, error = pickle.loads(Path(directory, _RESULT).read_bytes())
    if error:
        raise IsolatedFailure(f"{name} raised\n{error}{_quote(output)}")
    return Outcome(value, output)


def _serve() -> None:
    """The child's side: reads the call from stdin, leaves (value, traceback or None) in the working directory."""
    try:
        function, arguments = pickle.load(sys.stdin.buffer)
        answer = pickle.dumps((function(*arguments), None))
    except Exception:
        answer = pickle.dumps((None, traceback.format_exc()))
    Path(_RESULT).write_bytes(answer)


def _quote(output: str) -> str:
    lines = output.splitlines()[-_TAIL:]
    return "\nits output ends:\n" + "\n".join(lines) if lines else ""
