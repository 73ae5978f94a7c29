"""Who is measured: what an implementation must offer, and our generations as such."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.rows import source_sha
from fa import GENERATIONS
from fa_common.compile import Build, KernelKey
from fa_common.problem import Problem
from fa_common.switches import label


class Contender(Protocol):
    """One implementation of the attention forward."""

    name: str

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot run this problem here, as one clause; None if it can."""

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """The call to time: no arguments, returns O of shape (batch, seqlen, heads, head_dim)."""

    def scope(self) -> AbstractContextManager:
        """What must be entered around the call."""

    def columns(self, problem: Problem) -> dict[str, Any]:
        """The columns of `rows.Row` that it alone can fill."""


class Ours:
    """One of our generations: its `forward`, with O and LSE allocated beforehand."""

    def __init__(self, name: str):
        self.name = name
        self.generation = GENERATIONS[name]

    @cached_property
    def source_sha(self) -> str:
        return source_sha(self.name)

    def kernel(self, problem: Problem) -> tuple[KernelKey, Build]:
        """The forward kernel that this problem runs, and what compiles it."""
        key = self.generation.forward_key(problem, self.generation.default_config(problem))
        return key, self.generation.build_forward

    def why_not(self, problem: Problem) -> str | None:
        return self.generation.why_not(problem)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        forward = self.generation.forward
        out = torch.full_like(q, torch.nan)  # an element that the kernel does not write must show
        lse = torch.empty(problem.batch, problem.heads_q, problem.seqlen_q, device=q.device)

        def call() -> Tensor:
            forward(q, k, v, causal=problem.causal, out=out, lse=lse)
            return out

        return call

    def scope(self) -> AbstractContextManager:
        return nullcontext()

    def columns(self, problem: Problem) -> dict[str, Any]:
        config = self.generation.default_config(problem)
        return {"config": asdict(config), "switches_label": label(config), "source_sha": self.source_sha}
