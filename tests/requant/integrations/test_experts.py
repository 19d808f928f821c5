"""Mixtures of experts through the whole path: quantize, save, load in transformers, export."""

import copy
import dataclasses
import re

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import requant
from requant.errors import InputError
from requant.exporters.export import export
from requant.inference.convert import convert_to_kernels
from requant.inference.quant_linear import QuantLinear
from requant.inference.static_cache import static_cache
from requant.quantizers.rtn import RtnConfig
from requant.recipe.schema import Calibration, Evaluation, Recipe

RECIPE = Recipe(
    mode="dense",
    method="rtn",
    quantizer=RtnConfig(bits=4, group_size=32),
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
)
TOKENS = torch.arange(80).view(2, 40) * 7 % 256


def names_of(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def test_round_trip_through_transformers_and_export(
    mixture: str, tiny_folder, tiny_text_file, tmp_path
) -> None:
    source, folder = tiny_folder(mixture), tmp_path / "checkpoint"
    # of one expert a matrix stays as it is: transformers must not try to fuse what is left
    recipe = dataclasses.replace(RECIPE, skip=("*.1.*experts.2.up_proj", "*.1.*experts.2.w3"))
    recipe = dataclasses.replace(recipe, skip=recipe.skip[1:] if mixture == "mixtral" else recipe.skip[:1])
    result = requant.quantize(str(source), recipe, tiny_text_file)
    requant.save(result, folder)
    expected = result.model(TOKENS).logits

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    floats = requant.load(folder, dtype=torch.float32, dequantize=True)
    assert torch.equal(floats(TOKENS).logits, expected)

    assert static_cache(loaded, 64) is None  # a step is not captured: the host asks which experts it needs
    served = convert_to_kernels(copy.deepcopy(loaded), device="cpu")
    assert not any(isinstance(module, QuantLinear) for module in served.modules())
    torch.testing.assert_close(served(TOKENS).logits, expected, rtol=1e-3, atol=1e-4)

    loaded.save_pretrained(tmp_path / "again")
    assert names_of(tmp_path / "again") == names_of(folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, loaded(TOKENS).logits)

    if mixture == "gpt-oss":
        with pytest.raises(InputError, match="files of gpt_oss hold the experts of a layer in one tensor"):
            export(folder, "dense", tmp_path / "dense")
        return
    weights = {re.sub(r"\.(codes|guard|scales|zero_points|weight)$", "", name) for name in names_of(folder)}
    assert weights == {name.removesuffix(".weight") for name in names_of(source)}
    export(folder, "dense", tmp_path / "dense", dtype="float32")
    assert names_of(tmp_path / "dense") == names_of(source)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    torch.testing.assert_close(dense(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
