"""ReQuant as published, over any quantizer (Hu et al. 2025, arXiv 2503.01901, Figure 1).

    1. pre-quantize all weights                                   quantize_linears
    2. the outlier share of every matrix, from PQI (Algorithm 1)  detach.outlier_shares
    3. its outliers: the largest |w|                              detach.largest_weights
    4. quantize the rest again                                    quantize_linears
    5. recover significant weights in steps (Algorithm 2)         detach.global_top
    6. dense + outliers + significant weights                     detach_places, in 8 bits if the recipe says so

With `sensitivity.score: marginal` step 5 ranks by `|g(w~) d|`, which costs one gradient and is better in 10 of 12
comparisons; `pqi` is the published choice.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from requant.formats.containers import QuantizedWeight, detached_mask, in_8_bits, sparse_at
from requant.pipeline.detach import Masks, global_top, interquartile_range, largest_weights, outlier_shares
from requant.run.context import RunContext, Weights, loss, recipe_sections, scores
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import digest


def requant_as_published(run: RunContext) -> Weights:
    """Steps 1 to 6; every stage's result goes through the workspace."""
    weights = quantize_linears(run, None, label="pre-quantize")
    if run.recipe.detach.outlier_fraction > 0:
        outliers = OUTLIER_RULES[run.recipe.detach.outlier_rule](run, weights)
        weights = quantize_linears(run, outliers, label="quantize again")
    if run.recipe.detach.significant_fraction > 0:
        for step in range(run.recipe.detach.steps):
            weights = detach_significant(run, weights, step)
    return weights if run.recipe.detach.values == "float16" else {n: shortened(w) for n, w in weights.items()}


def shortened(weight: QuantizedWeight) -> QuantizedWeight:
    """The same codes with residuals in 8 bits."""
    return weight if weight.sparse is None else replace(weight, sparse=in_8_bits(weight.sparse))


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
    means = {
        name: values.abs().mean(dtype=torch.float64).item()
        for name, values in scores(run, run.recipe.sensitivity.score, weights, label="sensitivity").items()
    }
    run.workspace.put("mean-scores", key, value=means)
    return means


def outliers_at(run: RunContext, means: Mapping[str, float], temperature: float) -> Masks:
    shares = outlier_shares(
        means,
        {target.name: target.size for target in run.targets},
        fraction=run.recipe.detach.outlier_fraction,
        temperature=temperature,
    )
    return {
        target.name: largest_weights(run.path({}).start(target), round(shares[target.name] * target.size))
        for target in run.targets
    }


def uniform_outliers(run: RunContext, _weights: Weights) -> Masks:
    """The same share of largest |w| in every matrix."""
    fraction = run.recipe.detach.outlier_fraction
    return {
        target.name: largest_weights(run.path({}).start(target), round(fraction * target.size))
        for target in run.targets
    }


def iqr_outliers(run: RunContext, _weights: Weights) -> Masks:
    """SqueezeLLM's own: the largest |w| in units of the matrix's interquartile range, over all matrices."""
    spread = {name: w.float().abs() / interquartile_range(w.float()) for name, w in run.original.items()}
    nothing = {name: torch.zeros(w.shape, dtype=torch.bool) for name, w in run.original.items()}
    return global_top(spread, round(run.recipe.detach.outlier_fraction * run.total_weights), taken=nothing)


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
    taken = {name: detached_mask(w.sparse, w.shape, w.dense.codes.device) for name, w in weights.items()}
    stored = run.workspace.get("significant", key)
    if stored is None:
        values = scores(
            run, run.recipe.sensitivity.score, weights, label=f"sensitivity, step {step + 1}/{detach.steps}"
        )
        chosen = global_top(values, count, taken=taken)
        run.workspace.put("significant", key, tensors={n: m.nonzero().int() for n, m in chosen.items()})
    else:
        chosen = {name: _mask_of(places, weights[name]) for name, places in stored.tensors.items()}
    return {name: detach_places(weights[name], run.original[name], chosen[name]) for name in weights}


def detach_places(weight: QuantizedWeight, original: Tensor, places: Bool[Tensor, "n k"]) -> QuantizedWeight:
    """The same dense codes with the residual to `original` at `places`, beside the residuals it has.

    Those stay as they are: a quantizer that compensates errors (gptq) chose them to differ from the original.
    """
    exact = original.to(places.device, torch.float32)
    taken = detached_mask(weight.sparse, weight.shape, places.device)
    residual = torch.where(places & ~taken, exact - weight.dense.dequantize(), 0.0)
    if weight.sparse is not None:
        residual += weight.sparse.dequantize()
    return QuantizedWeight(dense=weight.dense, sparse=sparse_at(residual, taken | places))


def _mask_of(places: Tensor, weight: QuantizedWeight) -> Bool[Tensor, "n k"]:
    mask = torch.zeros(weight.shape, dtype=torch.bool, device=weight.dense.codes.device)
    mask[places[:, 0].long(), places[:, 1].long()] = True
    return mask
