"""The covariance of the loss's gradients at a linear's output: what errors in single outputs and in pairs of them cost.

    G = mean_t g_t g_t'

where g_t is the gradient of the summed loss at the linear's output for token t. With the inputs' H = mean_t x_t x_t', the
Kronecker product of G and H approximates the curvature of the loss in the weight (Tseng et al. 2025, "YAQA", arXiv
2505.22988, their first sketch): an error E costs about tr(G E H E') / 2 per token. The loss is that of next tokens sampled
from the model itself, whose gradients give the Fisher matrix, the curvature of the KL divergence. With the text's own next
tokens instead, codes have 1 to 2.5 % more KL on one text and the same on another (eval/LOG.md).
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.block_by_block import Descent
from requant.calibration.gram import add_gram, fill_lower_half
from requant.calibration.passes import finite, output_gradient_pass, tensor_cores
from requant.models.targets import QuantTarget

SEED = 0  # of the sampled tokens: the same text gives the same G


def output_hessians(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    targets: Sequence[QuantTarget],
    *,
    label: str | None = None,
    descent: Descent | None = None,
    after_each: Callable[[], None] | None = None,
) -> dict[str, Float[Tensor, "n n"]]:
    """G of every target that this rank owns, float32, on the model's device; `after_each` is called after every batch."""
    totals = {
        target.name: torch.zeros(target.shape[0], target.shape[0], device=target.device)
        for target in ranks.owned(targets)
    }

    def accumulate(target: QuantTarget, gradient: Float[Tensor, "m n"]) -> None:
        add_gram(totals[target.name], gradient, 1 / windows.numel())

    with tensor_cores(next(model.parameters()).device):
        output_gradient_pass(
            model,
            windows,
            targets,
            accumulate,
            seed=SEED,
            label=label,
            descent=descent,
            after_each=after_each,
        )
    for total in totals.values():
        fill_lower_half(total)
    return finite(totals)
