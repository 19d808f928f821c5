"""Run under TRITON_INTERPRET=1 by `test_fused_step.py`: a fused step of tiny models, and of a checkpoint on the
kernels, gives the logits of transformers' step, and fused prompts those of transformers' forward."""

import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

import interpreter_fixes  # noqa: F401
import torch
from requant_kernels.step import rope_cache
from transformers import AutoConfig, AutoModelForCausalLM

from requant.inference import fused_prefill
from requant.inference.convert import convert_to_kernels
from requant.inference.decode import Decoder
from requant.inference.fused_prefill import FusedPrefill, kind_of
from requant.inference.fused_step import fused_steps
from requant.inference.load import load
from requant.inference.static_cache import static_cache
from requant.models.experts import Experts, unfuse_experts
from requant.text.kv_cache import with_cache

SIZES = {
    "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 264, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": {"hidden_act": "gelu_pytorch_tanh"}, "qwen3": {"rope_parameters": YARN},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip


@torch.no_grad()
def main() -> None:
    checkpoint_folder, *kinds = sys.argv[1:]
    for kind in kinds:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
        model = AutoModelForCausalLM.from_config(config).half().eval()
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
        unfuse_experts(model)
        for layer in model.modules():
            if isinstance(layer, Experts):  # by a step and a prefill as on a GPU
                layer.step = layer.prefill = copy.deepcopy(layer).forward
        check_step(model, kind)
        check_prompts(model, kind)
    check_decoder(model)
    checkpoint = convert_to_kernels(load(checkpoint_folder, dtype="float16"), device="cpu")
    check_step(checkpoint, "checkpoint")
    check_prompts(checkpoint, "checkpoint")


@torch.no_grad()
def check_step(model: Any, kind: str) -> None:
    """Logits, and what is written into the cache."""
    (step,), cache = fused_steps(model, 2, 100), static_cache(model, 100)
    assert cache is not None, kind
    model(torch.randint(0, 60, (2, 70)), **with_cache(model, cache))
    cache.add(70)
    tokens = torch.randint(0, 60, (2, 1))
    logits = step(tokens, cache)
    keys = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    wanted = model(tokens, **with_cache(model, cache)).logits[:, -1]
    error = ((logits.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error < 3e-3, f"{kind}: logits are off by {error:.1e}"
    for (key, value), layer in zip(keys, cache.layers, strict=True):
        assert (key - layer.keys).abs().max() < 1e-2, f"{kind}: keys"
        assert (value - layer.values).abs().max() < 1e-2, f"{kind}: values"
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache.length.fill_(100)  # full: a row more would lie in the next head, or behind the tensor
    step(tokens, cache)
    for (key, value), layer in zip(held, cache.layers, strict=True):
        assert torch.equal(key, layer.keys) and torch.equal(value, layer.values), f"{kind}: beyond the cache"


@torch.no_grad()
def check_prompts(model: Any, kind: str) -> None:
    """Logits and cache after prompts, after more of them behind these, and of a step after both."""
    own, fused = Decoder(model, length=100), Decoder(model, length=100)
    prompts = torch.randint(0, 60, (2, 7))
    rope_cache.MANY_TOKENS, fused_prefill.MAX_ROWS = 5, 9  # several heads a CTA, a sequence a pass
    for decoder in (own, fused):
        decoder.cache = static_cache(model, 100)
    fused.fuses_prompts = True  # as on a GPU
    own.prefill(prompts)
    for compared in (False, True):  # a prompt alone goes through the model and nothing else
        fused.cache = static_cache(model, 100)
        assert torch.equal(own.logits, fused.prefill(prompts)), kind
        assert (fused.fused_prefill.found.get(kind_of(2 * 7)) is not None) == compared, kind
    assert FusedPrefill.of(model) is fused.fused_prefill  # the next decoder compares nothing again
    handle = model.base_model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert FusedPrefill.of(model) is not fused.fused_prefill  # a hook is passed over by what was fused before
    handle.remove()
    fused.cache = static_cache(model, 100)
    for tokens in (prompts, torch.randint(0, 60, (2, 4))):
        if tokens is not prompts:
            own.prefill(tokens)
        logits = fused.prefill(tokens)
        assert close(logits, own.logits), f"{kind}: logits of {tokens.shape}"
        for mine, wanted in zip(fused.cache.layers, own.cache.layers, strict=True):
            assert close(mine.keys, wanted.keys) and close(mine.values, wanted.values), f"{kind}: cache"
    fused.tokens.copy_(own.tokens)
    assert close(fused.step(), own.step()), f"{kind}: the step after prompts"


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item() < 3e-3


@torch.no_grad()
def check_decoder(model: Any) -> None:
    """As before a capture on a GPU: compared with the model's own step, taken back, and used from then on."""
    plain, fused = (Decoder(model, length=100) for _ in range(2))
    prompt = torch.randint(0, 60, (2, 70))
    for decoder in (plain, fused):
        decoder.cache = static_cache(model, 100)
        decoder.prefill(prompt)
    fused.wants_fused = True
    length = int(fused.cache.length)
    fused._fuse((fused.cache.length.clone(), fused.tokens.clone(), fused.logits.clone()))
    assert fused.fused is not None
    for step in range(1, 4):
        wanted = plain.step().float()
        logits = fused.step()
        error = ((logits.float() - wanted).norm() / wanted.norm()).item()
        assert error < 3e-3, f"a step of the decoder is off by {error:.1e}"
        assert logits is fused.logits and torch.equal(fused.tokens, logits.argmax(-1, keepdim=True))
        assert int(fused.cache.length) == length + step
        fused.tokens.copy_(plain.tokens)


if __name__ == "__main__":
    main()
