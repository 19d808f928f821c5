"""Round to nearest on a uniform grid per group: the baseline that needs no calibration.

A group of `group_size` neighbouring columns of a row spans [lo, hi], which always holds zero:

    scale = (hi - lo) / (2^bits - 1)        zero_point = round(-lo / scale)
    code  = clamp(round(w / scale) + zero_point, 0, 2^bits - 1)

Symmetric grids take hi = -lo = max |w| and a zero point fixed at 2^(bits - 1). This is the grid of Frantar et
al., "GPTQ" (2022, arXiv 2210.17323); `gptq` and `awq` take it from here. One deviation: the scale is rounded to
float16 before zero points and codes are chosen, so that they fit the scale that is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float16, UInt8
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError
from requant.formats.grid import Grid, GridSpec, group_count
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, with_residuals
from requant.quantizers.checks import check_bits, check_group_size, check_weight, statistic
from requant.quantizers.method import Bits, Losses, Method


@dataclass(frozen=True, kw_only=True)
class RtnConfig:
    """Options of `rtn`."""

    bits: int = 4
    """Bits of a code."""
    group_size: int = 128
    """Columns that share a scale; -1: the whole row."""
    symmetric: bool = False
    """Whether the grid is symmetric around 0, without zero points."""

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_group_size(self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridFit:
    """Where the grid of every group lies; `zero_points` None means symmetric."""

    scales: Float16[Tensor, "n g"]
    zero_points: UInt8[Tensor, "n g"] | None


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: RtnConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Round every weight to the grid of its group; detached weights do not widen it. `stats` is not read.

    Raises NumericalError if a weight is not finite.
    """
    check_weight(weight)
    group_size = columns_of_group(config.group_size, weight.shape[1])
    values = weight.float()
    fit = fit_grid(
        values, bits=config.bits, group_size=group_size, symmetric=config.symmetric, detached=detached
    )
    return round_to_grid(values, fit, bits=config.bits, group_size=group_size, detached=detached)


def round_to_grid(
    weight: Float[Tensor, "n k"],
    fit: GridFit,
    *,
    bits: int,
    group_size: int,
    detached: Bool[Tensor, "n k"] | None,
) -> QuantizedWeight:
    """Every weight at its nearest code, and the residuals of the detached ones."""
    return with_residuals(encode(weight, fit, bits=bits, group_size=group_size), weight, detached)


def columns_of_group(group_size: int, k: int) -> int:
    """The group size in columns; -1 stands for the whole row."""
    return k if group_size == -1 else group_size


def ranges(
    weight: Float[Tensor, "n k"],
    *,
    group_size: int,
    symmetric: bool,
    detached: Bool[Tensor, "n k"] | None = None,
) -> tuple[Float[Tensor, "n g"], Float[Tensor, "n g"]]:
    """[lo, hi] of every group; the last group may be shorter."""
    n, k = weight.shape
    groups = group_count(k, group_size)
    kept = weight if detached is None else weight.masked_fill(detached, 0)
    # Zero belongs to every grid, so detached weights and the padding of the last group are set to zero.
    grouped = torch.nn.functional.pad(kept, (0, groups * group_size - k)).view(n, groups, group_size)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    return low, high


def fit_grid(
    weight: Float[Tensor, "n k"],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    detached: Bool[Tensor, "n k"] | None = None,
    shrink: Float[Tensor, "n g"] | float = 1.0,
) -> GridFit:
    """The min/max grid of every group, its range multiplied by `shrink`; the last group may be shorter."""
    low, high = ranges(weight, group_size=group_size, symmetric=symmetric, detached=detached)
    scales = ((high - low) * shrink / (2**bits - 1)).half()
    if not scales.isfinite().all():
        raise NumericalError(
            "The scale of a group is beyond float16, for the weights grew too large on the way to the grid: "
            "use rtn or kmeans for this matrix, or more damping in gptq."
        )
    # A group without a range that float16 can hold is all zero; any scale serves it.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    if symmetric:
        return GridFit(scales=scales, zero_points=None)
    zero_points = (-low * shrink / scales.float()).round().clamp(0, 2**bits - 1)
    return GridFit(scales=scales, zero_points=zero_points.to(torch.uint8))


def encode(
    weight: Float[Tensor, "n k"],
    fit: GridFit,
    *,
    bits: int,
    group_size: int,
    column_scales: Float16[Tensor, " k"] | None = None,
) -> Grid:
    """The nearest code of every weight; `weight` is already multiplied by `column_scales`."""
    columns = torch.arange(weight.shape[1], device=weight.device) // group_size
    zeros = zero_points_as_floats(fit, bits)
    codes = nearest_codes(weight, fit.scales.float()[:, columns], zeros[:, columns], bits=bits)
    return Grid(
        codes=codes.to(torch.uint8),
        scales=fit.scales,
        zero_points=fit.zero_points,
        column_scales=column_scales,
        bits=bits,
        group_size=group_size,
    )


def zero_points_as_floats(fit: GridFit, bits: int) -> Float[Tensor, "n g"]:
    """The code at which zero sits, for both kinds of grid."""
    if fit.zero_points is None:
        return torch.full_like(fit.scales, 2 ** (bits - 1), dtype=torch.float32)
    return fit.zero_points.float()


def nearest_codes(
    weight: Float[Tensor, "n k"],
    scales: Float[Tensor, "n k"],
    zero_points: Float[Tensor, "n k"],
    *,
    bits: int,
) -> Float[Tensor, "n k"]:
    """The codes, as floats, with the scale and zero point of every weight given."""
    return ((weight / scales).round() + zero_points).clamp(0, 2**bits - 1)


def packed_spec(
    config: Any, shape: tuple[int, int], *, finetuned: bool = False, column_scales: bool = False
) -> PackedSpec:
    """What is stored for a grid: codes, scales, and zero points unless it is symmetric."""
    return PackedSpec(
        dense=GridSpec(
            bits=config.bits,
            shape=shape,
            group_size=columns_of_group(config.group_size, shape[1]),
            zero_points=not config.symmetric,
            column_scales=column_scales,
        )
    )


def predicted_losses(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: Any, widths: Sequence[Bits]
) -> Losses:
    """`1/2 sum F e^2`, F the Fisher diagonal."""
    return grid_losses(weight, statistic(stats.fisher, "fisher", tuple(weight.shape)), config, widths)


def grid_losses(
    weight: Float[Tensor, "n k"], cost: Float[Tensor, "n k"], config: Any, widths: Sequence[Bits]
) -> Losses:
    """`1/2 sum cost e^2` with `e^2 = s^2 / 12`, the mean squared rounding error on a grid of step s."""
    group_size = columns_of_group(config.group_size, weight.shape[1])
    # not those of `fit_grid`, which gives a group of zeros a scale too
    low, high = ranges(weight, group_size=group_size, symmetric=config.symmetric)
    scales = ((high - low) / 255).half().float()
    columns = torch.arange(weight.shape[1], device=weight.device) // group_size
    one_step = (scales * 255).square()[:, columns] / 12  # of a grid of two levels
    loss = (cost * one_step).sum(dtype=torch.float64).item()
    return {bits: 0.5 * loss / (2**bits - 1) ** 2 for bits in widths}


METHOD = Method(
    summary="round to nearest on a grid per group; no calibration",
    config=RtnConfig,
    quantize=quantize,
    packed_spec=packed_spec,
    predicted_losses=predicted_losses,
    plain_grid=True,
    seconds_per_weight={"cpu": 1e-8, "cuda": 1e-9},
)
