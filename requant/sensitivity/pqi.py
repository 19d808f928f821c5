"""Post-quantization integral (PQI): the exact change of the loss, split over the weights.

Along the line from w to w~, with d = w~ - w and g the gradient of the loss F, the gradient theorem gives

    F(w~) - F(w) = integral_0^1 d . g(w + t d) dt  ~=  sum_j d_j sum_k c_k g_j(w + t_k d)

with nodes t_k and weights c_k. The j-th term is the score of weight j (Hu et al. 2025, arXiv 2503.01901, "Identifying
Sensitive Weights via Post-quantization Integral"). The paper averages 32 equally spaced nodes, both ends included
(`plain32`). We default to Gauss-Legendre with two nodes: exact where the loss along the line is a polynomial of degree
4, a smaller error than 32 plain nodes at 3 and 4 bits, at a sixteenth of the cost; use `gauss4` for 2 bits, where dF
exceeds half a nat.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from requant import ranks
from requant.calibration.passes import gradient_pass
from requant.models.targets import QuantTarget
from requant.sensitivity.path import QuantizedPath, Scores

NODES: dict[str, tuple[tuple[float, float], ...]] = {  # name -> (t, weight), the weights add up to 1
    "midpoint": ((0.5, 1.0),),
    "gauss2": ((0.21132486540518713, 0.5), (0.7886751345948129, 0.5)),
    "gauss4": (
        (0.06943184420297371, 0.17392742256872692),
        (0.33000947820757187, 0.32607257743127307),
        (0.6699905217924281, 0.32607257743127307),
        (0.9305681557970262, 0.17392742256872692),
    ),
    "simpson": ((0.0, 1 / 12), (0.25, 1 / 3), (0.5, 1 / 6), (0.75, 1 / 3), (1.0, 1 / 12)),
    "plain32": tuple((i / 31, 1 / 32) for i in range(32)),
}


def pqi(
    path: QuantizedPath, windows: Int64[Tensor, "b t"], *, nodes: str = "gauss2", label: str | None = None
) -> Scores:
    """PQI of every weight, signed, nats; the model is left at the quantized weights.

    Each gradient is added to its float32 accumulator as it arrives, and freed. Peak memory: the model, its originals on
    the CPU, and one float32 a weight.
    """
    mean_gradient = {
        target.name: torch.zeros(target.shape, device=target.device) for target in ranks.owned(path.targets)
    }
    try:
        for index, (t, weight) in enumerate(NODES[nodes]):

            def accumulate(
                target: QuantTarget, gradient: Float[Tensor, "n k"], weight: float = weight
            ) -> None:
                mean_gradient[target.name].add_(gradient, alpha=weight)

            path.apply_weights(t)
            name = None if label is None else f"{label}, node {index + 1}/{len(NODES[nodes])}"
            gradient_pass(path.model, windows, path.targets, accumulate, label=name)
    finally:
        path.apply_weights(1.0)
    return {
        target.name: mean_gradient[target.name].mul_(path.step(target))
        for target in ranks.owned(path.targets)
    }


def pqi_of_finetuned_params(
    path: QuantizedPath, windows: Int64[Tensor, "b t"], *, nodes: str = "gauss2"
) -> float:
    """The same integral over the parameters without codes that finetuning changed: their part of dF, nats.

    The model is left at the last node.
    """
    finetuned = list(path.finetuned())
    total = 0.0
    try:
        for parameter, _, _ in finetuned:
            parameter.requires_grad_(True)
        for t, weight in NODES[nodes]:
            path.apply_weights(t)
            gradient_pass(path.model, windows, (), lambda _target, _gradient: None, split=False)
            for parameter, start, end in finetuned:
                if parameter.grad is not None:
                    step = (end.float() - start.float()).to(parameter.device)
                    total += weight * (parameter.grad.float() * step).double().sum().item()
                parameter.grad = None
    finally:
        for parameter, _, _ in finetuned:
            parameter.requires_grad_(False)
            parameter.grad = None
    return total
