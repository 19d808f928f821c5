"""`QuantLinear`: a linear layer whose buffers are the tensors of the checkpoint, and whose floats are
computed.

    y = x w~' + bias,    w~ = dense(codes) + sparse

`matmul` is the one place where a kernel is chosen. The torch reference dequantizes to float32, rounds to the
dtype of x and calls `F.linear`, so its result is bit for bit that of an ordinary layer holding the same
floats.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.packing import pack, unpack
from requant.formats import QuantizedWeight


class QuantLinear(nn.Module):
    """Replaces an `nn.Linear`, or GPT-2's `Conv1D` (`transposed`: its weight is [k, n]).

    The buffers are named and shaped as on disk (`codes`, `scales`, ...), so `state_dict` is the checkpoint.
    """

    def __init__(
        self,
        layout: MatrixLayout,
        *,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        transposed: bool = False,
    ) -> None:
        """Empty buffers for `layout`; `dtype` is the bias's."""
        super().__init__()
        self.layout = layout
        self.transposed = transposed
        self.out_features, self.in_features = layout.shape
        for suffix, spec in layout.tensors().items():
            self.register_buffer(suffix, torch.empty(spec.shape, dtype=spec.dtype, device=device))
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_quantized(
        cls,
        weight: QuantizedWeight,
        bias: Float[Tensor, " n"] | None = None,
        *,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
    ) -> "QuantLinear":
        """The layer of a quantized matrix, on its device; `dtype` (default: kept) is the bias's."""
        layout, tensors = pack(weight)
        layer = cls(layout, bias=False, transposed=transposed)
        for suffix, tensor in tensors.items():
            layer.register_buffer(suffix, tensor)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(dtype or bias.dtype), requires_grad=False)
        return layer

    def quantized(self) -> QuantizedWeight:
        """The containers behind the buffers, on the layer's device."""
        return unpack(self.layout, self._buffers)  # type: ignore[arg-type]

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """The plain layer with the same floats, of the class that was replaced."""
        weight = self.quantized().dequantize().to(dtype)
        n, k = self.layout.shape
        if self.transposed:
            from transformers.pytorch_utils import Conv1D

            with torch.device("meta"):
                plain: Any = Conv1D(n, k)
            weight = weight.T  # a view: Conv1D then multiplies the very memory that F.linear does
            if self.bias is None:
                raise ValueError("Conv1D always has a bias")
        else:
            plain = nn.Linear(k, n, bias=self.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach().to(dtype), requires_grad=False)
        return plain

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        return matmul(x, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantLinear":
        """Move buffers between devices, but never cast them: `model.to(torch.bfloat16)` would change the
        weights.

        Casts of a module skip integer tensors, so the float16 buffers travel as int16.
        """
        halves = [
            name
            for name, buffer in self._buffers.items()
            if buffer is not None and buffer.dtype == torch.half
        ]
        for name in halves:
            self._buffers[name] = self.get_buffer(name).view(torch.int16)
        try:
            super()._apply(fn, recurse)
        finally:
            for name in halves:
                self._buffers[name] = self.get_buffer(name).view(torch.half)
        return self

    def extra_repr(self) -> str:
        layout = self.layout
        sparse = f", sparse={layout.sparse}" if layout.sparse else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {layout.format}, bits={layout.bits}{sparse}"
        )


def matmul(x: Float[Tensor, "*m k"], layer: QuantLinear) -> Float[Tensor, "*m n"]:
    """`x w~' + bias` in the dtype of x."""
    return F.linear(x, layer.quantized().dequantize().to(x.dtype), layer.bias)
