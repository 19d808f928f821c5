"""2:4 column by column, with the error of every pruned and every rounded weight passed on to the columns still to come.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (2023, arXiv 2301.00774).
With H^-1 = U'U, U upper triangular as in GPTQ (`gptq.py`), at the first of every four columns the two with the largest

    w_j^2 / U_jj^2

stay, where w are the weights as the errors of earlier columns have left them. Then column by column

    w_l  -=  (w_j - w~_j) / U_jj * U_jl        for the columns l > j;   w~_j: zero, the weight, or its nearest level

so pruning and rounding are one pass. `compensate` is that pass for any mask and any rounding: with all weights kept it is
GPTQ. The steps of a group's levels are fitted when its first column is reached, to the weights that would be kept then.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.semi_structured import FLOAT16_BITS
from requant.quantizers.checks import check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.gptq import blocks, hessian_inv_cholesky
from requant.quantizers.method import PruningMethod
from requant.quantizers.semi_structured import (
    CompensatingConfig,
    columns_of,
    fit_scales,
    packed_spec,
    rounded,
    stored,
)
from requant.sparsity.masks import GROUP, keep2

MaskOf = Callable[[int, Tensor], Tensor]  # first column, weights [n, 4] as they are now -> mask [n, 4]
Rounding = Callable[
    [int, Tensor], Tensor
]  # column j, its weights [n] as they are now -> what is stored for them


def quantize(weight: Float[Tensor, "n k"], stats: LinearStats, config: CompensatingConfig) -> QuantizedWeight:
    """Raises InputError without `stats.hessian`, NumericalError if it or the weight is not finite, or not positive."""
    check_weight(weight)
    k = weight.shape[1]
    hessian = statistic(stats.hessian, "hessian", (k, k))
    upper = hessian_inv_cholesky(hessian, damp=config.damp)
    scale = upper.diagonal()

    def best_two(start: int, group: Tensor) -> Tensor:
        return keep2(group.square() / scale[start : start + GROUP].square())

    return prune(corrected(weight, stats), upper, best_two, config)


def prune(
    weight: Float[Tensor, "n k"], upper: Float[Tensor, "k k"], mask_of: MaskOf, config: CompensatingConfig
) -> QuantizedWeight:
    """Prune and round with compensation; `mask_of` chooses the mask of a group when its first column is due."""
    size = columns_of(config, weight.shape[1])
    scales: list[Tensor] = []

    def mask_and_scales(start: int, left: Tensor) -> Tensor:
        if config.bits < FLOAT16_BITS and start % size == 0:
            span = left[:, :size]
            groups = [mask_of(start + j, span[:, j : j + GROUP]) for j in range(0, span.shape[1], GROUP)]
            scales.append(fit_scales(span, torch.cat(groups, 1), config))
        return mask_of(start, left[:, :GROUP])

    def nearest(_j: int, column: Tensor) -> Tensor:
        if config.bits == FLOAT16_BITS:
            return column.half().float()
        return rounded(column[:, None], scales[-1], config.bits)[:, 0]

    found, mask = compensate(weight, upper, mask_and_scales, nearest, block_of=size)
    return stored(found, mask, torch.cat(scales, 1) if scales else None, config)


def compensate(
    weight: Float[Tensor, "n k"],
    upper: Float[Tensor, "k k"],
    mask_of: MaskOf,
    rounding: Rounding,
    *,
    block_of: int = GROUP,
) -> tuple[Float[Tensor, "n k"], Bool[Tensor, "n k"]]:
    """What is stored for every weight, and the mask; large updates begin at multiples of `block_of` columns.

    `mask_of` is given the weights from its first column on, of which those in the same block are up to date.
    """
    k = weight.shape[1]
    left, found = weight.float().clone(), torch.zeros_like(weight, dtype=torch.float32)
    mask = torch.zeros_like(weight, dtype=torch.bool)
    for start, stop in blocks(k, block_of):
        errors = torch.empty_like(left[:, start:stop])
        for j in range(start, stop):
            if j % GROUP == 0:
                mask[:, j : j + GROUP] = mask_of(j, left[:, j:])
            column = left[:, j]
            found[:, j] = torch.where(mask[:, j], rounding(j, column), 0.0)
            error = (column - found[:, j]) / upper[j, j]
            left[:, j + 1 : stop] -= error[:, None] * upper[j, j + 1 : stop]
            errors[:, j - start] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return found, mask


METHOD = PruningMethod(
    summary="column by column, compensating each error in later columns (SparseGPT)",
    config=CompensatingConfig,
    quantize=quantize,
    packed_spec=packed_spec,
    needs=frozenset({"hessian"}),
    seconds_per_weight={"cpu": 5e-7, "cuda": 2e-7},
)
