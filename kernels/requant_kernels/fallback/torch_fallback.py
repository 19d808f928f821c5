"""The torch path for grids, codebooks and trellis rows on any device: dequantize some row tiles, multiply, free them.

WEIGHTS_AT_ONCE bounds the weights in memory at a time. On a CPU this is the kernel: packed codes are unpacked one bit field
at a time (two or three integer operations per code) and torch's own matrix product does the rest, on torch's threads.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from requant_kernels.common.bit_layout import ROW_TILE
from requant_kernels.common.packing import (
    CodebookLayout,
    GridLayout,
    Layout,
    unpack_codes,
    unpack_row_codes,
)
from requant_kernels.common.sparse import unpack_residuals
from requant_kernels.fallback import reference
from requant_kernels.trellis.layout import TrellisLayout

WEIGHTS_AT_ONCE = 1 << 22  # dequantized
RESIDUALS_AT_ONCE = 1 << 20


def dequantize_tiles(layout: Layout, start: int, stop: int) -> Tensor:
    """Dense weights, float32, of row tiles `start` to `stop`, in stored order: [16 (stop - start), k]."""
    codes = unpack_codes(layout.packed_codes[start:stop], format=layout.format, bits=layout.bits, k=layout.k)
    if isinstance(layout, CodebookLayout):
        return layout.levels[start * ROW_TILE : stop * ROW_TILE].float().gather(1, codes.long())
    span = layout.kernel_group or layout.k

    def by_column(packed: Tensor) -> Tensor:
        plain = packed[start:stop].permute(0, 3, 2, 1).reshape(len(codes), -1).float()
        return plain.repeat_interleave(span, dim=1)[:, : layout.k]

    if layout.zero_points is None:
        return (codes.float() - float(1 << (layout.bits - 1))) * by_column(layout.scales)
    return (codes.float() - by_column(layout.zero_points)) * by_column(layout.scales)


def supports(layout: Layout | TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Any layout without a GPU."""
    return device.type != "cuda"


def linear(x: Tensor, layout: Layout | TrellisLayout, bias: Tensor | None, config: None = None) -> Tensor:
    """y [m, n] of x [m, k] in x's dtype, accumulated in float32."""
    tokens = x.float()
    if isinstance(layout, TrellisLayout):
        y = tokens @ reference.weight(layout, torch.float32).T
        return (y if bias is None else y + bias.float()).to(x.dtype)
    dense = tokens
    if layout.column_scales is not None:
        dense = tokens / layout.column_scales.float()
    tiles = layout.packed_codes.shape[0]
    step = max(1, WEIGHTS_AT_ONCE // (ROW_TILE * layout.k))
    stored = torch.cat(
        [dense @ dequantize_tiles(layout, i, min(i + step, tiles)).T for i in range(0, tiles, step)], 1
    )
    y = stored[:, : layout.n]
    if layout.row_perm is not None:
        y = torch.empty_like(y).index_copy_(1, layout.row_perm[: layout.n].long(), y)
    if layout.sparse is not None:
        rows, columns, values = unpack_residuals(layout)
        for i in range(0, len(rows), RESIDUALS_AT_ONCE):
            part = slice(i, i + RESIDUALS_AT_ONCE)
            y.index_add_(1, rows[part], tokens[:, columns[part]] * values[part])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def dequantize(layout: Layout, dtype: torch.dtype) -> Tensor:
    """The matrix [n, k] in `dtype`, as used by `linear`."""
    tiles = layout.packed_codes.shape[0]
    step = max(1, WEIGHTS_AT_ONCE // (ROW_TILE * layout.k))
    out = torch.empty(layout.n, layout.k, dtype=dtype, device=layout.packed_codes.device)
    for i in range(0, tiles, step):
        weights = dequantize_tiles(layout, i, min(i + step, tiles))
        if layout.column_scales is not None:
            weights = weights / layout.column_scales.float()
        stop = min((i + step) * ROW_TILE, layout.n)
        rows = torch.arange(i * ROW_TILE, stop, device=out.device)
        if layout.row_perm is not None:
            rows = layout.row_perm[i * ROW_TILE : stop].long()
        out[rows] = weights[: len(rows)].to(dtype)
    if layout.sparse is not None:
        rows, columns, values = unpack_residuals(layout)
        out[rows, columns] = (out[rows, columns].float() + values).to(dtype)
    return out


def lookup(tokens: Tensor, layout: GridLayout, dtype: torch.dtype) -> Tensor:
    """Rows `tokens` of a grid without residuals: [m, k] in `dtype`. Raises IndexError for a token outside of it."""
    _check_tokens(tokens, layout.n)
    tiles, k_tiles = layout.packed_codes.shape[:2]
    tile, row = tokens // ROW_TILE, tokens % ROW_TILE
    # lane 4 g + t holds (kh, rh): the words of row 8 rh + g
    words = layout.packed_codes.view(tiles, k_tiles, layout.bits, 8, 4, 2, 2)[
        tile, :, :, row % 8, :, :, row // 8
    ]
    codes = unpack_row_codes(words, format="grid", bits=layout.bits)[:, : layout.k]
    span = layout.kernel_group or layout.k

    def by_column(packed: Tensor) -> Tensor:
        own = packed[tile, :, row % 8, row // 8].float()
        return own.repeat_interleave(span, dim=1)[:, : layout.k]

    centre = float(1 << (layout.bits - 1)) if layout.zero_points is None else by_column(layout.zero_points)
    values = (codes.float() - centre) * by_column(layout.scales)
    if layout.column_scales is not None:
        values = values / layout.column_scales.float()
    return values.to(dtype)


def lookup_bands(tokens: Tensor, layouts: Sequence[TrellisLayout], dtype: torch.dtype) -> Tensor:
    """Rows `tokens` of vertically stacked trellises without residuals and output rotations: [m, k] in `dtype`.

    Raises IndexError for a token outside of them.
    """
    k, n = layouts[0].k, sum(layout.n for layout in layouts)
    _check_tokens(tokens, n)
    rows = torch.empty(len(tokens), k, dtype=dtype, device=tokens.device)
    step, first = max(1, WEIGHTS_AT_ONCE // (ROW_TILE * k)), 0
    for layout in layouts:
        own = ((tokens >= first) & (tokens < first + layout.n)).nonzero().flatten()
        for i in range(0, len(own), step):
            here = own[i : i + step]
            rows[here] = _trellis_rows(tokens[here] - first, layout).to(dtype)
        first += layout.n
    return rows


def _check_tokens(tokens: Tensor, n: int) -> None:
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < n):
        raise IndexError(f"tokens are 0 to {n - 1} here, not {int(tokens.min())} to {int(tokens.max())}")


def _trellis_rows(tokens: Tensor, layout: TrellisLayout) -> Tensor:
    """Rows of a trellis, float32, each from a tile of 16 rows, whose codes are one stream."""
    tiles = reference.trellis_values(
        replace(layout, packed_codes=layout.packed_codes[tokens // ROW_TILE]), torch.float32
    )
    at = torch.arange(len(tokens), device=tokens.device) * ROW_TILE + tokens % ROW_TILE
    rows = tiles[at] * layout.output_scales[tokens].float()[:, None]
    if layout.input_scales is None:
        return rows
    return _hadamard(rows)[:, : layout.k] * layout.input_scales.float()


def _hadamard(x: Tensor) -> Tensor:
    """H x for every row, by butterflies: `reference.hadamard` without its matrix, whose size is the square of a row's."""
    size = x.shape[1] & -x.shape[1]
    y, half = x * size**-0.5, 1
    while half < size:
        pairs = y.view(len(x), -1, 2, half)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return y.view_as(x)
