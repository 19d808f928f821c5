"""Perplexity and KL against their definitions, the published protocol, and tables that cannot be misread."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from requant.display import format_table
from requant.errors import ModelError, NumericalError, TextError
from requant.evaluation.perplexity import mean_difference, perplexity_and_kl, warn_of_long_windows
from requant.text.sources import Text, read_text
from requant.text.windows import token_windows

TEXT = Text.from_documents("words", ["some words"])


def tiny(seed: int = 0, vocab: int = 97) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def windows():
    return torch.randint(97, (5, 16), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("known", [8, 16])
def test_windows_longer_than_a_model_knows_are_warned_of(windows, monkeypatch, caplog, known: int) -> None:
    """Where its loss rises in the second half of windows; of several texts by the longest windows."""
    model = tiny()

    def forward(input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        logits = functional.one_hot(input_ids.roll(-1, 1), 97) * 5.0
        logits[:, known:] = 0.0
        return SimpleNamespace(logits=logits)

    monkeypatch.setattr(model, "forward", forward)
    warn_of_long_windows(model, windows[:, :8], windows, windows[:1])
    assert caplog.text.count("windows of 16 tokens are probably longer") == (known == 8)
    assert caplog.text.count("probably longer") == (known == 8)


def test_windows_of_a_single_score_have_no_halves(windows) -> None:
    assert perplexity_and_kl(tiny(), windows[:, :2], text=TEXT).protocol.tokens == len(windows)


def test_matches_the_definitions(windows, monkeypatch):
    monkeypatch.setattr("requant.evaluation.perplexity.CHUNK_ELEMENTS", 97 * 4)  # several slices a window
    model, reference = tiny(0), tiny(1)
    quality = perplexity_and_kl(model, windows, text=TEXT, reference=reference, batch_size=2)
    with torch.no_grad():
        q = model(windows).logits[:, :-1].double().log_softmax(-1)
        p = reference(windows).logits[:, :-1].double().log_softmax(-1)
    loss = -q.gather(-1, windows[:, 1:, None]).mean()
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    assert quality.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)
    alone = perplexity_and_kl(reference, windows, text=TEXT)
    assert quality.reference_perplexity == pytest.approx(alone.perplexity)
    assert quality.mean_kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert quality.p99_kl == pytest.approx(kl.sort().values[math.ceil(0.99 * len(kl)) - 1].item(), rel=1e-5)
    assert quality.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    by_window = kl.view(5, 15).mean(1)
    assert quality.window_kl == pytest.approx(by_window.tolist(), rel=1e-5)
    assert quality.kl_error == pytest.approx(float(by_window.std() / 5**0.5), rel=1e-4)
    assert alone.kl_error is None and alone.window_kl == ()
    assert quality.protocol.tokens == 5 * 15
    assert "5 windows of 16 tokens, 75 tokens scored" in str(quality.protocol)


def test_a_model_agrees_with_itself(windows):
    model = tiny()
    quality = perplexity_and_kl(model, windows, text=TEXT, reference=model)
    assert (quality.mean_kl, quality.p99_kl, quality.top1_agreement) == (0.0, 0.0, 1.0)


def test_without_a_reference_only_perplexity(windows):
    quality = perplexity_and_kl(tiny(), windows, text=TEXT)
    assert quality.perplexity > 1
    assert quality.mean_kl is None


def test_batches_do_not_change_the_result_and_the_mode_is_restored(windows):
    model = tiny().train()
    one = perplexity_and_kl(model, windows, text=TEXT, batch_size=1)
    assert model.training
    assert perplexity_and_kl(model, windows, text=TEXT, batch_size=4).perplexity == pytest.approx(
        one.perplexity
    )


def test_what_cannot_be_scored_is_refused(windows):
    with pytest.raises(TextError, match="set --context 64 or less"):
        perplexity_and_kl(tiny(), torch.zeros(1, 65, dtype=torch.int64), text=TEXT)
    with pytest.raises(TextError, match="token 96, and the model's embedding has 50 rows"):
        perplexity_and_kl(tiny(vocab=50), torch.full((1, 8), 96), text=TEXT)
    with pytest.raises(ModelError, match="one vocabulary"):
        perplexity_and_kl(tiny(), windows, text=TEXT, reference=tiny(vocab=101))
    broken = tiny()
    broken.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(NumericalError, match="NaN or infinity in window 0"):
        perplexity_and_kl(broken, windows, text=TEXT)


def test_tokens_that_a_model_never_writes(windows, monkeypatch) -> None:
    """Chameleon gives those of images the lowest number there is, and a sum of two is minus infinity."""
    model = tiny()
    plain = model.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        output: Any = plain(*arguments, **named)
        output.logits[..., 90:] = torch.finfo(output.logits.dtype).min
        return output

    monkeypatch.setattr(model, "forward", forward)
    quality = perplexity_and_kl(model, windows.clamp(max=89), text=TEXT, reference=model)
    assert quality.mean_kl == 0 and quality.perplexity < 1e9


@pytest.mark.parametrize("value", [True, None, 1_234_567, 3.14159, 12345.678, 8.5e8, "name"])
def test_cells(value):
    expected = {
        True: "True",
        None: "-",
        1_234_567: "1,234,567",
        3.14159: "3.1416",
        12345.678: "12345.68",
        8.5e8: "8.500e+08",
        "name": "name",
    }
    assert format_table([{"x": value}]).split("\n")[2].strip() == expected[value]
    assert format_table([]) == ""


@pytest.mark.slow
def test_wikitext2_of_bench_32m_is_the_published_number(shared: Callable[[str], Path]) -> None:
    folder = shared("models/bench-32m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = read_text(shared("data/wikitext2/wiki.test.raw"))
    windows = token_windows(text, AutoTokenizer.from_pretrained(folder), num_samples=None, seq_len=1024)
    assert len(windows) == 318
    assert perplexity_and_kl(model, windows[:40], text=text).perplexity == pytest.approx(22.9, abs=0.05)
    assert perplexity_and_kl(model, windows, text=text).perplexity == pytest.approx(24.35, abs=0.01)


def test_wikitext2_is_tokenised_as_the_peers_do(shared: Callable[[str], Path]) -> None:
    text = read_text(shared("data/wikitext2/wiki.test.raw"))
    tokenizer = AutoTokenizer.from_pretrained(shared("models/bench-32m"))
    windows = token_windows(text, tokenizer, num_samples=None, seq_len=5)
    assert windows.shape == (326_215 // 5, 5)
    assert text.sha256.startswith("173c87a5") and text.sha256.endswith("dd08")


def test_differences_are_paired() -> None:
    """Windows that are hard for both models do not blur the difference between the two."""
    one, other = [0.1, 0.9, 0.5, 2.0], [0.11, 0.92, 0.51, 2.02]
    mean, error = mean_difference(other, one) or (0.0, 0.0)
    assert mean == pytest.approx(0.015) and error == pytest.approx(0.00577 / 2, rel=1e-2)
    assert mean_difference(one, one) == (0.0, 0.0)
    assert mean_difference(one, other[:3]) is None and mean_difference([1.0], [2.0]) is None
