"""The torch twin of every kernel: the same equation in plain tensors, at the precision the caller asks for.

    y = (x / column_scales) @ dense^T + x @ sparse^T + bias
"""

import torch
from torch import Tensor

from requant_kernels.layouts import CodebookLayout, Layout, sparse_entries, unpack_codebook, unpack_grid


def dense(layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The dense part [n, k], before `column_scales`."""
    if isinstance(layout, CodebookLayout):
        codes, levels = unpack_codebook(layout)
        return levels.to(dtype).gather(1, codes.long())
    codes, scales, zero_points = unpack_grid(layout)
    group = torch.arange(layout.k, device=codes.device) // layout.group_size
    centre = float(1 << (layout.bits - 1)) if zero_points is None else zero_points.to(dtype)[:, group]
    return (codes.to(dtype) - centre) * scales.to(dtype)[:, group]


def sparse(layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The residuals as a full matrix [n, k]."""
    matrix = torch.zeros(layout.n, layout.k, dtype=dtype, device=layout.words.device)
    if layout.sparse is not None:
        rows, columns, residuals = sparse_entries(layout)
        matrix[rows, columns] = residuals.to(dtype)
    return matrix


def weight(layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """The whole matrix [n, k] that the layout stands for."""
    matrix = dense(layout, dtype)
    scales = None if isinstance(layout, CodebookLayout) else layout.column_scales
    if scales is not None:
        matrix = matrix / scales.to(dtype)
    return matrix + sparse(layout, dtype)


def linear(x: Tensor, layout: Layout, bias: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """y [.., n] of x [.., k], computed and returned in `dtype`."""
    y = x.to(dtype) @ weight(layout, dtype).T
    return y if bias is None else y + bias.to(dtype)


def transpose_tokens(x: Tensor, width: int) -> Tensor:
    """[m, k] -> [k, width], tokens beyond m zero: what the sparse gather of several tokens reads."""
    return torch.nn.functional.pad(x, (0, 0, 0, width - x.shape[0])).T.contiguous()
