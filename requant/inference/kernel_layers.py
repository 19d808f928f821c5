"""The layers of a served model, each of whose matrices is packed in the layout of the kernels.

    KernelLinear      one matrix: a grid, a codebook or a trellis, with or without residuals
    BandedLinear      matrices stacked by rows, whose outputs are concatenated: a head in bands
    FusedLinear       matrices that take the same x, joined into one; a `Sibling` in place of each returns its columns
    KernelEmbedding   rows of a matrix, looked up in its codes

Their buffers are operands of the kernels, not what a checkpoint holds: they are never saved. `convert.py` creates them.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from requant_kernels import Layout, TrellisLayout
from requant_kernels.flat_layout import OPERANDS, TRELLIS_OPERANDS, flatten, unflatten
from requant_kernels.ops import lookup_refusal, multiply, multiply_bands
from requant_kernels.trellis.operands import shares_form
from torch import Tensor, nn

from requant.inference.quant_embedding import DTYPE, QuantEmbedding, show_rows
from requant.inference.quant_linear import apply_without_casts, refuse_to_save
from requant.inference.semi_structured_linear import SemiStructuredLinear


class KernelLinear(nn.Module):
    """`x w~' + bias` by the kernels; its buffers are the operands of the custom operator and are never saved."""

    def __init__(self, layout: Layout | TrellisLayout, bias: Tensor | None = None) -> None:
        super().__init__()
        self.trellis = isinstance(layout, TrellisLayout)
        self.lookup_refusal = lookup_refusal(layout)
        self.in_features, self.out_features = layout.k, layout.n
        for name, operand in zip(self.names, flatten(layout), strict=True):
            if isinstance(operand, Tensor):
                self.register_buffer(name, operand, persistent=False)
            else:
                setattr(self, name, operand)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.held: Layout | TrellisLayout | None = None  # `layout`, put together once

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands."""
        return TRELLIS_OPERANDS if self.trellis else OPERANDS

    @property
    def layout(self) -> Layout | TrellisLayout:
        """The matrix as the kernels take it."""
        if self.held is None:
            self.held = unflatten(*(getattr(self, name) for name in self.names))
        return self.held

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        flat = x.reshape(-1, self.in_features)
        if torch.compiler.is_compiling():  # sees the operator and buffers
            operator = torch.ops.requant.trellis_linear if self.trellis else torch.ops.requant.linear
            y = operator(flat, self.bias, *(getattr(self, name) for name in self.names))
        else:
            y = multiply(flat, self.layout, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def rows(self, tokens: Int[Tensor, "*m"], dtype: torch.dtype) -> Float[Tensor, "*m k"]:
        """Rows of a grid or trellis without residuals, whose output is not rotated, as an embedding looks them up.

        Raises ValueError for any other matrix (`lookup_refusal`).
        """
        if self.lookup_refusal is not None:
            raise ValueError(self.lookup_refusal)
        flat = tokens.reshape(-1)
        if self.trellis:
            found = _trellis_rows([self], flat, dtype)
        else:
            found = torch.ops.requant.lookup(
                flat, dtype, self.packed_codes, self.scales, self.zero_points, self.column_scales, self.n, self.k,
                self.bits, self.group_size, self.kernel_group,
            )  # fmt: skip
        return found.view(*tokens.shape, self.in_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KernelLinear":
        self.held = None
        return apply_without_casts(self, lambda: super(KernelLinear, self)._apply(fn, recurse))

    _save_to_state_dict = refuse_to_save

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class BandedLinear(nn.Module):
    """Bands of rows, their outputs side by side (`formats/bands.py`).

    Bands of trellis codes that share the rotation of x, as those of `requant quantize` do, are multiplied in two launches
    and looked up in two; any others one by one.
    """

    def __init__(self, bands: Sequence[KernelLinear], bias: Tensor | None = None) -> None:
        super().__init__()
        self.bands = nn.ModuleList(bands)
        self.in_features, self.out_features = bands[0].in_features, sum(band.out_features for band in bands)
        self.lookup_refusal = next((band.lookup_refusal for band in bands if band.lookup_refusal), None)
        self.rotates_once = self.lookup_refusal is None and _share_rotation([band.layout for band in bands])
        self.set_bias(bias)

    def set_bias(self, bias: Tensor | None) -> None:
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        y = None
        if self.rotates_once and not torch.compiler.is_compiling():
            y = multiply_bands(x.reshape(-1, self.in_features), self.layouts())
        if y is None:
            y = torch.cat([band(x) for band in self.bands], dim=-1)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def rows(self, tokens: Int[Tensor, "*m"], dtype: torch.dtype) -> Float[Tensor, "*m k"]:
        """The row of every token, from the band it belongs to: all bands are asked, since a captured graph cannot choose."""
        bands = self._bands()
        if self.rotates_once:
            return _trellis_rows(bands, tokens.reshape(-1), dtype).view(*tokens.shape, self.in_features)
        found, first_row = None, 0
        for band in bands:
            own = band.rows((tokens - first_row).clamp(0, band.out_features - 1), dtype)
            found = own if found is None else torch.where((tokens >= first_row)[..., None], own, found)
            first_row += band.out_features
        assert found is not None
        return found

    def _bands(self) -> "list[KernelLinear]":
        return cast("list[KernelLinear]", list(self.bands))

    def layouts(self) -> list[TrellisLayout]:
        """Those of the bands, which are trellises if `rotates_once`."""
        return [cast(TrellisLayout, band.layout) for band in self._bands()]

    _save_to_state_dict = refuse_to_save


def _trellis_rows(
    bands: Sequence[KernelLinear], tokens: Int[Tensor, " m"], dtype: torch.dtype
) -> Float[Tensor, "m k"]:
    """Rows of trellises that lie one below the other, by one operator, so that the compiler sees their buffers."""
    first = bands[0]
    return torch.ops.requant.trellis_lookup(
        tokens, dtype, [band.packed_codes for band in bands], first.input_scales,
        [band.output_scales for band in bands], first.k, [band.bits for band in bands], first.code,
    )  # fmt: skip


def _share_rotation(layouts: Sequence[Layout | TrellisLayout]) -> bool:
    """Whether all are trellises that read the very same rotated activations."""
    trellises = [layout for layout in layouts if isinstance(layout, TrellisLayout)]
    return len(trellises) == len(layouts) and shares_form(trellises)


class FusedLinear(nn.Module):
    """Matrices that take the same x, in one launch: the first layer that is asked computes for all.

    Outputs are kept until each of their layers has been called with the very same tensor, then dropped. A layer that is
    called with another x starts a launch of its own.
    """

    def __init__(self, matrix: KernelLinear | SemiStructuredLinear, sizes: Sequence[int]) -> None:
        super().__init__()
        self.matrix = matrix
        self.sizes = list(sizes)
        self.x: Tensor | None = None
        self.pending: list[Tensor | None] = []

    def part(self, index: int, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        """The columns of layer `index`: a view."""
        if self.x is not x or self.pending[index] is None:
            self.x, self.pending = x, list(self.matrix(x).split(self.sizes, dim=-1))
        y = self.pending[index]
        assert y is not None
        self.pending[index] = None
        if all(part is None for part in self.pending):
            self.x = None
        return y


class Sibling(nn.Module):
    """One layer of `FusedLinear`; the first of them owns the matrix."""

    def __init__(self, siblings: FusedLinear, index: int) -> None:
        super().__init__()
        if index == 0:
            self.siblings = siblings
        else:
            self.__dict__["siblings"] = siblings  # not registered twice
        self.index = index
        self.in_features, self.out_features = siblings.matrix.in_features, siblings.sizes[index]

    def forward(self, x: Float[Tensor, "*m k"]) -> Float[Tensor, "*m n"]:
        return self.siblings.part(self.index, x)


class KernelEmbedding(nn.Module):
    """Rows of a packed grid or trellis as they are asked for; a tied head's matrix is its own, so codes are held once."""

    def __init__(self, matrix: KernelLinear | BandedLinear, plain: QuantEmbedding, *, tied: bool) -> None:
        super().__init__()
        if tied:
            self.__dict__["matrix"] = matrix  # the head's
        else:
            self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.out_features, matrix.in_features
        self.padding_idx, self.dtype, self.scale = plain.padding_idx, plain.dtype, plain.scale
        # of no values: it says where the table is (`Rows.device`), whose matrix is the head's where they are tied
        device = next(matrix.buffers()).device
        self.register_buffer("weight", torch.empty(0, dtype=plain.dtype, device=device), persistent=False)
        if (of_dtype := plain._parameters.get(DTYPE)) is not None:
            self.register_parameter(DTYPE, of_dtype)
        show_rows(self)

    def forward(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m d"]:
        rows = self.rows(tokens)
        return rows if self.scale is None else self.scale(rows)

    def rows(self, tokens: Int[Tensor, "*m"]) -> Float[Tensor, "*m d"]:
        """Rows of the table, without the scale."""
        return self.matrix.rows(tokens, self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KernelEmbedding":
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        return self
