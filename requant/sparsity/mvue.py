"""Random 2:4 pruning of a gradient that keeps its mean: the approximate minimum-variance unbiased estimator (MVUE).

Of every four values two are drawn without replacement, each time with probability proportional to
`a = |x| + epsilon max |x|`. With `t = a / sum a` value i is drawn with probability

    p_i = t_i + sum_{j != i} t_j t_i / (1 - t_j)

and a drawn value becomes x_i / p_i, so the mean of the result is x. Chmiel et al., "Minimum Variance Unbiased N:M Sparsity
for the Neural Gradients" (2022, arXiv 2203.10991), as 2404.01847 and S-STE use it for `dW = prune(dZ') X`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from requant.sparsity.masks import groups_of_four, keep2

EPSILON = torch.finfo(torch.float32).eps  # every value can be drawn


def inclusion_probabilities(values: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
    """The probability with which each value is one of the two drawn of its group; they sum to 2."""
    grouped = groups_of_four(values).float().abs()
    shares = _shares(grouped)
    odds = shares / (1 - shares)  # of a first draw, over what is left for the second
    return (shares * (1 + odds.sum(-1, keepdim=True) - odds)).flatten(-2)


def prune_unbiased(values: Float[Tensor, "... k"], generator: torch.Generator | None = None) -> Tensor:
    """At most two non-zeros of every four, in the dtype of `values`; the mean over draws is `values`."""
    shares = _shares(groups_of_four(values).float().abs())
    noise = torch.empty_like(shares).exponential_(generator=generator)
    # the two smallest of independent exponential times with these rates are such a draw without replacement
    drawn = keep2((-noise / shares).flatten(-2))
    return torch.where(drawn, values.float() / inclusion_probabilities(values), 0.0).to(values.dtype)


def _shares(grouped: Float[Tensor, "... 4"]) -> Float[Tensor, "... 4"]:
    """t, where the largest share leaves something to the others; relative to the group, so that tiny gradients count."""
    largest = grouped.amax(-1, keepdim=True)
    scaled = torch.where(largest > 0, grouped / largest, 1.0) + EPSILON
    return scaled / scaled.sum(-1, keepdim=True)
