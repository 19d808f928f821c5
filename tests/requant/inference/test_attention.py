"""The attention of a step as transformers sees it: the operator's values, and when torch's is taken instead."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import StaticCache

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
    want = [plain.prefill(tokens).clone(), *(plain.step().clone() for _ in range(3))]
    taken = []

    def on_a_gpu(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        assert q.shape[2] == 1 and mask.dtype == torch.bool and mask.stride(-1) == 1
        assert {key for key, value in options.items() if value is not None} <= attention.PLAIN
        taken.append(mask)
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        return torch.ops.requant.attend(q, k, v, mask[:, 0, 0].expand(len(q), -1), float(scale)), None

    monkeypatch.setattr(attention, "attend", on_a_gpu)
    static = Decoder(model, length=24)
    static.kernel_attention = True
    static.cache = StaticCache(config=model.config, max_cache_len=24)
    got = [static.prefill(tokens).clone(), *(static.step().clone() for _ in range(3))]
    monkeypatch.undo()
    attention.register()
    assert taken and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
    assert model.config._attn_implementation == "sdpa"


class OnGpu:
    """What `supports` reads of a model, as a GPU would have it."""

    device = torch.device("cuda")
    dtype = torch.bfloat16

    def __init__(self, model: Any, implementation: str = "sdpa") -> None:
        self.config = model.config
        self.config._attn_implementation = implementation


def test_the_kernel_is_for_torchs_attention_on_a_gpu(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny_model("llama"), []
    monkeypatch.setattr(attention, "is_right", lambda *shape: asked.append(shape) is None)
    assert not Decoder(model, length=20).kernel_attention  # a CPU
    assert attention.supports(OnGpu(model), 100)
    assert not attention.supports(OnGpu(model, "eager"), 100)
    assert attention.supports(OnGpu(model), 100_000)  # checked with fewer
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads, config.num_key_value_heads
    for shape, length in zip(asked, (128, attention.LONGEST_CHECK), strict=True):
        assert shape == (*heads, head_dim, length, torch.bfloat16, torch.device("cuda"))


def test_the_config_is_restored_after_an_error(tiny_model) -> None:
    model = tiny_model("llama")
    with pytest.raises(ZeroDivisionError), attention.use_kernel(model):
        assert model.config._attn_implementation == attention.NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_a_wrong_kernel_is_found_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = 6, 2, 16, 128, torch.bfloat16, torch.device("cpu")
    attention.is_right.cache_clear()
    assert attention.is_right(*shape) and not caplog.records
    right = torch.ops.requant.attend

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of resources")

    for operator, reason in (
        (lambda *given: right(*given).roll(1, -1), "is wrong"),
        (fails, "does not compile"),
    ):
        attention.is_right.cache_clear()
        caplog.clear()
        monkeypatch.setattr(attention.torch.ops.requant, "attend", operator)
        assert not attention.is_right(*shape) and not attention.is_right(*shape)
        assert len(caplog.records) == 1 and reason in caplog.text
    attention.is_right.cache_clear()
