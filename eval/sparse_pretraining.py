"""Tiny models trained from scratch with 2:4 weights: validation loss and flip rate compared with a dense run.

    python -m eval.sparse_pretraining [--steps N] [--hidden D] [--blocks B] [--seed S] [--only PATTERN]

Dense, S-STE, transposable masks (arXiv 2404.01847, dense for the last sixth) and naive SR-STE, on the same number of tokens
of the calibration text, with the demo model's tokenizer and shape unless options say otherwise. The layers of the
feed-forward networks are sparse. A sparse model is scored with its 2:4 weights, except after a dense end. On a GPU,
products are in bfloat16, by autocast. Writes `sparse-pretraining.json` after every row; the same command continues an
interrupted run.

A model of this size leaves a GPU waiting for launches, so train several rows at once: `--part N` writes
`sparse-pretraining-partN.json` and leaves out rows that the whole file already has, and `--merge` joins the parts:

    for seed in 0 1 2; do python -m eval.sparse_pretraining --seed $seed --part $seed & done; wait
    python -m eval.sparse_pretraining --merge
"""

import dataclasses
import fnmatch
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from eval import options as opt
from eval.common import CALIBRATION, DATA, environment, find, rounded, write_json
from eval.common import MODEL as BENCH_MODEL
from eval.markdown import RESULTS
from eval.parts import marked, merge, part_file
from requant.models.devices import pick_device
from requant.models.loading import load_tokenizer
from requant.sparse_training import sparsify_
from requant.sparsity.masks import flip_rate, keep2
from requant.text.sources import read_text
from requant.text.windows import token_windows

MODEL = BENCH_MODEL.with_name("demo-4m")
VAL_WINDOWS = 16
PEAK_LR, WARMUP = 3e-3, 0.05
SEEDS = (0, 1, 2)
FLIPS_EVERY = 10  # steps between two masks that are compared


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a study: the shape of the model, and the training that all rows share."""

    steps: int
    windows_per_step: int
    seq_len: int
    hidden: int
    blocks: int
    decay: float
    device: str


ROWS: dict[str, tuple[str, bool] | None] = {  # label -> method, and whether gradients are pruned (MVUE)
    "dense": None,
    "s-ste": ("s-ste", False),
    "s-ste, MVUE": ("s-ste", True),
    "transposable, MVUE, dense end": ("transposable", True),
    "sr-ste": ("sr-ste", False),
}


def train_one(
    source: Path,
    label: str,
    seed: int,
    windows: Int64[Tensor, "b t"],
    val: Int64[Tensor, "v t"],
    settings: Settings,
) -> dict[str, Any]:
    """One row: a model trained as `ROWS[label]` says, and its scores."""
    started = time.perf_counter()
    model = fresh_model(source, settings, seed)
    training = None
    if (row := ROWS[label]) is not None:
        method, mvue = row
        decay = None if method == "s-ste" else settings.decay
        training = sparsify_(model, method, decay=decay, mvue=mvue, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=settings.steps, pct_start=WARMUP
    )
    order = torch.Generator().manual_seed(seed)
    dense_from = 5 * settings.steps // 6 if label.endswith("dense end") else settings.steps
    flips, masks = [], masks_of(model)
    for step in range(settings.steps):
        if training is not None and step == dense_from:
            training.densify_()
            training = None
        chosen = torch.randint(len(windows), (settings.windows_per_step,), generator=order)
        loss_of(model, windows[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if training is not None:
            training.step()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % FLIPS_EVERY == 0:
            now = masks_of(model)
            flips.append(sum(flip_rate(now[n], masks[n]) for n in now) / len(now))
            masks = now
    if training is not None:
        training.densify_(keep_sparse=True)
    with torch.no_grad():
        loss = sum(loss_of(model, part).item() for part in val.split(4)) / len(val.split(4))
    return {
        "label": label,
        "seed": seed,
        "val_loss": loss,
        "flips_every": FLIPS_EVERY,
        "flip_rates": flips,
        "seconds": round(time.perf_counter() - started, 1),
    }


def key_of(row: Mapping[str, Any]) -> tuple[int, str]:
    return row["seed"], row["label"]


def place(row: Mapping[str, Any]) -> tuple[int, int]:
    """The position of a row in the file: by seed, then by ROWS."""
    return row["seed"], list(ROWS).index(row["label"])


def fresh_model(source: Path, settings: Settings, seed: int) -> Any:
    """A model of the architecture of `source`, with random weights and another size."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size = settings.hidden, 3 * settings.hidden
    config.num_hidden_layers = settings.blocks
    config.head_dim = settings.hidden // config.num_attention_heads
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(settings.device).train()


def masks_of(model: Any) -> dict[str, Tensor]:
    """The 2:4 masks by magnitude of the feed-forward weights; a dense run has them too."""
    return {
        name: keep2(parameter.detach().abs())
        for name, parameter in model.named_parameters()
        if ".mlp." in name
    }


def loss_of(model: Any, tokens: Int64[Tensor, "b t"]) -> Tensor:
    tokens = tokens.to(model.device)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main(
    model: Annotated[
        Path, typer.Option(help="Folder of the model whose tokenizer and shape to use.")
    ] = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1500,
    windows_per_step: Annotated[int, typer.Option(help="Windows per step.")] = 32,
    seq_len: opt.SeqLen = 256,
    hidden: Annotated[
        int, typer.Option(help="Hidden size; the feed-forward network is three times as wide.")
    ] = 256,
    blocks: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    decay: Annotated[float, typer.Option(help="Decay of pruned weights, added to the gradient.")] = 2e-4,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Seed with which to run every row, repeatable. [0 1 2]"),
    ] = None,
    device: opt.Device = "auto",
    only: opt.LabelPatterns = None,
    part: opt.Part = None,
    join: opt.Join = False,
) -> None:
    whole_file = out / "sparse-pretraining.json"
    if join:
        merge(whole_file, same=("settings",), key=key_of, order=place)
        return
    if steps < FLIPS_EVERY:
        raise typer.BadParameter(
            f"--steps {steps}: flip rates are of masks {FLIPS_EVERY} steps apart; give {FLIPS_EVERY} steps or more."
        )
    settings = Settings(
        steps=steps,
        windows_per_step=windows_per_step,
        seq_len=seq_len,
        hidden=hidden,
        blocks=blocks,
        decay=decay,
        device=pick_device(device),
    )
    tokenizer = load_tokenizer(str(model))
    windows = token_windows(read_text(find(data, CALIBRATION)), tokenizer, num_samples=None, seq_len=seq_len)
    file, made = part_file(whole_file, part), environment(torch.device(settings.device))
    results: dict[str, Any] = {
        **made,
        "text": CALIBRATION,
        "settings": rounded(dataclasses.asdict(settings)),
        "tokens": steps * windows_per_step * seq_len,
        "rows": [],
    }
    trained: set[tuple[int, str]] = set()
    for path in (whole_file, file):
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["settings"] != results["settings"]:
                raise typer.BadParameter(f"{path.name} has other settings: delete it, or give another --out.")
            trained |= {key_of(row) for row in found["rows"]}
            results = found if path == file else results
    labels = [label for label in ROWS if any(fnmatch.fnmatch(label, pattern) for pattern in only or ["*"])]
    for number, label in itertools.product(seed or SEEDS, labels):
        if (number, label) in trained:
            continue
        row = train_one(model, label, number, windows[:-VAL_WINDOWS], windows[-VAL_WINDOWS:], settings)
        results["rows"].append(marked(row, results, made))
        write_json(file, results)
        print(
            f"seed {number} {label:32s} validation loss {row['val_loss']:.4f}  "
            f"flips {row['flip_rates'][0]:.4f} to {row['flip_rates'][-1]:.4f}  {row['seconds']} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
