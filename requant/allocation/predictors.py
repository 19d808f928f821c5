"""The predicted loss of every matrix at every bit width, before anything is allocated: what `knapsack.py` adds up.

| predictor | loss of matrix m at b bits | needs |
| --- | --- | --- |
| `curvature` | the expected `1/2 tr(G E H E')` of the method, in closed form | statistics, no quantization |
| `measured` | the KL to the original with m alone quantized, at one width | one quantization, a forward pass per matrix |
| `restored` | the KL that restoring m saves where all are quantized, at one width | the same |
| `pqi` | the signed sum of PQI over the matrix with all quantized, at one width | one quantization, two backward passes |

The last three take their dependence on b from the first: loss_m(b) = loss_m(b0) curvature_m(b) / curvature_m(b0), the
linearity theorem of Malinovskii et al. 2024 (HIGGS, arXiv 2411.17525). The closed forms belong to the methods
(`Method.predicted_losses`), with E = W - W~, H = mean x x' of the inputs and G = mean g g' of the gradients at the outputs.

Losses of single matrices add up: the KL of the whole model is 1.04 to 1.11 times their sum at 2 to 3 bits (bench-32m,
trellis). `measured` chose as well as `curvature`, at the cost of a quantization. `restored` also sees what the errors of the
others make of an error: on demo-4m at 2 bits 0.3 times the closed form in some q and k, twice in the first gate and up, and
codes by it have 5 and 7 % less KL (two seeds), 3 % after a short training; not measured on a larger model. `pqi` misleads
on a trellis: the delta loss of a matrix, unlike its KL, may be negative, and such matrices lost their bits (KL .44 against
.21 at 2.5 bits).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from requant import ranks
from requant.calibration.passes import batches, scored_tokens
from requant.calibration.stats import LinearStats
from requant.models.targets import QuantTarget
from requant.progress import counted
from requant.quantizers.method import Bits, Losses
from requant.quantizers.outliers import remaining_loss
from requant.quantizers.registry import METHODS
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import chunks_that_fit, gather, quantize_linears
from requant.sensitivity.path import signed_sum
from requant.sensitivity.scores import score_weights

MEASURED_TOKENS = 8192  # a forward pass over these for every matrix
PQI_TOKENS = 65536
MatrixLosses = dict[str, Losses]
LOSS_FLOOR = (
    0.01  # of the mean |loss| per weight: the least predicted loss of a matrix, whatever was measured
)


def curvature(run: RunContext, widths: Mapping[str, Sequence[Bits]]) -> MatrixLosses:
    """The method's closed form for every matrix at its `widths`, from the statistics of the calibration text."""
    method = METHODS[run.recipe.method]
    return _from_statistics(
        run,
        lambda target, weight, stats: method.predicted_losses(
            weight, stats, run.config_of(target), widths[target.name]
        ),
    )


def outlier_factors(run: RunContext) -> dict[str, dict[float, float]]:
    """Matrix -> outlier fraction -> the part of its loss that remains, for methods with an `outlier_cost`."""
    cost = METHODS[run.recipe.method].outlier_cost
    assert cost is not None
    return _from_statistics(
        run, lambda target, weight, stats: remaining_loss(weight, cost(stats, run.config_of(target)))
    )


def _from_statistics(
    run: RunContext, predict: Callable[[QuantTarget, Tensor, LinearStats], dict[Any, float]]
) -> dict[str, dict[Any, float]]:
    """`predict(target, weight, stats)` of every matrix, as many together as memory allows."""
    method = METHODS[run.recipe.method]
    needs = method.predictor_needs | method.needs  # the quantizer comes next: gather once
    found: dict[str, list[tuple[Any, float]]] = {}
    for chunk in chunks_that_fit(run, run.targets, needs):
        statistics = gather(run, chunk, needs)
        with run.stage("allocation"):
            for target in ranks.owned(chunk):
                weight = run.original[target.name].to(target.parameter.device, torch.float32)
                found[target.name] = list(predict(target, weight, statistics[target.name]).items())
    return {name: dict(pairs) for name, pairs in ranks.of_all(run.targets, found).items()}


def measured(run: RunContext, reference: Weights) -> dict[str, float]:
    """KL of the model with one matrix of `reference` at a time, nats a token."""
    found = _kl_of_each(run, reference, others=0.0)
    return {name: max(value, 0.0) for name, value in found.items()}


def restored(run: RunContext, reference: Weights) -> dict[str, float]:
    """KL that each original matrix saves among those of `reference`, nats a token; never below the floor."""
    return _floored(run, _kl_of_each(run, reference, others=1.0))


def _kl_of_each(run: RunContext, reference: Weights, *, others: float) -> dict[str, float]:
    """By how much each matrix of `reference` raises the KL, nats a token; the `others` are original (0) or quantized (1)."""
    windows = _first(run, MEASURED_TOKENS)
    path = run.path(reference)
    totals = dict.fromkeys(reference, 0.0)
    total = len(run.targets) * len(windows)
    with (
        run.stage("allocation"),
        torch.no_grad(),
        counted(total, label=run.label("loss of each matrix"), unit="windows") as bar,
    ):
        for tokens in batches(windows, run.model, label=None):
            path.apply_weights(0.0)
            expected = _log_probabilities(run, tokens)
            path.apply_weights(others)
            base = _summed_kl(run, tokens, expected)
            for target in run.targets:
                target.set_weight(path.point(target, 1 - others))
                changed = _summed_kl(run, tokens, expected)
                totals[target.name] += base - changed if others else changed - base
                target.set_weight(path.point(target, others))
                bar.update(len(tokens))
        path.apply_weights(0.0)
    return {name: total / scored_tokens(windows) for name, total in totals.items()}


def integrated(run: RunContext, reference: Weights) -> dict[str, float]:
    """Signed sums of PQI along the path to `reference`, nats a token; never below LOSS_FLOOR."""
    windows = _first(run, PQI_TOKENS)
    with run.stage("allocation"):
        values = score_weights(
            "pqi",
            run.path(reference),
            windows,
            nodes=run.recipe.sensitivity.nodes,
            label=run.label("allocation"),
        )
    return _floored(
        run, ranks.of_all(run.targets, {name: signed_sum(tensor) for name, tensor in values.items()})
    )


def _floored(run: RunContext, sums: Mapping[str, float]) -> dict[str, float]:
    """Losses by matrix, none below LOSS_FLOOR: a matrix without one would lose all its bits."""
    mean = sum(map(abs, sums.values())) / run.total_weights
    sizes = {target.name: target.size for target in run.targets}
    return {name: max(total, LOSS_FLOOR * mean * sizes[name]) for name, total in sums.items()}


def predicted_losses(
    run: RunContext, widths: Mapping[str, Sequence[Bits]], *, at: Mapping[str, Bits]
) -> MatrixLosses:
    """Matrix -> bits -> loss by the recipe's predictor; all but `curvature` quantize every matrix at its `at` bits."""
    loss_curve = curvature(run, widths)
    if run.recipe.budget.predictor == "curvature":
        return loss_curve
    reference = quantize_linears(dataclasses.replace(run, bits=at), None, label="quantize, to allocate")
    predict = {"measured": measured, "restored": restored, "pqi": integrated}[run.recipe.budget.predictor]
    found = predict(run, reference)
    return {
        name: {bits: found[name] * loss / (losses[at[name]] or 1.0) for bits, loss in losses.items()}
        for name, losses in loss_curve.items()
    }


def _first(run: RunContext, tokens: int) -> Int64[Tensor, "d t"]:
    return run.windows[: max(1, tokens // run.windows.shape[1])]


def _summed_kl(run: RunContext, tokens: Int64[Tensor, "b t"], expected: Float[Tensor, "p v"]) -> float:
    """KL of the model as it stands, over all positions."""
    found = _log_probabilities(run, tokens)
    return functional.kl_div(found, expected, reduction="sum", log_target=True).double().item()


def _log_probabilities(run: RunContext, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "p v"]:
    logits = run.model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.flatten(0, 1).float().log_softmax(-1)
