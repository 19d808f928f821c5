"""`QuantLinear`: a linear layer whose buffers are the tensors of the checkpoint, and whose floats are
computed.

    y = x w~' + bias,    w~ = dense(codes) + sparse

`matmul` is the torch reference, for the CPU and for what no kernel takes: it dequantizes to float32, rounds to the
dtype of x and calls `F.linear`, as an ordinary layer holding the same floats would. On a GPU `inference/serving.py`
puts the kernels' own layer in the place of this one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from requant.formats.containers import QuantizedWeight
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.packing import pack, unpack

BAND_WEIGHTS = 1 << 19  # dequantized at a time: small enough for a core's caches, large enough for threads


class QuantLinear(nn.Module):
    """Replaces an `nn.Linear`, or GPT-2's `Conv1D` (`transposed`: its weight is [k, n]).

    The buffers are named and shaped as on disk (`codes`, `scales`, ...), so `state_dict` is the checkpoint.
    """

    def __init__(
        self,
        layout: PackedSpec,
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
        self.register_buffer(GUARD_TENSOR, torch.empty(0, dtype=torch.half, device=device))
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
        layer = cls(layout, bias=False, transposed=transposed, device=weight.dense.codes.device)
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
        return apply_without_casts(self, lambda: super(QuantLinear, self)._apply(fn, recurse))

    def extra_repr(self) -> str:
        layout = self.layout
        sparse = f", sparse={layout.sparse}" if layout.sparse else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {layout.format}, bits={layout.bits}{sparse}"
        )


def apply_without_casts(module: Any, apply: Callable[[], object]) -> Any:
    """Move buffers between devices, but never cast them: `model.to(torch.bfloat16)` would change the weights.

    Casts of a module skip integer tensors, so the float16 buffers travel as int16 through `apply`.
    """
    buffers = module._buffers
    halves = [name for name, buffer in buffers.items() if buffer is not None and buffer.dtype == torch.half]
    for name in halves:
        buffers[name] = buffers[name].view(torch.int16)
    try:
        apply()
    finally:
        for name in halves:
            buffers[name] = buffers[name].view(torch.half)
    return module


def matmul(x: Float[Tensor, "*m k"], layer: QuantLinear) -> Float[Tensor, "*m n"]:
    """`x w~' + bias` in the dtype of x, a band of rows at a time, so that little memory is needed at once."""
    layout = layer.layout
    n, k = layout.shape
    step = max(1, BAND_WEIGHTS // k)
    if layout.format == "trellis" or step >= n:  # rotations mix all rows
        return F.linear(x, layer.quantized().dequantize().to(x.dtype), layer.bias)
    ends = (
        F.pad(layer.get_buffer("sparse_counts").long().sum(1).cumsum(0), (1, 0)).tolist()
        if layout.sparse
        else None
    )
    parts = []
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        weight = _band(layer, rows, ends).dequantize().to(x.dtype)
        parts.append(F.linear(x, weight, None if layer.bias is None else layer.bias[rows]))
    return torch.cat(parts, dim=-1)


def _band(layer: QuantLinear, rows: slice, ends: list[int] | None) -> QuantizedWeight:
    """Some rows of a grid or a codebook; `ends[i]` counts the sparse entries above row i."""
    layout, tensors = layer.layout, dict(layer._buffers)
    entries = slice(0, 0) if ends is None else slice(ends[rows.start], ends[rows.stop])
    whole = {"column_scales", GUARD_TENSOR} | (
        {"sparse_scales"} if layout.sparse_scales == "matrix" else set()
    )
    for suffix, tensor in tensors.items():
        if suffix in ("sparse_indices", "sparse_values"):
            tensors[suffix] = tensor[entries]  # type: ignore[index]
        elif suffix not in whole:
            tensors[suffix] = tensor[rows]  # type: ignore[index]
    part = replace(
        layout, shape=(rows.stop - rows.start, layout.shape[1]), sparse=entries.stop - entries.start
    )
    return unpack(part, tensors)  # type: ignore[arg-type]
