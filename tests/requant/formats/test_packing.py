import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.checkpoint.validate import flaw
from requant.errors import CheckpointError
from requant.formats.containers import QuantizedWeight, Trellis, in_8_bits
from requant.formats.packed_spec import PackedSpec
from requant.formats.packing import pack, pack_bits, pack_tiles, unpack, unpack_bits, unpack_tiles
from requant.formats.trellis_codes import from_tiles, step_bits

WIDTHS = (64, 172, 520, 1216)
KINDS = ("symmetric", "asymmetric", "awq", "codebook", "codebook-int8", "trellis", "trellis-int8")


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), n=st.integers(1, 4), k=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_bitstream_is_dense_and_little_endian(bits: int, n: int, k: int, seed: int) -> None:
    codes = torch.randint(
        0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = pack_bits(codes, bits=bits)
    assert packed.shape == (n, -(-k * bits // 32)) and packed.dtype == torch.int32
    for row in range(n):
        stream = sum(int(code) << (j * bits) for j, code in enumerate(codes[row]))
        assert packed[row].numpy().tobytes() == stream.to_bytes(4 * packed.shape[1], "little")
    assert torch.equal(unpack_bits(packed, bits=bits, k=k), codes)


@pytest.mark.parametrize("bits", [1.25, 2.25, 2.5, 2.75, 3.5, 4.75, 7.25])
def test_quarters_of_a_bit_take_no_more_than_they_say(bits: float) -> None:
    room = torch.tensor([1 << own for own in step_bits(bits)]).repeat(64)
    tiles = (torch.rand(7, 256, generator=torch.Generator().manual_seed(0)) * room).to(torch.uint8)
    packed = pack_tiles(tiles, bits=bits)
    assert packed.shape == (7, 8 * bits) and packed.dtype == torch.int32
    assert torch.equal(unpack_tiles(packed, bits=bits), tiles)
    codes = from_tiles(tiles[:6], (32, 48))
    signs = torch.ones(48).half()
    round_trip(
        QuantizedWeight(
            dense=Trellis(codes=codes, input_scales=signs, output_scales=signs[:32], bits=bits, code="mul1"),
            sparse=None,
        )
    )


def test_quarters_belong_to_codes_of_one_weight_a_step() -> None:
    layout = PackedSpec(format="trellis", bits=2.25, shape=(16, 16), code="pair", input_signs=True)
    with pytest.raises(CheckpointError, match="bits"):
        PackedSpec.from_json("m", layout.to_json())
    grid = PackedSpec(format="grid", bits=2.5, shape=(16, 16), group_size=16)
    with pytest.raises(CheckpointError, match="bits"):
        PackedSpec.from_json("m", grid.to_json())
    odd = PackedSpec(format="trellis", bits=2.3, shape=(16, 16), code="mul1", input_signs=True)
    with pytest.raises(CheckpointError, match="bits"):
        PackedSpec.from_json("m", odd.to_json())


def assert_same(a: object, b: object) -> None:
    """Equal fields, tensors by dtype and by bit."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    elif hasattr(a, "__slots__"):
        assert type(a) is type(b)
        for name in a.__slots__:
            assert_same(getattr(a, name), getattr(b, name))
    else:
        assert a == b


def round_trip(weight: QuantizedWeight) -> PackedSpec:
    layout, tensors = pack(weight)
    assert flaw(layout, tensors) is None
    specs = layout.tensors()
    assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == {
        key: (spec.dtype, spec.shape) for key, spec in specs.items()
    }
    assert PackedSpec.from_json("m", json.loads(json.dumps(layout.to_json()))) == layout
    back = unpack(layout, tensors)
    assert_same(weight, back)
    assert_same(weight.dequantize(), back.dequantize())
    return layout


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_container_comes_back_bit_for_bit(random_weight, kind: str, k: int) -> None:
    for bits in range(2, 9):
        round_trip(random_weight(5, k, kind=kind, bits=bits, density=0.02 * (bits % 3), seed=bits))


@pytest.mark.parametrize("k", [*WIDTHS, 1, 255, 256, 257])
@pytest.mark.parametrize("int8", [False, True])
def test_full_sparse_rows_need_wide_counts(random_weight, k: int, int8: bool) -> None:
    layout = round_trip(random_weight(3, k, density=1.0, int8=int8))
    assert layout.sparse == 3 * k
    assert layout.sparse_counts == ("uint16" if k >= 256 else "uint8")


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6),
    k=st.integers(1, 700),
    bits=st.integers(1, 8),
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.004, 0.1, 0.7]),
    int8=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_comes_back(
    random_weight, n: int, k: int, bits: int, kind: str, density: float, int8: bool, seed: int
) -> None:
    round_trip(random_weight(n, k, kind=kind, bits=bits, density=density, int8=int8, seed=seed))


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


@pytest.mark.parametrize(("kind", "vector"), [("codebook", "levels"), ("trellis", "output_scales")])
def test_a_vector_takes_8_bits_where_that_is_exact(random_weight, kind: str, vector: str) -> None:
    n, k = 40, 300
    plain, short = (round_trip(random_weight(n, k, kind=name, bits=3)) for name in (kind, f"{kind}-int8"))
    assert vector not in plain.to_json() and short.to_json()[vector] == "int8"
    saved = 8 * n - 2 * n if kind == "codebook" else n - 2
    assert plain.bytes - short.bytes == saved
    one_off = random_weight(n, k, kind=f"{kind}-int8", bits=3)
    getattr(one_off.dense, vector)[7:8] *= 1.001
    assert round_trip(one_off) == plain


def test_signs_are_stored_as_bits_although_bytes_would_hold_them(random_weight) -> None:
    weight = random_weight(40, 300, kind="trellis", bits=3)
    weight.dense.output_scales.copy_(torch.where(torch.arange(40) % 3 == 0, -0.25, 0.25))
    layout = round_trip(weight)
    assert layout.output_signs and layout.output_scales == "float16"


def test_one_scale_of_all_residuals_is_stored_once(random_weight) -> None:
    n, k = 40, 300
    rows, matrix = (round_trip(random_weight(n, k, int8=True, one_scale=one)) for one in (False, True))
    assert matrix.to_json()["sparse_scales"] == "matrix" and "sparse_scales" not in rows.to_json()
    assert rows.bytes - matrix.bytes == 2 * (n - 1)


def test_residuals_in_8_bits_are_near(random_weight) -> None:
    sparse = random_weight(40, 300, density=0.05).sparse
    short = in_8_bits(sparse)
    largest = sparse.floats().abs().max()
    assert (short.floats() - sparse.floats()).abs().max() <= 0.52 * largest / 127
    assert torch.equal(short.indices, sparse.indices) and short.values.abs().max() == 127
    round_trip(QuantizedWeight(dense=random_weight(40, 300).dense, sparse=short))
    assert torch.equal(in_8_bits(short).floats(), short.floats())
    silent = in_8_bits(replace(sparse, values=torch.zeros_like(sparse.values)))
    assert silent.floats().abs().max() == 0
