"""A forward pass that resumes where the last one stopped: cached hidden states of the calibration text between two blocks.

Sequential calibration needs the inputs of one block at a time, with all earlier blocks quantized. The hidden states before
the current block are cached on the CPU, so all blocks together cost one pass through the model, not one from the first
block for each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.calibration.batches import rounds
from requant.models.targets import find_blocks


class StopForward(Exception):
    """Raised by a hook when the rest of the forward pass is not needed."""


class HiddenStateCache:
    """The hidden states of the windows before block `next_block` of one model."""

    def __init__(self, model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> None:
        self.model, self.windows = model, windows
        self.blocks = list(find_blocks(model)[1])
        self.next_block = 0
        self.states: list[
            Any
        ] = []  # one for each of this rank's batches: what block `next_block - 1` returned, on the CPU

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def batches(self, label: str | None = None) -> Iterator[Int64[Tensor, "c t"] | None]:
        """The batches of this rank; None where other ranks have one more."""
        return (tokens for _, tokens in rounds(self.windows, self.model, label=label))

    def run(self, index: int, tokens: Int64[Tensor, "c t"]) -> None:
        """Run this rank's batch `index` from block `next_block` on, until a hook raises StopForward; without the head."""
        body = getattr(self.model, self.model.base_model_prefix)
        with self._skipping(index, tokens.device):
            try:
                body(input_ids=tokens, use_cache=False)
            except StopForward:
                return

    @torch.no_grad()
    def advance_to(self, block: int) -> None:
        """Advance to before block `block`, with the weights that the model has now."""
        while self.next_block < block:
            following: list[Any] = []

            def save(_module: nn.Module, _inputs: Any, output: Any, states: list[Any] = following) -> None:
                states.append(_moved(output, "cpu"))
                raise StopForward

            handle = self.blocks[self.next_block].register_forward_hook(save)
            try:
                for index, tokens in enumerate(self.batches()):
                    if tokens is not None:
                        self.run(index, tokens)
            finally:
                handle.remove()
            self.states, self.next_block = following, self.next_block + 1

    @contextmanager
    def _skipping(self, index: int, device: torch.device) -> Iterator[None]:
        """Earlier blocks return the cached hidden states without computing."""
        passed = self.blocks[: self.next_block]
        own = [block.__dict__.get("forward") for block in passed]
        if passed:
            state = _moved(self.states[index], device)
            for block in passed:
                block.forward = _returning(state)
        try:
            yield
        finally:
            for block, forward in zip(passed, own, strict=True):
                del block.forward  # uncovers the class's own method
                if forward is not None:
                    block.forward = forward


def _returning(state: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: state


def _moved(output: Any, device: torch.device | str) -> Any:
    """What a block returns, a tensor or a tuple that begins with one, on a device."""
    if isinstance(output, Tensor):
        return output.to(device)
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in output)
