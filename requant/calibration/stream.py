"""A forward pass that goes on where the last one stopped: hidden states of the calibration text between two blocks.

Statistics behind quantized blocks need the inputs of one block at a time, in order. Keeping what the block before it
put out, on the CPU, makes that one pass through the model in all, instead of one from the start for every block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.calibration.passes import batches
from requant.models.targets import find_blocks


class StopForward(Exception):
    """Raised by a hook once nothing further of a forward pass is needed."""


class HiddenStateCache:
    """One model's pass over the windows, held before block `due`."""

    def __init__(self, model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> None:
        self.model, self.windows = model, windows
        self.blocks = list(find_blocks(model)[1])
        self.due = 0
        self.states: list[Any] = []  # a batch: what block `due - 1` returned, on the CPU

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def batches(self, label: str | None = None) -> Iterator[Int64[Tensor, "c t"]]:
        return batches(self.windows, self.model, label=label)

    def run(self, index: int, tokens: Int64[Tensor, "c t"]) -> None:
        """Batch `index` from block `due` on, until a hook raises Enough; without the head, whose logits nobody reads."""
        body = getattr(self.model, self.model.base_model_prefix)
        with self._skipping(index, tokens.device):
            try:
                body(input_ids=tokens, use_cache=False)
            except StopForward:
                return

    @torch.no_grad()
    def advance_to(self, block: int) -> None:
        """Go on to before block `block`, with the weights that the model has now."""
        while self.due < block:
            following: list[Any] = []

            def keep(_module: nn.Module, _inputs: Any, output: Any, kept: list[Any] = following) -> None:
                kept.append(_moved(output, "cpu"))
                raise StopForward

            handle = self.blocks[self.due].register_forward_hook(keep)
            try:
                for index, tokens in enumerate(self.batches()):
                    self.run(index, tokens)
            finally:
                handle.remove()
            self.states, self.due = following, self.due + 1

    @contextmanager
    def _skipping(self, index: int, device: torch.device) -> Iterator[None]:
        """Blocks before the one that is due return at once what it should see."""
        passed = self.blocks[: self.due]
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
