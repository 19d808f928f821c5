"""Windows that a model writes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from requant.errors import ModelError, NumericalError
from requant.inference import own_text
from requant.inference.own_text import (
    PREFIX,
    bytes_to_write,
    draw,
    in_training_precision,
    own_windows,
    windows_at_once,
)
from requant.models import mixed_precision


def test_windows_begin_with_real_text_and_go_on_as_the_model_does(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(own_text, "MOST_WINDOWS", 4)
    model = tiny_model("llama")
    real = torch.randint(model.config.vocab_size, (3, PREFIX + 6), generator=torch.Generator().manual_seed(0))
    written = own_windows(model, real, 10)
    assert written.shape == (10, PREFIX + 6)
    assert (written[:, :PREFIX] == real[torch.arange(10) % 3, :PREFIX]).all()
    assert (written == own_windows(model, real, 10)).all()
    assert (written != own_windows(model, real, 10, seed=1)).any()
    # a batch does not depend on those that others write
    assert (written[:8] == own_windows(model, real, 8)).all()
    assert (written[:4] != written[6:]).any()
    with torch.no_grad():  # a model that is nearly certain writes what it is certain of
        model.get_output_embeddings().weight.mul_(1e4)
    for row in own_windows(model, real, 6):
        logits = model(row[None], use_cache=False).logits[0]
        assert (logits[PREFIX - 1 : -1].argmax(-1) == row[PREFIX:]).all()


def test_tokens_are_drawn_from_the_distribution() -> None:
    logits, count = torch.tensor([2.0, 0.0, -1.0, 1.5, -30.0]), 100_000
    drawn = draw(logits.expand(count, -1), torch.Generator().manual_seed(0))
    found, expected = drawn.flatten().bincount(minlength=5) / count, logits.softmax(0)
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_a_draw_is_four_launches_and_waits_for_none() -> None:
    """Nothing is sorted, and no number comes to the host."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func.overloadpacket).removeprefix("aten."))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    logits, generator = torch.zeros(3, 7, dtype=torch.bfloat16), torch.Generator()
    with Names():
        draw(logits, generator)
    assert names == ["empty", "exponential_", "log_", "sub", "argmax"]


def test_a_model_writes_in_the_precision_of_training(tiny_model, monkeypatch) -> None:
    """But for its frequencies, which are not parameters; the model itself stays as it is."""
    model = tiny_model("llama-tied")
    assert in_training_precision(model) is model
    monkeypatch.setitem(mixed_precision.PRODUCTS, "cpu", torch.bfloat16)
    writer = in_training_precision(model)
    assert {p.dtype for p in writer.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(buffer.dtype == torch.float32 for buffer in writer.buffers())
    assert writer.get_input_embeddings().weight is writer.get_output_embeddings().weight
    assert own_windows(model, torch.zeros(1, PREFIX + 4, dtype=torch.long), 2).shape == (2, PREFIX + 4)


def test_logits_that_are_not_finite_write_nothing(tiny_model) -> None:
    model = tiny_model("llama")
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="cannot write text"):
        own_windows(model, torch.zeros(1, PREFIX + 2, dtype=torch.long), 1)


def test_a_model_that_fails_in_the_precision_of_training_is_named(tiny_model, monkeypatch) -> None:
    """MiniMax-Text-01 multiplies bfloat16 with a decay that it keeps in float32."""
    model = tiny_model("llama")
    monkeypatch.setitem(mixed_precision.PRODUCTS, "cpu", torch.bfloat16)
    norm = type(model.model.norm).forward
    monkeypatch.setattr(
        type(model.model.norm), "forward", lambda self, x: norm(self, x) @ torch.eye(x.shape[-1])
    )
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM writes no text in torch.bfloat16 .* leave --own-windows out"
    ):
        own_windows(model, torch.zeros(1, PREFIX + 2, dtype=torch.long), 1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3-moe"])
def test_a_batch_has_the_windows_whose_keys_and_values_fit(tiny_model, family, monkeypatch) -> None:
    model, tokens = tiny_model(family), 24
    with torch.no_grad():
        cache = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    held = sum(each.numel() for layer in cache.layers for each in (layer.keys, layer.values))
    monkeypatch.setattr(own_text, "CACHE_BYTES", 2 * held * 3)
    assert windows_at_once(model, tokens) == 3
    vocabulary = model.config.get_text_config().vocab_size
    wanted = 3 * (2 * held + 8 * vocabulary)  # keys and values in 16 bits, logits and noise in float32
    assert bytes_to_write(model, 100, tokens, device="cpu") == wanted
    copied = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert bytes_to_write(model, 100, tokens, device="cuda") == wanted + copied
    assert bytes_to_write(model, 0, tokens, device="cuda") == 0
    monkeypatch.setattr(own_text, "CACHE_BYTES", 2 * held - 1)
    assert windows_at_once(model, tokens) == 1


def test_windows_as_short_as_their_beginnings_are_the_text(tiny_model) -> None:
    real = torch.arange(2 * PREFIX).view(2, PREFIX)
    assert (own_windows(tiny_model("llama"), real, 3) == real[[0, 1, 0]]).all()
