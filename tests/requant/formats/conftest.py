"""Through the stored form and back, bit for bit."""

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch

from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, pack, spec_of, unpack


def check_same(a: object, b: object) -> None:
    """Equal fields, tensors by dtype and by bit."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    elif isinstance(a, tuple) and isinstance(b, tuple):
        for ours, theirs in zip(a, b, strict=True):
            check_same(ours, theirs)
    elif dataclasses.is_dataclass(a):
        assert type(a) is type(b)
        for field in dataclasses.fields(a):
            check_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


def check_round_trip(weight: QuantizedWeight) -> PackedSpec:
    """Pack and unpack; the spec describes the tensors, finds no flaw in them, and survives JSON."""
    spec, tensors = pack(weight)
    assert spec == spec_of(weight) and spec.flaw(tensors) is None
    assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == {
        key: (expected.dtype, expected.shape) for key, expected in spec.tensors().items()
    }
    assert PackedSpec.from_json("m", json.loads(json.dumps(spec.to_json()))) == spec
    back = unpack(spec, tensors)
    check_same(weight, back)
    check_same(weight.dequantize(), back.dequantize())
    return spec


@pytest.fixture(scope="session")
def assert_same() -> Callable[[object, object], None]:
    return check_same


@pytest.fixture(scope="session")
def round_trip() -> Callable[[QuantizedWeight], PackedSpec]:
    return check_round_trip
