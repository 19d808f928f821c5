"""How many bytes everything in a checkpoint will take, before anything is quantized.

    matrices                        exactly, since bytes follow from shapes (`packed_spec`)
    residuals of mode `paper`       an upper bound, including the counts of their tiles (`sparse_bytes`)
    norms, biases, file headers     an upper bound over all bits that could be chosen (`overhead_bytes`)

`budget.py` chooses bits by these sizes, so a promised size is met to the byte, or undershot by no more than the slack of the
bounds.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from requant.allocation.embedding_and_head import (
    FLOATS,
    EmbeddingAndHead,
    embedding_and_head_of,
    table_method,
)
from requant.checkpoint.save import MAX_SHARD_BYTES, checkpoint_bytes
from requant.errors import RecipeError
from requant.formats.packed_spec import PackedSpec
from requant.formats.sparse import INDEX_TILE, SparseSpec
from requant.formats.tensor_spec import TensorSpec
from requant.models.targets import QuantTarget
from requant.quantizers.method import Bits
from requant.quantizers.registry import METHODS, find_method
from requant.recipe.schema import Recipe
from requant.run.context import Allocation, RunContext

RESIDUAL_BYTES = {"float16": 3, "int8": 2}  # a value, and its index in a tile of 256 columns


def packed_spec(
    recipe: Recipe,
    shape: tuple[int, int],
    bits: Bits | None = None,
    outlier_fraction: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> PackedSpec:
    """What the checkpoint will store for a matrix [n, k]; by default at the recipe's own bits and outlier fraction.

    `options` are those of the target (`QuantTarget.options`).
    Residuals that mode `paper` chooses come on top (`sparse_bytes`).
    """
    chosen: dict[str, Any] = {"bits": bits, "outlier_fraction": outlier_fraction}
    given = {name: value for name, value in chosen.items() if value is not None}
    config = dataclasses.replace(recipe.quantizer, **(given | dict(options or {})))
    return find_method(recipe.method).packed_spec(config, shape, finetuned=recipe.finetune.trains)


def available_bits(recipe: Recipe, options: Mapping[str, Any] | None = None) -> list[Bits]:
    """The bits that the recipe's quantizer takes for a target of these `options`, ascending; one where they fix it."""
    options = options or {}
    if "bits" in options:
        return [options["bits"]]
    found: list[Bits] = []
    for bits in METHODS[recipe.method].bits:
        if bits % 1 and not recipe.budget.quarters:
            continue
        try:
            dataclasses.replace(recipe.quantizer, **{**options, "bits": bits})
        except RecipeError:  # excluded by another option of the method
            continue
        found.append(bits)
    return found


def matrix_sizes(recipe: Recipe, target: QuantTarget) -> dict[Bits, int]:
    """Bits -> bytes of a matrix, for all bits that the method takes."""
    return {
        bits: packed_spec(recipe, target.shape, bits, options=target.options).bytes
        for bits in available_bits(recipe, target.options)
    }


def sparse_bytes(recipe: Recipe, targets: Sequence[QuantTarget]) -> int:
    """Upper bound of the residuals of mode `paper`: values, indices, and counts in every matrix.

    A count is taken for a byte. It has two where all 256 columns of a tile are residuals, as in a row of weights hundreds of
    times as large as the others, and none of them small; then the budget is exceeded.
    """
    detach = recipe.detach
    fraction = detach.outlier_fraction + detach.significant_fraction
    if recipe.mode != "paper" or not fraction:
        return 0
    weights = sum(target.size for target in targets)
    entries = fraction * weights + len(targets) / 2 + 1  # each matrix rounds its count
    counts = sum(target.shape[0] * -(-target.shape[1] // INDEX_TILE) for target in targets)
    scales = 2 * len(targets) if detach.values == "int8" else 0
    return round(RESIDUAL_BYTES[detach.values] * entries) + counts + scales


def overhead_bytes(run: RunContext, embedding_and_head: EmbeddingAndHead) -> int:
    """Upper bound of the bytes of the weight files besides matrices, embedding and head: norms, biases, headers.

    The headers are counted with all tensors, and the longest numbers, that any allocation could write.
    """
    matrices = {target.name: largest_tensors(run, target) for target in run.targets}
    method = table_method(run.recipe)
    own = {
        part.name: max((method.packed_spec(part.shape, bits).tensors() for bits in method.bits), key=len)
        for part in embedding_and_head.parts.values()
    }
    whole = checkpoint_bytes(run.model, source=run.source, modules=matrices, embedding_and_head=own)
    tables = (*matrices.values(), *own.values())
    return whole - sum(spec.bytes for table in tables for spec in table.values())


def largest_tensors(run: RunContext, target: QuantTarget) -> dict[str, TensorSpec]:
    """Every tensor that a matrix may store, each at the bits where it is largest."""
    found: dict[str, TensorSpec] = {}
    for bits in available_bits(run.recipe, target.options):
        layout = packed_spec(run.recipe, target.shape, bits, options=target.options)
        if sparse_bytes(run.recipe, run.targets):
            layout = _with_residuals(layout, run.recipe, target, target.size)
        for suffix, spec in layout.tensors().items():
            found[suffix] = max(found.get(suffix, spec), spec, key=lambda each: each.bytes)
    return found


def sparse_header(name: str, layout: PackedSpec, size: int) -> int:
    """Bytes that the sparse tensors of a matrix take in the header of a file of at most `size` bytes."""
    far = min(size, MAX_SHARD_BYTES)
    entries = {
        f"{name}.{suffix}": {"dtype": "F16", "shape": list(spec.shape), "data_offsets": [far, far]}
        for suffix, spec in layout.tensors().items()
        if suffix.startswith("sparse_")
    }
    return len(json.dumps(entries, separators=(",", ":"))) if entries else 0


def file_bytes(
    model: PreTrainedModel,
    source: Path | None,
    recipe: Recipe,
    targets: Sequence[QuantTarget],
    allocation: Allocation,
    matrices: float,
) -> int:
    """Bytes of the weight files, headers included, with so many bytes of `matrices`."""
    modules = {target.name: _allocated_tensors(recipe, target, allocation) for target in targets}
    method, bits = table_method(recipe), allocation.bits_of_tables
    tables = {
        part.name: method.packed_spec(part.shape, bits[role]).tensors()
        for role, part in embedding_and_head_of(model).parts.items()
        if bits[role] != FLOATS
    }
    whole = checkpoint_bytes(model, source=source, modules=modules, embedding_and_head=tables)
    return round(whole - sum(spec.bytes for own in modules.values() for spec in own.values()) + matrices)


def _allocated_tensors(recipe: Recipe, target: QuantTarget, allocation: Allocation) -> dict[str, TensorSpec]:
    """The tensors of a matrix; of residuals of mode `paper` about as many as it will have."""
    outliers = allocation.outlier_fractions.get(target.name)
    layout = packed_spec(recipe, target.shape, allocation.bits[target.name], outliers, target.options)
    detach = recipe.detach
    entries = round((detach.outlier_fraction + detach.significant_fraction) * target.size)
    if recipe.mode == "paper" and entries:
        layout = _with_residuals(layout, recipe, target, entries)
    return layout.tensors()


def _with_residuals(layout: PackedSpec, recipe: Recipe, target: QuantTarget, entries: int) -> PackedSpec:
    values = recipe.detach.values
    sparse = SparseSpec(shape=target.shape, num_entries=entries, values=values, scales="matrix")
    return dataclasses.replace(layout, sparse=sparse)
