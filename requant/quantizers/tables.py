"""The coding of an embedding or a head: its bits, what it stores, its codes, and the loss that they are expected to cost.

An embedding's rows are looked up one by one and belong to tokens that range from common to absent, so it is coded
differently from a linear layer: a use u (`Curvature`) weights row i by r_ui, and all rows share the covariance C_u,

    loss(E)  ~  1/2 sum_u sum_i r_ui E_i C_u E_i'
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from requant.calibration.stats import Curvature
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight
from requant.quantizers.method import Bits, Losses

Uses = Sequence[Curvature]  # one, or of a tied pair that of the embedding and that of the head


@dataclass(frozen=True, kw_only=True)
class TableMethod:
    """One way to code a table `[V, d]`."""

    name: str
    bits: tuple[Bits, ...]
    """Of a code, ascending."""
    packed_spec: Callable[[tuple[int, int], Bits], PackedSpec]
    """The most that is stored for a shape, which is what a budget counts with; fine-tuning adds nothing."""
    quantize: Callable[[Float[Tensor, "v d"], Uses, Bits], QuantizedWeight]
    """Every rank of a run calls it, and may do a part of the work."""
    predicted_losses: Callable[[Float[Tensor, "v d"], Uses, Sequence[Bits]], Losses]
    """In nats per token, for codes alone."""
    seconds_per_weight: Mapping[str, float]
    """By device type, of one thread on a CPU."""
