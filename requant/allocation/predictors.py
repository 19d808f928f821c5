"""The predicted loss of every matrix at every bit width, in nats per token: the terms that `knapsack.py` adds up.

| predictor | loss of matrix m at b bits | needs |
| --- | --- | --- |
| `curvature` | the method's expected `1/2 tr(G E H E')` or `1/2 sum F E^2`, in closed form | statistics, no quantization |
| `measured` | the KL to the original with only m quantized, at one bit width | one quantization, a forward pass per matrix |
| `restored` | the KL saved by restoring m when all are quantized, at one bit width | the same |
| `pqi` | the signed sum of PQI over m with all quantized, at one bit width | one quantization, two backward passes |

The last three take their dependence on b from the first: loss_m(b) = loss_m(b0) curvature_m(b) / curvature_m(b0), by the
linearity theorem of Malinovskii et al. 2024 (HIGGS, arXiv 2411.17525). The closed forms belong to the methods
(`Method.predicted_losses`), with E = W - W~, H = mean x x' of the inputs, and G = mean g g' of the gradients at the outputs
(`calibration/output_hessian.py`); methods that round each weight independently use the Fisher diagonal F instead of G and H.

Losses of single matrices add up: the KL of the whole model is 1.04 to 1.11 times their sum at 2 to 3 bits (bench-32m,
trellis). `measured` chose as well as `curvature`, at the cost of a quantization. `restored` also captures how errors in
other matrices amplify or dampen an error: on demo-4m at 2 bits it is 0.3 times the closed form in some q and k and twice
in the first gate and up, and codes chosen by it have 5 and 7 % less KL (two seeds), 3 % after a short training; it has not
been measured on a larger model. `pqi` misleads on a trellis: unlike its KL, the delta loss of a matrix may be negative,
and such matrices lost their bits (KL .44 instead of .21 at 2.5 bits).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from requant import ranks
from requant.calibration.batches import batches
from requant.calibration.passes import scored_tokens
from requant.calibration.stats import LinearStats
from requant.models.targets import QuantTarget
from requant.progress import counted
from requant.quantizers.method import Bits, Losses
from requant.quantizers.outliers import remaining_loss
from requant.quantizers.registry import METHODS
from requant.run.context import RunContext, Weights, recipe_sections
from requant.run.quantize_linears import quantize_linears
from requant.run.statistics import gathered_in_chunks
from requant.run.workspace import digest
from requant.sensitivity.sums import score_sums

MEASURED_TOKENS = 8192  # a forward pass over these for every matrix
PQI_TOKENS = 65536  # a backward pass over these at every node, for all matrices together
MatrixLosses = dict[str, Losses]
# of the mean |loss| per weight: the least predicted loss of a matrix, whatever was measured
LOSS_FLOOR = 0.01


def curvature(run: RunContext, widths: Mapping[str, Sequence[Bits]]) -> MatrixLosses:
    """Matrix -> each of its `widths` -> the method's closed form, from the statistics of the calibration text."""
    method = METHODS[run.recipe.method]
    return _of_all(
        run,
        {
            target.name: method.predicted_losses(weight, stats, run.config_of(target), widths[target.name])
            for target, weight, stats in _with_statistics(run)
        },
    )


def outlier_factors(run: RunContext) -> dict[str, dict[float, float]]:
    """Matrix -> outlier fraction -> the part of its loss that remains; kept in the workspace.

    For methods with an `outlier_cost`, which says what an error at each weight costs.
    """
    key = digest(
        run.fingerprint, recipe_sections(run.recipe, "calibration", "method", "quantizer"), "outliers"
    )
    stored = run.workspace.get("outliers", key)
    if stored is not None:
        return {
            name: {float(fraction): left for fraction, left in by.items()}
            for name, by in stored.value.items()
        }
    cost = METHODS[run.recipe.method].outlier_cost
    assert cost is not None
    factors = _of_all(
        run,
        {
            target.name: remaining_loss(weight, cost(stats, run.config_of(target)))
            for target, weight, stats in _with_statistics(run)
        },
    )
    run.workspace.put("outliers", key, value=factors)
    return factors


def _with_statistics(run: RunContext) -> Iterator[tuple[QuantTarget, Float[Tensor, "n k"], LinearStats]]:
    """This rank's matrices in float32 with their statistics, as many collected together as memory allows."""
    method = METHODS[run.recipe.method]
    for chunk, statistics in gathered_in_chunks(run, run.targets, method.allocation_needs):
        with run.stage("allocation"):
            for target in ranks.owned(chunk):
                weight = run.original[target.name].to(target.device).float()
                yield target, weight, statistics[target.name]


def _of_all(run: RunContext, own: Mapping[str, Mapping[Any, float]]) -> dict[str, dict[Any, float]]:
    """The tables of all ranks' matrices; they travel as pairs, for JSON would make strings of their keys."""
    pairs = {name: list(table.items()) for name, table in own.items()}
    return {name: dict(table) for name, table in ranks.of_all(run.targets, pairs).items()}


def measured(run: RunContext, reference: Weights) -> dict[str, float]:
    """KL of the model with one matrix of `reference` at a time, nats per token."""
    found = _kl_of_each(run, reference, others=0.0)
    return {name: max(value, 0.0) for name, value in found.items()}


def restored(run: RunContext, reference: Weights) -> dict[str, float]:
    """KL that each original matrix saves among those of `reference`, nats per token; never below the floor."""
    return _floored(run, _kl_of_each(run, reference, others=1.0))


def _kl_of_each(run: RunContext, reference: Weights, *, others: float) -> dict[str, float]:
    """How much each matrix of `reference` raises the KL, nats per token, with the others original (0) or quantized (1)."""
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
    """Signed sums of PQI along the path to `reference`, nats per token; never below LOSS_FLOOR."""
    windows = _first(run, PQI_TOKENS)
    with run.stage("allocation"):
        sums = score_sums(
            "pqi",
            run.path(reference),
            windows,
            nodes=run.recipe.sensitivity.nodes,
            label=run.label("allocation"),
        )
        run.apply_original_weights()
    return _floored(run, sums)


def _floored(run: RunContext, sums: Mapping[str, float]) -> dict[str, float]:
    """Losses by matrix, none below LOSS_FLOOR: a matrix without one would lose all its bits."""
    mean = sum(map(abs, sums.values())) / run.total_weights
    sizes = {target.name: target.size for target in run.targets}
    return {name: max(total, LOSS_FLOOR * mean * sizes[name]) for name, total in sums.items()}


# of codes at one bit width: matrix -> loss
FROM_CODES = {"measured": measured, "restored": restored, "pqi": integrated}


def predicted_losses(run: RunContext, widths: Mapping[str, Sequence[Bits]], average: float) -> MatrixLosses:
    """Matrix -> each of its `widths` -> loss by the recipe's predictor, nats per token; kept in the workspace.

    All predictors but `curvature` quantize every matrix once, at the bits nearest to `average`.
    """
    predictor = run.recipe.budget.predictor
    nearest = {name: min(found, key=lambda bits: abs(bits - average)) for name, found in widths.items()}
    key = digest(
        run.fingerprint,
        recipe_sections(run.recipe, "calibration", "method", "quantizer", "sensitivity"),
        [predictor, nearest, widths],
    )
    stored = run.workspace.get("predictor", key)
    if stored is not None:
        return {name: {_bits(text): loss for text, loss in by.items()} for name, by in stored.value.items()}
    losses = curvature(run, widths)
    if predictor != "curvature":
        at_nearest = dataclasses.replace(run, bits=nearest)
        reference = quantize_linears(at_nearest, None, label="quantize, to allocate")
        found = FROM_CODES[predictor](run, reference)
        losses = {  # where the closed form is 0, it is so at all bits
            name: {bits: found[name] * loss / (by[nearest[name]] or 1.0) for bits, loss in by.items()}
            for name, by in losses.items()
        }
    run.workspace.put("predictor", key, value=losses)
    return losses


def _bits(text: str) -> Bits:
    """Bits from a JSON key: "2.25" is a float, "2" an integer."""
    return int(text) if text.isdecimal() else float(text)


def _first(run: RunContext, tokens: int) -> Int64[Tensor, "d t"]:
    return run.windows[: max(1, tokens // run.windows.shape[1])]


def _summed_kl(run: RunContext, tokens: Int64[Tensor, "b t"], expected: Float[Tensor, "p v"]) -> float:
    """KL of the model as it stands, over all positions."""
    found = _log_probabilities(run, tokens)
    return functional.kl_div(found, expected, reduction="sum", log_target=True).double().item()


def _log_probabilities(run: RunContext, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "p v"]:
    logits = run.model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.flatten(0, 1).float().log_softmax(-1)
