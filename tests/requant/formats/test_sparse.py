from dataclasses import replace

import pytest
import torch

from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.formats.sparse import residuals_to_int8


@pytest.mark.parametrize("k", [1, 64, 172, 255, 256, 257, 1216])
@pytest.mark.parametrize("int8", [False, True])
def test_full_sparse_rows_need_wide_counts(round_trip, random_weight, k: int, int8: bool) -> None:
    spec = round_trip(random_weight(3, k, density=1.0, int8=int8))
    assert spec.num_entries == 3 * k
    assert spec.sparse.counts == ("uint16" if k >= 256 else "uint8")


def test_slices_of_a_tensor_parallel_rank_follow_from_the_counts(random_weight) -> None:
    weight = random_weight(6, 1216, density=0.05)
    _, tensors = pack(weight)
    counts = tensors["sparse_counts"].long()
    floats = weight.sparse.dequantize()
    # column parallel: rows 2..3 are one run of entries
    run = slice(int(counts[:2].sum()), int(counts[:4].sum()))
    assert torch.equal(tensors["sparse_values"][run], floats[2:4][floats[2:4] != 0].half())
    # row parallel: columns 256..767 are tiles 1 and 2 of every row
    tile = torch.repeat_interleave(torch.arange(counts.numel()), counts.flatten()) % counts.shape[1]
    mine = (tile == 1) | (tile == 2)
    part = floats[:, 256:768]
    assert torch.equal(tensors["sparse_values"][mine], part[part != 0].half())


def test_one_scale_of_all_residuals_is_stored_once(round_trip, random_weight) -> None:
    n, k = 40, 300
    rows, matrix = (round_trip(random_weight(n, k, int8=True, one_scale=one)) for one in (False, True))
    assert matrix.to_json()["sparse_scales"] == "matrix" and "sparse_scales" not in rows.to_json()
    assert rows.bytes - matrix.bytes == 2 * (n - 1)


def test_int8_residuals_are_near(round_trip, random_weight) -> None:
    sparse = random_weight(40, 300, density=0.05).sparse
    short = residuals_to_int8(sparse)
    largest = sparse.floats().abs().max()
    assert (short.floats() - sparse.floats()).abs().max() <= 0.52 * largest / 127
    assert torch.equal(short.indices, sparse.indices) and short.values.abs().max() == 127
    round_trip(QuantizedWeight(dense=random_weight(40, 300).dense, sparse=short))
    assert torch.equal(residuals_to_int8(short).floats(), short.floats())
    silent = residuals_to_int8(replace(sparse, values=torch.zeros_like(sparse.values)))
    assert silent.floats().abs().max() == 0
