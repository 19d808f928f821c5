"""`QuantLinear`: a linear layer whose buffers are the tensors of the checkpoint, and whose floats are computed.

    y = x w~' + bias,    w~ = dense(codes) + sparse

`matmul` is the torch reference, for the CPU and for what no kernel takes: it dequantizes to float32, rounds to the
dtype of x and calls `F.linear`, as an ordinary layer holding the same floats would. On a GPU `convert_to_kernels`
(`inference/convert.py`) replaces this layer by the kernels' own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from requant.errors import OutputError
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, row_parts, unpack, unpack_rows

BAND_WEIGHTS = 1 << 19  # dequantized at a time: small enough for a core's caches, large enough for threads


class QuantLinear(nn.Module):
    """Replaces an `nn.Linear`, or GPT-2's `Conv1D` (`transposed`: its weight is [k, n]).

    The buffers are named and shaped as on disk (`codes`, `scales`, ...), so `state_dict` is the checkpoint.
    """

    def __init__(
        self,
        spec: PackedSpec,
        *,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        transposed: bool = False,
    ) -> None:
        """Empty buffers for `spec`; `dtype` is the bias's."""
        super().__init__()
        self.spec = spec
        self.transposed = transposed
        self.out_features, self.in_features = spec.shape
        for suffix, tensor in spec.tensors().items():
            self.register_buffer(suffix, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        self.register_buffer(GUARD_TENSOR, torch.empty(0, dtype=torch.half, device=device))
        self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device)) if bias else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by suffix."""
        return {suffix: self.get_buffer(suffix) for suffix in self.spec.tensors()}

    def quantized(self, device: torch.device | None = None) -> QuantizedWeight:
        """The containers behind the buffers, on a device or the layer's."""
        return unpack(self.spec, self.tensors, device=device)

    def dequantized(self, dtype: torch.dtype) -> nn.Module:
        """The plain layer with the same floats, of the class that was replaced."""
        weight = self.quantized().dequantize().to(dtype)
        n, k = self.spec.shape
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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        store_guard(destination, prefix)

    def extra_repr(self) -> str:
        spec = self.spec
        sparse = f", sparse={spec.num_entries}" if spec.num_entries else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {spec.format}, bits={spec.bits}{sparse}"
        )


def apply_without_casts(module: Any, apply: Callable[[], object]) -> Any:
    """Move buffers between devices, but never cast them: `model.to(torch.bfloat16)` would change the weights.

    Casts of a module skip integer tensors, so the float16 buffers travel as int16 through `apply`. The guard holds nothing,
    and has the dtype of activations, to which some models (Mamba) cast a layer's input.
    """
    buffers = module._buffers
    halves = [
        name
        for name, buffer in buffers.items()
        if buffer is not None and buffer.dtype == torch.half and name != GUARD_TENSOR
    ]
    for name in halves:
        buffers[name] = buffers[name].view(torch.int16)
    try:
        apply()
    finally:
        for name in halves:
            buffers[name] = buffers[name].view(torch.half)
    return module


def store_guard(destination: dict[str, Any], prefix: str) -> None:
    """Give the guard in a state dict the dtype that it has in weight files."""
    if (guard := destination.get(f"{prefix}{GUARD_TENSOR}")) is not None:
        destination[f"{prefix}{GUARD_TENSOR}"] = guard.half()


def refuse_to_save(*_args: Any, **_kwargs: Any) -> None:
    """Replaces `_save_to_state_dict` of a layer that holds no tensor of the checkpoint. Raises OutputError."""
    raise OutputError(
        "this model holds its matrices as the kernels read them, not as a checkpoint stores them; load it with "
        "device='cpu' and save that one."
    )


def matmul(x: Float[Tensor, "*m k"], layer: QuantLinear) -> Float[Tensor, "*m n"]:
    """`x w~' + bias` in the dtype of x, a few rows at a time, so that little memory is needed at once."""
    parts = row_parts(layer.spec, layer.tensors)
    if len(parts) == 1:
        return _matmul(x, layer.spec, layer.tensors, layer.bias)
    y = torch.cat([_matmul(x, spec, tensors, None) for spec, tensors in parts], dim=-1)
    return y if layer.bias is None else y + layer.bias


def _matmul(
    x: Float[Tensor, "*m k"], spec: PackedSpec, tensors: Mapping[str, Tensor], bias: Tensor | None
) -> Float[Tensor, "*m n"]:
    n, k = spec.shape
    unit = spec.dense.row_step
    step = max(1, BAND_WEIGHTS // (k * max(1, unit))) * unit
    if not unit or step >= n:
        return F.linear(x, unpack(spec, tensors).dequantize().to(x.dtype), bias)
    first_entries = [0] * (n + 1)
    if spec.sparse is not None:
        first_entries = F.pad(tensors["sparse_counts"].long().sum(1).cumsum(0), (1, 0)).tolist()
    parts = []
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        entries = slice(first_entries[rows.start], first_entries[rows.stop])
        weight = unpack_rows(spec, tensors, rows, entries).dequantize().to(x.dtype)
        parts.append(F.linear(x, weight, None if bias is None else bias[rows]))
    return torch.cat(parts, dim=-1)
