"""FA3 decoding: few queries against caches of K and V, of which each sequence uses a length that only the GPU knows.

The bytes of the cache set the time, so all SMs have to read, and one tile for each sequence and head of K and V is too
few tiles for that. As in Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), keys are split; merge.py adds up the parts.

    one split      queries -> forward.py                                       -> out, lse
    several        queries -> forward.py, a CTA for each split -> parts, fp32  -> merge.py -> out, lse

Every call with tensors laid out as in an earlier one runs what that one prepared: see fa_common/generation.py.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa3 import algorithm
from fa3.config import Config, default_config, few_queries_config
from fa3.interface import GENERATION, build_forward
from fa_common.compile import KernelKey, load
from fa_common.generation import ALIGNMENT, CONTIGUOUS, Prepared, allocation, check_outputs, is_unreadable
from fa_common.problem import Problem, UnsupportedProblem, Window, lse_shape

AUTOMATIC = 0  # num_splits
MAX_SPLITS = 128  # that merge.py adds up

# What a number of splits is judged by: bytes and microseconds, fitted to an H200's times of 42 calls with 1 to 128
# splits (batch 1 to 64, caches of 1k to 128k).
BYTES_PER_US = 4.2e6  # of all SMs together
SM_BYTES_PER_US = 60e3  # of one SM that has HBM to itself: twice its part of the whole
TILE_US = 1.5  # until a tile's first block has come, and its O has gone
MERGE_US = 2.0  # one kernel more
WORTHWHILE = 0.98  # of the time without splits, or less

# given q, k_cache, v_cache, cache_seqlens, out, lse
Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]

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
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of few queries over the used part of a cache of K and V, for decoding. It has no gradient.

    q is (batch, seqlen_q, heads_q, head_dim), k_cache and v_cache are (batch, seqlen_cache, heads_kv, head_dim). The
    caches are read in place: views of larger tensors with a unit last stride and others of multiples of 16 bytes. What
    they hold beyond cache_seqlens is never looked at. New keys and values are for the caller to write, before the call.

    Args:
        cache_seqlens: int32 (batch,), how many keys of each sequence are in use, on the device of q; None for all.
        causal: query i sees the keys up to i + cache_seqlens - seqlen_q: aligned bottom-right, to the length in use.
        window_size: as in flash_attn_func, aligned likewise.
        num_splits: how many CTAs share the keys of a tile, up to 128; 0 to choose by the shapes. The choice depends on
            the batch; for bits that do not, name a number.
        return_lse: whether to return the log-sum-exp of each row of scores too.
        out, lse: written if given, allocated if not.

    Returns:
        out, of q's shape and dtype; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) float32, natural
        logarithm. A query that sees no key gets out 0 and lse -inf.

    Raises:
        UnsupportedProblem: fa3 lacks it, or a gradient is asked for.
        TypeError, ValueError: an argument is wrong. The values in cache_seqlens are checked on a CPU only: on a GPU
            that would wait for it, and a length beyond the cache's is undefined there.
    """
    arguments = (softmax_scale, causal, window_size, softcap, num_splits)
    if torch.compiler.is_compiling():
        results = _call_operator(q, k_cache, v_cache, cache_seqlens, arguments)
        out, lse = (x if given is None else given.copy_(x) for x, given in zip(results, (out, lse), strict=True))
    else:
        out, lse = _attend(q, k_cache, v_cache, cache_seqlens, arguments, out, lse)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    arguments: tuple,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs what was prepared for a call like this one, now or earlier."""
    tensors = (q, k_cache, v_cache, cache_seqlens, out, lse)
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
            _refuse_gradient()
        given = None
        if out is not None or lse is not None:
            given = (out is None or (out.stride(), out.get_device()), lse is None or (lse.get_device(),))
        device_of_lengths = None if cache_seqlens is None else cache_seqlens.get_device()
        # As in fa_common/generation.py: what the choices depend on, and what a kernel does not check.
        # fmt: off
        key = (
            q.shape, q.stride(), q.dtype, q.get_device(), k_cache.shape, k_cache.stride(), k_cache.get_device(),
            v_cache.stride(), v_cache.get_device(), device_of_lengths, arguments, given,
        )
        # fmt: on
        run = _runs.get(key)
    except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed
        _checked(*tensors, arguments)  # raises the error that names it
        raise
    if run is None:
        problem, num_splits = _checked(*tensors, arguments)
        if problem.device == "cpu" or problem.is_empty:
            return _run_algorithm(problem, num_splits, *tensors)
        run = _prepare(problem, num_splits, q, cache_seqlens is not None)
        _runs.keep(key, run)
    try:
        return run(*tensors)
    except (TypeError, ValueError):  # a kernel's refusal
        if q.data_ptr() % ALIGNMENT == 0:
            _checked(*tensors, arguments)
            raise
    return _attend(q.clone(memory_format=CONTIGUOUS), k_cache, v_cache, cache_seqlens, arguments, out, lse)


def _prepare(problem: Problem, num_splits: int, q: Tensor, has_lengths: bool) -> Run:
    """Compiles or loads the kernels and makes every choice of a call whose tensors are laid out like these."""
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    config = decode_config(problem)
    num_splits = num_splits or choose_splits(problem, config, num_sms)
    attend = load(attention_key(problem, config, num_splits, has_lengths), build_forward)
    merge = load(merge_key(problem), build_merge) if num_splits > 1 else None
    numbers = (problem.softmax_scale, problem.softcap, *problem.bounds, num_sms, num_splits)
    copy_q = is_unreadable(q)
    allocate_out = torch.empty_like
    if not (copy_q or q.is_contiguous()):
        allocate_out = functools.partial(torch.empty_like, memory_format=CONTIGUOUS)
    shapes = (lse_shape(q), (num_splits, *q.shape), (num_splits, *lse_shape(q)))
    allocate_lse, allocate_parts, allocate_their_lse = (allocation(x, torch.float32, q.device) for x in shapes)

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if copy_q:
            q = q.clone(memory_format=CONTIGUOUS)
        if out is None:
            out = allocate_out(q)
        if lse is None:
            lse = allocate_lse()
        if merge is None:
            attend(q, k_cache, v_cache, out, lse, None, cache_seqlens, None, *numbers)
        else:
            out_split, lse_split = allocate_parts(), allocate_their_lse()
            attend(q, k_cache, v_cache, out_split, lse_split, None, cache_seqlens, None, *numbers)
            merge(out_split, lse_split, out, lse)
        return out, lse

    return run


def _run_algorithm(
    problem: Problem,
    num_splits: int,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The run that needs no kernel: the algorithm, one sequence after the other, or a result without any score."""
    out = q.new_empty(q.shape) if out is None else out
    lse = q.new_empty(lse_shape(q), dtype=torch.float32) if lse is None else lse
    forward = functools.partial(
        algorithm.forward if num_splits <= 1 else functools.partial(algorithm.forward_split, num_splits=num_splits),
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
                out[one], lse[one] = forward(q[one], k_cache[one, :length], v_cache[one, :length])
    return out, lse


# ---- Choices


def decode_config(problem: Problem) -> Config:
    """What the attention kernel is built from: a tile that few queries fill, as many blocks in flight as there is room.

    The query heads that share a head of K and V are rows of one tile, so that it is read once for all of them.
    """
    if problem.seqlen_q * problem.group > 64:
        # The launch brings no counter to draw tiles from.
        return replace(default_config(problem), scheduler="static")
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

    def wave_us(num_ctas: int) -> float:
        return TILE_US + share * block_bytes * max(num_ctas / BYTES_PER_US, 1 / SM_BYTES_PER_US)

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


def attention_key(problem: Problem, config: Config, num_splits: int, has_lengths: bool) -> KernelKey:
    """The attention kernel of a call; without lengths it is that of a dense one."""
    key = GENERATION.forward_key(problem, config)
    return replace(key, sequences="cached" if has_lengths else "dense", splits=num_splits > 1)


def merge_key(problem: Problem) -> KernelKey:
    """The kernel that merges a call's splits."""
    return KernelKey("fa3", "merge", problem.dtype_name, problem.head_dim, causal=False, config=None)


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
    out: Tensor | None,
    lse: Tensor | None,
    arguments: tuple,
) -> tuple[Problem, int]:
    """The problem and num_splits, or the error that names what is wrong or lacking."""
    softmax_scale, causal, window_size, softcap, num_splits = arguments
    # A bound that hides no key of the whole cache hides none of its used part, so the canonical mask holds for all
    # lengths.
    problem = Problem.from_tensors(
        q, k_cache, v_cache, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap
    )
    if problem.needs_grad:
        _refuse_gradient()
    if reason := GENERATION.why_not(problem):
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
    check_outputs(problem, q, out, lse)
    return problem, num_splits


def _refuse_gradient() -> None:
    raise UnsupportedProblem(
        "flash_attn_with_kvcache has no gradient: call under torch.no_grad(), or detach() q, k_cache and v_cache"
    )


def _check_cache(name: str, cache: Tensor) -> None:
    """That the kernel can read it where it is: a copy made in silence would be as large as the cache."""
    if is_unreadable(cache):
        raise ValueError(
            f"{name} must have a last stride of 1 and others that are multiples of {ALIGNMENT} bytes, it is never "
            f"copied; got strides {cache.stride()} of {cache.dtype}; allocate the cache so"
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
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, float? softmax_scale, bool causal, "
    "SymInt? window_left, SymInt? window_right, float softcap, SymInt num_splits) -> (Tensor, Tensor)"
)


@functools.partial(torch.library.custom_op, "fa3::with_kvcache", mutates_args=(), schema=_SCHEMA)
def _operator(q, k_cache, v_cache, cache_seqlens, softmax_scale, causal, left, right, softcap, num_splits):
    return _attend(q, k_cache, v_cache, cache_seqlens, (softmax_scale, causal, (left, right), softcap, num_splits))


@_operator.register_fake
def _(q, k_cache, v_cache, *arguments):
    return q.new_empty(q.shape), q.new_empty(lse_shape(q), dtype=torch.float32)


def _call_operator(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None, arguments: tuple
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        _refuse_gradient()
    softmax_scale, causal, (left, right), softcap, num_splits = arguments
    return torch.ops.fa3.with_kvcache.default(
        q, k_cache, v_cache, cache_seqlens, softmax_scale, causal, left, right, softcap, num_splits
    )
