"""How to calibrate experts: on their own tokens, with statistics shrunk towards their layer's, or on all tokens.

    python -m eval.experts [--model FOLDER] [--data FOLDER] [--out FOLDER] [--only LABEL]

Writes `experts-MODEL.json`: codes only, under the protocol of `common.py` but with fewer tokens. The label of a row gives
the method, its bits, the number of calibration windows, and tau of `requant/calibration/experts.py` in columns, or `all` for
`--all-experts`.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

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
from eval.quality import least_and_most
from requant.calibration import experts
from requant.run.quantize_linears import quantize_linears

MOE = MODEL.with_name("moe-3m")
SEQ_LEN, CALIBRATION_WINDOWS, SCORED_WINDOWS = 512, 32, 24
GRID = {"group_size": 64}  # the columns of the narrowest matrix of moe-3m
OPTIONS: Mapping[str, Mapping[str, Any]] = {"rtn": GRID, "gptq": GRID, "kmeans": {}, "trellis": {}}
# method, bits, calibration windows, tau in columns or "all" for all tokens to all experts
Plan = tuple[str, int, int, float | str]
METHODS: list[Plan] = [
    (method, bits, CALIBRATION_WINDOWS, 1.0)
    for bits in (4, 3, 2)
    for method in ("rtn", "gptq", "kmeans", "trellis")
]
SHRINKAGE: list[Plan] = [
    (method, bits, windows, tau)
    for method, bits in (("gptq", 3), ("trellis", 2))
    for windows in (2, 8, CALIBRATION_WINDOWS)
    for tau in (0.0, 0.25, 1.0, 4.0, "all")
]
PLANS = list(dict.fromkeys(METHODS + SHRINKAGE))


def label_of(plan: Plan) -> str:
    method, bits, windows, tau = plan
    return f"{method}-{bits}-{windows}-{tau}"


def rows(study: Study, plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """One row per plan."""
    for plan in plans:
        method, bits, count, tau = plan
        started = time.perf_counter()
        calibration = dataclasses.replace(
            study.base.recipe.calibration, num_samples=count, all_experts=tau == "all"
        )
        run = study.run(
            method, options={"bits": bits, **OPTIONS[method]}, mode="dense", calibration=calibration
        )
        run = dataclasses.replace(run, windows=run.windows[:count], statistics={})
        default = experts.SHRINKAGE
        experts.SHRINKAGE = default if isinstance(tau, str) else tau
        try:
            weights = quantize_linears(run, None, label="quantize")
        finally:
            experts.SHRINKAGE = default
        run.apply_original_weights()
        yield row_of(
            label_of(plan),
            run,
            started,
            method=method,
            bits=bits,
            windows=count,
            tau=tau,
            tokens_of_experts=least_and_most(run),
            **bits_per_weight(weights),
            **quality(study, run, weights),
        )


def place(row: Mapping[str, Any]) -> int:
    """The position of a row in the file."""
    return [label_of(plan) for plan in PLANS].index(row["label"])


def main(
    model: opt.Model = MOE,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    only: opt.Labels = None,
) -> None:
    file = out / f"experts-{model.name}.json"
    chosen = [plan for plan in PLANS if only is None or label_of(plan) in only]
    if not chosen:
        raise typer.BadParameter(f"no row has that label; there are: {', '.join(map(label_of, PLANS))}.")
    study = open_study(
        model, data, num_samples=CALIBRATION_WINDOWS, seq_len=SEQ_LEN, windows=SCORED_WINDOWS, device="cpu"
    )
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results = {"rows": [], **results, **header(study), "original": quality(study, study.base, {})}
    for row in rows(study, chosen):
        row["environment"] = environment(study.prepared.model.device)
        results["rows"] = with_row(results["rows"], row, key=itemgetter("label"), order=place)
        write_json(file, results)
        print(
            f"{row['label']:24s} {row['bits_per_weight']:.3f} bits  ppl {row['perplexity']:.3f}  KL {row['kl']:.4f}  "
            f"{row['wall_seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
