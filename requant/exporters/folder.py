"""The small files that a model needs besides its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from requant.checkpoint.writer import write_bytes
from requant.errors import printable
from requant.exporters.source import Source
from requant.files import front_matter
from requant.report.summary import terms

# patterns of files that describe the checkpoint, not its export
OURS = ("readme.md", "report.html", "report.json")


@dataclass(frozen=True, kw_only=True)
class Written:
    """Names of the weight files, the sentence of the model card on what reads them, and remarks for the user."""

    files: list[str]
    loading: str
    notes: list[str] = field(default_factory=list)


def write_config(source: Source, folder: Path, quantization: Mapping[str, Any] | None) -> None:
    """config.json of the checkpoint in the new dtype, with another quantization_config or none."""
    config = {key: value for key, value in source.header.config.items() if key != "quantization_config"}
    config.pop("torch_dtype", None)  # the name of older transformers
    config["dtype"] = str(source.dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    write_bytes(folder / "config.json", (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def write_card(source: Source, target: str, folder: Path, *, name: str, loading: str) -> None:
    """README.md: where the weights come from, and what reads them."""
    front: dict[str, Any] = {"pipeline_tag": "text-generation", "tags": ["requant", "quantized", target]}
    if base := _base_model(source.path):
        front |= {"base_model": base, "base_model_relation": "quantized"}
    front |= terms(source.path)
    version = str(source.header.quantization.get("requant_version", "?"))
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=False).strip()
    title, origin = (printable(text).replace("`", "?") for text in (name, source.path.name))
    write_bytes(
        folder / "README.md",
        f"---\n{head}\n---\n\n# `{title}`\n\nThe weights of `{origin}`, quantized by requant {version}, "
        f"exported as {target}.\n{loading}\n".encode(),
    )


def _base_model(checkpoint: Path) -> str | None:
    """The base model that the checkpoint's own card names."""
    base = front_matter(checkpoint).get("base_model")
    return base if isinstance(base, str) else None
