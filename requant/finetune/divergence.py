"""How far a model's outputs and last hidden states are from the original's: the terms of the loss of training.

    KL = sum_t sum_v p_v (log p_v - log q_v)        p of the original, q of the model

On a GPU a kernel computes the divergence with its gradient from the logits as they are
(`requant_kernels/training/divergence.py`): of 16384 tokens of a vocabulary of 128256, torch would store 8 GB of logarithms
for each model. Where the kernel is not used the formula is computed for a few positions at a time, and once more in the
backward pass, because training plans its memory (`memory.py`) by the kernel's.
"""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from requant.kernel_choice import usable_kernel

Divergence = Callable[[Tensor, Tensor], Tensor]
LOGITS_AT_ONCE = 2**26  # of each model: 0.8 GB of logarithms and gradients in float32
LEAST_MEAN_SQUARE = 1e-8  # of a hidden state that is not zero; norms leave them about 1
TOLERANCE = 1e-2  # of a gradient that is rounded to 16 bits, relative to its largest element


def kl(found: Float[Tensor, "*b v"], expected: Float[Tensor, "*b v"]) -> Float[Tensor, ""]:
    """Sum over positions of KL(expected || found) of two models' logits, nats, float32; differentiable in `found`."""
    if not found.is_cuda:
        return _formula(found, expected)
    return _chosen(found.device, found.dtype, expected.dtype)(found, expected)


def hidden_error(found: Float[Tensor, "*b d"], expected: Float[Tensor, "*b d"]) -> Float[Tensor, ""]:
    """Sum over positions of ||found - expected||^2 / ||expected||^2 of two models' hidden states, in float32.

    A state of zeros has no relative error, and takes no part: that of a token with a row of zeros at the start of a text.
    """
    expected = expected.float()
    sizes, least = expected.square().sum(-1), LEAST_MEAN_SQUARE * expected.shape[-1]
    errors = (found.float() - expected).square().sum(-1) / sizes.clamp(min=least)
    return torch.where(sizes > least, errors, 0.0).sum()


def _formula(found: Tensor, expected: Tensor) -> Tensor:
    q, p = found.float().log_softmax(-1), expected.float().log_softmax(-1)
    return functional.kl_div(q, p, reduction="sum", log_target=True)


def _in_parts(found: Tensor, expected: Tensor) -> Tensor:
    """`_formula`, with the logarithms of LOGITS_AT_ONCE logits in memory."""
    rows = max(1, LOGITS_AT_ONCE // found.shape[-1])
    parts = zip(found.flatten(0, -2).split(rows), expected.flatten(0, -2).split(rows), strict=True)
    each = [checkpoint(_formula, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(each).sum()


@cache
def _chosen(device: torch.device, found: torch.dtype, expected: torch.dtype) -> Divergence:
    """The kernel, if it agrees with the formula on this device; else the formula, in parts."""
    generator = torch.Generator().manual_seed(0)
    logits = [
        (4 * torch.randn(3, 5000, generator=generator)).to(device, dtype) for dtype in (found, expected)
    ]

    def value_and_gradient(function: Divergence) -> list[Tensor]:
        with torch.enable_grad():
            leaf = logits[0].detach().requires_grad_()
            value = function(leaf, logits[1])
            (value / 3).backward()
        assert leaf.grad is not None
        return [value.detach().double(), leaf.grad.double()]

    def load() -> Divergence:
        from requant_kernels.training.divergence import kl_divergence

        return kl_divergence

    def agrees(kernel: Divergence) -> bool:
        pairs = zip(value_and_gradient(kernel), value_and_gradient(_formula), strict=True)
        return all((own - torchs).abs().max() <= TOLERANCE * torchs.abs().max() for own, torchs in pairs)

    return usable_kernel("divergence", device, load, agrees) or _in_parts
