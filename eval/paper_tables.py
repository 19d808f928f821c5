"""Tables 1 to 5 and 8 of the ReQuant paper (arXiv 2503.01901), made for our model with k-means codes.

    python -m eval.paper_tables [--model FOLDER] [--data FOLDER] [--out FOLDER] [--bits 4 --bits 3]

| key in the results | the paper's table |
| --- | --- |
| `predicted` | 1: predicted and measured dF, by block |
| `interpolation` | 2: the same at w + lambda d |
| `nodes` | 3: error of the path integral by its nodes |
| `kinds` | 4: mean absolute PQI by kind of matrix and block |
| `shares` | 5: share of absolute PQI held by the top weights |
| `ablation` | 8: r_o, r_s and steps |

Tables 1 to 3 use the first 8 calibration windows, tables 4 to 8 all of them. The paper's second-order column squares the
gradient of a sequence's *mean* loss; ours sums squares by position (`requant/calibration/fisher.py`). Both are shown, next
to `1/2 d'Hd`, which is taken from the slope along the path.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Int64
from torch import Tensor

from eval import options as opt
from eval.common import (
    DATA,
    MODEL,
    Study,
    bits_per_weight,
    header,
    open_study,
    quality,
    row_of,
    write_json,
)
from eval.markdown import RESULTS
from requant.calibration.passes import gradient_pass, mean_loss
from requant.evaluation.diagnosis import diagnose
from requant.pipeline.paper import OUTLIER_RULES, Masks, detach_significant, detach_weights, global_top
from requant.recipe.schema import Detach
from requant.run.context import RunContext, Weights, loss, scores
from requant.run.quantize_linears import quantize_linears
from requant.sensitivity.gradient import gradient_score
from requant.sensitivity.path import QuantizedPath, Scores, signed_sum
from requant.sensitivity.pqi import NODES

PATH_WINDOWS = 8
LAMBDAS = (1.0, 0.1, 0.05, 0.01, 0.005, 0.001)
PLAIN = (4, 8, 16, 32)
TOP_SHARES = (0.0005, 0.0015, 0.005, 0.0071, 0.01, 0.0525)
SPARSE = Detach(outlier_fraction=0.0045, significant_fraction=0.0005)
Windows = Int64[Tensor, "b t"]


def predicted(run: RunContext, weights: Weights, windows: Windows) -> dict[str, Any]:
    """Table 1: signed sums by block, next to dF with only that block quantized, and with all of them."""
    found = diagnose(run, weights, windows, names=("gradient", "hessian", "pqi"))
    sums = {**found.predicted, "hessian_of_means": _sums(hessian_of_means(run.path(weights), windows))}
    rows = [
        {
            "block": block,
            **{
                name: sum(values[target.name] for target in run.targets if target.block == block)
                for name, values in sums.items()
            },
            "measured": measured,
        }
        for block, measured in found.block_delta_loss.items()
    ]
    whole = {name: sum(values.values()) for name, values in sums.items()}
    return {"blocks": rows, "model": {**whole, "measured": found.delta_loss}, "tokens": found.tokens}


def hessian_of_means(path: QuantizedPath, windows: Windows) -> Scores:
    """The paper's scaling: `1/2 mean_s (dF_s/dw)^2 d^2`, where F_s is the mean loss of sequence s."""
    squares = {
        target.name: torch.zeros(target.shape, device=target.parameter.device) for target in path.targets
    }

    def accumulate(target: Any, gradient: Tensor) -> None:
        squares[target.name].addcmul_(gradient.float(), gradient.float(), value=1 / len(windows))

    with path.at(0.0):
        for window in windows.split(1):
            gradient_pass(path.model, window, path.targets, accumulate)
    return {
        target.name: squares[target.name].mul_(path.step(target).square()).mul_(0.5)
        for target in path.targets
    }


def slope_along(path: QuantizedPath, windows: Windows) -> Callable[[float], float]:
    """d . g(w + t d) as a function of t; each point is computed only once."""
    known: dict[float, float] = {}

    def slope(t: float) -> float:
        if t not in known:
            known[t] = sum(_sums(gradient_score(path, windows, at=t)).values())
        return known[t]

    return slope


def interpolation(
    run: RunContext,
    path: QuantizedPath,
    windows: Windows,
    slope: Callable[[float], float],
    found: Mapping[str, float],
) -> list[dict[str, float]]:
    """Table 2: predicted and measured dF at w + lambda d."""
    path.apply_weights(0.0)
    start = mean_loss(run.model, windows)
    curvature = (slope(0.01) - slope(-0.01)) / 0.02
    rows = []
    for factor in LAMBDAS:
        path.apply_weights(factor)
        rows.append(
            {
                "lambda": factor,
                "gradient": factor * found["gradient"],
                "hessian": factor**2 * found["hessian"],
                "hessian_of_means": factor**2 * found["hessian_of_means"],
                "half_dHd": factor**2 * curvature / 2,
                "measured": mean_loss(run.model, windows) - start,
            }
        )
    return rows


def nodes(slope: Callable[[float], float], measured: float) -> list[dict[str, Any]]:
    """Table 3: what each rule predicts, its error in % of the measured dF, and its backward passes."""
    plain = {f"plain{n}": tuple((i / (n - 1), 1 / n) for i in range(n)) for n in PLAIN}
    rows = []
    for name, rule in (NODES | plain).items():
        total = sum(weight * slope(t) for t, weight in rule)
        error = 100 * (total - measured) / measured
        rows.append({"nodes": name, "passes": len(rule), "predicted": total, "error_percent": error})
    return rows


def kinds(run: RunContext, pqi: Scores) -> list[dict[str, Any]]:
    """Table 4: mean |PQI| per weight, by block and kind of matrix."""
    rows: dict[int, dict[str, Any]] = {}
    for target in run.targets:
        mean = pqi[target.name].abs().mean(dtype=torch.float64).item()
        rows.setdefault(target.block, {"block": target.block})[target.kind] = mean
    return list(rows.values())


def shares(pqi: Scores) -> dict[str, Any]:
    """Table 5: share of the sum of |PQI| held by the top weights, and the signed sum, in which much of it cancels."""
    values = torch.cat([tensor.abs().flatten() for tensor in pqi.values()])
    total = values.sum(dtype=torch.float64).item()
    ordered = values.sort(descending=True).values
    top = {
        f"{100 * share:g}%": ordered[: round(share * len(ordered))].sum(dtype=torch.float64).item() / total
        for share in TOP_SHARES
    }
    signed = sum(_sums(pqi).values())
    return {"top": top, "sum_of_absolutes": total, "signed_sum": signed}


def ablation(study: Study, base: RunContext) -> Iterator[dict[str, Any]]:
    """Table 8: how outliers are chosen, with significant weights or without, and in how many steps."""
    bits, started = base.recipe.quantizer.bits, time.perf_counter()
    start = quantize_linears(base, None, label="quantize")
    yield measured_row(study, base, start, started, outliers="none", significant="none")
    parts = {"none": start}
    for rule in ("random", *OUTLIER_RULES):
        run = kmeans_run(study, bits, mode="paper", detach=SPARSE)
        started = time.perf_counter()
        masks = random_places(run, 0.0045) if rule == "random" else OUTLIER_RULES[rule](run, start)
        parts[rule] = quantize_linears(run, masks, label=rule)
        yield measured_row(study, run, parts[rule], started, outliers=rule, significant="none")
    significant = (("none", 2), ("uniform", 2), ("iqr", 2), ("adaptive", 1), ("adaptive", 2), ("adaptive", 4))
    for rule, steps in significant:
        detach = dataclasses.replace(SPARSE, steps=steps)
        run = kmeans_run(study, bits, mode="paper", detach=detach)
        started = time.perf_counter()
        weights = parts[rule]
        for step in range(steps):
            weights = detach_significant(run, weights, step)
        yield measured_row(study, run, weights, started, outliers=rule, significant=f"PQI, {steps} steps")
    started = time.perf_counter()
    both = random_significant(base, parts["random"])
    yield measured_row(study, base, both, started, outliers="random", significant="random")


def kmeans_run(study: Study, bits: int, **changes: Any) -> RunContext:
    """A run with k-means codes and levels in 16 bits, as SqueezeLLM stores them."""
    return study.run("kmeans", options={"bits": bits, "level_bits": 16}, **changes)


def measured_row(
    study: Study, run: RunContext, weights: Weights, started: float, *, outliers: str, significant: str
) -> dict[str, Any]:
    """Quality on the test text, and perplexity on the calibration text: the paper's two columns."""
    trained = math.exp(loss(run, weights))
    found = quality(study, run, weights)
    return row_of(
        f"outliers {outliers}, significant {significant}",
        run,
        started,
        outliers=outliers,
        significant=significant,
        calibration_perplexity=trained,
        **bits_per_weight(weights),
        **found,
    )


def random_places(run: RunContext, fraction: float, *, seed: int = 0) -> Masks:
    """Random places: the largest values of uniform noise over all matrices."""
    generator = torch.Generator().manual_seed(seed)
    noise = {target.name: torch.rand(target.shape, generator=generator) for target in run.targets}
    nothing = {target.name: torch.zeros(target.shape, dtype=torch.bool) for target in run.targets}
    return global_top(noise, round(fraction * run.total_weights), taken=nothing)


def random_significant(run: RunContext, weights: Weights) -> Weights:
    """Random outliers, plus as many random weights as the paper's r_s, restored."""
    more = random_places(run, 0.0005, seed=1)
    return {
        name: detach_weights(weight, run.original[name], more[name].to(weight.dense.codes.device))
        for name, weight in weights.items()
    }


def tables(study: Study, bits: int, *, with_ablation: bool) -> Iterator[tuple[str, Any]]:
    """Yield name and content of every table at one number of bits, as they are finished."""
    run = kmeans_run(study, bits, mode="dense")
    weights = quantize_linears(run, None, label="quantize")
    few = run.windows[:PATH_WINDOWS]
    found = predicted(run, weights, few)
    yield "predicted", found
    path = run.path(weights)
    slope = slope_along(path, few)
    yield "nodes", nodes(slope, found["model"]["measured"])
    yield "interpolation", interpolation(run, path, few, slope, found["model"])
    pqi = scores(run, "pqi", weights, label="pqi")
    yield "kinds", kinds(run, pqi)
    yield "shares", shares(pqi)
    del pqi
    if not with_ablation:
        return
    rows: list[dict[str, Any]] = []
    for row in ablation(study, run):
        rows.append(row)
        print(
            f"{bits} {row['label']:46s} {row['bits_per_weight']:.3f} bits  ppl {row['perplexity']:.3f}  "
            f"KL {row['kl']:.4f}  {row['wall_seconds']:.1f} s",
            flush=True,
        )
        yield "ablation", rows


def _sums(found: Scores) -> dict[str, float]:
    return {name: signed_sum(values) for name, values in found.items()}


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    bits: Annotated[list[int] | None, typer.Option(help="Bits of the codes, repeatable. [4 3 2]")] = None,
    num_samples: opt.NumSamples = 128,
    seq_len: opt.SeqLen = 1024,
    windows: opt.Windows = None,
    device: opt.Device = "auto",
    ablate: Annotated[bool, typer.Option(help="Make table 8 too, which takes the longest.")] = True,
) -> None:
    study = open_study(model, data, num_samples=num_samples, seq_len=seq_len, windows=windows, device=device)
    results: dict[str, Any] = {**header(study), "path_windows": PATH_WINDOWS, "bits": {}}
    for width in bits or (4, 3, 2):
        for name, table in tables(study, width, with_ablation=ablate):
            results["bits"].setdefault(str(width), {})[name] = table
            write_json(out / f"paper_tables-{model.name}.json", results)
            if name != "ablation":
                print(width, name, table["model"] if name == "predicted" else table, flush=True)


if __name__ == "__main__":
    typer.run(main)
