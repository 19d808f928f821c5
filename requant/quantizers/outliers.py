"""Outliers next to a codebook: the weights whose codes would cost most are stored as floats.

    saving_ij = cost_ij (w_ij - level(w_ij))^2,   levels of the optimal density (`density.py`), refined by Lloyd's iteration

The fraction `outlier_fraction` of a matrix with the largest saving is detached. The levels are fitted without the weights
farthest from their row's mean (cost times squared distance, as many as there will be outliers): levels that stretch to an
outlier hide its error, at the expense of all other weights. In matrices with outliers the remaining loss is a tenth
lower than with levels fitted to all weights. SqueezeLLM (Kim et al. 2023, arXiv 2306.07629) detaches large and sensitive
weights by two rules and two fractions; here one number, the loss that an outlier saves, lets outliers compete with bits
for the same bytes (`requant.allocation.budget`). Residuals are int8 (`residuals_to_int8`), so an outlier costs two bytes.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant.errors import RecipeError
from requant.formats.sparse import INDEX_TILE
from requant.quantizers.density import SortedRows, density_edges, run_cost, sort_rows, with_ends

OUTLIER_FRACTIONS = (0.0025, 0.005, 0.01, 0.02)
MAX_FRACTION = 0.2
TYPICAL_BITS = 3  # at which the remaining loss is predicted
LLOYD_ITERATIONS = 8  # errors are then within a few percent of the optimal levels', with outliers or without
MIN_COST = 1e-30  # of a weight that is detached, or that no gradient has reached


def check_outlier_fraction(value: float) -> None:
    """Raise RecipeError unless `value` is a fraction that leaves a matrix mostly dense."""
    if not 0 <= value <= MAX_FRACTION:
        raise RecipeError(
            f"outlier_fraction is {value}, but it takes a fraction from 0 to {MAX_FRACTION}: choose one."
        )


def outlier_count(outlier_fraction: float, shape: tuple[int, int]) -> int:
    """Outliers in a matrix of this shape."""
    return round(outlier_fraction * shape[0] * shape[1])


def outlier_mask(
    weight: Float[Tensor, "n k"], cost: Float[Tensor, "n k"], *, bits: int, outlier_fraction: float
) -> Bool[Tensor, "n k"] | None:
    """The outliers of a matrix; None where it has none.

    At least one weight of a tile of 256 columns stays dense: the format counts a tile's outliers in one byte.
    """
    count = outlier_count(outlier_fraction, (weight.shape[0], weight.shape[1]))
    if not count:
        return None
    mask = _largest_savings(weight, cost, bits, count)
    for tile in range(INDEX_TILE, weight.shape[1] + 1, INDEX_TILE):
        mask[mask[:, tile - INDEX_TILE : tile].all(1), tile - 1] = False
    return mask


def remaining_loss(
    weight: Float[Tensor, "n k"], cost: Float[Tensor, "n k"], *, bits: int = TYPICAL_BITS
) -> dict[float, float]:
    """Outlier fraction, one of OUTLIER_FRACTIONS -> the part of the weighted error that remains with these outliers.

    It hardly depends on the bits: 0.90, 0.90 and 0.89 with 0.25 % outliers at 2, 3 and 4 bits on models/demo-4m.
    """
    whole = _error(weight, cost, None, bits)
    found: dict[float, float] = {}
    for fraction in OUTLIER_FRACTIONS:
        mask = _largest_savings(
            weight, cost, bits, outlier_count(fraction, (weight.shape[0], weight.shape[1]))
        )
        found[fraction] = _error(weight, cost, mask, bits) / whole if whole > 0 else 1.0
    return found


def _largest_savings(weight: Tensor, cost: Tensor, bits: int, count: int) -> Bool[Tensor, "n k"]:
    mean = (weight * cost).sum(1, keepdim=True) / cost.sum(1, keepdim=True).clamp(min=MIN_COST)
    far = _largest(cost * (weight - mean).square(), count)
    levels = _levels(_rows(weight, cost, far), bits)
    nearest = torch.searchsorted((levels[:, 1:] + levels[:, :-1]) / 2, weight.double())
    return _largest(cost * (weight - levels.gather(1, nearest)).square().float(), count)


def _largest(values: Float[Tensor, "n k"], count: int) -> Bool[Tensor, "n k"]:
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    mask[values.flatten().topk(count).indices] = True
    return mask.view(values.shape)


def _rows(weight: Tensor, cost: Tensor, detached: Tensor | None) -> SortedRows:
    kept = cost.double().clamp(min=MIN_COST)
    if detached is not None:  # `sort_rows` moves weights of no cost to the mean; a row keeps some cost
        kept = kept.masked_fill(detached & ~detached.all(1, keepdim=True), 0)
    return sort_rows(weight.double(), kept)


def _runs(rows: SortedRows, bits: int) -> Float[Tensor, "3 n c"]:
    """Sums of mass, moment and energy over the run of weights that each level represents."""
    edges = density_edges(rows, 2**bits)
    for _ in range(LLOYD_ITERATIONS):
        means = _means(rows, _sums(rows, edges))
        middles = ((means[:, 1:] + means[:, :-1]) / 2).contiguous()
        edges = with_ends(torch.searchsorted(rows.values, middles), rows.values.shape[1])
    return _sums(rows, edges)


def _sums(rows: SortedRows, edges: Tensor) -> Float[Tensor, "3 n c"]:
    return torch.stack([total.gather(1, edges) for total in (rows.mass, rows.moment, rows.energy)]).diff()


def _means(rows: SortedRows, runs: Float[Tensor, "3 n c"]) -> Float[Tensor, "n c"]:
    """Ascending levels; unused ones are the row's mean."""
    middle = rows.moment[:, -1:] / rows.mass[:, -1:]
    return torch.where(runs[0] > 0, runs[1] / runs[0], middle).sort(1).values


def _levels(rows: SortedRows, bits: int) -> Float[Tensor, "n c"]:
    return _means(rows, _runs(rows, bits))


def _error(weight: Tensor, cost: Tensor, detached: Tensor | None, bits: int) -> float:
    return run_cost(_runs(_rows(weight, cost, detached), bits)).sum().item()
