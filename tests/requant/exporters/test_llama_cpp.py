"""llama.cpp itself opens our files, cuts text as our tokenizers do, and agrees on the likeliest next tokens.

It multiplies with inputs rounded to 8 bits, so log-probabilities agree to about 0.1, not to the last bit. Another rotary
embedding, row order or tokenization moves them by whole units.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from requant.calibration.stats import LinearStats
from requant.checkpoint.save import save_checkpoint
from requant.exporters.export import export
from requant.formats.quantized_weight import QuantizedWeight
from requant.inference.load import load
from requant.models.loading import DEMO, load_tokenizer
from requant.models.targets import find_linears
from requant.quantizers.rtn import RtnConfig, quantize

from .conftest import LLAMA3_ROPE, sentencepiece

pytestmark = pytest.mark.peers
PROMPT = (
    "The history of the city of London began when the Romans settled on the river, and for a long time it's"
)
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def checkpoint_of(model: Any, tokenizer: Any, folder: Path, *, bits: int, symmetric: bool) -> Path:
    model.save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    config = RtnConfig(bits=bits, symmetric=symmetric, group_size=32)
    weights: dict[str, QuantizedWeight] = {
        target.name: quantize(target.weight(), LinearStats(), config) for target in find_linears(model)
    }
    return save_checkpoint(
        folder / "checkpoint", source=folder / "source", model=model, weights=weights, manifest={}
    )


def random_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(kind, **(sizes | changes))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def check(checkpoint: Path, folder: Path) -> None:
    """The five tokens that llama.cpp finds likeliest, with our log-probabilities."""
    llama_cpp = pytest.importorskip("xllamacpp")
    export(checkpoint, "gguf", folder / "out", dtype="float32")
    parameters = llama_cpp.CommonParams()
    parameters.model.path = str(folder / "out" / "model.gguf")
    parameters.n_ctx, parameters.cpuparams.n_threads, parameters.warmup = 256, 1, False
    server = llama_cpp.Server(parameters)
    answer = server.handle_completions({"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 5})
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    theirs = {t["id"]: t["logprob"] for t in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    model = load(checkpoint, dtype=torch.float32, dequantize=True)
    tokens = load_tokenizer(str(checkpoint))(PROMPT, return_tensors="pt").input_ids
    ours = model(tokens).logits[0, -1].log_softmax(-1)
    assert len(theirs) == 5 and answer["usage"]["prompt_tokens"] == tokens.shape[1]
    for token, value in theirs.items():
        assert ours[token].item() == pytest.approx(value, abs=0.2)


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE, LINEAR], ids=["default", "llama3", "linear"])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_the_demo_model(tmp_path: Path, rope: dict[str, Any] | None, bits: int, symmetric: bool) -> None:
    config = AutoConfig.from_pretrained(DEMO, **({} if rope is None else {"rope_parameters": rope}))
    model = AutoModelForCausalLM.from_pretrained(DEMO, config=config, dtype=torch.float32).requires_grad_(
        False
    )
    tokenizer = load_tokenizer(str(DEMO))
    check(checkpoint_of(model, tokenizer, tmp_path, bits=bits, symmetric=symmetric), tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_architectures(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    check(checkpoint_of(random_model(kind), tokenizer, tmp_path, bits=8, symmetric=True), tmp_path)


def test_sentencepiece(tmp_path: Path, tiny_text: Any) -> None:
    tokenizer = sentencepiece(tiny_text.text, size=2000)
    model = random_model("llama", bos_token_id=1, eos_token_id=2)
    check(checkpoint_of(model, tokenizer, tmp_path, bits=8, symmetric=True), tmp_path)
