"""A codebook per row with error compensation: levels and codes that minimize the error at the layer's output.

    minimize  (w - P c)' H (w - P c)      over levels c [2^bits] and one-hot codes P, row by row

with H = mean x x', of which k-means (`kmeans.py`) only sees the diagonal. Alternating, after Zhang et al. 2025 (LNQ in
"GuidedQuant", arXiv 2505.07004):

1. Levels by weighted k-means under diag H; codes in GPTQ's order, columns of large H first, each passing its error on
   to those that follow (Frantar et al. 2022, arXiv 2210.17323).
2. Levels by least squares: (P'HP) c = P'H w, all rows at once.
3. Codes by coordinate descent: column j takes the level nearest to `w~_j - (He)_j / H_jj`, which is the best one with
   all others fixed; columns go in blocks, so that most of the work is one matrix product a block.

Steps 2 and 3 never raise the error, except for the rounding of levels (`kmeans.rounded`), for which 3 then compensates. They
stop when a round gains less than TOLERANCE. Detached weights are stored as floats: they absorb the errors of the
others in 1, and take their best value, not a level, in 3. So the sparse part is refitted together with levels and codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.formats.codebook import Codebook
from requant.formats.quantized_weight import QuantizedWeight, with_residuals
from requant.quantizers.checks import check_bits, check_fraction, check_level_bits, check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.damping import mean_diagonal
from requant.quantizers.gptq import cost_after_feedback, hessian_inv_cholesky
from requant.quantizers.kmeans import codebook_losses, fit_levels, midpoints, packed_spec, rounded, row_chunks
from requant.quantizers.method import Bits, Losses, Method
from requant.quantizers.outliers import check_outlier_fraction, outlier_mask

BLOCK = 128  # columns between two full updates of H e
TOLERANCE = 1e-3  # of the error: a round that gains less is the last
PULL = 1e-6  # of the mean curvature, towards the levels that were: an unused level stays where it is


@dataclass(frozen=True, kw_only=True)
class LutConfig:
    """Options of `lut`; outliers: `outliers.py`."""

    bits: int = 4
    """Bits of a code; a row has 2^bits levels."""
    level_bits: int = 8
    """Bits of a level: 8 or 16; always 16 with codes of 7 and 8 bits."""
    outlier_fraction: float = 0.0
    """Fraction of the weights, those whose codes would cost most, that are stored as floats; not in mode `paper`."""
    rounds: int = 8
    """Rounds of least squares and coordinate descent, at most."""
    damp: float = 0.01
    """Added to the Hessian's diagonal, as a fraction of its mean."""

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_level_bits(self.level_bits)
        check_outlier_fraction(self.outlier_fraction)
        check_fraction("damp", self.damp)
        if self.rounds < 0:
            raise RecipeError(f"rounds is {self.rounds}, but it takes 0 or more: choose 8.")


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: LutConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Fit levels, codes and the floats of detached weights to `weight`, corrected for its inputs (`correction.py`).

    Raises InputError without `stats.hessian`, NumericalError if it or the weight is not finite, or if no damping makes it
    positive definite.
    """
    check_weight(weight)
    k = weight.shape[1]
    hessian = statistic(stats.hessian, "hessian", (k, k))
    order = hessian.diagonal().argsort(descending=True, stable=True)
    target = corrected(weight, stats)
    damped = hessian + config.damp * mean_diagonal(hessian) * torch.eye(k, device=hessian.device)
    diagonal = damped.diagonal().expand_as(target).double()
    own_outliers = detached is None  # where no mask of mode `paper` is given
    if detached is None:
        detached = outlier_mask(
            target, diagonal.float(), bits=config.bits, outlier_fraction=config.outlier_fraction
        )
    detached_mask = torch.zeros_like(target, dtype=torch.bool) if detached is None else detached
    seeds = torch.cat(
        [
            fit_levels(target[rows].double(), diagonal[rows], detached_mask[rows], bits=config.bits)
            for rows in row_chunks(target, elements=1 << 22)
        ]
    )
    levels = rounded(seeds, level_bits=config.level_bits).float()
    codes, values = compensated_codes(target, levels, damped, order, detached_mask)
    best = error_of(target, levels, codes, values, damped)
    for _ in range(config.rounds):
        solved = least_squares(target, levels, codes, values, damped)
        fitted, recoded = in_order(rounded(solved, level_bits=config.level_bits).float(), codes)
        recoded, refitted = descend(target, fitted, recoded, values, damped)
        now = error_of(target, fitted, recoded, refitted, damped)
        better = (now < best)[:, None]  # rounding may cost a row more than the round gained
        levels = torch.where(better, fitted, levels)
        codes = torch.where(better, recoded, codes)
        values = torch.where(better, refitted, values)
        gained = (best - now).clamp(min=0).sum()
        best = torch.minimum(best, now)
        if gained <= TOLERANCE * best.sum():
            break
    codebook = Codebook(codes=codes.to(torch.uint8), levels=levels.half(), bits=config.bits)
    return with_residuals(codebook, values, detached, int8=own_outliers)


def floats_of(
    levels: Float[Tensor, "n c"], codes: Int64[Tensor, "n k"], values: Float[Tensor, "n k"]
) -> Tensor:
    """w~: the level of every code, `values` where they are given (NaN: not detached)."""
    return torch.where(values.isnan(), levels.gather(1, codes), values)


def compensated_codes(
    target: Float[Tensor, "n k"],
    levels: Float[Tensor, "n c"],
    hessian: Float[Tensor, "k k"],
    order: Int64[Tensor, " k"],
    detached_mask: Bool[Tensor, "n k"],
) -> tuple[Int64[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Nearest levels, column by column in `order`, each error passed on through the inverse of H.

    Also returns the floats of detached weights, which take up the errors passed to them and pass on none.
    """
    upper = hessian_inv_cholesky(hessian[order][:, order], damp=1e-6)
    boundaries = midpoints(levels)
    left, free = target[:, order].clone(), detached_mask[:, order]
    codes = torch.empty_like(left, dtype=torch.int64)
    for start in range(0, left.shape[1], BLOCK):
        stop = min(start + BLOCK, left.shape[1])
        errors = torch.empty_like(left[:, start:stop])
        for j in range(start, stop):
            column = left[:, j, None].contiguous()
            code = torch.searchsorted(boundaries, column)
            error = (column - levels.gather(1, code)) / upper[j, j]
            error.masked_fill_(free[:, j, None], 0)
            left[:, j + 1 : stop] -= error * upper[j, j + 1 : stop]
            errors[:, j - start, None] = error
            codes[:, j, None] = code
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    back = order.argsort()
    return codes[:, back], left[:, back].masked_fill(~detached_mask, torch.nan)


def least_squares(
    target: Float[Tensor, "n k"],
    levels: Float[Tensor, "n c"],
    codes: Int64[Tensor, "n k"],
    values: Float[Tensor, "n k"],
    hessian: Float[Tensor, "k k"],
) -> Float[Tensor, "n c"]:
    """The levels of least error under these codes and detached floats."""
    count, k = levels.shape[1], target.shape[1]
    found = torch.empty_like(levels)
    wanted = target - values.nan_to_num(nan=0.0)  # what the levels have to make up for
    for rows in row_chunks(target, elements=1 << 24, width=k * count):
        one_hot = torch.zeros(*codes[rows].shape, count, device=target.device)
        one_hot.scatter_(2, codes[rows][..., None], values[rows].isnan().float()[..., None])
        through = torch.einsum("kl,rlc->rkc", hessian, one_hot)
        left = torch.einsum("rkc,rkd->rcd", one_hot, through).double()
        right = torch.einsum("rkc,rk->rc", through, wanted[rows]).double()
        pull = PULL * left.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
        left += pull[:, None, None] * torch.eye(count, device=target.device, dtype=left.dtype)
        right += pull[:, None] * levels[rows]
        found[rows] = torch.linalg.solve(left, right).float()
    return found


def in_order(
    levels: Float[Tensor, "n c"], codes: Int64[Tensor, "n k"]
) -> tuple[Float[Tensor, "n c"], Int64[Tensor, "n k"]]:
    """The same floats with ascending levels."""
    ascending, order = levels.sort(dim=1, stable=True)
    return ascending, order.argsort(1).gather(1, codes)


def descend(
    target: Float[Tensor, "n k"],
    levels: Float[Tensor, "n c"],
    codes: Int64[Tensor, "n k"],
    values: Float[Tensor, "n k"],
    hessian: Float[Tensor, "k k"],
) -> tuple[Int64[Tensor, "n k"], Float[Tensor, "n k"]]:
    """One sweep of coordinate descent over the columns: the best level, or the best float where one is detached."""
    codes, values, boundaries = codes.clone(), values.clone(), midpoints(levels)
    error = floats_of(levels, codes, values) - target
    for start in range(0, target.shape[1], BLOCK):
        stop = min(start + BLOCK, target.shape[1])
        slope = error @ hessian[:, start:stop]
        for j in range(start, stop):
            code, value = codes[:, j, None], values[:, j, None]
            coded = value.isnan()
            now = torch.where(coded, levels.gather(1, code), value)
            best = now - slope[:, j - start, None] / hessian[j, j]
            code = torch.searchsorted(boundaries, best.contiguous())
            step = torch.where(coded, levels.gather(1, code), best) - now
            codes[:, j, None], values[:, j, None] = code, torch.where(coded, value, best)
            slope += step * hessian[j, start:stop]
            error[:, j, None] += step
    return codes, values


def error_of(
    target: Float[Tensor, "n k"],
    levels: Float[Tensor, "n c"],
    codes: Int64[Tensor, "n k"],
    values: Float[Tensor, "n k"],
    hessian: Float[Tensor, "k k"],
) -> Float[Tensor, " n"]:
    """e' H e of every row, float64."""
    error = floats_of(levels, codes, values) - target
    return (error @ hessian * error).double().sum(1)


def outlier_cost(stats: LinearStats, config: LutConfig) -> Float[Tensor, "n k"]:
    """What later columns do not compensate, in GPTQ's order of the columns."""
    return cost_after_feedback(stats, damp=config.damp, act_order=True)


def predicted_losses(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: LutConfig, widths: Sequence[Bits]
) -> Losses:
    """`1/2 sum G_ii D_jj e^2` of levels of the optimal density."""
    return codebook_losses(weight, outlier_cost(stats, config), widths)


METHOD = Method(
    summary="a codebook per row, levels and codes fitted to the layer's output (LNQ)",
    config=LutConfig,
    quantize=quantize,
    needs=frozenset({"hessian"}),
    packed_spec=packed_spec,
    predicted_losses=predicted_losses,
    predictor_needs=frozenset({"hessian", "output_hessian"}),
    outlier_cost=outlier_cost,
    seconds_per_weight={"cpu": 8e-6, "cuda": 2e-7},  # the GPU's is an estimate
    detach={"values": "int8"},  # 0.04 bits per weight less than float16, at the same KL
)
