"""The Cholesky factor of a Hessian, damped as far as it needs to be: where rounding with feedback (GPTQ, LDLQ) begins.

    C C' = H + d I, with d = damp mean(diag H)

The sum over few tokens is not positive definite, and rounding may leave it so over many. The literature takes one `damp`
(0.01: Frantar et al. 2022, "GPTQ", arXiv 2210.17323); here it grows tenfold, with a warning, until the factor exists.
"""

import logging

import torch
from jaxtyping import Float
from torch import Tensor

from requant.errors import NumericalError

MAX_DAMP = 1.0

logger = logging.getLogger(__name__)


def mean_diagonal(hessian: Float[Tensor, "k k"]) -> Float[Tensor, ""]:
    """The unit of every damping; 1 for an H of zeros, of which no input was ever seen."""
    mean = hessian.diagonal().mean()
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def damped_cholesky(
    hessian: Float[Tensor, "k k"], damp: float, *, backward: bool = False
) -> tuple[Float[Tensor, "k k"], Float[Tensor, ""]]:
    """Lower triangular C, and d; `backward`: of H with its rows and columns in reverse order.

    Raises NumericalError if H + d I is not positive definite at the last `damp` up to MAX_DAMP.
    """
    mean = mean_diagonal(hessian)
    while damp <= MAX_DAMP:
        damped = hessian.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1) if backward else damped)
        if not failed:
            return lower, damp * mean
        logger.warning("A Hessian is not positive definite at damp %g: trying %g.", damp, 10 * damp)
        damp *= 10
    raise NumericalError(
        f"A Hessian is not positive definite even at damp {damp / 10:g}: calibrate with more tokens (--num-samples) or in "
        "float32 (--dtype float32)."
    )
