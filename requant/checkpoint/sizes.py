"""Where the bytes of a checkpoint are, and what a weight really costs.

    bits per weight = 8 * (all stored bytes of the matrix) / (n * k)

with codes, scales, levels, sparse part and padding counted; biases, embedding and head are listed beside it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from requant.checkpoint.validate import CheckpointHeader, read_header
from requant.formats.packed_spec import PackedSpec

EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "embed_positions", "word_embeddings")
HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixBytes:
    """One quantized matrix: bytes by part; their sum is what the files hold for it."""

    layout: PackedSpec
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def weights(self) -> int:
        return self.layout.shape[0] * self.layout.shape[1]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


@dataclass(frozen=True, kw_only=True)
class ByteTable:
    """`parts` sums to all tensor bytes of the checkpoint; `file_headers` come on top."""

    parts: dict[str, int]
    matrices: dict[str, MatrixBytes]
    vocabulary: dict[str, MatrixBytes]  # embedding and head, where they are quantized
    file_headers: int

    @property
    def bytes(self) -> int:
        """Size of the weight files."""
        return sum(self.parts.values()) + self.file_headers

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized matrices; embedding and head are counted for themselves."""
        return (
            8 * sum(m.bytes for m in self.matrices.values()) / sum(m.weights for m in self.matrices.values())
        )


def byte_table(checkpoint: str | Path | CheckpointHeader) -> ByteTable:
    """Bytes by part and by matrix, from the headers alone."""
    header = (
        checkpoint
        if isinstance(checkpoint, CheckpointHeader)
        else read_header(checkpoint, trust_remote_code=True)
    )
    matrices, vocabulary = (
        {name: MatrixBytes(layout=layout, parts=matrix_parts(layout)) for name, layout in layouts.items()}
        for layouts in (header.modules, header.vocabulary)
    )
    parts = dict.fromkeys(
        [
            "codes",
            "padding",
            "scales",
            "zero_points",
            "column_scales",
            "levels",
            "sparse_values",
            "sparse_indices",
            "sparse_counts",
            "sparse_scales",
            "embedding",
            "head",
            "other",
        ],
        0,
    )
    for matrix in matrices.values():
        for part, size in matrix.parts.items():
            parts[part] += size
    for name, table in vocabulary.items():
        parts[_plain_part(f"{name}.weight")] += table.bytes
    owned = {
        f"{name}.{suffix}"
        for name, layout in {**header.modules, **header.vocabulary}.items()
        for suffix in layout.tensors()
    }
    for name, stored in header.tensors.items():
        if name not in owned:
            parts[_plain_part(name)] += stored.bytes
    total = sum(file.stat().st_size for file in header.files)
    return ByteTable(
        parts=parts, matrices=matrices, vocabulary=vocabulary, file_headers=total - sum(parts.values())
    )


def matrix_parts(layout: PackedSpec) -> dict[str, int]:
    """Bytes of a matrix by part; `padding` is what fills the rows of codes up to whole words, in whole
    bytes."""
    parts: dict[str, int] = {}
    for suffix, spec in layout.tensors().items():
        part = "scales" if suffix.startswith(("input_", "output_")) else suffix  # both sides of a trellis
        part = "levels" if part == "level_scales" else part
        parts[part] = parts.get(part, 0) + math.prod(spec.shape) * spec.dtype.itemsize
    n, k = layout.shape
    parts["padding"] = parts["codes"] - math.ceil(n * k * layout.bits / 8)
    parts["codes"] -= parts["padding"]
    return parts


def _plain_part(name: str) -> str:
    components = name.split(".")
    if any(part in components for part in HEADS):
        return "head"
    return "embedding" if any(part in components for part in EMBEDDINGS) else "other"
