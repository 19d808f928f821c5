"""Choosing the bits of every matrix within a budget of stored bytes: a multiple-choice knapsack, one option per matrix.

    minimize    sum_m w_m A_m c(b_m)                      the predicted loss, weighted
    subject to  sum_m bytes_m(b_m) <= budget              bytes as the checkpoint will hold them

`c(b)` is the method's error at b bits and `A_m` the loss that one unit of error in matrix m causes (`predictors.py`): the
linearity theorem of Malinovskii et al. 2024 (HIGGS, arXiv 2411.17525). w_m is the share of the loss that remains if later
training repairs a part of it (`run/rounds.py`), otherwise 1.

With hundreds of matrices a price l of a byte comes close to the best choice (Everett 1963, "Generalized Lagrange multiplier
method"): each matrix takes the option that minimizes w A c(b) + l bytes(b), at the least l that keeps the budget, and what
is left is spent where it saves most. For every l

    sum_m min_b (w_m A_m c(b) + l bytes_m(b)) - l budget

is at most the loss of the best choice, so this one's distance from it is known. Where that is more than PRICED_GAP, HiGHS
solves the integer program to within GAP (`scipy.optimize.milp`): with hundreds of matrices it can take minutes. If there
are few matrices, or many equal ones, the best choice may leave more than TOLERANCE of the budget unspent; then the best
choice among those that do spend it is taken.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from requant.errors import RecipeError, RequantError

TOLERANCE = 0.005  # of the budget: what may stay unspent
OTHER_BUDGETS = (2 / 3, 5 / 6, 7 / 6, 4 / 3)  # times the budget: their predicted losses are reported too
PRICES = 60  # tried: bisection to the last bits
SECONDS = 60.0  # of the solver; a model of 200 matrices takes less than one
GAP = 1e-4  # of the loss: how far from the best a choice may be. Predicted losses are off by a thousand times as much
PRICED_GAP = 1e-3  # the same where a price is enough

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to store a tensor: bits of its codes, all bytes it takes, its predicted loss (nats per token).

    `outlier_fraction`: of its weights that are stored as floats. `weight`: what its loss counts, the same in all options of
    a tensor.
    """

    bits: int | float
    bytes: int
    loss: float
    outlier_fraction: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One option a tensor."""

    options: Mapping[str, Option]

    @property
    def bytes(self) -> int:
        return sum(option.bytes for option in self.options.values())

    @property
    def loss(self) -> float:
        return math.fsum(option.loss for option in self.options.values())


def allocate(options: Mapping[str, Sequence[Option]], budget: int) -> Choice:
    """The choice of least weighted loss, to within GAP, whose bytes lie within `budget`, and above 99.5 % of it if any
    choice does.

    Deterministic, whatever the order of `options`. An option with more bytes and no less loss is taken only to reach
    those 99.5 %. Raises RecipeError where even the smallest choice is too large.
    """
    names = sorted(options)
    kept = {name: _efficient(options[name]) for name in names}
    smallest = sum(kept[name][0].bytes for name in names)
    if budget < smallest:
        raise RecipeError(
            f"the budget is {budget:,} bytes, but the smallest choice takes {smallest:,}; give more."
        )
    best = _solved(names, kept, budget, 0)
    assert best is not None  # the smallest choice fits
    least = math.ceil((1 - TOLERANCE) * budget)
    if best.bytes >= least or sum(kept[name][-1].bytes for name in names) < least:
        return best
    return _solved(names, {name: sorted(options[name], key=_size) for name in names}, budget, least) or best


def allocate_with_curve(
    options: Mapping[str, Sequence[Option]], budget: int
) -> tuple[Choice, dict[int, float]]:
    """`allocate`, and budget in bytes -> predicted loss, at those of OTHER_BUDGETS that can be met.

    All are solved side by side: the solver takes most of a second for 112 matrices, and needs no lock of Python's.
    """
    smallest = sum(min(o.bytes for o in choices) for choices in options.values())
    budgets = [round(fraction * budget) for fraction in OTHER_BUDGETS]
    with ThreadPoolExecutor(len(budgets)) as executor:
        others = {near: executor.submit(allocate, options, near) for near in budgets if near >= smallest}
        choice = allocate(options, budget)
    return choice, {near: found.result().loss for near, found in others.items()}


def _size(option: Option) -> tuple[int, float, int | float, float]:
    """Sorts options by bytes; of equal ones the least loss is first, and the order does not depend on the input's."""
    return option.bytes, option.loss, option.bits, option.outlier_fraction


def _efficient(options: Sequence[Option]) -> list[Option]:
    """The options by rising bytes, without those that lose no less than a smaller one."""
    kept: list[Option] = []
    for option in sorted(options, key=_size):
        if not kept or option.loss < kept[-1].loss:
            kept.append(option)
    return kept


def _solved(
    names: Sequence[str], options: Mapping[str, Sequence[Option]], budget: int, least: int
) -> Choice | None:
    """The best choice with `least` <= bytes <= `budget`; None where there is none."""
    flat = [(index, option) for index, name in enumerate(names) for option in options[name]]
    base = sum(min(option.bytes for option in options[name]) for name in names)
    rows = np.array([index for index, _ in flat])
    # Bytes over each tensor's smallest option, in units of their greatest common divisor: small exact numbers.
    smallest = {index: min(o.bytes for o in options[name]) for index, name in enumerate(names)}
    extra = [option.bytes - smallest[index] for index, option in flat]
    unit = math.gcd(*extra) or 1
    cost = np.array([size // unit for size in extra], dtype=np.float64)
    losses = np.array([option.weight * option.loss for _, option in flat])
    spread = float(losses.max() - losses.min()) or 1.0
    once = csr_array((np.ones(len(flat)), (rows, np.arange(len(flat)))))
    most, need = (budget - base) // unit, max(0, -(-(least - base) // unit))
    priced, gap = _priced(losses, cost, rows, most)
    by_price = Choice(options={names[index]: option for index, option in (flat[at] for at in priced)})
    enough = by_price.bytes >= least
    if enough and gap <= PRICED_GAP:
        return by_price
    while most >= need:
        found = milp(
            losses / spread,
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(once, 1, 1),  # type: ignore[arg-type]
                # sparse too: of a dense matrix SciPy raises warnings as errors, not in its own thread alone
                LinearConstraint(csr_array(cost[None]), need, most),  # type: ignore[arg-type]
            ],
            options={"mip_rel_gap": GAP, "time_limit": SECONDS},
        )
        if found.x is None:
            if found.status == 2:  # infeasible
                return None
            if enough:
                logger.warning(
                    "the solver found no division of the budget in %.0f s; the one taken may lose %.1g more than the best, "
                    "as a part of its predicted loss",
                    SECONDS,
                    gap,
                )
                return by_price
            raise RequantError(
                f"the budget could not be solved ({found.message}); give another --bits or --size."
            )
        choice = _choice(names, flat, found.x)
        if choice.bytes <= budget:
            return choice
        most -= 1  # the solver rounds; bytes are checked as integers
    return None


def _priced(
    losses: Float64[np.ndarray, " o"],
    cost: Float64[np.ndarray, " o"],
    rows: Int64[np.ndarray, " o"],
    most: int,
) -> tuple[list[int], float]:
    """The options that a price chooses, one for each of the ascending `rows`, whose cost is at most `most`; and by what part
    of their loss they lose more than the best choice, at most.

    Of a row's options, which are sorted by cost, the first costs nothing.
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))

    def at(price: float) -> tuple[Any, float]:
        total = losses + price * cost
        least = np.minimum.reduceat(total, starts)
        first = np.unique(rows[cheapest := np.flatnonzero(total <= least[rows])], return_index=True)[1]
        return cheapest[first], float(least.sum() - price * most)

    options, bound = at(0.0)
    if cost[options].sum() <= most:
        return options.tolist(), 0.0
    taken = starts
    saved = losses[starts][rows] - losses
    low, high = 0.0, float((saved / np.maximum(cost, 1)).max())  # above it no option is worth its cost
    for _ in range(PRICES):
        price = (low + high) / 2
        options, below = at(price)
        bound = max(bound, below)
        if cost[options].sum() <= most:
            taken, high = options, price
        else:
            low = price
    taken = taken.copy()
    left = most - cost[taken].sum()
    while True:  # spend what is left
        saved = np.where(cost - cost[taken][rows] <= left, losses[taken][rows] - losses, 0.0)
        best = int(saved.argmax())
        if saved[best] <= 0:
            break
        left -= cost[best] - cost[taken[rows[best]]]
        taken[rows[best]] = best
    loss = float(losses[taken].sum())
    return taken.tolist(), max(0.0, loss - bound) / max(loss, math.ulp(0.0))


def _choice(names: Sequence[str], flat: Sequence[tuple[int, Option]], x: Any) -> Choice:
    """The option of every tensor whose variable is largest: the solver's zeros and ones are floats."""
    taken: dict[int, tuple[float, Option]] = {}
    for (index, option), value in zip(flat, x, strict=True):
        if index not in taken or value > taken[index][0]:
            taken[index] = (value, option)
    return Choice(options={name: taken[index][1] for index, name in enumerate(names)})
