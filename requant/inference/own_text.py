"""More text to train on: windows that the original writes itself, each starting with the first tokens of a window of real
text.

    x_t ~ p_original( . | x_<t)   for t > PREFIX

at temperature 1, so that a window is an unbiased sample of the model's own distribution (LLM-QAT: Liu et al. 2023, arXiv
2305.17888; they have no real beginnings, which keep the samples on topic). A token is drawn without sorting or sums,

    x_t = argmax_v (z_v - log e_v),   e_v ~ Exp(1)      z: logits

which is Gumbel-max. On a GPU the model writes in bfloat16, in which training computes its targets, so steps are fused: a
token is the replay of one graph plus five launches, and the host waits for none of them.

Windows are written in batches whose keys and values fit in CACHE_BYTES, each batch with its own noise. So the text depends
only on the model and the seed, not on free memory or on how many processes (`ranks.py`) share the batches.
"""

import copy

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.errors import ModelError, NumericalError, RequantError, first_line, is_out_of_memory
from requant.inference.decode import Decoder
from requant.models.attention_sizes import attention_sizes
from requant.models.mixed_precision import PRODUCTS
from requant.progress import tracked

PREFIX = 32  # tokens of real text
MOST_WINDOWS = 512  # at once
CACHE_BYTES = 4 << 30  # of keys and values in 16 bits: 512 windows of 1024 tokens of bench-32m
SEEDS = 1_000_003  # apart, the seeds of two runs, between which those of a run's batches lie


@torch.no_grad()
def own_windows(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    count: int,
    *,
    seed: int = 0,
    label: str | None = None,
) -> Int64[Tensor, "c t"]:
    """`count` windows of the same length, on the CPU; their beginnings are those of `windows` in turn.

    Windows of at most PREFIX tokens leave nothing to write and are given back. Raises NumericalError for logits that are not
    finite, ModelError for a model that fails in training's precision (MiniMax-Text-01).
    """
    length = windows.shape[1]
    beginnings = windows[torch.arange(count) % len(windows), :PREFIX]
    batches = list(enumerate(beginnings.split(windows_at_once(model, length))))
    writer, decoder, size = in_training_precision(model), None, 0
    found = []
    for number, batch in tracked(ranks.mine(batches), label=label, unit="batches"):
        if decoder is None or len(batch) != size:  # a captured step has one size
            decoder, size = Decoder(writer, length=length), len(batch)
        generator = torch.Generator(model.device).manual_seed(SEEDS * seed + number)
        try:
            found.append(_continued(decoder, batch.to(model.device), length, generator))
        except RequantError:
            raise
        except Exception as error:  # a stranger's code, in another precision
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{type(model).__name__} writes no text in {writer.dtype} ({first_line(error)}): leave --own-windows out."
            ) from error
    return torch.cat(ranks.merged_tensors(found))


def windows_at_once(model: PreTrainedModel, length: int) -> int:
    """Windows of a batch, by what the config says of the model's keys and values."""
    return max(1, min(MOST_WINDOWS, CACHE_BYTES // cache_bytes(model, length)))


def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of the keys and values of one window, in 16 bits."""
    sizes = attention_sizes(model.config)
    return max(1, 2 * 2 * length * sum(size.key_heads * size.head_dim for size in sizes))


def bytes_to_write(model: PreTrainedModel, count: int, length: int, *, device: str) -> int:
    """What `count` windows take beside the model: a batch's cache, its logits and noise in float32, a copy in training's
    precision where the model has another."""
    at_once = min(count, windows_at_once(model, length))
    copied = 0
    if count and PRODUCTS.get(device, model.dtype) != model.dtype:
        copied = sum(2 * parameter.numel() for parameter in model.parameters())
    vocabulary = model.config.get_text_config().vocab_size
    return at_once * (cache_bytes(model, length) + 2 * 4 * vocabulary) + copied


def _continued(
    decoder: Decoder, tokens: Int64[Tensor, "b p"], length: int, generator: torch.Generator
) -> Int64[Tensor, "b t"]:
    """The beginnings with tokens drawn one after the other, on the CPU."""
    missing = length - tokens.shape[1]
    if missing < 1:
        return tokens.cpu()
    decoder.reset()
    logits, written = decoder.prefill(tokens), [tokens]
    for left in range(missing - 1, -1, -1):
        written.append(draw(logits, generator))
        if left:
            logits = decoder.step(written[-1])
    if not logits.isfinite().all():
        raise NumericalError(
            "the model's next-token logits hold NaN or infinity, so it cannot write text: leave --own-windows out, or check "
            "the model with `requant eval`."
        )
    return torch.cat(written, dim=1).cpu()


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
