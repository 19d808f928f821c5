"""First-order scores: the gradient of the loss at one end of the line, times the step.

`gradient`: `g(w) d`, the first Taylor term at the original weights, the first baseline of PQI (Hu et al. 2025, arXiv
2503.01901, equation 1); its sum is close to zero because w is near a minimum.
`marginal`: `g(w~) d`, with the gradient at the quantized weights; this one is ours. It says what undoing a small part of the
step would gain, which is the question when significant weights are restored, and it ranks them better than PQI in 10 of 12
comparisons; summed over all weights it is about twice dF.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from requant import ranks
from requant.calibration.passes import gradient_pass
from requant.models.targets import QuantTarget
from requant.sensitivity.path import QuantizedPath, Scores


def gradient_score(
    path: QuantizedPath, windows: Int64[Tensor, "b t"], *, at: float, label: str | None = None
) -> Scores:
    """`g(w + at d) d` of every weight, signed, nats; the model is left at the quantized weights."""
    total = {
        target.name: torch.zeros(target.shape, device=target.device) for target in ranks.owned(path.targets)
    }

    def accumulate(target: QuantTarget, gradient: Float[Tensor, "n k"]) -> None:
        total[target.name].add_(gradient)

    with path.at(at):
        gradient_pass(path.model, windows, path.targets, accumulate, label=label)
    return {target.name: total[target.name].mul_(path.step(target)) for target in ranks.owned(path.targets)}
