"""FA2's forward compiles for sm_90a and spills nothing with each of its switches off, on every rung of its ladder, and
for windows, softcap and packed sequences. Needs no GPU."""

from itertools import product

import pytest

from fa2.config import default_config
from fa_common.compile import KernelKey
from fa_common.problem import Problem
from fa_common.switches import ladder, switches, without
from tests.test_kernels_compile import check, default_key

BASES = {head_dim: default_config(Problem(1, 512, 512, 1, 1, head_dim)) for head_dim in (64, 128)}
KINDS = {
    "packed causal": {"varlen": True, "causal": True},
    "packed window softcap": {"varlen": True, "window": (512, 64), "softcap": 30.0},
}


def variants() -> list:
    keys = {}
    for head_dim, causal in ((64, True), (128, False)):
        config = BASES[head_dim]
        named = {f"without {one.metadata['label']}": without(config, one.name) for one in switches(config)}
        named["all off"] = ladder(config)[0][1]
        if head_dim == 64:
            named |= dict(ladder(config)[1:-1])
        for title, variant in named.items():
            keys[KernelKey("fa2", "forward", "bfloat16", head_dim, causal, variant)] = f"d{head_dim}-{title}"
    for head_dim, (title, options) in product((64, 128, 256), KINDS.items()):
        keys[default_key("fa2", Problem(64, 4096, 4096, 32, 32, head_dim, **options))] = f"d{head_dim}-{title}"
    return [pytest.param(key, id=title) for key, title in keys.items()]


@pytest.mark.slow
@pytest.mark.parametrize("key", variants())
def test_kernel(key: KernelKey):
    check(key)
