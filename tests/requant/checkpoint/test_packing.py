import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.packing import pack, pack_bits, unpack, unpack_bits
from requant.checkpoint.validate import flaw
from requant.formats import QuantizedWeight

WIDTHS = (64, 172, 520, 1216)
KINDS = ("symmetric", "asymmetric", "awq", "codebook", "trellis")


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


def round_trip(weight: QuantizedWeight) -> MatrixLayout:
    layout, tensors = pack(weight)
    assert flaw(layout, tensors) is None
    specs = layout.tensors()
    assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == {
        key: (spec.dtype, spec.shape) for key, spec in specs.items()
    }
    assert MatrixLayout.from_json("m", json.loads(json.dumps(layout.to_json()))) == layout
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
