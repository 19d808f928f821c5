"""The covariance of the loss's gradients at a linear's output: how much an error there costs, and with which others.

    G = mean_t g_t g_t'

where g_t is the gradient of the text's summed loss at the output for token t. With the inputs' H = mean_t x_t x_t', the
Kronecker product of G and H approximates the curvature of the loss in the weight (Tseng et al. 2025, "YAQA", arXiv
2505.22988, their first sketch): an error E costs about tr(G E H E') / 2 a token. The text's own next tokens stand in for
samples of the model's: no difference was measured.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from requant.calibration.passes import batches, recomputed_blocks, summed_loss
from requant.errors import NumericalError
from requant.models import LinearSite


def output_hessians(
    model: nn.Module,
    windows: Int64[Tensor, "b t"],
    sites: Sequence[LinearSite],
    *,
    label: str | None = None,
    recompute: bool | None = None,
) -> dict[str, Float[Tensor, "n n"]]:
    """G of every site, float32, on the model's device."""
    totals = {
        site.name: torch.zeros(site.shape[0], site.shape[0], device=site.parameter.device) for site in sites
    }

    def hook_of(site: LinearSite):
        def fold(gradient: Tensor) -> None:
            rows = gradient.flatten(0, -2).float()
            totals[site.name].addmm_(rows.T, rows, alpha=1 / windows.numel())

        def hook(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:  # not in the graph-less first pass of a recomputed block
                output.register_hook(fold)

        return hook

    with ExitStack() as stack:
        for site in sites:
            stack.callback(site.module.register_forward_hook(hook_of(site)).remove)
        stack.enter_context(recomputed_blocks(model, recompute))
        for tokens in batches(windows, model, label=label):
            summed_loss(model, tokens).backward()
    for name, total in totals.items():
        if not torch.isfinite(total).all():
            raise NumericalError(f"{name}: its gradients overflow; use --dtype float32 or bfloat16.")
    return totals
