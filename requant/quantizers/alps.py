"""2:4 by operator splitting: masks and weights of a whole matrix at once.

    minimize  tr((W - D) H (W - D)')   over matrices D that are 2:4

Meng et al., "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for Large Language Models" (2024, arXiv
2406.07831). The quadratic function of one copy B and the mask of another copy D are joined by ADMM; with G = W H

    B = (G - V + rho D) (H + rho I)^-1      D = the two largest of four of B + V / rho      V += rho (B - D)

and one eigendecomposition of H serves every rho. Columns are scaled so that diag(H) = 1. rho grows every UPDATE_EVERY steps,
faster while the mask still moves. When it rests, the kept weights are solved for: CG_STEPS steps of conjugate gradients on
`tr(E H E')` with the mask fixed.

Values of fewer bits are rounded with compensation on that mask (`sparsegpt.compensate`), starting from the solution D: as D
is the minimum on the mask, the error of any D~ on it is that of D plus `tr((D - D~) H (D - D~)')`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.semi_structured import FLOAT16_BITS
from requant.quantizers.checks import check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.damping import mean_diagonal
from requant.quantizers.gptq import hessian_inv_cholesky
from requant.quantizers.method import PruningMethod
from requant.quantizers.semi_structured import CompensatingConfig, packed_spec, stored
from requant.quantizers.sparsegpt import prune
from requant.sparsity.masks import GROUP, flip_rate, keep2

MAX_STEPS, MIN_STEPS, UPDATE_EVERY = 300, 30, 3
FIRST_RHO = 0.1
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # share of kept weights that moved, above which rho grows so
AT_REST = 3e-4  # share of kept weights that moved
CG_STEPS = 10


def quantize(weight: Float[Tensor, "n k"], stats: LinearStats, config: CompensatingConfig) -> QuantizedWeight:
    """Raises InputError without `stats.hessian`, NumericalError if it or the weight is not finite."""
    check_weight(weight)
    k = weight.shape[1]
    hessian = statistic(stats.hessian, "hessian", (k, k))
    damped = hessian + config.damp * mean_diagonal(hessian) * torch.eye(k, device=hessian.device)
    norms = damped.diagonal().sqrt()
    unit = damped / norms / norms[:, None]
    target = corrected(weight, stats) * norms
    mask = split(target, unit)
    solved = conjugate_gradients(target, unit, mask) / norms
    if config.bits == FLOAT16_BITS:
        return stored(solved, mask, None, config)
    upper = hessian_inv_cholesky(hessian, damp=config.damp)
    return prune(solved, upper, lambda start, _group: mask[:, start : start + GROUP], config)


def split(target: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"]) -> Bool[Tensor, "n k"]:
    """The mask on which ADMM comes to rest."""
    eigenvalues, vectors = torch.linalg.eigh(hessian)
    gradient = target @ hessian
    dual, rho = torch.zeros_like(target), FIRST_RHO
    mask = keep2(target.abs())
    pruned = target * mask
    before = mask
    for step in range(1, MAX_STEPS + 1):
        free = ((gradient - dual + rho * pruned) @ vectors / (eigenvalues + rho)) @ vectors.T
        candidate = free + dual / rho
        mask = keep2(candidate.abs())
        pruned = candidate * mask
        dual += rho * (free - pruned)
        if step % UPDATE_EVERY:
            continue
        # a kept weight that moves flips two of four places, half of which are kept
        moved = flip_rate(mask, before)
        before = mask
        if moved < AT_REST and step >= MIN_STEPS:
            break
        rho *= next(factor for above, factor in GROWTH if moved > above or above == 0)
    return mask


def conjugate_gradients(
    target: Float[Tensor, "n k"], hessian: Float[Tensor, "k k"], mask: Bool[Tensor, "n k"]
) -> Float[Tensor, "n k"]:
    """CG_STEPS steps towards the minimum of `tr((target - D) H (target - D)')` over D on the mask, row by row."""
    found = target * mask
    residual = ((target - found) @ hessian) * mask
    direction = residual.clone()
    energy = residual.square().sum(1, keepdim=True)
    for _ in range(CG_STEPS):
        image = (direction @ hessian) * mask
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where(curvature > 0, energy / curvature, 0.0)
        found = found + length * direction
        residual = residual - length * image
        following = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(energy > 0, following / energy, 0.0) * direction
        energy = following
    return found


METHOD = PruningMethod(
    summary="masks of a whole matrix by operator splitting, then least squares (ALPS)",
    config=CompensatingConfig,
    quantize=quantize,
    packed_spec=packed_spec,
    needs=frozenset({"hessian"}),
    seconds_per_weight={"cpu": 2e-5, "cuda": 1e-7},
)
