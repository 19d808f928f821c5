"""Column scales that protect the weights of large inputs, then round to nearest.

    w~ = round_to_grid(w * s) / s        s_j = (mean_t |x_jt|)^alpha, over sqrt(max s * min s)

with alpha chosen from a grid by the error of the layer's output, tr((W~ - W) H (W~ - W)'). Lin et al., "AWQ:
Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023, arXiv 2306.00978), equations 4
and 5. Then the range of every group shrinks by the factor that minimizes its own part of that error, d H_gg d'.

Deviations: every matrix has its own scales, stored with it in float16 (16 / n bits per weight), while the paper
folds one scale for all readers of an input into the layer before; the error is exact under H, not
measured on samples; both ends of a range shrink by the same factor, while the paper's code clips at plus and
minus the same value.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float16
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.formats.grid import Grid, group_count
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, with_residuals
from requant.quantizers import rtn
from requant.quantizers.checks import check_bits, check_group_size, check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.method import Method
from requant.quantizers.rtn import columns_of_group, encode, fit_grid

INPUT_FLOOR = 1e-4  # of the largest mean |x|: keeps scales of dead columns within float16
SHRINK_STEP = 0.05  # of the range of a group


@dataclass(frozen=True, kw_only=True)
class AwqConfig:
    """Options of `awq`."""

    bits: int = 4
    """Bits of a code."""
    group_size: int = 128
    """Columns that share a scale; -1: the whole row."""
    symmetric: bool = False
    """Whether the grid is symmetric around 0, without zero points."""
    alphas: int = 20
    """How many exponents of the column scales are tried: 0, 1/alphas, ..., all below 1."""
    clip_steps: int = 10
    """How many ranges of a group are tried: 1, 0.95, 0.9, ... of its own; 1: no clipping."""

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_group_size(self.group_size)
        if not 1 <= self.alphas <= 1000:
            raise RecipeError(f"alphas is {self.alphas}, but 1 to 1000 exponents can be tried: 20 is usual.")
        if not 1 <= self.clip_steps <= 20:
            raise RecipeError(
                f"clip_steps is {self.clip_steps}, but a range shrinks in 1 to 20 steps of {SHRINK_STEP}: "
                "choose 10, or 1 for no clipping."
            )


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: AwqConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Search column scales and ranges under `stats.hessian`, then round; detached weights count no error.

    The weight is corrected for its inputs beforehand (`correction.py`).

    Raises InputError without `stats.hessian` and `stats.input_mean_abs`, NumericalError if a value is not
    finite.
    """
    check_weight(weight)
    k = weight.shape[1]
    hessian = statistic(stats.hessian, "hessian", (k, k))
    mean_abs = statistic(stats.input_mean_abs, "input_mean_abs", (k,))
    values, free = (
        corrected(weight, stats),
        torch.zeros_like(weight, dtype=torch.bool) if detached is None else detached,
    )
    group_size = columns_of_group(config.group_size, k)

    def grid_at(scales: Float16[Tensor, " k"], shrink: Float[Tensor, "n g"] | float) -> Grid:
        scaled = values * scales.float()
        fit = fit_grid(
            scaled,
            bits=config.bits,
            group_size=group_size,
            symmetric=config.symmetric,
            detached=free,
            shrink=shrink,
        )
        return encode(scaled, fit, bits=config.bits, group_size=group_size, column_scales=scales)

    def error_of(grid: Grid) -> Float[Tensor, "n k"]:
        return (grid.dequantize() - values).masked_fill_(free, 0)

    candidates = [column_scales(mean_abs, step / config.alphas) for step in range(config.alphas)]
    losses = [output_error(error_of(grid_at(scales, 1.0)), hessian) for scales in candidates]
    best = candidates[int(torch.stack(losses).argmin())]

    shrink = torch.ones((values.shape[0], group_count(k, group_size)), device=values.device)
    lowest = torch.full_like(shrink, float("inf"))
    for step in range(config.clip_steps):
        factor = 1 - step * SHRINK_STEP
        errors = group_errors(error_of(grid_at(best, factor)), hessian, group_size=group_size)
        shrink = torch.where(errors < lowest, factor, shrink)
        lowest = torch.minimum(errors, lowest)

    return with_residuals(grid_at(best, shrink), values, detached)


def column_scales(mean_abs: Float[Tensor, " k"], alpha: float) -> Float16[Tensor, " k"]:
    """mean|x|^alpha, with the largest and the smallest scale at equal distance from one."""
    largest = mean_abs.amax()
    inputs = torch.where(largest > 0, mean_abs / largest, torch.ones_like(mean_abs))
    scales = inputs.clamp(min=INPUT_FLOOR).pow(alpha)
    return (scales / (scales.amax() * scales.amin()).sqrt()).half()


def output_error(error: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"]) -> Float[Tensor, ""]:
    """tr(D H D'): the mean squared error of the layer's output."""
    return (error @ hessian * error).sum()


def group_errors(
    error: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], *, group_size: int
) -> Float[Tensor, "n g"]:
    """d H_gg d' of every row and group: its output error, were it alone."""
    parts = [
        (part @ hessian[start : start + group_size, start : start + group_size] * part).sum(1)
        for start, part in zip(range(0, error.shape[1], group_size), error.split(group_size, 1), strict=True)
    ]
    return torch.stack(parts, 1)


def packed_spec(config: AwqConfig, shape: tuple[int, int], *, finetuned: bool = False) -> PackedSpec:
    """A grid with one scale per column."""
    return rtn.packed_spec(config, shape, column_scales=True)


METHOD = Method(
    summary="column scales that protect large inputs, then round to nearest (AWQ)",
    config=AwqConfig,
    quantize=quantize,
    needs=frozenset({"hessian", "input_mean_abs"}),
    packed_spec=packed_spec,
    predicted_losses=rtn.predicted_losses,  # of the grid without its column scales: what they gain is not predicted
    seconds_per_weight={"cpu": 5e-7, "cuda": 4e-8},
    detach={"outlier_fraction": 0.0025, "significant_fraction": 0.0},
)
