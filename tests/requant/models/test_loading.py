"""Sources by name, folder or hub; what is damaged, pickled or quantized is refused in one sentence."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError, ModelError
from requant.models import loading
from requant.models.aliases import ALIASES
from requant.models.loading import (
    DEMO,
    HUB_FILES,
    check_finite,
    context_limit,
    load_config,
    load_model,
    load_tokenizer,
    read_config,
    resolve_source,
)
from requant.models.targets import find_linears


def test_load_model(tiny_folder) -> None:
    model = load_model(str(tiny_folder("llama")), device="cpu", dtype="bfloat16")
    tokenizer = load_tokenizer(str(tiny_folder("llama")))
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer("a")["input_ids"]
    assert context_limit(model.config) == 128
    with pytest.raises(ModelError, match="--dtype int4 is unknown; give auto, float32, bfloat16, float16"):
        load_model(str(tiny_folder("llama")), device="cpu", dtype="int4")


@pytest.fixture
def copy(tiny_folder, tmp_path: Path) -> Path:
    """A model folder to damage."""
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "copy"))


def test_nan_is_found_wherever_it_is(tiny_model) -> None:
    for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        model = tiny_model("llama")
        model.get_parameter(name).view(-1)[3] = float("nan")
        with pytest.raises(ModelError, match=f"{name} holds NaN or infinity; .* download it again"):
            check_finite(model)


@pytest.mark.parametrize("value", [7e4, -7e4])
def test_a_weight_beyond_float16_is_refused(tiny_model, value: float) -> None:
    model = tiny_model("llama")
    model.get_parameter("model.norm.weight")[3] = value
    with pytest.raises(ModelError, match=r"model.norm.weight holds 7e\+04, a weight beyond float16"):
        check_finite(model)


def test_missing_weights_are_not_made_up(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weight files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(copy), device="cpu", dtype="auto")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_codes_are_not_taken_for_floats(copy: Path, dtype: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(
        tensors | {name: tensors[name].to(getattr(torch, dtype))},
        copy / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=rf"layers\.1\.mlp\.up_proj\.weight is stored as {dtype}, codes"):
        load_model(str(copy), device="cpu", dtype="auto")


def test_codes_under_older_names_are_found_and_masks_are_not(tiny_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("gpt2"), tmp_path / "copy"))
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()  # as in GPT-2's own files
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(str(folder), device="cpu", dtype="auto")
    name = "h.1.mlp.c_fc.weight"
    save_file(
        tensors | {name: tensors[name].to(torch.int8)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ModelError, match=r"copy: h\.1\.mlp\.c_fc\.weight is stored as int8, codes without"):
        load_model(str(folder), device="cpu", dtype="auto")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"\x00" * 100),
        ("model.safetensors", None),
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "nobody-knows"}'),
        ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}'),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", None),
    ],
)
def test_damaged_folders_are_one_sentence(copy: Path, file: str, content: bytes | None) -> None:
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(copy))
        load_model(str(copy), device="cpu", dtype="auto")
    assert "\n" not in str(caught.value) and str(copy) in str(caught.value) and len(str(caught.value)) < 500


def set_key(file: Path, key: str, value: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


@pytest.mark.parametrize("depth", [0, -1, 10**8])
def test_no_blocks_and_endless_blocks_are_refused(copy: Path, depth: int) -> None:
    """transformers runs the first two as an embedding and a head, and builds the third block by block."""
    set_key(copy / "config.json", "num_hidden_layers", depth)
    with pytest.raises(ModelError, match=rf"num_hidden_layers in config.json is {depth}, not 1 to 10,000"):
        load_config(str(copy))


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3", "gemma4-moe"])
def test_more_experts_a_token_than_experts_are_refused(tiny_folder, tmp_path: Path, name: str) -> None:
    """Of every name that configurations have for the two numbers."""
    copy = Path(shutil.copytree(tiny_folder(name), tmp_path / "copy"))
    load_config(str(copy))
    key = "num_experts_per_tok"
    if name == "gemma4-moe":
        set_key(copy / "config.json", key, None)
        key = "top_k_experts"
    set_key(copy / "config.json", key, 9)
    with pytest.raises(
        ModelError, match=rf"{key} is 9, and a layer has [48] experts\); correct its config.json"
    ):
        load_config(str(copy))


def test_a_dense_model_whose_configuration_counts_experts_is_loaded(copy: Path) -> None:
    """Jamba with a single expert has no router, and others take over keys of a mixture."""
    for key, value in {"num_experts": 1, "num_experts_per_tok": 2}.items():
        set_key(copy / "config.json", key, value)
    load_config(str(copy))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("is_encoder_decoder", True, "is an encoder-decoder model"),
        ("architectures", ["LlamaForMaskedLM"], "is an encoder, which reads text in both directions"),
        ("architectures", ["LlamaForSequenceClassification"], "has a head for another task"),
    ],
)
def test_what_is_no_causal_model_is_refused(copy: Path, key: str, value: object, what: str) -> None:
    set_key(copy / "config.json", key, value)
    with pytest.raises(ModelError, match=f"{what}.*; requant quantizes decoder-only causal LMs"):
        load_model(str(copy), device="cpu", dtype="auto")


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("auto", "write bfloat16, float16, float32 or float64 there"),
        ("torch.bfloat16", "write bfloat16, "),
        ("int8", "in which no model computes.*; write bfloat16, "),
    ],
)
def test_a_dtype_that_is_no_float_is_refused(copy: Path, dtype: str, remedy: str) -> None:
    set_key(copy / "config.json", "dtype", dtype)
    with pytest.raises(ModelError, match=f"dtype in config.json is {dtype}.*{remedy}"):
        load_model(str(copy), device="cpu", dtype="auto")


def test_other_shapes_are_named(copy: Path) -> None:
    """transformers refers to a report that is not shown, and to an argument that makes weights up."""
    width = json.loads((copy / "config.json").read_text())["intermediate_size"]
    set_key(copy / "config.json", "intermediate_size", width + 32)
    with pytest.raises(ModelError) as caught:
        load_model(str(copy), device="cpu", dtype="auto")
    found = re.search(
        r"([\w.]+) is \[(.*?)\] in model.safetensors, but \[(.*?)\] by config.json", str(caught.value)
    )
    assert found is not None and found[1].startswith("model.layers.0.mlp.")
    assert str(width) in found[2].split(", ") and str(width + 32) in found[3].split(", ")
    assert "ignore_mismatched" not in str(caught.value)


def test_weights_that_the_model_has_no_place_for_are_said(copy: Path, caplog) -> None:
    config = json.loads((copy / "config.json").read_text())
    set_key(copy / "config.json", "num_hidden_layers", config["num_hidden_layers"] - 1)
    load_model(str(copy), device="cpu", dtype="auto")
    assert re.search(r"hold \d+ tensors that the model of its config.json does not have", caplog.text)


def test_tuples_that_a_config_asks_for_are_not_made(copy: Path) -> None:
    set_key(copy / "config.json", "return_dict", False)
    model = load_model(str(copy), device="cpu", dtype="auto")
    assert model(torch.ones(1, 2, dtype=torch.int64)).logits.shape[:2] == (1, 2)


@pytest.mark.parametrize("ends", ["x", [[1]], 1.5, {}])
def test_ends_that_are_no_tokens_are_refused(copy: Path, ends: object) -> None:
    set_key(copy / "generation_config.json", "eos_token_id", [0, 1])
    assert resolve_source(str(copy)) == str(copy)
    set_key(copy / "generation_config.json", "eos_token_id", ends)
    with pytest.raises(ModelError, match=r"eos_token_id is .*, neither a token nor a list of tokens"):
        resolve_source(str(copy))


def test_a_config_of_thousands_of_levels_is_one_sentence(copy: Path) -> None:
    (copy / "config.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(copy))


def test_a_damaged_config_is_not_blamed_on_the_tokenizer(copy: Path) -> None:
    """Which reads config.json as well, first of all."""
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(ModelError, match=r"hidden_size.*; give a model that transformers knows"):
        load_tokenizer(str(copy))
    (copy / "config.json").write_text(config)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="; give a folder with its tokenizer files"):
        load_tokenizer(str(copy))


def test_pickled_weights_are_not_opened(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load_model(str(copy), device="cpu", dtype="auto")


def test_a_quantized_source_is_refused(copy: Path) -> None:
    config = read_config(copy) | {
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}
    }
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantized already \(quant_method gptq\); give the original model"):
        load_model(str(copy), device="cpu", dtype="auto")


def test_sources(tmp_path: Path, tiny_folder) -> None:
    assert resolve_source("demo") == str(DEMO)
    assert resolve_source(str(tiny_folder("llama"))) == str(tiny_folder("llama"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_source(str(tmp_path))
    with pytest.raises(ModelError, match=r"is not a folder; check the path"):
        resolve_source(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"'lama-3.2-1b' is neither .* \(did you mean 'llama-3.2-1b'\?"):
        resolve_source("lama-3.2-1b")
    with pytest.raises(ModelError, match=r"did you mean 'demo'"):
        resolve_source("demo1")
    with pytest.raises(ModelError):
        resolve_source("x" * 5000)


def test_a_file_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("asked"))
    (tmp_path / "owner").mkdir()
    for name in ("notes.txt", "owner/model.safetensors"):
        Path(name).write_text("")
        with pytest.raises(
            ModelError, match=f"^{name} is not a folder but a file; give the folder of a Hugging"
        ):
            resolve_source(name)


def test_a_folder_of_models_names_them(tmp_path: Path) -> None:
    """As that of a sweep, whose checkpoints lie in it."""
    for name in ("4bit", "3bit"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no config\.json, but 3bit, 4bit in it do; give the folder"):
        resolve_source(str(tmp_path))
    with pytest.raises(
        CheckpointError, match="holds no checkpoint, but 3bit, 4bit in it do; give the folder"
    ):
        read_header(tmp_path)


def test_hub_models_come_as_a_folder(tiny_folder, monkeypatch) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tiny_folder("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("llama-3.2-1b") == str(tiny_folder("llama"))
    model = load_model("someone/model", device="cpu", dtype="auto")
    assert asked == [(ALIASES["llama-3.2-1b"], list(HUB_FILES)), ("someone/model", list(HUB_FILES))]
    assert find_linears(model)


def test_what_is_fetched_from_the_hub() -> None:
    """Weights once, in safetensors; configuration, tokenizer, chat template, model card; no pickle, no code."""
    from fnmatch import fnmatch

    def wanted(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in HUB_FILES)

    fetched = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json",
               "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.txt",
               "merges.txt", "special_tokens_map.json", "chat_template.jinja", "vocab.json", "README.md"]  # fmt: skip
    left = ["pytorch_model.bin", "consolidated.safetensors", "consolidated.00.pth", "modeling_x.py",
            "original/params.pt", "model.gguf", "flax_model.msgpack", "tf_model.h5"]  # fmt: skip
    assert [name for name in fetched if not wanted(name)] == []
    assert [name for name in left if wanted(name)] == []


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch) -> None:
    def download(name: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError("cannot reach the server\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        ModelError, match=r"^meta-llama/Llama-3.2-1B did not come from the hub \(cannot reach the server\)"
    ) as e:
        resolve_source("llama-3.2-1b")
    assert "\n" not in str(e.value)


def test_a_quantization_config_that_is_no_mapping_is_named(tiny_folder, tmp_path: Path) -> None:
    """transformers says that an int has no to_dict."""
    copy = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": 2}))
    for load in (loading.load_config, load_tokenizer):
        with pytest.raises(ModelError, match="quantization_config in"):
            load(str(copy))


def test_a_truncated_weight_file_is_named(copy: Path) -> None:
    """safetensors says "incomplete metadata, file not fully covered"."""
    file = copy / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(
        ModelError, match=r"copy/model\.safetensors has .* truncated or damaged, download it again"
    ):
        load_model(str(copy), device="cpu", dtype="auto")
