"""Kernels of requant: packed layouts, and the operations on them. Importing needs neither a GPU nor Triton."""

from requant_kernels.common.packing import (
    CodebookLayout,
    GridLayout,
    Layout,
    pack_codebook,
    pack_grid,
    unpack_codebook,
    unpack_grid,
    unpack_sparse,
)
from requant_kernels.common.sparse import SlicedEll
from requant_kernels.ops import dequantize, linear, lookup, rotate
from requant_kernels.trellis.layout import TrellisLayout, pack_trellis, unpack_trellis

__all__ = [
    "linear",
    "dequantize",
    "lookup",
    "rotate",
    "pack_grid",
    "pack_codebook",
    "pack_trellis",
    "unpack_grid",
    "unpack_codebook",
    "unpack_sparse",
    "unpack_trellis",
    "GridLayout",
    "CodebookLayout",
    "SlicedEll",
    "TrellisLayout",
    "Layout",
]
