"""FA3 in FP8 (section 3.3): Q, K and V in e4m3, each block of rows with a scale of its own, Q and K rotated.

    16-bit q, k, v -> quantize -> e4m3 q, k, v and their scales -> flash_attn_func -> out, lse

An e4m3 number has three bits behind its leading one, and its largest is 448. Scales bring each block of rows to where
that is enough. The rotation, the paper's incoherent processing, spreads an outlier over its whole row, so that a block
is not scaled for one entry alone; done to Q and K alike it changes no score.

CUDA tensors run the kernels of quantize.py and forward_fp8.py, CPU tensors the functions of algorithm.py. Every call
with CUDA tensors laid out as in an earlier one runs what that one prepared: see fa_common/generation.py.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa3 import algorithm, fp8_launch
from fa3.config import KV_BLOCK, Q_BLOCK, Config, check_fp8_config, default_fp8_config
from fa3.fp8_arguments import (
    E4M3,
    OUT_DTYPES,
    Descales,
    check_problem,
    check_scales,
    check_types,
    expansions,
    want_gradient,
)
from fa_common.generation import Prepared, describe_packed, describe_sequences, needs_grad, readable
from fa_common.operators import NUM_DENSE_ARGUMENTS, SCHEMA, Arguments, from_operator, to_operator
from fa_common.problem import Problem, UnsupportedProblem, Window, lse_shape

SCALES = ("tensor", "head", "block")
SOURCES = (torch.float16, torch.bfloat16, torch.float32)  # what can be quantized


class Quantized(NamedTuple):
    """e4m3 tensors and the float32 scales to multiply them with: the arguments of flash_attn_func by their names."""

    q: Tensor
    k: Tensor
    v: Tensor
    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scales: str = "block",
    hadamard: bool = True,
    seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Quantized:
    """q, k and v in e4m3, for `flash_attn_func`, or with cu_seqlens for `flash_attn_varlen_func`. It has no gradient.

    q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim), float16, bfloat16 or
    float32, every entry finite; packed sequences are as in flash_attn_varlen_func. head_dim is a multiple of 16.

    Unless sequences are packed, v of a seqlen_k that is a multiple of 16 comes with a unit stride along its keys:
    attention, which takes v by rows as well, is then up to a tenth faster.

    Args:
        scales: who shares a scale. "tensor": all, descales are (1,). "head": of each sequence a head of k and v and the
            query heads that read it, (batch, heads_kv). "block": 64 rows of a head of q, (batch, heads_q,
            ceil(seqlen_q / 64)), and 128 of a head of k or v, (batch, heads_kv, ceil(seqlen_k / 128)); of packed
            sequences it is max_seqlen that counts, and blocks past a sequence's end have scale 1.
        hadamard: whether q and k are multiplied by random signs and a Hadamard matrix, which changes no score.
        seed: of the signs.

    Raises:
        UnsupportedProblem: a gradient is asked for, or a head_dim that fp8 has not.
        TypeError, ValueError: an argument is wrong.
    """
    arguments = (scales, hadamard, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if needs_grad(q, k, v):
        _refuse_gradient("quantize")
    run = torch.ops.fa3.quantize.default if torch.compiler.is_compiling() else _quantize
    return Quantized(*run(q, k, v, *arguments))


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    return_lse: bool = False,
    scales: str = "block",
    hadamard: bool = True,
    seed: int = 0,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of float16 or bfloat16 tensors computed in FP8: `quantize`, then attention. It has no gradient.

    Arguments, results and errors are those of the two; out has the type of q.
    """
    quantized = quantize(q, k, v, scales=scales, hadamard=hadamard, seed=seed)
    if q.dtype not in OUT_DTYPES:
        raise ValueError(f"q, k and v must be float16 or bfloat16, as out is; got {q.dtype}; convert with .to(dtype)")
    arguments = (softmax_scale, causal, window_size, softcap, False, config)
    out, lse = attend(*quantized[:3], arguments, quantized[3:], q.dtype)
    return (out, lse) if return_lse else out


def attend(
    q: Tensor, k: Tensor, v: Tensor, arguments: tuple, descales: Descales, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of e4m3 tensors; `arguments` are those of fa_common.operators.Arguments, in its order."""
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if torch.is_grad_enabled() and want_gradient(q, k, v, *descales):
        check_types(q, k, v, out_dtype)
        _refuse_gradient("fp8 attention")
    if torch.compiler.is_compiling():
        _check_call(q, k, v, arguments, out_dtype)  # in the operator's string all Configs look alike
        return torch.ops.fa3.forward_fp8.default(q, k, v, *descales, out_dtype, *to_operator(arguments))
    return _forward(q, k, v, arguments, descales, out_dtype)


# ---- Prepared runs

_quantizations, _runs = Prepared(), Prepared()


def _layout(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    """What a run's choices depend on, and what no kernel checks, as in fa_common/generation.py."""
    # fmt: off
    return (
        q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.get_device(), v.stride(), v.get_device(),
    )
    # fmt: on


# ---- Quantization


def _quantize(
    q: Tensor, k: Tensor, v: Tensor, scales: str, hadamard: bool, seed: int, *sequences: Tensor | int | None
) -> tuple[Tensor, ...]:
    """Quantizes as prepared for a call like this one, now or earlier."""
    choices, described = (scales, hadamard, seed), None
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = sequences
    try:
        if not (cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None):
            described = describe_sequences(*sequences)
        key = (_layout(q, k, v), choices, described)
        run = _quantizations.get(key)
    except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed
        _check_quantization(q, k, v, *choices, *sequences)  # raises the error that names it
        raise
    if run is None:
        problem = _check_quantization(q, k, v, *choices, *sequences)
        run = _prepare_quantization(problem, (q, k, v), *choices)
        if problem.device == "cpu" or problem.batch == 0:  # no kernel checks what the key leaves out
            return run((q, k, v), (cu_seqlens_q, cu_seqlens_k))
        _quantizations.keep(key, run)
    try:
        return run((q, k, v), (cu_seqlens_q, cu_seqlens_k))
    except (TypeError, ValueError):  # the kernel's refusal: nothing was launched
        aligned = [readable(x) for x in (q, k, v)]
        if all(x is y for x, y in zip(aligned, (q, k, v), strict=True)):
            _check_quantization(q, k, v, *choices, *sequences)
            raise
    return _quantize(*aligned, *choices, *sequences)


def _prepare_quantization(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], scales: str, hadamard: bool, seed: int
) -> Callable[[tuple, tuple], tuple[Tensor, ...]]:
    """What quantizes tensors laid out like these: run(tensors, cu_seqlens)."""
    signs = random_signs(problem.head_dim, seed, tensors[0].device) if hadamard else None
    if problem.device == "cpu":
        return functools.partial(_quantize_by_algorithm, problem, scales, signs)
    from fa3.quantize_launch import prepare  # it needs the DSL, which takes seconds to import

    return prepare(problem, tensors, scales, signs)


def _quantize_by_algorithm(
    problem: Problem, scales: str, signs: Tensor | None, tensors: tuple[Tensor, Tensor, Tensor], _: tuple
) -> tuple[Tensor, ...]:
    q, k, v = tensors
    with torch.no_grad():
        if signs is not None:
            q, k = (algorithm.rotate(x, signs) for x in (q, k))
        lengths_q, lengths_k = zip(*problem.seqlens, strict=True) if problem.seqlens else ((), ())
        made = (
            _quantize_one(problem, scales, q, Q_BLOCK, lengths_q, problem.seqlen_q),
            *(_quantize_one(problem, scales, x, KV_BLOCK, lengths_k, problem.seqlen_k) for x in (k, v)),
        )
    (q, k, v), descales = zip(*made, strict=True)
    if fp8_launch.strides_by_columns(v.shape):
        v = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return q, k, v, *descales


def _quantize_one(
    problem: Problem, scales: str, x: Tensor, block: int, lengths: Sequence[int], max_seqlen: int
) -> tuple[Tensor, Tensor]:
    """One of q, k and v as `algorithm.quantize` makes it, packed sequences one after the other."""
    if not problem.varlen:
        return algorithm.quantize(x, scales, problem.heads_kv, block)
    if scales == "tensor":
        values, descale = algorithm.quantize(x[None], scales, problem.heads_kv, block)
        return values[0], descale
    values = torch.empty_like(x, dtype=E4M3)
    shape = (problem.heads_kv,) if scales == "head" else (x.shape[1], -(-max_seqlen // block))
    descale = torch.ones(problem.batch, *shape)
    for i, rows in enumerate(_slices(lengths)):
        values[None, rows], scale = algorithm.quantize(x[None, rows], scales, problem.heads_kv, block)
        descale[i, ..., : scale.shape[-1]] = scale
    return values, descale


# ---- Attention


def _forward(
    q: Tensor, k: Tensor, v: Tensor, arguments: tuple, descales: Descales, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Runs the forward as prepared for a call like this one, now or earlier."""
    cu_seqlens_q = cu_seqlens_k = None
    try:
        described = arguments
        if len(arguments) > NUM_DENSE_ARGUMENTS:
            described, cu_seqlens_q, cu_seqlens_k = describe_packed(arguments)
        # The kernel holds the shapes of the scales against nothing.
        scales = [None if x is None else (x.shape, x.get_device()) for x in descales]
        key = (_layout(q, k, v), *scales, described, out_dtype)
        run = _runs.get(key)
    except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed
        _checked(q, k, v, arguments, descales, out_dtype)  # raises the error that names it
        raise
    if run is None:
        problem, config = _checked(q, k, v, arguments, descales, out_dtype)
        expand = expansions(problem, descales, q.device)
        if problem.device == "cpu" or problem.is_empty:
            descales = [expand_one(x) for expand_one, x in zip(expand, descales, strict=True)]
            return _run_algorithm(problem, config, q, k, v, descales, out_dtype)
        run = fp8_launch.prepare(problem, config, q, k, v, expand, out_dtype)
        # Under capture the 1 of a scale left out is made with each replay, for the graph alone.
        if not torch.cuda.is_current_stream_capturing():
            _runs.keep(key, run)
    try:
        return run(q, k, v, descales, cu_seqlens_q, cu_seqlens_k)
    except (TypeError, ValueError):  # the kernel's refusal: nothing was launched
        aligned = [readable(x) for x in (q, k, v)]
        if all(x is y for x, y in zip(aligned, (q, k, v), strict=True)):
            _checked(q, k, v, arguments, descales, out_dtype)
            raise
    return _forward(*aligned, arguments, descales, out_dtype)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, arguments: tuple, descales: Descales, out_dtype: torch.dtype
) -> tuple[Problem, Config]:
    """The problem and the config to run it with, or the error that names what is wrong or lacking."""
    _check_call(q, k, v, arguments, out_dtype)
    arguments = Arguments(*arguments)._asdict()
    config = arguments.pop("config")
    problem = Problem.from_tensors(q, k, v, **arguments)
    check_problem(problem)
    check_scales(problem, descales, q.device)
    return problem, default_fp8_config(problem, fp8_launch.lies_by_columns(v)) if config is None else config


def _run_algorithm(
    problem: Problem,
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Sequence[Tensor],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The run that needs no kernel: the algorithm, one sequence after the other, or a result without any score."""
    forward = functools.partial(
        algorithm.forward_fp8,
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        config=config,
        out_dtype=out_dtype,
    )
    out = q.new_zeros(q.shape, dtype=out_dtype)
    lse = q.new_full(lse_shape(q), -torch.inf, dtype=torch.float32)
    if problem.is_empty:
        return out, lse
    with torch.no_grad():
        if not problem.varlen:
            return forward(q, k, v, *descales)
        bounds = (_slices(lengths) for lengths in zip(*problem.seqlens, strict=True))
        for i, (queries, keys) in enumerate(zip(*bounds, strict=True)):
            if queries.start < queries.stop and keys.start < keys.stop:
                one = (q[None, queries], k[None, keys], v[None, keys], *(x[i : i + 1] for x in descales))
                out[None, queries], lse[None, :, queries] = forward(*one)
    return out, lse


def _slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Where each of the packed sequences lies."""
    return (slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0)))


# ---- Signs


@functools.lru_cache
def random_signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """1 or -1 for each column, (head_dim,) float32; the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randint(2, (head_dim,), generator=generator) - 1.0).to(device)


# ---- Checks


def _refuse_gradient(what: str) -> None:
    raise UnsupportedProblem(f"{what} has no gradient: call under torch.no_grad(), or detach() what it is given")


def _check_call(q: Tensor, k: Tensor, v: Tensor, arguments: tuple, out_dtype: torch.dtype) -> None:
    """What can be said of a call before it is a Problem."""
    check_types(q, k, v, out_dtype)
    config = Arguments(*arguments).config
    if config is not None and type(config) is not Config:
        raise TypeError(f"config must be a fa3.Config; got a {type(config).__name__}; leave it out for the default")
    if config is not None:
        check_fp8_config(config)


def _check_quantization(
    q: Tensor, k: Tensor, v: Tensor, scales: str, hadamard: bool, seed: int, *sequences: Tensor | int | None
) -> Problem:
    """The problem whose tensors are quantized, or the error that names what is wrong or lacking."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    problem = Problem.from_tensors(q, k, v, **dict(zip(names, sequences, strict=True)))
    check_problem(problem)
    if problem.dtype not in SOURCES:
        raise ValueError(
            f"quantize takes {', '.join(map(str, SOURCES))}; got {problem.dtype}; convert q, k and v with .to(dtype)"
        )
    if scales not in SCALES:
        raise ValueError(f"scales must be one of {', '.join(SCALES)}; got {scales!r}")
    if not isinstance(hadamard, bool):
        raise TypeError(f"hadamard must be True or False; got {type(hadamard).__name__}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a Python int; got {type(seed).__name__}")
    return problem


# ---- torch.compile, for which each call is one operator

_QKV = "Tensor q, Tensor k, Tensor v"
_define = functools.partial(torch.library.custom_op, mutates_args=())


@functools.partial(
    _define,
    "fa3::quantize",
    schema=f"({_QKV}, str scales, bool hadamard, SymInt seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _quantize_operator(q, k, v, *arguments):
    return tuple(_quantize(q, k, v, *arguments))


@_quantize_operator.register_fake
def _(q, k, v, scales, hadamard, seed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    if cu_seqlens_q is None:
        batch, max_seqlen_q, max_seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch = cu_seqlens_q.shape[0] - 1
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    shapes = {
        "tensor": [(1,)] * 3,
        "head": [(batch, heads_kv)] * 3,
        "block": [
            (batch, heads_q, -(-max_seqlen_q // Q_BLOCK)),
            *[(batch, heads_kv, -(-max_seqlen_k // KV_BLOCK))] * 2,
        ],
    }
    values = [x.new_empty(x.shape, dtype=E4M3) for x in (q, k, v)]
    if strides := fp8_launch.strides_by_columns(v.shape):
        values[2] = v.new_empty_strided(v.shape, strides, dtype=E4M3)
    return *values, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes[scales])


@functools.partial(
    _define,
    "fa3::forward_fp8",
    schema=f"({_QKV}, Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, ScalarType out_dtype, {SCHEMA}) -> "
    "(Tensor, Tensor)",
)
def _forward_operator(q, k, v, descale_q, descale_k, descale_v, out_dtype, *values):
    arguments = tuple(from_operator(values, Config).values())
    if all(x is None for x in arguments[NUM_DENSE_ARGUMENTS:]):
        arguments = arguments[:NUM_DENSE_ARGUMENTS]
    return _forward(q, k, v, arguments, (descale_q, descale_k, descale_v), out_dtype)


@_forward_operator.register_fake
def _(q, k, v, descale_q, descale_k, descale_v, out_dtype, *values: Any):
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape(q), dtype=torch.float32)
