"""The values of the report, the model card and the final table, computed from a finished run."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from requant.checkpoint.original_sizes import float_bytes, original_bits, stores_floats, whole_bits
from requant.checkpoint.save import checkpoint_bytes, has_token_tables, plain_specs
from requant.checkpoint.sizes import (
    ByteTable,
    MatrixBytes,
    byte_table,
    matrix_parts,
    part_of_table,
    part_of_tensor,
)
from requant.checkpoint.validate import PLAIN_VERSION, TOKEN_TABLE_VERSION
from requant.display import format_bytes, format_seconds
from requant.files import front_matter
from requant.formats.quantized_weight import spec_of
from requant.models.aliases import ALIASES
from requant.models.loading import auto_class
from requant.pipeline.preparation.shape_bytes import bytes_before, parameter_bytes
from requant.pipeline.quantized_model import QuantizedModel
from requant.recipe.options import budget_name
from requant.recipe.yaml_files import dump_recipe
from requant.report.report import (
    BudgetSummary,
    CalibrationText,
    MatrixRow,
    RunSummary,
)
from requant.report.verdicts import verdicts
from requant.run.context import Split
from requant.version import VERSION


def run_summary(result: QuantizedModel, output: Path) -> RunSummary:
    """All values of the report and the model card."""
    prepared, diagnosis = result.prepared, result.diagnosis
    stored = {
        name: MatrixBytes(spec=spec, parts=matrix_parts(spec))
        for name, spec in ((name, spec_of(weight)) for name, weight in result.weights.items())
    }
    before = bytes_before(prepared.model, prepared.source)
    written = _written_bytes(result, stored)
    sizes = _sizes(result, stored)
    sizes["file_headers"] = written - sum(sizes.values())
    spent = _budget_line(result, stored, written)
    weights = sum(matrix.weights for matrix in stored.values())
    summary = RunSummary(
        model=result.recipe.model,
        base_model=_hub_name(result.recipe.model),
        terms=terms(prepared.source),
        checkpoint=output.name,
        version=VERSION,
        method=result.recipe.method,
        mode=result.recipe.mode,
        bits=_target_bits(result, 8 * sum(matrix.bytes for matrix in stored.values()) / weights),
        bits_per_weight=8 * sum(matrix.bytes for matrix in stored.values()) / weights,
        whole_bits_per_weight=8 * written / sum(p.numel() for p in result.model.parameters()),
        budget=spent,
        bytes_before=before,
        bytes_after=written,
        sizes=sizes,
        matrices=[
            MatrixRow(
                name=target.name,
                block=target.block,
                kind=target.kind,
                n=target.shape[0],
                k=target.shape[1],
                bits=stored[target.name].bits_per_weight,
                sparse_fraction=stored[target.name].spec.num_entries / target.size,
                size_bytes=stored[target.name].bytes,
                predicted={score: sums[target.name] for score, sums in diagnosis.predicted.items()},
                tokens=result.routed_tokens.get(target.name.rpartition(".")[0]),
            )
            for target in prepared.targets
        ],
        calibration=CalibrationText(
            name=prepared.calibration.name,
            sha256=prepared.calibration.sha256,
            num_samples=prepared.windows.shape[0],
            seq_len=prepared.windows.shape[1],
        ),
        recipe=dump_recipe(result.recipe),
        training_windows=len(prepared.train_windows) if result.recipe.finetune.trains else 0,
        own_windows=prepared.own_windows,
        before=result.before,
        after=result.after,
        original_loss=diagnosis.original_loss,
        delta_loss=diagnosis.delta_loss,
        embedding_and_head_delta=diagnosis.embedding_and_head_delta if result.embedding_and_head else None,
        other_params_delta=diagnosis.other_params_delta or None,
        block_delta_loss=diagnosis.block_delta_loss,
        kind_delta_loss=_by_block_and_kind(diagnosis.kind_delta_loss),
        seconds=result.seconds,
        peak_memory=result.peak_memory,
        device=_device_name(result),
        warnings=result.warnings,
        samples=result.samples,
        flip_rates=result.flip_rates,
        auto_class=auto_class(result.model.config).__name__,
    )
    return dataclasses.replace(summary, warnings=[*result.warnings, *verdicts(summary)])


def _by_block_and_kind(values: Mapping[tuple[int, str], float]) -> dict[int, dict[str, float]]:
    nested: dict[int, dict[str, float]] = {}
    for (block, kind), value in values.items():
        nested.setdefault(block, {})[kind] = value
    return nested


def result_numbers(result: QuantizedModel, output: Path) -> dict[str, Any]:
    """What `requant quantize --json` prints: numbers in nats per token, bytes and seconds; None for what was not measured.

    `before` and `after` are the original and the checkpoint in `output`.
    """
    summary = run_summary(result, output)
    before, after = result.before, result.after
    table: ByteTable = byte_table(output)
    return {
        "checkpoint": str(output),
        "report": str(output / "report.html"),
        "model": summary.model,
        "method": summary.method,
        "mode": summary.mode,
        "device": summary.device,
        "perplexity": {"before": before.perplexity, "after": after.perplexity},
        "mean_kl": after.mean_kl,
        "kl_error": after.kl_error,
        "p99_kl": after.p99_kl,
        "top1_agreement": after.top1_agreement,
        "bits_per_weight": {"before": _source_bits(result, result.weights), "after": table.bits_per_weight},
        "whole_bits_per_weight": {"before": _source_bits(result), "after": table.whole_bits_per_weight},
        "bits_per_weight_of": {
            name: {"before": _source_bits(result, [name]), "after": part.bits_per_weight}
            for name, part in table.embedding_and_head.items()
        },
        "bytes": {"before": summary.bytes_before, "after": table.bytes},
        "budget": None if summary.budget is None else _budget_numbers(summary, summary.budget),
        "rotations": "per-matrix" if result.prepared.why_not_folded else result.recipe.rotations,
        "peak_memory": summary.peak_memory,
        "seconds": sum(summary.seconds.values()),
        "seconds_of": dict(summary.seconds),
        "scored_on": dataclasses.asdict(after.protocol),
        "warnings": list(summary.warnings),
    }


def _budget_numbers(summary: RunSummary, budget: BudgetSummary) -> dict[str, Any]:
    """The budget against what was written, and its predicted loss (codes alone) against the measured one."""
    measured = (summary.delta_loss or 0.0) + (summary.embedding_and_head_delta or 0.0)
    return {
        "of": "matrices" if budget.written != summary.bytes_after else "weight files",
        "bytes": budget.bytes,
        "written": budget.written,
        "predicted_loss": budget.predicted,
        "measured_loss": measured,
        "best_split": None if budget.best_split is None else dataclasses.asdict(budget.best_split),
    }


def result_rows(numbers: Mapping[str, Any]) -> list[dict[str, object]]:
    """The closing table, from `result_numbers`: a row a quantity, for the original and the quantized model."""
    perplexity, bits, size = numbers["perplexity"], numbers["bits_per_weight"], numbers["bytes"]
    whole = numbers["whole_bits_per_weight"]
    scored = numbers["scored_on"]
    rows: list[tuple[str, object, object]] = [
        ("perplexity", f"{perplexity['before']:.3f}", f"{perplexity['after']:.3f}"),
        ("KL to the original, nats", "0", f"{numbers['mean_kl']:.4f}" + _plus_minus(numbers["kl_error"])),
        ("top-1 agreement", "1", f"{numbers['top1_agreement']:.4f}"),
        ("bits per weight, matrices", _bits_text(bits["before"]), f"{bits['after']:.3f}"),
        *(
            (f"bits per weight, {name}", _bits_text(part["before"]), f"{part['after']:.3f}")
            for name, part in numbers["bits_per_weight_of"].items()
        ),
        ("bits per weight, whole file", _bits_text(whole["before"]), f"{whole['after']:.3f}"),
        ("weight files", format_bytes(size["before"]), format_bytes(size["after"])),
        *_budget_rows(numbers["budget"]),
        *([("rotations", "", numbers["rotations"])] if numbers["rotations"] == "folded" else []),
        ("peak memory", "", format_bytes(numbers["peak_memory"])),
        ("time", "", format_seconds(numbers["seconds"])),
        ("checkpoint", "", numbers["checkpoint"]),
        ("report", "", numbers["report"]),
        ("scored on", "", f"{scored['text']}, {scored['windows']} x {scored['context']} tokens"),
    ]
    return [{"": name, "before": original, "after": quantized} for name, original, quantized in rows]


def _budget_rows(budget: Mapping[str, Any] | None) -> list[tuple[str, object, object]]:
    if budget is None:
        return []
    unspent = 1 - budget["written"] / budget["bytes"]
    label = (
        "bytes of the budget" if budget["of"] == "weight files" else "bytes of the matrices, and their budget"
    )
    rows: list[tuple[str, object, object]] = [
        (label, f"{budget['bytes']:,}", f"{budget['written']:,} ({unspent:.2%} unspent)")
    ]
    if budget["predicted_loss"] is not None:
        rows.append(
            (
                "loss predicted by the budget (codes alone), and measured dF, nats",
                f"{budget['predicted_loss']:.4f}",
                f"{budget['measured_loss']:.4f}",
            )
        )
    if budget["best_split"] is not None:
        split = Split(**budget["best_split"])
        rows.append(
            (f"loss predicted for a file as large, --size {split.size}", f"{split.predicted:.4f}", str(split))
        )
    return rows


def _budget_line(
    result: QuantizedModel, stored: dict[str, MatrixBytes], file_bytes: int
) -> BudgetSummary | None:
    """The budget and what was spent, for the report."""
    allocation = result.allocation
    if allocation is None or allocation.budget is None:
        return None
    matrices = sum(matrix.bytes for matrix in stored.values())
    return BudgetSummary(
        target=_asked_for(result),
        bytes=allocation.budget,
        written=file_bytes if result.recipe.budget.size else matrices,
        predictor=str(allocation.predictor),
        predicted=allocation.predicted,
        loss_curve=allocation.loss_curve,
        embedding_bits=allocation.embedding_bits,
        head_bits=allocation.head_bits,
        token_table_bits=allocation.token_table_bits,
        best_split=allocation.best_split,
    )


def _asked_for(result: QuantizedModel) -> str:
    """The budget in words: bits of the matrices, or bytes of the file."""
    bits = result.recipe.budget.bits
    return budget_name(result.recipe) if bits is None else f"{bits:g} bits per weight"


def _written_bytes(result: QuantizedModel, stored: dict[str, MatrixBytes]) -> int:
    """Bytes of the weight files, headers included."""
    layouts = {name: matrix.spec.tensors() for name, matrix in stored.items()}
    tables = {name: spec_of(weight).tensors() for name, weight in result.embedding_and_head.items()}
    return checkpoint_bytes(
        result.model, source=result.prepared.source, modules=layouts, embedding_and_head=tables
    )


def _target_bits(result: QuantizedModel, paid: float) -> int | float:
    """The requested bits; for a budget in bytes, the bits that resulted."""
    budget = result.recipe.budget
    if budget.size is not None:
        return round(paid, 2)
    return result.recipe.quantizer.bits if budget.bits is None else budget.bits


def _sizes(result: QuantizedModel, stored: dict[str, MatrixBytes]) -> dict[str, int]:
    """Bytes by part of the checkpoint, as `byte_table` will read them from its headers (without those headers)."""
    parts = Counter[str]()
    for matrix in stored.values():
        parts.update(matrix.parts)
    tables = {name: spec_of(weight) for name, weight in result.embedding_and_head.items()}
    version = TOKEN_TABLE_VERSION if has_token_tables(result.model, tables) else PLAIN_VERSION
    for name, spec in tables.items():
        parts[part_of_table(name, version)] += spec.bytes
    plain = plain_specs(
        result.model, source=result.prepared.source, modules=stored, embedding_and_head=tables
    )
    for name, tensor in plain.items():
        parts[part_of_tensor(name)] += tensor.bytes
    return dict(parts)


def _source_element_size(result: QuantizedModel) -> int:
    """Bytes per element in the source's files, as floats; a run in float32 may have widened them."""
    source = result.prepared.source
    stored = parameter_bytes(result.model) if source is None else float_bytes(source)
    return 4 if stored >= 3 * sum(p.numel() for p in result.model.parameters()) else 2


def _source_bits(result: QuantizedModel, names: Iterable[str] | None = None) -> int | float:
    """Bits per weight of these matrices in the source's files, or of the files."""
    source, found = result.prepared.source, None
    if source is not None and not stores_floats(source):
        found = whole_bits(source) if names is None else original_bits(result.model, source, names)
    if found is None:
        return 8 * _source_element_size(result)
    return int(found) if found.is_integer() else found


def _bits_text(bits: int | float) -> str:
    return f"{bits:.3f}" if isinstance(bits, float) else f"{bits}"


def _hub_name(model: str) -> str | None:
    """`owner/name` where the model came from the hub."""
    if os.path.exists(os.path.expanduser(model)):
        return None
    return ALIASES.get(model, model if "/" in model else None)


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def terms(source: Path | None) -> dict[str, Any]:
    """Licence and languages that the original's model card names: they hold for the quantized model too."""
    found = {} if source is None else front_matter(source)

    def short(value: object) -> bool:
        return isinstance(value, str) and len(value) <= 200

    given = {key: found.get(key) for key in ("license", "license_name", "license_link", "language")}
    if isinstance(languages := given["language"], list):
        given["language"] = ["no" if each is False else each for each in languages]  # Norwegian, to YAML
    return {
        key: value
        for key, value in given.items()
        if short(value) or (isinstance(value, list) and all(map(short, value)))
    }


def _device_name(result: QuantizedModel) -> str:
    """Sums differ in their last bits with the number of threads, and with them, now and then, an allocation."""
    if result.model.device.type == "cuda":
        return torch.cuda.get_device_name(result.model.device)
    return f"cpu, {torch.get_num_threads()} threads"
