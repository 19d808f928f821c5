"""Checkpoints with folded rotations: every loader and exporter gives the logits of the folded model, or refuses."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from requant.allocation.embedding_and_head import embedding_and_head_of
from requant.calibration.stats import Curvature
from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError, InputError
from requant.exporters.export import export
from requant.formats.quantized_weight import QuantizedWeight
from requant.inference.convert import convert_to_kernels
from requant.inference.load import load
from requant.models.rotations import HEAD_SCALES, rotation_of
from requant.quantizers.table_grid import GRID
from requant.quantizers.tables import TableMethod

from ..random_checkpoints import build_folded_checkpoint

TOKENS = torch.arange(48)[None] * 7 % 96


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.fixture
def folded(tmp_path: Path) -> Callable[..., tuple[Path, nn.Module]]:
    """A checkpoint of a folded model, and the model with the floats of its codes."""

    def make(name: str, *, head_bits: int = 16, table_method: TableMethod = GRID) -> tuple[Path, nn.Module]:
        def table(model: Any) -> dict[str, QuantizedWeight]:
            if head_bits == 16:
                return {}
            part = embedding_and_head_of(model).parts["embedding"]
            even = Curvature(rows=torch.ones(part.shape[0]), covariance=torch.eye(part.shape[1]))
            return {part.name: table_method.quantize(part.weight, [even], head_bits)}

        return build_folded_checkpoint(tmp_path, name, table=table)

    return make


@pytest.mark.parametrize("name", ["llama", pytest.param("llama-tied", marks=pytest.mark.slow), "qwen2"])
def test_loaders_give_the_logits_of_the_folded_model(folded, tmp_path: Path, name: str) -> None:
    path, model = folded(name)
    header = read_header(path)
    assert header.quantization["format_version"] == 5 and header.rotation == rotation_of(model)
    expected = logits(model)
    for found in (load(path), load(path, dequantize=True), AutoModelForCausalLM.from_pretrained(path)):
        assert torch.equal(logits(found), expected)
    load(path).save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), expected)
    served = convert_to_kernels(load(path), device="cpu")
    torch.testing.assert_close(logits(served), expected, rtol=1e-3, atol=1e-4)


def test_a_quantized_embedding_is_rotated_too(folded) -> None:
    path, model = folded("llama-tied", head_bits=6)
    expected = logits(model)
    for found in (load(path), load(path, dequantize=True), convert_to_kernels(load(path), device="cpu")):
        torch.testing.assert_close(logits(found), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("pickled", [False, True])
def test_new_tokens_leave_the_logits_of_the_old_ones(
    folded, tmp_path: Path, name: str, pickled: bool
) -> None:
    """transformers replaces the embedding and the head, on which the rotations hook."""
    path, model = folded(name)
    found, size = load(path), model.config.vocab_size
    if pickled:
        found = pickle.loads(pickle.dumps(found))
    found.resize_token_embeddings(size + 8, mean_resizing=False)
    assert logits(found).shape[-1] == size + 8
    torch.testing.assert_close(logits(found)[..., :size], logits(model))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(found))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
def test_a_dense_export_is_a_plain_model(folded, tmp_path: Path, name: str) -> None:
    path, model = folded(name)
    export(path, "dense", tmp_path / "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-3, atol=1e-4)
    assert "rotation" not in (tmp_path / "dense" / "config.json").read_text()
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert torch.equal(plain.get_input_embeddings().weight, source.get_input_embeddings().weight)
    assert plain.config.tie_word_embeddings == source.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
def test_floats_are_saved_as_a_plain_model(folded, tmp_path: Path, name: str) -> None:
    """An ordinary folder says nothing of rotations."""
    path, model = folded(name)
    floats, expected = load(path, dequantize=True), logits(model)
    copies = {"floats": floats, "pickled": pickle.loads(pickle.dumps(floats))}
    for kind, found in copies.items():
        found.save_pretrained(tmp_path / kind, state_dict=found.state_dict() if kind == "floats" else None)
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / kind, output_loading_info=True)
        plain, keys = loaded
        assert not any(keys.values())
        torch.testing.assert_close(logits(plain.eval()), expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(logits(found), expected)


@pytest.mark.parametrize("target", ["compressed-tensors", "gguf"])
def test_other_exports_refuse_a_trellis(folded, tmp_path: Path, target: str) -> None:
    with pytest.raises(InputError, match="trellis"):
        export(folded("llama")[0], target, tmp_path / "out")


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda entry: entry.update(rotation={"seed": -1}), "rotation is {'seed': -1}"),
        (lambda entry: entry.update(rotation=[3]), "rotation is"),
        (lambda entry: entry.update(rotation={"seed": 0, "more": 1}), "rotation is"),
        (lambda entry: entry.update(format_version=3), "needs format version 5"),
        (lambda entry: entry.pop("rotation"), HEAD_SCALES),
    ],
)
def test_a_hostile_rotation(folded, change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    path, _ = folded("llama")
    edit(path, change)
    with pytest.raises(CheckpointError, match=sentence):
        load(path)


def test_siblings_are_one_launch(folded) -> None:
    """q, k and v are one matrix to the kernels, and gate and up are where their rows are whole tiles."""
    model = convert_to_kernels(load(folded("llama")[0]), device="cpu")
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.siblings is attention.v_proj.siblings
    assert attention.q_proj.siblings.matrix.out_features == 64 + 32 + 32


def test_packed_columns_must_be_whole_tiles(folded) -> None:
    path, _ = folded("llama")
    name = "model.layers.0.self_attn.q_proj"
    edit(path, lambda entry: entry["modules"][name].update(input_signs=True))
    with pytest.raises(CheckpointError, match="no rotation of its input, but signs for it"):
        read_header(path)
