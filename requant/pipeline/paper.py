"""ReQuant as published, over any quantizer (Hu et al. 2025, arXiv 2503.01901, Figure 1).

    1. pre-quantize all weights                                          quantize_linears
    2. give every matrix its fraction of outliers, by PQI (Algorithm 1)  outlier_fractions
    3. detach its outliers: the largest |w|                              largest_weights
    4. quantize the rest again                                           quantize_linears
    5. detach significant weights in steps (Algorithm 2)                 global_top
    6. dense + outliers + significant weights                            detach_weights; 8-bit residuals if asked for

Fractions are of all quantized weights of the model.

Algorithm 1 (outliers). Matrix m of `size_m` weights gets the fraction

    r_m = r_o * M * s_m^(1/t) / sum_k size_k s_k^(1/t),      M = sum_k size_k,   s_m = mean |PQI| of the matrix

for a temperature t (t -> infinity: the same fraction everywhere); its outliers are the `r_m size_m` largest |w|. Each t
of a grid is tried, and the one with the smallest loss on the calibration text is kept. The published text leaves open
how s_m becomes a fraction; this is our reading.

Algorithm 2 (significant weights). r_s in `steps` equal parts: score all weights, detach the global top part, and score
again, because what was detached changes the gradients of the rest. With `sensitivity.score: marginal` the ranking is by
`|g(w~) d|`, which costs one gradient and is better in 10 of 12 comparisons; `pqi` is the published choice.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from requant import progress, ranks
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.sparse import residuals_to_int8, sparse_at, sparse_mask
from requant.run.context import RunContext, Weights, loss, recipe_sections, scores
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import digest

Masks = dict[str, Bool[Tensor, "n k"]]


def requant_as_published(run: RunContext) -> Weights:
    """Steps 1 to 6; every stage's result goes through the workspace."""
    progress.enter("codes")
    weights = quantize_linears(run, None, label="pre-quantize")
    if run.recipe.detach.outlier_fraction > 0:
        progress.enter("outliers")
        outliers = OUTLIER_RULES[run.recipe.detach.outlier_rule](run, weights)
        progress.enter("codes again")
        weights = quantize_linears(run, outliers, label="quantize again")
    if run.recipe.detach.significant_fraction > 0:
        progress.enter("significant weights")
        for step in range(run.recipe.detach.steps):
            weights = detach_significant(run, weights, step)
    if run.recipe.detach.values == "float16":
        return weights
    return {name: with_int8_residuals(weight) for name, weight in weights.items()}


def with_int8_residuals(weight: QuantizedWeight) -> QuantizedWeight:
    """The same codes with residuals in 8 bits."""
    return weight if weight.sparse is None else replace(weight, sparse=residuals_to_int8(weight.sparse))


def adaptive_outliers(run: RunContext, weights: Weights) -> Masks:
    """Algorithm 1: the temperature whose outliers leave the smallest loss on the calibration text."""
    means = mean_scores(run, weights)
    trials: dict[float, float] = {}
    for temperature in run.recipe.detach.temperatures:
        key = digest(
            run.fingerprint,
            recipe_sections(run.recipe, "calibration", "method", "quantizer"),
            means,
            temperature,
            run.recipe.detach.outlier_fraction,
        )
        stored = run.workspace.get("temperature", key)
        if stored is None:
            masks = outliers_at(run, means, temperature)
            trial = quantize_linears(run, masks, label=f"temperature {temperature:g}")
            trials[temperature] = loss(run, trial, label=f"loss at temperature {temperature:g}")
            run.workspace.put("temperature", key, value=trials[temperature])
        else:
            trials[temperature] = stored.value
    return outliers_at(run, means, min(trials, key=trials.__getitem__))


def mean_scores(run: RunContext, weights: Weights) -> dict[str, float]:
    """mean |score| of every matrix, the statistic of the paper's Table 4."""
    key = digest(
        run.fingerprint,
        recipe_sections(run.recipe, "calibration", "method", "quantizer", "sensitivity"),
        "mean scores",
    )
    stored = run.workspace.get("mean-scores", key)
    if stored is not None:
        return stored.value
    values = scores(run, run.recipe.sensitivity.score, weights, label="sensitivity")
    own = {name: each.abs().mean(dtype=torch.float64).item() for name, each in values.items()}
    means = ranks.of_all(run.targets, own)
    run.workspace.put("mean-scores", key, value=means)
    return means


def outliers_at(run: RunContext, means: Mapping[str, float], temperature: float) -> Masks:
    """Masks of the largest weights of every matrix, whose number follows from its mean score at this temperature."""
    fractions = outlier_fractions(
        means,
        {target.name: target.size for target in run.targets},
        fraction=run.recipe.detach.outlier_fraction,
        temperature=temperature,
    )
    return {
        target.name: largest_weights(run.path({}).start(target), round(fractions[target.name] * target.size))
        for target in run.targets
    }


def uniform_outliers(run: RunContext, _weights: Weights) -> Masks:
    """The same fraction of largest |w| in every matrix."""
    fraction = run.recipe.detach.outlier_fraction
    return {
        target.name: largest_weights(run.path({}).start(target), round(fraction * target.size))
        for target in run.targets
    }


def iqr_outliers(run: RunContext, _weights: Weights) -> Masks:
    """SqueezeLLM's own: the largest |w| in units of the matrix's interquartile range, over all matrices."""
    relative = {name: w.float().abs() / interquartile_range(w.float()) for name, w in run.original.items()}
    nothing = {name: torch.zeros(w.shape, dtype=torch.bool) for name, w in run.original.items()}
    return global_top(relative, round(run.recipe.detach.outlier_fraction * run.total_weights), taken=nothing)


OUTLIER_RULES = {"adaptive": adaptive_outliers, "uniform": uniform_outliers, "iqr": iqr_outliers}


def detach_significant(run: RunContext, weights: Weights, step: int) -> Weights:
    """One step of Algorithm 2: the global top `r_s / steps` of what is still dense goes back to its exact value."""
    detach = run.recipe.detach
    done = round(detach.significant_fraction * run.total_weights * step / detach.steps)
    count = round(detach.significant_fraction * run.total_weights * (step + 1) / detach.steps) - done
    key = digest(
        run.fingerprint,
        recipe_sections(run.recipe, "calibration", "method", "quantizer", "sensitivity", "detach"),
        step,
    )
    taken = {name: sparse_mask(w.sparse, w.shape, w.dense.codes.device) for name, w in weights.items()}
    stored = run.workspace.get("significant", key)
    if stored is None:
        values = scores(
            run, run.recipe.sensitivity.score, weights, label=f"sensitivity, step {step + 1}/{detach.steps}"
        )
        values = ranks.tensors_of_all(run.targets, values, device=run.model.device)
        chosen = global_top(values, count, taken=taken)
        run.workspace.put("significant", key, tensors={n: m.nonzero().int() for n, m in chosen.items()})
    else:
        chosen = {name: _mask_at(indices, weights[name]) for name, indices in stored.tensors.items()}
    return {name: detach_weights(weights[name], run.original[name], chosen[name]) for name in weights}


def detach_weights(weight: QuantizedWeight, original: Tensor, mask: Bool[Tensor, "n k"]) -> QuantizedWeight:
    """The same dense codes, with residuals that restore `original` where `mask` is set.

    Residuals that exist already stay as they are: a quantizer that compensates errors (gptq) chose them to differ from
    the original.
    """
    exact = original.to(mask.device, torch.float32)
    taken = sparse_mask(weight.sparse, weight.shape, mask.device)
    residual = torch.where(mask & ~taken, exact - weight.dense.dequantize(), 0.0)
    if weight.sparse is not None:
        residual += weight.sparse.dequantize()
    return QuantizedWeight(dense=weight.dense, sparse=sparse_at(residual, taken | mask))


def _mask_at(indices: Tensor, weight: QuantizedWeight) -> Bool[Tensor, "n k"]:
    mask = torch.zeros(weight.shape, dtype=torch.bool, device=weight.dense.codes.device)
    mask[indices[:, 0].long(), indices[:, 1].long()] = True
    return mask


def outlier_fractions(
    mean_scores: Mapping[str, float], sizes: Mapping[str, int], *, fraction: float, temperature: float
) -> dict[str, float]:
    """Algorithm 1: the fraction r_m of every matrix, so that together they are `fraction` of all weights.

    No fraction exceeds 1; what a matrix cannot take goes to the others. If all scores are 0, all fractions are equal.
    """
    # Scaled by the largest score first: a small temperature would underflow.
    largest = max(mean_scores.values())
    power = {
        name: (mean_scores[name] / largest) ** (1 / temperature) if largest > 0 else 1.0 for name in sizes
    }
    budget = fraction * sum(sizes.values())
    fractions = dict.fromkeys(sizes, 1.0)
    open_to = list(sizes)  # a list: the order of a sum is part of its bits
    while open_to:
        total = sum(sizes[name] * power[name] for name in open_to)
        rate = budget / total if total > 0 else 0.0
        full = [name for name in open_to if rate * power[name] > 1]
        if not full:
            return fractions | {name: rate * power[name] for name in open_to}
        budget -= sum(sizes[name] for name in full)
        open_to = [name for name in open_to if name not in full]
    return fractions


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
    """Masks of the `count` largest |score| over all matrices, leaving out weights already `taken`.

    Only the top `count` of each matrix are compared, so no score tensor of the whole model is sorted.
    """
    candidates: list[tuple[str, Tensor, Tensor]] = []
    for name, values in scores.items():
        ranking = values.abs().masked_fill(taken[name].to(values.device), -1.0).flatten()
        top = ranking.topk(min(count, ranking.numel()))
        free = top.values >= 0
        candidates.append((name, top.values[free], top.indices[free]))
    merged = torch.cat([values for _, values, _ in candidates])
    chosen = torch.zeros(merged.numel(), dtype=torch.bool, device=merged.device)
    chosen[merged.sort(descending=True, stable=True).indices[:count]] = True
    masks: Masks = {}
    counts = [values.numel() for _, values, _ in candidates]
    for (name, _, indices), mine in zip(candidates, chosen.split(counts), strict=True):
        mask = torch.zeros(scores[name].numel(), dtype=torch.bool, device=merged.device)
        mask[indices[mine]] = True
        masks[name] = mask.view(scores[name].shape)
    return masks
