"""Statistics of a linear layer, gathered by running calibration text through the model.

| field | formula | shape | pass |
| --- | --- | --- | --- |
| `hessian` | `H = mean_t x_t x_t'`, the mean over tokens | [k, k] | forward |
| `cross_hessian` | `C = mean_t z_t x_t'`, z the original model's input, x the quantized one's | [k, k] | forward |
| `output_hessian` | `G = mean_t g_t g_t'`, g the gradient of the loss of sampled tokens at the output | [n, n] | backward |
| `input_mean_abs` | `mean_t |x_t|` | [k] | forward |
| `fisher` | `F = mean_t g_t^2 x_t'^2`, g the gradient of the text's summed loss at the output | [n, k] | backward |

All are float32, and sums run in the order of the text.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

# fields that one forward pass collects; the others take a backward pass each
INPUT_STATISTICS = frozenset({"hessian", "input_mean_abs"})
GRADIENT_STATISTICS = frozenset({"fisher", "output_hessian"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearStats:
    """What a quantizer may use besides a linear's weight; a field that was not asked for is None."""

    hessian: Float[Tensor, "k k"] | None = None
    cross_hessian: Float[Tensor, "k k"] | None = None
    input_mean_abs: Float[Tensor, " k"] | None = None
    fisher: Float[Tensor, "n k"] | None = None
    output_hessian: Float[Tensor, "n n"] | None = None
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Curvature:
    """The curvature of one use of an embedding or head, as table of inputs or as matrix of the logits: an error E in its
    rows costs `1/2 sum_i r_i E_i C E_i'`."""

    rows: Float[Tensor, " v"]
    covariance: Float[Tensor, "d d"]

    @property
    def columns(self) -> Float[Tensor, " d"]:
        """The diagonal of C."""
        return self.covariance.diagonal()
