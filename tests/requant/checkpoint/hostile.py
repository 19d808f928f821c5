"""Changing a copy of a checkpoint, and the ways in that must refuse it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from requant.checkpoint.read import load_weights
from requant.errors import CheckpointError, FileError
from requant.inference.load import load

UP = "model.layers.0.mlp.up_proj"


DOWN = "model.layers.0.mlp.down_proj"


def edit_config(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_module(path: Path, name: str = UP, **values: Any) -> None:
    edit_config(path, lambda config: config["quantization_config"]["modules"][name].update(values))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite all shards as one file with changed tensors."""
    shards = sorted(path.glob("model*.safetensors"))
    tensors = {name: tensor for file in shards for name, tensor in load_file(file).items()}
    change(tensors)
    for file in [*shards, path / "model.safetensors.index.json", path / "checksums.json"]:
        file.unlink(missing_ok=True)  # who can write the weights can write their checksums
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refuse(path: Path, sentence: str) -> None:
    """Both ways in answer with the sentence, and nothing else comes out."""
    for read in (lambda: load(path), lambda: list(load_weights(path))):
        with pytest.raises((CheckpointError, FileError), match=sentence) as caught:
            read()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def refuse_load(path: Path, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(path)
