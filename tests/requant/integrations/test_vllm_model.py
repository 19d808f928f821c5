"""A whole model of vLLM from a checkpoint, where vLLM imports (`-m peers`; no GPU needed)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from requant.checkpoint.read import load_weights
from requant.checkpoint.save import save_checkpoint
from requant.models.targets import find_linears


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["codebook-int8", "trellis-int8"])
def test_vllms_llama_by_vllms_loader(make_checkpoint, random_weight, tmp_path: Path, kind: str) -> None:
    """From a folder to a model: config.json names the format, and every quantized layer computes what it should."""
    pytest.importorskip("vllm.model_executor.layers.linear", exc_type=ImportError)
    path, plain = make_checkpoint("llama-tied", kind=kind)
    table = plain.model.embed_tokens.weight.detach()
    if kind == "codebook-int8":  # with a quantized embedding, which the head shares
        quantized = random_weight(*table.shape, kind="asymmetric", bits=6, density=0)
        path = save_checkpoint(
            tmp_path / "with-vocabulary",
            source=tmp_path / "source",
            model=plain,
            weights=load_weights(path),
            manifest={},
            embedding_and_head={"model.embed_tokens": quantized},
        )
        table = quantized.dequantize()
    script = Path(__file__).with_name("vllm_model.py")
    run = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.search(r"worst (\S+) embedding (\S+)", run.stdout)
    assert found is not None and float(found[1]) < 1e-5
    assert float(found[2]) == pytest.approx(table.float().norm().item(), rel=1e-2)
    traced = re.search(r"traced (.*)", run.stdout)
    assert traced is not None and "linear" in traced[1], "vLLM's compiler would fail, too"
    assert "codes with dtype" not in run.stdout + run.stderr, "vLLM warns of parameters of another dtype"


@pytest.mark.peers
def test_two_ranks_of_vllms_llama(random_trellis, random_weight, tmp_path: Path) -> None:
    """Two processes and vLLM's own all-gather: each divided layer computes what the whole matrix does."""
    pytest.importorskip("vllm.model_executor.layers.linear", exc_type=ImportError)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "source")
    weights = {
        target.name: random_trellis(*target.shape, seed=i) for i, target in enumerate(find_linears(model))
    }
    table = {"model.embed_tokens": random_weight(128, 64, kind="asymmetric", bits=6, density=0)}
    path = save_checkpoint(
        tmp_path / "checkpoint",
        source=tmp_path / "source",
        model=model,
        weights=weights,
        manifest={},
        embedding_and_head=table,
    )
    script = Path(__file__).with_name("vllm_model.py")
    command = [sys.executable, str(script), str(path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for run in ranks:
        stdout, stderr = run.communicate(timeout=300)
        found = re.search(r"worst (\S+)", stdout)
        assert run.returncode == 0 and found is not None, stderr[-3000:]
        assert float(found[1]) < 1e-5
