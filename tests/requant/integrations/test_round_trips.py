"""Every quantizer's checkpoint through transformers: loaded, saved again in shards, placed, prompted, adapted."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import requant
from requant.checkpoint.validate import read_header
from requant.errors import CheckpointError, RequantError
from requant.inference.quant_linear import QuantLinear
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Detach, Evaluation, Recipe

from ..brief_settings import brief_settings

IDS = torch.arange(40)[None] % 256
RECIPE = Recipe(
    calibration=Calibration(num_samples=2, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
    detach=Detach(outlier_fraction=0.01, significant_fraction=0.01, temperatures=(1.0,), steps=1),
)


@pytest.fixture(scope="module")
def saved(tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory):
    """`saved(method, name)`: the checkpoint of a real run, made once; not to be changed."""
    made: dict[tuple[str, str], Path] = {}

    def checkpoint(method: str, name: str) -> Path:
        if (method, name) not in made:
            recipe = dataclasses.replace(RECIPE, method=method, quantizer=brief_settings(method, bits=3))
            if method == "trellis":
                recipe = dataclasses.replace(recipe, mode="dense")
            result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file, quiet=True)
            made[method, name] = tmp_path_factory.mktemp(method) / name
            requant.save(result, made[method, name])
        return made[method, name]

    return checkpoint


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS.to(model.device)).logits


@pytest.mark.parametrize(
    ("method", "name"),
    # whose containers differ; test_every_container has random ones of all methods
    [
        pytest.param(
            method,
            name,
            marks=[pytest.mark.slow] * ((method, name) not in (("rtn", "llama"), ("kmeans", "llama-tied"))),
        )
        for method in METHODS
        for name in ("llama", "llama-tied")
    ],
)
def test_every_quantizer_survives_two_trips(saved, tmp_path: Path, method: str, name: str) -> None:
    path = saved(method, name)
    first = AutoModelForCausalLM.from_pretrained(path, device_map="auto")
    expected = logits(requant.load(path, dequantize=True, device=first.device))
    assert torch.equal(logits(first), expected)
    first.save_pretrained(tmp_path / "again", max_shard_size="60KB")
    before, after = read_header(path), read_header(tmp_path / "again")
    assert len(after.files) > 1 and after.modules == before.modules
    assert {n: (t.dtype, t.shape) for n, t in after.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in before.tensors.items()
    }
    assert ("lm_head.weight" in after.tensors) == (name == "llama")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype == first.dtype and torch.equal(logits(again), expected.cpu())


def test_generate_with_and_without_a_cache(saved) -> None:
    path = saved("kmeans", "llama-tied")
    model, plain = AutoModelForCausalLM.from_pretrained(path), requant.load(path, dequantize=True)
    for use_cache in (True, False):
        arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
        assert torch.equal(model.generate(IDS[:, :4], **arguments), plain.generate(IDS[:, :4], **arguments))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # PEFT asks for it, transformers renamed it
def test_adapters_train_over_frozen_codes(saved, tmp_path: Path) -> None:
    """PEFT adapts quantized layers; steps move the adapters and nothing else, and they save alone."""
    peft = pytest.importorskip("peft")
    path = saved("kmeans", "llama")
    base = AutoModelForCausalLM.from_pretrained(path)
    codes = {name: buffer.clone() for name, buffer in base.named_buffers()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    assert isinstance(model.base_model.model.model.layers[0].mlp.down_proj.base_layer, QuantLinear)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all("lora" in name for name in trained)
    start = model(IDS, labels=IDS).loss.item()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    loss = model(IDS, labels=IDS).loss.item()
    assert loss < start
    now = {name.replace(".base_layer", ""): buffer for name, buffer in base.named_buffers()}
    assert all(torch.equal(now[name], buffer) for name, buffer in codes.items())
    model.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter")
    assert again(IDS, labels=IDS).loss.item() == pytest.approx(loss, abs=1e-5)
    floats = AutoModelForCausalLM.from_pretrained(path).dequantize()
    merged = peft.PeftModel.from_pretrained(floats, tmp_path / "adapter").merge_and_unload()
    assert merged(IDS, labels=IDS).loss.item() == pytest.approx(loss, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_what_adapters_of_quantized_layers_cannot(saved) -> None:
    peft = pytest.importorskip("peft")
    options = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    base = AutoModelForCausalLM.from_pretrained(saved("kmeans", "llama"))
    expected = logits(base)
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RequantError, match="cannot be merged into quantized layers"):
            merge()
    assert torch.equal(logits(model.unload()), expected)
    for option in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        base = AutoModelForCausalLM.from_pretrained(saved("kmeans", "llama"))
        with pytest.raises(RequantError, match=f"{next(iter(option))}.* needs the weights as floats"):
            peft.get_peft_model(base, peft.LoraConfig(**options, **option))


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "requant.integrations.transformers", "requant.integrations.peft", "peft, requant", "requant, peft",
        "transformers.quantizers, requant",
    ],
)  # fmt: skip
def test_any_order_of_imports_registers(imports: str) -> None:
    program = (
        f"import {imports}\nimport peft, transformers.quantizers.auto as auto\n"
        "from requant.inference.quant_linear import QuantLinear\n"
        "assert 'requant' in auto.AUTO_QUANTIZER_MAPPING\n"
        "assert QuantLinear in peft.LoraConfig()._custom_modules\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow  # imports of seven seconds
def test_without_requant_transformers_stops(saved) -> None:
    """An empty `weight` beside the codes: stock transformers finds a wrong shape where it would invent numbers. Then requant
    may come, though transformers came first."""
    program = (
        "import sys\nfrom transformers import AutoModelForCausalLM\n"
        "assert 'requant' not in sys.modules\n"
        "try:\n"
        f"    AutoModelForCausalLM.from_pretrained({str(saved('kmeans', 'llama'))!r})\n"
        "    print('loaded')\n"
        "finally:\n"
        "    import requant\n"
        "    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "    print('requant' in AUTO_QUANTIZER_MAPPING)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode != 0 and run.stdout == "True\n"
    assert "RuntimeError" in run.stderr and "ignore_mismatched_sizes" in run.stderr
    assert "Unknown quantization type, got requant" in run.stderr


def test_a_checkpoint_without_the_stop_still_loads(saved, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = saved("kmeans", "llama")
    config = path / "config.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    tensors = load_file(path / "model.safetensors")
    modules = read_header(path).modules
    kept = {name: t for name, t in tensors.items() if name.removesuffix(".weight") not in modules}
    assert len(kept) == len(tensors) - len(modules)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(requant.load(tmp_path)), logits(requant.load(path)))


def test_load_says_what_it_loaded(saved, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved("kmeans", "llama")
    with caplog.at_level(logging.INFO, "requant"):
        model = requant.load(path)
    layers = sum(isinstance(module, QuantLinear) for module in model.modules())
    (line,) = [r.getMessage() for r in caplog.records if r.name == "requant.inference.load"]
    assert line.startswith(f"loaded {layers} quantized matrices from {path}, sha256 ")
    assert line.endswith(" as saved")

    checksums = json.loads((path / "checksums.json").read_text())
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checksums["files"]["model.safetensors"] = "0" * 64
    (tmp_path / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(CheckpointError, match="was changed, download it again"):
        requant.load(tmp_path)
    (tmp_path / "checksums.json").unlink()
    with caplog.at_level(logging.INFO, "requant"):
        requant.load(tmp_path)
    assert caplog.records[-1].getMessage().endswith("without checksums.json")
