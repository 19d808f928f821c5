"""The line from the original weights w to the quantized ones w~, which every score integrates or differentiates along.

A score of a weight says, in nats, what its step `d = w~ - w` does to the loss F:

| name | formula | backward passes | its sum over the model predicts |
| --- | --- | --- | --- |
| `gradient` | `g(w) d` | 1 | dF to first order |
| `hessian` | `1/2 F_jj d^2`, F_jj the Fisher information by position | 1 | dF to second order, diagonal only |
| `pqi` | `d * integral_0^1 g(w + t d) dt` | one a node | dF |
| `marginal` | `g(w~) d` | 1 | nothing: the slope at the end of the line |

All are signed; `|score|` ranks weights, signed sums over a row, a matrix or a block predict dF = F(w~) - F(w). 96 % of
the mass of `|pqi|` cancels in the sum, so a weight's `|pqi|` is not its share of the loss. With several processes each
holds the scores of the matrices that it owns.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.formats.quantized_weight import QuantizedWeight
from requant.models.targets import QuantTarget

Scores = dict[str, Float[Tensor, "n k"]]


@dataclass(frozen=True, kw_only=True)
class QuantizedPath:
    """The straight line from the original weights (t = 0) to the quantized ones (t = 1).

    Holds the originals in the model's own dtype on the CPU and the quantized weights as codes. `apply_weights(t)`
    writes the weights at one point of the line into the model, matrix by matrix, so there is never a second model in
    floats; a hosted matrix is computed when its block comes to the GPU.
    """

    model: PreTrainedModel
    targets: Sequence[QuantTarget]
    original: Mapping[str, Tensor]
    quantized: Mapping[str, QuantizedWeight]
    # name -> (w, w~) of the parameters without codes that finetuning changed
    finetuned_params: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def start(self, target: QuantTarget) -> Float[Tensor, "n k"]:
        """w, float32."""
        return self.original[target.name].to(target.device, non_blocking=True).float()

    def end(self, target: QuantTarget) -> Float[Tensor, "n k"]:
        """w~, float32."""
        codes = self.quantized[target.name]
        return (codes if target.hosted is None else codes.to(target.device)).dequantize()

    def step(self, target: QuantTarget) -> Float[Tensor, "n k"]:
        """d = w~ - w, float32."""
        return self.end(target) - self.start(target)

    def point(self, target: QuantTarget, t: float) -> Float[Tensor, "n k"]:
        """w + t d, float32; exactly w~ at t = 1, where the sum would round."""
        if t == 1:
            return self.end(target)
        return self.start(target) if t == 0 else self.start(target) + t * self.step(target)

    @torch.no_grad()
    def apply_weights(self, t: float) -> None:
        """Write w + t d into every matrix of the model and into the finetuned parameters; 0: original, 1: quantized."""
        for target in self.targets:
            target.set_weight(self.original[target.name] if t == 0 else partial(self.point, target, t))
        self.apply_finetuned_params(t)

    @torch.no_grad()
    def apply_finetuned_params(self, t: float) -> None:
        """The latter alone."""
        for parameter, start, end in self.finetuned():
            parameter.copy_(start if t == 0 else end if t == 1 else start.float().lerp(end.float(), t))

    def finetuned(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """The parameters without codes that change along the line, with their values at both ends."""
        for name, (start, end) in self.finetuned_params.items():
            yield self.model.get_parameter(name), start, end

    @contextmanager
    def at(self, t: float):
        """The model with the weights at t; the quantized weights afterwards."""
        self.apply_weights(t)
        try:
            yield
        finally:
            self.apply_weights(1.0)


def originals(targets: Sequence[QuantTarget]) -> dict[str, Tensor]:
    """A copy of every weight, [n, k], in its own dtype, on the CPU; pinned where the model is on a GPU, and of a hosted
    matrix no copy."""

    def copied(weight: Tensor) -> Tensor:
        return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda).copy_(weight)

    return {
        target.name: copied(target.oriented(target.parameter.detach()))
        if target.hosted is None
        else target.hosted.original
        for target in targets
    }


def signed_sum(score: Float[Tensor, "n k"]) -> float:
    """Sum in float64: 96 % of the terms cancel."""
    return score.double().sum().item()
