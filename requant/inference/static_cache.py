"""A static cache whose layers share one length: a step adds to it once, not once per layer.

transformers' static layer counts its own tokens on the device, which costs one launch per layer and step, and one mask per
layer, since every layer changes a number from which the mask is made. All layers of a model hold the same number of
tokens, so here they read one shared length, and whoever runs the model adds to it (`add`).
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from requant.models.experts import Experts
from requant.text.kv_cache import takes_cache


class SharedLengthLayer(StaticLayer):
    """Keys and values of a block, `[b, heads, length, d]`."""

    def __init__(self, max_cache_len: int, cumulative_length: Tensor) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.cumulative_length = cumulative_length

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values after those in the cache; the length stays."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = torch.arange(key_states.shape[-2], device=self.device) + self.cumulative_length
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """The length, not a count of slots: those after it may hold what a step left that was taken back."""
        return self.cumulative_length if self.is_initialized else 0


class SharedLengthCache(StaticCache):
    """Room for `length` tokens in every block."""

    def __init__(self, config: PretrainedConfig, length: int, device: torch.device) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.layers = [SharedLengthLayer(length, self.length) for _ in self.layers]

    def reset(self) -> None:
        """Forget all tokens; the tensors stay where they are."""
        super().reset()
        self.length.zero_()  # not every release of transformers resets what its own layers do not have

    def add(self, tokens: int) -> None:
        """Count tokens of every sequence that have gone through the model."""
        self.length.add_(tokens)


def static_cache(model: PreTrainedModel, length: int) -> SharedLengthCache | None:
    """A cache whose step can be captured, or None where a layer is not a plain static one (sliding windows).

    None too for a model that takes no cache, for one on several devices (its layers cannot share one length, nor a graph),
    and for a mixture of experts that are served one by one, where the host asks which of them a token goes to.
    """
    if not takes_cache(model) or any(
        isinstance(module, Experts) and module.step is None for module in model.modules()
    ):
        return None
    plain = StaticCache(config=model.config, max_cache_len=length)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or any(type(layer) is not StaticLayer for layer in plain.layers):
        return None
    return SharedLengthCache(model.config, length, torch.device(model.device))
