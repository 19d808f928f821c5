"""The values that trained tensors end at: those with the lowest KL on held-out windows, or without such windows the last."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from requant.finetune.saved_training import numbered, restore


class BestValues:
    """The best values of `tensors` so far; without `validated` the tensors themselves.

    `kl` is their mean KL on the held-out windows, in nats. Copies are kept on the device `on`, or where the tensors are.
    """

    def __init__(self, tensors: Sequence[Tensor], *, validated: bool, on: torch.device | None = None) -> None:
        self.tensors, self.on = tensors, on
        self.kl = math.inf
        self.values = self._copied() if validated else tensors

    def offer(self, kl: float) -> None:
        """Keep the present values if none had a lower KL."""
        if kl < self.kl:
            self.kl, self.values = kl, self._copied()

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs beside the tensors."""
        return {} if self.values is self.tensors else numbered("best", self.values)

    def restore(self, kl: float, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken; after the last step the tensors hold the best values themselves."""
        self.kl = kl
        if "best.0" in state:
            restore(self.values, "best", state)
        else:
            self.values = self.tensors

    @torch.no_grad()
    def apply(self) -> None:
        """Write the best values into the tensors."""
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)

    def _copied(self) -> list[Tensor]:
        return [tensor.detach().to(self.on or tensor.device, copy=True) for tensor in self.tensors]
