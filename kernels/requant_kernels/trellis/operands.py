"""The input and output of a trellis product, for callers that fuse its rotations with other operations.

    rotated activations     H (input_scales * x), in the form that the product's kernel reads
    split attention         one token, not rotated yet, whose parts the product combines
    product                 V times that, float32 or (cuBLAS) float16, not rotated yet
    y                       output_scales * H product + bias

`gemv.py`, `gemm_sm90.py` and `dequantize.py` multiply activations that are already rotated; `dispatch.py` chooses among them
by layout and tokens. The kernels of `step/` finish one layer's product and rotate the next layer's activations in one
launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from requant_kernels.hadamard.tile_builder import HADAMARD_TILE
from requant_kernels.trellis.layout import TrellisLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationForm:
    """How a kernel reads rotated activations: int8 as 16-bit fixed point (`hadamard_transform_int8`), otherwise float16.

    pair: sums and differences of neighbours. permute: in the order of `gemm_sm90.py`. columns: the tensor's width.
    """

    columns: int
    int8: bool = False
    pair: bool = False
    permute: bool = False

    def empty(self, m: int, device: torch.device) -> "RotatedActivations":
        """Uninitialized tensors for m tokens."""
        if not self.int8:
            return RotatedActivations(
                values=torch.empty(m, self.columns, dtype=torch.float16, device=device), scales=None
            )
        tiles = self.columns // HADAMARD_TILE
        return RotatedActivations(
            values=torch.empty(2 * m, self.columns, dtype=torch.int8, device=device),
            scales=torch.empty(m, tiles, 4, dtype=torch.float32, device=device),
        )


def common_form(forms: Sequence[ActivationForm]) -> ActivationForm:
    """What several kernels read for the same number of tokens: float16 if one of them has to."""
    return next((form for form in forms if not form.int8), forms[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class RotatedActivations:
    """float16 [m, columns]; int8 [2 m, columns] with scales float32 [m, tiles, 4]; or int8 [m, columns] with scales [m]
    (`gemm_int8.py`)."""

    values: Tensor
    scales: Tensor | None

    @property
    def num_tokens(self) -> int:
        return (self.values if self.scales is None else self.scales).shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitAttention:
    """One token's attention over parts of the positions, by which it is still to be combined (`step/attention.py`):
    y [h d] = sum_i 2^z_i o_i / sum_i 2^z_i of o [h, parts, d] in the type of activations and z float32 [h, parts]."""

    values: Tensor
    logarithms: Tensor

    @property
    def num_tokens(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A product not rotated yet, of any float type: [m, n], or split-K partial sums [splits, m, n], to be multiplied by
    `sums_scale`; n is a multiple of 16. The rows of several matrices may be adjacent in `values`, which then share one
    stride. is_all: it is added to nothing, for it is the embedding of the residual stream."""

    values: Tensor
    output_scales: Tensor  # float16 [n]
    bias: Tensor | None
    is_all: bool = False

    def part(self, rows: slice) -> "Product":
        """The product of one of several joined matrices."""
        bias = None if self.bias is None else self.bias[rows]
        return Product(values=self.values[..., rows], output_scales=self.output_scales[rows], bias=bias)

    @property
    def source(self) -> "Source":
        splits = self.values.shape[0] if self.values.dim() == 3 else 1
        return _source(splits, self.values.stride(-2), sums_scale(self.values))


# A sum is about as large as the norm of the input: at most sqrt(k) times its largest rotated value, which float16 holds. So
# sums over 128 = sqrt(16384) fit in float16 too. That rounds them by 2^-12; float32 would take twice the traffic.
PARTIAL_SUM_SCALE = 128.0


def sums_scale(values: Tensor) -> float:
    """What multiplies the values of a product: PARTIAL_SUM_SCALE for split-K partial sums in float16, by `gemm_sm90.py`."""
    return PARTIAL_SUM_SCALE if values.dim() == 3 and values.dtype == torch.float16 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """How a kernel reads a product: as the sum of `splits` consecutive matrices, times `scale`."""

    splits: int
    row_stride: int
    scale: float = 1.0


@cache
def _source(splits: int, row_stride: int, scale: float) -> Source:
    return Source(splits=splits, row_stride=row_stride, scale=scale)


def shares_form(layouts: Sequence[TrellisLayout]) -> bool:
    """Whether the matrices can read identical rotated activations."""
    first = layouts[0].input_scales
    return all(
        layout.input_scales is not None
        and first is not None
        and layout.code == layouts[0].code
        and torch.equal(layout.input_scales, first)
        for layout in layouts
    )
