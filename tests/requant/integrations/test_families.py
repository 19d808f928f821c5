"""Families that no other test runs on: tiny random models through quantize, save and load."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import requant
from requant.inference.convert import convert_to_kernels
from requant.quantizers.rtn import RtnConfig
from requant.recipe.options import recipe_from_options
from requant.recipe.schema import Calibration, Evaluation, Recipe

RTN = Recipe(
    mode="dense",
    method="rtn",
    quantizer=RtnConfig(bits=4, group_size=32),
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
)
TOKENS = torch.arange(80).view(2, 40) * 7 % 256


@pytest.mark.parametrize("name", ["olmo2", "smollm3", "phi4-mini"])
def test_a_checkpoint_of_the_family_gives_the_same_logits(
    name: str, tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    result = requant.quantize(str(tiny_folder(name)), RTN, tiny_text_file)
    kinds = {target.kind for target in result.prepared.targets}
    assert kinds == (
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        if name == "phi4-mini"
        else {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    )
    requant.save(result, tmp_path / "checkpoint")
    loaded = requant.load(tmp_path / "checkpoint", dtype=torch.float32, dequantize=True)
    assert torch.equal(loaded(TOKENS).logits, result.model(TOKENS).logits)


@pytest.mark.parametrize(
    ("name", "prefix"), [("nemotron-h", "backbone."), ("qwen3.5-moe", "model.language_model.")]
)
def test_matrices_keep_the_names_of_the_source_where_the_model_has_others(
    name: str, prefix: str, tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    """As Nemotron-H's files name them, and those of a Qwen3.5 with images: in the checkpoint, and as floats again."""
    source = shutil.copytree(tiny_folder(name), tmp_path / "source")
    tensors = {
        key.replace("model.", prefix, 1) if key.startswith("model.") else key: tensor
        for key, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = requant.quantize(str(source), RTN, tiny_text_file)
    requant.save(result, tmp_path / "checkpoint")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert all(key.startswith(prefix) for key in config["quantization_config"]["modules"])
    requant.export(tmp_path / "checkpoint", "dense", tmp_path / "dense", dtype="float32")
    assert load_file(tmp_path / "dense" / "model.safetensors").keys() == tensors.keys()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    torch.testing.assert_close(dense(TOKENS).logits, result.model(TOKENS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param(
            "nemotron-h",
            {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"},
            marks=pytest.mark.slow,
        ),
        (
            "deepseek-v32",
            {
                "q_a_proj",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_b_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            },
        ),
        pytest.param(
            "llama4",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3.5-moe",
            {
                "in_proj_qkv",
                "in_proj_z",
                "in_proj_a",
                "in_proj_b",
                "out_proj",
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
            }
            | {"gate_proj", "up_proj", "down_proj"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mixture_under_a_budget_is_trained_and_loads_with_the_same_logits(
    name: str, kinds: set[str], tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    """A budget takes gradients of every matrix, and training those of what is not a code."""
    recipe = recipe_from_options(bits=4.5, method="gptq", group_size=32, mode="dense", head_bits=16)
    recipe = dataclasses.replace(
        recipe,
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=1, samples=1),
        finetune=dataclasses.replace(recipe.finetune, steps=1, train_windows=2, val_windows=1),
    )
    result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file)
    assert {target.kind for target in result.prepared.targets} == kinds
    requant.save(result, tmp_path / "checkpoint")
    loaded = requant.load(tmp_path / "checkpoint", dtype=torch.float32)
    torch.testing.assert_close(loaded(TOKENS).logits, result.model(TOKENS).logits, rtol=1e-4, atol=1e-5)
    served = convert_to_kernels(loaded, device="cpu")
    torch.testing.assert_close(served(TOKENS).logits, result.model(TOKENS).logits, rtol=1e-3, atol=1e-4)
