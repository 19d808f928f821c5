"""What a model writes, before and after: the likeliest continuation of fixed places of the evaluation text.

Two prompts of 24 tokens, the beginnings of windows spread evenly over the scored text, each continued by 40 tokens. No
dice are thrown, so the same run writes the same words. It is an illustration; KL is the measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.inference.decode import Decoder

PROMPT_TOKENS = 24
NEW_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, and how each of the models goes on."""

    prompt: str
    before: str
    after: str


def write_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Int64[Tensor, "s t"],
    place: Callable[[bool], None],
    *,
    count: int,
) -> list[Sample]:
    """`count` prompts continued by the original and by the quantized model.

    `place` puts the original's weights into the model (False) or the quantized ones (True), which it is left with.
    """
    prompts = sample_prompts(windows, count)
    if not prompts:
        return []
    place(False)
    before = [continued(model, tokenizer, prompt) for prompt in prompts]
    place(True)
    after = [continued(model, tokenizer, prompt) for prompt in prompts]
    return [
        Sample(prompt=str(tokenizer.decode(prompt)), before=original, after=quantized)
        for prompt, original, quantized in zip(prompts, before, after, strict=True)
    ]


def sample_prompts(windows: Int64[Tensor, "s t"], count: int) -> list[list[int]]:
    """The first tokens of `count` windows, spread evenly; fewer where there are fewer windows."""
    length = min(PROMPT_TOKENS, windows.shape[1] // 2)
    count = min(count, len(windows)) if length else 0
    return [windows[index * len(windows) // count, :length].tolist() for index in range(count)]


def continued(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> str:
    """The likeliest tokens one after another, to NEW_TOKENS or the end of the text, as text."""
    decoder = Decoder(model, length=len(prompt) + NEW_TOKENS, graph=False)
    logits = decoder.prompt(torch.tensor([prompt], device=model.device))
    written: list[int] = []
    while len(written) < NEW_TOKENS:
        written.append(int(logits[0].argmax()))
        if written[-1] == tokenizer.eos_token_id:
            break
        logits = decoder.step()
    return str(tokenizer.decode(prompt + written)).removeprefix(str(tokenizer.decode(prompt)))
