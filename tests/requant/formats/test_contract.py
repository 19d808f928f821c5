"""What `requant/formats/contract.py` asks, of every registered format: a new format adds a row to CASES."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requant_kernels import dequantize

from requant.errors import InputError
from requant.formats.contract import Container
from requant.formats.quantized_weight import (
    QuantizedWeight,
    bands_of,
    decode,
    dequantize_rows,
    join_rows,
    pack,
    slice_columns,
    slice_rows,
    spec_of,
    trainable_params,
    unpack_rows,
    weight_of,
    with_trainable_params,
)
from requant.formats.registry import FORMATS

# format -> the kinds that `random_weight` builds of it
CASES = {
    "grid": ("symmetric", "asymmetric", "awq"),
    "codebook": ("codebook", "codebook-int8"),
    "trellis": ("trellis", "trellis-int8", "trellis-rows"),
    "semi_structured": ("semi_structured", "semi_structured-hardware", "semi_structured-16"),
    "bands": ("bands", "bands-grid"),
}
KINDS = [kind for kinds in CASES.values() for kind in kinds]
CUTS = (0, 48, 49, 96, 131, 172)  # on and off the groups of 48
every_kind = pytest.mark.parametrize("kind", KINDS)
every_sparse = pytest.mark.parametrize(
    "sparse", [{"density": 0.0}, {"density": 0.05}, {"density": 0.05, "int8": True}], ids=str
)


def test_every_registered_format_has_a_case(random_weight) -> None:
    assert CASES.keys() == FORMATS.keys()
    for name, kinds in CASES.items():
        for kind in kinds:
            weight = random_weight(20, 72, kind=kind)
            assert isinstance(weight.dense, Container) and isinstance(spec_of(weight).dense, FORMATS[name])
            assert spec_of(weight).format == name


def same_floats(one: torch.Tensor, other: torch.Tensor, weight: QuantizedWeight) -> None:
    """Bit for bit, except where rows mix: a rotation of another size rounds in another order."""
    tolerance = 0 if spec_of(weight).dense.row_step else 1e-6
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 6),
    k=st.one_of(st.sampled_from([64, 172, 255, 256, 257, 520, 1216]), st.integers(1, 700)),
    bits=st.integers(1, 8),
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.004, 0.1, 0.7, 1.0]),
    int8=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_comes_back(
    round_trip, random_weight, n: int, k: int, bits: int, kind: str, density: float, int8: bool, seed: int
) -> None:
    k += -k % 4 if kind.startswith("semi_structured") else 0
    round_trip(random_weight(n, k, kind=kind, bits=bits, density=density, int8=int8, seed=seed))


@every_kind
@every_sparse
def test_slices_are_parts_of_the_whole(round_trip, random_weight, kind: str, sparse: dict) -> None:
    weight = random_weight(70, 172, kind=kind, **sparse)
    whole = weight.dequantize()
    assert slice_rows(weight, 0, 70) is weight and slice_columns(weight, 0, 172) is weight
    for cut, cuts, axis in ((slice_rows, (0, 16, 17, 18, 70), 0), (slice_columns, CUTS, 1)):
        for start, stop in itertools.combinations(cuts, 2):
            try:
                part = cut(weight, start, stop)
            except (
                InputError
            ) as error:  # in a sentence, and only where rows mix, or inside a group of four columns
                inside = kind.startswith("semi_structured") and axis == 1 and (start % 4 or stop % 4)
                assert inside or spec_of(weight).dense.row_step != 1
                assert "cannot be cut" in str(error)
                continue
            same_floats(part.dequantize(), whole.narrow(axis, start, stop - start), weight)
            round_trip(part)


@every_kind
@pytest.mark.parametrize("cut", [slice_rows, slice_columns])
@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 4), (5, 4), (0, 65)])
def test_no_slice_outside(random_weight, kind: str, cut, start: int, stop: int) -> None:
    with pytest.raises(InputError, match="not part of a matrix of 64"):
        cut(random_weight(64, 64, kind=kind), start, stop)


@every_kind
@pytest.mark.parametrize("int8", [False, True])
def test_slices_join_to_the_whole(assert_same, random_weight, kind: str, int8: bool) -> None:
    weight = random_weight(70, 172, kind=kind, int8=int8, density=0.002)
    assert join_rows([weight]) is weight
    if weight.dense.join_key() is None:
        assert join_rows([weight, weight]) is None
        return
    parts = [slice_rows(weight, a, b) for a, b in ((0, 5), (5, 6), (6, 70))]
    joined = join_rows(parts)
    assert joined is not None and any(part.sparse is None for part in parts)
    same_floats(joined.dequantize(), weight.dequantize(), weight)
    for name in ("indptr", "indices", "values"):
        assert_same(getattr(joined.sparse, name), getattr(weight.sparse, name))


def test_matrices_of_different_formats_never_join(random_weight) -> None:
    for one, other in itertools.permutations([random_weight(16, 64, kind=k[0]) for k in CASES.values()], 2):
        assert join_rows([one, other]) is None


@every_kind
@every_sparse
def test_rows_of_the_stored_tensors_are_rows_of_the_matrix(random_weight, kind: str, sparse: dict) -> None:
    weight = random_weight(30, 300, kind=kind, **sparse)
    spec, tensors = pack(weight)
    step = spec.dense.row_step
    if not step:
        with pytest.raises(ValueError, match="not independent"):
            spec.dense.packed_rows(tensors, slice(0, 1))
        if kind.startswith("bands"):  # but in their parts
            chosen = torch.tensor([29, 3, 16, 15, 0])
            for rows in (chosen, chosen[:1], chosen[:0]):
                assert torch.equal(dequantize_rows(spec, tensors, rows), weight.dequantize()[rows])
        return
    start, stop = (7, 12) if step == 1 else (16, 30)
    counts = tensors.get("sparse_counts", torch.zeros(30, 1, dtype=torch.uint8)).long().sum(1)
    entries = slice(int(counts[:start].sum()), int(counts[:stop].sum()))
    assert torch.equal(
        unpack_rows(spec, tensors, slice(start, stop), entries).dequantize(), weight.dequantize()[start:stop]
    )
    chosen = torch.tensor([3, 3, 29, 16])
    assert torch.equal(dequantize_rows(spec, tensors, chosen), weight.dense.dequantize()[chosen])


@every_kind
@every_sparse
def test_untrained_parameters_leave_the_matrix_as_it_is(
    assert_same, random_weight, kind: str, sparse: dict
) -> None:
    weight = random_weight(20, 72, kind=kind, **sparse)
    params = trainable_params(weight)
    assert all(value.dtype == torch.float32 for value in params.values())
    assert_same(with_trainable_params(weight, params), weight)
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    decoded = decode(weight)
    assert all(tensor.is_contiguous() for tensor in decoded.values())  # as ranks send them to each other
    floats = weight_of(weight, decoded, leaves)
    torch.testing.assert_close(floats, weight.dequantize(), rtol=1e-6, atol=1e-7)
    floats.square().sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in leaves.values())
    rows = weight.dense.scaled_rows(decoded, leaves)
    assert bool(rows) == all(type(band.dense).__name__ == "Trellis" for band in bands_of(weight))
    if rows and weight.sparse is None:
        assert torch.equal(torch.cat([scales[:, None] * unscaled for scales, unscaled in rows]), floats)


@every_kind
@pytest.mark.parametrize("density", [0.0, 0.05])
def test_the_kernels_hold_the_same_floats(random_weight, kind: str, density: float) -> None:
    weight = random_weight(23, 40, kind=kind, bits=3, density=density)  # 40 columns: one group
    csr = None if weight.sparse is None else weight.sparse.csr()
    if kind.startswith("semi_structured"):
        with pytest.raises(
            ValueError, match=r"no kernel multiplies 2:4 values of \d+ bits: load with dequantize"
        ):
            weight.dense.kernel_layout(csr)
        return
    if kind.startswith("bands"):
        with pytest.raises(ValueError, match="multiply them one by one"):
            weight.dense.kernel_layout(csr)
    floats = torch.cat([
        dequantize(band.dense.kernel_layout(csr), dtype=torch.float32) for band in bands_of(weight)
    ])  # fmt: skip
    torch.testing.assert_close(floats, weight.dequantize(), rtol=1e-3, atol=1e-4)
