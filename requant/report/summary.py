"""The values of the report, the model card and the final table, computed from a finished run."""

from pathlib import Path
from typing import Any

from requant.allocation.embedding_and_head import embedding_and_head_of
from requant.checkpoint.save import checkpoint_bytes
from requant.checkpoint.sizes import ByteTable, MatrixBytes, byte_table, matrix_parts
from requant.display import format_bytes, format_seconds
from requant.formats.quantized_weight import spec_of
from requant.models.loading import ALIASES
from requant.pipeline.prepare import bytes_before
from requant.pipeline.quantize import QuantizedModel
from requant.recipe.options import budget_name
from requant.recipe.yaml_files import dump_recipe
from requant.report.report import (
    BudgetSummary,
    CalibrationText,
    MatrixRow,
    RunSummary,
)
from requant.version import VERSION


def run_summary(result: QuantizedModel, output: Path) -> RunSummary:
    """All values of the report and the model card."""
    prepared, diagnosis = result.prepared, result.diagnosis
    stored = {
        name: MatrixBytes(spec=spec, parts=matrix_parts(spec))
        for name, spec in ((name, spec_of(weight)) for name, weight in result.weights.items())
    }
    before = bytes_before(prepared)
    sizes = _sizes(result, stored)
    spent = _budget_line(result, stored)
    weights = sum(matrix.weights for matrix in stored.values())
    return RunSummary(
        model=result.recipe.model,
        base_model=_hub_name(result.recipe.model),
        checkpoint=output.name,
        version=VERSION,
        method=result.recipe.method,
        mode=result.recipe.mode,
        bits=_target_bits(result, 8 * sum(matrix.bytes for matrix in stored.values()) / weights),
        bits_per_weight=8 * sum(matrix.bytes for matrix in stored.values()) / weights,
        budget=spent,
        bytes_before=before,
        bytes_after=sum(sizes.values()),
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
                delta_loss=diagnosis.matrix_delta_loss.get(target.name),
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
        before=result.before,
        after=result.after,
        original_loss=diagnosis.original_loss,
        delta_loss=diagnosis.delta_loss,
        embedding_and_head_delta=diagnosis.embedding_and_head_delta if result.embedding_and_head else None,
        other_params_delta=diagnosis.other_params_delta or None,
        block_delta_loss=diagnosis.block_delta_loss,
        seconds=result.seconds,
        peak_memory=result.peak_memory,
        device=_device_name(result),
        warnings=result.warnings,
        samples=result.samples,
    )


def result_rows(result: QuantizedModel, output: Path) -> list[dict[str, object]]:
    """The closing table: one row per quantity, for the original and the quantized model."""
    table: ByteTable = byte_table(output)
    before, after = result.before, result.after
    source_bits = 8 * _source_element_size(result)
    rows: list[tuple[str, object, object]] = [
        ("perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f}"),
        ("KL to the original, nats", "0", f"{after.mean_kl:.4f}"),
        ("top-1 agreement", "1", f"{after.top1_agreement:.4f}"),
        ("bits per quantized weight", f"{source_bits}", f"{table.bits_per_weight:.3f}"),
        *_embedding_and_head_rows(table, source_bits),
        ("weight files", format_bytes(bytes_before(result.prepared)), format_bytes(table.bytes)),
        *_budget_rows(result, table),
        ("peak memory", "", format_bytes(result.peak_memory)),
        ("time", "", format_seconds(sum(result.seconds.values()))),
        ("checkpoint", "", str(output)),
        ("report", "", str(output / "report.html")),
        (
            "scored on",
            "",
            f"{after.protocol.text}, {after.protocol.windows} x {after.protocol.context} tokens",
        ),
    ]
    return [{"": name, "before": original, "after": quantized} for name, original, quantized in rows]


def _embedding_and_head_rows(table: ByteTable, source_bits: int) -> list[tuple[str, object, object]]:
    return [
        (f"bits per weight of {name}", f"{source_bits}", f"{part.bits_per_weight:.3f}")
        for name, part in table.embedding_and_head.items()
    ]


def _budget_rows(result: QuantizedModel, table: ByteTable) -> list[tuple[str, object, object]]:
    """The budget against what was written, and its predicted loss against the measured one."""
    allocation = result.allocation
    if allocation is None or allocation.budget is None:
        return []
    written = table.bytes if result.recipe.budget.size else sum(m.bytes for m in table.matrices.values())
    unspent = 1 - written / allocation.budget
    rows: list[tuple[str, object, object]] = [
        (
            "bytes of the budget" if result.recipe.budget.size else "bytes of the matrices, and their budget",
            f"{allocation.budget:,}",
            f"{written:,} ({unspent:.2%} unspent)",
        )
    ]
    if allocation.predicted is not None:
        measured = result.diagnosis.delta_loss + result.diagnosis.embedding_and_head_delta
        rows.append(
            (
                "loss predicted by the budget (codes alone), and measured dF, nats",
                f"{allocation.predicted:.4f}",
                f"{measured:.4f}",
            )
        )
    return rows


def _budget_line(result: QuantizedModel, stored: dict[str, MatrixBytes]) -> BudgetSummary | None:
    """The budget and what was spent, for the report."""
    allocation = result.allocation
    if allocation is None or allocation.budget is None:
        return None
    layouts = {name: matrix.spec.tensors() for name, matrix in stored.items()}
    tables = {name: spec_of(weight).tensors() for name, weight in result.embedding_and_head.items()}
    source = result.prepared.source
    if result.recipe.budget.size:
        written = checkpoint_bytes(result.model, source=source, modules=layouts, embedding_and_head=tables)
    else:
        written = sum(matrix.bytes for matrix in stored.values())
    return BudgetSummary(
        target=budget_name(result.recipe),
        bytes=allocation.budget,
        written=written,
        predictor=str(allocation.predictor),
        predicted=allocation.predicted,
        loss_curve=allocation.loss_curve,
        embedding_bits=allocation.embedding_bits,
        head_bits=allocation.head_bits,
    )


def _target_bits(result: QuantizedModel, paid: float) -> int | float:
    """The requested bits; for a budget in bytes, the bits that resulted."""
    budget = result.recipe.budget
    if budget.size is not None:
        return round(paid, 2)
    return result.recipe.quantizer.bits if budget.bits is None else budget.bits


def _sizes(result: QuantizedModel, stored: dict[str, MatrixBytes]) -> dict[str, int]:
    """Bytes by part of the checkpoint, as `byte_table` will read them from its headers (without those headers)."""
    parts: dict[str, int] = {}
    for matrix in stored.values():
        for part, size in matrix.parts.items():
            parts[part] = parts.get(part, 0) + size
    model: Any = result.model
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    quantized = {id(target.parameter) for target in result.prepared.targets}
    scale = _source_element_size(result)
    tables = embedding_and_head_of(model)
    for role, part in tables.parts.items():
        stays = part.name not in result.embedding_and_head
        parts[role] = (
            part.weight.numel() * scale if stays else spec_of(result.embedding_and_head[part.name]).bytes
        )
    rest = [
        p
        for p in model.parameters()
        if id(p) not in quantized and p is not embedding and (head is None or p is not head.weight)
    ]
    parts["other"] = sum(p.numel() for p in rest) * scale
    return parts


def _source_element_size(result: QuantizedModel) -> int:
    """Bytes per element in the source's files, which a run in float32 may have widened."""
    return 4 if bytes_before(result.prepared) >= 3 * sum(p.numel() for p in result.model.parameters()) else 2


def _hub_name(model: str) -> str | None:
    """`owner/name` where the model came from the hub."""
    if Path(model).exists():
        return None
    return ALIASES.get(model, model if "/" in model else None)


def _device_name(result: QuantizedModel) -> str:
    if result.model.device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(result.model.device)
    return "cpu"
