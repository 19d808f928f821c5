"""One score a weight: what the step from `w` to `w~` does to the loss, `d = w~ - w`, in nats.

| name | formula | backward passes | sum over the model |
| --- | --- | --- | --- |
| `gradient` | `g(w) d` | 1 | first-order Taylor |
| `hessian` | `1/2 F d^2`, F by position | 1 | second-order, diagonal |
| `pqi` | `d * integral_0^1 g(w + t d) dt` | nodes | the true dF |
| `marginal` | `g(w~) d` | 1 | none: the slope at the end of the path |

All are signed; `|score|` ranks weights, signed sums over a row, a matrix or a block predict dF. 96 % of the mass of
`|pqi|` cancels in the sum, so `|pqi|` is no share of the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.formats.containers import QuantizedWeight
from requant.models.targets import QuantTarget

Scores = dict[str, Float[Tensor, "n k"]]


@dataclass(frozen=True, kw_only=True)
class QuantizedPath:
    """The straight line from the original weights (t = 0) to the quantized ones (t = 1).

    Holds the originals in the model's own dtype on the CPU and the quantized weights as codes; `place(t)` writes the
    weights of one point of the line into the model, matrix by matrix, so no second model in floats exists.
    """

    model: PreTrainedModel
    targets: Sequence[QuantTarget]
    original: Mapping[str, Tensor]
    quantized: Mapping[str, QuantizedWeight]
    finetuned_params: Mapping[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # parameters that learned: w, w~

    def start(self, target: QuantTarget) -> Float[Tensor, "n k"]:
        """w, float32."""
        return self.original[target.name].to(target.parameter.device, non_blocking=True).float()

    def step(self, target: QuantTarget) -> Float[Tensor, "n k"]:
        """d = w~ - w, float32."""
        return self.quantized[target.name].dequantize() - self.start(target)

    def point(self, target: QuantTarget, t: float) -> Float[Tensor, "n k"]:
        """w + t d, float32; exactly w~ at t = 1, where the sum would round."""
        if t == 1:
            return self.quantized[target.name].dequantize()
        return self.start(target) if t == 0 else self.start(target) + t * self.step(target)

    @torch.no_grad()
    def place(self, t: float) -> None:
        """Write w + t d into every matrix of the model, and into what learned beside them."""
        for target in self.targets:
            target.set_weight(self.point(target, t))
        for parameter, start, end in self.moved():
            parameter.copy_(start if t == 0 else end if t == 1 else start.float().lerp(end.float(), t))

    def moved(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """The parameters outside of the matrices that move along the line, with both ends."""
        for name, (start, end) in self.finetuned_params.items():
            yield self.model.get_parameter(name), start, end

    @contextmanager
    def at(self, t: float):
        """The model at t; back at the quantized weights afterwards."""
        self.place(t)
        try:
            yield
        finally:
            self.place(1.0)


def originals(targets: Sequence[QuantTarget]) -> dict[str, Tensor]:
    """A copy of every weight, [n, k], in its own dtype, on the CPU; page-locked for a GPU, which reads it often."""
    copies = {s.name: s.oriented(s.parameter.detach()).to("cpu", copy=True).contiguous() for s in targets}
    if targets and targets[0].parameter.is_cuda:
        return {name: copy.pin_memory() for name, copy in copies.items()}
    return copies


def signed_sum(score: Float[Tensor, "n k"]) -> float:
    """Sum in float64: 96 % of the terms cancel."""
    return score.double().sum().item()
