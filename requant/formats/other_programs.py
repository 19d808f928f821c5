"""The matrices that other programs' formats can express: uniform grids without residuals or column scales.

What a format cannot hold is returned as the end of a sentence: `inexpressible` for compressed-tensors, `misfit` for GGUF.
"""

from requant.formats.grid import Grid, GridSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight

BLOCK = 32  # weights that share a scale in llama.cpp
BLOCK_BITS = {
    "Q4_0": 4,
    "Q5_0": 5,
    "Q8_0": 8,
}  # its types that hold whole numbers exactly; the smallest first


def obstacle(spec: PackedSpec) -> str | None:
    """Why a matrix is not such a grid, as the end of a sentence; None if it is one."""
    if not isinstance(spec.dense, GridSpec):
        return f"has {spec.format} codes"
    if spec.sparse is not None:
        return f"has a sparse part ({spec.num_entries:,} entries)"
    if spec.dense.column_scales:
        return "has column scales of its own (AWQ)"
    return None


def grid_spec_of(spec: PackedSpec) -> GridSpec:
    """The spec of a matrix without obstacle."""
    assert isinstance(spec.dense, GridSpec), "refused before"
    return spec.dense


def grid_of(weight: QuantizedWeight) -> Grid:
    """The codes of a matrix without obstacle."""
    assert isinstance(weight.dense, Grid) and weight.sparse is None, "refused before"
    return weight.dense


def inexpressible(spec: PackedSpec) -> str | None:
    """Why compressed-tensors cannot express a matrix."""
    what, k = obstacle(spec), spec.shape[1]
    if what is None and (group_size := grid_spec_of(spec).group_size) < k and k % group_size:
        return f"has {k} columns in groups of {group_size}, the last one shorter"
    return what


def misfit(spec: PackedSpec) -> str | None:
    """Why no block of llama.cpp holds a matrix."""
    if (what := obstacle(spec)) is not None:
        return what
    grid = grid_spec_of(spec)
    k = grid.shape[1]
    if k % BLOCK or (grid.group_size < k and grid.group_size % BLOCK):
        return f"has {k} columns in groups of {grid.group_size}, not in multiples of {BLOCK}"
    return f"has {grid.bits} bits with zero points" if block_type(grid) is None else None


def block_type(spec: GridSpec) -> str | None:
    """The smallest type of block that holds every grid of this spec; None where none does."""
    levels = 1 << spec.bits
    low, high = (1 - levels, levels - 1) if spec.zero_points else (-levels // 2, levels // 2 - 1)
    fits = [name for name, bits in BLOCK_BITS.items() if -(1 << bits - 1) <= low and high < 1 << bits - 1]
    return fits[0] if fits else None
