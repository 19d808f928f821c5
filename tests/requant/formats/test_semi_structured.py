"""2:4 matrices: bits by bytes, and the metadata that torch writes for the hardware."""

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    _calculate_meta_reordering_scatter_offsets,
    sparse_semi_structured_from_dense_cutlass,
)

from requant.formats.quantized_weight import pack
from requant.formats.semi_structured import gathered, scattered


@pytest.mark.parametrize(
    ("kind", "bits", "stored"),
    [
        ("semi_structured-16", 16, 8.75),
        ("semi_structured", 8, 4.875),
        ("semi_structured", 4, 2.875),
        ("semi_structured", 2, 1.875),
        ("semi_structured-hardware", 4, 3.125),
    ],
)
def test_bits_by_bytes(random_weight, kind: str, bits: int, stored: float) -> None:
    """Half the values, 0.75 or 1 bit of metadata, and 16 bits of scale a group of 48 columns here."""
    spec, tensors = pack(random_weight(64, 768, kind=kind, bits=min(bits, 8), density=0))
    scales = 0 if bits == 16 else 16 / 48 - 16 / 128
    assert 8 * sum(t.nbytes for t in tensors.values()) / (64 * 768) == pytest.approx(stored + scales)
    assert spec.bytes == sum(t.nbytes for t in tensors.values())


def test_the_hardware_order_is_that_of_torch(random_weight) -> None:
    weight = random_weight(64, 96, kind="semi_structured-hardware", density=0).dense
    dense = torch.where(weight.mask, weight.dequantize() + 1, 0.0).half()  # no kept weight is zero
    _, interleaved = sparse_semi_structured_from_dense_cutlass(dense)
    offsets = _calculate_meta_reordering_scatter_offsets(64, 96 // 16, torch.int16, "cpu")
    by_row = interleaved.flatten().gather(0, offsets).view(64, 6)
    ours = weight.pack()[1]["metadata"].view(torch.int16)
    assert torch.equal(ours, by_row)


def test_kept_weights_come_and_go(random_weight) -> None:
    weight = random_weight(8, 32, kind="semi_structured-16", density=0).dense
    dense = weight.dequantize()
    assert torch.equal(dense != 0, weight.mask) and (dense.view(8, 8, 4) != 0).sum(2).eq(2).all()
    assert torch.equal(gathered(dense, weight.patterns), weight.values())
    assert torch.equal(scattered(gathered(dense, weight.patterns), weight.patterns), dense)


def test_levels_leave_out_zero(random_weight) -> None:
    weight = random_weight(4, 64, kind="semi_structured", bits=2, density=0).dense
    steps = weight.values() / weight._by_value(weight.scales)
    assert steps.unique().tolist() == pytest.approx([-1.5, -0.5, 0.5, 1.5], abs=1e-5)
