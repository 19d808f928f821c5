"""What the tests of embeddings and heads in codes share."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import requant
from requant.errors import CheckpointError
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe

IDS = torch.arange(3 * 20).view(3, 20) % 250


def recipe_of(method: str = "rtn", **budget) -> Recipe:
    return Recipe(
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(bits=4),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        budget=Budget(**budget),
        skip=("*.self_attn.*", "*.gate_proj", "*.up_proj") if method == "trellis" else (),  # for time
    )


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def check_refused(source: Path, copy: Path, change: Callable[[Any, Any], None], message: str) -> None:
    """A checkpoint whose config.json and quantization_config `change` has altered is refused by both ways to load it."""
    shutil.copytree(source, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    change(config, config["quantization_config"])
    (copy / "config.json").write_text(json.dumps(config))
    for load in (requant.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            load(copy)
