"""2:4 sparsity: one-shot methods, values of few bits, and recovery by training, under the protocol of `common.py`.

    python -m eval.sparsity [--model FOLDER] [--steps N] [--tokens-per-step T] [--only LABEL]

Writes `sparsity-MODEL.json`. Rows without training come first; `--steps 0` leaves the others out. The full protocol of
recovery is 500 steps of 16 x 1024 tokens and takes a GPU:

    python -m eval.sparsity --steps 500 --device cuda
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

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
from requant.pipeline.sparse import sparse
from requant.quantizers.registry import PRUNING_METHODS
from requant.recipe.schema import Finetune, Recovery


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One line of the table; `recovery` None: no training."""

    label: str
    method: str
    bits: int = 16
    recovery: Recovery | None = None


PLANS = (
    *(Plan(label=name, method=name) for name in PRUNING_METHODS),
    Plan(label="sparsegpt, 4 bits", method="sparsegpt", bits=4),
    Plan(label="alps, 4 bits", method="alps", bits=4),
    Plan(label="alps, fixed", method="alps", recovery=Recovery()),
    Plan(label="magnitude, fixed", method="magnitude", recovery=Recovery()),
    Plan(label="magnitude, ast", method="magnitude", recovery=Recovery(method="ast")),
    Plan(label="magnitude, s-ste", method="magnitude", recovery=Recovery(method="s-ste")),
    Plan(label="alps, 4 bits, fixed", method="alps", bits=4, recovery=Recovery()),
)


def rows(study: Study, plans: Sequence[Plan], finetune: Finetune) -> Iterator[dict[str, Any]]:
    """One row a plan."""
    for plan in plans:
        started = time.perf_counter()
        inputs: Literal["original", "quantized"] = (
            "quantized" if PRUNING_METHODS[plan.method].needs else "original"
        )
        run = study.run(
            plan.method,
            options={"bits": plan.bits},
            mode="sparse",
            calibration=dataclasses.replace(study.base.recipe.calibration, inputs=inputs),
            finetune=finetune if plan.recovery else Finetune(),
            recovery=plan.recovery or Recovery(),
        )
        weights = sparse(run)
        found = quality(study, run, weights, second=True)
        tokens = finetune.steps * finetune.tokens_per_step if plan.recovery else 0
        values = bits_per_weight(weights) | found
        yield row_of(plan.label, run, started, training_tokens=tokens, flip_rates=run.flip_rates, **values)


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = MODEL,
    data: Annotated[Path, typer.Option(help="Folder with the texts of the protocol.")] = DATA,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    num_samples: Annotated[int, typer.Option(help="Calibration windows.")] = 128,
    seq_len: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    windows: Annotated[int | None, typer.Option(help="Windows to score; all if not given.")] = None,
    steps: Annotated[
        int, typer.Option(help="Training steps of the rows that recover; 0: no such rows.")
    ] = 500,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of a step.")] = 16384,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Label of a row to measure, repeatable; the file's other rows stay."),
    ] = None,
) -> None:
    file = out / f"sparsity-{model.name}.json"
    plans = [p for p in PLANS if (only is None or p.label in only) and (steps or p.recovery is None)]
    if not plans:
        raise typer.BadParameter(f"no row has that label; there are: {', '.join(p.label for p in PLANS)}.")
    finetune = Finetune(steps=steps, tokens_per_step=tokens_per_step)
    study = open_study(
        model,
        data,
        num_samples=num_samples,
        seq_len=seq_len,
        windows=windows,
        device=device,
        finetune=finetune,
    )
    results: dict[str, Any]
    if only is None:
        results = {**header(study), "original": quality(study, study.base, {}, second=True), "rows": []}
    else:
        results = json.loads(file.read_text(encoding="utf-8"))
    for row in rows(study, plans, finetune):
        if only is not None:  # measured elsewhere than the file's header says
            row["environment"] = environment(study.prepared.model.device)
        order = [plan.label for plan in PLANS]
        others = [r for r in results["rows"] if r["label"] != row["label"]]
        results["rows"] = sorted([*others, row], key=lambda r: order.index(r["label"]))
        write_json(file, results)
        print(
            f"{row['label']:24s} {row['bits_per_weight']:.3f} bits  ppl {row['perplexity']:.3f}  KL {row['kl']:.4f}  "
            f"second: KL {row['second']['kl']:.4f}  {row['wall_seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
