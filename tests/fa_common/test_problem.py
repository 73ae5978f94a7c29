"""A Problem: every check of the contract by its message, one spelling of each mask, and what a problem costs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa_common.problem import Problem, UnsupportedProblem, lse_shape

bounds = st.one_of(st.none(), st.integers(-1, 12))


def qkv(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_kv=2, head_dim=16, dtype=torch.bfloat16):
    q = torch.zeros(batch, seqlen_q, heads_q, head_dim, dtype=dtype)
    k, v = torch.zeros(2, batch, seqlen_k, heads_kv, head_dim, dtype=dtype)
    return q, k, v


def packed(lengths_q=(2, 0, 3), lengths_k=(1, 4, 2), head_dim=16):
    """(q, k, v) and the keyword arguments that describe their sequences."""
    q = torch.zeros(sum(lengths_q), 4, head_dim, dtype=torch.float16)
    k, v = torch.zeros(2, sum(lengths_k), 2, head_dim, dtype=torch.float16)
    sequences = {
        "cu_seqlens_q": cumulated(lengths_q),
        "cu_seqlens_k": cumulated(lengths_k),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return (q, k, v), sequences


def cumulated(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def visible_pairs(seqlen_q, seqlen_k, causal, window):
    """The mask by its definition: (query, key) pairs, aligned bottom-right."""
    left, right = (None if bound == -1 else bound for bound in window)
    pairs = set()
    for i in range(seqlen_q):
        diagonal = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            before = left is None or j >= diagonal - left
            after = right is None or j <= diagonal + right
            if before and after and (not causal or j <= diagonal):
                pairs.add((i, j))
    return pairs


def test_a_problem_holds_what_the_tensors_say():
    q, k, v = qkv()
    problem = Problem.from_tensors(q, k, v, causal=True, softcap=3, deterministic=True)
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 5, 7)
    assert (problem.heads_q, problem.heads_kv, problem.group, problem.head_dim) == (4, 2, 2, 16)
    assert (problem.dtype, problem.dtype_name) == (torch.bfloat16, "bfloat16")
    assert (problem.device, problem.arch) == ("cpu", None)
    assert (problem.softmax_scale, problem.causal, problem.softcap) == (0.25, True, 3)
    assert (problem.varlen, problem.total_q, problem.total_k, problem.seqlens) == (False, 10, 14, None)
    assert (problem.needs_grad, problem.deterministic) == (False, True)


def test_a_packed_problem_knows_its_sequences():
    tensors, sequences = packed()
    problem = Problem.from_tensors(*tensors, **sequences)
    assert problem.varlen
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (3, 3, 4)
    assert (problem.total_q, problem.total_k) == (5, 7)
    assert problem.seqlens == ((2, 1), (0, 4), (3, 2))


def test_an_upper_bound_of_the_lengths_is_enough():
    tensors, sequences = packed()
    problem = Problem.from_tensors(*tensors, **sequences | {"max_seqlen_q": 100})
    assert problem.seqlen_q == 100


@pytest.mark.parametrize("needy", [0, 1, 2])
def test_needs_grad_is_what_autograd_says(needy):
    tensors = qkv()
    tensors[needy].requires_grad_()
    assert Problem.from_tensors(*tensors).needs_grad
    with torch.no_grad():
        assert not Problem.from_tensors(*tensors).needs_grad


def test_a_problem_by_its_sizes_is_a_dense_one_on_a_hopper_gpu():
    problem = Problem(batch=2, seqlen_q=64, seqlen_k=128, heads_q=4, heads_kv=4, head_dim=64)
    assert (problem.device, problem.arch, problem.dtype_name) == ("cuda", 90, "bfloat16")
    assert (problem.softmax_scale, problem.total_q, problem.total_k) == (0.125, 128, 256)
    assert replace(problem, device="cpu", arch=None) != problem
    assert hash(replace(problem)) == hash(problem)


def test_lse_has_the_heads_before_the_queries():
    assert lse_shape(torch.empty(2, 5, 4, 16)) == (2, 4, 5)
    assert lse_shape(torch.empty(5, 4, 16)) == (4, 5)


# ---- Refusals


@pytest.mark.parametrize("head_dim", [0, 4, 59, 111, 257, 264])
def test_a_head_dim_outside_the_rule_is_refused_with_the_rule(head_dim):
    """FA#1238."""
    with pytest.raises(UnsupportedProblem, match=f"multiple of 8 up to 256; got {head_dim}"):
        Problem.from_tensors(*qkv(head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 104, 120, 256])
def test_every_multiple_of_8_is_a_head_dim(head_dim):
    assert Problem.from_tensors(*qkv(head_dim=head_dim)).head_dim == head_dim


def test_heads_that_do_not_divide_hint_at_a_swapped_layout():
    """FA#1391: (batch, heads, seqlen, head_dim) reads as 1000 heads of q and 7 of k."""
    q, k, v = qkv(seqlen_q=4, heads_q=1000, heads_kv=7)
    with pytest.raises(ValueError, match=r"multiple .* got 1000 and 7; .*transpose\(1, 2\)"):
        Problem.from_tensors(q, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda q: q.tolist()}, "q must be a torch.Tensor; got list"),
        ({"v": lambda v: v.float().numpy()}, "v must be a torch.Tensor; got ndarray"),
        ({"q": lambda q: q[0]}, r"must be \(batch, seqlen, heads, head_dim\).*flash_attn_varlen_func"),
        ({"k": lambda k: k[:, :-1]}, "k and v must have one shape"),
        ({"q": lambda q: q[..., :8]}, "one head_dim"),
        ({"q": lambda q: q[:1]}, "one batch"),
        ({"v": lambda v: v.half()}, r"one dtype; got .*float16; convert with \.to"),
        ({"v": lambda v: v.to("meta")}, "one device; got cpu, cpu, meta"),
    ],
)
def test_tensors_that_do_not_belong_together(change, message):
    tensors = dict(zip("qkv", qkv(), strict=True))
    for name, function in change.items():
        tensors[name] = function(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        Problem.from_tensors(**tensors)


def test_a_device_that_is_neither_gpu_nor_cpu_is_refused():
    with pytest.raises(UnsupportedProblem, match="CUDA GPU or a CPU; got device meta"):
        Problem.from_tensors(*(x.to("meta") for x in qkv()))


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ({"softmax_scale": "1"}, TypeError, r"softmax_scale must be a Python number; got str"),
        ({"softmax_scale": torch.tensor(1.0)}, TypeError, r"got Tensor; pass float\(softmax_scale\)"),
        ({"softmax_scale": True}, TypeError, "softmax_scale must be a Python number; got bool"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be positive; got 0.0"),
        ({"softmax_scale": -1.0}, ValueError, "fold a sign into q"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite; got nan"),
        ({"softcap": None}, TypeError, "softcap must be a Python number; got NoneType"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive, or 0 for none; got -1.0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be finite; got inf"),
        ({"causal": 1}, TypeError, "causal must be True or False; got int"),
        ({"causal": torch.tensor(True)}, TypeError, "causal must be True or False; got Tensor"),
        ({"deterministic": None}, TypeError, "deterministic must be True or False"),
        ({"window_size": 128}, TypeError, r"tuple \(left, right\); got 128"),
        ({"window_size": [4, 4]}, TypeError, r"tuple \(left, right\); got \[4, 4\]"),
        ({"window_size": (4,)}, TypeError, r"tuple \(left, right\); got \(4,\)"),
        ({"window_size": (4, 1.0)}, TypeError, "ints or None"),
        ({"window_size": (True, 0)}, TypeError, "ints or None"),
        ({"window_size": (4, -2)}, ValueError, r"at least 0, or None .*got \(4, -2\)"),  # FA#1116
        ({"window_size": (-3, 4)}, ValueError, "at least 0, or None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_wrong_arguments(argument, error, message, varlen):
    tensors, sequences = packed() if varlen else (qkv(), {})
    with pytest.raises(error, match=message):
        Problem.from_tensors(*tensors, **sequences, **argument)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q must be an int32 tensor \(batch \+ 1,\); got NoneType"),
        ({"cu_seqlens_k": [0, 1, 5, 7]}, TypeError, "cu_seqlens_k must be an int32 tensor .* got list"),
        ({"cu_seqlens_q": cumulated((2, 0, 3), torch.int64)}, ValueError, r"int32; got torch.int64; .*to\(torch.int32"),
        ({"cu_seqlens_q": cumulated((2, 0, 3))[None]}, ValueError, r"contiguous of shape \(batch \+ 1,\); got shape"),
        ({"cu_seqlens_q": torch.zeros(8, dtype=torch.int32)[::2]}, ValueError, "contiguous"),
        ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, ValueError, "contiguous of shape"),
        ({"cu_seqlens_q": cumulated((2, 0, 3)).to("meta")}, ValueError, "on the device of q, cpu; got meta"),
        ({"cu_seqlens_q": cumulated((2, 3))}, ValueError, "same number of sequences; got 2 and 3"),
        ({"cu_seqlens_q": cumulated((2, 0, 3)) + 1}, ValueError, "start at 0"),
        ({"cu_seqlens_q": cumulated((5, -3, 3))}, ValueError, "never decrease"),
        ({"cu_seqlens_k": cumulated((1, 4, 1))}, ValueError, "end at the total of k, 7; got"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be a Python int; got NoneType"),
        ({"max_seqlen_q": torch.tensor(3)}, TypeError, "max_seqlen_q must be a Python int; got Tensor"),  # FA#2507
        ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k must be a Python int; got float"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must not be negative"),
        ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k must be at least the longest sequence, 4; got 3"),
    ],
)
def test_wrong_descriptions_of_packed_sequences(change, error, message):
    tensors, sequences = packed()
    with pytest.raises(error, match=message):
        Problem.from_tensors(*tensors, **sequences | change)


def test_padded_tensors_for_packed_sequences():
    _, sequences = packed()
    with pytest.raises(ValueError, match=r"must be \(total, heads, head_dim\).* flash_attn_func"):
        Problem.from_tensors(*qkv(), **sequences)


# ---- Masks and costs


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.tuples(bounds, bounds))
def test_one_spelling_of_each_mask(seqlen_q, seqlen_k, causal, window_size):
    """Whatever becomes of causal and window_size, the same pairs are visible, and they are counted right."""
    tensors = qkv(1, seqlen_q, seqlen_k)
    problem = Problem.from_tensors(*tensors, causal=causal, window_size=window_size)
    pairs = visible_pairs(seqlen_q, seqlen_k, causal, window_size)
    assert visible_pairs(seqlen_q, seqlen_k, problem.causal, problem.window) == pairs
    square_causal = problem.mask_name == "causal" and seqlen_q == seqlen_k
    assert problem.pairs == (seqlen_q**2 / 2 if square_causal else len(pairs))
    if pairs and len(pairs) == seqlen_q * seqlen_k:
        assert problem.mask_name == "full"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "full"),
        ({"window_size": (-1, -1)}, "full"),
        ({"window_size": (127, 127)}, "full"),
        ({"causal": True}, "causal"),
        ({"causal": True, "window_size": (None, 5)}, "causal"),
        ({"window_size": (127, 0)}, "causal"),  # FA#1133
        ({"window_size": (126, 0)}, "causal, window (126, None)"),
        ({"window_size": (16, 3)}, "window (16, 3)"),
        ({"window_size": (-1, 3)}, "window (None, 3)"),
    ],
    ids=str,
)
def test_masks_in_words(arguments, name):
    assert Problem.from_tensors(*qkv(1, 128, 128), **arguments).mask_name == name


def test_a_single_query_sees_every_key():
    assert Problem.from_tensors(*qkv(1, 1, 128), causal=True).mask_name == "full"


def test_flops_follow_the_convention():
    problem = Problem(batch=2, seqlen_q=64, seqlen_k=64, heads_q=4, heads_kv=2, head_dim=16)
    assert problem.flops() == 2 * 4 * 16 * 4 * 64 * 64
    assert replace(problem, causal=True).flops() == problem.flops() // 2
    assert problem.flops("bwd") == 2.5 * problem.flops()
    assert problem.flops("fwd+bwd") == 3.5 * problem.flops()


def test_bytes_read_each_input_and_write_each_output_once():
    problem = Problem(batch=2, seqlen_q=64, seqlen_k=32, heads_q=4, heads_kv=2, head_dim=16)
    q, k, lse = 2 * 64 * 4 * 16 * 2, 2 * 32 * 2 * 16 * 2, 2 * 64 * 4 * 4
    assert problem.bytes() == 2 * q + 2 * k + lse
    assert problem.bytes("bwd") == 4 * q + 4 * k + lse
    assert problem.bytes("fwd+bwd") == 6 * q + 6 * k + 2 * lse


def test_the_work_of_packed_sequences_is_the_sum_of_theirs():
    tensors, sequences = packed()
    problem = Problem.from_tensors(*tensors, **sequences, causal=True)
    expected = sum(len(visible_pairs(*lengths, True, (None, None))) for lengths in ((2, 1), (0, 4), (3, 2)))
    assert problem.pairs == expected
    assert problem.bytes() == (2 * 5 * 4 + 2 * 7 * 2) * 16 * 2 + 5 * 4 * 4
    with pytest.raises(ValueError, match="seqlens="):
        replace(problem, seqlens=None).flops()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "empty"), [(0, 7, True), (5, 0, True), (5, 7, False)])
def test_without_a_score_there_is_nothing_to_run(seqlen_q, seqlen_k, empty):
    assert Problem.from_tensors(*qkv(2, seqlen_q, seqlen_k)).is_empty is empty
    assert Problem.from_tensors(*qkv(0, seqlen_q, seqlen_k)).is_empty
