import itertools

import pytest
import torch

from requant.errors import InputError
from requant.formats.containers import QuantizedWeight
from requant.formats.packing import pack, unpack
from requant.formats.slicing import join_rows, slice_columns, slice_rows

KINDS = ("symmetric", "asymmetric", "awq", "codebook", "codebook-int8")
CUTS = (0, 48, 49, 96, 131, 172)  # on and off the groups of 48


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int8", [False, True])
def test_slices_are_parts_of_the_whole(random_weight, kind: str, int8: bool) -> None:
    weight = random_weight(70, 172, kind=kind, bits=3, int8=int8, density=0.05)
    whole = weight.dequantize()
    rows = [slice_rows(weight, a, b) for a, b in ((0, 17), (17, 18), (18, 70))]
    same(torch.cat([part.dequantize() for part in rows]), whole)
    columns = [slice_columns(weight, a, b) for a, b in itertools.pairwise(CUTS)]
    same(torch.cat([part.dequantize() for part in columns], 1), whole)
    corner = slice_columns(slice_rows(weight, 10, 40), 96, 172)
    same(corner.dequantize(), whole[10:40, 96:172])
    assert slice_rows(weight, 0, 70) is weight and slice_columns(weight, 0, 172) is weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_slice_can_be_stored(random_weight, kind: str, int8: bool) -> None:
    """What a slice holds is a whole matrix by itself: it survives packing."""
    part = slice_columns(random_weight(20, 300, kind=kind, int8=int8, density=0.05), 49, 300)
    layout, tensors = pack(part)
    same(unpack(layout, tensors).dequantize(), part.dequantize())


def test_aligned_cuts_keep_the_groups_and_others_make_them_finer(random_weight) -> None:
    weight = random_weight(8, 192, kind="asymmetric")
    assert slice_columns(weight, 96, 192).dense.group_size == 48
    finer = slice_columns(weight, 72, 192).dense
    assert finer.group_size == 24 and finer.scales.shape == (8, 5)
    row_groups = random_weight(8, 40, kind="asymmetric")  # one group, 48 wide on paper
    assert slice_columns(row_groups, 0, 20).dense.scales.shape == (8, 1)


def test_a_part_without_entries_has_no_sparse_part(random_weight) -> None:
    weight = random_weight(64, 64, density=0.001, seed=3)
    assert weight.sparse is not None and weight.sparse.values.numel() < 8
    parts = [slice_rows(weight, row, row + 1) for row in range(64)]
    assert sum(part.sparse is None for part in parts) >= 56
    same(torch.cat([part.dequantize() for part in parts]), weight.dequantize())
    columns = [slice_columns(weight, column, column + 1) for column in range(64)]
    assert any(part.sparse is None for part in columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int8", [False, True])
def test_rows_join_to_the_whole(random_weight, kind: str, int8: bool) -> None:
    weight = random_weight(70, 172, kind=kind, int8=int8, density=0.002)
    parts = [slice_rows(weight, a, b) for a, b in ((0, 5), (5, 6), (6, 70))]
    joined = join_rows(parts)
    assert joined is not None and any(part.sparse is None for part in parts)
    for name in ("indptr", "indices", "values"):
        same(getattr(joined.sparse, name), getattr(weight.sparse, name))
    same(joined.dequantize(), weight.dequantize())
    assert join_rows([weight]) is weight


def test_what_does_not_join(random_weight) -> None:
    book = random_weight(16, 64, kind="codebook")
    for other in (
        random_weight(16, 64, kind="codebook", bits=4),
        random_weight(16, 64, kind="symmetric"),
        random_weight(16, 64, kind="codebook", int8=True),
        random_weight(16, 64, kind="trellis"),
    ):
        assert join_rows([book, other]) is None and join_rows([other, book]) is None
    scaled = random_weight(16, 64, kind="awq", seed=1)
    assert join_rows([scaled, random_weight(16, 64, kind="awq", seed=2)]) is None
    assert join_rows([scaled, random_weight(16, 64, kind="asymmetric")]) is None
    assert join_rows([random_weight(16, 64, kind="trellis"), random_weight(16, 64, kind="trellis")]) is None


def test_a_trellis_is_cut_between_blocks_only(random_weight) -> None:
    weight: QuantizedWeight = random_weight(
        176, 112, kind="trellis", density=0.02
    )  # blocks of 16, and 7 of 16
    whole = weight.dequantize()
    part = slice_rows(weight, 16, 64)  # three blocks: an odd number, so the slice has blocks of 16 too
    torch.testing.assert_close(part.dequantize(), whole[16:64], rtol=0, atol=1e-6)
    part = slice_columns(weight, 32, 112)
    torch.testing.assert_close(part.dequantize(), whole[:, 32:112], rtol=0, atol=1e-6)
    for start, stop in ((0, 32), (8, 24), (16, 32 + 8)):
        with pytest.raises(InputError, match=r"mixes blocks of 16; serve it on one GPU .* kmeans or gptq"):
            slice_rows(weight, start, stop)
    uneven = random_weight(172, 64, kind="trellis")  # padded to 176
    last = slice_rows(uneven, 128, 172)
    torch.testing.assert_close(last.dequantize(), uneven.dequantize()[128:], rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="blocks of 64"):
        slice_columns(uneven, 0, 32)


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 4), (5, 4), (0, 65)])
def test_no_slice_outside(random_weight, start: int, stop: int) -> None:
    weight = random_weight(64, 64)
    for cut in (slice_rows, slice_columns):
        with pytest.raises(InputError, match="no part of a matrix of 64"):
            cut(weight, start, stop)


def test_joined_matrices_are_one_below_the_other(random_weight) -> None:
    parts = [random_weight(8, 64, kind="codebook", seed=i, density=d) for i, d in enumerate((0.05, 0.0, 0.1))]
    whole = join_rows(parts)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    parts = [random_weight(8, 64, int8=True, density=d) for d in (0.05, 0.0)]
    assert torch.equal(join_rows(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))
