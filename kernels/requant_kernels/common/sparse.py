"""Residuals of a matrix (outliers and significant weights) as the kernels read them: sliced ELL, and sorted COO.

Both hold the same numbers; the number of tokens decides which is read.

- **Sliced ELL** (SELL-C-sigma; Kreutzer et al., arXiv 1307.6209) with C = 16 and sigma = n, for one token and for kernels
  that gather: rows are sorted by their number of residuals, most first, so that the 16 rows of a tile have about equal
  lengths. A *slice* is 16 rows x 8 slots; a tile has as many slices as its longest row needs. Unlike in the paper, one tile
  may have several slices, so that every slice has the same size.
- **COO**, an int32 each, for kernels that add residuals to the weights of a tensor-core tile: the low half is the value
  as float16, above it the index (12 bits) of its weight among the 4096 of a k_tile in the order of the A fragments
  (`bit_layout.py`). Entries are sorted by k_tile and index:

      index = ((32 step + 4 g + t) 4 + 2 kh + rh) 2 + e

  Those weights are multiplied by activations divided by `column_scales`, so an entry is the residual times its column's
  scale.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from requant_kernels.common.bit_layout import K_TILE, ROW_TILE

Csr = tuple[Tensor, Tensor, Tensor, Tensor | None]  # indptr, indices, values, row scales
SLICE_SLOTS = 8  # slots per row and slice
MOST_COLUMNS = 1 << 16  # column indices are 16 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedEll:
    """Residuals in slices of 16 rows x 8 slots; a tile's slices are `slice_ptr[tile]` to `slice_ptr[tile + 1]`."""

    slice_ptr: Tensor  # int32 [tiles + 1]
    columns: Tensor  # int16 [slices, 16, 8], read as unsigned
    values: Tensor  # float16 or int8 [slices, 16, 8], zero in empty slots
    row_scales: Tensor | None  # float16 [16 tiles], with int8 values
    row_nnz: Tensor  # int32 [16 tiles], filled slots of each row
    # int32 [z], the same residuals in A-fragment order; None if one does not fit float16
    coo: Tensor | None = None
    block_ptr: Tensor | None = None  # int32 [tiles, k_tiles + 1], into `coo`


def sort_rows(indptr: Tensor) -> Tensor:
    """Row order by decreasing number of residuals, stable: int64 [n]."""
    return torch.argsort(indptr.diff(), descending=True, stable=True)


def padded_row_perm(order: Tensor | None, n: int) -> Tensor | None:
    """The `row_perm` of a layout, int32 [16 tiles]: position -> row; n at padding."""
    return None if order is None else torch.nn.functional.pad(order.int(), (0, -n % ROW_TILE), value=n)


def pack_sparse(
    sparse: Csr | None,
    order: Tensor | None,
    k: int,
    *,
    coo: bool = False,
    column_scales: Tensor | None = None,
) -> SlicedEll | None:
    """CSR to sliced ELL, rows in `order`; with `coo` also to sorted COO, times `column_scales`.

    Raises ValueError if k is more than 65536.
    """
    if sparse is None or order is None:
        return None
    if k > MOST_COLUMNS:
        raise ValueError(
            f"the sparse kernels address {MOST_COLUMNS} columns, the matrix has {k}: drop the sparse part"
        )
    indptr, indices, values, row_scales = sparse
    device, n = order.device, len(order)
    row_nnz = torch.nn.functional.pad(indptr.to(device).diff()[order], (0, -n % ROW_TILE))
    slices = -(-row_nnz.view(-1, ROW_TILE).amax(1) // SLICE_SLOTS)
    slice_ptr = torch.nn.functional.pad(slices.cumsum(0), (1, 0))
    position, slot, at = _slots(row_nnz, slice_ptr)
    source = indptr.to(device)[order[position]] + slot
    size = int(slice_ptr[-1]) * ROW_TILE * SLICE_SLOTS
    columns = torch.zeros(size, dtype=torch.int32, device=device)
    columns[at] = indices.to(device)[source].int()
    packed = torch.zeros(size, dtype=values.dtype, device=device)
    packed[at] = values.to(device)[source]
    ell = SlicedEll(
        slice_ptr=slice_ptr.int(),
        columns=columns.to(torch.int16).view(-1, ROW_TILE, SLICE_SLOTS),
        values=packed.view(-1, ROW_TILE, SLICE_SLOTS),
        row_scales=None
        if row_scales is None
        else torch.nn.functional.pad(row_scales[order], (0, -n % ROW_TILE)),
        row_nnz=row_nnz.int(),
    )
    if not coo:
        return ell
    packed_coo, block_ptr = pack_coo(ell, k, column_scales)
    return replace(ell, coo=packed_coo, block_ptr=block_ptr)


def _slots(row_nnz: Tensor, slice_ptr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per residual, by position and slot: its row's position, its slot in the row, its index in the slices."""
    position = torch.repeat_interleave(torch.arange(len(row_nnz), device=row_nnz.device), row_nnz)
    slot = torch.arange(len(position), device=row_nnz.device) - (row_nnz.cumsum(0) - row_nnz)[position]
    slice_index = slice_ptr[position // ROW_TILE] + slot // SLICE_SLOTS
    at = slice_index * (ROW_TILE * SLICE_SLOTS) + position % ROW_TILE * SLICE_SLOTS + slot % SLICE_SLOTS
    return position, slot, at


def stored_residuals(ell: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row position, column and stored value of every residual, by position and then column."""
    position, _, at = _slots(ell.row_nnz.long(), ell.slice_ptr.long())
    return position, ell.columns.view(-1)[at].long() & 0xFFFF, ell.values.view(-1)[at]


def unpack_residuals(layout: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value (float32, times its row scale) of every residual of a layout."""
    if layout.sparse is None or layout.row_perm is None:
        raise ValueError("this layout has no sparse part")
    position, column, value = stored_residuals(layout.sparse)
    value = value.float()
    if layout.sparse.row_scales is not None:
        value *= layout.sparse.row_scales.float()[position]
    return layout.row_perm.long()[position], column, value


def fragment_index(row: Tensor, column: Tensor) -> Tensor:
    """Index (0 .. 4095) of a weight of a k_tile in the order of the A fragments; row of 16, column of 256; int64."""
    step = 2 * (column // 32) + column % 8 // 4
    lane = row % 8 * 4 + column % 32 // 8
    return ((step * 32 + lane) * 4 + column % 4 // 2 * 2 + row // 8) * 2 + column % 2


def pack_coo(
    ell: SlicedEll, k: int, column_scales: Tensor | None = None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """coo int32 [z] and block_ptr int32 [tiles, k_tiles + 1]: the start of every k_tile, and the end of the last one.

    None if a residual times its scales overflows float16; then kernels that read COO do not support the layout.
    """
    position, column, value = stored_residuals(ell)
    value = value.float()
    if ell.row_scales is not None:
        value = value * ell.row_scales.float()[position]
    if column_scales is not None:
        value = value * column_scales.to(value.device).float()[column]
    if not value.half().isfinite().all():
        return None, None
    tiles, k_tiles = len(ell.row_nnz) // ROW_TILE, -(-k // K_TILE)
    k_tile = position // ROW_TILE * k_tiles + column // K_TILE
    index = fragment_index(position % ROW_TILE, column % K_TILE)
    order = torch.argsort(k_tile * (ROW_TILE * K_TILE) + index)
    bits = value.half().view(torch.int16).int() & 0xFFFF
    coo = (index.int() << 16 | bits)[order]
    ends = torch.bincount(k_tile, minlength=tiles * k_tiles).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    block_ptr = torch.empty(tiles, k_tiles + 1, dtype=torch.int32, device=coo.device)
    block_ptr[:, :k_tiles] = starts[:-1].view(tiles, k_tiles)
    block_ptr[:, k_tiles] = ends.view(tiles, k_tiles)[:, -1]
    return coo, block_ptr
