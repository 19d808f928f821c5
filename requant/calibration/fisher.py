"""The diagonal of the Fisher information of every weight, by position, in one backward pass.

    F_ij = mean_t (g_ti x_tj)^2 = [ (G*G)' (X*X) ]_ij / tokens

where row t of X is the linear's input and row t of G the gradient of the text's summed loss at its output. It is the mean
square of each *position's* contribution, which a matrix product gives without a loop over tokens. The square of the
gradient of a sequence's mean loss, which the literature often calls Fisher, is smaller by about the number of tokens:
the reason why published second-order estimates look orders of magnitude too small.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.block_by_block import Descent
from requant.calibration.passes import add_product, finite, output_gradient_pass
from requant.models.targets import QuantTarget


def position_fisher(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    *,
    label: str | None = None,
    descent: Descent | None = None,
) -> dict[str, Float[Tensor, "n k"]]:
    """F of every target that this rank owns, float32, on the model's device."""
    fisher = {target.name: torch.zeros(target.shape, device=target.device) for target in ranks.owned(targets)}

    def accumulate(target: QuantTarget, gradient: Float[Tensor, "m n"], x: Float[Tensor, "m k"]) -> None:
        squares = gradient.float().square(), x.float().square()
        add_product(fisher[target.name], *squares, 1 / windows.numel())

    output_gradient_pass(model, windows, targets, accumulate, inputs=True, label=label, descent=descent)
    return finite(fisher)
