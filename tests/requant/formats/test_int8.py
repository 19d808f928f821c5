"""Vectors of 8 bits: what is on a grid stays, bit for bit, and what is not comes near."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.formats.int8 import STEPS, decode, encode, fake_quantize_int8, fits

SMALLEST = 2.0**-24  # of float16
HARD = {
    "zeros": torch.zeros(8),
    "all equal": torch.full((8,), 0.3),
    "both signs": torch.tensor([0.3, -0.3, 0.3]),
    "one of them": torch.tensor([-5.0, 0, 0, 0]),
    "negative zero": torch.tensor([-0.0, 1.0, -1e-9]),
    "the smallest": torch.tensor([SMALLEST, -SMALLEST, 0.0, 2 * SMALLEST]),
    "steps of the smallest": torch.arange(-200, 200) * SMALLEST,
    "around the normal range": torch.linspace(-1e-4, 1e-4, 99),
    "the largest": torch.tensor([65504.0, -65504.0, 1.0, 600.0]),
    "far apart": torch.tensor([65504.0, 1e-7, -1e-7]),
    "one number": torch.tensor([0.7]),
}


@pytest.mark.parametrize("name", HARD)
def test_snapped_values_are_found_again_bit_for_bit(name: str) -> None:
    snapped = fake_quantize_int8(HARD[name])
    assert fits(snapped)
    assert torch.equal(decode(*encode(snapped)).view(torch.int16), snapped.view(torch.int16))
    assert torch.equal(fake_quantize_int8(snapped), snapped)


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 5),
    c=st.integers(1, 70),
    magnitude=st.floats(-26, 16),
    nonzero=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_vector(n: int, c: int, magnitude: float, nonzero: bool, seed: int) -> None:
    values = torch.randn(n, c, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    values = values.clamp(-65504, 65504)
    snapped = fake_quantize_int8(values, nonzero=nonzero)
    assert fits(snapped)
    largest = values.abs().amax(1, keepdim=True)
    # Half a step (one where 0 is not a choice), and float16's own rounding of magnitude and value.
    bound = largest * ((1.0 if nonzero else 0.5) / STEPS + 2.0**-10) + 2 * SMALLEST
    assert ((snapped.float() - values).abs() <= bound).all()


def test_order_is_kept() -> None:
    values = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).sort(1).values
    assert (fake_quantize_int8(values).diff(dim=1) >= 0).all()


def test_no_row_of_a_trellis_dies() -> None:
    values = torch.tensor([1.0, 1e-4, -1e-4, 0.0])
    assert fake_quantize_int8(values).tolist() == [1.0, 0.0, 0.0, 0.0]
    kept = fake_quantize_int8(values, nonzero=True)
    assert kept[1] > 0 > kept[2] and kept[3] == 0 and fits(kept)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 7e4])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = torch.tensor([[1.0, bad, 0.5], [1.0, 2.0, 3.0]])
    found = fake_quantize_int8(values)
    assert not found[0].isfinite().all() and found[1].isfinite().all()
    assert not fits(found) and not fits(values.half())


def test_random_float16_does_not_fit() -> None:
    values = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).half()
    assert not fits(values) and not fits(values[:1])
    on_grid = fake_quantize_int8(values)
    on_grid[2, 5] = torch.nextafter(on_grid[2, 5], torch.tensor(9.0).half())
    assert not fits(on_grid)


@pytest.mark.parametrize(("kind", "vector"), [("codebook", "levels"), ("trellis", "output_scales")])
def test_a_vector_takes_8_bits_where_that_is_exact(round_trip, random_weight, kind: str, vector: str) -> None:
    n, k = 40, 300
    plain, short = (round_trip(random_weight(n, k, kind=name, bits=3)) for name in (kind, f"{kind}-int8"))
    assert vector not in plain.to_json() and short.to_json()[vector] == "int8"
    saved = 8 * n - 2 * n if kind == "codebook" else n - 2
    assert plain.bytes - short.bytes == saved
    one_off = random_weight(n, k, kind=f"{kind}-int8", bits=3)
    getattr(one_off.dense, vector)[7:8] *= 1.001
    assert round_trip(one_off) == plain
