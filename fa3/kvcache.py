"""FA3 decoding: few queries against caches of K and V, of which each sequence uses a length that only the GPU knows.

The bytes of the cache set the time, so all SMs have to read, and one tile for each sequence and head of K and V is too
few tiles for that. As in Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), keys are split; merge.py adds up the parts.

    one split      queries -> forward.py                                       -> out, lse
    several        queries -> forward.py, a CTA for each split -> parts, fp32  -> merge.py -> out, lse

In FP8 it is forward_fp8.py that attends, to half the bytes; the rest is the same.

Every call with tensors laid out as in an earlier one runs what that one prepared: see fa_common/generation.py.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa3 import algorithm, fp8_launch
from fa3.config import Config, default_config, default_fp8_config, few_queries_config, few_queries_fp8_config
from fa3.fp8_arguments import E4M3, Descales, check_problem, check_scales, check_types, expansions, want_gradient
from fa3.interface import GENERATION, build_forward
from fa_common.compile import Build, KernelKey, load
from fa_common.generation import ALIGNMENT, CONTIGUOUS, Prepared, allocation, check_outputs, is_unreadable
from fa_common.problem import Problem, UnsupportedProblem, Window, lse_shape

AUTOMATIC = 0  # num_splits
MAX_SPLITS = 128  # that merge.py adds up

# What a number of splits is judged by: bytes and microseconds, fitted to an H200's times of 42 calls with 1 to 128
# splits (batch 1 to 64, caches of 1k to 128k); in e4m3 to those of 16 calls.
BYTES_PER_US = 4.2e6  # of all SMs together
SM_BYTES_PER_US = 60e3  # of one SM that has HBM to itself: twice its part of the whole
TILE_US = 1.5  # until a tile's first block has come, and its O has gone
E4M3_KEYS_PER_US = 160  # of one tile: V to be turned and exponentials to be made, of however few bytes
MERGE_US = 2.0  # one kernel more
WORTHWHILE = 0.98  # of the time without splits, or less

# given q, k_cache, v_cache, cache_seqlens, descales, out, lse
Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, Descales, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]

_runs = Prepared()


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    num_splits: int = AUTOMATIC,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of few queries over the used part of a cache of K and V, for decoding. It has no gradient.

    q is (batch, seqlen_q, heads_q, head_dim), k_cache and v_cache are (batch, seqlen_cache, heads_kv, head_dim). The
    caches are read in place: views of larger tensors with a unit last stride and others of multiples of 16 bytes. What
    they hold beyond cache_seqlens is never looked at. New keys and values are for the caller to write, before the call.

    In FP8, q and both caches are float8_e4m3fn and stand for their products with descale_q, descale_k and descale_v, as
    in flash_attn_func; a cache of V lies by rows, which `quantize` makes of it with `.contiguous()`.

    Args:
        cache_seqlens: int32 (batch,), how many keys of each sequence are in use, on the device of q; None for all.
        causal: query i sees the keys up to i + cache_seqlens - seqlen_q: aligned bottom-right, to the length in use.
        window_size: as in flash_attn_func, aligned likewise.
        num_splits: how many CTAs share the keys of a tile, up to 128; 0 to choose by the shapes. The choice depends on
            the batch; for bits that do not, name a number.
        return_lse: whether to return the log-sum-exp of each row of scores too.
        out, lse: written if given, allocated if not.
        descale_q, descale_k, descale_v, out_dtype: FP8 only, as in flash_attn_func; the blocks of k and v count from
            the start of the cache, all of which have a place: (batch, heads_kv, ceil(seqlen_cache / 128)).

    Returns:
        out, of q's shape and dtype or out_dtype; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) float32,
        natural logarithm. A query that sees no key gets out 0 and lse -inf.

    Raises:
        UnsupportedProblem: fa3 lacks it, or a gradient is asked for.
        TypeError, ValueError: an argument is wrong. The values in cache_seqlens are checked on a CPU only: on a GPU
            that would wait for it, and a length beyond the cache's is undefined there.
    """
    descales = (descale_q, descale_k, descale_v)
    arguments = (softmax_scale, causal, window_size, softcap, num_splits, out_dtype)
    if torch.compiler.is_compiling():
        results = _call_operator(q, k_cache, v_cache, cache_seqlens, descales, arguments)
        out, lse = (x if given is None else given.copy_(x) for x, given in zip(results, (out, lse), strict=True))
    else:
        out, lse = _attend(q, k_cache, v_cache, cache_seqlens, descales, arguments, out, lse)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    descales: Descales,
    arguments: tuple,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs what was prepared for a call like this one, now or earlier."""
    tensors = (q, k_cache, v_cache, cache_seqlens, descales, out, lse)
    try:
        is_8_bit = q.itemsize == 1
        want_it = q.requires_grad or k_cache.requires_grad or v_cache.requires_grad
        if (want_it or (is_8_bit and want_gradient(*descales))) and torch.is_grad_enabled():
            _refuse_gradient()
        given = None
        if out is not None or lse is not None:
            given = (out is None or (out.stride(), out.get_device()), lse is None or (lse.get_device(),))
        device_of_lengths = None if cache_seqlens is None else cache_seqlens.get_device()
        # The kernel holds the shapes of the scales against nothing.
        scales = [None if x is None else (x.shape, x.get_device()) for x in descales] if is_8_bit else descales
        # As in fa_common/generation.py: what the choices depend on, and what a kernel does not check.
        # fmt: off
        key = (
            q.shape, q.stride(), q.dtype, q.get_device(), k_cache.shape, k_cache.stride(), k_cache.get_device(),
            v_cache.stride(), v_cache.get_device(), device_of_lengths, *scales, arguments, given,
        )
        # fmt: on
        run = _runs.get(key)
    except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed
        _checked(*tensors, arguments)  # raises the error that names it
        raise
    if run is None:
        problem, num_splits, out_dtype = _checked(*tensors, arguments)
        if problem.device == "cpu" or problem.is_empty:
            return _run_algorithm(problem, num_splits, out_dtype, *tensors)
        run = _prepare(problem, num_splits, out_dtype, q, cache_seqlens is not None, descales)
        # As in fp8.py: under capture a scale left out belongs to the graph alone.
        if not torch.cuda.is_current_stream_capturing():
            _runs.keep(key, run)
    try:
        return run(*tensors)
    except (TypeError, ValueError):  # a kernel's refusal
        if q.data_ptr() % ALIGNMENT == 0:
            _checked(*tensors, arguments)
            raise
    return _attend(q.clone(memory_format=CONTIGUOUS), k_cache, v_cache, cache_seqlens, descales, arguments, out, lse)


def _prepare(
    problem: Problem, num_splits: int, out_dtype: torch.dtype, q: Tensor, has_lengths: bool, descales: Descales
) -> Run:
    """Compiles or loads the kernels and makes every choice of a call whose tensors are laid out like these."""
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    config = decode_config(problem)
    num_splits = num_splits or choose_splits(problem, config, num_sms)
    attend = load(*attention_kernel(problem, config, num_splits, has_lengths, out_dtype))
    merge = load(merge_key(problem.head_dim, out_dtype), build_merge) if num_splits > 1 else None
    expand = expansions(problem, descales, q.device) if problem.dtype == E4M3 else []
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, num_sms, num_splits)
    copy_q = is_unreadable(q)
    allocate_out = functools.partial(torch.empty_like, dtype=out_dtype, memory_format=CONTIGUOUS)
    if q.is_contiguous() and q.dtype == out_dtype:
        allocate_out = torch.empty_like  # quicker without arguments
    shapes = (lse_shape(q), (num_splits, *q.shape), (num_splits, *lse_shape(q)))
    allocate_lse, allocate_parts, allocate_their_lse = (allocation(x, torch.float32, q.device) for x in shapes)

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None,
        descales: Descales,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if copy_q:
            q = q.clone(memory_format=CONTIGUOUS)
        if out is None:
            out = allocate_out(q)
        if lse is None:
            lse = allocate_lse()
        scales = [expand_one(x) for expand_one, x in zip(expand, descales, strict=False)]  # none of 16-bit tensors
        if merge is None:
            attend(q, k_cache, v_cache, out, lse, *scales, None, cache_seqlens, None, *numbers)
        else:
            out_split, lse_split = allocate_parts(), allocate_their_lse()
            attend(q, k_cache, v_cache, out_split, lse_split, *scales, None, cache_seqlens, None, *numbers)
            merge(out_split, lse_split, out, lse)
        return out, lse

    return run


def _run_algorithm(
    problem: Problem,
    num_splits: int,
    out_dtype: torch.dtype,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    descales: Descales,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The run that needs no kernel: the algorithm, one sequence after the other, or a result without any score.

    In FP8 it leaves the keys of a sequence together: what splits change there is the order of sums alone.
    """
    out = q.new_empty(q.shape, dtype=out_dtype) if out is None else out
    lse = q.new_empty(lse_shape(q), dtype=torch.float32) if lse is None else lse
    forward, scales = algorithm.forward, []
    if problem.dtype == E4M3:
        forward = functools.partial(algorithm.forward_fp8, out_dtype=out_dtype)
        expand = expansions(problem, descales, q.device)
        scales = [expand_one(x) for expand_one, x in zip(expand, descales, strict=True)]
    elif num_splits > 1:
        forward = functools.partial(algorithm.forward_split, num_splits=num_splits)
    forward = functools.partial(
        forward,
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        config=decode_config(problem),
    )
    with torch.no_grad():
        out.zero_()
        lse.fill_(-torch.inf)
        if problem.is_empty:
            return out, lse
        lengths = [problem.seqlen_k] * problem.batch if cache_seqlens is None else cache_seqlens.tolist()
        for i, length in enumerate(lengths):
            if length > 0:
                one = slice(i, i + 1)
                used = (q[one], k_cache[one, :length], v_cache[one, :length], *(x[one] for x in scales))
                out[one], lse[one] = forward(*used)
    return out, lse


# ---- Choices


def decode_config(problem: Problem) -> Config:
    """What the attention kernel is built from: a tile that few queries fill, as many blocks in flight as there is room.

    The query heads that share a head of K and V are rows of one tile, so that it is read once for all of them.
    """
    is_8_bit = problem.dtype == E4M3
    if problem.seqlen_q * problem.group > 64:
        config = default_fp8_config(problem) if is_8_bit else default_config(problem)
        # The launch brings no counter to draw tiles from.
        return replace(config, scheduler="static")
    if is_8_bit:
        return replace(few_queries_fp8_config(problem), pack_gqa=problem.group > 1)
    stages = 4 if problem.head_dim <= 64 else 3 if problem.head_dim <= 192 else 2
    return replace(few_queries_config(problem), stages=stages, pack_gqa=problem.group > 1)


def choose_splits(problem: Problem, config: Config, num_sms: int) -> int:
    """How many CTAs share the keys of a tile: the number that takes the least time, if that is worth a second kernel.

    By the cache's capacity: the lengths in use only the GPU knows. Splits that find no key are over at once.
    """
    most = max(1, min(MAX_SPLITS, _num_key_blocks(problem, config)))
    times = {n: estimated_us(problem, config, num_sms, n) for n in range(1, most + 1)}
    best = min(times, key=times.get)
    return best if times[best] <= WORTHWHILE * times[1] else 1


def estimated_us(problem: Problem, config: Config, num_sms: int, num_splits: int) -> float:
    """About how long a call takes, merging included.

    Tiles run in waves of one CTA an SM. While a wave is full they share the bandwidth of HBM; the last one may be too
    small to use it up, since what one SM can ask for has a limit too.
    """
    rows, heads = problem.seqlen_q, problem.heads_q
    if config.pack_gqa:
        rows, heads = rows * problem.group, problem.heads_kv
    num_tiles = -(-rows // config.tile_m) * heads * problem.batch * num_splits
    share = -(-_num_key_blocks(problem, config) // num_splits)
    block_bytes = 2 * config.tile_n * problem.head_dim * problem.dtype.itemsize  # K and V
    least_us = config.tile_n / E4M3_KEYS_PER_US if problem.dtype == E4M3 else 0.0  # of a block

    def wave_us(num_ctas: int) -> float:
        block_us = block_bytes * max(num_ctas / BYTES_PER_US, 1 / SM_BYTES_PER_US)
        return TILE_US + share * max(block_us, least_us)

    full_waves, rest = divmod(num_tiles, num_sms)
    time = full_waves * wave_us(num_sms) + (wave_us(rest) if rest else 0.0)
    if num_splits > 1:
        parts = num_splits * problem.total_q * problem.heads_q * problem.head_dim * torch.float32.itemsize
        time += MERGE_US + 2 * parts / BYTES_PER_US  # written and read
    return time


def _num_key_blocks(problem: Problem, config: Config) -> int:
    """Key blocks that a sequence's queries see if it uses the whole cache."""
    num_keys, (left, _) = problem.seqlen_k, problem.window
    if left is not None:
        num_keys = min(num_keys, left + problem.seqlen_q)  # the last query faces the last key
    return -(-num_keys // config.tile_n)


# ---- Kernels


def attention_kernel(
    problem: Problem, config: Config, num_splits: int, has_lengths: bool, out_dtype: torch.dtype
) -> tuple[KernelKey, Build]:
    """The attention kernel of a call, and what compiles it; without lengths it is that of a dense one."""
    if problem.dtype == E4M3:
        key, build = fp8_launch.forward_key(problem, config, out_dtype, False), fp8_launch.build_forward
    else:
        key, build = GENERATION.forward_key(problem, config), build_forward
    return replace(key, sequences="cached" if has_lengths else "dense", splits=num_splits > 1), build


def merge_key(head_dim: int, out_dtype: torch.dtype) -> KernelKey:
    """The kernel that merges a call's splits."""
    name = str(out_dtype).removeprefix("torch.")
    return KernelKey("fa3", "merge", name, head_dim, causal=False, config=None)


def build_merge(key: KernelKey, options: str = "") -> Any:
    """Compiles the kernel; as in interface.py, the DSL is imported with the first one."""
    from fa3.merge import compile_merge

    return compile_merge(key, options)


# ---- Checks


def _checked(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    descales: Descales,
    out: Tensor | None,
    lse: Tensor | None,
    arguments: tuple,
) -> tuple[Problem, int, torch.dtype]:
    """The problem, num_splits and the type of out, or the error that names what is wrong or lacking."""
    softmax_scale, causal, window_size, softcap, num_splits, out_dtype = arguments
    is_fp8 = any(x is not None for x in (*descales, out_dtype)) or E4M3 in (
        getattr(x, "dtype", None) for x in (q, k_cache, v_cache)
    )
    if is_fp8:
        out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
        check_types(q, k_cache, v_cache, out_dtype)
    # A bound that hides no key of the whole cache hides none of its used part, so the canonical mask holds for all
    # lengths.
    problem = Problem.from_tensors(
        q, k_cache, v_cache, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap
    )
    if problem.needs_grad or (torch.is_grad_enabled() and want_gradient(*descales)):
        _refuse_gradient()
    if is_fp8:
        check_problem(problem)
        check_scales(problem, descales, q.device)
    elif reason := GENERATION.why_not(problem):
        raise UnsupportedProblem(f"fa3 cannot run this problem: {reason}")
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be a Python int; got {type(num_splits).__name__}")
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be 1 to {MAX_SPLITS}, or 0 to have it chosen; got {num_splits}")
    if cache_seqlens is not None:
        _check_lengths(cache_seqlens, problem, q.device)
    if problem.device != "cpu":
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            _check_cache(name, cache)
    like = q.to(out_dtype) if is_fp8 else q
    check_outputs(problem, like, out, lse)
    return problem, num_splits, like.dtype


def _refuse_gradient() -> None:
    raise UnsupportedProblem(
        "flash_attn_with_kvcache has no gradient: call under torch.no_grad(), or detach() q, k_cache and v_cache"
    )


def _check_cache(name: str, cache: Tensor) -> None:
    """That the kernel can read it where it is: a copy made in silence would be as large as the cache."""
    if is_unreadable(cache):
        raise ValueError(
            f"{name} must have a last stride of 1 and others that are multiples of {ALIGNMENT} bytes, it is never "
            f"copied; got strides {cache.stride()} of {cache.dtype}; allocate the cache so, or make what another call "
            "has returned contiguous"
        )
    if cache.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name} must be aligned to {ALIGNMENT} bytes, it is never copied; got address {cache.data_ptr():#x}"
        )


def _check_lengths(cache_seqlens: Tensor, problem: Problem, device: torch.device) -> None:
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(
            f"cache_seqlens must be an int32 tensor (batch,), or None for the whole cache; "
            f"got {type(cache_seqlens).__name__}"
        )
    if cache_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cache_seqlens must be int32; got {cache_seqlens.dtype}; convert it once, with .to(torch.int32)"
        )
    if cache_seqlens.shape != (problem.batch,) or not cache_seqlens.is_contiguous():
        raise ValueError(
            f"cache_seqlens must be contiguous of shape {(problem.batch,)}, a length for each sequence; got shape "
            f"{tuple(cache_seqlens.shape)}, strides {cache_seqlens.stride()}"
        )
    if cache_seqlens.device != device:
        raise ValueError(f"cache_seqlens must be on the device of q, {device}; got {cache_seqlens.device}")
    if problem.device == "cpu" and problem.batch:
        shortest, longest = cache_seqlens.min().item(), cache_seqlens.max().item()
        if shortest < 0 or longest > problem.seqlen_k:
            raise ValueError(
                f"cache_seqlens must be 0 up to the length of the caches, {problem.seqlen_k}; "
                f"got lengths from {shortest} to {longest}"
            )


# ---- torch.compile, for which a call is one operator

_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? descale_q, Tensor? descale_k, "
    "Tensor? descale_v, float? softmax_scale, bool causal, SymInt? window_left, SymInt? window_right, float softcap, "
    "SymInt num_splits, ScalarType? out_dtype) -> (Tensor, Tensor)"
)


@functools.partial(torch.library.custom_op, "fa3::with_kvcache", mutates_args=(), schema=_SCHEMA)
def _operator(q, k_cache, v_cache, cache_seqlens, descale_q, descale_k, descale_v, softmax_scale, causal, *others):
    left, right, *others = others
    arguments = (softmax_scale, causal, (left, right), *others)
    return _attend(q, k_cache, v_cache, cache_seqlens, (descale_q, descale_k, descale_v), arguments)


@_operator.register_fake
def _(q, k_cache, v_cache, *arguments):
    out_dtype = arguments[-1] or (torch.bfloat16 if q.dtype == E4M3 else q.dtype)
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape(q), dtype=torch.float32)


def _call_operator(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None, descales: Descales, arguments: tuple
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and want_gradient(q, k_cache, v_cache, *descales):
        _refuse_gradient()
    softmax_scale, causal, (left, right), softcap, num_splits, out_dtype = arguments
    numbers = (softmax_scale, causal, left, right, softcap, num_splits, out_dtype)
    return torch.ops.fa3.with_kvcache.default(q, k_cache, v_cache, cache_seqlens, *descales, *numbers)
