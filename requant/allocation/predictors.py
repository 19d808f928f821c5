"""What `b` bits in one matrix would cost the model, before any are given out: the losses that `knapsack.py` adds up.

| predictor | loss of matrix m at b bits | needs |
| --- | --- | --- |
| `curvature` | the expected `1/2 tr(G E H E')` of what the method leaves, in closed form | its statistics, no quantization |
| `measured` | the KL to the original with m alone quantized, at one width | one quantization, a forward pass a matrix |
| `pqi` | the signed sum of PQI over the matrix with all quantized, at one width | one quantization, two backward passes |

The last two take their course over b from the first: loss_m(b) = loss_m(b0) curvature_m(b) / curvature_m(b0), the
linearity theorem of Malinovskii et al. 2024 (HIGGS, arXiv 2411.17525).

Closed forms, e^2 the squared error of a weight. On a grid of step s it is `s^2 / 12`; in a codebook, that of levels of
the best density (Panter and Dite 1951); on a trellis, the code's on Gaussians (`trellis_codes.py`). Without error
feedback the loss is `1/2 sum F e^2`, F the Fisher diagonal. With it, `H = L D L'` and `G = M C M'`, errors are white
*before* feedback, and `tr(G E H E')` becomes `e^2 tr(M^-1 G M^-T) tr(L^-1 H L^-T)`, with L and M the damped factors that
the method feeds back by: the block-LDL diagonals of QTIP (Tseng et al. 2024, arXiv 2406.11235), less the damping. What is
fed back widens the values that a trellis must code, by `e^2 g` with `1 + g = |L^-1|^2 |M^-1|^2` a row, and its error grows
with them, faster (WIDENING).

Checked on bench-32m, all 56 matrices on the trellis, one at a time: KL over `curvature` without these two corrections
has quartiles .83 to 1.05 at 4 bits, .85 to 1.06 at 3, .92 to 1.15 at 2, and at 1 bit 1.2 to 1.7, but 5 to 9 for q and
k of the first two blocks, whose errors pass through the exponential of attention: so 1 bit counts ONE_BIT times, and is
taken where the budget forces it. The losses of single matrices add up: the KL of the whole is 1.04 to 1.11 times their
sum at 2 to 3 bits. `measured` chose equally well at the cost of a quantization. `pqi` is no guide on a trellis: the dF
of a matrix, unlike its KL, may be below zero, and such matrices lost their bits (KL .44 against .21 at 2.5).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from requant.calibration.passes import batches, scored_tokens
from requant.calibration.stats import LinearStats
from requant.formats.hadamard import incoherence_process, random_signs
from requant.quantizers.density import density_edges, run_cost, sort_rows
from requant.quantizers.gptq import hessian_inv_cholesky
from requant.quantizers.kmeans import row_chunks
from requant.quantizers.outliers import remaining_loss
from requant.quantizers.registry import METHODS
from requant.quantizers.rtn import columns_of_group, fit_grid
from requant.quantizers.trellis import block_ldl
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import chunks_that_fit, gather, quantize_linears
from requant.sensitivity.path import signed_sum
from requant.sensitivity.scores import score

# Mean squared error times 4**bits on Gaussians of variance 1, by bits from 1 (`trellis_codes.py`; 7 bits by eye).
TRELLIS_ERROR = {
    "mul1": (1.095, 1.099, 1.117, 1.140, 1.177, 1.236, 1.33, 1.418),
    "3inst": (1.073, 1.106, 1.138, 1.179, 1.240, 1.320, 1.46, 1.625),
    "pair": (1.066, 1.127, 1.226, 1.399),
}
WIDENING = 2.0  # measured: 1.3 to 1.7 on correlated Gaussians, about 3 on bench-32m
ONE_BIT = 2.0  # times the form, at 1 bit; between 1 and 2 bits its power
NEEDS: dict[str, frozenset[str]] = {  # statistics of `curvature`
    "rtn": frozenset({"fisher"}),
    "awq": frozenset({"fisher"}),
    "kmeans": frozenset({"fisher"}),
    "lut": frozenset({"hessian", "output_hessian"}),
    "gptq": frozenset({"hessian", "output_hessian"}),
    "trellis": frozenset({"hessian", "output_hessian"}),
}
MEASURED_TOKENS = 8192  # a forward pass over these for every matrix
PQI_TOKENS = 65536
Losses = dict[str, dict[int | float, float]]
FLOOR = 0.01  # of the mean |PQI| of a weight: what a matrix costs at least, however its signed sum came out


def curvature(run: RunContext, widths: Sequence[int | float]) -> Losses:
    """The expected loss of every matrix at these widths, from the statistics of the calibration text."""
    method, config = run.recipe.method, run.recipe.quantizer
    needs = NEEDS[method] | METHODS[method].needs  # the quantizer comes next: gather once
    found: Losses = {}
    for chunk in chunks_that_fit(run, run.targets, needs):
        statistics = gather(run, chunk, needs)
        with run.stage("allocation"):
            for target in chunk:
                weight = run.original[target.name].to(target.parameter.device, torch.float32)
                found[target.name] = expected(method, weight, statistics[target.name], config, widths)
    return found


def expected(
    method: str, weight: Float[Tensor, "n k"], stats: LinearStats, config: Any, widths: Sequence[int | float]
) -> dict[int | float, float]:
    """Width -> `1/2 tr(G E H E')` of a matrix, in closed form; nats a token."""
    match method:
        case "trellis":
            return _trellis(weight, stats, config, widths)
        case "kmeans":
            return _codebook(weight, _given(stats.fisher), widths)
        case "lut":
            return _codebook(weight, _after_feedback(stats, damp=config.damp, by_size=True), widths)
        case "gptq":
            cost = _after_feedback(stats, damp=config.damp, by_size=config.act_order)
        case _:
            cost = _given(stats.fisher)
    unit = (cost * _step_error(weight, config)).sum(dtype=torch.float64).item()
    return {bits: 0.5 * unit / (2**bits - 1) ** 2 for bits in widths}


def _trellis(
    weight: Tensor, stats: LinearStats, config: Any, widths: Sequence[int | float]
) -> dict[int | float, float]:
    n, k = weight.shape
    columns = random_signs(k, seed=2 * config.seed).to(weight.device)
    rows = random_signs(n, seed=2 * config.seed + 1).to(weight.device)
    inputs = incoherence_process(_given(stats.hessian), rows=columns, columns=columns)
    outputs = incoherence_process(_given(stats.output_hessian), rows=rows, columns=rows)
    unit = incoherence_process(weight, rows=rows, columns=columns).square().mean(dtype=torch.float64).item()
    trace, spread = white_trace(inputs, block_ldl(inputs, damp=config.damp))
    below, down = outputs.diagonal().sum(dtype=torch.float64).item(), 1.0
    if config.two_sided:
        below, down = white_trace(outputs, block_ldl(outputs, damp=config.output_damp))
    gain = max(0.0, spread * down - 1)
    errors = TRELLIS_ERROR[config.code]
    losses: dict[int | float, float] = {}
    for bits in widths:
        error = float(np.interp(bits, range(1, len(errors) + 1), errors)) * 4.0**-bits
        losses[bits] = 0.5 * unit * trace * below * error * (1 + WIDENING * gain * error)
        if bits < 2:
            losses[bits] *= ONE_BIT ** (2 - bits)
    return losses


def _codebook(weight: Tensor, cost: Tensor, widths: Sequence[int | float]) -> dict[int | float, float]:
    """Weighted error, halved, of levels at the means of runs that `density_edges` cuts."""
    losses = dict.fromkeys(widths, 0.0)
    for part in row_chunks(weight, elements=1 << 22):
        rows = sort_rows(weight[part].double(), cost[part].double().clamp(min=1e-30))
        for bits in widths:
            edges = density_edges(rows, 1 << int(bits))
            running = torch.stack([total.gather(1, edges) for total in (rows.mass, rows.moment, rows.energy)])
            losses[bits] += 0.5 * run_cost(running.diff()).sum().item()
    return losses


def white_trace(hessian: Float[Tensor, "c c"], factor: Float[Tensor, "c c"]) -> tuple[float, float]:
    """`tr(L^-1 H L^-T)`, L the identity plus `factor`: the loss of white errors fed back through L; `|L^-1|^2` a row."""
    identity = torch.eye(len(factor), device=factor.device)
    inverse = torch.linalg.solve_triangular(identity + factor, identity, upper=False, unitriangular=True)
    trace = ((inverse @ hessian) * inverse).sum(dtype=torch.float64).item()
    return trace, inverse.square().sum(dtype=torch.float64).item() / len(factor)


def _after_feedback(stats: LinearStats, *, damp: float, by_size: bool) -> Float[Tensor, "n k"]:
    """`G_ii D_jj`, `H = L D L'` in the order of the columns: what an error costs that later columns make up for."""
    hessian = _given(stats.hessian)
    order = torch.arange(len(hessian), device=hessian.device)
    if by_size:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = hessian_inv_cholesky(hessian[order][:, order], damp=damp)
    conditional = torch.empty_like(hessian[0])
    conditional[order] = upper.diagonal().square().reciprocal()
    return _given(stats.output_hessian).diagonal()[:, None] * conditional


def _step_error(weight: Tensor, config: Any) -> Float[Tensor, "n k"]:
    """`range^2 / 12` of every weight's group: the squared error at one step."""
    group_size = columns_of_group(config.group_size, weight.shape[1])
    fit = fit_grid(weight, bits=8, group_size=group_size, symmetric=config.symmetric)
    columns = torch.arange(weight.shape[1], device=weight.device) // group_size
    return (fit.scales.float() * 255).square()[:, columns] / 12


def entry_factors(run: RunContext) -> dict[str, dict[float, float]]:
    """Matrix -> share of entries -> the fraction of its loss that stays, for the methods of `entries.py`."""
    method, config = run.recipe.method, run.recipe.quantizer
    needs = NEEDS[method] | METHODS[method].needs
    found: dict[str, dict[float, float]] = {}
    for chunk in chunks_that_fit(run, run.targets, needs):
        statistics = gather(run, chunk, needs)
        with run.stage("allocation"):
            for target in chunk:
                weight = run.original[target.name].to(target.parameter.device, torch.float32)
                stats = statistics[target.name]
                cost = (
                    _given(stats.fisher)
                    if method == "kmeans"
                    else _after_feedback(stats, damp=config.damp, by_size=True)
                )
                found[target.name] = remaining_loss(weight, cost)
    return found


def measured(run: RunContext, reference: Weights) -> dict[str, float]:
    """KL of the model with one matrix of `reference` at a time, nats a token."""
    windows = _first(run, MEASURED_TOKENS)
    path = run.path(reference)
    totals = dict.fromkeys(reference, 0.0)
    with run.stage("allocation"), torch.no_grad():
        path.place(0.0)
        bar = tqdm(
            total=len(run.targets) * len(windows),
            desc="loss of each matrix",
            unit="window",
            disable=run.quiet,
        )
        for tokens in batches(windows, run.model, label=None):
            expected = _log_probabilities(run, tokens)
            for target in run.targets:
                target.set_weight(path.point(target, 1.0))
                found = _log_probabilities(run, tokens)
                divergence = functional.kl_div(found, expected, reduction="sum", log_target=True)
                totals[target.name] += divergence.double().item()
                target.set_weight(path.start(target))
                bar.update(len(tokens))
        bar.close()
    return {name: max(total, 0.0) / scored_tokens(windows) for name, total in totals.items()}


def integrated(run: RunContext, reference: Weights) -> dict[str, float]:
    """Signed sums of PQI along the way to `reference`, nats a token; never below FLOOR."""
    windows = _first(run, PQI_TOKENS)
    with run.stage("allocation"):
        values = score(
            "pqi",
            run.path(reference),
            windows,
            nodes=run.recipe.sensitivity.nodes,
            label=run.label("allocation"),
        )
    sums = {name: signed_sum(tensor) for name, tensor in values.items()}
    mean = sum(map(abs, sums.values())) / run.total_weights
    sizes = {target.name: target.size for target in run.targets}
    return {name: max(total, FLOOR * mean * sizes[name]) for name, total in sums.items()}


def predicted_losses(run: RunContext, widths: Sequence[int | float], *, at: int | float) -> Losses:
    """Matrix -> width -> loss by the recipe's predictor; `at` is the width of the quantization that some of them judge."""
    course = curvature(run, widths)
    if run.recipe.budget.predictor == "curvature":
        return course
    reference = quantize_linears(
        dataclasses.replace(run, bits=dict.fromkeys((target.name for target in run.targets), at)),
        None,
        label=f"quantize at {at} bits, to allocate",
    )
    judge = {"measured": measured, "pqi": integrated}[run.recipe.budget.predictor]
    found = judge(run, reference)
    return {
        name: {bits: found[name] * loss / (losses[at] or 1.0) for bits, loss in losses.items()}
        for name, losses in course.items()
    }


def _first(run: RunContext, tokens: int) -> Int64[Tensor, "d t"]:
    return run.windows[: max(1, tokens // run.windows.shape[1])]


def _log_probabilities(run: RunContext, tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "p v"]:
    logits = run.model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.flatten(0, 1).float().log_softmax(-1)


def _given(statistic: Tensor | None) -> Tensor:
    assert statistic is not None  # gathered by NEEDS
    return statistic.float()
