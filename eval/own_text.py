"""More text to train on: windows that the original writes itself, each begun with the first tokens of a window of real text.

    x_t ~ p_original( . | x_<t)   for t > PREFIX

at temperature 1, so that a window is an unbiased sample of the model's own distribution (LLM-QAT: Liu et al. 2023, arXiv
2305.17888; there without real beginnings, which keep it to the text's topics).
"""

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.inference.decode import Decoder
from requant.text.sampling import sample_next

PREFIX = 32  # tokens of real text
BATCH = 256  # windows at once


@torch.no_grad()
def own_windows(
    model: PreTrainedModel, windows: Int64[Tensor, "b t"], count: int, *, seed: int = 0
) -> Int64[Tensor, "c t"]:
    """`count` windows of the same length, on the CPU; their beginnings are those of `windows` in turn."""
    generator = torch.Generator(model.device).manual_seed(seed)
    beginnings = windows[torch.arange(count) % len(windows), :PREFIX]
    decoder = Decoder(model, length=windows.shape[1])
    found = []
    for start in range(0, count, BATCH):
        tokens = beginnings[start : start + BATCH].to(model.device)
        if len(tokens) < BATCH and start:  # a captured step has one size
            decoder = Decoder(model, length=windows.shape[1])
        decoder.reset()
        logits, written = decoder.prefill(tokens), [tokens]
        while True:
            written.append(sample_next(logits, generator=generator))
            if len(written) == windows.shape[1] - PREFIX + 1:
                break
            logits = decoder.step(written[-1])
        found.append(torch.cat(written, dim=1).cpu())
    return torch.cat(found)
