"""The forward kernels on a Hopper GPU: values against float64, and every promise about memory, bits and streams.

A kernel is compiled for each (version, dtype, head_dim, causal), which takes seconds; running it takes microseconds. So
one test holds one kernel against many shapes, and its failure names the shape. "FA#443" and the like name the public
report of the input that once broke an attention kernel.
"""

from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fa
from fa_common import reference
from fa_common.masks import Mask
from fa_common.problem import Problem, Window
from fa_common.switches import label, switches, without

pytestmark = pytest.mark.gpu

VERSIONS = ("fa1", "fa2", "fa3")
CONFIGS = {version: import_module(f"{version}.config") for version in VERSIONS}
KERNELS = [
    pytest.param(version, dtype, head_dim, causal, id=f"{version}-{dtype}-{head_dim}-{'causal' if causal else 'full'}")
    for version in VERSIONS
    for dtype in CONFIGS[version].CAPABILITIES.dtypes
    for head_dim in (64, 128, 256)
    for causal in (False, True)
]
CANARY = 768.0  # of no meaning, and exact in every type

every_version = pytest.mark.parametrize("version", VERSIONS)
full_and_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


class Shape(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int = 2
    heads_kv: int = 2


# Lengths around every tile, as MHA, GQA and MQA in turn.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 385, 600)
HEADS = ((2, 2), (6, 2), (4, 1))
SHAPES = [
    *(Shape(2, length, length, *HEADS[i % len(HEADS)]) for i, length in enumerate(LENGTHS)),
    *(Shape(2, *lengths) for lengths in [(2, 5), (5, 2), (5, 6)]),  # FA#436
    *(Shape(2, *lengths, 4, 2) for lengths in [(1, 257), (257, 1), (64, 129), (129, 64), (193, 600), (600, 193)]),
    Shape(300, 9, 5, 1, 1),  # many tiny sequences, FA#2391
    Shape(1, 3, 3, 40, 8),  # more heads than queries, FA#1391
]


def shapes_of_few_iterations(tile_n: int) -> list[Shape]:
    """One, two, three and five key blocks, exactly and with one key more or less (tilelang#2566)."""
    return [Shape(1, 130, n * tile_n + extra) for n in (1, 2, 3, 5) for extra in (-1, 0, 1)]


def make(shape: Shape, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v."""
    q = torch.randn(shape.batch, shape.seqlen_q, shape.heads_q, head_dim, dtype=dtype, device="cuda")
    k, v = torch.randn(2, shape.batch, shape.seqlen_k, shape.heads_kv, head_dim, dtype=dtype, device="cuda")
    return q, k, v


def config_of(version: str, head_dim: int, causal: bool = False, dtype: torch.dtype = torch.bfloat16, seqlen: int = 1):
    """The generation's default for one length: one kernel for all the shapes of a test."""
    return CONFIGS[version].default_config(Problem(1, seqlen, seqlen, 1, 1, head_dim, dtype=dtype, causal=causal))


def attend(version: str, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    return fa.flash_attn_func(q, k, v, version=version, return_lse=True, **options)


def forward(version: str, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    return import_module(version).forward(q, k, v, **options)


class Expected(NamedTuple):
    """What a result is held against."""

    exact: tuple[Tensor, Tensor]  # (out, lse) in float64
    pytorch: tuple[Tensor, Tensor]  # the same by PyTorch's own math: out in the inputs' type, lse in float32
    size_of_scores: float  # what the roundings of an LSE are in proportion to, at least


def expect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
) -> Expected:
    """From the 16-bit inputs themselves."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = reference.attention(q, k, v, causal=causal, softmax_scale=scale, window=window, softcap=softcap)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mask = Mask(q.shape[2], k.shape[2], causal, window)
    visible = mask.visible(slice(0, mask.seqlen_q), slice(0, mask.seqlen_k), q.device)
    S, size_of_scores = scale * (q.float() @ k.float().mT), 1.0
    if softcap:
        # Near its cap a score is 1 less next to nothing, times softcap; and it was rounded before it was capped.
        size_of_scores = max(softcap, maximum(S))
        S = softcap * torch.tanh(S / softcap)
    S = S.masked_fill(~visible, -torch.inf)
    if softcap:  # unknown to scaled_dot_product_attention
        out = (S.softmax(-1) @ v.float()).to(q.dtype)
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    out = out.transpose(1, 2).nan_to_num()  # rows without keys
    return Expected(exact, (out, S.logsumexp(-1)), size_of_scores)


def check(name: object, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal=False, **options) -> None:
    """Against float64 of the same 16-bit inputs; the options are those of `expect`."""
    assert_close(name, out, lse, expect(q, k, v, causal, **options))


def assert_close(name: object, out: Tensor, lse: Tensor, expected: Expected) -> None:
    """At most twice PyTorch's error, plus a rounding of the result."""
    (expected_out, expected_lse), (pytorch_out, pytorch_lse), size_of_scores = expected
    assert out.dtype == pytorch_out.dtype, name
    assert lse.dtype == torch.float32, name
    assert torch.equal(lse.isneginf(), expected_lse.isneginf()), f"{name}: LSE is -inf in the wrong rows"
    assert not out[expected_lse.isneginf().mT].any(), f"{name}: a row without keys is not 0"
    lse, expected_lse, pytorch_lse = (x[~expected_lse.isneginf()] for x in (lse, expected_lse, pytorch_lse))
    for what, ours, exact, theirs, rounding, least in (
        ("out", out, expected_out, pytorch_out, torch.finfo(out.dtype).eps / 2, 0.0),
        # Exponential, sum and logarithm each round once or twice, and LSE is a sum with the row maximum.
        ("LSE", lse, expected_lse, pytorch_lse, 8 * torch.finfo(torch.float32).eps, size_of_scores),
    ):
        for norm, of in (("max", maximum), ("RMS", root_mean_square)):
            error, their_error = of(ours.double() - exact), of(theirs.double() - exact)
            bound = 2 * their_error + rounding * max(of(exact), least)
            assert error <= bound, f"{name}: {norm} error of {what} {error:.2e}, bound {bound:.2e}"


def maximum(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_same_bits(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], name: object = "") -> None:
    for what, x, y in zip(("out", "LSE"), results, expected, strict=True):
        assert torch.equal(x, y), f"{name}: {what} differs in {(x != y).sum()} of {x.numel()} elements"


# ---- Values


@pytest.mark.parametrize(("version", "dtype", "head_dim", "causal"), KERNELS)
def test_shapes(version, dtype, head_dim, causal):
    dtype = getattr(torch, dtype)
    short_and_long = {config_of(version, head_dim, causal, dtype, seqlen) for seqlen in (1, 4096)}
    for config in short_and_long:
        for shape in SHAPES + shapes_of_few_iterations(config.tile_n):
            q, k, v = make(shape, head_dim, dtype)
            out, lse = attend(version, q, k, v, causal=causal, config=config)
            check((shape, config), out, lse, q, k, v, causal)


@every_version
@full_and_causal
def test_the_default_config_of_each_shape(version, causal):
    shapes = [Shape(1, 600, 600), Shape(2, 193, 1100, 4, 1), Shape(64, 257, 257, 4, 4)]
    shapes += [Shape(2, 1, 300, 8, 1), Shape(2, 16, 257, 14, 2), Shape(2, 17, 257, 14, 2)]  # few queries of many heads
    for shape in shapes:
        q, k, v = make(shape, 64)
        check(shape, *attend(version, q, k, v, causal=causal), q, k, v, causal)


@every_version
@full_and_causal
@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 104, 120, 192, 248])
def test_every_head_dim(version, head_dim, causal):
    """FA#1347, FA#28, FA#1238: a head_dim that ends inside a tile is padded by the kernel's own loads."""
    for shape in [Shape(2, 129, 193, 4, 2), Shape(1, 257, 600), Shape(1, 1, 65)]:
        # What lies behind each row in memory must not be taken for columns.
        q, k, v = (torch.full((*x.shape[:-1], 256), torch.nan, dtype=x.dtype, device="cuda") for x in make(shape, 8))
        q, k, v = (x[..., :head_dim].normal_() for x in (q, k, v))
        check(shape, *attend(version, q, k, v, causal=causal), q, k, v, causal)


def variants() -> list:
    """(version, config) of everything that fa1's and fa2's Config can change; fa3's are in fa3/test_variants_gpu.py."""
    others = {
        "fa1": [{"q_splits": 2}, {"q_splits": 8}, {"tile_m": 16}, {"tile_n": 64}],
        "fa2": [{"tile_n": 32}, {"tile_m": 64}],
    }
    parameters = []
    for version, changes in others.items():
        config = config_of(version, 64)
        for switch in switches(config):
            variant = without(config, switch.name)
            parameters.append(pytest.param(version, variant, id=f"{version}-{label(variant)}"))
        for change in changes:
            name = ", ".join(f"{field}={value}" for field, value in change.items())
            parameters.append(pytest.param(version, replace(config, **change), id=f"{version}-{name}"))
    return parameters


@pytest.mark.parametrize(("version", "config"), variants())
@full_and_causal
def test_variants(version, config, causal):
    for shape in [Shape(1, 257, 385), Shape(2, 129, 64, 4, 2), *shapes_of_few_iterations(config.tile_n)]:
        q, k, v = make(shape, 64)
        check(shape, *attend(version, q, k, v, causal=causal, config=config), q, k, v, causal)


@every_version
@pytest.mark.parametrize("lengths", [(5, 2), (2048, 1024)], ids=str)
def test_rows_without_keys(version, lengths):
    """FA#1778: the first seqlen_q - seqlen_k rows."""
    seqlen_q, seqlen_k = lengths
    q, k, v = make(Shape(1, seqlen_q, seqlen_k), 128)
    out, lse = attend(version, q, k, v, causal=True)
    without_keys = seqlen_q - seqlen_k
    assert not out[:, :without_keys].any()
    assert lse[..., :without_keys].isneginf().all()
    assert lse[..., without_keys:].isfinite().all()
    check(lengths, out, lse, q, k, v, causal=True)


@every_version
@pytest.mark.parametrize("shape", [Shape(0, 5, 7), Shape(2, 0, 7), Shape(2, 5, 0), Shape(2, 0, 0)], ids=str)
def test_empty(version, shape):
    """FA#2470, FA#2515, FA#1159."""
    q, k, v = make(shape, 64)
    out, lse = attend(version, q, k, v, causal=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((shape.batch, 2, shape.seqlen_q), -torch.inf, device="cuda"))


@every_version
@pytest.mark.parametrize("scores", ["equal", "all very low", "one very high", "large"])
def test_extreme_scores(version, scores):
    """FA#2082: no overflow, no NaN, no row lost."""
    q, k, v = make(Shape(2, 193, 257), 64)
    if scores == "large":
        q, k = 20 * q, 20 * k
    else:
        # A score is softmax_scale * 64 * q * k = k, with q = 1 / 8.
        q, k = torch.full_like(q, 1 / 8), torch.full_like(k, {"equal": 1.0, "all very low": -1e4}.get(scores, 0.0))
        if scores == "one very high":
            k[:, 11] = 1e4
    check(scores, *attend(version, q, k, v, causal=True), q, k, v, causal=True)


@every_version
def test_softmax_scale(version):
    q, k, v = make(Shape(2, 129, 193), 64)
    for scale in (1e-3, 0.5):
        check(scale, *attend(version, q, k, v, softmax_scale=scale), q, k, v, scale=scale)


@every_version
def test_lse_is_the_natural_logarithm_of_the_sum(version):
    """pytorch#181645."""
    q, k, v = make(Shape(1, 65, 300), 64)
    _, lse = attend(version, torch.zeros_like(q), k, v)
    torch.testing.assert_close(lse, torch.full_like(lse, 300.0).log())


# ---- Memory


@every_version
@full_and_causal
@pytest.mark.parametrize("view", ["inside NaN", "projection", "heads before seqlen", "expanded batch", "off by one"])
def test_views_give_the_same_bits_as_copies(version, causal, view):
    q, k, v = make(Shape(2, 193, 193), 64)
    if view == "inside NaN":  # FA#1745: what lies beyond the end of a sequence, a head or a row
        q, k, v = (inside_nan(x) for x in (q, k, v))
    elif view == "projection":  # FA#2541
        q, k, v = torch.stack((q, k, v), dim=2).unbind(2)
    elif view == "heads before seqlen":  # FA#818
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    elif view == "expanded batch":  # FA#2745
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    else:  # FA#2745: a base pointer that no 16-byte load can start at
        q, k, v = (off_by_one(x) for x in (q, k, v))
    expected = attend(version, *(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)), causal=causal)
    assert_same_bits(attend(version, q, k, v, causal=causal), expected, view)


@every_version
@full_and_causal
def test_every_output_element_is_written_and_nothing_else(version, causal):
    """Canaries lie in and around out, as rows, heads, columns and batch entries, and in and around LSE; FA#1155."""
    for shape in (Shape(2, 193, 257), Shape(2, 1, 1), Shape(2, 129, 64, 4, 2)):
        q, k, v = make(shape, 64)
        expected = forward(version, q, k, v, causal=causal)
        around_out = q.new_full((4, shape.seqlen_q + 260, shape.heads_q + 2, 64 + 16), CANARY)
        around_lse = torch.full((expected[1].numel() + 256,), CANARY, device="cuda")
        out = around_out[1:-1, 130:-130, 1:-1, 8:-8]
        lse = around_lse[128:-128].view(expected[1].shape)
        forward(version, q, k, v, causal=causal, out=out, lse=lse)
        assert_same_bits((out, lse), expected, shape)
        out.fill_(CANARY)
        lse.fill_(CANARY)
        assert (around_out == CANARY).all(), f"{shape}: written outside of out"
        assert (around_lse == CANARY).all(), f"{shape}: written outside of LSE"


@every_version
def test_out_with_heads_before_seqlen(version):
    q, k, v = make(Shape(2, 193, 129, 4, 2), 64)
    out = torch.empty(2, 4, 193, 64, dtype=q.dtype, device="cuda").transpose(1, 2)
    expected, _ = forward(version, q, k, v)
    forward(version, q, k, v, out=out)
    assert torch.equal(out, expected)


@every_version
def test_offsets_beyond_32_bits(version):
    """FA#1311, FA#767: the second batch entry of q, k, v and out lies 2^31 elements behind the first."""
    shape = Shape(2, 129, 129)
    expected_inputs = make(shape, 64)
    expected = forward(version, *expected_inputs)
    inputs = [far_apart(x) for x in expected_inputs]
    out = far_apart(torch.zeros_like(expected[0]))
    assert_same_bits(forward(version, *inputs, out=out), expected)


def inside_nan(x: Tensor) -> Tensor:
    """The same values as a view into a larger tensor of NaN: longer sequences, more heads, a wider head_dim."""
    batch, seqlen, heads, head_dim = x.shape
    larger = x.new_full((batch, seqlen + 200, heads + 1, head_dim + 64), torch.nan)
    return larger[:, :seqlen, :heads, :head_dim].copy_(x)


def off_by_one(x: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def far_apart(x: Tensor) -> Tensor:
    """The same values with a batch stride of 2^31 elements."""
    stride = 2**31
    storage = x.new_empty((x.shape[0] - 1) * stride + x[0].numel())
    return storage.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)


# ---- Bits


@every_version
@full_and_causal
def test_runs_repeat_bitwise(version, causal):
    q, k, v = make(Shape(4, 385, 385, 4, 2), 64)
    expected = attend(version, q, k, v, causal=causal)
    for run in range(20):
        assert_same_bits(attend(version, q, k, v, causal=causal), expected, f"run {run}")


@every_version
@full_and_causal
def test_a_sequence_does_not_depend_on_its_batch(version, causal):
    """FA#1897."""
    q, k, v = make(Shape(64, 257, 257, 4, 4), 64)
    out, lse = attend(version, q, k, v, causal=causal)
    for i in (0, 13, 63):
        alone = attend(version, q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=causal)
        assert_same_bits(alone, (out[i : i + 1], lse[i : i + 1]), f"batch entry {i}")


# ---- Streams, graphs, devices


@every_version
def test_a_side_stream_with_a_slow_producer(version):
    """FA#1957: the kernel runs behind what its own stream was given before."""
    q, k, v = make(Shape(2, 257, 257), 64)
    expected = attend(version, q, k, v)
    late_q, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles
        late_q.copy_(q)
        results = attend(version, late_q, k, v)
    stream.synchronize()
    assert_same_bits(results, expected)


@every_version
def test_a_captured_graph_replays_with_new_inputs(version):
    shape = Shape(2, 257, 129, 4, 2)
    q, k, v = make(shape, 64)
    attend(version, q, k, v, causal=True)  # compiles, outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(version, q, k, v, causal=True)
    for _ in range(2):
        fresh = make(shape, 64)
        for static, new in zip((q, k, v), fresh, strict=True):
            static.copy_(new)
        graph.replay()
        assert_same_bits(results, attend(version, *fresh, causal=True))


@every_version
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one(version):
    """FA#54, FA#1782."""
    q, k, v = (x.to("cuda:1") for x in make(Shape(2, 129, 129), 64))
    with torch.cuda.device(0):
        out, lse = attend(version, q, k, v, causal=True)
    assert out.device == lse.device == q.device
    check("cuda:1", out, lse, q, k, v, causal=True)
