"""Input statistics of linears: the layer Hessian `H = mean_t x_t x_t'` and `mean_t |x_t|`, in one forward pass.

H is the exact Hessian of the layer's squared output error `1/2 mean_t |(w~ - w) x_t|^2` in each row of w (Frantar et
al. 2022, arXiv 2210.17323, without their factor 2). Linears that read the same tensor (q, k and v; gate and up)
share one H: the first of them gathers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.calibration.passes import batches
from requant.errors import NumericalError
from requant.models import LinearSite


@dataclass(kw_only=True, slots=True)
class InputStatistics:
    """Means over tokens, float32, on the model's device."""

    hessian: Float[Tensor, "k k"]
    mean_abs: Float[Tensor, " k"]


@torch.no_grad()
def input_statistics(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    sites: Sequence[LinearSite],
    *,
    label: str | None = None,
) -> dict[str, InputStatistics]:
    """Statistics of every site's input over all tokens of `windows`; sites with one input share one object."""
    gathered: dict[str, InputStatistics] = {}
    last: tuple[Tensor, str] | None = (
        None  # the tensor read last and the site that gathers it: siblings run in a row
    )

    def hook_of(site: LinearSite):
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal last
            if last is not None and inputs[0] is last[0]:
                gathered[site.name] = gathered[last[1]]
                return
            last = (inputs[0], site.name)
            x = inputs[0].flatten(0, -2).float()
            if site.name not in gathered:
                k = x.shape[1]
                gathered[site.name] = InputStatistics(hessian=x.new_zeros(k, k), mean_abs=x.new_zeros(k))
            gathered[site.name].hessian.addmm_(x.T, x, alpha=1 / windows.numel())
            gathered[site.name].mean_abs += x.abs().sum(0) / windows.numel()

        return hook

    body = getattr(model, model.base_model_prefix)  # without the head, whose logits nobody reads here
    handles = [site.module.register_forward_pre_hook(hook_of(site)) for site in sites]
    try:
        for tokens in batches(windows, model, label=label):
            body(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for site in sites:
        if site.name not in gathered:
            raise NumericalError(
                f"{site.name} was never called on the calibration text; skip it with --skip {site.name}."
            )
        if not torch.isfinite(gathered[site.name].hessian).all():
            raise NumericalError(f"{site.name}: its inputs overflow; use --dtype float32 or bfloat16.")
    return gathered
