"""Models and checkpoints as a user names them: opened, scored side by side, asked for text, inspected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from requant.checkpoint import ByteTable, MatrixBytes, byte_table, load, read_header, verify_checksums
from requant.errors import TextError
from requant.evaluation import Candidate, Row, compare, format_table
from requant.inference.decoding import write_tokens
from requant.models import (
    DEMO,
    context_limit,
    folder_bytes,
    load_config,
    load_model,
    load_tokenizer,
    read_config,
    resolve_source,
)
from requant.pipeline import WIKITEXT, pick_device
from requant.reporting.report import format_bytes
from requant.text import read_text, token_windows

CONTEXT = 2048  # of a window, where the model has as many positions


def evaluate_all(
    models: Sequence[str],
    *,
    text: Sequence[str] | None = None,
    context: int | None = None,
    windows: int | None = None,
    against: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quiet: bool = True,
) -> list[Row]:
    """One row a model, in order, all on the first model's tokens; KL and agreement where `against` is given.

    `context` None takes 2048 tokens, or all that the first model has positions for. Raises RequantError.
    """
    folders = [resolve_source(model) for model in models]
    original = None if against is None else resolve_source(against)
    where = pick_device(device)
    names = (
        list(text) if text else ["demo-eval" if str(DEMO) in (folders[0], original) else f"{WIKITEXT}:test"]
    )
    scored = read_text(names)
    if context is None:
        context = min(CONTEXT, context_limit(load_config(folders[0])) or CONTEXT)
    tokens = token_windows(scored, load_tokenizer(folders[0]), num_samples=None, seq_len=context)
    reference = None if original is None else open_model(original, device=where, dtype=dtype)
    candidates = [
        _candidate(name, folder, where, dtype) for name, folder in zip(models, folders, strict=True)
    ]
    return compare(candidates, tokens[:windows], text=scored, reference=reference, progress=not quiet)


def open_model(folder: str, *, device: str, dtype: str) -> PreTrainedModel:
    """A checkpoint of ours with its weights as floats, or any other model as it is."""
    if is_checkpoint(folder):
        wanted: Any = torch.float32 if dtype == "auto" and device == "cpu" else dtype
        return load(folder, device=device, dtype=wanted, dequantize=True)
    return load_model(folder, device=device, dtype=dtype)[0]


def open_served(folder: str, *, device: str, dtype: str) -> Any:
    """A model as it is served: a checkpoint of ours by the kernels on a GPU, by its floats on a CPU."""
    if device == "cpu" or not is_checkpoint(folder):
        return open_model(folder, device=device, dtype=dtype)
    return load(folder, device=device, dtype=dtype)


def is_checkpoint(folder: str) -> bool:
    """Whether a folder says that requant wrote it."""
    if not Path(folder).is_dir():
        return False
    entry = read_config(folder).get("quantization_config")
    return isinstance(entry, dict) and entry.get("quant_method") == "requant"


def generate_text(
    checkpoint: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    dtype: str,
) -> str:
    """`prompt` and what the model goes on with, as text. Raises RequantError."""
    folder, where = resolve_source(checkpoint), pick_device(device)
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer(prompt, return_tensors="pt").to(where)
    length = tokens["input_ids"].shape[1]
    if length == 0:
        raise TextError("--prompt holds no token; give the text to go on from.")
    limit = context_limit(load_config(folder))
    if limit is not None and length + max_new_tokens > limit:
        raise TextError(
            f"the prompt's {length} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} "
            "positions; shorten one of them."
        )
    model: Any = open_served(folder, device=where, dtype=dtype)
    ends = model.generation_config.eos_token_id
    written = write_tokens(
        model,
        tokens["input_ids"],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=torch.Generator(where).manual_seed(seed),  # the caller's generator stays
        end=frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends),
    )
    return str(tokenizer.decode(tokens["input_ids"][0].tolist() + written, skip_special_tokens=True))


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds; its checksums were verified."""

    path: Path
    header: dict[str, Any]  # quantization_config without its tables of matrices
    table: ByteTable
    checksums: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "quantization_config": self.header,
            "bits_per_weight": self.table.bits_per_weight,
            "bytes": self.table.bytes,
            "parts": self.table.parts,
            "matrices": _rows(self.table.matrices),
            "vocabulary": _rows(self.table.vocabulary),
            "sha256": self.checksums,
        }

    def text(self) -> str:
        """Three tables: the checkpoint, its bytes by part, its matrices."""
        calibration = self.header.get("calibration", {})
        head = [
            f"{self.path}: format {self.header['format_version']}, requant {self.header.get('requant_version', '?')}",
            f"recipe          sha256 {str(self.header.get('recipe_sha256', '?'))[:16]} (recipe.yaml)",
            f"calibration     {calibration.get('name', '?')}, sha256 {str(calibration.get('sha256', '?'))[:16]}, "
            f"{calibration.get('num_samples', '?')} x {calibration.get('seq_len', '?')} tokens",
            f"bits per weight {self.table.bits_per_weight:.4f} of the quantized matrices",
            *(
                f"                {table.bits_per_weight:.4f} of {name}, beside them"
                for name, table in self.table.vocabulary.items()
            ),
            f"weight files    {format_bytes(self.table.bytes)}, checksums verified: {', '.join(self.checksums)}",
        ]
        parts = [{"part": part, "bytes": size} for part, size in self.table.parts.items() if size]
        parts.append({"part": "file headers", "bytes": self.table.file_headers})
        matrices = {**self.table.matrices, **self.table.vocabulary}
        return "\n".join([*head, "", format_table(parts), "", format_table(_rows(matrices))])


def _rows(matrices: Mapping[str, MatrixBytes]) -> list[dict[str, Any]]:
    return [
        {
            "matrix": name,
            "format": matrix.layout.format,
            "n": matrix.layout.shape[0],
            "k": matrix.layout.shape[1],
            "code bits": matrix.layout.bits,
            "bits/weight": matrix.bits_per_weight,
            "sparse": matrix.layout.sparse / matrix.weights,
            "bytes": matrix.bytes,
        }
        for name, matrix in matrices.items()
    ]


def inspection(checkpoint: str | Path) -> Inspection:
    """Read the headers, count the bytes, verify the checksums. Raises CheckpointError."""
    header = read_header(checkpoint)
    settings = {
        key: value for key, value in header.quantization.items() if key not in ("modules", "vocabulary")
    }
    return Inspection(
        path=Path(checkpoint),
        header=settings,
        table=byte_table(header),
        checksums=verify_checksums(checkpoint),
    )


def _candidate(name: str, folder: str, device: str, dtype: str) -> Candidate:
    bits = byte_table(folder).bits_per_weight if is_checkpoint(folder) else None
    size = folder_bytes(folder)
    return Candidate(
        name=name,
        load=lambda: open_model(folder, device=device, dtype=dtype),
        bits_per_weight=bits,
        size_bytes=size,
    )
