"""What each score predicts for a matrix: its signed sum over the weights, in nats, without the scores themselves.

    gradient, marginal, pqi    sum_batches sum_k c_k <g_b(w + t_k d), d>       g_b: a batch's part of the gradient of F
    hessian                    1/2 sum_batches <(G*G)' (X*X) / tokens, d*d>    G, X as in `calibration/fisher.py`

A score takes four bytes per weight until the last batch has been seen, which for large models is twice the model. The sum
is linear in the batches, so each batch's part is multiplied by the step and added up immediately, and with several processes
none has to send gradients. Parts are float32 products added up in float64 (96 % of the terms cancel), and are themselves
added by `math.fsum`, exactly, so the result does not depend on who ran which batch.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from requant import ranks
from requant.calibration.passes import add_product, gradient_pass, output_gradient_pass
from requant.errors import NumericalError
from requant.models.targets import QuantTarget
from requant.sensitivity.path import QuantizedPath
from requant.sensitivity.pqi import NODES
from requant.sensitivity.scores import unknown_score


def score_sums(
    name: str,
    path: QuantizedPath,
    windows: Int64[Tensor, "b t"],
    *,
    nodes: str = "gauss2",
    label: str | None = None,
) -> dict[str, float]:
    """Matrix -> the sum of the scores `name` of its weights, on every rank; the model is left at the last weights
    that the score looks at: the caller writes those that it needs next.

    `nodes` matters to `pqi` alone. Raises NumericalError, RecipeError.
    """
    match name:
        case "pqi":
            parts = _along_the_line(path, windows, NODES[nodes], label)
        case "gradient":
            parts = _along_the_line(path, windows, ((0.0, 1.0),), label)
        case "marginal":
            parts = _along_the_line(path, windows, ((1.0, 1.0),), label)
        case "hessian":
            parts = _second_order(path, windows, label)
        case _:
            raise unknown_score(name)
    own = {matrix: [value.item() for value in values] for matrix, values in parts.items()}
    of_ranks = [found for found, _ in ranks.gathered(own, {})]
    sums = {matrix: math.fsum(value for found in of_ranks for value in found[matrix]) for matrix in own}
    for matrix, total in sums.items():
        if not math.isfinite(total):
            raise NumericalError(f"{matrix}: its gradients overflow; use --dtype float32 or bfloat16.")
    return sums


def _along_the_line(
    path: QuantizedPath,
    windows: Int64[Tensor, "b t"],
    nodes: tuple[tuple[float, float], ...],
    label: str | None,
) -> dict[str, list[Tensor]]:
    """`weight <g(w + t d), d>` of every batch that this rank ran, at every node."""
    parts: dict[str, list[Tensor]] = {target.name: [] for target in path.targets}
    for index, (t, weight) in enumerate(nodes):

        def add(target: QuantTarget, gradient: Float[Tensor, "n k"], weight: float = weight) -> None:
            product = path.step(target).mul_(gradient)
            parts[target.name].append(weight * product.sum(dtype=torch.float64))

        path.apply_weights(t)
        at_node = f"{label}, node {index + 1}/{len(nodes)}" if label and len(nodes) > 1 else label
        gradient_pass(path.model, windows, path.targets, add, label=at_node, to_owners=False)
    return parts


def _second_order(
    path: QuantizedPath, windows: Int64[Tensor, "b t"], label: str | None
) -> dict[str, list[Tensor]]:
    """`1/2 <F, d^2>` with what every batch that this rank ran adds to the Fisher information F."""
    parts: dict[str, list[Tensor]] = {target.name: [] for target in path.targets}

    def add(target: QuantTarget, gradient: Float[Tensor, "m n"], x: Float[Tensor, "m k"]) -> None:
        fisher = torch.zeros(target.shape, device=gradient.device)
        add_product(fisher, gradient.float().square(), x.float().square(), 1 / windows.numel())
        product = fisher.mul_(path.step(target).square_())
        parts[target.name].append(0.5 * product.sum(dtype=torch.float64))

    path.apply_weights(0.0)
    output_gradient_pass(path.model, windows, path.targets, add, inputs=True, label=label, to_owners=False)
    return parts
