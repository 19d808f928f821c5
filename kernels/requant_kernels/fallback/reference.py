"""The reference of the kernels: the equation of every packed layout in plain tensors, float64 unless asked otherwise.

    y = (x / column_scales) @ dense^T + x @ sparse^T + bias

Covered: `linear`, `dequantize` and `lookup` of grids, codebooks and trellises with their residuals, and the Hadamard
transform. It starts from the packed layout, so only the round trips of `pack_*` and `unpack_*` can show packing errors. Not
covered: the attention kernel (torch's own softmax is its reference) and the Viterbi search (`viterbi/cpu.py`). Inputs keep
their rounding: scales, levels and activations are float16 (bfloat16) numbers; only the arithmetic is exact.
"""

import torch
from torch import Tensor

from requant_kernels.common.packing import (
    CodebookLayout,
    Layout,
    unpack_codebook,
    unpack_grid,
)
from requant_kernels.common.sparse import unpack_residuals
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import TrellisLayout, step_bits, unpack_trellis


def dense(layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The dense part [n, k], before `column_scales`."""
    if isinstance(layout, CodebookLayout):
        codes, levels = unpack_codebook(layout)
        return levels.to(dtype).gather(1, codes.long())
    codes, scales, zero_points = unpack_grid(layout)
    group = torch.arange(layout.k, device=codes.device) // layout.group_size
    centre = float(1 << (layout.bits - 1)) if zero_points is None else zero_points.to(dtype)[:, group]
    return (codes.to(dtype) - centre) * scales.to(dtype)[:, group]


def sparse(layout: Layout | TrellisLayout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The residuals as a full matrix [n, k]."""
    matrix = torch.zeros(layout.n, layout.k, dtype=dtype, device=layout.packed_codes.device)
    if layout.sparse is not None:
        rows, columns, values = unpack_residuals(layout)
        matrix[rows, columns] = values.to(dtype)
    return matrix


def weight(layout: Layout | TrellisLayout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The dequantized weight [n, k]: dense part plus residuals."""
    if isinstance(layout, TrellisLayout):
        return trellis_weight(layout, dtype) + sparse(layout, dtype)
    matrix = dense(layout, dtype)
    scales = layout.column_scales
    if scales is not None:
        matrix = matrix / scales.to(dtype)
    return matrix + sparse(layout, dtype)


def linear(
    x: Tensor, layout: Layout | TrellisLayout, bias: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """y [.., n] of x [.., k], computed and returned in `dtype`."""
    y = x.to(dtype) @ weight(layout, dtype).T
    return y if bias is None else y + bias.to(dtype)


def hadamard(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The Hadamard rotation of `width` (a multiple of 16): blocks of the largest power of two that divides it."""
    size = width & -width
    matrix = torch.ones(1, 1, dtype=dtype)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix * size**-0.5] * (width // size))


def trellis_values(layout: TrellisLayout, dtype: torch.dtype = torch.float64) -> Tensor:
    """V [r, c]: every value from the 16 bits of its tile's tail-biting code sequence that end with its code."""
    codes = unpack_trellis(layout).long()
    rows, columns = codes.shape
    sequences = codes.view(rows // 16, 16, columns // 16, 16).transpose(1, 2).reshape(-1, 256)
    code_bits = torch.tensor(step_bits(layout.quad_bits), device=sequences.device).repeat(64)
    window, shift = torch.zeros_like(sequences), torch.zeros_like(code_bits)
    for back in range(16):  # at least one bit per code
        window |= sequences.roll(back, 1) << shift
        shift += code_bits.roll(back)
    window &= 0xFFFF
    code = CODES[layout.code]
    if code.weights_per_hash == 2:
        window = window[:, 1::2].repeat_interleave(2, 1)
    h = window * code.multiplier + code.addend
    if not code.byte_sums:
        h = (h & 0x8FFF8FFF) ^ 0x3B603B60
        low, high = ((h >> shift & 0xFFFF).to(torch.int16).view(torch.float16) for shift in (0, 16))
        values = (low + high).to(dtype)
    else:
        b = [(h >> shift & 0xFF).to(dtype) for shift in (0, 8, 16, 24)]
        values = (b[0] + b[1] + b[2] + b[3] - 510) / 128
        if code.weights_per_hash == 2:
            values[:, 1::2] = ((b[0] - b[1] - b[2] + b[3]) / 128)[:, 1::2]
    return values.view(rows // 16, columns // 16, 16, 16).transpose(1, 2).reshape(rows, columns)


def trellis_weight(layout: TrellisLayout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The dense part of a trellis: diag(output_scales) H V H diag(input_scales), [n, k]; an H may be absent."""
    values = trellis_values(layout, dtype)
    rows, columns = values.shape
    if layout.rotates_output:
        parts = values.split(layout.parts or (rows,))
        values = torch.cat([hadamard(len(part), dtype).to(part.device) @ part for part in parts])
    if layout.input_scales is not None:
        values = values @ hadamard(columns, dtype).to(values.device)
        values = values[:, : layout.k] * layout.input_scales.to(dtype)
    return layout.output_scales.to(dtype)[:, None] * values[: layout.n]
