import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import requant
from requant.errors import ModelError, NumericalError
from requant.models import loading
from requant.models.loading import (
    ALIASES,
    DEMO,
    HUB_FILES,
    check_finite,
    context_limit,
    load_model,
    load_tokenizer,
    read_config,
    resolve_source,
)
from requant.models.targets import find_blocks, find_linears
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Detach, Evaluation, Recipe

LLAMA_KINDS = {
    "q_proj": (64, 64),
    "k_proj": (32, 64),
    "v_proj": (32, 64),
    "o_proj": (64, 64),
    "gate_proj": (172, 64),
    "up_proj": (172, 64),
    "down_proj": (64, 172),
}
KINDS = {
    "llama-520": LLAMA_KINDS | {"gate_proj": (520, 64), "up_proj": (520, 64), "down_proj": (64, 520)},
    "llama-1216": LLAMA_KINDS | {"gate_proj": (1216, 64), "up_proj": (1216, 64), "down_proj": (64, 1216)},
    "phi3": {"qkv_proj": (128, 64), "o_proj": (64, 64), "gate_up_proj": (344, 64), "down_proj": (64, 172)},
    "opt": {kind: (64, 64) for kind in ("q_proj", "k_proj", "v_proj", "out_proj")}
    | {"fc1": (172, 64), "fc2": (64, 172)},
    "gpt-neox": {
        "query_key_value": (192, 64),
        "dense": (64, 64),
        "dense_h_to_4h": (172, 64),
        "dense_4h_to_h": (64, 172),
    },
}
SLOW = {"trellis": pytest.mark.slow}  # 2**16 states a step
IDS = torch.arange(40)[None] * 7 % 256


def tiny_recipe(method: str = "kmeans", **changes) -> Recipe:
    """Two windows of 32 tokens, every stage once."""
    settings = {
        "mode": "paper",
        "method": method,
        "quantizer": METHODS[method].config(bits=3),
        "calibration": Calibration(num_samples=2, seq_len=32),
        "evaluation": Evaluation(context=32, windows=2, samples=0),
        "detach": Detach(outlier_fraction=0.01, outlier_rule="uniform", significant_fraction=0.01, steps=1),
    }
    return Recipe(**(settings | changes))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_linears_of(tiny_model, architecture: str) -> None:
    model = tiny_model(architecture)
    targets = find_linears(model)
    blocks = model.config.num_hidden_layers
    if architecture == "gpt2":  # two projections of one name
        assert [target.name.removeprefix("transformer.h.0.") for target in targets[:4]] == [
            "attn.c_attn",
            "attn.c_proj",
            "mlp.c_fc",
            "mlp.c_proj",
        ]
        assert [target.shape for target in targets[:4]] == [(192, 64), (64, 64), (172, 64), (64, 172)]
        assert all(target.transposed and isinstance(target.module, Conv1D) for target in targets)
    else:
        kinds = KINDS.get(architecture, LLAMA_KINDS)
        assert len(targets) == blocks * len(kinds)
        assert all(target.shape == kinds[target.kind] and not target.transposed for target in targets)
    for target in targets:
        assert model.get_submodule(target.name) is target.module
        assert (
            target.size == target.shape[0] * target.shape[1] and tuple(target.weight().shape) == target.shape
        )
    assert [target.block for target in targets] == sorted(target.block for target in targets)
    assert {target.block for target in targets} == set(range(blocks))
    assert len({target.name for target in targets}) == len(targets)


def test_the_body_is_covered_and_the_rest_left(tiny_model, architecture: str) -> None:
    """What is no target is an embedding, a head, a norm or a bias."""
    model = tiny_model(architecture)
    names = {f"{target.name}.weight" for target in find_linears(model)}
    for name, parameter in model.named_parameters():
        if name not in names and parameter.dim() > 1:
            assert any(part in name for part in ("embed", "wte", "wpe", "lm_head")), name


def test_set_weight_is_seen_by_the_forward_pass(tiny_model, architecture: str) -> None:
    model = tiny_model(architecture)
    target = find_linears(model)[0]
    x = torch.randn(3, target.shape[1])
    weight = torch.randn(target.shape)
    target.set_weight(weight)
    assert torch.equal(target.weight(), weight)
    bias = getattr(target.module, "bias", None)
    assert torch.allclose(target.module(x), x @ weight.T + (0 if bias is None else bias), atol=1e-5)


@pytest.mark.parametrize("pattern", ["down_proj", "*.mlp.down_proj", "model.layers.0.*"])
def test_skip(tiny_model, pattern: str) -> None:
    model = tiny_model("llama")
    kept = {target.name for target in find_linears(model, skip=[pattern])}
    gone = {target.name for target in find_linears(model)} - kept
    expected = 7 if "layers.0" in pattern else 2
    assert len(gone) == expected and all("layers.0." in name or "down_proj" in name for name in gone)


def test_skip_that_matches_nothing_or_everything_is_refused(tiny_model) -> None:
    with pytest.raises(
        ModelError, match=r"--skip donw_proj matches no matrix; names look like model\.layers\.0"
    ):
        find_linears(tiny_model("llama"), skip=["donw_proj"])
    with pytest.raises(ModelError, match="every matrix is skipped"):
        find_linears(tiny_model("llama"), skip=["*"])


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="Sequential has no list of transformer blocks"):
        find_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4)))


def test_quantize_save_load(tiny_folder, tiny_text_file: Path, tmp_path: Path, architecture: str) -> None:
    """The checkpoint computes what the run computed, bit for bit, with codes and with floats."""
    source = tiny_folder(architecture)
    result = requant.quantize(str(source), tiny_recipe(), tiny_text_file)
    path = requant.save(result, tmp_path / "out")
    expected = logits(result.model)
    original = load_model(str(source), device="cpu", dtype="auto")
    assert not torch.equal(logits(original), expected)
    for dequantize in (False, True):
        model = requant.load(path, dequantize=dequantize)
        assert torch.equal(logits(model), expected)
        for name, parameter in original.named_parameters():
            if parameter.dim() == 1:  # biases and norms
                assert torch.equal(model.get_parameter(name), parameter), name
    head = model.get_output_embeddings().weight
    tied = head.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == (result.model.get_output_embeddings().weight is result.model.get_input_embeddings().weight)
    assert result.after.mean_kl is not None and 0 < result.after.mean_kl < 1
    assert any(weight.sparse is not None for weight in result.weights.values())


@pytest.mark.parametrize("method", [pytest.param(m, marks=SLOW.get(m, ())) for m in METHODS if m != "kmeans"])
@pytest.mark.parametrize("name", [pytest.param("llama-520", marks=pytest.mark.slow), "llama-1216", "gpt2"])
def test_every_method_on_odd_widths(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str, name: str
) -> None:
    recipe = tiny_recipe(method, mode="dense")
    result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file)
    model = requant.load(requant.save(result, tmp_path / "out"))
    assert torch.equal(logits(model), logits(result.model))


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


def test_what_does_not_go_with_a_model_is_refused(tiny_folder, tokenizer, monkeypatch) -> None:
    source = str(tiny_folder("llama"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    monkeypatch.setattr("requant.pipeline.targets.find_linears", lambda *_, **__: pytest.fail("worked"))
    for given, arguments, sentence in (
        (source, {"tokenizer": tokenizer}, "tokenizer= goes with a loaded model"),
        (source, {"tokenizer": "gpt2"}, "must be a tokenizer of transformers, not str"),
        (model, {"tokenizer": "gpt2"}, "must be a tokenizer of transformers, not str"),
        (model, {"dtype": "bfloat16"}, "dtype bfloat16 is not that of the loaded model, float32"),
        (model.model, {}, "LlamaModel has no head to predict tokens with"),
        (torch.nn.Linear(3, 3), {}, "must be a text or a loaded model, not Linear"),
    ):
        for call in (requant.quantize, requant.score):
            with pytest.raises(ModelError, match=sentence):
                call(given, tiny_recipe("rtn"), **arguments)
    with pytest.raises(ModelError, match="device cpu is not that of the loaded model, meta; move the model"):
        requant.quantize(model.to("meta"), tiny_recipe("rtn"), device="cpu")


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
        with pytest.raises(NumericalError, match=f"{name} holds NaN or infinity; .* download it again"):
            check_finite(model)


def test_missing_weights_are_not_made_up(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weight files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(copy), device="cpu", dtype="auto")


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
    with pytest.raises(ModelError, match=r"is no folder; check the path"):
        resolve_source(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"'lama-3.2-1b' is neither .* \(did you mean 'llama-3.2-1b'\?"):
        resolve_source("lama-3.2-1b")
    with pytest.raises(ModelError, match=r"did you mean 'demo'"):
        resolve_source("demo1")
    with pytest.raises(ModelError):
        resolve_source("x" * 5000)


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
