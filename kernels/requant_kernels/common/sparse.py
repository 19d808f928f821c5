"""Residuals where a tile of the tensor cores wants them: a second order of the same numbers, for many tokens.

An entry is one residual in 32 bits: its value as float16 below, above it the place (12 bits) that its weight has among the
4096 of a block of 16 x 256, in the order of the left operand's registers (`words.py`):

    place = ((32 plane + 4 g + t) 4 + 2 kh + rh) 2 + e

A kernel writes the entries of 64 columns to their places in shared memory, and its lanes add what they find there to the
weights that they have just decoded. Those meet activations that were divided by the column's scale, where columns have
one, so an entry is the residual times that scale. Entries are sorted by block and place.
"""

from typing import Any

import torch
from torch import Tensor

from requant_kernels.common.bit_layout import BLOCK, ROWS

SLOTS = 8  # of one row in a chunk of `layouts.SlicedEll`


def slot_entries(sparse: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Position of the row, column and stored value of every residual in slots, by position and then column."""
    counts = sparse.row_nnz.long()
    position = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    slot = torch.arange(len(position), device=counts.device) - (counts.cumsum(0) - counts)[position]
    chunk = sparse.slice_ptr.long()[position // ROWS] + slot // SLOTS
    at = chunk * (ROWS * SLOTS) + position % ROWS * SLOTS + slot % SLOTS
    return position, sparse.columns.view(-1)[at].long() & 0xFFFF, sparse.values.view(-1)[at]


def places(row: Tensor, column: Tensor) -> Tensor:
    """The place of rows (of 16) and columns (of 256), int64."""
    plane = 2 * (column // 32) + column % 8 // 4
    lane = row % 8 * 4 + column % 32 // 8
    return ((plane * 32 + lane) * 4 + column % 4 // 2 * 2 + row // 8) * 2 + column % 2


def pack_entries(
    sparse: Any, k: int, column_scales: Tensor | None = None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Of slots: entries int32 [z]; bounds int32 [tiles, blocks + 1], where every block begins, and the last one ends.

    None, and nobody may take them, where a residual times the scales of its row and column is no float16.
    """
    position, column, value = slot_entries(sparse)
    residual = value.float()
    if sparse.row_scales is not None:
        residual = residual * sparse.row_scales.float()[position]
    if column_scales is not None:
        residual = residual * column_scales.to(residual.device).float()[column]
    if not residual.half().isfinite().all():
        return None, None
    tiles, blocks = len(sparse.row_nnz) // ROWS, -(-k // BLOCK)
    block = position // ROWS * blocks + column // BLOCK
    place = places(position % ROWS, column % BLOCK)
    order = torch.argsort(block * 4096 + place)
    bits = residual.half().view(torch.int16).int() & 0xFFFF
    entries = (place.int() << 16 | bits)[order]
    ends = torch.bincount(block, minlength=tiles * blocks).cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    bounds = torch.empty(tiles, blocks + 1, dtype=torch.int32, device=entries.device)
    bounds[:, :blocks] = starts[:-1].view(tiles, blocks)
    bounds[:, blocks] = ends.view(tiles, blocks)[:, -1]
    return entries, bounds
