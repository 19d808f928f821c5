"""The diagonal of the Fisher information of every weight, by position, in one backward pass.

    F_ij = mean_t (g_ti x_tj)^2 = [ (G*G)' (X*X) ]_ij / tokens

where row t of X is the linear's input and row t of G the gradient of the text's summed loss at its output. That is the
square of each *position's* contribution, summed, which a matrix product gives without a loop over tokens. The square
of the gradient of a sequence-mean loss, which the literature often calls Fisher, is smaller by about the number of
tokens: the reason why second-order estimates looked orders of magnitude too small (`../shared/method.md`, section 1).
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from requant.calibration.passes import batches, recomputed_blocks, summed_loss
from requant.errors import NumericalError
from requant.models import LinearSite


def position_fisher(
    model: nn.Module,
    windows: Int64[Tensor, "b t"],
    sites: Sequence[LinearSite],
    *,
    label: str | None = None,
    recompute: bool | None = None,
) -> dict[str, Float[Tensor, "n k"]]:
    """F of every site, float32, on the model's device."""
    fisher = {site.name: torch.zeros(site.shape, device=site.parameter.device) for site in sites}

    def hook_of(site: LinearSite):
        def fold(x: Tensor, gradient: Tensor) -> None:
            g2, x2 = gradient.flatten(0, -2).float().square(), x.flatten(0, -2).float().square()
            fisher[site.name].addmm_(g2.T, x2, alpha=1 / windows.numel())

        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:  # not in the graph-less first pass of a recomputed block
                x = inputs[0].detach()
                output.register_hook(lambda gradient: fold(x, gradient))

        return hook

    with ExitStack() as stack:
        for site in sites:
            stack.callback(site.module.register_forward_hook(hook_of(site)).remove)
        stack.enter_context(recomputed_blocks(model, recompute))
        for tokens in batches(windows, model, label=label):
            summed_loss(model, tokens).backward()
    for name, values in fisher.items():
        if not torch.isfinite(values).all():
            raise NumericalError(f"{name}: its gradients overflow; use --dtype float32 or bfloat16.")
    return fisher
