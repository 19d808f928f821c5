import torch
from jaxtyping import Float
from torch import Tensor, nn

from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.inference.quant_linear import QuantLinear


def quant_linear(
    weight: QuantizedWeight,
    bias: Float[Tensor, " n"] | None = None,
    *,
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> QuantLinear:
    """The layer of a matrix, as it is after its checkpoint was loaded."""
    spec, tensors = pack(weight)
    layer = QuantLinear(spec, bias=False, transposed=transposed)
    for suffix, tensor in tensors.items():
        layer.register_buffer(suffix, tensor)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype or bias.dtype), requires_grad=False)
    return layer
