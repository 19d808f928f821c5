"""Every method at 4, 3 and 2 bits under the peers' protocol (`common.py`), run by requant's own functions.

    python -m eval.baselines [--model FOLDER] [--data FOLDER] [--out FOLDER] [--only LABEL]

Writes `baselines-MODEL.json`. `peers.json` holds what the peers' own code, or a re-implementation of it, gave on the same
model, texts and windows. ReQuant is compared with SqueezeLLM's own sparse part, at the same number of entries.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import typer

from eval import options as opt
from eval.common import (
    DATA,
    MODEL,
    Study,
    bits_per_weight,
    environment,
    header,
    open_study,
    quality,
    row_of,
    write_json,
)
from eval.markdown import RESULTS
from eval.parts import with_row
from requant.pipeline.paper import global_top, iqr_outliers, requant_as_published
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Detach, Sensitivity
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import quantize_linears
from requant.run.statistics import gather

BITS = (4, 3, 2)


def dense(run: RunContext) -> Weights:
    """Codes without a sparse part."""
    return quantize_linears(run, None, label="quantize")


def squeezellm(run: RunContext) -> Weights:
    """SqueezeLLM's own sparse part: outliers by the interquartile range, then the weights with the largest Fisher values."""
    outliers = iqr_outliers(run, {})
    statistics = gather(run, run.targets, METHODS["kmeans"].needs)
    fisher = {name: stats.fisher for name, stats in statistics.items() if stats.fisher is not None}
    count = round(run.recipe.detach.significant_fraction * run.total_weights)
    sensitive = global_top(fisher, count, taken=outliers)
    detached = {name: outliers[name].to(mask.device) | mask for name, mask in sensitive.items()}
    return quantize_linears(run, detached, label="quantize")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One line of the table, at any number of bits."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[RunContext], Weights] = dense
    changes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Literal["original", "quantized"] = "original"  # the model whose activations calibrate a block


PUBLISHED = {"level_bits": 16}  # levels stored as the peers store them
SPARSE = Detach(outlier_fraction=0.0045, significant_fraction=0.0005)
PLANS = (
    Plan(label="RTN g128", method="rtn"),
    Plan(label="HQQ g128", method="hqq"),
    Plan(label="HQQ g64", method="hqq", options={"group_size": 64}),  # the authors' group size
    Plan(label="GPTQ g128", method="gptq", inputs="quantized"),  # block by block, as published
    Plan(label="GPTQ g128 act-order", method="gptq", options={"act_order": True}, inputs="quantized"),
    Plan(label="AWQ g128", method="awq"),
    Plan(
        label="AWQ g256 + ReQuant 0.25%",
        method="awq",
        options={"group_size": 256},
        make=requant_as_published,
        changes={"mode": "paper", "detach": Detach(outlier_fraction=0.0025, significant_fraction=0.0)},
    ),
    Plan(label="SqueezeLLM dense", method="kmeans", options=PUBLISHED),
    Plan(label="LNQ", method="lut", options=PUBLISHED),
    Plan(
        label="SqueezeLLM 0.45%+0.05% sparse",
        method="kmeans",
        options=PUBLISHED,
        make=squeezellm,
        changes={"detach": SPARSE},
    ),
    *(
        Plan(
            label=f"SqueezeLLM + ReQuant ({score})",
            method="kmeans",
            options=PUBLISHED,
            make=requant_as_published,
            changes={"mode": "paper", "detach": SPARSE, "sensitivity": Sensitivity(score=score)},
        )
        for score in ("pqi", "marginal")
    ),
)


def rows(study: Study, plans: Sequence[Plan] = PLANS) -> Iterator[dict[str, Any]]:
    """One row per plan and number of bits."""
    for bits in BITS:
        for plan in plans:
            started = time.perf_counter()
            calibration = dataclasses.replace(study.base.recipe.calibration, inputs=plan.inputs)
            changes = {"mode": "dense", "calibration": calibration, **plan.changes}
            run = study.run(plan.method, options={"bits": bits, **plan.options}, **changes)
            weights = plan.make(run)
            found = quality(study, run, weights, second=True)
            yield row_of(plan.label, run, started, bits=bits, **bits_per_weight(weights), **found)


def key_of(row: Mapping[str, Any]) -> tuple[str, float]:
    return row["label"], row["bits"]


def place(row: Mapping[str, Any]) -> tuple[int, int]:
    """The position of a row in the file: by BITS, then by PLANS."""
    return BITS.index(row["bits"]), [plan.label for plan in PLANS].index(row["label"])


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    num_samples: opt.NumSamples = 128,
    seq_len: opt.SeqLen = 1024,
    windows: opt.Windows = None,
    device: opt.Device = "auto",
    only: opt.Labels = None,
) -> None:
    file = out / f"baselines-{model.name}.json"
    chosen = [plan for plan in PLANS if only is None or plan.label in only]
    if not chosen:
        raise typer.BadParameter(f"no row has that label; there are: {', '.join(p.label for p in PLANS)}.")
    study = open_study(model, data, num_samples=num_samples, seq_len=seq_len, windows=windows, device=device)
    results: dict[str, Any]
    if only is None:
        original = quality(study, study.base, {}, second=True)
        results = {**header(study), "original": original, "rows": []}
    else:
        results = json.loads(file.read_text(encoding="utf-8"))
    for row in rows(study, chosen):
        if only is not None:  # not measured where the file's header says
            row["environment"] = environment(study.prepared.model.device)
        results["rows"] = with_row(results["rows"], row, key=key_of, order=place)
        write_json(file, results)
        print(
            f"{row['bits']} {row['label']:32s} {row['bits_per_weight']:.3f} bits  ppl {row['perplexity']:.3f}  "
            f"KL {row['kl']:.4f}  second: ppl {row['second']['perplexity']:.2f} KL {row['second']['kl']:.4f}  "
            f"{row['wall_seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
