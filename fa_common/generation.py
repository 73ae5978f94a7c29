"""One generation of FlashAttention behind the signature that all of them share.

    eager, no gradient           flash_attn_func -> forward -> the run prepared for such a call
    torch.compile, or gradient   flash_attn_func -> operator faN::forward -> forward
      and on the way back                           operator faN::backward -> backward

On a GPU a run is a function (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k) -> (out, lse) with every choice made: it
allocates and launches. What those choices depend on finds it again, in one dict lookup: a call has no more than a few
microseconds of host time to spend. For the same reason nothing is looked at twice. A compiled kernel checks what it is
given before it launches (types, sizes against one another, strides, alignment), so a prepared call leaves that to it,
and comes back to the checks that name what is wrong only if the kernel refuses. The kernel also makes its tensors'
device the current one, for the launch alone, and launches on that device's current stream.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_common.capabilities import Capabilities
from fa_common.compile import KernelKey, load
from fa_common.operators import NUM_DENSE_ARGUMENTS, Arguments, define_operators, to_operator
from fa_common.problem import Problem, UnsupportedProblem, Window, lse_shape

ALIGNMENT = 16  # bytes: what cp.async and TMA ask of an address, and so of a base and of every stride but the last
CONTIGUOUS = torch.contiguous_format
MAX_RUNS = 4096  # kept at once, a bound for programs whose shapes never repeat

# (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k); the last two are None unless sequences are packed
Launch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]
Run = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tensor]
]


class Saved(NamedTuple):
    """What a backward kernel reads: the gradients of the results, the inputs, the results."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None  # None is zero


# (saved, (dq, dk, dv), cu_seqlens_q, cu_seqlens_k): writes every element of the gradients; allocates what it needs else
LaunchBackward = Callable[[Saved, tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None], None]


class Prepared(dict):
    """What earlier calls made ready for calls alike, by all that it depends on; too many are dropped together."""

    __slots__ = ()  # looked up as fast as a plain dict

    def keep(self, key: tuple, prepared: Any) -> None:
        if len(self) >= MAX_RUNS:
            self.clear()
        self[key] = prepared


class LaunchShape(NamedTuple):
    """What a kernel is launched with."""

    grid: tuple[int, int, int]  # CTAs; of packed sequences as many as there may have to be
    num_threads: int  # of each

    @property
    def num_ctas(self) -> int:
        return math.prod(self.grid)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Generation:
    """What makes a generation: its Config, its algorithm, its kernels. The rest is here, once for all of them."""

    name: str  # "fa3": its package, and the namespace of its torch operators
    config_type: type
    default_config: Callable[[Problem], Any]
    capabilities: Capabilities
    algorithm: ModuleType  # forward and backward in plain PyTorch
    build_forward: Callable[[KernelKey, str], Any]  # compiles the kernel
    bind_forward: Callable[[Callable, Problem, Any, int], Launch]  # (kernel, problem, config, num_sms)
    shape_forward: Callable[[Problem, Any, int], LaunchShape]  # (problem, config, num_sms)
    other_capabilities: tuple[Capabilities, ...] = ()  # of its kernels that take more arguments; each says which
    # The backward kernel has tiles, and so a Config, of its own. All four are None where there is no such kernel.
    backward_config_type: type | None = None
    default_backward_config: Callable[[Problem], Any] | None = None
    build_backward: Callable[[KernelKey, str], Any] | None = None
    bind_backward: Callable[[Callable, Problem, Any, int], LaunchBackward] | None = None
    _operator: Callable = field(init=False)  # faN::forward
    _runs: Prepared = field(default_factory=Prepared, init=False)
    _launches_backward: Prepared = field(default_factory=Prepared, init=False)

    def __post_init__(self):
        if self.capabilities.backward and None in (
            self.default_backward_config,
            self.build_backward,
            self.bind_backward,
        ):
            raise ValueError(f"{self.name}'s capabilities promise a backward kernel: give what builds and binds it")
        operator = define_operators(
            self.name, self.config_type, self.forward, self.backward, cuda_backward=self.capabilities.backward
        )
        object.__setattr__(self, "_operator", operator)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        softcap: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
        config: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """softmax(softmax_scale * Q K^T) V, exact, and differentiable in q, k and v.

        q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim), all float16 or all
        bfloat16. heads_kv divides heads_q (GQA, MQA); head_dim is a multiple of 8 up to 256. Mind the order: tensors
        for PyTorch's scaled_dot_product_attention have heads before seqlen; `transpose(1, 2)` them, no copy is made.
        CUDA tensors run the generation's kernel, CPU tensors its algorithm.py: as exact, and slow.

        Args:
            softmax_scale: head_dim ** -0.5 if None.
            causal: query i sees the keys up to i + seqlen_k - seqlen_q, that is, masks are aligned bottom-right.
            window_size: (left, right), how many keys before and after its own position a query sees, both inclusive;
                None or -1 for no bound.
            softcap: scores become softcap * tanh(score / softcap); 0 is off.
            deterministic: whether gradients are bitwise repeatable. The forward always is.
            return_lse: whether to return the log-sum-exp of each row of scores too, as differentiable as out.
            config: what the kernel is built from, of this generation's Config type; None for default_config(problem).

        Returns:
            out, of q's shape and dtype; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) float32, natural
            logarithm. A query that sees no key gets out 0, lse -inf and gradients 0.

        Raises:
            UnsupportedProblem: this generation lacks it; the message says what, and why.
            TypeError, ValueError: an argument is wrong. Dropout, ALiBi, sinks and mask tensors do not exist here: each
                is a TypeError that names the argument.
        """
        out, lse = self._attend(q, k, v, (softmax_scale, causal, window_size, softcap, deterministic, config))
        return (out, lse) if return_lse else out

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        softcap: float = 0.0,
        deterministic: bool = False,
        return_lse: bool = False,
        config: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`flash_attn_func` over sequences of different lengths, packed one after the other without padding.

        q is (total_q, heads_q, head_dim), k and v are (total_k, heads_kv, head_dim). Sequence i has the queries
        cu_seqlens_q[i] to cu_seqlens_q[i + 1] and the keys likewise; either may be empty.

        Args:
            cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), from 0 up to the total, on the device of q.
            max_seqlen_q, max_seqlen_k: no sequence is longer; Python ints.

        Returns:
            out, of q's shape and dtype; with return_lse (out, lse), lse (heads_q, total_q) float32.

        Raises:
            As flash_attn_func. The values in cu_seqlens are checked on a CPU only: on a GPU that would wait for it.
        """
        sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        arguments = (softmax_scale, causal, window_size, softcap, deterministic, config, *sequences)
        out, lse = self._attend(q, k, v, arguments)
        return (out, lse) if return_lse else out

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        softcap: float = 0.0,
        config: Any = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of `flash_attn_func`, or of `flash_attn_varlen_func` given cu_seqlens, outside autograd.

        `out` and `lse` are written if given, allocated if not. The call with the least host time, for benchmarks and
        for those who bring their own autograd: no gradient flows through it.
        """
        arguments = (softmax_scale, causal, window_size, softcap, False, config)
        if not (cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None):
            arguments += (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self._run(q, k, v, arguments, out, lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dlse: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        softcap: float = 0.0,
        deterministic: bool = False,
        config: Any = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), each shaped and typed like its tensor, from what `forward` was given and returned.

        `dout` and `dlse` are the gradients of out and lse, of any strides; dlse None is zero. `config` is what the
        backward's kernel is built from, of the generation's BackwardConfig type; the forward's Config, which says
        nothing about it on a GPU, stands for the default.
        """
        sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        kernel_config = config if self._is_backward_config(config) else None
        config = None if kernel_config is not None else config
        arguments = (softmax_scale, causal, window_size, softcap, deterministic, config, *sequences)
        problem, config = self._checked(q, k, v, arguments, needs_grad=True)
        for name, tensor in (("dout", dout), ("out", out)):
            _check_like(name, tensor, q.shape, q.dtype, q.device)
        for name, tensor in (("dlse", dlse), ("lse", lse)):
            _check_like(name, tensor, lse_shape(q), torch.float32, q.device)
        saved = Saved(dout, q, k, v, out, lse, dlse)
        if _runs_without_kernel(problem):
            return self._differentiate_algorithm(problem, kernel_config or config, saved)
        return self._differentiate(problem, kernel_config, saved, cu_seqlens_q, cu_seqlens_k)

    def why_not(self, problem: Problem) -> str | None:
        """The first reason why this generation cannot run `problem`, as one clause; None if it can."""
        return self.other_call(problem) or self.capabilities.why_not(problem)

    def other_call(self, problem: Problem) -> str | None:
        """What to call instead, as one clause, where a problem of this dtype takes more arguments; None elsewhere."""
        return next((x.other_call for x in self.other_capabilities if problem.dtype_name in x.dtypes), None)

    def check_config(self, config: Any) -> None:
        """Raises TypeError unless `config` is None, for the default, or of this generation's own type."""
        if config is not None and type(config) is not self.config_type:
            raise TypeError(
                f"config must be a {_qualified(self.config_type)}; got a {_qualified(type(config))}; "
                f"leave it out for {self.name}'s default"
            )

    def forward_key(self, problem: Problem, config: Any) -> KernelKey:
        """The compiled kernel that the forward of a CUDA problem launches."""
        windowed = problem.window != (None, None)
        return KernelKey(
            version=self.name,
            direction="forward",
            dtype=problem.dtype_name,
            head_dim=problem.head_dim,
            causal=problem.causal and not windowed,  # else its right bound is one of the window's numbers
            config=config,
            window=windowed,
            softcap=problem.softcap > 0,
            sequences="packed" if problem.varlen else "dense",
        )

    def backward_key(self, problem: Problem, config: Any) -> KernelKey:
        """The compiled kernel that the backward of a CUDA problem launches; `config` is a BackwardConfig."""
        forward = self.forward_key(problem, config)
        return replace(forward, direction="backward", splits=False, deterministic=problem.deterministic)

    def _is_backward_config(self, config: Any) -> bool:
        return self.backward_config_type is not None and type(config) is self.backward_config_type

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, arguments: tuple) -> tuple[Tensor, Tensor]:
        """(out, lse), by way of the operator where autograd or the compiler has to see the call."""
        if torch.compiler.is_compiling():
            self.check_config(Arguments(*arguments).config)  # in the operator's string all Configs look alike
        elif needs_grad(q, k, v):
            self._checked(q, k, v, arguments)  # inside the operator nothing needs a gradient
        else:
            return self._run(q, k, v, arguments)
        return self._operator(q, k, v, *to_operator(arguments))

    def _checked(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: tuple, needs_grad: bool | None = None
    ) -> tuple[Problem, Any]:
        """The problem and the config to run it with, or the error that names what is wrong or lacking.

        `needs_grad` is what autograd says if None.
        """
        arguments = Arguments(*arguments)._asdict()
        config = arguments.pop("config")
        problem = Problem.from_tensors(q, k, v, **arguments)
        if needs_grad is not None:
            problem = replace(problem, needs_grad=needs_grad)
        if reason := self.why_not(problem):
            raise UnsupportedProblem(f"{self.name} cannot run this problem: {reason}")
        self.check_config(config)
        return problem, self.default_config(problem) if config is None else config

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: tuple, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the forward as prepared for a call like this one, now or earlier."""
        cu_seqlens_q = cu_seqlens_k = outputs = None
        try:
            described = arguments
            if len(arguments) > NUM_DENSE_ARGUMENTS:
                described, cu_seqlens_q, cu_seqlens_k = describe_packed(arguments)
            if out is not None or lse is not None:
                outputs = (out is None or (out.stride(), out.get_device()), lse is None or (lse.get_device(),))
            # What the choices depend on, and what a kernel does not check: a stride that no element uses, and that all
            # tensors are on one device. Each attribute costs 0.1 us: shapes and types of v, out and lse it does check.
            # fmt: off
            key = (
                q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.get_device(),
                v.stride(), v.get_device(), described, outputs,
            )
            # fmt: on
            run = self._runs.get(key)
        except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed
            self._checked(q, k, v, arguments)  # raises the error that names it
            raise
        if run is None:
            problem, config = self._checked(q, k, v, arguments, needs_grad=False)
            check_outputs(problem, q, out, lse)
            if _runs_without_kernel(problem):
                return self._run_algorithm(problem, config, q, k, v, out, lse)
            run = self._prepare(problem, config, q, k, v)
            self._runs.keep(key, run)
        try:
            return run(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        except (TypeError, ValueError):  # the kernel's refusal: nothing was launched
            aligned = [x.clone(memory_format=CONTIGUOUS) if x.data_ptr() % ALIGNMENT else x for x in (q, k, v)]
            if aligned[0] is q and aligned[1] is k and aligned[2] is v:
                problem, _ = self._checked(q, k, v, arguments, needs_grad=False)
                check_outputs(problem, q, out, lse)
                raise
        return self._run(*aligned, arguments, out, lse)

    def _prepare(self, problem: Problem, config: Any, q: Tensor, k: Tensor, v: Tensor) -> Run:
        """Compiles or loads the kernel and makes every choice of a call whose tensors are laid out like these."""
        kernel = load(self.forward_key(problem, config), self.build_forward)
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        launch = self.bind_forward(kernel, problem, config, num_sms)
        copy_q, copy_k, copy_v = map(is_unreadable, (q, k, v))
        allocate_out, allocate_lse = torch.empty_like, allocation(lse_shape(q), torch.float32, q.device)
        if not (copy_q or q.is_contiguous()):  # a memory format that is q's already is left out: 0.2 us
            allocate_out = functools.partial(torch.empty_like, memory_format=CONTIGUOUS)

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor | None,
            lse: Tensor | None,
            cu_seqlens_q: Tensor | None,
            cu_seqlens_k: Tensor | None,
        ) -> tuple[Tensor, Tensor]:
            if copy_q:
                q = q.clone(memory_format=CONTIGUOUS)
            if copy_k:
                k = k.clone(memory_format=CONTIGUOUS)
            if copy_v:
                v = v.clone(memory_format=CONTIGUOUS)
            if out is None:
                out = allocate_out(q)
            if lse is None:
                lse = allocate_lse()
            launch(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
            return out, lse

        return run

    def _run_algorithm(
        self, problem: Problem, config: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The run that needs no kernel: the algorithm, one sequence after the other, or a result without any score."""
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(lse_shape(q), dtype=torch.float32) if lse is None else lse
        with torch.no_grad():
            out.zero_()
            lse.fill_(-torch.inf)
            q, k, v, all_out, all_lse = _with_batch(problem, q, k, v, out, lse)
            for queries, keys in _sequences(problem):
                all_out[:, queries], all_lse[..., queries] = self.algorithm.forward(
                    q[:, queries], k[:, keys], v[:, keys], **_mathematics(problem), config=config
                )
        return out, lse

    def _differentiate(
        self,
        problem: Problem,
        config: Any,
        saved: Saved,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) by the kernel; `config` None is the default."""
        key = (problem, config, saved.q.device)
        launch = self._launches_backward.get(key)
        if launch is None:
            config = self.default_backward_config(problem) if config is None else config
            kernel = load(self.backward_key(problem, config), self.build_backward)
            num_sms = torch.cuda.get_device_properties(saved.q.device).multi_processor_count
            launch = self.bind_backward(kernel, problem, config, num_sms)
            self._launches_backward.keep(key, launch)
        gradients = tuple(torch.empty_like(x, memory_format=CONTIGUOUS) for x in (saved.q, saved.k, saved.v))
        *tensors, lse, dlse = saved
        with torch.no_grad():
            lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
            launch(Saved(*map(readable, tensors), lse, dlse), gradients, cu_seqlens_q, cu_seqlens_k)
        return gradients

    def _differentiate_algorithm(self, problem: Problem, config: Any, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) by the algorithm."""
        gradients = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in saved[1:4])
        with torch.no_grad():
            dout, q, k, v, out, lse, dlse = _with_batch(problem, *saved)
            dq, dk, dv = _with_batch(problem, *gradients)
            for queries, keys in _sequences(problem):
                dq[:, queries], dk[:, keys], dv[:, keys] = self.algorithm.backward(
                    dout[:, queries],
                    q[:, queries],
                    k[:, keys],
                    v[:, keys],
                    out[:, queries],
                    lse[..., queries],
                    **_mathematics(problem),
                    config=config,
                    dlse=None if dlse is None else dlse[..., queries],
                )
        return gradients


# ---- Tensors


def describe_packed(arguments: tuple) -> tuple[tuple, Tensor, Tensor]:
    """What a prepared run of these arguments depends on, and their cu_seqlens, which are new in each call."""
    sequences = arguments[NUM_DENSE_ARGUMENTS:]
    return (*arguments[:NUM_DENSE_ARGUMENTS], describe_sequences(*sequences)), *sequences[:2]


def describe_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[int | torch.Size, ...]:
    """What a prepared run of packed sequences depends on; the values of cu_seqlens are the kernel's business."""
    return cu_seqlens_q.shape, cu_seqlens_q.get_device(), cu_seqlens_k.get_device(), max_seqlen_q, max_seqlen_k


def allocation(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None
) -> Callable[[], Tensor]:
    """Allocates such a tensor at each call, contiguous if no strides are given; with all of it bound here, a call costs
    0.2 us less."""
    strides = torch.empty(shape, device="meta").stride() if strides is None else strides
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd wants a gradient of one of them."""
    try:
        return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    except AttributeError:  # no tensor: the checks to come name it
        return False


def _check_like(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
        raise ValueError(
            f"{name} must be {dtype} of shape {tuple(shape)} on {device}; "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def check_outputs(problem: Problem, q: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    """That the outputs given, None if to be allocated, are such that the problem's run can write them."""
    _check_like("out", out, q.shape, q.dtype, q.device)
    _check_like("lse", lse, lse_shape(q), torch.float32, q.device)
    if _runs_without_kernel(problem):
        return
    if out is not None and (is_unreadable(out) or 0 in out.stride()):
        raise ValueError(
            f"out must have a last stride of 1 and others that are positive multiples of {ALIGNMENT} bytes; "
            f"got strides {out.stride()} of {out.dtype}"
        )
    if out is not None and out.data_ptr() % ALIGNMENT:
        raise ValueError(f"out must be aligned to {ALIGNMENT} bytes; got address {out.data_ptr():#x}")
    if lse is not None and not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous; got strides {lse.stride()}")


def _runs_without_kernel(problem: Problem) -> bool:
    """Whether the algorithm runs it, or nothing does because there is no score."""
    return problem.device == "cpu" or problem.is_empty


def is_unreadable(tensor: Tensor) -> bool:
    """Whether the kernels cannot read these strides: the last is not 1, or another no multiple of 16 bytes."""
    *strides, last = tensor.stride()
    return last != 1 or any(stride * tensor.itemsize % ALIGNMENT for stride in strides)


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that the kernels can read."""
    if is_unreadable(tensor) or tensor.data_ptr() % ALIGNMENT:
        return tensor.clone(memory_format=CONTIGUOUS)
    return tensor


def num_query_tiles(problem: Problem, tile_m: int) -> int:
    """How many tiles of `tile_m` rows hold every sequence's queries, none of them shared by two sequences.

    Dense: tile m of batch entry b is b * tiles + m. Packed: (cu_seqlens_q[b] + b * tile_m) // tile_m + m, which leaves
    room for a ragged tile behind each sequence and needs to know no length but what cu_seqlens_q says.
    """
    if problem.varlen:
        return problem.total_q // tile_m + problem.batch
    return problem.batch * -(-problem.seqlen_q // tile_m)


def _with_batch(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Views with a batch dimension of 1 where the batch is packed: (1, total, ...), LSE (1, heads, total)."""
    return tuple(x[None] if problem.varlen and x is not None else x for x in tensors)


def _sequences(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """The (queries, keys) of each call of the algorithm: all, or those of each packed sequence that has both."""
    if problem.is_empty:
        return
    if not problem.varlen:
        yield slice(None), slice(None)
        return
    bounds_q, bounds_k = (accumulate(lengths, initial=0) for lengths in zip(*problem.seqlens, strict=True))
    for queries, keys in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield slice(*queries), slice(*keys)


def _mathematics(problem: Problem) -> dict[str, Any]:
    """What the algorithm computes, by its own names."""
    return {name: getattr(problem, name) for name in ("softmax_scale", "causal", "window", "softcap")}


def _qualified(config_type: type) -> str:
    return f"{config_type.__module__.partition('.')[0]}.{config_type.__qualname__}"
