"""Kernels of requant: packed layouts, and the operations on them. Importing needs neither a GPU nor Triton."""

from requant_kernels.layouts import (
    CodebookLayout,
    GridLayout,
    Layout,
    SparseSlots,
    pack_codebook,
    pack_grid,
    unpack_codebook,
    unpack_grid,
    unpack_sparse,
)
from requant_kernels.ops import dequantize, linear, linear_siblings

__all__ = [
    "linear",
    "linear_siblings",
    "dequantize",
    "pack_grid",
    "pack_codebook",
    "unpack_grid",
    "unpack_codebook",
    "unpack_sparse",
    "GridLayout",
    "CodebookLayout",
    "SparseSlots",
    "Layout",
]
