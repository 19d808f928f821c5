"""Entries beside a codebook: the places whose codes would cost most hold a float of their own.

    saving_ij = cost_ij (w_ij - level(w_ij))^2,   levels of the best density (`density.py`), refined

The `share` of a matrix with the largest saving is detached. The levels do not serve the places farthest from their row's
mean (cost times the squared distance, as many as there will be entries): levels that reach for an outlier leave it no error
of its own, and take from all others what it costs. In matrices with outliers that leaves a tenth less than levels of all.
Kim et al. 2023 (SqueezeLLM, arXiv 2306.07629) detach what is large and what is sensitive by two rules and two
fractions; one number, the loss that an entry takes away, lets entries compete with bits for the same bytes
(`requant.allocation.budget`). Residuals take 8 bits (`formats.in_8_bits`), so an entry costs two bytes.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant.errors import RecipeError
from requant.formats.containers import INDEX_TILE
from requant.quantizers.density import SortedRows, density_edges, run_cost, sort_rows, with_ends

SHARES = (0.0025, 0.005, 0.01, 0.02)
LARGEST_SHARE = 0.2
TYPICAL_BITS = 3  # at which the worth of entries is foretold
ROUNDS = (
    8  # of Lloyd, after which errors are within some percent of the best levels', with outliers or without
)
NOTHING = 1e-30  # the cost of a place that is detached, or that no gradient has reached


def check_share(share: float) -> None:
    """Raise RecipeError unless `share` is a fraction that leaves a matrix mostly dense."""
    if not 0 <= share <= LARGEST_SHARE:
        raise RecipeError(
            f"share is {share}, but entries are a fraction from 0 to {LARGEST_SHARE}: choose one."
        )


def count_of(share: float, shape: tuple[int, int]) -> int:
    """Entries in a matrix of this shape."""
    return round(share * shape[0] * shape[1])


def places(
    weight: Float[Tensor, "n k"], cost: Float[Tensor, "n k"], *, bits: int, share: float
) -> Bool[Tensor, "n k"] | None:
    """The entries of a matrix; None where its share is none.

    A tile of 256 columns keeps one place dense: its entries are counted in a byte.
    """
    count = count_of(share, (weight.shape[0], weight.shape[1]))
    if not count:
        return None
    mask = _chosen(weight, cost, bits, count)
    for tile in range(INDEX_TILE, weight.shape[1] + 1, INDEX_TILE):
        mask[mask[:, tile - INDEX_TILE : tile].all(1), tile - 1] = False
    return mask


def remaining(
    weight: Float[Tensor, "n k"], cost: Float[Tensor, "n k"], *, bits: int = TYPICAL_BITS
) -> dict[float, float]:
    """Share, one of SHARES -> the fraction of the weighted error that codes leave, once the entries are taken out.

    It hardly depends on the width: 0.90, 0.90 and 0.89 of 0.25 % entries at 2, 3 and 4 bits on models/demo-4m.
    """
    whole = _error(weight, cost, None, bits)
    found: dict[float, float] = {}
    for share in SHARES:
        mask = _chosen(weight, cost, bits, count_of(share, (weight.shape[0], weight.shape[1])))
        found[share] = _error(weight, cost, mask, bits) / whole if whole > 0 else 1.0
    return found


def _chosen(weight: Tensor, cost: Tensor, bits: int, count: int) -> Bool[Tensor, "n k"]:
    mean = (weight * cost).sum(1, keepdim=True) / cost.sum(1, keepdim=True).clamp(min=NOTHING)
    far = _largest(cost * (weight - mean).square(), count)
    levels = _levels(_rows(weight, cost, far), bits)
    nearest = torch.searchsorted((levels[:, 1:] + levels[:, :-1]) / 2, weight.double())
    return _largest(cost * (weight - levels.gather(1, nearest)).square().float(), count)


def _largest(values: Float[Tensor, "n k"], count: int) -> Bool[Tensor, "n k"]:
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    mask[values.flatten().topk(count).indices] = True
    return mask.view(values.shape)


def _rows(weight: Tensor, cost: Tensor, detached: Tensor | None) -> SortedRows:
    left = cost.double().clamp(min=NOTHING)
    if detached is not None:  # without weight, `sort_rows` puts them at the mean; a row keeps some weight
        left = left.masked_fill(detached & ~detached.all(1, keepdim=True), 0)
    return sort_rows(weight.double(), left)


def _runs(rows: SortedRows, bits: int) -> Float[Tensor, "3 n c"]:
    """Sums of mass, moment and energy over the runs that the levels serve."""
    edges = density_edges(rows, 2**bits)
    for _ in range(ROUNDS):
        means = _means(rows, _sums(rows, edges))
        middles = ((means[:, 1:] + means[:, :-1]) / 2).contiguous()
        edges = with_ends(torch.searchsorted(rows.values, middles), rows.values.shape[1])
    return _sums(rows, edges)


def _sums(rows: SortedRows, edges: Tensor) -> Float[Tensor, "3 n c"]:
    return torch.stack([total.gather(1, edges) for total in (rows.mass, rows.moment, rows.energy)]).diff()


def _means(rows: SortedRows, runs: Float[Tensor, "3 n c"]) -> Float[Tensor, "n c"]:
    """Ascending levels; those that serve nothing stand at the row's mean."""
    middle = rows.moment[:, -1:] / rows.mass[:, -1:]
    return torch.where(runs[0] > 0, runs[1] / runs[0], middle).sort(1).values


def _levels(rows: SortedRows, bits: int) -> Float[Tensor, "n c"]:
    return _means(rows, _runs(rows, bits))


def _error(weight: Tensor, cost: Tensor, detached: Tensor | None, bits: int) -> float:
    return run_cost(_runs(_rows(weight, cost, detached), bits)).sum().item()
