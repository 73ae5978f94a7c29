"""Who is measured: what an implementation must offer, and our generations as such."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, asdict, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.problems import packing, random_gradient
from benchmarks.rows import source_sha
from fa import GENERATIONS
from fa_common.capabilities import NO_BACKWARD
from fa_common.compile import Build, KernelKey
from fa_common.problem import Problem, lse_shape
from fa_common.switches import label, switches

Results = Tensor | tuple[Tensor, ...]


class Contender(Protocol):
    """One implementation of attention, in one of its passes."""

    name: str

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot run this problem here, as one clause; None if it can."""

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Results]:
        """The call to time: no arguments, returns O of shape (batch, seqlen, heads, head_dim), or dQ, dK, dV."""

    def scope(self) -> AbstractContextManager:
        """What must be entered around the call."""

    def columns(self, problem: Problem) -> dict[str, Any]:
        """The columns of `rows.Row` that it alone can fill."""


def switched(config: Any, on: Mapping[str, bool]) -> Any:
    """`config` with these switches on or off. Raises ValueError when they do not go together or with its tiles.

    Tiles and stages stay. A choice between named ways, a `str`, falls back to its default where the switches rule it
    out.
    """
    try:
        return replace(config, **on)
    except ValueError:
        defaults = default_choices(config)
        if all(getattr(config, name) == default for name, default in defaults.items()):
            raise
        return replace(config, **defaults | on)


def default_choices(config: Any) -> dict[str, str]:
    """The fields of a Config that are a choice between named ways, with their defaults."""
    names = {f.name for f in fields(config)} - {f.name for f in switches(config)}
    chosen = [f for f in fields(config) if f.name in names and f.default is not MISSING]
    return {f.name: f.default for f in chosen if isinstance(f.default, str)}


def numbers(config: Any) -> dict[str, int]:
    """The fields of a Config that are numbers: tiles, warps, stages."""
    names = [f.name for f in fields(config)]
    return {name: value for name in names if type(value := getattr(config, name)) is int}


class Ours:
    """One of our generations: its `forward`, with O and LSE allocated beforehand.

    It runs each problem's default configuration, with the switches in `switched` turned on or off; a `name` of its own
    tells it from other configurations of the same generation.
    """

    def __init__(self, version: str, name: str | None = None, switched: Mapping[str, bool] | None = None):
        self.version = version
        self.name = name or version
        self.switched = dict(switched or {})
        self.generation = GENERATIONS[version]

    @cached_property
    def source_sha(self) -> str:
        return source_sha(self.version)

    def config(self, problem: Problem) -> Any:
        """The Config for this problem. Raises ValueError when these switches do not go with its tiles."""
        return switched(self.generation.default_config(problem), self.switched)

    def kernel(self, problem: Problem) -> tuple[KernelKey, Build] | None:
        """The forward kernel that this problem runs, and what compiles it; None if only the first call finds out."""
        key = self.generation.forward_key(problem, self.config(problem))
        return key, self.generation.build_forward

    def why_not(self, problem: Problem) -> str | None:
        if reason := self.generation.why_not(problem):
            return reason
        try:
            self.config(problem)
        except ValueError as error:
            return str(error)
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Results]:
        forward, arguments = self.generation.forward, self.arguments(problem)
        out = torch.full_like(q, torch.nan)  # an element that the kernel does not write must show
        lse = torch.empty(lse_shape(q), device=q.device)

        def call() -> Tensor:
            forward(q, k, v, out=out, lse=lse, **arguments)
            return out

        return call

    def arguments(self, problem: Problem) -> dict[str, Any]:
        """What a call says beside its tensors."""
        # The default goes without saying: hashing a Config would add to the host's time for a call.
        config = self.config(problem) if self.switched else None
        arguments = {"causal": problem.causal, "config": config} | packing(problem)
        if problem.window != (None, None):
            arguments["window_size"] = problem.window
        if problem.softcap:
            arguments["softcap"] = problem.softcap
        return arguments

    def scope(self) -> AbstractContextManager:
        return nullcontext()

    def columns(self, problem: Problem) -> dict[str, Any]:
        config = self.config(problem)
        return {
            "version": self.version,
            "config": asdict(config),
            "switches_label": label(config),
            "source_sha": self.source_sha,
        }


class OursBackward(Ours):
    """One of our generations: its `backward`, after a forward that is not timed.

    `switched` changes fields of the problem's default BackwardConfig.
    """

    def config(self, problem: Problem) -> Any:
        return replace(self.generation.default_backward_config(problem), **self.switched)

    def kernel(self, problem: Problem) -> tuple[KernelKey, Build] | None:
        key = self.generation.backward_key(problem, self.config(problem))
        return key, self.generation.build_backward

    def why_not(self, problem: Problem) -> str | None:
        if self.generation.default_backward_config is None:
            return NO_BACKWARD
        return super().why_not(replace(problem, needs_grad=True))

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Results]:
        arguments, dout = self.arguments(problem), random_gradient(problem)
        out, lse = self.generation.forward(q, k, v, **arguments | {"config": None})
        return lambda: self.generation.backward(dout, q, k, v, out, lse, **arguments)


class OursBoth(OursBackward):
    """One of our generations: `forward`, then `backward`, whose BackwardConfig `switched` changes."""

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Results]:
        arguments, dout = self.arguments(problem), random_gradient(problem)
        of_forward = arguments | {"config": None}

        def call() -> Results:
            out, lse = self.generation.forward(q, k, v, **of_forward)
            return self.generation.backward(dout, q, k, v, out, lse, **arguments)

        return call

    def columns(self, problem: Problem) -> dict[str, Any]:
        forward = self.generation.default_config(problem)
        config = {"forward": asdict(forward), "backward": asdict(self.config(problem))}
        return super().columns(problem) | {"config": config, "switches_label": label(forward)}


OURS: dict[str, type[Ours]] = {"fwd": Ours, "bwd": OursBackward, "fwd+bwd": OursBoth}  # by pass
