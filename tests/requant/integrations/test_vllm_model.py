"""A whole model of vLLM from a checkpoint, where vLLM imports (`-m peers`; no GPU needed)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from requant.checkpoint.read import load_weights
from requant.checkpoint.save import save_checkpoint


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
    assert "codes with dtype" not in run.stdout + run.stderr, "vLLM warns of parameters of another dtype"
