"""The random checkpoints by which vLLM's engine is timed are checkpoints like any other."""

import importlib.util
import json
import math
from pathlib import Path

import torch

import requant

BENCH = Path(__file__).parents[2] / "kernels" / "bench" / "vllm_engine.py"


def test_a_random_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("vllm_engine", BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    bench.write_checkpoint(tmp_path, config, "mul1", 2)
    model = requant.load(tmp_path, dtype="float32")
    assert {"q_proj", "up_proj", "lm_head"} <= {
        name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "spec")
    }
    tokens = torch.tensor([[3, 5, 7]])
    logits = model(tokens).logits
    assert math.isfinite(logits.abs().max().item()) and logits.std() > 0
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules"]
