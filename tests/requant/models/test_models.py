"""Every architecture and every method from the source to a loaded checkpoint, which computes what the run computed."""

from pathlib import Path

import pytest
import torch

import requant
from requant.models.loading import load_model
from requant.quantizers.registry import METHODS

from ...architectures import whole_runs
from .whole_runs import logits, tiny_recipe

SLOW = {"trellis": pytest.mark.slow}  # 2**16 states a step


@pytest.mark.parametrize("name", whole_runs())
def test_quantize_save_load(tiny_folder, tiny_text_file: Path, tmp_path: Path, name: str) -> None:
    """The checkpoint computes what the run computed, bit for bit, with codes and with floats."""
    source = tiny_folder(name)
    result = requant.quantize(str(source), tiny_recipe(), tiny_text_file)
    path = requant.save(result, tmp_path / "out")
    expected = logits(result.model)
    original = load_model(str(source), device="cpu", dtype="auto")
    assert not torch.equal(logits(original), expected)
    for dequantize in (False, True):
        model = requant.load(path, dequantize=dequantize)
        assert torch.equal(logits(model), expected)
        for key, parameter in original.named_parameters():
            if parameter.dim() == 1:  # biases and norms
                assert torch.equal(model.get_parameter(key), parameter), key
    head = model.get_output_embeddings().weight
    tied = head.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == (result.model.get_output_embeddings().weight is result.model.get_input_embeddings().weight)
    assert result.after.mean_kl is not None and 0 < result.after.mean_kl < 1
    assert any(weight.sparse is not None for weight in result.weights.values())


@pytest.mark.parametrize("method", [pytest.param(m, marks=SLOW.get(m, ())) for m in METHODS if m != "kmeans"])
@pytest.mark.parametrize(
    "name", ["llama-1216", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-520", "gpt2"))]
)
def test_every_method_on_odd_widths(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str, name: str
) -> None:
    recipe = tiny_recipe(method, mode="dense")
    result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file)
    model = requant.load(requant.save(result, tmp_path / "out"))
    assert torch.equal(logits(model), logits(result.model))


def test_half_precision_sources_keep_their_dtype(
    tiny_model, tokenizer, tiny_text_file: Path, tmp_path: Path
) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    result = requant.quantize(str(tmp_path / "source"), tiny_recipe("rtn"), tiny_text_file)
    assert result.model.dtype == torch.float32  # what the CPU computes in
    requant.save(result, tmp_path / "out")
    model = requant.load(tmp_path / "out")
    assert model.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(logits(requant.load(tmp_path / "out", dtype="float32")), logits(result.model))
