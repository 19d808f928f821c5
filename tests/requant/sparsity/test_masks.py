"""2:4 masks against brute force, closed forms and the shares of energy that are known of them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from requant.errors import InputError
from requant.sparsity.masks import (
    PATTERNS,
    TRANSPOSABLE,
    flip_rate,
    keep2,
    keep2_transposable,
    least_squares_scale,
    mask_of,
    pattern_of,
    soft_threshold,
)

SMALL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5])  # many ties and zeros


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_there_are_6_patterns_and_90_transposable_blocks() -> None:
    assert {tuple(p) for p in PATTERNS.int().tolist()} == {
        p for p in itertools.product((0, 1), repeat=4) if sum(p) == 2
    }
    assert len(TRANSPOSABLE) == 90 == len(TRANSPOSABLE.flatten(1).unique(dim=0))
    assert (TRANSPOSABLE.sum(1) == 2).all() and (TRANSPOSABLE.sum(2) == 2).all()


@given(st.lists(SMALL, min_size=8, max_size=8))
def test_keep2_is_the_best_pattern_also_with_ties(values: list[float]) -> None:
    scores = torch.tensor(values)
    mask = keep2(scores)
    for group, kept in zip(scores.view(2, 4), mask.view(2, 4), strict=True):
        assert kept.sum() == 2
        assert group[kept].sum() == max(group[p].sum() for p in PATTERNS)
    assert torch.equal(mask, keep2(scores))


def test_of_equal_scores_the_first_are_kept() -> None:
    assert keep2(torch.zeros(4)).tolist() == [True, True, False, False]
    assert keep2(torch.tensor([1.0, 2, 2, 2])).tolist() == [False, True, True, False]
    assert keep2(torch.tensor([torch.nan, 0, torch.nan, torch.nan])).tolist() == [True, True, False, False]
    assert torch.equal(keep2_transposable(torch.zeros(4, 4)), TRANSPOSABLE[0])


@pytest.mark.parametrize("seed", range(3))
def test_transposable_masks_are_2_of_4_both_ways_and_beat_a_greedy_choice(seed: int) -> None:
    scores = normal(24, 40, seed=seed).abs()
    scores[:4, :8] = scores[:4, :8].round()  # ties
    mask = keep2_transposable(scores)
    assert (mask.view(24, 10, 4).sum(2) == 2).all() and (mask.T.reshape(40, 6, 4).sum(2) == 2).all()
    for i, j in itertools.product(range(0, 24, 4), range(0, 40, 4)):
        block, kept = scores[i : i + 4, j : j + 4], mask[i : i + 4, j : j + 4]
        best = max(block[m].sum() for m in TRANSPOSABLE)
        torch.testing.assert_close(block[kept].sum(), best)
        other = greedy(block)  # at times it is left with seven, which no mask of eight contains
        assert other.sum() == 7 or block[kept].sum() >= block[other].sum() - 1e-6


def greedy(block: torch.Tensor) -> torch.Tensor:
    """The largest first, while its row and its column have room: what torch's 4 x 4 pruning does."""
    kept = torch.zeros(4, 4, dtype=torch.bool)
    for index in block.flatten().argsort(descending=True).tolist():
        row, column = divmod(index, 4)
        if kept[row].sum() < 2 and kept[:, column].sum() < 2:
            kept[row, column] = True
    return kept


def test_the_soft_threshold_by_hand() -> None:
    assert soft_threshold(torch.tensor([3.0, -1, 2, -5])).tolist() == [1, 0, 0, -3]
    assert soft_threshold(torch.tensor([1.0, -1, 1, -1])).tolist() == [0, 0, 0, 0]
    assert not soft_threshold(torch.zeros(3, 8)).any()


@given(st.lists(SMALL, min_size=4, max_size=4), st.lists(SMALL, min_size=4, max_size=4))
def test_the_soft_threshold_is_continuous_through_ties(one: list[float], other: list[float]) -> None:
    a, b = torch.tensor(one), torch.tensor(other)
    path = torch.stack([a + t * (b - a) for t in torch.linspace(0, 1, 41)])
    steps = (soft_threshold(path).diff(dim=0)).abs().amax(1)
    assert (steps <= 2 * path.diff(dim=0).abs().amax(1) + 1e-6).all()
    assert ((soft_threshold(path) != 0).sum(1) <= 2).all()


def test_beta_is_the_minimum_of_the_squared_error() -> None:
    weight = normal(16, 64)
    projected = soft_threshold(weight)
    beta = least_squares_scale(weight)
    solved = torch.linalg.lstsq(projected.view(-1, 1).double(), weight.view(-1, 1).double()).solution
    torch.testing.assert_close(beta.double(), solved[0, 0], rtol=1e-6, atol=0)
    assert least_squares_scale(torch.ones(4)) == 1


def test_energy_removed() -> None:
    """Known shares for Gaussian and Laplace weights (`docs/sparsity.md`)."""
    gaussian = normal(1000, 1000)
    uniform = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(1)) - 0.5
    laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs())

    def lost(weight: torch.Tensor, approximation: torch.Tensor) -> float:
        return ((weight - approximation).square().sum() / weight.square().sum()).item()

    def soft(weight: torch.Tensor) -> tuple[float, float]:
        projected = soft_threshold(weight)
        beta = least_squares_scale(weight)
        return lost(weight, beta * projected), beta.item()

    assert lost(gaussian, gaussian * keep2(gaussian.abs())) == pytest.approx(0.132, rel=0.01)
    assert lost(laplace, laplace * keep2(laplace.abs())) == pytest.approx(0.080, rel=0.01)
    assert soft(gaussian) == pytest.approx((0.258, 1.484), rel=0.01)
    assert soft(laplace) == pytest.approx((0.166, 1.291), rel=0.01)
    by_square, by_size = (
        lost(gaussian, gaussian * keep2_transposable(score)) for score in (gaussian.square(), gaussian.abs())
    )
    assert (by_square, by_size) == pytest.approx((0.178, 0.182), rel=0.01)


def test_patterns_and_masks_are_inverse() -> None:
    mask = keep2(normal(6, 48).abs())
    patterns = pattern_of(mask)
    assert patterns.shape == (6, 12) and patterns.unique().tolist() == list(range(6))
    assert torch.equal(mask_of(patterns), mask)
    with pytest.raises(InputError, match="not 2:4"):
        pattern_of(torch.ones(2, 4, dtype=torch.bool))


def test_flip_rate() -> None:
    one = keep2(torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4]]))
    other = keep2(torch.tensor([[4.0, 3, 2, 1], [4, 3, 2, 1]]))
    assert (flip_rate(one, one), flip_rate(one, other)) == (0, 0.5)


@pytest.mark.parametrize("rule", [keep2, keep2_transposable, soft_threshold])
def test_no_groups_of_four(rule) -> None:
    with pytest.raises(InputError, match=r"6 columns has no groups of four.*--skip"):
        rule(normal(4, 6))
