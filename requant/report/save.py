"""Saving a finished run: the checkpoint folder with its recipe, report and model card."""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path

from requant.checkpoint.save import save_checkpoint
from requant.errors import InputError
from requant.files import path_of
from requant.pipeline.quantized_model import QuantizedModel
from requant.pipeline.sparse_verdict import SparseVerdict
from requant.recipe.yaml_files import dump_recipe
from requant.report.report import model_card, render_report
from requant.report.summary import run_summary
from requant.version import VERSION


def save(
    result: QuantizedModel,
    output: str | Path,
    *,
    verdict: SparseVerdict | None = None,
    resumable: bool = False,
) -> Path:
    """Write the checkpoint folder of a run, with recipe.yaml, report.html and README.md; it appears whole or not at all.

    `verdict`, of a 2:4 run, goes into the report. `resumable`: see `save_checkpoint`.
    """
    if not isinstance(result, QuantizedModel):
        raise InputError(
            f"save takes what requant.quantize returned, not {type(result).__name__}; give that, not its model."
        )
    recipe, prepared = dump_recipe(result.recipe), result.prepared
    summary = dataclasses.replace(run_summary(result, path_of(output, "output")), verdict=verdict)
    return save_checkpoint(
        output,
        source=prepared.source,
        model=result.model,
        weights=result.weights,
        embedding_and_head=result.embedding_and_head,
        resumable=resumable,
        manifest={
            "requant_version": VERSION,
            "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
            "calibration": dataclasses.asdict(summary.calibration),
        },
        extra_files={
            "recipe.yaml": recipe,
            "report.html": render_report(summary),
            "report.json": json.dumps(summary.to_dict(), indent=2),
            "README.md": model_card(summary),
            **(_tokenizer_files(result) if prepared.own_tokenizer or prepared.source is None else {}),
        },
        changed_config=prepared.changed_config,
    )


def _tokenizer_files(result: QuantizedModel) -> dict[str, bytes]:
    """What would be copied from the model's folder, if it had one."""
    with tempfile.TemporaryDirectory() as folder:
        result.tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
