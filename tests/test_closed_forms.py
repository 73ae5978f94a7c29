"""What docs/io.md says without an algorithm: visits in closed form, and bytes for each pair of a long sequence."""

import pytest
import torch

from fa_common.masks import Mask
from tests import closed_forms
from tests.closed_forms import Sizes, Visits


@pytest.mark.parametrize("lengths", [(48, 40), (50, 41), (5, 100), (1, 1)], ids=str)
def test_visits_without_a_mask(lengths):
    seqlen_q, seqlen_k = lengths
    assert Visits.of(Mask(*lengths), 16, 8, all_of_key_block_0=False) == Visits(
        pairs=seqlen_q * seqlen_k, rows=seqlen_q * -(-seqlen_k // 8), columns=seqlen_k * -(-seqlen_q // 16)
    )


@pytest.mark.parametrize("all_of_key_block_0", [False, True], ids=["fa2", "fa1"])
def test_visits_of_a_causal_square(all_of_key_block_0):
    seqlen, tile = 96, 16
    visits = Visits.of(Mask(seqlen, seqlen, causal=True), tile, tile, all_of_key_block_0=all_of_key_block_0)
    rows = seqlen * (seqlen // tile + 1) // 2
    assert visits == Visits(pairs=seqlen * (seqlen + tile) // 2, rows=rows, columns=rows)


@pytest.mark.parametrize(
    ("cost", "bytes_per_pair"),
    [
        (closed_forms.fa1_forward, lambda head_dim, tile: 10 * head_dim / tile),
        (closed_forms.fa2_forward, lambda head_dim, tile: 4 * head_dim / tile),
    ],
    ids=["fa1", "fa2"],
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", [64, 128])
def test_bytes_a_pair(cost, bytes_per_pair, head_dim, tile):
    mask = Mask(4096, 4096)
    sizes = Sizes(
        batch=1,
        heads_q=1,
        heads_kv=1,
        head_dim=head_dim,
        mask=mask,
        dtype=torch.bfloat16,
        softcap=False,
        dlse=False,
        tile_m=tile,
        tile_n=tile,
    )
    assert cost(sizes).bytes_moved / mask.num_pairs == pytest.approx(bytes_per_pair(head_dim, tile), rel=0.04)
