"""One attention call as plain numbers: the contract's input checks, and what the call costs at least."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fa_common.masks import Mask

Direction = Literal["fwd", "bwd", "fwd+bwd"]
Window = tuple[int | None, int | None]

MAX_HEAD_DIM = 256
UNBOUNDED = 2**30  # keys: further than any sequence reaches, and no sum with a position overflows 32 bits
FLOP_FACTORS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # the backward has five products where the forward has two


class UnsupportedProblem(ValueError):
    """A meaningful attention problem that is refused, with the reason: nothing here is ignored in silence."""


@dataclass(frozen=True)
class Problem:
    """What one call asks for. One that exists is well-formed; whether a generation has it, its Capabilities say.

    Raises ValueError, or UnsupportedProblem for a head_dim outside the contract.
    """

    batch: int
    seqlen_q: int  # varlen: an upper bound of the sequences' lengths, max_seqlen_q
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"  # or "cpu"
    arch: int | None = 90  # 90 for sm_90; None on a CPU
    softmax_scale: float | None = None  # None becomes head_dim ** -0.5
    causal: bool = False
    window: Window = (None, None)  # (left, right), inclusive; None is unbounded; causal bounds right by 0 as well
    softcap: float = 0.0  # 0 is off
    varlen: bool = False
    total_q: int | None = None  # None becomes batch * seqlen_q
    total_k: int | None = None
    needs_grad: bool = False
    deterministic: bool = False
    seqlens: tuple[tuple[int, int], ...] | None = None  # varlen: (seqlen_q, seqlen_k) of each sequence, if known here

    def __post_init__(self):
        _check_heads(self.heads_q, self.heads_kv)
        _check_head_dim(self.head_dim)
        defaults = {
            "softmax_scale": self.head_dim**-0.5,
            "total_q": self.batch * self.seqlen_q,
            "total_k": self.batch * self.seqlen_k,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_number("softmax_scale", self.softmax_scale)
        if self.softmax_scale <= 0:
            # The kernels take the row maximum before they scale, and mask with -inf: 0 * -inf is NaN.
            raise ValueError(f"softmax_scale must be positive; got {self.softmax_scale}; fold a sign into q instead")
        _check_number("softcap", self.softcap)
        if self.softcap < 0:
            raise ValueError(f"softcap must be positive, or 0 for none; got {self.softcap}")
        _check_flag("causal", self.causal)
        _check_flag("deterministic", self.deterministic)

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        softcap: float = 0.0,
        deterministic: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> "Problem":
        """The problem these arguments pose, every one of them checked.

        q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim). With cu_seqlens
        (int32, (batch + 1,), from 0 to the total) they are (total, heads, head_dim). What would need the values of a
        GPU tensor is not checked there: reading them would wait for the GPU.

        Raises TypeError or ValueError naming the argument, UnsupportedProblem for a head_dim or device that none has.
        """
        varlen = any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
        _check_tensors(q, k, v, varlen)
        seqlens = None
        if varlen:
            lengths_q = _check_cu_seqlens("q", q, cu_seqlens_q, max_seqlen_q)
            lengths_k = _check_cu_seqlens("k", k, cu_seqlens_k, max_seqlen_k)
            if cu_seqlens_q.shape != cu_seqlens_k.shape:
                raise ValueError(
                    f"cu_seqlens_q and cu_seqlens_k must describe the same number of sequences; got "
                    f"{cu_seqlens_q.shape[0] - 1} and {cu_seqlens_k.shape[0] - 1}"
                )
            batch, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k
            total_q, total_k = q.shape[0], k.shape[0]
            if lengths_q is not None:
                seqlens = tuple(zip(lengths_q, lengths_k, strict=True))
        else:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
            total_q, total_k = batch * seqlen_q, batch * seqlen_k
        causal, window = _canonical_mask(causal, window_size, seqlen_q, seqlen_k)
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=q.shape[-2],
            heads_kv=k.shape[-2],
            head_dim=q.shape[-1],
            dtype=q.dtype,
            device=q.device.type,
            arch=_arch(q.device),
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            softcap=softcap,
            varlen=varlen,
            total_q=total_q,
            total_k=total_k,
            needs_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            deterministic=deterministic,
            seqlens=seqlens,
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def group(self) -> int:
        """Query heads that share one head of K and V (GQA, MQA); 1 is MHA."""
        return self.heads_q // self.heads_kv

    @property
    def is_empty(self) -> bool:
        """No score exists, so there is nothing to launch: out is 0 and LSE is -inf, or both have no element."""
        return self.batch == 0 or self.total_q == 0 or self.total_k == 0

    @property
    def mask_name(self) -> str:
        """The mask in words: "full", "causal", "window (64, 0)", ..."""
        if self.window == (None, None):
            return "causal" if self.causal else "full"
        return f"{'causal, ' if self.causal else ''}window ({self.window[0]}, {self.window[1]})"

    @property
    def bounds(self) -> tuple[int, int]:
        """How many keys before and behind its own position a query sees, in the numbers that kernels are given."""
        left, right = (UNBOUNDED if bound is None else bound for bound in self.window)
        return left, 0 if self.causal else right

    @property
    def pairs(self) -> float:
        """(query, key) pairs that one head attends to, over the whole batch.

        Exact for every mask, but square causal sequences count seqlen ** 2 / 2, the convention of the literature.
        Raises ValueError for a varlen problem without `seqlens`.
        """
        if not self.varlen:
            return self.batch * self._pairs_of(self.seqlen_q, self.seqlen_k)
        if self.seqlens is None:
            raise ValueError(
                "the work of a varlen problem depends on its sequences' lengths, which only the GPU knows here; "
                "replace(problem, seqlens=...) with their (seqlen_q, seqlen_k)"
            )
        return sum(self._pairs_of(*lengths) for lengths in self.seqlens)

    def flops(self, direction: Direction = "fwd") -> int:
        """FLOPs of the matrix products: 4 * head_dim * heads_q * pairs forward, 2.5 times that backward."""
        return int(FLOP_FACTORS[direction] * 4 * self.head_dim * self.heads_q * self.pairs)

    def bytes(self, direction: Direction = "fwd") -> int:
        """HBM bytes that no algorithm avoids: every input tensor read once, every output tensor written once."""
        queries = self.total_q * self.heads_q * self.head_dim * self.dtype.itemsize  # Q; as many O, dO, dQ
        keys = self.total_k * self.heads_kv * self.head_dim * self.dtype.itemsize  # K; as many V, dK, dV
        lse = self.total_q * self.heads_q * torch.float32.itemsize
        forward = 2 * queries + 2 * keys + lse
        backward = 4 * queries + 4 * keys + lse  # Q, O, dO, LSE, K, V in; dQ, dK, dV out
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]

    def _pairs_of(self, seqlen_q: int, seqlen_k: int) -> float:
        if self.causal and self.window == (None, None) and seqlen_q == seqlen_k:
            return seqlen_q**2 / 2
        return Mask(seqlen_q, seqlen_k, self.causal, self.window).num_pairs


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """The shape of LSE for this q: (batch, heads, seqlen_q), varlen (heads, total_q)."""
    *batch, seqlen, heads, _ = q.shape
    return (*batch, heads, seqlen)


def _check_heads(heads_q: int, heads_kv: int) -> None:
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(
            f"the heads of q must be a positive multiple of the heads of k and v (GQA); got {heads_q} and {heads_kv}; "
            "tensors are (batch, seqlen, heads, head_dim): transpose(1, 2) those with heads before seqlen"
        )


def _check_head_dim(head_dim: int) -> None:
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedProblem(
            f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}; got {head_dim}; up to there q, k and v can be "
            "padded with zeros, given the softmax_scale of the head_dim before padding"
        )


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a Python number; got {type(value).__name__}; pass float({name})")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {type(value).__name__}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, varlen: bool) -> None:
    """That q, k and v are tensors of one device and dtype whose shapes belong together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    layout = "(total, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    num_dims = 3 if varlen else 4
    if q.ndim != num_dims or k.ndim != num_dims or v.ndim != num_dims:
        other = "a padded batch goes to flash_attn_func" if varlen else "packed sequences go to flash_attn_varlen_func"
        raise ValueError(f"q, k and v must be {layout}; got {shapes}; {other}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, {layout}; got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k and v must have one head_dim, their last dimension; got {shapes}")
    if not varlen and q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k and v must have one batch, their first dimension; got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"q, k and v must have one dtype; got {dtypes}; convert with .to(dtype)")
    if not q.device == k.device == v.device:
        devices = f"{q.device}, {k.device}, {v.device}"
        raise ValueError(f"q, k and v must be on one device; got {devices}; move with .to(device)")


def _check_cu_seqlens(side: str, tensor: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> list[int] | None:
    """Checks one side's description of its sequences; their lengths where reading them costs no synchronisation."""
    name, max_name = f"cu_seqlens_{side}", f"max_seqlen_{side}"
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be an int32 tensor (batch + 1,); got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"{name} must be int32; got {cu_seqlens.dtype}; convert it once, with .to(torch.int32)")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or not cu_seqlens.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous of shape (batch + 1,); got shape {tuple(cu_seqlens.shape)}, "
            f"strides {cu_seqlens.stride()}"
        )
    if cu_seqlens.device != tensor.device:
        raise ValueError(f"{name} must be on the device of {side}, {tensor.device}; got {cu_seqlens.device}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int):
        raise TypeError(
            f"{max_name} must be a Python int; got {type(max_seqlen).__name__}; compute it where the lengths are known "
            "(int() of a GPU tensor waits for the GPU)"
        )
    if max_seqlen < 0:
        raise ValueError(f"{max_name} must not be negative; got {max_seqlen}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or min(lengths, default=0) < 0 or bounds[-1] != tensor.shape[0]:
        raise ValueError(
            f"{name} must start at 0, never decrease and end at the total of {side}, {tensor.shape[0]}; got {bounds}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"{max_name} must be at least the longest sequence, {max(lengths)}; got {max_seqlen}")
    return lengths


def _canonical_mask(causal: bool, window_size: Window, seqlen_q: int, seqlen_k: int) -> tuple[bool, Window]:
    """(causal, window), the one spelling of each mask: a bound that hides no key is None, a right bound of 0 causal."""
    _check_flag("causal", causal)
    if not isinstance(window_size, tuple) or len(window_size) != 2:
        raise TypeError(f"window_size must be a tuple (left, right); got {window_size!r}")
    for bound in window_size:
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"window_size must hold ints or None; got {window_size!r}")
        if bound is not None and bound < -1:
            raise ValueError(
                f"window_size must hold distances of at least 0, or None (also -1) for no bound; got {window_size!r}"
            )
    left, right = (None if bound == -1 else bound for bound in window_size)
    right = 0 if causal else right
    if left is not None and left >= seqlen_k - 1:  # the last query reaches the first key
        left = None
    if right is not None and right >= seqlen_q - 1:  # the first query reaches the last key
        right = None
    return (True, (left, None)) if right == 0 else (False, (left, right))


def _arch(device: torch.device) -> int | None:
    """90 for sm_90; None for a CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    raise UnsupportedProblem(f"q, k and v must be on a CUDA GPU or a CPU; got device {device}; move with .to(device)")
