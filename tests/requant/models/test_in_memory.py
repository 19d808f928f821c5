"""Models that are given as objects: saved as they are in memory, and without a folder."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import requant
from requant.errors import ModelError
from requant.models import loading

from .whole_runs import logits, tiny_recipe


def test_a_model_built_in_memory(
    tiny_model, tokenizer, tiny_text_file: Path, tmp_path: Path, monkeypatch
) -> None:
    """No folder to copy from: nothing of the working directory may end in the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret")
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="needs its tokenizer; give tokenizer="):
        requant.quantize(model, tiny_recipe("rtn"), tiny_text_file)
    result = requant.quantize(model, tiny_recipe("rtn"), tiny_text_file, tokenizer=tokenizer)
    assert result.model is model
    path = requant.save(result, "out")
    assert not (path / "secret.txt").exists()
    assert torch.equal(logits(requant.load(path)), logits(model))
    assert loading.load_tokenizer(str(path))("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert requant.load_recipe(str(path / "recipe.yaml")).calibration.text == (str(tiny_text_file),)


def test_a_loaded_model_is_saved_as_it_is_in_memory(
    tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    """With more tokens, a block less and a chat template, none of which its folder has."""
    source = str(tiny_folder("llama"))
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = loading.load_tokenizer(source)
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    model.resize_token_embeddings(280)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    result = requant.quantize(model, tiny_recipe("rtn"), tiny_text_file, tokenizer=tokenizer)
    path = requant.save(result, tmp_path / "out")
    assert torch.equal(logits(requant.load(path)), logits(model))
    saved = loading.load_tokenizer(str(path))
    assert saved("<new>")["input_ids"] == tokenizer("<new>")["input_ids"] and len(saved) == len(tokenizer)
    assert saved.chat_template == tokenizer.chat_template
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (path, Path(source)))
    changed = {"vocab_size", "num_hidden_layers"}
    assert {key for key in before if config[key] != before[key]} == changed


def test_a_loaded_model_without_changes_keeps_the_files_of_its_folder(
    tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    source = str(tiny_folder("llama"))
    for model, name in ((source, "named"), (AutoModelForCausalLM.from_pretrained(source), "loaded")):
        requant.save(requant.quantize(model, tiny_recipe("rtn"), tiny_text_file), tmp_path / name)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / "named" / name).read_bytes() == (tmp_path / "loaded" / name).read_bytes()


def test_a_loaded_model_whose_folder_is_gone(
    tiny_model, tokenizer, tiny_text_file: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    model.name_or_path = str(tmp_path / "gone")
    result = requant.quantize(model, tiny_recipe("rtn"), tiny_text_file, tokenizer=tokenizer)
    assert torch.equal(logits(requant.load(requant.save(result, tmp_path / "out"))), logits(model))


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_no_tokenizer_and_no_model_is_refused(tiny_folder) -> None:
    source = str(tiny_folder("llama"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for given, arguments, sentence in (
        (source, {"tokenizer": "gpt2"}, "must be a tokenizer of transformers, not str"),
        (model, {"tokenizer": "gpt2"}, "must be a tokenizer of transformers, not str"),
        (torch.nn.Linear(3, 3), {}, "must be a text or a loaded model, not Linear"),
    ):
        for call in (requant.quantize, requant.score):
            with pytest.raises(ModelError, match=sentence):
                call(given, tiny_recipe("rtn"), **arguments)


def test_what_does_not_go_with_a_model_is_refused(tiny_folder, tokenizer, monkeypatch) -> None:
    source = str(tiny_folder("llama"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    monkeypatch.setattr(
        "requant.pipeline.preparation.recipe_targets.find_linears", lambda *_, **__: pytest.fail("worked")
    )
    for given, arguments, sentence in (
        (source, {"tokenizer": tokenizer}, "tokenizer= goes with a loaded model"),
        (model, {"dtype": "bfloat16"}, "dtype bfloat16 is not that of the loaded model, float32"),
        (model.model, {}, "LlamaModel has no head to predict tokens with"),
    ):
        for call in (requant.quantize, requant.score):
            with pytest.raises(ModelError, match=sentence):
                call(given, tiny_recipe("rtn"), **arguments)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(type(model), "device", torch.device("xpu"))
        with pytest.raises(
            ModelError, match="device cpu is not that of the loaded model, xpu; move the model"
        ):
            requant.quantize(model, tiny_recipe("rtn"), device="cpu")
    for name, count in (("num_experts", 4), ("num_experts_per_tok", 5)):
        setattr(model.config, name, count)
    with pytest.raises(ModelError, match=r"this LlamaForCausalLM cannot run \(num_experts_per_tok is 5"):
        requant.quantize(model, tiny_recipe("rtn"))
    model.config.num_experts_per_tok = 4
    model.model.layers[1].mlp.to("meta")  # as where device_map offloads a part
    with pytest.raises(
        ModelError, match=r"1\.mlp\.gate_proj\.weight of the loaded model is on the device meta"
    ):
        requant.quantize(model, tiny_recipe("rtn"))
