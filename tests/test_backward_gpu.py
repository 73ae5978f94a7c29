"""The backward kernels on a Hopper GPU: gradients against float64, and every promise about memory, bits and streams.

One test holds one kernel against many shapes, as in test_forward_gpu.py, and its failure names the shape. A kernel that
hangs cannot be interrupted: each generation's runs once in a process of its own before any test trusts it.
"""

import functools
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fa
from fa_common import reference
from fa_common.masks import Mask

pytestmark = pytest.mark.gpu

VERSIONS = [version for version in ("fa1", "fa2", "fa3") if import_module(version).CAPABILITIES.backward]
TIMEOUT_S = 240  # for the first kernels of a generation, compiled and run
FIRST_RUN = """
import torch
from importlib import import_module
module = import_module({version!r})
for seqlen_q, seqlen_k, causal in ((1, 1, False), (64, 128, False), (257, 385, False), (130, 130, True)):
    q = torch.randn(1, seqlen_q, 2, 64, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, seqlen_k, 1, 64, dtype=torch.bfloat16, device="cuda")
    out, lse = module.forward(q, k, v, causal=causal)
    for deterministic in (False, True):
        module.backward(out, q, k, v, out, lse, causal=causal, deterministic=deterministic)
        torch.cuda.synchronize()
"""

every_version = pytest.mark.parametrize("version", VERSIONS)
full_and_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@functools.cache
def why_unfit(version: str) -> str | None:
    """Why no test of this process should run the generation's backward; None if it has run."""
    command = [sys.executable, "-c", FIRST_RUN.format(version=version)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    return run.stderr[-2000:] if run.returncode else None


@pytest.fixture(autouse=True)
def fit(request) -> None:
    version = request.node.callspec.params["version"]
    if request.node.originalname != "test_runs_to_its_end" and why_unfit(version):
        pytest.skip(f"{version}'s backward does not run: see test_runs_to_its_end")


@every_version
def test_runs_to_its_end(version):
    assert not why_unfit(version)


class Shape(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 2
    heads_kv: int = 2


# Lengths around every tile, as MHA, GQA and MQA in turn; FA#436, FA#1778.
LENGTHS = (1, 31, 63, 64, 65, 127, 128, 129, 191, 193, 257, 385)
HEADS = ((2, 2), (6, 2), (4, 1))
SHAPES = [
    *(Shape(2, length, length, *HEADS[i % len(HEADS)]) for i, length in enumerate(LENGTHS)),
    *(Shape(2, *lengths) for lengths in [(2, 5), (5, 2), (5, 6)]),
    *(Shape(2, *lengths, 4, 2) for lengths in [(1, 257), (257, 1), (64, 129), (129, 64), (193, 600), (600, 193)]),
    Shape(1, 1030, 1030, 1, 1),
]
FEW_SHAPES = [Shape(2, 129, 193, 4, 2), Shape(1, 257, 130, 3, 1), Shape(1, 1, 65)]


class Options(NamedTuple):
    """What changes the values."""

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    scale: float | None = None

    @property
    def call(self) -> dict:
        return {
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "softmax_scale": self.scale,
        }

    @property
    def reference(self) -> dict:
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "softmax_scale": self.scale,
        }


def make(shape: Shape, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v."""
    q = torch.randn(shape.batch, shape.seqlen_q, shape.heads_q, head_dim, dtype=dtype, device="cuda")
    k, v = torch.randn(2, shape.batch, shape.seqlen_k, shape.heads_kv, head_dim, dtype=dtype, device="cuda")
    return q, k, v


def gradients(version: str, tensors, dout=None, dlse=None, **options) -> tuple[tuple[Tensor, ...], Tensor]:
    """(dq, dk, dv) outside autograd, and dout, random if not given."""
    module = import_module(version)
    deterministic = options.pop("deterministic", False)
    out, lse = module.forward(*tensors, **options)
    dout = torch.randn_like(out) if dout is None else dout
    found = module.backward(dout, *tensors, out, lse, dlse=dlse, deterministic=deterministic, **options)
    return found, dout


def eager_gradients(dout: Tensor, tensors, options: Options, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
    """By PyTorch's autograd through products and a softmax of the inputs' own type."""
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    group = q.shape[2] // k.shape[2]
    Q, K, V = (x.transpose(1, 2) for x in (q, k, v))
    K, V = (x.repeat_interleave(group, dim=1) for x in (K, V))
    mask = Mask(q.shape[1], k.shape[1], options.causal, options.window)
    visible = mask.visible(slice(0, mask.seqlen_q), slice(0, mask.seqlen_k), q.device)
    S = (Q * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)) @ K.mT
    if options.softcap:
        S = options.softcap * torch.tanh(S / options.softcap)
    # Finite, so that rows without keys have no NaN; their P is masked.
    S = S.masked_fill(~visible, torch.finfo(S.dtype).min)
    P = S.softmax(-1) * visible
    loss = ((P @ V).transpose(1, 2) * dout).sum()
    if dlse is not None:
        lse = S.float().logsumexp(-1)
        loss = loss + (lse * dlse).where(visible.any(-1), 0).sum()
    loss.backward()
    return q.grad, k.grad, v.grad


def check(name: object, found, dout: Tensor, tensors, options: Options, dlse: Tensor | None = None) -> None:
    exact = reference.gradients(dout, *tensors, dlse=dlse, **options.reference)
    assert_close(name, found, exact, eager_gradients(dout, tensors, options, dlse))


def assert_close(name: object, found, exact, theirs) -> None:
    """At most twice PyTorch's error against float64, plus a rounding of the result."""
    for what, ours, right, their in zip(("dq", "dk", "dv"), found, exact, theirs, strict=True):
        assert (ours.shape, ours.dtype) == (their.shape, their.dtype), (name, what)
        for norm, of in (("max", maximum), ("RMS", root_mean_square)):
            error, their_error = of(ours.double() - right), of(their.double() - right)
            # Where all terms cancel, what is left of their roundings is in proportion to them.
            bound = 2 * their_error + torch.finfo(ours.dtype).eps / 2 * max(of(right), 0.05)
            assert error <= bound, f"{name}: {norm} error of {what} {error:.2e}, bound {bound:.2e}"


def maximum(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_same_bits(found, expected, name: object = "", which=("dq", "dk", "dv")) -> None:
    for what, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        if what in which:
            assert torch.equal(x, y), f"{name}: {what} differs in {(x != y).sum()} of {x.numel()} elements"


def skip_unless_it_has(version: str, name: str) -> None:
    if not getattr(import_module(version).CAPABILITIES, name):
        pytest.skip(f"{version} has no {name}")


# ---- Values


@every_version
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [
        *(("bfloat16", head_dim, causal) for head_dim in (64, 128, 256) for causal in (False, True)),
        ("float16", 64, True),
    ],
    ids=lambda x: {True: "causal", False: "full"}.get(x, x) if isinstance(x, bool) else x,
)
def test_shapes(version, dtype, head_dim, causal):
    options = Options(causal=causal)
    for shape in SHAPES:
        tensors = make(shape, head_dim, getattr(torch, dtype))
        check(shape, *gradients(version, tensors, **options.call), tensors, options)


@every_version
@pytest.mark.parametrize("head_dim", [8, 72, 104, 192])
def test_every_head_dim(version, head_dim):
    """FA#1347, FA#2896: what lies behind each row in memory must not be taken for columns."""
    options = Options(causal=True)
    for shape in FEW_SHAPES:
        tensors = [torch.full((*x.shape[:-1], 256), torch.nan, dtype=x.dtype, device="cuda") for x in make(shape, 8)]
        tensors = [x[..., :head_dim].normal_() for x in tensors]
        check(shape, *gradients(version, tensors, **options.call), tensors, options)


@every_version
@pytest.mark.parametrize(
    ("head_dim", "window", "softcap"),
    [
        *((64, window, 0.0) for window in [(32, 64), (100, 0), (None, 7)]),
        (128, (70, 3), 0.0),
        (64, (None, None), 20.0),
        (128, (None, None), 1.0),
        *((head_dim, (40, 40), 5.0) for head_dim in (64, 256)),
    ],
)
def test_windows_and_softcaps(version, head_dim, window, softcap):
    """FA#2199, vllm#56579: windows that leave rows without keys and keys without queries, scores far above the cap."""
    if window != (None, None):
        skip_unless_it_has(version, "window")
    if softcap:
        skip_unless_it_has(version, "softcap")
    options = Options(window=window, softcap=softcap)
    for shape in [*FEW_SHAPES, Shape(1, 129, 16), Shape(1, 385, 385, 2, 1), Shape(2, 65, 300)]:
        q, k, v = make(shape, head_dim)
        tensors = (4 * q, k, v) if softcap else (q, k, v)
        check(shape, *gradients(version, tensors, **options.call), tensors, options)


@every_version
def test_softmax_scale(version):
    tensors = make(Shape(2, 129, 193), 64)
    for scale in (1e-3, 0.5):
        options = Options(scale=scale)
        check(scale, *gradients(version, tensors, **options.call), tensors, options)


@every_version
@full_and_causal
def test_a_loss_on_lse(version, causal):
    """FA#1817, FA#889."""
    options = Options(causal=causal)
    for shape in (Shape(2, 129, 193, 4, 2), Shape(1, 150, 70), Shape(1, 2, 1)):
        tensors = make(shape, 64)
        dlse = torch.randn(shape.batch, shape.seqlen_q, shape.heads_q, device="cuda").mT
        found, dout = gradients(version, tensors, dlse=dlse, **options.call)
        check(shape, found, dout, tensors, options, dlse)
        assert all(x.isfinite().all() for x in found)


@every_version
@pytest.mark.parametrize("scores", ["equal", "all very low", "one very high", "large"])
def test_extreme_scores(version, scores):
    """FA#2082; a key that no query sees may have any score at all."""
    q, k, v = make(Shape(2, 193, 257), 64)
    if scores == "large":
        q, k = 8 * q, 8 * k
    else:
        # A score is softmax_scale * 64 * q * k = k, with q = 1 / 8.
        q, k = torch.full_like(q, 1 / 8), torch.full_like(k, {"equal": 1.0, "all very low": -1e4}.get(scores, 0.0))
        if scores == "one very high":
            k[:, 11] = 1e4
    for causal in (False, True):
        found, dout = gradients(version, (q, k, v), causal=causal)
        assert all(x.isfinite().all() for x in found), scores
        if scores != "one very high":  # there dq is the difference of products of 1e4
            check(scores, found, dout, (q, k, v), Options(causal))


@every_version
@pytest.mark.parametrize("lengths", [(5, 2), (1024, 512)], ids=str)
def test_rows_without_keys(version, lengths):
    """FA#1778: gradients 0."""
    tensors = make(Shape(1, *lengths), 64)
    (dq, dk, dv), _ = gradients(version, tensors, causal=True)
    assert not dq[:, : lengths[0] - lengths[1]].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@every_version
@pytest.mark.parametrize("shape", [Shape(0, 5, 7), Shape(2, 0, 7), Shape(2, 5, 0), Shape(2, 0, 0)], ids=str)
def test_empty(version, shape):
    """FA#2470, FA#2515, FA#1159."""
    tensors = make(shape, 64)
    found, _ = gradients(version, tensors, causal=True)
    assert_same_bits(found, [torch.zeros_like(x) for x in tensors])


# ---- Packed sequences

PACKED = {
    "FA#443": ([76, 34, 146], [1, 1, 1], 1, 1),
    "FA#1537": ([1, 0, 1], [3, 0, 5], 9, 3),
    "FA#1713": ([150, 0, 150], [100, 100, 100], 2, 2),
    "FA#1254": ([0, 0, 1023], [1, 0, 2045], 2, 2),
    "no keys": ([64, 5, 70], [0, 64, 0], 2, 1),
    "around tiles": ([63, 64, 65, 1, 128], [129, 128, 127, 300, 1], 4, 2),
    "tiny": ([3] * 40, [2] * 40, 2, 2),
}


@every_version
@pytest.mark.parametrize("kind", ["full", "causal", "deterministic", "window and softcap"])
def test_packed_sequences(version, kind):
    skip_unless_it_has(version, "varlen")
    options = Options(causal=kind in ("causal", "deterministic"))
    if kind == "window and softcap":
        skip_unless_it_has(version, "window")
        options = Options(window=(50, 20), softcap=10.0)
    for name, (lengths_q, lengths_k, heads_q, heads_kv) in PACKED.items():
        q, _, _ = make(Shape(1, sum(lengths_q), 1, heads_q), 64)
        _, k, v = make(Shape(1, 1, sum(lengths_k), 1, heads_kv), 64)
        q, k, v = q[0], k[0], v[0]
        bounds = [torch.tensor([0, *lengths], device="cuda").cumsum(0).int() for lengths in (lengths_q, lengths_k)]
        sequences = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))
        sequences |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
        deterministic = kind == "deterministic"
        found, dout = gradients(version, (q, k, v), deterministic=deterministic, **options.call, **sequences)
        exact = [torch.zeros_like(x, dtype=torch.float64) for x in found]
        theirs = [torch.zeros_like(x) for x in found]
        for queries, keys in zip(*(pairwise(x.tolist()) for x in bounds), strict=True):
            slices = [slice(*queries), slice(*keys), slice(*keys)]
            tensors = [x[None, run] for x, run in zip((q, k, v), slices, strict=True)]
            one_dout = dout[None, slices[0]]
            if 0 in (tensors[0].shape[1], tensors[1].shape[1]):
                assert not any(x[run].any() for x, run in zip(found, slices, strict=True)), (name, queries, keys)
                continue
            one_exact = reference.gradients(one_dout, *tensors, **options.reference)
            one_theirs = eager_gradients(one_dout, tensors, options)
            for whole, ones in ((exact, one_exact), (theirs, one_theirs)):
                for x, run, one in zip(whole, slices, ones, strict=True):
                    x[run] = one[0]
        assert_close(name, found, exact, theirs)


# ---- Memory


@every_version
@pytest.mark.parametrize("view", ["expanded", "transposed", "slice", "inside NaN", "off by one", "heads before seqlen"])
def test_a_dout_of_any_strides(version, view):
    """FA#325, FA#355, FA#1149, FA#91."""
    tensors = make(Shape(2, 193, 257, 4, 2), 64)
    shape = tensors[0].shape
    dout = torch.randn_like(tensors[0])
    if view == "expanded":
        dout = torch.ones((), dtype=dout.dtype, device="cuda").expand(shape)
    elif view == "transposed":
        dout = dout.transpose(1, 3).contiguous().transpose(1, 3)
    elif view == "slice":
        dout = torch.randn(*shape[:-1], 67, dtype=dout.dtype, device="cuda")[..., :64]
    elif view == "inside NaN":
        larger = dout.new_full((2, 400, 5, 128), torch.nan)
        dout = larger[:, :193, :4, :64].copy_(dout)
    elif view == "off by one":
        dout = dout.new_empty(dout.numel() + 1)[1:].view(shape).copy_(dout)
    else:
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    expected, _ = gradients(version, tensors, dout.clone(memory_format=torch.contiguous_format), deterministic=True)
    found, _ = gradients(version, tensors, dout, deterministic=True)
    assert_same_bits(found, expected, view)


@every_version
@pytest.mark.parametrize("view", ["inside NaN", "projection", "expanded batch"])
def test_inputs_of_any_strides(version, view):
    """FA#1745, FA#2541, FA#2745."""
    q, k, v = make(Shape(2, 193, 193), 64)
    if view == "inside NaN":
        q, k, v = (x.new_full((2, 400, 3, 128), torch.nan)[:, :193, :2, :64].copy_(x) for x in (q, k, v))
    elif view == "projection":
        q, k, v = torch.stack((q, k, v), dim=2).unbind(2)
    else:
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    expected, dout = gradients(version, copies, causal=True, deterministic=True)
    found, _ = gradients(version, (q, k, v), dout, causal=True, deterministic=True)
    assert_same_bits(found, expected, view)


@every_version
def test_offsets_beyond_32_bits(version):
    """FA#1311, FA#767: the second batch entry lies 2^31 elements behind the first."""
    tensors = make(Shape(2, 129, 129), 64)
    expected, dout = gradients(version, tensors, deterministic=True)
    stride = 2**31
    far = []
    for x in (*tensors, dout):
        storage = x.new_empty(stride + x[0].numel())
        far.append(storage.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x))
    found, _ = gradients(version, far[:3], far[3], deterministic=True)
    assert_same_bits(found, expected)


# ---- Bits


@every_version
@full_and_causal
def test_deterministic_runs_repeat_bitwise(version, causal):
    """FA#2244, FA#1678: also while another stream keeps the GPU busy."""
    tensors = make(Shape(2, 513, 700, 8, 2), 64)
    expected, dout = gradients(version, tensors, causal=causal, deterministic=True)
    busy, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for run in range(100):
        if run % 2:
            with torch.cuda.stream(busy):
                a @ a
        found, _ = gradients(version, tensors, dout, causal=causal, deterministic=True)
        assert_same_bits(found, expected, f"run {run}")


@every_version
@full_and_causal
def test_dk_and_dv_repeat_bitwise_in_any_case(version, causal):
    """Only dQ is added up by several CTAs."""
    tensors = make(Shape(2, 513, 700, 8, 2), 64)
    expected, dout = gradients(version, tensors, causal=causal)
    for run in range(10):
        found, _ = gradients(version, tensors, dout, causal=causal)
        assert_same_bits(found, expected, f"run {run}", which=("dk", "dv"))


@every_version
def test_many_small_batches_repeat(version):
    """FA#359."""
    tensors = make(Shape(300, 512, 128, 1, 1), 128)
    expected, dout = gradients(version, tensors, deterministic=True)
    for run in range(10):
        found, _ = gradients(version, tensors, dout, deterministic=True)
        assert_same_bits(found, expected, f"run {run}")


# ---- Autograd, streams, graphs, devices


@every_version
def test_autograd_launches_the_kernel(version):
    tensors = [x.requires_grad_() for x in make(Shape(2, 129, 193, 4, 2), 64)]
    out, lse = fa.flash_attn_func(*tensors, version=version, causal=True, deterministic=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    plain = [x.detach() for x in tensors]
    expected, _ = gradients(version, plain, dout, dlse=dlse, causal=True, deterministic=True)
    assert_same_bits(found, expected)
    out = fa.flash_attn_func(*tensors, version=version)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


@every_version
def test_torch_compile_without_breaks(version):
    """FA#1435."""

    def loss(q, k, v):
        out, lse = fa.flash_attn_func(q, k, v, version=version, causal=True, deterministic=True, return_lse=True)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True)
    for seqlen in (129, 200):
        tensors = [x.requires_grad_() for x in make(Shape(1, seqlen, seqlen), 64)]
        expected = torch.autograd.grad(loss(*tensors), tensors)
        for x, y in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@every_version
def test_a_side_stream_with_a_slow_producer(version):
    """FA#1957."""
    q, k, v = make(Shape(2, 257, 257), 64)
    expected, dout = gradients(version, (q, k, v), deterministic=True)
    late_dout, stream = torch.zeros_like(dout), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles
        late_dout.copy_(dout)
        found, _ = gradients(version, (q, k, v), late_dout, deterministic=True)
    stream.synchronize()
    assert_same_bits(found, expected)


@every_version
def test_a_captured_graph_replays_with_new_inputs(version):
    shape = Shape(2, 257, 129, 4, 2)
    tensors = make(shape, 64)
    _, dout = gradients(version, tensors, causal=True, deterministic=True)  # compiles, outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = gradients(version, tensors, dout, causal=True, deterministic=True)
    for _ in range(2):
        fresh = make(shape, 64)
        for static, new in zip(tensors, fresh, strict=True):
            static.copy_(new)
        graph.replay()
        expected, _ = gradients(version, fresh, dout, causal=True, deterministic=True)
        assert_same_bits(found, expected)


@every_version
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one(version):
    """FA#54, FA#1782."""
    tensors = [x.to("cuda:1") for x in make(Shape(2, 129, 129), 64)]
    with torch.cuda.device(0):
        found, dout = gradients(version, tensors, causal=True)
    check("cuda:1", found, dout, tensors, Options(causal=True))
