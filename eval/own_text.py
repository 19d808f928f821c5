"""More text to train on: windows that the original writes itself, each begun with the first tokens of a window of real text.

    x_t ~ p_original( . | x_<t)   for t > PREFIX

at temperature 1, so that a window is an unbiased sample of the model's own distribution (LLM-QAT: Liu et al. 2023, arXiv
2305.17888; there without real beginnings, which keep it to the text's topics). A token is drawn without sorting or sums,

    x_t = argmax_v (z_v - log e_v),   e_v ~ Exp(1)      z: logits

which is Gumbel-max. On a GPU the model writes in bfloat16, in which training computes its targets: so steps are fused, and a
token is the replay of one graph and five launches, of which the host waits for none.
"""

import copy

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.errors import NumericalError
from requant.inference.decode import Decoder
from requant.models.mixed_precision import PRODUCTS

PREFIX = 32  # tokens of real text
BATCH = 512  # windows at once: of bench-32m and 1024 tokens, 4 GB of keys and values


@torch.no_grad()
def own_windows(
    model: PreTrainedModel, windows: Int64[Tensor, "b t"], count: int, *, seed: int = 0
) -> Int64[Tensor, "c t"]:
    """`count` windows of the same length, on the CPU; their beginnings are those of `windows` in turn.

    Raises NumericalError for logits that are not finite.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    beginnings = windows[torch.arange(count) % len(windows), :PREFIX]
    writer, length = in_training_precision(model), windows.shape[1]
    decoder = Decoder(writer, length=length)
    found = []
    for start in range(0, count, BATCH):
        tokens = beginnings[start : start + BATCH].to(model.device)
        if len(tokens) < BATCH and start:  # a captured step has one size
            decoder = Decoder(writer, length=length)
        decoder.reset()
        logits, written = decoder.prefill(tokens), [tokens]
        while True:
            written.append(draw(logits, generator))
            if len(written) > length - PREFIX:
                break
            logits = decoder.step(written[-1])
        if not logits.isfinite().all():
            raise NumericalError("the model's next-token logits hold NaN or infinity: it cannot write text.")
        found.append(torch.cat(written, dim=1).cpu())
    return torch.cat(found)


def in_training_precision(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or a copy whose parameters have the dtype of training's products; buffers (of RoPE) stay as they are."""
    dtype = PRODUCTS.get(model.device.type, model.dtype)
    if dtype == model.dtype:
        return model
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def draw(logits: Float[Tensor, "b v"], generator: torch.Generator) -> Int64[Tensor, "b 1"]:
    """A token of every row's distribution."""
    noise = torch.empty(logits.shape, device=logits.device).exponential_(generator=generator).log_()
    return torch.sub(logits, noise, out=noise).argmax(-1, keepdim=True)
