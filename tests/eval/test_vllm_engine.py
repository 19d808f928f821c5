"""vLLM's engine is timed by random checkpoints, which are checkpoints like any other, a process a row."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import requant
from eval import vllm_engine
from eval.end_to_end import WIDTHS
from requant.formats.quantized_weight import join_rows


def test_a_random_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    vllm_engine.write_checkpoint(tmp_path, config, "mul1", 2.5)
    model = requant.load(tmp_path, dtype="float32")
    assert {"q_proj", "up_proj", "lm_head"} <= {
        name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "spec")
    }
    tokens = torch.tensor([[3, 5, 7]])
    logits = model(tokens).logits
    assert math.isfinite(logits.abs().max().item()) and logits.std() > 0
    attention = model.model.layers[0].self_attn
    weights = [layer.quantized() for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert join_rows(weights) is not None, (
        "they would not be one matrix on the kernels, as those of a recipe are"
    )


def test_a_random_checkpoint_has_the_default_format(tmp_path: Path) -> None:
    config = {
        "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    vllm_engine.write_checkpoint(tmp_path, config, "pair", 2)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    widths = [entry["modules"][f"model.layers.{layer}.self_attn.q_proj"]["bits"] for layer in range(3)]
    assert widths == list(WIDTHS[2]["q_proj"])
    for table in entry["vocabulary"].values():
        parts = table["parts"]
        assert sum(part["shape"][0] for part in parts) == 8192 and {part["code"] for part in parts} == {
            "mul1"
        }
        assert len({part["bits"] for part in parts}) > 1


def test_every_row_is_a_process_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["eval", "--out", str(out), "--batch", "2"])
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        if "mul1:2" in command:
            Path(command[-1]).write_text('[{"name": "mul1:2", "batch": 2}]')
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(vllm_engine.subprocess, "run", run)
    monkeypatch.setattr(vllm_engine, "environment", lambda device: {"device": device.type})
    vllm_engine.main(out, formats=["mul1:2"], checkpoints=["folder"], batch=[2])
    assert json.loads(out.read_text())["rows"] == [
        {"name": "=folder", "failed": 7},
        {"name": "mul1:2", "batch": 2},
    ]
    assert [command[1:-3] for command in commands] == [
        ["-m", "eval.vllm_engine", "--out", str(out), "--batch", "2", "--row"]
    ] * 2
    commands.clear()
    vllm_engine.main(out)
    assert [command[-3] for command in commands] == ["bf16", "gptq:4", "awq:4", "mul1:2", "mul1:3", "mul1:4"]
