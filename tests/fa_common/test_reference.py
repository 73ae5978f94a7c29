"""The reference against PyTorch's own float64 attention and autograd through the textbook formula."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fa_common import reference

CASES = {
    "full": {"seqlens": (7, 9)},
    "causal": {"seqlens": (7, 9), "causal": True},
    "causal, more queries than keys": {"seqlens": (9, 4), "causal": True},
    "window": {"seqlens": (9, 9), "window": (3, 1)},
    "window before every key": {"seqlens": (9, 2), "window": (1, 2)},
    "softcap": {"seqlens": (7, 9), "softcap": 1.5},
    "softcap, causal, one window side": {"seqlens": (9, 9), "softcap": 0.5, "causal": True, "window": (4, None)},
    "GQA": {"seqlens": (5, 6), "heads": (6, 2), "causal": True},
    "scale": {"seqlens": (5, 6), "softmax_scale": 0.8},
}


def textbook(q, k, v, *, softmax_scale=None, causal=False, window=(None, None), softcap=0.0):
    """(out, lse) by dense formulas that autograd can follow; rows without keys excepted."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    S = torch.einsum("bmhd,bnhd->bhmn", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    position = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1]) - position
    left, right = (float("inf") if bound is None else bound for bound in window)
    hidden = (distance < -left) | (distance > (0 if causal else right))
    S = S.masked_fill(hidden, -1e300)  # finite, so that autograd stays defined; such a row is discarded
    has_key = ~hidden.all(-1)
    out = torch.einsum("bhmn,bnhd->bmhd", S.softmax(-1), v)
    return out * has_key[:, None, None], S.logsumexp(-1), has_key


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case):
    options = dict(case)
    (seqlen_q, seqlen_k), (heads_q, heads_kv) = options.pop("seqlens"), options.pop("heads", (2, 2))
    q = torch.randn(2, seqlen_q, heads_q, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, seqlen_k, heads_kv, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected_out, expected_lse, has_key = textbook(q, k, v, **options)
    dout = torch.randn_like(expected_out)
    dlse = torch.randn_like(expected_lse)
    expected = torch.autograd.grad(
        (expected_out, expected_lse), (q, k, v), (dout, dlse.masked_fill(~has_key, 0)), allow_unused=True
    )

    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = reference.attention(q, k, v, **options)
    torch.testing.assert_close(out, expected_out.detach())
    torch.testing.assert_close(lse, expected_lse.detach().masked_fill(~has_key, -torch.inf))
    torch.testing.assert_close(reference.gradients(dout, q, k, v, dlse=dlse, **options), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_pytorch_agrees(causal):
    q, k, v = (torch.randn(2, 33, 3, 8, dtype=torch.float64) for _ in range(3))
    out, _ = reference.attention(q, k, v, causal=causal)
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=["no batch", "no queries", "no keys"])
def test_empty(shape):
    batch, seqlen_q, seqlen_k = shape
    q, k = torch.randn(batch, seqlen_q, 4, 8), torch.randn(batch, seqlen_k, 2, 8)
    out, lse = reference.attention(q, k, k)
    assert torch.equal(out, torch.zeros_like(q, dtype=torch.float64))
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf, dtype=torch.float64))
    for gradient, like in zip(reference.gradients(q, q, k, k), (q, k, k), strict=True):
        assert torch.equal(gradient, torch.zeros_like(like, dtype=torch.float64))


def test_inputs_of_16_bits_are_computed_in_64():
    q = torch.randn(1, 5, 1, 8, dtype=torch.bfloat16)
    assert all(x.dtype == torch.float64 for x in reference.attention(q, q, q))
    assert all(x.dtype == torch.float64 for x in reference.gradients(q, q, q, q))


def test_slices_of_queries_change_nothing(monkeypatch):
    q, k = torch.randn(2, 11, 4, 8), torch.randn(2, 13, 2, 8)
    options = {"causal": True, "softcap": 2.0}
    whole = (*reference.attention(q, k, k, **options), *reference.gradients(q, q, k, k, **options))
    monkeypatch.setattr(reference, "MAX_SCORES", 3 * 2 * 4 * 13)  # three queries at a time
    sliced = (*reference.attention(q, k, k, **options), *reference.gradients(q, q, k, k, **options))
    torch.testing.assert_close(sliced, whole)
