"""The curve: KL and perplexity against real bits, for mode `best`, its parts, and each of them left out.

    python -m eval.quality [--model FOLDER] [--data FOLDER] [--out FOLDER] [--rows best:2 --rows best:3:1 ...]

A row is NAME:BITS[:SEED] with a name of PLANS; without `--rows` all of CURVE, ABLATION and PEERS_THAT_TRAIN run. Rows are
added to `quality-MODEL.json`, where one of the same name, bits and seed gives way. `--rows file:2 --rows file:3
--rows file:4` is the whole file: embedding and head at their default bits, `file_bytes` beside the KL; `--rows size:12.6`
is a file of at most 12.6 MB, split between them and the matrices by the budget. Mixtures of experts
are models like others: `--model ../shared/models/moe-31m --rows codes:2 --rows best:2`. `--part N` writes
`quality-MODEL-partN.json` instead, for machines side by side; `--merge` joins the parts; `--keep FOLDER` keeps the rows'
checkpoints. Rows of peers that train are made here, by `block_training.py`; those of untrained ones are in `peers.json`.

Statistics of the codes alone are measured on 128 x 1024 tokens as the peers' are; mode `best` measures them on four
times as many, as those of the peers that train, and training may use 2048 windows of the same text.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval import block_training
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
from requant.allocation.budget import allocate_bits, with_allocation
from requant.allocation.embedding_and_head import quantize_embedding_and_head
from requant.calibration.experts import routed_tokens
from requant.checkpoint.save import checkpoint_bytes, save_checkpoint
from requant.finetune.loop import LR_OF_MANY
from requant.formats.quantized_weight import spec_of
from requant.pipeline.completion import own_windows_of
from requant.pipeline.quantize import MODES, finetuned
from requant.recipe.defaults import MOST_STEPS, trellis_code
from requant.recipe.schema import Budget, Finetune, Predictor
from requant.run.context import RunContext, Weights
from requant.run.rounds import FIRST_WEIGHT
from requant.text.windows import spread
from requant.version import VERSION

FINETUNE = Finetune(steps=MOST_STEPS)  # what models of up to 240 M parameters get
FOUR_ROUNDS = Finetune(steps=450, rounds=4, lr=LR_OF_MANY)  # as many steps in all as six rounds of 300
NO_HIDDEN = dataclasses.replace(FOUR_ROUNDS, hidden_weight=0.0)
SHORT = dataclasses.replace(NO_HIDDEN, steps=225)  # what parts are compared at, by the KL divergence alone
AT_THE_END = Finetune(steps=6 * MOST_STEPS)  # as many as all phases of mode `best` together
BY_BLOCK = Finetune(steps=6 * MOST_STEPS // 4, rounds=4)  # the same in the four phases of QTIP's blocks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One line of the curve, at any bits."""

    label: str
    mode: str = "best"
    method: str = "trellis"
    options: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = "mul1"  # of trellis matrices; None: the default of these bits
    finetune: Finetune = FINETUNE
    statistics: int = 4  # times the windows of the study
    quarters: bool = True
    predictor: Predictor = "curvature"
    first_round_weight: float | None = 1.0  # None: the default of these bits
    one_width: bool = False  # codes of whole bits everywhere: what is stored beside them comes on top
    head_bits: float | None = 16  # of embedding and head; None: by the rule of `--bits`
    make: Callable[[RunContext], Weights] | None = None  # in place of the mode's codes
    peer: str | None = None  # its name, where the row is a peer's
    own_windows: int | None = (
        0  # that the model writes, to train on beside the text's; None: by the rule of the default
    )
    by_size: bool = False  # `bits` is the size of the whole file in MB, which the budget splits


def _qtip(peer: str, label: str, code: str, **changes: Any) -> Plan:
    return Plan(
        label=f"{peer} in form, {label}",
        peer=peer,
        mode="dense",
        one_width=True,
        options={"code": code, "two_sided": False},
        **changes,
    )


def _efficient_qat(group_size: int) -> Plan:
    peer = f"EfficientQAT g{group_size}"
    return Plan(
        label=f"{peer} in form, 2 x {3 * MOST_STEPS} steps",
        peer=peer,
        mode="dense",
        method="rtn",
        one_width=True,
        options={"group_size": group_size},
        make=block_training.efficient_qat,
        finetune=Finetune(steps=3 * MOST_STEPS),
    )


def _steps(steps: int, *, tokens: int = FINETUNE.tokens_per_step, lr: float = LR_OF_MANY) -> Plan:
    return Plan(
        label=f"best, six rounds of {steps} steps of {tokens} tokens, a learning rate of {lr:g}",
        code=None,
        first_round_weight=None,
        finetune=dataclasses.replace(FINETUNE, steps=steps, tokens_per_step=tokens, lr=lr),
    )


def _own_text(windows: int) -> Plan:
    return Plan(
        label=f"best, trained on {windows} windows more, which the model wrote",
        own_windows=windows,
        code=None,
        first_round_weight=None,
    )


PLANS: dict[str, Plan] = {
    "best": Plan(
        label=f"best, six rounds of {MOST_STEPS} steps, with text that the model writes",
        own_windows=None,
        code=None,
        first_round_weight=None,
    ),
    "text-only": Plan(label=f"best, six rounds of {MOST_STEPS} steps", code=None, first_round_weight=None),
    "mul1": Plan(label="best, `mul1` codes", first_round_weight=None),
    "pair": Plan(label="best, `pair` codes", code="pair", first_round_weight=None),
    "four-rounds": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, losses not weighted", finetune=FOUR_ROUNDS
    ),
    "four-rounds-pair": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, losses not weighted, `pair` codes",
        finetune=FOUR_ROUNDS,
        code="pair",
    ),
    "four-rounds-weighted": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, losses weighted by round",
        finetune=FOUR_ROUNDS,
        first_round_weight=FIRST_WEIGHT,
    ),
    "weighted": Plan(label="best, losses weighted by round as at 2 bits", first_round_weight=FIRST_WEIGHT),
    "file": Plan(
        label="best, embedding and head by default, with text that the model writes",
        own_windows=None,
        head_bits=None,
        code=None,
        first_round_weight=None,
    ),
    "size": Plan(
        label="best, the best split of the file, with text that the model writes",
        own_windows=None,
        by_size=True,
        head_bits=None,
        first_round_weight=None,
    ),
    "size-codes": Plan(
        label="trellis codes, the best split of the file",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        by_size=True,
        head_bits=None,
    ),
    "file-codes": Plan(
        label="trellis codes, embedding and head by default",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        head_bits=None,
    ),
    "codes": Plan(label="trellis codes within the budget", mode="dense", finetune=Finetune(), statistics=1),
    "flat-codes": Plan(
        label="trellis codes, one width", mode="dense", finetune=Finetune(), statistics=1, one_width=True
    ),
    "codes-restored": Plan(
        label="trellis codes, bits by what restoring a matrix saves",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        predictor="restored",
    ),
    "restored": Plan(
        label="best, bits by what restoring a matrix saves, four rounds, hidden states not matched",
        finetune=NO_HIDDEN,
        predictor="restored",
    ),
    "codes-one-sided": Plan(
        label="codes alone, inputs' curvature only",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        options={"two_sided": False},
    ),
    "codes-whole-bits": Plan(
        label="codes alone, whole bits", mode="dense", finetune=Finetune(), statistics=1, quarters=False
    ),
    "short": Plan(label="best", finetune=SHORT),
    "blockwise": Plan(
        label="best, trained block by block", finetune=dataclasses.replace(SHORT, blockwise=True)
    ),
    "little-statistics": Plan(label="best, statistics of 128 windows", finetune=SHORT, statistics=1),
    "whole-bits": Plan(label="best, whole bits", finetune=SHORT, quarters=False),
    "no-rounds": Plan(
        label="best, trained at the end only", mode="dense", finetune=dataclasses.replace(SHORT, steps=900)
    ),
    "no-allocation": Plan(label="best, one width", finetune=SHORT, one_width=True),
    "one-sided": Plan(label="best, inputs' curvature only", finetune=SHORT, options={"two_sided": False}),
    "little-text": Plan(
        label="best, trained on 128 windows", finetune=dataclasses.replace(SHORT, train_windows=128)
    ),
    "own-text": _own_text(6144),
    "own-text-3x": _own_text(18432),
    "no-hidden": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, hidden states not matched", finetune=NO_HIDDEN
    ),
    "300-steps": _steps(300),
    "600-steps": _steps(600),
    "rate-8e-3": _steps(MOST_STEPS, lr=8e-3),
    "200-steps": _steps(200),
    "200-steps-8e-3": _steps(200, lr=8e-3),
    "200-steps-2e-2": _steps(200, lr=2e-2),
    "small-batches": _steps(1000, tokens=8192),
    "more-statistics": Plan(
        label="best, statistics of 2048 windows", code=None, first_round_weight=None, statistics=16
    ),
    "long": Plan(
        label="best, four rounds of 675 steps, hidden states not matched",
        finetune=dataclasses.replace(NO_HIDDEN, steps=675),
    ),
    "codebooks": Plan(label="best over codebooks", method="kmeans"),
    "qtip": _qtip(
        "QTIP 3INST",
        "trained by block and at the end",
        "3inst",
        make=block_training.qtip,
        finetune=BY_BLOCK,
    ),
    "qtip-1mad": _qtip(
        "QTIP 1MAD",
        "trained by block and at the end",
        "mul1",
        make=block_training.qtip,
        finetune=BY_BLOCK,
    ),
    "qtip-codes": Plan(
        label="QTIP 3INST in form, not trained",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        one_width=True,
        options={"code": "3inst", "two_sided": False},
    ),
    "qtip-end": _qtip("QTIP 3INST (end)", "trained at the end only", "3inst", finetune=AT_THE_END),
    "efficient-qat-64": _efficient_qat(64),
    "efficient-qat-128": _efficient_qat(128),
}
PEERS_THAT_TRAIN = tuple(f"{name}:{bits}" for bits in (2, 3, 4) for name, plan in PLANS.items() if plan.peer)
CURVE = (
    "best:2",
    "best:2.25",
    "best:2.5",
    "best:3",
    "best:3.5",
    "best:4",
    "best:5",
    "codes:2",
    "codes:2.5",
    "codes:3",
    "codes:4",
)
LEFT_OUT = ("whole-bits", "no-rounds", "no-allocation", "one-sided", "little-text", "little-statistics")
ABLATION = (
    *(f"{name}:{bits}" for bits in (2, 3, 4) for name in LEFT_OUT),
    "short:2:1",
    "short:2:2",
    "short:3:1",
    "short:3:2",
)


def measure(study: Study, name: str, bits: float, seed: int, *, keep: Path | None = None) -> dict[str, Any]:
    """One row, by the product's own stages, its checkpoint in the new folder `keep`; the model is left at the original."""
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
    ):  # in front: the last ones are held out
        train_windows = torch.cat([study.own_text(own_windows, of=train_windows), train_windows])
    run = dataclasses.replace(run, train_windows=train_windows)
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
    """Calibration tokens that the experts of a mixture saw."""
    seen = sorted(routed_tokens(run.model, run.windows).values())
    return {"least": seen[0], "median": seen[len(seen) // 2], "most": seen[-1]} if seen else None


def parse(row: str) -> tuple[str, float, int]:
    """`best:2.25:1` -> ("best", 2.25, 1)."""
    name, bits, *seed = row.split(":")
    if name not in PLANS:
        raise typer.BadParameter(f"{name} is no plan; there are: {', '.join(PLANS)}.")
    return name, float(bits), int(seed[0]) if seed else 0


def key_of(row: Mapping[str, Any]) -> tuple[str, float, int]:
    return row["name"], float(row["bits"]), row["seed"]


def joined(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows by name, bits and seed; a newer one takes the place of an older one."""
    rows = {key_of(row): row for row in (*old, *new)}
    return [rows[key] for key in sorted(rows)]


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    rows: Annotated[list[str] | None, typer.Option(help="NAME:BITS[:SEED]; all if not given.")] = None,
    part: opt.Part = None,
    join: opt.Join = False,
    num_samples: opt.NumSamples = 128,
    seq_len: opt.SeqLen = 1024,
    windows: opt.Windows = None,
    keep: Annotated[Path | None, typer.Option(help="Where checkpoints of the rows stay.")] = None,
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
    made = environment(study.prepared.model.device)  # the header's, but rows of other runs stand beside it
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
