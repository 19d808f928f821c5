import dataclasses
import itertools
import math
import random
from types import SimpleNamespace

import pytest

from requant.allocation import knapsack
from requant.allocation.knapsack import OTHER_BUDGETS, TOLERANCE, Option, allocate, allocate_with_curve
from requant.errors import RecipeError

pytestmark = pytest.mark.usefixtures("full_reports")


def instance(seed: int, tensors: int = 5, widths: int = 4) -> dict[str, list[Option]]:
    """Random tensors of a few shapes; a bit more divides the loss by about four."""
    generator = random.Random(seed)
    found = {}
    for index in range(tensors):
        size, cost = generator.choice([64, 96, 1000, 1024]), generator.random() ** 3
        found[f"m{index}"] = [
            Option(bits=b, bytes=size * b + 12, loss=cost * generator.uniform(3, 5) ** -b)
            for b in range(1, widths + 1)
        ]
    return found


def brute_force(options: dict[str, list[Option]], budget: int, *, spent: float = 1 - TOLERANCE) -> float:
    """The least loss within the budget, among choices that spend so much of it if there are any."""
    fitting = [
        (sum(o.bytes for o in choice), sum(o.loss for o in choice))
        for choice in itertools.product(*options.values())
        if sum(o.bytes for o in choice) <= budget
    ]
    full = [loss for size, loss in fitting if size >= spent * budget]
    return min(full) if full else min(loss for _, loss in fitting)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed: int) -> None:
    options = instance(seed)
    smallest, largest = (sum(pick(o.bytes for o in c) for c in options.values()) for pick in (min, max))
    for share in (0.0, 0.1, 0.35, 0.5, 0.77, 1.0, 1.2):
        budget = round(smallest + share * (largest - smallest))
        choice = allocate(options, budget)
        assert choice.bytes <= budget
        assert choice.loss == pytest.approx(brute_force(options, budget), rel=1e-6)


def test_a_known_optimum() -> None:
    """Two bits more for the tensor that matters, at the cost of the one that does not."""
    options = {
        "matters": [Option(bits=b, bytes=100 * b, loss=100 * 4.0**-b) for b in range(1, 5)],
        "hardly": [Option(bits=b, bytes=100 * b, loss=0.01 * 4.0**-b) for b in range(1, 5)],
    }
    choice = allocate(options, 500)
    assert {name: option.bits for name, option in choice.options.items()} == {"matters": 4, "hardly": 1}
    assert choice.bytes == 500 and choice.loss == pytest.approx(100 / 256 + 0.01 / 4)


def test_weights_move_bits_and_leave_the_loss_as_it_is() -> None:
    """Of two equal tensors one whose loss counts a hundredth gives its bits to the other; losses add up as they are."""
    own = [Option(bits=b, bytes=100 * b, loss=4.0**-b) for b in range(1, 5)]
    mended = [dataclasses.replace(option, weight=0.01) for option in own]
    choice = allocate({"last": own, "first": mended}, 500)
    assert {name: option.bits for name, option in choice.options.items()} == {"last": 4, "first": 1}
    assert choice.loss == pytest.approx(1 / 256 + 1 / 4)


def test_more_budget_never_loses_more() -> None:
    options = instance(7, tensors=40, widths=8)
    losses = [allocate(options, budget).loss for budget in range(30_000, 150_000, 8_000)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_the_order_of_tensors_and_options_does_not_matter() -> None:
    """Ties between equal tensors are decided the same way each time."""
    twin = [Option(bits=b, bytes=10 * b, loss=4.0**-b) for b in (1, 2, 3, 4)]
    options = {name: list(twin) for name in "abcdef"}
    turned = {name: list(reversed(choices)) for name, choices in reversed(options.items())}
    first, second = allocate(options, 150), allocate(turned, 150)
    assert first.bytes == 150 and first.options == second.options == allocate(options, 150).options


def test_an_option_that_costs_more_for_nothing_is_left() -> None:
    options = {"a": [Option(bits=4, bytes=40, loss=1.0), Option(bits=5, bytes=50, loss=1.0)],
               "b": [Option(bits=2, bytes=1000, loss=1.0)]}  # fmt: skip
    assert allocate(options, 1042).options["a"].bits == 4


def test_the_budget_is_spent_where_a_choice_spends_it() -> None:
    """The best choice leaves 20 % here; one that loses more fills the budget."""
    options = {
        "a": [Option(bits=1, bytes=100, loss=10.0), Option(bits=2, bytes=700, loss=0.0)],
        "b": [Option(bits=1, bytes=100, loss=1.0), Option(bits=2, bytes=900, loss=0.0)],
    }
    choice = allocate(options, 1000)
    assert choice.bytes == 1000 and choice.options["b"].bits == 2
    assert allocate(options, 990).bytes == 800  # nothing lies within half a percent


def test_a_budget_below_the_smallest_choice() -> None:
    options = instance(1)
    smallest = sum(min(o.bytes for o in choices) for choices in options.values())
    assert allocate(options, smallest).bytes == smallest
    with pytest.raises(RecipeError, match=f"the smallest choice takes {smallest:,}; give more"):
        allocate(options, smallest - 1)


def test_neighbours_are_what_other_budgets_would_lose() -> None:
    options = instance(3, tensors=20)
    budget = sum(choices[1].bytes for choices in options.values())
    choice, curve = allocate_with_curve(options, budget)
    assert choice == allocate(options, budget)
    assert list(curve) == [round(share * budget) for share in (2 / 3, 5 / 6, 7 / 6, 4 / 3)]
    assert all(loss == allocate(options, size).loss for size, loss in curve.items())
    smallest = sum(choices[0].bytes for choices in options.values())
    assert min(allocate_with_curve(options, smallest)[1]) > smallest


def test_a_large_model_takes_seconds() -> None:
    options = instance(0, tensors=500, widths=8)
    budget = int(2.5 * sum(choices[0].bytes for choices in options.values()))
    choice = allocate(options, budget)
    assert 0 <= 1 - choice.bytes / budget < 1e-3


@pytest.mark.parametrize("seed", range(12))
def test_a_price_says_how_far_it_is_from_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[float] = []
    priced = knapsack._priced
    monkeypatch.setattr(knapsack, "_priced", lambda *args: gaps.append((found := priced(*args))[1]) or found)
    monkeypatch.setattr(knapsack, "PRICED_GAP", math.inf)
    monkeypatch.setattr(knapsack, "TOLERANCE", 1.0)
    options = instance(seed)
    smallest, largest = (sum(pick(o.bytes for o in c) for c in options.values()) for pick in (min, max))
    for share in (0.0, 0.1, 0.35, 0.5, 0.77, 1.0, 1.2):
        budget = round(smallest + share * (largest - smallest))
        choice, best = allocate(options, budget), brute_force(options, budget, spent=0.0)
        assert choice.bytes <= budget and best * (1 - 1e-9) <= choice.loss
        assert (choice.loss - best) / choice.loss <= gaps[-1] + 1e-9
    assert max(gaps) < 1 and min(gaps) == 0


def test_hundreds_of_experts_need_no_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape with some other matrices, for which HiGHS took its minute and stopped 0.05 % from its bound."""
    generator = random.Random(0)
    options = {}
    for index in range(600):
        size, cost = 2**23 if index % 100 == 0 else 3 * 2**19, math.exp(generator.gauss(0, 1.2))
        options[f"m{index}"] = [
            Option(bits=b, bytes=int(size * b / 8) + 4000, loss=cost * 4.0**-b)
            for b in (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 4, 5, 6)
        ]
    monkeypatch.setattr(knapsack, "milp", None)
    budget = sum(choices[4].bytes for choices in options.values())
    choice = allocate(options, budget)
    assert 0.999 < choice.bytes / budget <= 1
    assert choice.loss < 0.8 * sum(choices[4].loss for choices in options.values())


def test_a_solver_that_finds_nothing_leaves_what_a_price_gives(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    options = instance(0)
    budget = int(2.5 * sum(choices[0].bytes for choices in options.values()))
    monkeypatch.setattr(knapsack, "PRICED_GAP", -1.0)
    monkeypatch.setattr(
        knapsack, "milp", lambda *_, **__: SimpleNamespace(x=None, status=1, message="time limit")
    )
    choice = allocate(options, budget)
    assert choice.bytes <= budget and "the solver found no division of the budget in 60 s" in caplog.text


def test_warnings_of_other_threads_stay_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """SciPy makes all of them errors while it reads a dense matrix; where two threads do, they may stay errors for good."""

    def everywhere(action: str) -> None:
        raise AssertionError(f"warnings became {action}s in all threads")

    monkeypatch.setattr("scipy.optimize._constraints.simplefilter", everywhere)
    options = instance(0, tensors=40)
    assert len(allocate_with_curve(options, 100_000)[1]) == len(OTHER_BUDGETS)
