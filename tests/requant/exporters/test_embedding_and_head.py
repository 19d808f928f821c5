"""A quantized embedding, tied to the head or not, in every target."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from requant.exporters.export import export
from requant.exporters.source import open_source

TOKENS = torch.arange(60)[None]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["dense", "compressed-tensors", "gguf"])
@pytest.mark.filterwarnings("ignore")
def test_embedding(grid_checkpoint, tmp_path: Path, tied: bool, target: str) -> None:
    checkpoint = grid_checkpoint(embedding_and_head_bits=4, tie_word_embeddings=tied)
    if target != "dense":
        pytest.importorskip(target.replace("-", "_"))
    written = export(checkpoint, target, tmp_path / "out")
    options = (
        {"gguf_file": "model.gguf", "dtype": torch.float32} if target == "gguf" else {"dtype": torch.float16}
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options).eval()
    assert torch.isfinite(theirs(TOKENS).logits).all()
    for name, weight in open_source(checkpoint, dtype="auto").weights():
        assert torch.equal(theirs.get_submodule(name).weight, weight.dequantize().to(options["dtype"])), name
    assert tied == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    assert written.matrices == 15
    if target == "compressed-tensors":
        stored = load_file(tmp_path / "out" / "model.safetensors")
        assert stored["model.embed_tokens.weight"].dtype == torch.float16
        assert "plain numbers" in written.notes[0]
    if target == "gguf":
        assert "14 x Q4_0, 1 x Q5_0" in written.notes[0]


def test_eight_bits_with_zero_points_are_floats_in_gguf(grid_checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    checkpoint = grid_checkpoint(embedding_and_head_bits=8, dtype=torch.bfloat16, tie_word_embeddings=True)
    written = export(checkpoint, "gguf", tmp_path / "out")
    assert "1 x BF16" in written.notes[0]
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    )
    exact = dict(open_source(checkpoint, dtype="auto").weights())["model.embed_tokens"].dequantize()
    assert torch.equal(theirs.get_input_embeddings().weight, exact.bfloat16().float())
