import pytest
import torch

from requant.pipeline.paper import global_top, interquartile_range, largest_weights, outlier_fractions

SIZES = {"a": 1000, "b": 4000, "c": 200}
MEANS = {"a": 0.5, "b": 0.01, "c": 2.0}


def spent(fractions: dict[str, float], sizes: dict[str, int] = SIZES) -> float:
    return sum(fractions[name] * size for name, size in sizes.items())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0, float("inf")])
@pytest.mark.parametrize("fraction", [0.0, 0.0005, 0.0045, 0.02])
def test_algorithm_1_spends_the_budget(fraction: float, temperature: float) -> None:
    fractions = outlier_fractions(MEANS, SIZES, fraction=fraction, temperature=temperature)
    assert spent(fractions) == pytest.approx(fraction * 5200)
    assert all(0 <= share <= 1 for share in fractions.values())


def test_fractions_are_powers_of_the_scores() -> None:
    for temperature in (0.5, 1.0, 2.0):
        fractions = outlier_fractions(MEANS, SIZES, fraction=0.002, temperature=temperature)
        assert fractions["c"] / fractions["a"] == pytest.approx(4 ** (1 / temperature))
        assert fractions["a"] / fractions["b"] == pytest.approx(50 ** (1 / temperature))


def test_an_infinite_temperature_is_uniform() -> None:
    for temperature in (1e6, float("inf")):
        fractions = outlier_fractions(MEANS, SIZES, fraction=0.0045, temperature=temperature)
        assert list(fractions.values()) == pytest.approx([0.0045] * 3, rel=1e-4)


def test_what_a_full_matrix_cannot_take_goes_to_the_others() -> None:
    fractions = outlier_fractions(MEANS, SIZES, fraction=0.2, temperature=0.25)
    assert fractions["c"] == 1 and 0 < fractions["b"] < fractions["a"] < 1
    assert spent(fractions) == pytest.approx(0.2 * 5200)
    assert spent(outlier_fractions(MEANS, SIZES, fraction=1.0, temperature=1.0)) == pytest.approx(5200)


def test_scores_of_any_magnitude() -> None:
    expected = outlier_fractions(MEANS, SIZES, fraction=0.004, temperature=0.5)
    for scale in (1e-30, 1e-200, 1e30):
        fractions = outlier_fractions(
            {n: s * scale for n, s in MEANS.items()}, SIZES, fraction=0.004, temperature=0.5
        )
        assert fractions == pytest.approx(expected)
    nothing = outlier_fractions(dict.fromkeys(SIZES, 0.0), SIZES, fraction=0.004, temperature=0.5)
    assert list(nothing.values()) == pytest.approx([0.004] * 3)


@pytest.mark.parametrize("count", [0, 1, 7, 60])
def test_largest_weights(count: int) -> None:
    weight = torch.randn(6, 10)
    mask = largest_weights(weight, count)
    assert mask.sum() == count and mask.shape == weight.shape
    if 0 < count < 60:
        assert weight[mask].abs().min() > weight[~mask].abs().max()


def test_exact_counts_among_equals() -> None:
    assert largest_weights(torch.ones(8, 8), 5).sum() == 5
    scores = {"a": torch.ones(8, 8), "b": torch.ones(3, 4)}
    masks = global_top(
        scores, 70, taken={name: torch.zeros_like(s, dtype=torch.bool) for name, s in scores.items()}
    )
    assert sum(int(mask.sum()) for mask in masks.values()) == 70


def test_interquartile_range() -> None:
    values = torch.randn(200, 300)
    expected = values.quantile(0.75) - values.quantile(0.25)
    assert interquartile_range(values) == pytest.approx(expected.item(), rel=1e-2)
    assert interquartile_range(torch.zeros(3, 3)) > 0  # a divisor
    assert interquartile_range(torch.ones(1, 1)) > 0


@pytest.mark.parametrize("count", [0, 1, 17, 100, 149])
def test_global_top_is_the_topk_of_all(count: int) -> None:
    scores = {"a": torch.randn(6, 10), "b": torch.randn(9, 10) * 5, "c": torch.randn(1, 1)}
    nothing = {name: torch.zeros_like(s, dtype=torch.bool) for name, s in scores.items()}
    masks = global_top(scores, count, taken=nothing)
    joined = torch.cat([s.flatten() for s in scores.values()]).abs()
    expected = torch.zeros(joined.numel(), dtype=torch.bool)
    expected[joined.topk(count).indices] = True
    assert torch.equal(torch.cat([masks[name].flatten() for name in scores]), expected)
    assert all(masks[name].shape == s.shape for name, s in scores.items())


def test_global_top_leaves_out_what_is_taken() -> None:
    scores = {"a": torch.randn(6, 10), "b": torch.randn(9, 10)}
    taken = {name: torch.rand(s.shape) < 0.3 for name, s in scores.items()}
    masks = global_top(scores, 40, taken=taken)
    assert not any((masks[name] & taken[name]).any() for name in scores)
    open_ = torch.cat([s[~taken[name]] for name, s in scores.items()]).abs()
    chosen = torch.cat([s[masks[name]] for name, s in scores.items()]).abs()
    assert torch.equal(chosen.sort().values, open_.topk(40).values.sort().values)


def test_global_top_takes_all_that_is_left() -> None:
    scores = {"a": torch.zeros(4, 4), "b": torch.randn(2, 3)}
    taken = {"a": torch.zeros(4, 4, dtype=torch.bool), "b": torch.ones(2, 3, dtype=torch.bool)}
    masks = global_top(scores, 1000, taken=taken)
    assert masks["a"].all() and not masks["b"].any()


def test_arguments_are_not_changed() -> None:
    scores = {"a": torch.randn(4, 4)}
    taken = {"a": torch.rand(4, 4) < 0.5}
    before = scores["a"].clone(), taken["a"].clone()
    global_top(scores, 3, taken=taken)
    largest_weights(scores["a"], 3)
    assert torch.equal(scores["a"], before[0]) and torch.equal(taken["a"], before[1])
