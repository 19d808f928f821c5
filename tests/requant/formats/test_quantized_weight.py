import torch

from requant.formats.quantized_weight import join_rows, slice_columns, slice_rows


def test_a_part_without_entries_has_no_sparse_part(random_weight) -> None:
    weight = random_weight(64, 64, density=0.001, seed=3)
    assert weight.sparse is not None and weight.sparse.values.numel() < 8
    parts = [slice_rows(weight, row, row + 1) for row in range(64)]
    assert sum(part.sparse is None for part in parts) >= 56
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), weight.dequantize())
    columns = [slice_columns(weight, column, column + 1) for column in range(64)]
    assert any(part.sparse is None for part in columns)


def test_what_does_not_join(random_weight) -> None:
    book = random_weight(16, 64, kind="codebook")
    for other in (
        random_weight(16, 64, kind="codebook", bits=4),
        random_weight(16, 64, kind="codebook", int8=True),
    ):
        assert join_rows([book, other]) is None and join_rows([other, book]) is None
    scaled = random_weight(16, 64, kind="awq", seed=1)
    assert join_rows([scaled, random_weight(16, 64, kind="awq", seed=2)]) is None
    assert join_rows([scaled, random_weight(16, 64, kind="asymmetric")]) is None


def test_joined_matrices_are_one_below_the_other(random_weight) -> None:
    parts = [random_weight(8, 64, kind="codebook", seed=i, density=d) for i, d in enumerate((0.05, 0.0, 0.1))]
    whole = join_rows(parts)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    parts = [random_weight(8, 64, int8=True, density=d) for d in (0.05, 0.0)]
    assert torch.equal(join_rows(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))
