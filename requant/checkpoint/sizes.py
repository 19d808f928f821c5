"""Bytes of a checkpoint by part and by matrix, and bits per weight.

    bits per weight = 8 * (all stored bytes of the matrix) / (n * k)

with codes, scales, levels, sparse part and padding counted. The same for the whole files: all their bytes, with embedding,
head, norms, biases and headers, over all their weights.

A file does not say which of its tensors are embedding and head, so they are known by the names that models give them. A
table of codes by another name is a token table (`models/token_tables.py`), where the format version allows one.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from requant.checkpoint.validate import TOKEN_TABLE_VERSION, CheckpointHeader, read_header
from requant.formats.bands import BandsSpec
from requant.formats.packed_spec import PackedSpec
from requant.models.rotations import HEAD_SCALES

EMBEDDINGS = (
    *("embed_tokens", "embed_in", "wte", "word_embeddings", "embeddings", "tokens_embed"),
    *("input_embedding", "w"),
    *("wpe", "embed_positions", "positions_embed"),  # of positions
)
HEADS = ("lm_head", "embed_out", "output_projection")
PLAIN_TOKEN_TABLES = ("embed_tokens_per_layer",)  # in 16 bits, where nothing but the name tells


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixBytes:
    """One quantized matrix: bytes by part; their sum is its size in the files."""

    spec: PackedSpec
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def weights(self) -> int:
        return self.spec.shape[0] * self.spec.shape[1]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


@dataclass(frozen=True, kw_only=True)
class ByteTable:
    """`parts` sums to all tensor bytes of the checkpoint; `file_headers` come on top."""

    parts: dict[str, int]
    matrices: dict[str, MatrixBytes]
    embedding_and_head: dict[str, MatrixBytes]  # where they are quantized, and token tables
    file_headers: int
    other_weights: (
        int  # stored as they were: norms, biases, what was skipped, embedding and head unless quantized
    )

    @property
    def weights(self) -> int:
        """How many weights the whole model has; embedding and head count once where they are tied."""
        quantized = (*self.matrices.values(), *self.embedding_and_head.values())
        return self.other_weights + sum(matrix.weights for matrix in quantized)

    @property
    def whole_bits_per_weight(self) -> float:
        """All bytes of the weight files over all weights."""
        return 8 * self.bytes / self.weights

    @property
    def bytes(self) -> int:
        """Size of the weight files."""
        return sum(self.parts.values()) + self.file_headers

    @property
    def spent(self) -> dict[str, int]:
        """All bytes of the weight files by part, file headers among them."""
        return {**self.parts, "file_headers": self.file_headers}

    @property
    def bits_per_weight(self) -> float:
        """Over the quantized matrices of the blocks; embedding and head are counted separately."""
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
    matrices, embedding_and_head = (
        {name: MatrixBytes(spec=spec, parts=matrix_parts(spec)) for name, spec in specs.items()}
        for specs in (header.modules, header.embedding_and_head)
    )
    parts = dict.fromkeys(
        [
            "codes",
            "padding",
            "scales",
            "zero_points",
            "column_scales",
            "levels",
            "metadata",
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
            parts[part] = parts.get(part, 0) + size
    for name, table in embedding_and_head.items():
        part = part_of_table(name, header.quantization["format_version"])
        parts[part] = parts.get(part, 0) + table.bytes
    owned = {
        f"{name}.{suffix}"
        for name, spec in {**header.modules, **header.embedding_and_head}.items()
        for suffix in spec.tensors()
    }
    plain = {name: stored for name, stored in header.tensors.items() if name not in owned}
    for name, stored in plain.items():
        parts[part_of_tensor(name)] = parts.get(part_of_tensor(name), 0) + stored.bytes
    total = sum(file.stat().st_size for file in header.files)
    return ByteTable(
        parts=parts,
        matrices=matrices,
        embedding_and_head=embedding_and_head,
        file_headers=total - sum(parts.values()),
        other_weights=sum(math.prod(stored.shape) for stored in plain.values()),
    )


def matrix_parts(spec: PackedSpec) -> dict[str, int]:
    """Bytes of a matrix by part; `padding` is what fills the rows of codes up to whole words, in whole
    bytes."""
    if isinstance(spec.dense, BandsSpec):
        bands = Counter[str]()
        for dense in spec.dense.parts:
            bands.update(matrix_parts(PackedSpec(dense=dense)))
        return dict(bands)
    parts: dict[str, int] = {}
    for suffix, tensor in spec.tensors().items():
        part = spec.dense.size_parts.get(suffix, suffix)
        parts[part] = parts.get(part, 0) + tensor.bytes
    parts["padding"] = parts["codes"] - math.ceil(spec.dense.num_codes * spec.bits / 8)
    parts["codes"] -= parts["padding"]
    return parts


def part_of_table(name: str, version: int) -> str:
    """The part that a table of codes belongs to, by the name of its module."""
    part = part_of_tensor(f"{name}.weight")
    return "token_tables" if part == "other" and version >= TOKEN_TABLE_VERSION else part


def part_of_tensor(name: str) -> str:
    """The part that a tensor belongs to, by the name of its module."""
    module, _, tensor = name.rpartition(".")
    own = module.rpartition(".")[2]
    if own in HEADS:
        return "head"
    if own in PLAIN_TOKEN_TABLES:
        return "token_tables"
    return "embedding" if own in EMBEDDINGS and tensor != HEAD_SCALES else "other"
