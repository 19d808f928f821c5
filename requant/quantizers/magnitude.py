"""2:4 by magnitude: of every four weights the two largest stay as they are. No calibration.

    score[i, j] = |w[i, j]|

Mishra et al., "Accelerating Sparse Deep Neural Networks" (2021, arXiv 2104.08378), who train the kept weights again.
"""

from jaxtyping import Float
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.formats.quantized_weight import QuantizedWeight
from requant.quantizers.checks import check_weight
from requant.quantizers.method import PruningMethod
from requant.quantizers.semi_structured import SemiStructuredConfig, on_mask, packed_spec
from requant.sparsity.masks import keep2


def quantize(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: SemiStructuredConfig
) -> QuantizedWeight:
    """`stats` is not read. Raises NumericalError if a weight is not finite."""
    check_weight(weight)
    return on_mask(weight, keep2(weight.abs()), config)


METHOD = PruningMethod(
    summary="the two largest of four; no calibration",
    config=SemiStructuredConfig,
    quantize=quantize,
    packed_spec=packed_spec,
    seconds_per_weight={"cpu": 5e-8, "cuda": 1e-9},
)
