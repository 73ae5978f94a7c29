"""What every generation's algorithm.py must do; tests/fa*/test_algorithm.py run it, one generation each.

Most checks are in float64, where an algorithm and the reference may differ by rounding only; "FA#443" and the like name
the public report of the input that once broke an attention kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fa_common import reference
from fa_common.masks import Mask
from fa_common.memory import Memory
from tests.closed_forms import Sizes

EXACT = {"rtol": 1e-11, "atol": 1e-11}


@dataclass(frozen=True)
class Case:
    """Shapes, mask and tiles of one call."""

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 8
    tile_m: int = 16
    tile_n: int = 8

    @property
    def options(self) -> dict:
        return {
            "softmax_scale": self.head_dim**-0.5,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
        }

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(tile_m=self.tile_m, tile_n=self.tile_n)

    @property
    def mask(self) -> Mask:
        return Mask(self.seqlen_q, self.seqlen_k, self.causal, self.window)

    def sizes(self, dtype: torch.dtype, dlse: bool) -> Sizes:
        return Sizes(
            batch=self.batch,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            mask=self.mask,
            dtype=dtype,
            softcap=bool(self.softcap),
            dlse=dlse,
            tile_m=self.tile_m,
            tile_n=self.tile_n,
        )

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(self.batch, self.seqlen_q, self.heads_q, self.head_dim, dtype=dtype)
        k, v = (torch.randn(self.batch, self.seqlen_k, self.heads_kv, self.head_dim, dtype=dtype) for _ in range(2))
        return q, k, v


CASES = {
    "full": Case(48, 40),
    "causal": Case(48, 48, causal=True),
    "ragged": Case(37, 53),
    "ragged, causal": Case(37, 53, causal=True),
    "one block": Case(16, 8, causal=True),
    "one pair": Case(1, 1, causal=True),
    "one query": Case(1, 100),
    "one key": Case(100, 1, causal=True),
    "window": Case(40, 40, window=(7, 3)),
    "window of one": Case(40, 40, window=(0, 0)),
    "window of the past": Case(40, 70, causal=True, window=(9, None)),
    "window of the future": Case(40, 70, window=(None, 9)),
    "window wider than everything": Case(20, 30, window=(2**62, 2**62)),
    "window that skips whole key blocks": Case(16, 200, window=(3, 0)),
    "window before every key, FA#2199": Case(129, 16, window=(32, 64)),
    "softcap": Case(37, 53, softcap=1.5),
    "softcap, causal, window": Case(40, 33, causal=True, window=(9, None), softcap=0.7),
    "GQA": Case(37, 53, causal=True, heads_q=6, heads_kv=2),
    "MQA": Case(37, 53, heads_q=4, heads_kv=1),
    "bottom-right, FA#436: 2 queries, 5 keys": Case(2, 5, causal=True, tile_m=2, tile_n=2),
    "bottom-right, FA#436: 5 queries, 2 keys": Case(5, 2, causal=True, tile_m=2, tile_n=2),
    "bottom-right, FA#436: 5 queries, 6 keys": Case(5, 6, causal=True, tile_m=2, tile_n=2),
    "many rows without keys, FA#1778": Case(80, 40, causal=True),
    "tile_m above tile_n": Case(70, 70, causal=True, tile_m=32, tile_n=4),
    "tile_n above tile_m": Case(70, 70, causal=True, tile_m=4, tile_n=32),
    "tiles above the lengths": Case(5, 7, causal=True, tile_m=64, tile_n=64),
    "many batch entries, FA#359": Case(9, 5, batch=30, heads_q=1, heads_kv=1),
}

COSTS = {
    "full": Case(64, 48),
    "causal": Case(64, 64, causal=True, tile_m=8),
    "ragged, causal": Case(37, 53, causal=True),
    "more queries than keys, causal": Case(80, 40, causal=True),
    "window": Case(70, 70, window=(9, 4)),
    "window that skips whole key blocks": Case(16, 200, window=(3, 0)),
    "softcap": Case(37, 53, softcap=1.5),
    "GQA": Case(37, 53, causal=True, heads_q=6, heads_kv=2),
}


class AlgorithmContract:
    """Subclassed by each generation's test, which names its algorithm and its closed forms."""

    algorithm: ModuleType
    forward_cost: Callable[[Sizes], Memory]
    backward_cost: Callable[[Sizes], Memory]

    def check(
        self, case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, atol: float = 1e-11
    ) -> None:
        """Outputs, and gradients of a loss on out and on LSE, against the reference."""
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        expected = reference.attention(q, k, v, **case.options)
        torch.testing.assert_close((out, lse), expected, rtol=1e-11, atol=atol)
        dout, dlse = torch.randn_like(out) if dout is None else dout, torch.randn_like(lse)
        grads = self.algorithm.backward(dout, q, k, v, out, lse, dlse=dlse, config=case.config, **case.options)
        expected = reference.gradients(dout, q, k, v, dlse=dlse, **case.options)
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=atol)

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_exact(self, case):
        self.check(case, *case.tensors())

    @pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 129, 191, 193])
    @pytest.mark.parametrize("tiles", [(32, 128), (64, 128), (128, 64), (128, 80), (192, 128)], ids=str)
    def test_lengths_around_the_kernels_tiles(self, seqlen, tiles):
        tile_m, tile_n = tiles
        case = Case(seqlen, seqlen, causal=True, batch=1, heads_q=1, heads_kv=1, tile_m=tile_m, tile_n=tile_n)
        self.check(case, *case.tensors())

    @pytest.mark.parametrize("num_n_blocks", [1, 2, 3, 5])
    def test_few_iterations(self, num_n_blocks):
        """A pipeline's prologue and epilogue with hardly any loop in between (tilelang#2566)."""
        for seqlen_k in (8 * num_n_blocks, 8 * num_n_blocks - 3):
            case = Case(20, seqlen_k)
            self.check(case, *case.tensors())

    @pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 104, 120, 256])
    def test_head_dims(self, head_dim):
        case = Case(20, 30, causal=True, head_dim=head_dim)
        self.check(case, *case.tensors())

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        st.builds(
            Case,
            seqlen_q=st.integers(0, 40),
            seqlen_k=st.integers(0, 40),
            causal=st.booleans(),
            window=st.tuples(*2 * [st.one_of(st.none(), st.integers(0, 45))]),
            softcap=st.sampled_from([0.0, 0.5, 30.0]),
            batch=st.integers(0, 2),
            heads_q=st.sampled_from([2, 4]),
            heads_kv=st.sampled_from([1, 2]),
            tile_m=st.integers(1, 20),
            tile_n=st.integers(1, 20),
        )
    )
    def test_exact_for_whatever_shape(self, case):
        self.check(case, *case.tensors())

    @pytest.mark.parametrize(
        "case",
        [Case(5, 7, batch=0), Case(0, 7), Case(5, 0), Case(0, 0), Case(5, 0, causal=True)],
        ids=["no batch", "no queries", "no keys", "nothing", "no keys, causal"],
    )
    def test_empty(self, case):
        q, k, v = case.tensors()
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        assert torch.equal(out, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((case.batch, 2, case.seqlen_q), -torch.inf, dtype=torch.float64))
        grads = self.algorithm.backward(q, q, k, v, out, lse, config=case.config, **case.options)
        for gradient, like in zip(grads, (q, k, v), strict=True):
            assert torch.equal(gradient, torch.zeros_like(like))

    @pytest.mark.parametrize(
        ("case", "without_keys"),
        [
            (Case(5, 2, causal=True), slice(0, 3)),
            (Case(40, 12, causal=True), slice(0, 28)),
            (Case(129, 16, window=(32, 64)), slice(0, 49)),
        ],
        ids=["FA#1778", "whole query blocks", "FA#2199"],
    )
    def test_rows_without_keys(self, case, without_keys):
        q, k, v = case.tensors()
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        dq, dk, dv = self.algorithm.backward(out, q, k, v, out, lse, config=case.config, **case.options)
        for rows in (out, dq):
            assert torch.equal(rows[:, without_keys], torch.zeros_like(rows[:, without_keys]))
        assert torch.equal(lse.isneginf().sum(-1), torch.full((2, 2), without_keys.stop))
        assert all(x.isfinite().all() for x in (out, dq, dk, dv))

    def test_keys_that_nobody_sees_get_exact_zeros(self):
        case = Case(4, 60, causal=True, window=(2, None))
        q, k, v = case.tensors()
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        _, dk, dv = self.algorithm.backward(out, q, k, v, out, lse, config=case.config, **case.options)
        assert not dk[:, :54].any()
        assert not dv[:, :54].any()

    def test_a_window_of_everything_before_is_causal(self):
        causal, window = Case(40, 40, causal=True), Case(40, 40, window=(39, 0))
        q, k, v = causal.tensors()
        outputs = [self.algorithm.forward(q, k, v, config=case.config, **case.options) for case in (causal, window)]
        torch.testing.assert_close(*outputs, **EXACT)

    def test_lse_is_the_natural_logarithm_of_the_sum(self):
        """pytorch#181645."""
        q, k, v = torch.zeros(1, 3, 1, 8), torch.zeros(1, 20, 1, 8), torch.randn(1, 20, 1, 8)
        config = SimpleNamespace(tile_m=4, tile_n=8)
        out, lse = self.algorithm.forward(q, k, v, softmax_scale=1.0, config=config)
        torch.testing.assert_close(lse, torch.full((1, 1, 3), 20.0).log())
        torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(1, 3, 1, 8))

    @pytest.mark.parametrize("scores", ["equal", "all very low", "one very high", "far above the softcap"])
    def test_extreme_scores(self, scores):
        """FA#2082, vllm#56579, FA#1025."""
        case = Case(20, 30, causal=True, softcap={"far above the softcap": 50.0}.get(scores, 0.0))
        q, k, v = case.tensors()
        if scores == "far above the softcap":
            q, k = 100 * q, 100 * k
        else:
            q, k = torch.ones_like(q), torch.zeros_like(k)
            k += {"equal": 1.0, "all very low": -1e4}.get(scores, 0.0)
            if scores == "one very high":
                k[:, 11] = 1e4
        self.check(case, q, k, v, atol=1e-8)  # a rounding of a score of 1e4 is 1e-12, and its K is 1e4 too

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("case", [Case(70, 90, causal=True), Case(50, 60, softcap=2.0)], ids=["causal", "softcap"])
    def test_precision(self, case, dtype):
        """Types are kept, LSE is float32, and errors stay within a few roundings of the type."""
        q, k, v = case.tensors(dtype)
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        expected_out, expected_lse = reference.attention(q, k, v, **case.options)
        dout = torch.randn_like(out)
        grads = self.algorithm.backward(dout, q, k, v, out, lse, config=case.config, **case.options)
        expected_grads = reference.gradients(dout, q, k, v, **case.options)
        assert {x.dtype for x in (out, *grads)} == {dtype}
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
        for x, expected in zip((out, *grads), (expected_out, *expected_grads), strict=True):
            error = (x.double() - expected).abs().max() / expected.abs().max()
            assert error < 8 * torch.finfo(dtype).eps, f"{error:.2e}"

    def test_p_is_rounded_to_the_input_type_before_its_products(self):
        """The other term of each sum is minus the rounded P, so that a rounded P leaves exactly 0."""
        q, k, v, dout = (torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16) for _ in range(4))
        q[..., 0], k[:, 1, :, 0] = 1, -1  # scores 0 and -1; causal, so that query 0 sees key 0 only
        v[:, 0], v[:, 1] = -torch.tensor(-1.0).exp(), 1
        dout[:, 0], dout[:, 1] = -torch.tensor(1.0).sigmoid(), 1
        options = {"softmax_scale": 1.0, "causal": True, "config": SimpleNamespace(tile_m=4, tile_n=4)}
        out, lse = self.algorithm.forward(q, k, v, **options)
        _, _, dv = self.algorithm.backward(dout, q, k, v, out, lse, **options)
        assert not out[:, 1].any()
        assert not dv[:, 0].any()

    def test_a_loss_on_lse_alone(self):
        """FA#1817, FA#889: the gradient of LSE by the scores is P."""
        case = Case(20, 30, causal=True)
        q, k, v = case.tensors()
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        dlse = torch.ones_like(lse)
        dout = torch.zeros_like(out)
        dq, _, dv = self.algorithm.backward(dout, q, k, v, out, lse, dlse=dlse, config=case.config, **case.options)
        # P K is attention with K in the place of V.
        expected, _ = reference.attention(q, k, k, **case.options)
        torch.testing.assert_close(dq, case.options["softmax_scale"] * expected, **EXACT)
        assert not dv.any()

    @pytest.mark.parametrize(
        "view", ["projection", "transposed", "expanded batch", "inside NaN", "dout of a sum", "dout of a larger tensor"]
    )
    def test_strides(self, view):
        case = Case(20, 20, causal=True)
        q, k, v = case.tensors()
        dout = None
        if view == "projection":  # FA#2541
            q, k, v = torch.stack((q, k, v), dim=2).unbind(2)
        elif view == "transposed":  # FA#818
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
        elif view == "expanded batch":  # FA#2745
            k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
        elif view == "inside NaN":  # FA#1745
            q, k, v = (inside_nan(x) for x in (q, k, v))
        elif view == "dout of a sum":  # FA#325
            dout = torch.ones((), dtype=q.dtype).expand(q.shape)
        else:  # FA#91
            dout = inside_nan(torch.randn_like(q))
        before = [x.clone() for x in (q, k, v)]
        self.check(case, q, k, v, dout)
        assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "an input was changed"

    def test_results_are_contiguous(self):
        case = Case(20, 30, heads_q=4)
        q, k, v = case.tensors()
        out, lse = self.algorithm.forward(q, k, v, config=case.config, **case.options)
        grads = self.algorithm.backward(out, q, k, v, out, lse, config=case.config, **case.options)
        assert all(x.is_contiguous() for x in (out, lse, *grads))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out and LSE"])
    @pytest.mark.parametrize("case", COSTS.values(), ids=COSTS)
    def test_costs_are_the_closed_forms(self, case, with_dlse, dtype):
        q, k, v = case.tensors(dtype)
        sizes = case.sizes(dtype, with_dlse)
        forward, backward = Memory(), Memory()
        out, lse = self.algorithm.forward(q, k, v, config=case.config, memory=forward, **case.options)
        dlse = torch.ones_like(lse) if with_dlse else None
        self.algorithm.backward(out, q, k, v, out, lse, dlse=dlse, config=case.config, memory=backward, **case.options)
        assert forward == type(self).forward_cost(sizes)
        assert backward == type(self).backward_cost(sizes)


def inside_nan(x: Tensor) -> Tensor:
    """The same values as a view into a larger tensor of NaN: longer sequences, more heads, a wider head_dim."""
    batch, seqlen, heads, head_dim = x.shape
    larger = x.new_full((batch, seqlen + 3, heads + 2, head_dim + 8), torch.nan)
    view = larger[:, 2 : 2 + seqlen, 1 : 1 + heads, :head_dim]
    return view.copy_(x)
