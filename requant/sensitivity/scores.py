"""The scores by the names that recipes and the command line use; `path.py` has the table of their formulas."""

from jaxtyping import Int64
from torch import Tensor

from requant.errors import NumericalError, RecipeError
from requant.sensitivity.gradient import gradient_score
from requant.sensitivity.hessian_diagonal import hessian_diagonal
from requant.sensitivity.path import QuantizedPath, Scores
from requant.sensitivity.pqi import pqi


def score_weights(
    name: str,
    path: QuantizedPath,
    windows: Int64[Tensor, "b t"],
    *,
    nodes: str = "gauss2",
    label: str | None = None,
) -> Scores:
    """The score `name` of every weight of this rank's matrices, signed, nats; `nodes` matters to `pqi` alone.

    Raises NumericalError.
    """
    match name:
        case "pqi":
            scores = pqi(path, windows, nodes=nodes, label=label)
        case "hessian":
            scores = hessian_diagonal(path, windows, label=label)
        case "gradient":
            scores = gradient_score(path, windows, at=0.0, label=label)
        case "marginal":
            scores = gradient_score(path, windows, at=1.0, label=label)
        case _:
            raise unknown_score(name)
    for matrix, values in scores.items():
        if not values.isfinite().all():
            raise NumericalError(f"{matrix}: its gradients overflow; use --dtype float32 or bfloat16.")
    return scores


def unknown_score(name: str) -> RecipeError:
    """The error for a name that is not a score, with those there are."""
    return RecipeError(f"score '{name}' is unknown; there are: pqi, hessian, gradient, marginal.")
