"""A 2:4 matrix of 16-bit values, served by dense products and, where they are faster, by sparse ones.

    y = x w~' + bias      m tokens: dense below a number that a table gives, by cuSPARSELt from there on

The matrix is held dense, which few tokens need, and also compressed if sparse products are ever faster for its shape: 25
bits per weight instead of 16. Which of the two multiplies depends on the shape of x alone, so a CUDA graph or a compiled
step holds one of them.
"""

import logging

import torch
import torch.nn.functional as F
from jaxtyping import Float
from requant_kernels.sparsity import products
from torch import Tensor, nn

from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.semi_structured import FLOAT16_BITS, SemiStructured
from requant.inference.kernel_check import KernelCheck
from requant.inference.quant_linear import refuse_to_save

logger = logging.getLogger(__name__)


class SemiStructuredLinear(nn.Module):
    """`weight` is [n, k]; without `algorithms` every product is dense."""

    weight: Tensor
    compressed: Tensor | None

    def __init__(
        self, weight: Float[Tensor, "n k"], bias: Tensor | None = None, algorithms: products.Algorithms = ()
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.algorithms = weight.dtype, algorithms
        # as integers, which casts of a module leave alone: values and metadata are one tensor
        compressed = products.compress(weight).view(torch.int16) if algorithms else None
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("compressed", compressed, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        flat = x.reshape(-1, self.in_features)
        algorithm = products.algorithm_for(flat.shape[0], self.algorithms)
        if algorithm is None or self.compressed is None or x.dtype != self.dtype:
            return F.linear(x, self.weight, self.bias)
        y = products.semi_structured_linear(flat, self.compressed.view(self.dtype), self.bias, algorithm)
        return y.view(*x.shape[:-1], self.out_features)

    _save_to_state_dict = refuse_to_save

    def extra_repr(self) -> str:
        first = self.algorithms[0][0] if self.algorithms else None
        return f"in_features={self.in_features}, out_features={self.out_features}, sparse_from_tokens={first}"


def has_sparse_products(weight: QuantizedWeight) -> bool:
    """Whether a matrix is 2:4 with values of 16 bits."""
    dense = weight.dense
    return isinstance(dense, SemiStructured) and dense.bits == FLOAT16_BITS and weight.sparse is None


def semi_structured_linear(
    weight: QuantizedWeight, check: KernelCheck, bias: Tensor | None = None
) -> SemiStructuredLinear:
    """The layer of a matrix on its device, its sparse products checked there; dense alone, and logged, if they are wrong."""
    floats = weight.dequantize().to(check.dtype)
    n, k = floats.shape
    if products.supports(n, k, floats.dtype, floats.device):
        algorithms = products.algorithms(n, k, torch.cuda.get_device_name(floats.device))
        if algorithms:
            layer = SemiStructuredLinear(floats, None, algorithms)
            tokens = [
                count for first, _ in algorithms for count in (first, first + 3)
            ]  # of which one is padded
            try:
                check.once((SemiStructuredLinear, n, k, algorithms), layer, weight, tokens)
            except ValueError as error:
                logger.warning("2:4 products are dense ones on this machine: %s", error)
            else:
                layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
                return layer
    return SemiStructuredLinear(floats, bias)
