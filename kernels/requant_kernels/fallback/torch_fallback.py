"""The torch path: dequantize a band of rows, multiply, forget it. Any device; memory bounded by the band.

For the CPU this is the kernel: words are unpacked a field at a time (two or three integer operations a code), the
product is torch's own, threads are torch's threads.
"""

import torch
from torch import Tensor

from requant_kernels.common.bit_layout import ROWS
from requant_kernels.common.packing import (
    CodebookLayout,
    GridLayout,
    Layout,
    codes_of_words,
    sparse_entries,
    unpack_words,
)

BAND_WEIGHTS = 1 << 22  # weights dequantized at a time
BAND_RESIDUALS = 1 << 20


def band(layout: Layout, start: int, stop: int) -> Tensor:
    """Dense values, float32, of the tiles `start` to `stop`, in stored order: [16 (stop - start), k]."""
    kind = "codebook" if isinstance(layout, CodebookLayout) else "grid"
    codes = unpack_words(layout.packed_codes[start:stop], kind=kind, bits=layout.bits, k=layout.k)
    if isinstance(layout, CodebookLayout):
        return layout.levels[start * ROWS : stop * ROWS].float().gather(1, codes.long())
    span = layout.kernel_group or layout.k

    def by_column(packed: Tensor) -> Tensor:
        plain = packed[start:stop].permute(0, 3, 2, 1).reshape(len(codes), -1).float()
        return plain.repeat_interleave(span, dim=1)[:, : layout.k]

    if layout.zero_points is None:
        return (codes.float() - float(1 << (layout.bits - 1))) * by_column(layout.scales)
    return (codes.float() - by_column(layout.zero_points)) * by_column(layout.scales)


def linear(x: Tensor, layout: Layout, bias: Tensor | None) -> Tensor:
    """y [m, n] of x [m, k] in x's dtype, accumulated in float32."""
    tokens = x.float()
    dense = tokens
    if not isinstance(layout, CodebookLayout) and layout.column_scales is not None:
        dense = tokens / layout.column_scales.float()
    tiles = layout.packed_codes.shape[0]
    step = max(1, BAND_WEIGHTS // (ROWS * layout.k))
    stored = torch.cat([dense @ band(layout, i, min(i + step, tiles)).T for i in range(0, tiles, step)], 1)
    y = stored[:, : layout.n]
    if layout.row_perm is not None:
        y = torch.empty_like(y).index_copy_(1, layout.row_perm[: layout.n].long(), y)
    if layout.sparse is not None:
        rows, columns, residuals = sparse_entries(layout)
        for i in range(0, len(rows), BAND_RESIDUALS):
            part = slice(i, i + BAND_RESIDUALS)
            y.index_add_(1, rows[part], tokens[:, columns[part]] * residuals[part])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def dequantize(layout: Layout, dtype: torch.dtype) -> Tensor:
    """The matrix [n, k] in `dtype`, as `linear` uses it."""
    tiles = layout.packed_codes.shape[0]
    step = max(1, BAND_WEIGHTS // (ROWS * layout.k))
    out = torch.empty(layout.n, layout.k, dtype=dtype, device=layout.packed_codes.device)
    for i in range(0, tiles, step):
        values = band(layout, i, min(i + step, tiles))
        if not isinstance(layout, CodebookLayout) and layout.column_scales is not None:
            values = values / layout.column_scales.float()
        stop = min((i + step) * ROWS, layout.n)
        rows = torch.arange(i * ROWS, stop, device=out.device)
        if layout.row_perm is not None:
            rows = layout.row_perm[i * ROWS : stop].long()
        out[rows] = values[: len(rows)].to(dtype)
    if layout.sparse is not None:
        rows, columns, residuals = sparse_entries(layout)
        out[rows, columns] = (out[rows, columns].float() + residuals).to(dtype)
    return out


def lookup(tokens: Tensor, layout: GridLayout, dtype: torch.dtype) -> Tensor:
    """Rows [m, k] of a grid without residuals, in `dtype`."""
    tiles, blocks = layout.packed_codes.shape[:2]
    tile, row = tokens // ROWS, tokens % ROWS
    # lane 4 g + t holds (kh, rh): the words of row 8 rh + g
    words = layout.packed_codes.view(tiles, blocks, layout.bits, 8, 4, 2, 2)[
        tile, :, :, row % 8, :, :, row // 8
    ]
    codes = codes_of_words(words, kind="grid", bits=layout.bits)[:, : layout.k]
    span = layout.kernel_group or layout.k

    def by_column(packed: Tensor) -> Tensor:
        own = packed[tile, :, row % 8, row // 8].float()
        return own.repeat_interleave(span, dim=1)[:, : layout.k]

    centre = float(1 << (layout.bits - 1)) if layout.zero_points is None else by_column(layout.zero_points)
    values = (codes.float() - centre) * by_column(layout.scales)
    if layout.column_scales is not None:
        values = values / layout.column_scales.float()
    return values.to(dtype)
