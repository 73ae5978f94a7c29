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

import fa3
from benchmarks.problems import kind, packing, random_gradient
from fa_common.problem import Problem

GEMM = "cublas-gemm"


def why_not_plain(problem: Problem) -> str | None:
    """Why attention that has a causal mask, aligned top-left, and no more cannot run this problem; None if it can."""
    if problem.varlen or problem.softcap or problem.window != (None, None):
        return f"it has no {kind(problem)} attention"
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        return "its causal mask is aligned top-left, ours bottom-right"
    return None


class Sdpa:
    """One backend of torch's scaled_dot_product_attention, or, with None, the one that torch chooses."""

    missing = None  # why it is not installed; torch always is

    def __init__(self, name: str, backend: SDPBackend | None = None):
        self.name = name
        self.backend = backend

    def why_not(self, problem: Problem) -> str | None:
        return why_not_plain(problem)

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


class CudnnFp8(Package):
    """cuDNN's FP8 attention, by the graph API of nvidia-cudnn-frontend: e4m3 tensors, quantised before the call.

    Each tensor has one scale, and none is rotated. On Hopper O can only be e4m3, so a call returns O times `scale_out`.
    """

    note = "a scale for each tensor and no rotation, made before the call; out in e4m3."
    SCALE_P = 256.0  # P is at most 1, an e4m3 number at most 448; a power of two rounds nothing

    def why_not(self, problem: Problem) -> str | None:
        return self.missing or why_not_plain(problem)

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        cudnn, handle, quantized = self._module, self._handle, self.quantize(q, k, v)
        one = torch.ones_like(quantized.descale_q)
        scales = {"scale_s": one * self.SCALE_P, "descale_s": one / self.SCALE_P, "scale_o": self.scale_out(quantized)}
        out = torch.full_like(quantized.q, torch.nan)  # an element that the kernel does not write must show
        maxima = torch.zeros_like(one), torch.zeros_like(one)  # of P and O; nobody reads them
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph, buffers = self._graph(problem, quantized._asdict() | scales, (out, *maxima))
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

        def call() -> Tensor:
            # A CUDA graph is captured on a stream of its own.
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(buffers, workspace, handle=handle)
            return out

        return call

    @staticmethod
    def quantize(q: Tensor, k: Tensor, v: Tensor) -> fa3.Quantized:
        """What it attends to: it takes V by rows."""
        quantized = fa3.quantize(q, k, v, scales="tensor", hadamard=False)
        return quantized._replace(v=quantized.v.contiguous())

    @staticmethod
    def scale_out(quantized: fa3.Quantized) -> Tensor:
        """What O is multiplied with before it is rounded, (1,).

        O is a mean of rows of V, which are at most 448 times their scale. Half of that is left to rounded P, whose sum
        may be more than 1.
        """
        return 0.5 / quantized.descale_v

    @cached_property
    def _handle(self) -> Any:
        return self._module.create_handle()

    def _graph(
        self, problem: Problem, inputs: dict[str, Tensor], outputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Any, dict[Any, Tensor]]:
        """The graph, built, and where its tensors lie: inputs by their names there; O, the maximum of P, that of O.

        Raises whatever cuDNN raises where it has no kernel for the problem.
        """
        cudnn = self._module
        types = {torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3, torch.float32: cudnn.data_type.FLOAT}

        def layout(x: Tensor) -> tuple[list[int], list[int], Any]:
            """Extents, strides and type; four extents even of a scale, and heads before seqlen."""
            x = x.transpose(1, 2) if x.ndim == 4 else x[:, None, None, None]
            return list(x.shape), list(x.stride()), types[x.dtype]

        graph = cudnn.pygraph(
            name=self.name,
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )
        given = {name: graph.tensor(*layout(x), name=name) for name, x in inputs.items()}
        O, _, max_P, max_O = graph.sdpa_fp8(
            **given, attn_scale=problem.softmax_scale, use_causal_mask=problem.causal, generate_stats=False
        )
        results = (O, max_P, max_O)
        for result, x in zip(results, outputs, strict=True):
            extents, strides, dtype = layout(x)
            result.set_output(True).set_dim(extents).set_stride(strides).set_data_type(dtype)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return graph, dict(zip((*given.values(), *results), (*inputs.values(), *outputs), strict=True))

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"dtype": "float8_e4m3fn", "call": "quantized"}  # as rows of fa3 on quantised tensors


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
FP8_PEERS = {peer.name: peer for peer in (CudnnFp8("cudnn-fp8", "cudnn"),)}


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
