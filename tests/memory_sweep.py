"""A small run of each kind of kernel, of all versions or of those named, to be watched by compute-sanitizer.

Lengths end inside a tile, and key/value heads are shared. tests/test_memory_gpu.py starts it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

import fa
import fa3
from tests.test_forward_gpu import Shape, make

SHAPES = (Shape(2, 130, 257, 4, 2), Shape(1, 1, 70, 2, 1))
MASKS = ({}, {"causal": True}, {"window_size": (40, 3), "softcap": 20.0})
HEAD_DIMS = (64, 128, 256)


def packed_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], dict]:
    """The same rows as three sequences one after the other, one of them without a query and one without a key."""
    (num_q, num_k), q, k, v = (q.shape[1], k.shape[1]), q[0], k[0], v[0]
    ends = [[0, num_q - 5, num_q - 5, num_q], [0, num_k - 3, num_k, num_k]]
    cu_seqlens_q, cu_seqlens_k = torch.tensor(ends, dtype=torch.int32, device="cuda")
    lengths = {"max_seqlen_q": num_q - 5, "max_seqlen_k": num_k - 3}
    return (q, k, v), {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **lengths}


def attend(version: str, function: Callable, tensors: tuple[Tensor, ...], **options) -> Iterator[Tensor]:
    """out and LSE; where there is a kernel for it, dq, dk and dv too."""
    has_backward = fa.GENERATIONS[version].capabilities.backward
    q, k, v = (x.detach().requires_grad_(has_backward) for x in tensors)
    out, lse = function(q, k, v, version=version, return_lse=True, **options)
    yield from (out.detach(), lse.detach())
    if has_backward:
        yield from torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def results(versions: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """What every kernel of these versions wrote, and which one."""
    for version, head_dim in product(versions, HEAD_DIMS):
        for shape, mask in product(SHAPES, MASKS):
            for result in attend(version, fa.flash_attn_func, make(shape, head_dim), **mask):
                yield f"{version} {head_dim} {shape} {mask}", result
        tensors, sequences = packed_like(*make(Shape(1, 135, 73, 4, 2), head_dim))
        for result in attend(version, fa.flash_attn_varlen_func, tensors, causal=True, **sequences):
            yield f"{version} {head_dim} packed", result
    if "fa3" not in versions:
        return
    for head_dim, causal, num_keys in product(HEAD_DIMS, (False, True), (257, 272)):  # V by rows, V by columns
        tensors = make(Shape(2, 130, num_keys, 4, 2), head_dim)
        yield f"fp8 {head_dim} {causal} {num_keys}", fa3.flash_attn_fp8_func(*tensors, causal=causal)
    for head_dim, num_splits in product(HEAD_DIMS, (1, 3)):
        q, k, v = make(Shape(3, 1, 300, 8, 2), head_dim)
        used = torch.tensor([300, 1, 0], dtype=torch.int32, device="cuda")
        out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, num_splits=num_splits)
        yield f"cache {head_dim}, {num_splits} splits", out
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, num_splits=num_splits)
        yield f"fp8 cache {head_dim}, {num_splits} splits", out


def main(versions: Sequence[str]) -> str | None:
    """What is wrong, if anything."""
    num_results = 0
    for title, result in results(versions):
        if result.isnan().any():
            return f"{title}: NaN"
        num_results += 1
    print(f"{num_results} results without NaN")  # noqa: T201 (for the test that started this)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(fa.GENERATIONS)))
