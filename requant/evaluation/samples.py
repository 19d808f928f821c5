"""Samples of text written by the original and by the quantized model, for the report.

Each prompt is the first 24 tokens of a window of the evaluation text, continued by 40 tokens, all of them at once. Decoding
is greedy, so the same run writes the same text, in every process. Samples are an illustration; KL is the measurement.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.errors import first_line, is_out_of_memory
from requant.inference.decode import Decoder

logger = logging.getLogger(__name__)
PROMPT_TOKENS = 24
NEW_TOKENS = 40
WHITE_SPACE = " \n\t"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its continuation by each model."""

    prompt: str
    before: str
    after: str

    @property
    def same(self) -> str:
        """What both continuations begin with, in whole words; all of it where they are equal."""
        if not self.differs:
            return self.before
        begun = os.path.commonprefix([self.before, self.after])  # noqa: RUF071 (text, no paths)
        return begun[: max(map(begun.rfind, WHITE_SPACE)) + 1]

    @property
    def differs(self) -> bool:
        return self.before != self.after


def write_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Int64[Tensor, "s t"],
    apply_weights: Callable[[bool], None],
    *,
    count: int,
) -> list[Sample]:
    """`count` prompts continued by the original and by the quantized model.

    `apply_weights(quantized)` writes the original or the quantized weights into the model, which is left quantized.
    """
    prompts = sample_prompts(windows, count)
    if not prompts:
        return []
    apply_weights(False)
    try:
        before = continued(model, tokenizer, prompts)
    # the run need not end for an illustration, which a few models of transformers cannot write
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.warning(
            "the report has no samples: %s cannot go on token by token (%s).",
            type(model).__name__,
            first_line(error),
        )
        apply_weights(True)
        return []
    apply_weights(True)
    after = continued(model, tokenizer, prompts)
    return [
        Sample(prompt=str(tokenizer.decode(prompt)), before=original, after=quantized)
        for prompt, original, quantized in zip(prompts, before, after, strict=True)
    ]


def sample_prompts(windows: Int64[Tensor, "s t"], count: int) -> list[list[int]]:
    """The first tokens of `count` windows, spread evenly; fewer where there are fewer windows."""
    length = min(PROMPT_TOKENS, windows.shape[1] // 2)
    count = min(count, len(windows)) if length else 0
    return [windows[index * len(windows) // count, :length].tolist() for index in range(count)]


def continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]
) -> list[str]:
    """The greedy continuations of prompts of one length as text, up to NEW_TOKENS or the end-of-text token."""
    decoder = Decoder(model, length=len(prompts[0]) + NEW_TOKENS, graph=False, kernel_attention=False)
    steps = [decoder.prefill(torch.tensor(prompts, device=model.device)).argmax(-1).tolist()]
    end = tokenizer.eos_token_id
    while len(steps) < NEW_TOKENS and not all(end in row for row in zip(*steps, strict=True)):
        steps.append(decoder.step().argmax(-1).tolist())
    texts = []
    for prompt, row in zip(prompts, zip(*steps, strict=True), strict=True):
        written = [*row[: row.index(end) + 1]] if end in row else [*row]
        text = str(tokenizer.decode(prompt + written))
        texts.append(text.removeprefix(str(tokenizer.decode(prompt))))
    return texts
