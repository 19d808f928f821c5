"""Random 2:4 pruning without bias, and simulated 8-bit floats."""

import itertools

import pytest
import torch

from requant.sparsity.fp8 import BACKWARD, FORWARD, simulate
from requant.sparsity.mvue import inclusion_probabilities, prune_unbiased

VALUES = torch.tensor(
    [[0.9, -0.1, 0.3, 0.05], [1.0, 1.0, -1.0, 1.0], [1e-9, -4e-9, 2e-9, 0.0], [5.0, 0, 0, 0]]
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_is_unbiased_and_keeps_two_of_four(device: str) -> None:
    """The mean of 20000 draws is within four standard errors of the values."""
    draws, generator = 20_000, torch.Generator(device).manual_seed(0)
    many = prune_unbiased(VALUES.to(device).repeat(draws, 1), generator).cpu().view(draws, 4, 4)
    assert ((many != 0).sum(-1) <= 2).all()
    error = many.mean(0) - VALUES
    assert (error.abs() <= 4 * many.std(0) / draws**0.5 + 1e-6 * VALUES.abs()).all()


def test_inclusion_probabilities_by_enumeration() -> None:
    """Of both orders in which a pair can be drawn, for distinct, equal and tiny values."""
    for row, found in zip(VALUES[:3], inclusion_probabilities(VALUES[:3]), strict=True):
        shares = (row.abs() / row.abs().sum()).double()
        expected = torch.zeros(4).double()
        for first, second in itertools.permutations(range(4), 2):
            pair = shares[first] * shares[second] / (1 - shares[first])
            expected[first] += pair
            expected[second] += pair
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(inclusion_probabilities(VALUES).sum(1), torch.full((4,), 2.0))


def test_draws_have_these_probabilities() -> None:
    draws = 20_000
    many = (
        prune_unbiased(VALUES[:2].repeat(draws, 1), torch.Generator().manual_seed(1)).view(draws, 2, 4) != 0
    )
    expected = inclusion_probabilities(VALUES[:2])
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((many.float().mean(0) - expected).abs() <= 4 * deviation + 1e-4).all()


def test_zeros_stay_zero_and_the_seed_decides() -> None:
    assert not prune_unbiased(torch.zeros(3, 8)).any()
    one, same, other = (
        prune_unbiased(VALUES[:2].repeat(9, 1), torch.Generator().manual_seed(s)) for s in (0, 0, 1)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "bits"), [(FORWARD, 3), (BACKWARD, 2)])
def test_8_bit_floats(dtype: torch.dtype, bits: int) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = simulate(values, dtype)
    large = values.abs() > values.abs().amax() / 50  # normal numbers
    assert ((found - values).abs() <= values.abs() * 2.0 ** -(bits + 1) * 1.001)[large].all()
    assert found.abs().amax() == pytest.approx(values.abs().amax().item(), rel=1e-6)
    assert not torch.equal(found, values) and torch.equal(simulate(found, dtype), found)
    assert not simulate(torch.zeros(4), dtype).any()


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@pytest.mark.parametrize("largest", [1e-35, 1e-37, 1e-40])
def test_8_bit_floats_of_the_smallest_numbers(dtype: torch.dtype, largest: float) -> None:
    """Their scale would be beyond float32: gradients of a saturated loss became NaN."""
    values = torch.tensor([largest, -largest / 2, 0.0])
    torch.testing.assert_close(simulate(values, dtype), values, rtol=0.2, atol=1e-41)
