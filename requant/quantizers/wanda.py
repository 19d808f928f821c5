"""2:4 by Wanda's score: magnitude times the norm of the input.

    score[i, j] = |w[i, j]| sqrt(H[j, j])        H = mean_t x_t x_t'

Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (2023, arXiv 2306.11695). The two largest of
four stay as they are.
"""

from jaxtyping import Float
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.quantized_weight import QuantizedWeight
from requant.quantizers.checks import check_weight, statistic
from requant.quantizers.correction import corrected
from requant.quantizers.method import PruningMethod
from requant.quantizers.semi_structured import SemiStructuredConfig, on_mask, packed_spec
from requant.sparsity.masks import keep2


def quantize(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: SemiStructuredConfig
) -> QuantizedWeight:
    """Raises InputError without `stats.hessian`, NumericalError if it or the weight is not finite."""
    check_weight(weight)
    k = weight.shape[1]
    hessian = statistic(stats.hessian, "hessian", (k, k))
    target = corrected(weight, stats)
    return on_mask(target, keep2(target.abs() * hessian.diagonal().clamp(min=0).sqrt()), config)


METHOD = PruningMethod(
    summary="the two largest of four by magnitude times input norm (Wanda)",
    config=SemiStructuredConfig,
    quantize=quantize,
    packed_spec=packed_spec,
    needs=frozenset({"hessian"}),
    seconds_per_weight={"cpu": 5e-8, "cuda": 1e-9},
)
