"""The attention of a step as transformers sees it: the operator's values, and when torch's is taken instead."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, StaticCache

from requant.inference import attention
from requant.inference.decode import Decoder


def heads(b: int, h: int, n: int) -> torch.Tensor:
    return torch.randn(b, h, n, 16)


def test_the_operator_is_attention() -> None:
    q, k, v = heads(3, 6, 1), heads(3, 2, 20), heads(3, 2, 20)
    mask = torch.arange(20).expand(3, -1) < torch.tensor([[20], [7], [1]])
    for chosen in (None, mask):
        bias = None if chosen is None else chosen[:, None, None]
        want = F.scaled_dot_product_attention(
            q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), bias, scale=0.3
        )
        got = torch.ops.requant.attend(q, k, v, chosen, 0.3)
        assert torch.allclose(got, want.transpose(1, 2), atol=1e-6)
        torch.library.opcheck(torch.ops.requant.attend, (q, k, v, chosen, 0.3))


def test_a_cpu_and_a_prompt_take_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads(1, 2, 3), heads(1, 2, 3), heads(1, 2, 3)
    y, weights = attention.attend(torch.nn.Module(), q, k, v, None, scaling=0.25, dropout=0.0)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    assert weights is None and torch.allclose(y, want.transpose(1, 2))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt-neox", "phi3"])
def test_models_write_the_same_with_it(tiny_model, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator in the place where a GPU has it: what models pass is what it takes."""
    model, tokens = tiny_model(name), torch.randint(0, 256, (2, 7))
    plain = Decoder(model, length=24)
    want = [plain.prompt(tokens).clone(), *(plain.step().clone() for _ in range(3))]
    assert attention.use_kernel(model) and attention.use_kernel(model)
    taken = []

    def on_a_gpu(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        if q.shape[2] > 1:
            return attention.attend(module, q, k, v, mask, **options)
        assert mask.dtype == torch.bool and mask.stride(-1) == 1
        assert {key for key, value in options.items() if value is not None} <= attention.PLAIN
        taken.append(mask)
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        return torch.ops.requant.attend(q, k, v, mask[:, 0, 0].expand(len(q), -1), float(scale)), None

    AttentionInterface.register(attention.NAME, on_a_gpu)
    static = Decoder(model, length=24)
    static.cache = StaticCache(config=model.config, max_cache_len=24)
    got = [static.prompt(tokens).clone(), *(static.step().clone() for _ in range(3))]
    attention.register()
    assert taken and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


def test_other_attentions_stay(tiny_model) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = "eager"
    assert not attention.use_kernel(model) and model.config._attn_implementation == "eager"
