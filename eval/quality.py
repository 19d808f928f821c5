"""The curve: KL and perplexity by real bits, for mode `best`, for its parts, and with each of them left out.

    python -m eval.quality [--model FOLDER] [--data FOLDER] [--out FOLDER] [--rows best:2 --rows best:3:1 ...]

A row is NAME:BITS[:SEED], with a name from PLANS (`plans.py`); without `--rows`, all of CURVE, ABLATION and PEERS_THAT_TRAIN
are run. Rows are added to `quality-MODEL.json`, replacing those with the same name, bits and seed.

`--rows file:2 --rows file:3 --rows file:4` measures whole files: embedding and head have their default bits, and
`file_bytes` is given with the KL. `--rows size:12.6` is a file of at most 12.6 MB, which the budget splits between them and
the matrices. Mixtures of experts are measured like other models: `--model ../shared/models/moe-31m --rows codes:2
--rows best:2`. `--part N` writes `quality-MODEL-partN.json` instead, for running on several machines; `--merge` joins the
parts. `--keep FOLDER` keeps the checkpoints of the rows. Rows of peers that train are made here, by `block_training.py`;
results of untrained peers are in `peers.json`.

For codes alone, statistics are measured on 128 x 1024 tokens, as the peers' are. Mode `best` and the peers that train
measure them on four times as many, and training may use 2048 windows of the same text.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
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
from eval.parts import merge, part_file
from eval.plans import ABLATION, CURVE, FINETUNE, PEERS_THAT_TRAIN, PLANS
from requant.allocation.budget import allocate_bits, with_allocation
from requant.allocation.embedding_and_head import quantize_embedding_and_head
from requant.calibration.experts import routed_tokens
from requant.checkpoint.save import checkpoint_bytes, save_checkpoint
from requant.formats.quantized_weight import spec_of
from requant.pipeline.preparation.completion import own_windows_of
from requant.pipeline.quantize import MODES, finetuned
from requant.recipe.defaults import trellis_code
from requant.recipe.schema import Budget
from requant.run.context import RunContext, Weights
from requant.text.windows import spread
from requant.version import VERSION


def measure(study: Study, name: str, bits: float, seed: int, *, keep: Path | None = None) -> dict[str, Any]:
    """One row by requant's own stages, its checkpoint in the new folder `keep`. The model keeps its original weights."""
    plan, started = PLANS[name], time.perf_counter()
    train_windows = study.base.train_windows[: plan.finetune.train_windows]
    whole = min(8, max(1, round(bits)))
    calibration = study.base.recipe.calibration
    calibration = dataclasses.replace(calibration, num_samples=plan.statistics * calibration.num_samples)
    trellis = {"seed": seed, "code": plan.code or trellis_code(bits)} if plan.method == "trellis" else {}
    run = study.run(
        plan.method,
        options={"bits": whole, **trellis, **plan.options},
        mode=plan.mode,
        budget=Budget(
            bits=None if plan.one_width or plan.by_size else bits,
            size=round(1e6 * bits) if plan.by_size else None,
            quarters=plan.quarters,
            predictor=plan.predictor,
            first_round_weight=plan.first_round_weight,
            head_bits=plan.head_bits,
            embedding_bits=plan.head_bits,
        ),
        calibration=calibration,
        finetune=dataclasses.replace(plan.finetune, own_windows=plan.own_windows),
        seed=seed,
    )
    if plan.statistics > 1:
        windows = spread(study.base.train_windows, calibration.num_samples, of=None)
        run = dataclasses.replace(run, windows=windows, statistics={})
    if own_windows := own_windows_of(
        run.model, run.recipe, run.targets, train_windows
    ):  # placed first, since the last ones are held out
        train_windows = torch.cat([study.own_text(own_windows, of=train_windows), train_windows])
    run = dataclasses.replace(run, train_windows=train_windows, last_states=[])
    run = with_allocation(run, allocate_bits(run))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    weights: Weights = (plan.make or MODES[plan.mode])(run)
    tables = quantize_embedding_and_head(run)
    if plan.finetune.steps:
        weights, tables = finetuned(run, weights, tables)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    tables.apply_weights(quantized=True)
    found = quality(study, run, weights, second=True)
    if keep is not None:
        save_checkpoint(
            keep,
            source=study.prepared.source,
            model=run.model,
            weights=weights,
            embedding_and_head=tables.weights,
            manifest={"requant_version": VERSION},
        )
    tables.apply_weights(quantized=False)
    run.apply_original_weights()
    widths = [run.config_of(target).bits for target in run.targets]
    return row_of(
        plan.label,
        run,
        started,
        name=name,
        bits=bits,
        seed=seed,
        **({} if plan.peer is None else {"peer": plan.peer}),
        training_tokens=train_windows.numel() if plan.finetune.steps else 0,
        widths={str(width): widths.count(width) for width in sorted(set(widths))},
        peak_bytes=peak,
        tokens_of_experts=least_and_most(run),
        embedding_and_head_bits=sorted(table.dense.bits for table in tables.weights.values()) or 16,
        file_bytes=checkpoint_bytes(
            run.model,
            source=study.prepared.source,
            modules={name: spec_of(weight).tensors() for name, weight in weights.items()},
            embedding_and_head={name: spec_of(table).tensors() for name, table in tables.weights.items()},
        ),
        **bits_per_weight(weights),
        **found,
    )


def least_and_most(run: RunContext) -> dict[str, int] | None:
    """Calibration tokens that the experts of a mixture saw; None for other models."""
    seen = sorted(routed_tokens(run.model, run.windows).values())
    return {"least": seen[0], "median": seen[len(seen) // 2], "most": seen[-1]} if seen else None


def parse(row: str) -> tuple[str, float, int]:
    """`best:2.25:1` -> ("best", 2.25, 1)."""
    name, bits, *seed = row.split(":")
    if name not in PLANS:
        raise typer.BadParameter(f"{name} is not a plan; there are: {', '.join(PLANS)}.")
    return name, float(bits), int(seed[0]) if seed else 0


def key_of(row: Mapping[str, Any]) -> tuple[str, float, int]:
    return row["name"], float(row["bits"]), row["seed"]


def joined(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows sorted by name, bits and seed; a newer row replaces an older one with the same key."""
    rows = {key_of(row): row for row in (*old, *new)}
    return [rows[key] for key in sorted(rows)]


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    rows: Annotated[
        list[str] | None, typer.Option(help="NAME:BITS[:SEED], repeatable; all by default.")
    ] = None,
    part: opt.Part = None,
    join: opt.Join = False,
    num_samples: opt.NumSamples = 128,
    seq_len: opt.SeqLen = 1024,
    windows: opt.Windows = None,
    keep: Annotated[Path | None, typer.Option(help="Folder in which to keep the rows' checkpoints.")] = None,
    device: opt.Device = "auto",
) -> None:
    whole_file = out / f"quality-{model.name}.json"
    if join:
        merge(whole_file, same=("protocol",), key=key_of, order=key_of)
        return
    wanted = [parse(row) for row in rows or (*CURVE, *ABLATION, *PEERS_THAT_TRAIN)]
    study = open_study(
        model,
        data,
        num_samples=num_samples,
        seq_len=seq_len,
        windows=windows,
        device=device,
        finetune=FINETUNE,
    )
    file = part_file(whole_file, part)
    old = json.loads(file.read_text())["rows"] if file.is_file() else []
    results: dict[str, Any] = {
        **header(study),
        "original": quality(study, study.base, {}, second=True),
        "rows": old,
    }
    made = environment(
        study.prepared.model.device
    )  # as in the header, but the file also holds rows of other runs
    for name, bits, seed in wanted:
        folder = keep / f"{name}-{bits:g}-{seed}" if keep is not None else None
        row = {**measure(study, name, bits, seed, keep=folder), "environment": made}
        results["rows"] = joined(results["rows"], [row])
        write_json(file, results)
        print(
            f"{row['label']:36s} {row['bits_per_weight']:.3f} bits  ppl {row['perplexity']:.3f}  KL {row['kl']:.4f}  "
            f"second KL {row['second']['kl']:.4f}  {row['wall_seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
