"""Weighted numbers in ascending order, and the runs to which a quantizer of the optimal density would give one level each.

Panter and Dite (1951): the levels of a fine quantizer have density (dF/dw)^(1/3), F the mass of the weights. Prefix sums of
mass, moment and energy give the weighted mean of any run, and its error, in constant time.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedRows:
    """Rows in ascending order, with the running sums that give the cost of any interval.

    Column j of a sum is the total over the first j weights. `mass` sums F, `moment` F w, `energy` F w^2.
    """

    values: Float[Tensor, "n k"]
    mass: Float[Tensor, "n k+1"]
    moment: Float[Tensor, "n k+1"]
    energy: Float[Tensor, "n k+1"]


def sort_rows(weight: Float[Tensor, "n k"], weights: Float[Tensor, "n k"]) -> SortedRows:
    """Sort every row. Those of weight zero move to the row's mean, so that they do not distort the density."""
    mean = (weight * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    values, order = torch.where(weights > 0, weight, mean).sort(1)
    mass = weights.gather(1, order)
    moment = mass * values

    def running(terms: Tensor) -> Tensor:
        return torch.nn.functional.pad(terms.cumsum(1), (1, 0))

    return SortedRows(
        values=values, mass=running(mass), moment=running(moment), energy=running(moment * values)
    )


def density_edges(rows: SortedRows, cells: int) -> Int64[Tensor, "n e"]:
    """Positions that cut each sorted row into `cells` runs of equal integral (dF/dw)^(1/3) dw.

    A row of k <= cells weights is cut at every weight. The density dF/dw around a weight is read from a quarter
    of a cell to either side, for single gaps are noise.
    """
    n, k = rows.values.shape
    position = torch.arange(k + 1, device=rows.values.device)
    if k <= cells:
        return position.expand(n, -1)
    reach = max(1, k // (4 * cells))
    left, right = (position[:-1] - reach).clamp(min=0), (position[1:] + reach).clamp(max=k)
    width = rows.values[:, right - 1] - rows.values[:, left]
    mass = (rows.mass[:, right] - rows.mass[:, left]).clamp(min=0)
    density = torch.where(width > 0, mass / width, 0.0)  # equal weights, frequent in bfloat16, have no gaps
    gap = rows.values[:, position[1:].clamp(max=k - 1)] - rows.values[:, (position[:-1] - 1).clamp(min=0)]
    cumulative = (density.pow(1 / 3) * gap).cumsum(1)
    steps = torch.linspace(0, 1, cells + 1, dtype=cumulative.dtype, device=cumulative.device)[1:-1]
    inner = torch.searchsorted(cumulative, (cumulative[:, -1:] * steps).contiguous())
    return with_ends(inner, k)


def with_ends(inner: Int64[Tensor, "n _"], k: int) -> Int64[Tensor, "n _"]:
    """The positions between runs, with 0 in front and k at the end."""
    ends = torch.zeros_like(inner[:, :1])
    return torch.cat([ends, inner, ends + k], 1)


def run_cost(sums: Float[Tensor, "3 ..."]) -> Float[Tensor, "..."]:
    """sum F (w - mean)^2 of runs with these sums of F, F w, F w^2."""
    return (sums[2] - sums[1].square() / sums[0].clamp(min=torch.finfo(sums.dtype).tiny)).clamp_(min=0)
