"""Embedding and head on asymmetric grids of 3 to 8 bits: rows in groups of GROUP columns, rounded to nearest.

The range of each group (`quantizers/rtn.py`) is shrunk by the factor that minimizes the weighted error. The weights are the
diagonal of the curvature, `sum_u r_ui c_uj`, so a row's errors count one by one. The error at b bits is taken as
`1 / (2^b - 1)^2` times that of one measured width: on bench-32m and demo-4m the measured KL is 0.8 times as much, at
all bits from 3 to 8.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from requant.formats.grid import Grid, GridSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.quantizers.kmeans import row_chunks
from requant.quantizers.method import Bits, Losses
from requant.quantizers.rtn import encode, fit_grid
from requant.quantizers.tables import TableMethod, Uses

GROUP = 64  # columns that share a scale
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
MEASURED_BITS = 4  # at which the error is measured; those at other bits follow
ELEMENTS = 1 << 24  # weights rounded at once, to bound memory


def packed_spec(shape: tuple[int, int], bits: Bits) -> PackedSpec:
    """What is stored for a table of this shape."""
    return PackedSpec(dense=GridSpec(bits=int(bits), shape=shape, group_size=GROUP, zero_points=True))


def quantize(weight: Float[Tensor, "v d"], uses: Uses, bits: Bits) -> QuantizedWeight:
    """Codes under the curvature of all uses."""
    parts = []
    for rows in row_chunks(weight, elements=ELEMENTS):
        values = weight[rows].float()
        importance = torch.stack([use.rows[rows, None] * use.columns for use in uses]).sum(0)
        importance += importance.mean() * 1e-3 + 1e-30  # a token that the text lacks counts a little
        parts.append(_best_shrunk(values, importance, bits=int(bits)))
    return QuantizedWeight(
        dense=Grid(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zero_points=torch.cat([part.zero_points for part in parts if part.zero_points is not None]),
            column_scales=None,
            bits=int(bits),
            group_size=GROUP,
        ),
        sparse=None,
    )


def _best_shrunk(values: Tensor, importance: Tensor, *, bits: int) -> Grid:
    """The grid whose shrink is best for every group."""
    n, k = values.shape
    groups = -(-k // GROUP)
    best = torch.full((n, groups), float("inf"), device=values.device)
    shrink = torch.ones_like(best)
    for factor in SHRINKS:
        fit = fit_grid(values, bits=bits, group_size=GROUP, symmetric=False, shrink=factor)
        error = (encode(values, fit, bits=bits, group_size=GROUP).dequantize() - values).square() * importance
        padded = torch.nn.functional.pad(error, (0, groups * GROUP - k))
        cost = padded.view(n, groups, GROUP).sum(2)
        shrink = torch.where(cost < best, factor, shrink)
        best = torch.minimum(cost, best)
    fit = fit_grid(values, bits=bits, group_size=GROUP, symmetric=False, shrink=shrink)
    return encode(values, fit, bits=bits, group_size=GROUP)


def predicted_losses(weight: Float[Tensor, "v d"], uses: Uses, widths: Sequence[Bits]) -> Losses:
    """Losses extrapolated from the measured error at MEASURED_BITS."""
    codes = quantize(weight, uses, MEASURED_BITS)
    unit = diagonal_loss(weight, codes, uses) * (2**MEASURED_BITS - 1) ** 2
    return {bits: unit / (2**bits - 1) ** 2 for bits in widths}


def diagonal_loss(weight: Float[Tensor, "v d"], quantized: QuantizedWeight, uses: Uses) -> float:
    """`1/2 sum_u sum_ij r_ui c_uj E_ij^2`, nats per token."""
    total, dense = 0.0, quantized.dense
    assert isinstance(dense, Grid)
    for rows in row_chunks(weight, elements=ELEMENTS):
        error = (_rows(dense, rows).dequantize() - weight[rows].float()).square()
        total += sum(0.5 * (use.rows[rows] @ (error @ use.columns)).double().item() for use in uses)
    return total


def _rows(dense: Any, rows: slice) -> Grid:
    return dataclasses.replace(
        dense, codes=dense.codes[rows], scales=dense.scales[rows], zero_points=dense.zero_points[rows]
    )


GRID = TableMethod(
    name="grid",
    bits=(3, 4, 5, 6, 7, 8),
    packed_spec=packed_spec,
    quantize=quantize,
    predicted_losses=predicted_losses,
    seconds_per_weight={"cpu": 2e-7, "cuda": 1e-9},
)
