import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import requant
from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError, ModelError
from requant.inference.load import load
from requant.inference.quant_linear import QuantLinear
from requant.integrations import register_integrations

MODELS = ("llama", "llama-tied", "qwen2", "gpt2")
IDS = torch.arange(48)[None] % 96


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS).logits


def layers(model: nn.Module) -> int:
    return sum(isinstance(module, QuantLinear) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_logits_are_those_of_the_dequantized_weights(make_checkpoint, name: str, dtype: torch.dtype) -> None:
    path, plain = make_checkpoint(name, dtype=dtype)
    expected = logits(plain)
    for model in (load(path), load(path, dequantize=True), AutoModelForCausalLM.from_pretrained(path)):
        assert model.dtype == dtype and not model.training
        assert torch.equal(logits(model), expected)
    assert layers(load(path)) == len(read_header(path).modules)
    assert layers(load(path, dequantize=True)) == 0


@pytest.mark.parametrize("kind", ["symmetric", "awq", "codebook-int8", "trellis-int8"])
def test_every_container(make_checkpoint, kind: str) -> None:
    path, plain = make_checkpoint("llama", kind=kind)
    assert torch.equal(logits(load(path)), logits(plain))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard", [pytest.param("1GB", marks=pytest.mark.slow), "40KB"])
def test_save_pretrained_round_trip(make_checkpoint, tmp_path: Path, name: str, shard: str) -> None:
    path, plain = make_checkpoint(name, dtype=torch.bfloat16)
    load(path).save_pretrained(tmp_path / "again", max_shard_size=shard)
    before, after = read_header(path), read_header(tmp_path / "again")
    assert after.quantization == before.quantization and after.modules == before.modules
    assert {k: (t.dtype, t.shape) for k, t in after.tensors.items()} == {
        k: (t.dtype, t.shape) for k, t in before.tensors.items()
    }
    assert (len(after.files) > 1) == (shard == "40KB")
    again = load(tmp_path / "again")
    assert torch.equal(logits(again), logits(plain)) and again.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_a_state_dict_is_saved_by_torch(make_checkpoint, tmp_path: Path, name: str) -> None:
    folder, _ = make_checkpoint(name)
    state = load(folder).state_dict()
    torch.save(state, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_a_dequantized_model_is_saved_as_a_plain_one(make_checkpoint, tmp_path: Path, name: str) -> None:
    path, plain = make_checkpoint(name)
    load(path, dequantize=True).save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(logits(dense), logits(plain))
    for key, value in plain.state_dict().items():
        assert torch.equal(dense.state_dict()[key], value), key


def test_a_saved_model_can_be_dequantized(make_checkpoint, tmp_path: Path) -> None:
    path, plain = make_checkpoint("llama")
    model = load(path)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(model.dequantize()), logits(plain)) and layers(model) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama")
    with pytest.raises(requant.errors.InputError, match="torch sees 0 GPUs here"):
        load(path, device="cuda")
    assert load(path, device="auto").device.type == "cpu"


def test_another_dtype_changes_activations_not_weights(make_checkpoint) -> None:
    path, plain = make_checkpoint("llama", dtype=torch.float32)
    assert torch.equal(logits(load(path).to(torch.bfloat16)), logits(plain.to(torch.bfloat16)))
    model, dense = load(path, dtype="bfloat16"), load(path, dtype="bfloat16", dequantize=True)
    assert model.dtype == dense.dtype == torch.bfloat16 and torch.equal(logits(model), logits(dense))
    with pytest.raises(requant.errors.InputError, match="dtype 'int4' is unknown; give auto, float32"):
        load(path, dtype="int4")
    for dtype in (
        torch.int8,
        torch.float8_e4m3fn,
        "float8_e4m3fn",
    ):  # no damage, as transformers' own error would be
        with pytest.raises(
            requant.errors.InputError, match=f"dtype {dtype!r} is unknown; give auto, float32"
        ):
            load(path, dtype=dtype)


def test_tied_heads_stay_tied(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama-tied")
    model = load(path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_device_map(make_checkpoint) -> None:
    pytest.importorskip("accelerate")
    path, plain = make_checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(path, device_map={"": "cpu"})
    assert torch.equal(logits(model), logits(plain))


def test_tensors_keep_the_names_of_the_source(make_checkpoint, tmp_path: Path) -> None:
    path, plain = make_checkpoint("gpt-neox", dtype=torch.bfloat16)
    source = load_file(tmp_path / "source" / "model.safetensors")
    stored = read_header(path).tensors
    assert {name for name in source if "layers" not in name} == {n for n in stored if "layers" not in n}
    kept = [stored[name] for name in source if name in stored and stored[name].bytes]
    assert kept and all(tensor.dtype == torch.bfloat16 for tensor in kept)
    assert torch.equal(logits(load(path)), logits(plain))


def test_generate(make_checkpoint) -> None:
    path, plain = make_checkpoint("llama")
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(load(path).generate(IDS[:, :4], **arguments), plain.generate(IDS[:, :4], **arguments))


def test_gradients_flow_through_a_frozen_model(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama")
    model = load(path)
    assert model.hf_quantizer.is_trainable
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=x).logits.sum().backward()
    assert x.grad.abs().sum() > 0


def test_from_pretrained_refuses_what_load_refuses(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["format_version"] = 8
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="newer than the 7"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_a_class_without_the_head_is_no_damaged_checkpoint(checkpoint: Path, auto: Any) -> None:
    with pytest.raises(
        ModelError, match="has no head to predict tokens with; load it by AutoModelForCausalLM"
    ):
        auto.from_pretrained(checkpoint)


def test_a_missing_tensor_never_becomes_random_numbers(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2.* is missing"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_requant_does_not_quantize_on_the_fly(make_checkpoint, tmp_path: Path) -> None:
    from requant.integrations.transformers import RequantConfig

    path, _ = make_checkpoint("llama")
    config = RequantConfig(**AutoConfig.from_pretrained(path).quantization_config)
    with pytest.raises(ValueError, match="does require the model to be pre-quantized"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config)


def test_registration_is_idempotent() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    for _ in range(3):
        register_integrations()
    assert AUTO_QUANTIZER_MAPPING["requant"].__name__ == "RequantHfQuantizer"


def test_import_is_light() -> None:
    """Neither torch nor transformers."""
    program = "import sys, requant\nassert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow  # test_round_trips.py has one order, test_serve_command.py the other
@pytest.mark.parametrize("order", [("requant", "transformers"), ("transformers", "requant")])
def test_import_order_does_not_matter(order: tuple[str, str]) -> None:
    program = (
        f"import {order[0]}, sys\n"
        f"import {order[1]}\n"
        "import transformers.modeling_utils\n"  # imports the registry while it is itself half imported
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m\n"
        "assert 'requant' in m\n"
        "assert not any(type(f).__name__ == '_Finder' and 'auto' in f.theirs for f in sys.meta_path)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
