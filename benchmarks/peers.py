"""The public implementations we are measured against, and the matrix product that bounds them all."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.problems import kind, packing, random_gradient
from fa_common.problem import Problem

GEMM = "cublas-gemm"


class Sdpa:
    """One backend of torch's scaled_dot_product_attention, or, with None, the one that torch chooses."""

    missing = None  # why it is not installed; torch always is

    def __init__(self, name: str, backend: SDPBackend | None = None):
        self.name = name
        self.backend = backend

    def why_not(self, problem: Problem) -> str | None:
        if problem.varlen or problem.softcap or problem.window != (None, None):
            return f"it has no {kind(problem)} attention"
        if problem.causal and problem.seqlen_q != problem.seqlen_k:
            return "its causal mask is aligned top-left, ours bottom-right"
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim), not copied
        arguments = {"is_causal": problem.causal, "enable_gqa": problem.group > 1}
        return lambda: scaled_dot_product_attention(q, k, v, **arguments).transpose(1, 2)

    def scope(self) -> AbstractContextManager:
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {}


class SdpaMath(Sdpa):
    """Torch's attention out of separate matrix products and a softmax: S and P lie in memory, in fp32."""

    COPIES = 3  # of a (batch, heads, seqlen, seqlen) matrix alive at once: S, S with its mask, P

    def why_not(self, problem: Problem) -> str | None:
        if reason := super().why_not(problem):
            return reason
        scores = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
        needed = self.COPIES * scores * torch.float32.itemsize
        free, _ = torch.cuda.mem_get_info()
        if needed > free:
            return f"S and P take about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"
        return None


class Package:
    """`flash_attn_func` and `flash_attn_varlen_func` of a package that may be missing."""

    def __init__(self, name: str, module: str):
        self.name = name
        self.module = module

    @cached_property
    def _module(self) -> ModuleType | Exception:
        try:
            return import_module(self.module)
        except Exception as error:  # however a peer is broken, it must not cost the others their measurements
            return error

    @property
    def missing(self) -> str | None:
        if isinstance(self._module, Exception):
            return f"`import {self.module}` fails: {type(self._module).__name__}: {self._module}"
        return None

    def why_not(self, problem: Problem) -> str | None:
        return self.missing

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        function = self._module.flash_attn_varlen_func if problem.varlen else self._module.flash_attn_func
        arguments = {"causal": problem.causal} | packing(problem)
        if problem.window != (None, None):
            arguments["window_size"] = (problem.window[0], 0 if problem.causal else problem.window[1])
        if problem.softcap:
            arguments["softcap"] = problem.softcap

        def call() -> Tensor:
            result = function(q, k, v, **arguments)
            return result[0] if isinstance(result, tuple) else result  # (out, lse) in some releases

        return call

    def scope(self) -> AbstractContextManager:
        return nullcontext()

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {}


class Differentiated:
    """A peer's backward, or forward and backward, by torch's autograd.

    For the backward alone the graph is built once, and kept from one call to the next.
    """

    def __init__(self, peer: Sdpa | Package, with_forward: bool):
        self.peer = peer
        self.name = peer.name
        self.with_forward = with_forward

    def why_not(self, problem: Problem) -> str | None:
        return self.peer.why_not(problem)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        dout = random_gradient(problem)
        with torch.enable_grad():  # views of the leaves made here belong to the graph
            forward = self.peer.prepare(problem, *leaves)

        def build() -> Tensor:
            with torch.enable_grad(), self.scope():
                return forward()

        if self.with_forward:
            return lambda: torch.autograd.grad(build(), leaves, dout)
        out = build()
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def scope(self) -> AbstractContextManager:
        return self.peer.scope()

    def columns(self, problem: Problem) -> dict[str, Any]:
        return self.peer.columns(problem)


PEERS = {
    peer.name: peer
    for peer in (
        Sdpa("torch-fa2", SDPBackend.FLASH_ATTENTION),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        SdpaMath("torch-math", SDPBackend.MATH),
        Package("flash-attn-4", "flash_attn.cute"),
        Package("flash-attn-3", "flash_attn_interface"),
    )
}


class Gemm:
    """A square bf16 product by cuBLAS: the rate that a GPU sustains under its power limit, so attention's ceiling."""

    SIZE = 8192
    FLOPS = 2 * SIZE**3

    def __init__(self, device: str = "cuda"):
        generator = torch.Generator(device).manual_seed(0)
        self.a, self.b = (
            torch.randn(self.SIZE, self.SIZE, generator=generator, device=device).to(torch.bfloat16) for _ in range(2)
        )
        self.out = torch.empty_like(self.a)

    def __call__(self) -> Tensor:
        return torch.mm(self.a, self.b, out=self.out)

    def columns(self) -> dict[str, Any]:
        """The product as columns of a row: M, N and K in the places of seqlen_q, seqlen_k and head_dim."""
        sizes = dict.fromkeys(("seqlen_q", "seqlen_k", "head_dim"), self.SIZE)
        ones = dict.fromkeys(("batch", "heads_q", "heads_kv"), 1)
        return {"version": GEMM, "dtype": "bfloat16", "causal": False, **sizes, **ones}

    def relative_error(self, rows: int = 128) -> float:
        """Of the first rows, against fp64."""
        exact = self.a[:rows].double() @ self.b.double()
        return ((self()[:rows] - exact).norm() / exact.norm()).item()
