"""Families that the aliases name and no other test runs on: tiny random models through quantize, save and load."""

from pathlib import Path

import pytest
import torch

import requant
from requant.quantizers.rtn import RtnConfig
from requant.recipe.schema import Calibration, Evaluation, Recipe

TOKENS = torch.arange(80).view(2, 40) * 7 % 256


@pytest.mark.parametrize("name", ["olmo2", "smollm3", "phi4-mini"])
def test_a_checkpoint_of_the_family_gives_the_same_logits(
    name: str, tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        mode="dense",
        method="rtn",
        quantizer=RtnConfig(bits=4, group_size=32),
        calibration=Calibration(num_samples=4, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
    )
    result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file)
    kinds = {target.kind for target in result.prepared.targets}
    assert kinds == (
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        if name == "phi4-mini"
        else {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    )
    requant.save(result, tmp_path / "checkpoint")
    loaded = requant.load(tmp_path / "checkpoint", dtype=torch.float32, dequantize=True)
    assert torch.equal(loaded(TOKENS).logits, result.model(TOKENS).logits)
