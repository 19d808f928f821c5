"""`requant sensitivity`: writes every score of every weight, and how well each score predicts the loss.

Writes a folder: `SCORE/model*.safetensors` (one float32 tensor per matrix, signed, sharded above 5 GB, with an index),
`table.json` and `plot.svg`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.allocation.budget import allocate_bits, with_allocation
from requant.checkpoint.new_folder import check_output, new_folder
from requant.checkpoint.save import MAX_SHARD_BYTES
from requant.checkpoint.writer import write_shards
from requant.errors import ModelError, RecipeError, WriteError
from requant.evaluation.diagnosis import Diagnosis, diagnose
from requant.evaluation.perplexity import warn_of_long_windows
from requant.models.devices import current_gpu, gradients, pick_device
from requant.models.targets import QuantTarget
from requant.pipeline.preparation.prepare import prepare, start
from requant.recipe.options import Options
from requant.recipe.python_call import recipe_for
from requant.recipe.schema import Recipe
from requant.report.plots import sensitivity_plot
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace
from requant.sensitivity.path import Scores

SCORES = ("gradient", "hessian", "pqi")
# options of a run that is measured
UNUSED = ("mode", "sensitivity", "finetune_steps", "own_windows", "eval_text")


@dataclass(frozen=True, kw_only=True)
class Sensitivities:
    """The table: predicted dF by every score and the measured dF, by block and for the model."""

    targets: Sequence[QuantTarget]
    diagnosis: Diagnosis

    def __repr__(self) -> str:
        """One line, as of a QuantizedModel: the targets hold every weight of the model."""
        return f"Sensitivities({len(self.targets)} matrices, measured dF {self.diagnosis.delta_loss:.4f})"

    def by_block(self, score: str) -> dict[int, float]:
        """Block -> signed sum of a score."""
        sums: dict[int, float] = {}
        for target in self.targets:
            sums[target.block] = sums.get(target.block, 0.0) + self.diagnosis.predicted[score][target.name]
        return sums

    def rows(self) -> list[dict[str, object]]:
        """One row per block, then the whole model; nats per token."""
        sums = {score: self.by_block(score) for score in self.diagnosis.predicted}
        rows: list[dict[str, object]] = [
            {"block": str(block), **{score: sums[score][block] for score in sums}, "measured": measured}
            for block, measured in self.diagnosis.block_delta_loss.items()
        ]
        whole = {score: self.diagnosis.total(score) for score in sums}
        return [*rows, {"block": "model", **whole, "measured": self.diagnosis.delta_loss}]


def score(
    model: str | Path | PreTrainedModel | None = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    output: str | Path | None = None,
    quiet: bool = True,
    **options: Unpack[Options],
) -> Sensitivities:
    """Score every weight for the change that the recipe's quantizer makes (codes only, no sparse part).

    Model, recipe, text and options are those of `requant.quantize`, except those in UNUSED, which are refused. With
    `output`, the scores of every weight, the table and the plot are written there. Raises RequantError.
    """
    model = str(model) if isinstance(model, Path) else model
    out_folder = None if output is None else check_output(output)
    given = {name: options.get(name) for name in UNUSED}
    if unused := [name for name, value in given.items() if value is not None and value != "dense"]:
        raise RecipeError(
            f"{unused[0]} has no meaning for score, which makes codes alone, as mode dense does; leave it out."
        )
    recipe = recipe_for(model, recipe, text, device=device, options={**options, "mode": "dense"})
    model = recipe.model if model is None else model
    where = pick_device(device) if isinstance(model, str) else model.device
    with gradients(), current_gpu(where):
        prepared = prepare(
            model, recipe, tokenizer=tokenizer, device=device, dtype=dtype, scored=False, quiet=quiet
        )
        if prepared.hosted:
            raise ModelError(
                f"{prepared.source} is larger than the GPU, and so would be its scores, 4 bytes per weight: give a larger "
                "GPU, or --device cpu."
            )
        run = start(prepared, prepared.recipe, workspace=Workspace(None), quiet=quiet)
        warn_of_long_windows(run.model, run.windows)
        run = with_allocation(run, allocate_bits(run))
        weights = quantize_linears(run, None, label="quantize")
        run.statistics.clear()
        try:
            with nullcontext() if out_folder is None else new_folder(out_folder) as folder:
                on_scores = None if folder is None else partial(_write_scores, folder)
                diagnosis = diagnose(run, weights, prepared.windows, names=SCORES, on_scores=on_scores)
                found = Sensitivities(targets=prepared.targets, diagnosis=diagnosis)
                if folder is not None:
                    _write_table(folder, found)
        except OSError as error:
            if out_folder is None:
                raise
            raise WriteError(
                f"{out_folder} cannot be written ({error.strerror or error}); free some space, or choose another --output."
            ) from error
    return found


def _write_scores(folder: Path, score: str, values: Scores) -> None:
    """One score of every weight, as it comes: the next one takes its memory."""
    (folder / score).mkdir()
    units = ({matrix: tensor} for matrix, tensor in values.items())
    write_shards(folder / score, units, max_shard_bytes=MAX_SHARD_BYTES)


def _write_table(folder: Path, found: Sensitivities) -> None:
    (folder / "table.json").write_text(json.dumps(found.rows(), indent=2), encoding="utf-8")
    predicted = {score: found.by_block(score) for score in found.diagnosis.predicted}
    plot = sensitivity_plot(predicted, found.diagnosis.block_delta_loss)
    (folder / "plot.svg").write_bytes(plot)
