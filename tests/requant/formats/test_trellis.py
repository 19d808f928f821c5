import dataclasses
from typing import Any

import pytest
import torch
from requant_kernels import linear
from requant_kernels.fallback import reference

from requant.errors import CheckpointError, InputError
from requant.formats.grid import GridSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, join_rows, pack, slice_columns, slice_rows
from requant.formats.trellis import Trellis, TrellisSpec, kernel_layouts
from requant.formats.trellis_bits import pack_tiles, unpack_tiles
from requant.formats.trellis_codes import from_tiles, step_bits


@pytest.mark.parametrize(
    ("bits", "code"),
    [(bits, "mul1") for bits in (1.25, 2.25, 2.5, 2.75, 3.5, 4.75, 7.25)] + [(2.25, "pair"), (3.75, "pair")],
)
def test_quarters_of_a_bit_take_no_more_than_they_say(round_trip, bits: float, code: str) -> None:
    codes_below = torch.tensor([1 << own for own in step_bits(bits)]).repeat(64)
    tiles = (torch.rand(7, 256, generator=torch.Generator().manual_seed(0)) * codes_below).to(torch.uint8)
    packed = pack_tiles(tiles, bits=bits)
    assert packed.shape == (7, 8 * bits) and packed.dtype == torch.int32
    assert torch.equal(unpack_tiles(packed, bits=bits), tiles)
    codes = from_tiles(tiles[:6], (32, 48))
    signs = torch.ones(48).half()
    round_trip(
        QuantizedWeight(
            dense=Trellis(codes=codes, input_scales=signs, output_scales=signs[:32], bits=bits, code=code),
            sparse=None,
        )
    )


def test_quarters_belong_to_trellis_codes() -> None:
    grid = PackedSpec(dense=GridSpec(bits=2, shape=(16, 16), group_size=16))
    with pytest.raises(CheckpointError, match="bits"):
        PackedSpec.from_json("m", grid.to_json() | {"bits": 2.5})
    odd = PackedSpec(dense=TrellisSpec(bits=2.3, shape=(16, 16), code="mul1", input_signs=True))
    with pytest.raises(CheckpointError, match="bits"):
        PackedSpec.from_json("m", odd.to_json())


def test_signs_are_stored_as_bits_although_bytes_would_hold_them(round_trip, random_weight) -> None:
    weight = random_weight(40, 300, kind="trellis", bits=3)
    weight.dense.output_scales.copy_(torch.where(torch.arange(40) % 3 == 0, -0.25, 0.25))
    spec = round_trip(weight)
    assert spec.dense.output_signs and spec.dense.output_scales == "float16"


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


@pytest.mark.parametrize("rotate_output", [False, True])
@pytest.mark.parametrize("rotate_input", [False, True])
def test_a_trellis_without_rotations(
    round_trip, random_trellis, rotate_input: bool, rotate_output: bool
) -> None:
    weight = random_trellis(40, 96, rotate_input=rotate_input, rotate_output=rotate_output)
    spec = round_trip(weight)
    assert spec.dense.version == (3 if rotate_input and rotate_output else 5)
    assert spec.dense.rotates_input == rotate_input and spec.dense.rotates_output == rotate_output
    layout = weight.dense.kernel_layout(None)
    x = torch.randn(3, 96)
    torch.testing.assert_close(linear(x, layout), x @ weight.dequantize().T, rtol=1e-4, atol=1e-5)
    whole = weight.dequantize()
    if not rotate_output:
        torch.testing.assert_close(slice_rows(weight, 16, 40).dequantize(), whole[16:], rtol=0, atol=1e-6)
    if not rotate_input:
        assert torch.equal(slice_columns(weight, 32, 48).dequantize(), whole[:, 32:48])
        with pytest.raises(InputError, match="tied in blocks of 16"):
            slice_columns(weight, 8, 24)


def test_matrices_with_one_rotation_of_the_input_join(random_trellis) -> None:
    """Each keeps a rotation of its own for its output; what is joined is never stored."""
    plain, other = (random_trellis(32, 64, rotate_input=False, rotate_output=False, seed=i) for i in (0, 1))
    joined = join_rows([plain, other])
    assert joined is not None
    assert torch.equal(joined.dequantize(), torch.cat([plain.dequantize(), other.dequantize()]))
    for sides in ({"rotate_output": False}, {"rotate_input": False}, {}):
        q, k, v = (random_trellis(n, 64, **sides, seed=i, input_seed=0) for i, n in enumerate((64, 32, 32)))
        both = join_rows([q, k, v])
        assert both is not None and join_rows([plain, q]) is None
        whole = torch.cat([each.dequantize() for each in (q, k, v)])
        assert torch.equal(both.dequantize(), whole)
        torch.testing.assert_close(
            reference.weight(both.dense.kernel_layout(None)), whole.double(), rtol=0, atol=1e-5
        )
        if sides.get("rotate_output", True):
            with pytest.raises(ValueError, match="never stored"):
                pack(both)
        if sides.get("rotate_input", True):
            assert join_rows([q, random_trellis(32, 64, **sides, seed=1, input_seed=1)]) is None
    uneven = random_trellis(40, 64)
    assert join_rows([uneven, uneven]) is None  # its last tile has padding


def test_what_is_not_rotated_stores_no_signs(random_trellis) -> None:
    plain = random_trellis(16, 32, rotate_input=False, rotate_output=False)
    assert pack(plain)[1].keys() == {"codes", "output_scales", "output_magnitude"}


@pytest.mark.parametrize(
    ("bits", "kind"),
    [
        (2, {"input_signs": True, "output_scales": "int8"}),
        (2.25, {"input_signs": True, "output_signs": True}),
        (3, {}),
    ],
)
def test_layouts_of_many_matrices_are_those_of_each(bits: float, kind: dict[str, Any]) -> None:
    """Also where columns are padded."""
    spec = TrellisSpec(bits=bits, shape=(48, 72), code="mul1", **kind)
    matrices = []
    for _ in range(3):
        own = {}
        for suffix, tensor in spec.tensors().items():
            integers = not tensor.dtype.is_floating_point
            high = torch.iinfo(tensor.dtype).max if integers else 2
            values = torch.randint(1, high, tensor.shape) if integers else torch.rand(tensor.shape) + 0.5
            own[suffix] = values.to(tensor.dtype)
        matrices.append(own)
    found = kernel_layouts(spec, matrices, torch.device("cpu"))
    for layout, tensors in zip(found, matrices, strict=True):
        wanted = spec.unpack(tensors).kernel_layout(None)
        for field in dataclasses.fields(wanted):
            own, other = getattr(layout, field.name), getattr(wanted, field.name)
            assert torch.equal(own, other) if isinstance(other, torch.Tensor) else own == other, field.name
        assert layout.packed_codes.is_contiguous()
