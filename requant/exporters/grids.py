"""The matrices that other programs' formats can express: uniform grids without residuals or column scales."""

from requant.formats.grid import Grid, GridSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight


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
