"""Samples are the likeliest continuation, the same every time, and leave the model as it was."""

import pytest
import torch

from requant.evaluation.samples import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    Sample,
    continued,
    sample_prompts,
    write_samples,
)


@pytest.fixture(autouse=True)
def short_samples() -> None:
    """Whole ones here."""


def test_prompts_are_spread_over_the_text() -> None:
    windows = torch.arange(10 * 64).view(10, 64)
    assert [prompt[0] for prompt in sample_prompts(windows, 2)] == [0, 5 * 64]
    assert all(len(prompt) == PROMPT_TOKENS for prompt in sample_prompts(windows, 2))
    assert len(sample_prompts(windows[:1], 2)) == 1 and sample_prompts(windows, 0) == []
    assert len(sample_prompts(windows[:, :8], 1)[0]) == 4  # half a window


def test_greedy_as_transformers_writes(trained_model, tokenizer, tiny_windows) -> None:
    prompts = sample_prompts(tiny_windows, 3)
    texts = continued(trained_model, tokenizer, prompts)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = trained_model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=True,
            pad_token_id=256,
        )[0]
        assert text == tokenizer.decode(expected).removeprefix(tokenizer.decode(prompt)) and text
    assert texts == continued(trained_model, tokenizer, prompts)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (" the old town", " the old tower", " the old "),  # whole words
        (" the old", " the old town", " the "),
        ("one", "two", ""),
        ("a b", "a b", "a b"),
        ("a\nb", "a\nc", "a\n"),
    ],
)
def test_where_two_continuations_part(before: str, after: str, same: str) -> None:
    sample = Sample(prompt="", before=before, after=after)
    assert sample.same == same and sample.differs == (before != after)


def test_before_and_after(trained_model, tokenizer, tiny_windows) -> None:
    weight = trained_model.model.layers[0].mlp.up_proj.weight
    original = weight.detach().clone()
    order: list[bool] = []

    def place(quantized: bool) -> None:
        order.append(quantized)
        weight.copy_(-original if quantized else original)

    samples = write_samples(trained_model, tokenizer, tiny_windows, place, count=2)
    assert order == [False, True] and len(samples) == 2
    first = samples[0]
    assert first.before != first.after
    assert first.prompt == tokenizer.decode(sample_prompts(tiny_windows, 2)[0])
    place(False)
    assert first.before == continued(trained_model, tokenizer, sample_prompts(tiny_windows, 2))[0]
    assert write_samples(trained_model, tokenizer, tiny_windows, place, count=0) == []
    assert order == [False, True, False]


def test_a_model_that_cannot_go_on_has_no_samples(trained_model, tokenizer, tiny_windows, caplog) -> None:
    trained_model.forward = lambda *_, **__: trained_model.nowhere
    order: list[bool] = []
    assert write_samples(trained_model, tokenizer, tiny_windows, order.append, count=1) == []
    assert order == [False, True]  # left quantized
    assert "the report has no samples: LlamaForCausalLM cannot go on token by token" in caplog.text


def test_the_end_of_the_text_ends_it(tiny_model, tokenizer) -> None:
    model = tiny_model("llama")
    steps: list[int] = []
    model.register_forward_hook(lambda *_: steps.append(1))
    model.lm_head.weight.zero_()
    model.model.embed_tokens.weight[:] = 1.0
    continued(model, tokenizer, [[65, 66]])
    assert len(steps) == NEW_TOKENS  # every logit is zero, and token 0 no end
    steps.clear()
    hidden = model.model(torch.tensor([[65, 66]])).last_hidden_state[0, -1]
    model.lm_head.weight[tokenizer.eos_token_id] = hidden
    (text,) = continued(model, tokenizer, [[65, 66]])
    assert len(steps) == 1 and text == tokenizer.decode([tokenizer.eos_token_id])
    # one that ends goes on unread while another is written
    model.model.embed_tokens.weight[67, ::2] = -1.0
    other = model.model(torch.tensor([[65, 67]])).last_hidden_state[0, -1]
    model.lm_head.weight[tokenizer.eos_token_id] = hidden - other
    texts = continued(model, tokenizer, [[65, 66], [65, 67]])
    assert texts[0] == text and texts[1] == continued(model, tokenizer, [[65, 67]])[0] != text
