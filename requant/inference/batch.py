"""Decoding several sequences at once, each of which may start and end at any time.

Every step reads all weights, whatever the number of sequences, so on a CPU eight together cost little more than one. Keys
and values are a batch [b, heads, t, d] that ends at the newest token: a shorter sequence is padded on the left, where the
attention mask is 0, and positions are counted without the padding. A new sequence is run through the model by itself and
then joins the batch; a finished one leaves it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from requant.errors import first_line, is_out_of_memory
from requant.inference.decode import Decoder
from requant.text.kv_cache import takes_cache, with_cache

logger = logging.getLogger(__name__)


class OneSequence:
    """A `Decoder`, which captures its steps on a GPU."""

    capacity = 1

    def __init__(self, model: Any, length: int) -> None:
        self.decoder = Decoder(model, length=length)

    def add(self, prompt: list[int]) -> Float[Tensor, " v"]:
        """Begin the sequence; the logits after its prompt."""
        self.decoder.reset()
        return self.decoder.prefill(torch.tensor([prompt], device=self.decoder.device))[0]

    def step(self, tokens: Sequence[int]) -> Float[Tensor, "b v"]:
        """Logits after one more token."""
        return self.decoder.step(torch.tensor([tokens], device=self.decoder.device))

    def keep(self, rows: list[int]) -> None:
        """Nothing: the next one resets the decoder."""


class SequenceBatch:
    """Sequences whose keys and values are one padded batch; rows are in the order in which they were added."""

    def __init__(self, model: Any, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        self.device = torch.device(model.device)
        self.lengths: list[int] = []  # tokens of every sequence
        self.cache: Any = DynamicCache(config=model.config)

    @torch.no_grad()
    def add(self, prompt: list[int]) -> Float[Tensor, " v"]:
        """Begin a sequence; the logits after its prompt. Where that fails, the others are as before."""
        alone: Any = DynamicCache(config=self.model.config)
        tokens = torch.tensor([prompt], device=self.device)
        output = self.model(tokens, **with_cache(self.model, alone), logits_to_keep=1)
        if self.lengths:
            length = max(*self.lengths, len(prompt))
            try:
                for ours, new in zip(self.cache.layers, alone.layers, strict=True):
                    ours.keys = torch.cat([_padded(ours.keys, length), _padded(new.keys, length)])
                    ours.values = torch.cat([_padded(ours.values, length), _padded(new.values, length)])
            except Exception:  # out of memory, with some of the layers extended
                self._cut()
                raise
        else:
            self.cache = alone
        self.lengths.append(len(prompt))
        return output.logits[0, -1]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Float[Tensor, "b v"]:
        """Logits after one more token of every sequence."""
        lengths = torch.tensor(self.lengths, device=self.device)
        columns = torch.arange(max(self.lengths) + 1, device=self.device)
        output = self.model(
            torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=(columns >= columns[-1] - lengths[:, None]).long(),
            position_ids=lengths[:, None],
            **with_cache(self.model, self.cache),
        )
        self.lengths = [length + 1 for length in self.lengths]
        return output.logits[:, -1]

    def keep(self, rows: list[int]) -> None:
        """Forget all other sequences."""
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self.cache = DynamicCache(config=self.model.config)
            return
        index, longest = torch.tensor(rows, device=self.device), max(self.lengths)
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, -longest:].contiguous()
            layer.values = layer.values[index, :, -longest:].contiguous()

    def _cut(self) -> None:
        """Take what was added of a further sequence off every layer; views, because there may be no memory for copies."""
        b, longest = len(self.lengths), max(self.lengths)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:b, :, -longest:], layer.values[:b, :, -longest:]


def open_sequences(model: Any, *, length: int, capacity: int | None) -> OneSequence | SequenceBatch:
    """Room for `capacity` sequences of `length` tokens; None: 8 on a CPU, elsewhere 1, whose step is a captured graph.

    A model whose cache is not a plain list of keys and values (sliding windows, states, none), or that fails with a batch of
    two short sequences, has room for one; the log says so where more were asked for.
    """
    on_cpu = torch.device(model.device).type == "cpu"
    wanted = (8 if on_cpu else 1) if capacity is None else capacity
    if wanted == 1:
        return OneSequence(model, length)
    layers = DynamicCache(config=model.config).layers
    if takes_cache(model) and all(type(layer) is DynamicLayer for layer in layers):
        if _takes_batches(model):
            return SequenceBatch(model, wanted)
    elif capacity is not None:
        logger.warning(
            "%s does not keep keys and values alone, of the whole text, so answers are written one after the other, "
            "whatever --batch says",
            type(model).__name__,
        )
    return OneSequence(model, length)


def _takes_batches(model: Any) -> bool:
    """Whether two sequences of different lengths go through the model (not through xLSTM); the log says why not."""
    batch = SequenceBatch(model, 2)
    try:
        batch.add([0])
        batch.add([0, 0])
        batch.step([0, 0])
    except Exception as error:  # a stranger's code
        if is_out_of_memory(error):
            raise
        logger.warning(
            "%s fails with a batch of sequences (%s: %s), so they are decoded one after the other",
            type(model).__name__,
            type(error).__name__,
            first_line(error),
        )
        return False
    return True


def _padded(values: Float[Tensor, "b h t d"], length: int) -> Float[Tensor, "b h l d"]:
    return F.pad(values, (0, 0, length - values.shape[2], 0))
