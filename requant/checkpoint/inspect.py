"""`requant inspect`: what a checkpoint contains, by part and by matrix, with its checksums verified."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from requant.checkpoint.read import has_checksums, verify_checksums
from requant.checkpoint.sizes import ByteTable, MatrixBytes, byte_table
from requant.checkpoint.validate import read_header
from requant.display import format_bytes, format_table
from requant.errors import printable


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds; its checksums, where it has any, were verified."""

    path: Path
    header: dict[str, Any]  # quantization_config without its tables of matrices
    table: ByteTable
    checksums: dict[str, str] | None  # None: a folder that `save_pretrained` wrote has none

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "quantization_config": self.header,
            "bits_per_weight": self.table.bits_per_weight,
            "whole_bits_per_weight": self.table.whole_bits_per_weight,
            "bytes": self.table.bytes,
            "parts": self.table.spent,
            "matrices": _rows(self.table.matrices),
            "vocabulary": _rows(self.table.embedding_and_head),
            "sha256": self.checksums,
        }

    def text(self) -> str:
        """Three tables: the checkpoint, its bytes by part, its matrices."""
        calibration = self.header.get("calibration")
        calibration = calibration if isinstance(calibration, dict) else {}
        head = [
            f"{self.path}: format {self.header['format_version']}, requant {self.header.get('requant_version', '?')}",
            f"recipe          sha256 {str(self.header.get('recipe_sha256', '?'))[:16]} (recipe.yaml)",
            f"calibration     {calibration.get('name', '?')}, sha256 {str(calibration.get('sha256', '?'))[:16]}, "
            f"{calibration.get('num_samples', '?')} x {calibration.get('seq_len', '?')} tokens",
            f"bits per weight {self.table.bits_per_weight:.3f} of the matrices",
            f"                {self.table.whole_bits_per_weight:.3f} of the whole file",
            *(
                f"                {table.bits_per_weight:.3f} of {name}"
                for name, table in self.table.embedding_and_head.items()
            ),
            f"weight files    {format_bytes(self.table.bytes)}, {self._verified()}",
        ]
        parts = [{"part": part, "bytes": size} for part, size in self.table.parts.items() if size]
        parts.append({"part": "file headers", "bytes": self.table.file_headers})
        matrices = {**self.table.matrices, **self.table.embedding_and_head}
        return "\n".join([*map(printable, head), "", format_table(parts), "", format_table(_rows(matrices))])

    def _verified(self) -> str:
        if self.checksums is None:
            return "without checksums to verify"
        return f"checksums verified: {', '.join(self.checksums)}"


def inspection(checkpoint: str | Path) -> Inspection:
    """Read the headers, count the bytes, verify the checksums. Raises CheckpointError."""
    header = read_header(checkpoint, trust_remote_code=True)  # no code is run here
    settings = {
        key: value for key, value in header.quantization.items() if key not in ("modules", "vocabulary")
    }
    return Inspection(
        path=Path(checkpoint),
        header=settings,
        table=byte_table(header),
        checksums=verify_checksums(checkpoint, header.files) if has_checksums(checkpoint) else None,
    )


def _rows(matrices: Mapping[str, MatrixBytes]) -> list[dict[str, Any]]:
    return [
        {
            "matrix": name,
            "format": matrix.spec.format,
            "n": matrix.spec.shape[0],
            "k": matrix.spec.shape[1],
            "code bits": matrix.spec.bits,
            "bits/weight": matrix.bits_per_weight,
            "sparse": matrix.spec.num_entries / matrix.weights,
            "bytes": matrix.bytes,
        }
        for name, matrix in matrices.items()
    ]
