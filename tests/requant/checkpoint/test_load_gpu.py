"""A checkpoint on a GPU: the weights of the quantizer bit for bit, the logits of its dequantized model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import requant
from requant.inference.quant_linear import QuantLinear
from requant.recipe.schema import Calibration, Evaluation, Recipe

pytestmark = pytest.mark.gpu
CHOICES = {
    "rtn": {"group_size": 32},
    "kmeans": {},
    "gptq": {"group_size": 32},
    "awq": {"group_size": 32},
    "trellis": {},
}


@pytest.mark.parametrize("method", CHOICES)
@pytest.mark.parametrize("mode", ["dense", "paper"])
def test_load_on_cuda(method: str, mode: str, tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    from requant.quantizers.registry import METHODS

    recipe = Recipe(
        model=str(tiny_folder("llama")),
        mode=mode,
        method=method,
        quantizer=METHODS[method].config(bits=3, **CHOICES[method]),
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=4, seq_len=64),
        evaluation=Evaluation(context=64, windows=2),
    )
    result = requant.quantize(recipe.model, recipe, device="cuda", dtype="float16")
    requant.save(result, tmp_path / "out")
    served = requant.load(tmp_path / "out", device="cuda", dtype="float16")
    for name, layer in served.named_modules():
        if isinstance(layer, QuantLinear):
            assert torch.equal(layer.quantized().dequantize(), result.weights[name].dequantize()), name
    tokens = torch.arange(40, device="cuda")[None]
    want = result.model(input_ids=tokens).logits.float()
    got = served(input_ids=tokens).logits.float()
    assert (got - want).norm() < 1e-2 * want.norm()
    registered = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float16).cuda()
    assert (registered(input_ids=tokens).logits.float() - want).norm() < 1e-2 * want.norm()
