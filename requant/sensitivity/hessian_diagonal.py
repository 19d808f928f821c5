"""Second-order score on the diagonal: `1/2 F_j d_j^2`, with F the Fisher information by position.

The second Taylor term with a diagonal Hessian: the saliency of Optimal Brain Damage (LeCun, Denker and Solla 1990), and the
second baseline of PQI (Hu et al. 2025, arXiv 2503.01901, equation 1). Near a minimum the Fisher information equals the
Hessian of the loss in expectation. Taken by position (`calibration/fisher.py`) its sum explains 64 to 97 % of dF; the usual
version, the square of sequence-mean gradients, is smaller by the number of tokens in a sequence.
"""

from jaxtyping import Int64
from torch import Tensor

from requant import ranks
from requant.calibration.fisher import position_fisher
from requant.sensitivity.path import QuantizedPath, Scores


def hessian_diagonal(
    path: QuantizedPath, windows: Int64[Tensor, "b t"], *, label: str | None = None
) -> Scores:
    """`1/2 F d^2` of every weight, never negative, nats; the model is left at the quantized weights."""
    with path.at(0.0):
        fisher = position_fisher(path.model, windows, path.targets, label=label)
    return {
        target.name: fisher[target.name].mul_(path.step(target).square_()).mul_(0.5)
        for target in ranks.owned(path.targets)
    }
