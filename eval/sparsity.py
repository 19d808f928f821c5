"""2:4 sparsity by the protocol of `common.py`: one-shot methods, values of few bits, recovery by training, its ablation.

    python -m eval.sparsity [--model FOLDER] [--steps N] [--tokens-per-step T] [--only PATTERN]

Writes `sparsity-MODEL.json` after every row and measures only rows that the file does not have yet, so the same command
continues an interrupted run. Rows without training come first; `--steps 0` leaves the others out. The full protocol of
recovery is 500 steps of 16 x 1024 tokens and needs a GPU:

    python -m eval.sparsity --steps 500 --device cuda

Several rows can be measured at once on one GPU: `--part N` writes `sparsity-MODEL-partN.json` and leaves out rows that the
whole file already has, and `--merge` joins the parts:

    python -m eval.sparsity --part 0 --only "alps, ast" & python -m eval.sparsity --part 1 --only "magnitude, s-ste" & wait
    python -m eval.sparsity --merge

Bits count the metadata in hardware order, 1 bit per weight. All rows that train keep the step with the lowest KL on the
validation windows, including those trained on the cross-entropy of the text.
"""

import dataclasses
import fnmatch
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

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
    rounded,
    row_of,
    write_json,
)
from eval.markdown import RESULTS
from eval.parts import marked, merge, part_file, with_row
from requant.pipeline.sparse import sparse
from requant.quantizers.registry import PRUNING_METHODS
from requant.recipe.defaults import SPARSE_LR
from requant.recipe.schema import Finetune, Recovery
from requant.recipe.yaml_files import to_dict
from requant.run.context import RunContext


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One line of the table; without training, `recovery` is None."""

    label: str
    method: str
    bits: int = 16
    recovery: Recovery | None = None


SAME = ("protocol",)  # entries of the header that rows of one file share; the model is in the file's name
AST, S_STE = Recovery(method="ast"), Recovery(method="s-ste")
TEXT_ALONE = {"distillation": 0.0}  # cross-entropy instead of the KL divergence to the original
PLANS = (
    *(Plan(label=name, method=name) for name in PRUNING_METHODS),
    Plan(label="sparsegpt, 4 bits", method="sparsegpt", bits=4),
    Plan(label="alps, 4 bits", method="alps", bits=4),
    Plan(label="alps, fixed", method="alps", recovery=Recovery()),
    Plan(label="alps, fixed, lr 0.02", method="alps", recovery=Recovery(lr=2e-2)),
    Plan(label="alps, ast", method="alps", recovery=AST),
    Plan(label="magnitude, fixed", method="magnitude", recovery=Recovery()),
    Plan(label="magnitude, ast", method="magnitude", recovery=AST),
    Plan(label="magnitude, ast, lr 0.02", method="magnitude", recovery=Recovery(method="ast", lr=2e-2)),
    Plan(label="magnitude, s-ste", method="magnitude", recovery=S_STE),
    Plan(label="alps, 4 bits, fixed", method="alps", bits=4, recovery=Recovery()),
    Plan(label="alps, 4 bits, fixed, lr 0.02", method="alps", bits=4, recovery=Recovery(lr=2e-2)),
    Plan(label="magnitude, 4 bits, ast", method="magnitude", bits=4, recovery=AST),
    Plan(label="magnitude, 4 bits, s-ste", method="magnitude", bits=4, recovery=S_STE),
    Plan(
        label="magnitude, fixed, not distilled",
        method="magnitude",
        recovery=dataclasses.replace(Recovery(), **TEXT_ALONE),
    ),
    Plan(
        label="magnitude, ast, not distilled",
        method="magnitude",
        recovery=dataclasses.replace(AST, **TEXT_ALONE),
    ),
)


def run_of(study: Study, plan: Plan, finetune: Finetune) -> RunContext:
    """The run of a plan; its recipe has everything that the row depends on."""
    inputs: Literal["original", "quantized"] = (
        "quantized" if PRUNING_METHODS[plan.method].needs else "original"
    )
    return study.run(
        plan.method,
        options={"bits": plan.bits, "metadata": "hardware"},
        mode="sparse",
        calibration=dataclasses.replace(study.base.recipe.calibration, inputs=inputs),
        finetune=finetune if plan.recovery else Finetune(),
        recovery=plan.recovery or Recovery(),
    )


def measure(study: Study, plan: Plan, run: RunContext) -> dict[str, Any]:
    """One row; the model keeps its original weights."""
    started = time.perf_counter()
    weights = sparse(run)
    found = quality(study, run, weights, second=True)
    run.apply_original_weights()
    finetune = run.recipe.finetune
    return row_of(
        plan.label,
        run,
        started,
        training_tokens=finetune.num_steps * finetune.tokens_per_step,
        flip_rates=run.flip_rates,
        **bits_per_weight(weights),
        **found,
    )


def results_so_far(file: Path, study: Study) -> dict[str, Any] | None:
    """The contents of the file; None if there is none. Raises typer.BadParameter if its protocol is a different one."""
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    expected = header(study)
    if any(found[key] != expected[key] for key in SAME):
        raise typer.BadParameter(f"{file.name} is of another protocol: delete it, or give another --out.")
    return found


def is_measured(rows: Sequence[Mapping[str, Any]], plan: Plan, run: RunContext) -> bool:
    recipe = rounded(to_dict(run.recipe))
    return any(row["label"] == plan.label and agrees(row["recipe"], recipe) for row in rows)


def agrees(recorded: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    """Whether a row was made by this recipe; a setting newer than the row counts as having been at its default."""
    return all(
        agrees(value, recipe.get(key, {})) if isinstance(value, Mapping) else recipe.get(key) == value
        for key, value in recorded.items()
    )


def place(row: Mapping[str, Any]) -> int:
    """The position of a row in the table."""
    return [plan.label for plan in PLANS].index(row["label"])


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    num_samples: opt.NumSamples = 128,
    seq_len: opt.SeqLen = 1024,
    windows: opt.Windows = None,
    steps: Annotated[
        int, typer.Option(help="Training steps of rows with recovery; 0: leave them out.")
    ] = 500,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens per step.")] = 16384,
    device: opt.Device = "auto",
    only: opt.LabelPatterns = None,
    part: opt.Part = None,
    join: opt.Join = False,
) -> None:
    whole_file = out / f"sparsity-{model.name}.json"
    if join:
        merge(whole_file, same=SAME, key=itemgetter("label"), order=place)
        return
    wanted = [p for p in PLANS if any(fnmatch.fnmatch(p.label, pattern) for pattern in only or ["*"])]
    plans = [p for p in wanted if steps or p.recovery is None]
    if not plans:
        raise typer.BadParameter(f"no row has that label; there are: {', '.join(p.label for p in PLANS)}.")
    finetune = Finetune(steps=steps, tokens_per_step=tokens_per_step, lr=SPARSE_LR)
    study = open_study(
        model,
        data,
        num_samples=num_samples,
        seq_len=seq_len,
        windows=windows,
        device=device,
        finetune=finetune,
    )
    file = part_file(whole_file, part)
    whole, results = results_so_far(whole_file, study), results_so_far(file, study)
    if results is None:
        results = whole or {**header(study), "original": quality(study, study.base, {}, second=True)}
        results = {**results, "rows": []}
    elsewhere = whole["rows"] if whole is not None and part is not None else []
    made = environment(study.prepared.model.device)
    for plan in plans:
        run = run_of(study, plan, finetune)
        if is_measured([*results["rows"], *elsewhere], plan, run):
            print(f"{plan.label:32s} is measured already", flush=True)
            continue
        row = marked(measure(study, plan, run), results, made)
        results["rows"] = with_row(results["rows"], row, key=itemgetter("label"), order=place)
        write_json(file, results)
        print(
            f"{plan.label:32s} {row['bits_per_weight']:.3f} bits  ppl {row['perplexity']:.3f}  KL {row['kl']:.4f}  "
            f"second: KL {row['second']['kl']:.4f}  {row['wall_seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
