"""Merging attention over parts of the keys is attention over all of them, gradients included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa
from fa_common import reference


def qkv(seqlen_q=9, seqlen_k=24, heads_q=4, heads_kv=2, head_dim=16):
    shapes = ((2, seqlen_q, heads_q, head_dim), (2, seqlen_k, heads_kv, head_dim), (2, seqlen_k, heads_kv, head_dim))
    return tuple(torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)


def exact(q, k, v):
    """(out, lse) in float64, by operations that autograd follows."""
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) / q.shape[-1] ** 0.5
    out = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out, scores.logsumexp(-1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_parts_make_the_whole(lengths):
    q, k, v = qkv(seqlen_k=sum(lengths))
    parts = [exact(q, *part) for part in zip(k.split(lengths, 1), v.split(lengths, 1), strict=True)]
    out, lse = fa.merge(*zip(*parts, strict=True))
    expected = exact(q, k, v)
    torch.testing.assert_close((out, lse), expected)
    weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), (q, k, v), weights)
    assert all(x.isfinite().all() for x in gradients)
    if sum(lengths):
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), weights))


def test_the_order_of_the_parts_does_not_matter():
    q, k, v = qkv()
    outs, lses = zip(*(exact(q, k[:, keys], v[:, keys]) for keys in (slice(0, 5), slice(5, 24))), strict=True)
    torch.testing.assert_close(fa.merge(outs, lses), fa.merge(outs[::-1], lses[::-1]))


def test_scores_far_apart_neither_overflow_nor_vanish():
    q, k, v = qkv()
    with torch.no_grad():
        k[:, :5] *= 1e4
    parts = [exact(q, k[:, keys], v[:, keys]) for keys in (slice(0, 5), slice(5, 24))]
    torch.testing.assert_close(fa.merge(*zip(*parts, strict=True)), exact(q, k, v))


@pytest.mark.parametrize("version", ["fa1", "fa2", "fa3"])
def test_ring_attention_by_calls_on_parts_of_the_keys(version):
    """Out and gradients of a bfloat16 ring, LSE and its gradient in the middle, are as good as those of one call."""
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in qkv(heads_kv=4))
    parts = [
        fa.flash_attn_func(q, k[:, keys], v[:, keys], version=version, return_lse=True)
        for keys in (slice(0, 8), slice(8, 9), slice(9, 24))
    ]
    out, lse = fa.merge(*zip(*parts, strict=True))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact_inputs = [x.detach() for x in (q, k, v)]
    expected = (*reference.attention(*exact_inputs), *reference.gradients(dout, *exact_inputs))
    for x, y in zip((out, lse, *gradients), expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=8 * 2**-8 * y.abs().max().item())


def test_packed_sequences_merge_too():
    q, k, v = (x.detach().bfloat16()[0] for x in qkv(seqlen_q=24))
    cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
    whole = fa.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 14, 14, return_lse=True)
    halves = []
    for rows in (slice(0, 5), slice(5, None)):
        keys = torch.cat([torch.arange(0, 10)[rows], torch.arange(10, 24)[rows]])
        lengths = [len(range(10)[rows]), len(range(14)[rows])]
        cu_seqlens_k = torch.tensor([0, *lengths]).cumsum(0).int()
        arguments = (cu_seqlens, cu_seqlens_k, 14, max(lengths))
        halves.append(fa.flash_attn_varlen_func(q, k[keys], v[keys], *arguments, return_lse=True))
    out, lse = fa.merge(*zip(*halves, strict=True))
    torch.testing.assert_close(lse, whole[1])
    torch.testing.assert_close(out, whole[0], rtol=2e-2, atol=2e-2)


def test_a_query_that_no_part_shows_a_key():
    out, lse = torch.zeros(1, 3, 2, 8), torch.full((1, 2, 3), -torch.inf)
    merged_out, merged_lse = fa.merge([out, out], [lse, lse])
    assert not merged_out.any()
    assert merged_lse.isneginf().all()


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "at least one; got 0 outs, 0 lses"),
        ([torch.zeros(1, 3, 2, 8)], [], "one lse for each out"),
        ([torch.zeros(1, 3, 2, 8)], [torch.zeros(1, 3, 2)], r"lse \(1, 2, 3\); got out .* lse \(1, 3, 2\)"),
        ([torch.zeros(1, 3, 2, 8), torch.zeros(1, 4, 2, 8)], [torch.zeros(1, 2, 3)] * 2, r"got out \(1, 4, 2, 8\)"),
    ],
)
def test_parts_that_do_not_belong_together(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        fa.merge(outs, lses)
