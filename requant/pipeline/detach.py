"""Which weights leave the dense part: outliers before quantizing, significant weights after it.

Hu et al. 2025, arXiv 2503.01901. Fractions are of all quantized weights of the model.

Algorithm 1 (outliers). Matrix m of `size_m` weights gets the share

    r_m = r_o * M * s_m^(1/t) / sum_k size_k s_k^(1/t),      M = sum_k size_k,   s_m = mean |PQI| of the matrix

for a temperature t (t -> infinity: the same share everywhere); its outliers are the `r_m size_m` largest |w|. The
pipeline tries each t of a grid and keeps the one with the smallest loss on the calibration text.

Algorithm 2 (significant weights). r_s in `steps` equal parts: score all weights, detach the global top part, score
again, because what was detached changes the gradients of the rest.

The published text leaves open how s_m becomes a share; `../shared/method.md` section 2 records this reading and what it
measures.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Masks = dict[str, Bool[Tensor, "n k"]]


def outlier_shares(
    mean_scores: Mapping[str, float], sizes: Mapping[str, int], *, fraction: float, temperature: float
) -> dict[str, float]:
    """Algorithm 1: the share r_m of every matrix that spends `fraction` of all weights.

    A matrix takes no share above 1; what it cannot take goes to the others. Without any score all shares are equal.
    """
    # Scaled by the largest score first: a small temperature would underflow.
    largest = max(mean_scores.values())
    power = {
        name: (mean_scores[name] / largest) ** (1 / temperature) if largest > 0 else 1.0 for name in sizes
    }
    budget = fraction * sum(sizes.values())
    shares = dict.fromkeys(sizes, 1.0)
    open_to = list(sizes)  # a list: the order of a sum is part of its bits
    while open_to:
        total = sum(sizes[name] * power[name] for name in open_to)
        rate = budget / total if total > 0 else 0.0
        full = [name for name in open_to if rate * power[name] > 1]
        if not full:
            return shares | {name: rate * power[name] for name in open_to}
        budget -= sum(sizes[name] for name in full)
        open_to = [name for name in open_to if name not in full]
    return shares


def largest_weights(weight: Float[Tensor, "n k"], count: int) -> Bool[Tensor, "n k"]:
    """A mask of the `count` largest |w|."""
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[weight.abs().flatten().topk(count).indices] = True
    return mask.view(weight.shape)


def interquartile_range(weight: Float[Tensor, "n k"]) -> float:
    """Distance between the quartiles of all entries, the unit in which SqueezeLLM compares outliers of matrices."""
    values = weight.flatten()
    low, high = (values.kthvalue(max(1, round(q * values.numel()))).values for q in (0.25, 0.75))
    return max((high - low).item(), 1e-12)


def global_top(
    scores: Mapping[str, Float[Tensor, "n k"]], count: int, *, taken: Mapping[str, Bool[Tensor, "n k"]]
) -> Masks:
    """Masks of the `count` largest |score| over all matrices, leaving out places already `taken`.

    Each matrix offers its own top entries, so only `count` per matrix are ever compared.
    """
    offers: list[tuple[str, Tensor, Tensor]] = []
    for name, values in scores.items():
        ranking = values.abs().masked_fill(taken[name].to(values.device), -1.0).flatten()
        top = ranking.topk(min(count, ranking.numel()))
        free = top.values >= 0
        offers.append((name, top.values[free], top.indices[free]))
    merged = torch.cat([values for _, values, _ in offers])
    chosen = torch.zeros(merged.numel(), dtype=torch.bool, device=merged.device)
    chosen[merged.sort(descending=True, stable=True).indices[:count]] = True
    masks: Masks = {}
    for (name, values, indices), mine in zip(
        offers, chosen.split([v.numel() for _, v, _ in offers]), strict=True
    ):
        mask = torch.zeros(scores[name].numel(), dtype=torch.bool, device=merged.device)
        mask[indices[mine]] = True
        masks[name] = mask.view(scores[name].shape)
        assert values.numel() == mine.numel()
    return masks
