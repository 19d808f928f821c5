"""Rounding column by column, each error passed on to the columns that are still free.

    minimize  tr((W~ - W) H (W~ - W)')      H = mean_t x_t x_t' + damp mean(diag H) I

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022,
arXiv 2210.17323), algorithm 1: with H^-1 = U'U, U upper triangular, column j is rounded and the columns l > j take

    W_l  -=  (W_j - W~_j) / U_jj * U_jl

in blocks of at most 128 columns, so that most of the work is one matrix product a block. The grid of a group
is fitted when its first column is reached, to the weights as the errors of earlier columns have left them.

`act_order` takes the columns in order of decreasing diag H. The grids are then fitted beforehand, to the original
weights (static groups), so that groups remain neighbouring columns and no index of groups is stored.

Deviations: U comes from one Cholesky factorization of the reversed H, not from factorizing H and its inverse;
dead columns (never any input) are rounded to nearest rather than zeroed, since other text may use them; detached
weights keep the value that compensation has given them, and pass on no error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.grid import Grid, group_count
from requant.formats.quantized_weight import QuantizedWeight, with_residuals
from requant.quantizers import rtn
from requant.quantizers.checks import check_bits, check_fraction, check_group_size, check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.damping import damped_cholesky
from requant.quantizers.method import Bits, Losses, Method
from requant.quantizers.rtn import GridFit, columns_of_group, fit_grid, nearest_codes, zero_points_as_floats

BLOCK = 128  # columns between two large updates


@dataclass(frozen=True, kw_only=True)
class GptqConfig:
    """Options of `gptq`."""

    bits: int = 4
    """Bits of a code."""
    group_size: int = 128
    """Columns that share a scale; -1: the whole row."""
    symmetric: bool = False
    """Whether the grid is symmetric around 0, without zero points."""
    act_order: bool = False
    """Whether columns are quantized in the order of falling Hessian diagonal."""
    damp: float = 0.01
    """Added to the Hessian's diagonal, as a fraction of its mean; raised tenfold, with a warning, until
    H is positive definite."""

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_group_size(self.group_size)
        check_fraction("damp", self.damp)


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: GptqConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Round `weight`, corrected for its inputs (`correction.py`), with error compensation under `stats.hessian`.

    The sparse part holds the compensated values of detached weights, not the original ones. Raises InputError
    without `stats.hessian`, NumericalError if it or the weight is not finite, or if no damping makes it positive
    definite.
    """
    check_weight(weight)
    k = weight.shape[1]
    hessian = statistic(stats.hessian, "hessian", (k, k))
    target = corrected(weight, stats)
    group_size = columns_of_group(config.group_size, k)
    grid_options = {"bits": config.bits, "group_size": group_size, "symmetric": config.symmetric}
    if config.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
        whole = fit_grid(target, **grid_options, detached=detached)
        fits = [group_of(whole, group) for group in range(group_count(k, group_size))]
    else:
        order = torch.arange(k, device=weight.device)
        fits = []
    upper = hessian_inv_cholesky(hessian[order][:, order], damp=config.damp)
    work = round_columns(
        target[:, order],
        upper,
        fits,
        groups=(order // group_size).tolist(),
        detached=None if detached is None else detached[:, order],
        **grid_options,
    )
    back = order.argsort()
    grid = Grid(
        codes=work.codes[:, back],
        scales=work.fit.scales,
        zero_points=work.fit.zero_points,
        column_scales=None,
        bits=config.bits,
        group_size=group_size,
    )
    return with_residuals(grid, work.weight[:, back], detached)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """The result of the column loop: codes, their grids, and every weight as compensated when it was rounded."""

    codes: UInt8[Tensor, "n k"]
    fit: GridFit
    weight: Float[Tensor, "n k"]


def hessian_inv_cholesky(hessian: Float[Tensor, "k k"], *, damp: float) -> Float[Tensor, "k k"]:
    """Upper triangular U with U'U = (H + d I)^-1, with d as `damped_cholesky` says."""
    # With J the reversal, J (H + d I) J = L L' gives H + d I = M M' for the upper triangular M = J L J, and U = M^-1.
    lower, _ = damped_cholesky(hessian, damp, backward=True)
    identity = torch.eye(hessian.shape[0], device=hessian.device)
    return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)


def blocks(k: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Column ranges of about BLOCK columns in which no group begins before the block and ends inside it.

    So the weights of a group that begins in a block are up to date: it lies inside, or begins with the block.
    """
    if group_size <= BLOCK:
        size = BLOCK // group_size * group_size
        yield from ((start, min(start + size, k)) for start in range(0, k, size))
        return
    for group in range(0, k, group_size):
        end = min(group + group_size, k)
        yield from ((start, min(start + BLOCK, end)) for start in range(group, end, BLOCK))


def group_of(fit: GridFit, group: int) -> GridFit:
    """The fit of one group alone."""
    zero_points = None if fit.zero_points is None else fit.zero_points[:, group, None]
    return GridFit(scales=fit.scales[:, group, None], zero_points=zero_points)


def round_columns(
    weight: Float[Tensor, "n k"],
    upper: Float[Tensor, "k k"],
    fits: list[GridFit],
    *,
    groups: list[int],
    bits: int,
    group_size: int,
    symmetric: bool,
    detached: Bool[Tensor, "n k"] | None,
) -> Rounded:
    """Round the columns from left to right, column j on the grid of group `groups[j]`.

    `fits` holds one fit a group, or is empty: then each is made when the first column of its group is due.
    """
    k = weight.shape[1]
    left, fits = weight.clone(), list(fits)
    static = bool(fits)
    codes = torch.empty_like(left, dtype=torch.uint8)
    for start, stop in blocks(k, group_size):
        errors = torch.empty_like(left[:, start:stop])
        for j in range(start, stop):
            if not static and j % group_size == 0:
                group = slice(j, j + group_size)
                free = None if detached is None else detached[:, group]
                fits.append(
                    fit_grid(
                        left[:, group], bits=bits, group_size=group_size, symmetric=symmetric, detached=free
                    )
                )
            fit, column = fits[groups[j]], left[:, j, None]
            scales, zero_points = fit.scales.float(), zero_points_as_floats(fit, bits)
            code = nearest_codes(column, scales, zero_points, bits=bits)
            error = (column - (code - zero_points) * scales) / upper[j, j]
            if detached is not None:
                error.masked_fill_(detached[:, j, None], 0)
            left[:, j + 1 : stop] -= error * upper[j, j + 1 : stop]
            errors[:, j - start, None] = error
            codes[:, j, None] = code.to(torch.uint8)
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    zero_points = [fit.zero_points for fit in fits if fit.zero_points is not None]
    whole = GridFit(
        scales=torch.cat([fit.scales for fit in fits], 1),
        zero_points=torch.cat(zero_points, 1) if zero_points else None,
    )
    return Rounded(codes=codes, fit=whole, weight=left)


def predicted_losses(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: GptqConfig, widths: Sequence[Bits]
) -> Losses:
    """`1/2 sum G_ii D_jj e^2`: errors on the grid are white before they are fed back."""
    cost = cost_after_feedback(stats, damp=config.damp, act_order=config.act_order)
    return rtn.grid_losses(weight, cost, config, widths)


def cost_after_feedback(stats: LinearStats, *, damp: float, act_order: bool) -> Float[Tensor, "n k"]:
    """`G_ii D_jj`, with `H = L D L'` in the order of the columns: the cost of a squared rounding error at each weight.

    The rest of what an error costs is compensated by later columns. Reads `stats.hessian` and `stats.output_hessian`.
    """
    assert stats.hessian is not None and stats.output_hessian is not None  # gathered as `predictor_needs`
    hessian = statistic(stats.hessian, "hessian", tuple(stats.hessian.shape))
    output_hessian = statistic(stats.output_hessian, "output_hessian", tuple(stats.output_hessian.shape))
    if not hessian.diagonal().any():  # no input was ever seen: errors cost nothing, whatever the damping is
        return hessian.new_zeros(len(output_hessian), len(hessian))
    order = torch.arange(len(hessian), device=hessian.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = hessian_inv_cholesky(hessian[order][:, order], damp=damp)
    conditional = torch.empty_like(hessian[0])
    conditional[order] = upper.diagonal().square().reciprocal()
    return output_hessian.diagonal()[:, None] * conditional


METHOD = Method(
    summary="round column by column, compensating each error in later columns (GPTQ)",
    config=GptqConfig,
    quantize=quantize,
    needs=frozenset({"hessian"}),
    packed_spec=rtn.packed_spec,
    predicted_losses=predicted_losses,
    predictor_needs=frozenset({"hessian", "output_hessian"}),
    plain_grid=True,
    seconds_per_weight={"cpu": 4e-7, "cuda": 2e-7},
)
