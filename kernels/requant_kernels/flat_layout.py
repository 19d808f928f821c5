"""A layout as the flat arguments of a custom operator, and back.

torch's operators take tensors, numbers and lists, but no dataclasses. So each layout is flattened in a fixed order,
OPERANDS for grids and codebooks, TRELLIS_OPERANDS for trellises, with None for parts that a matrix does not have.
"""

from typing import Any

from torch import Tensor

from requant_kernels.common.packing import CodebookLayout, GridLayout, Layout
from requant_kernels.common.sparse import SlicedEll
from requant_kernels.trellis.layout import TrellisLayout

# The operators' arguments after x and bias, by name: what a module must hold.
OPERANDS = (
    "packed_codes", "scales", "zero_points", "column_scales", "levels", "tables", "row_perm", "slice_ptr", "columns",
    "values", "row_scales", "row_nnz", "coo", "block_ptr", "n", "k", "bits", "group_size", "kernel_group",
)  # fmt: skip
TRELLIS_OPERANDS = (
    "packed_codes", "input_scales", "output_scales", "row_perm", "slice_ptr", "columns", "values", "row_scales",
    "row_nnz", "k", "rotates_output", "parts", "bits", "code",
)  # fmt: skip


def flatten(layout: Layout | TrellisLayout) -> tuple[Any, ...]:
    """A layout as operator arguments, in the order of OPERANDS (TRELLIS_OPERANDS)."""
    sparse = layout.sparse
    slots = (layout.row_perm, None, None, None, None, None)
    if sparse is not None:
        slots = (
            layout.row_perm, sparse.slice_ptr, sparse.columns, sparse.values, sparse.row_scales, sparse.row_nnz,
        )  # fmt: skip
    if isinstance(layout, TrellisLayout):
        return (
            layout.packed_codes, layout.input_scales, layout.output_scales, *slots, layout.k, layout.rotates_output,
            list(layout.parts), layout.bits, layout.code,
        )  # fmt: skip
    if isinstance(layout, CodebookLayout):
        own = (None, None, None, layout.levels, layout.tables)
        sizes = (layout.n, layout.k, layout.bits, 0, 0)
    else:
        own = (layout.scales, layout.zero_points, layout.column_scales, None, None)
        sizes = (layout.n, layout.k, layout.bits, layout.group_size, layout.kernel_group)
    tall = (None, None) if sparse is None else (sparse.coo, sparse.block_ptr)
    return layout.packed_codes, *own, *slots, *tall, *sizes


def unflatten(*operands: Any) -> Layout | TrellisLayout:
    """The inverse of `flatten`."""
    return trellis_layout_of(*operands) if isinstance(operands[-1], str) else layout_of(*operands)


def _sparse(
    slice_ptr: Tensor | None, columns: Tensor | None, values: Tensor | None, row_scales: Tensor | None,
    row_nnz: Tensor | None, coo: Tensor | None = None, block_ptr: Tensor | None = None,
) -> SlicedEll | None:  # fmt: skip
    if slice_ptr is None or columns is None or values is None or row_nnz is None:
        return None
    return SlicedEll(
        slice_ptr=slice_ptr, columns=columns, values=values, row_scales=row_scales, row_nnz=row_nnz, coo=coo,
        block_ptr=block_ptr,
    )  # fmt: skip


def trellis_layout_of(
    packed_codes: Tensor, input_scales: Tensor | None, output_scales: Tensor, row_perm: Tensor | None,
    slice_ptr: Tensor | None, columns: Tensor | None, values: Tensor | None, row_scales: Tensor | None,
    row_nnz: Tensor | None, k: int, rotates_output: bool, parts: list[int], bits: float, code: str,
) -> TrellisLayout:  # fmt: skip
    """The trellis of these arguments, in the order of TRELLIS_OPERANDS."""
    return TrellisLayout(
        packed_codes=packed_codes, input_scales=input_scales, output_scales=output_scales, n=len(output_scales), k=k,
        bits=bits, code=code, rotates_output=rotates_output, parts=tuple(parts), row_perm=row_perm,
        sparse=_sparse(slice_ptr, columns, values, row_scales, row_nnz),
    )  # fmt: skip


def layout_of(
    packed_codes: Tensor, scales: Tensor | None, zero_points: Tensor | None, column_scales: Tensor | None,
    levels: Tensor | None, tables: Tensor | None, row_perm: Tensor | None, slice_ptr: Tensor | None,
    columns: Tensor | None, values: Tensor | None, row_scales: Tensor | None, row_nnz: Tensor | None, coo: Tensor | None,
    block_ptr: Tensor | None, n: int, k: int, bits: int, group_size: int, kernel_group: int,
) -> Layout:  # fmt: skip
    """The grid or codebook (without scales) of these arguments, in the order of OPERANDS."""
    sparse = _sparse(slice_ptr, columns, values, row_scales, row_nnz, coo, block_ptr)
    if scales is None:
        assert levels is not None
        return CodebookLayout(
            packed_codes=packed_codes, levels=levels, tables=tables, row_perm=row_perm, sparse=sparse, n=n, k=k,
            bits=bits,
        )  # fmt: skip
    return GridLayout(
        packed_codes=packed_codes, scales=scales, zero_points=zero_points, column_scales=column_scales,
        row_perm=row_perm, sparse=sparse, n=n, k=k, bits=bits, group_size=group_size, kernel_group=kernel_group,
    )  # fmt: skip
