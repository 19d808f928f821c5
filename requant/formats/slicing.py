"""A quantized matrix cut by rows or columns, and put together by rows, exactly: what tensor parallelism needs.

    slice_rows(w, a, b).dequantize() == w.dequantize()[a:b]        join_rows(parts) == the rows one below the other

bit for bit, whatever the container. Codes, scales and levels of a grid or a codebook belong to rows and groups of
columns, so a cut takes a part of each; a cut inside a group of columns makes the groups finer (`gcd`) and repeats
their scales. The sparse part is CSR: rows are one run of entries, columns are found and renumbered.

A trellis lives in a rotated basis, where a weight is a sum over a Hadamard block (`requant.formats.hadamard`). It can be cut
between blocks, if the slice has blocks of the same size by itself. That is rare: most widths are one or few blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from requant.errors import InputError
from requant.formats.containers import Codebook, Dense, Grid, QuantizedWeight, Sparse, Trellis
from requant.formats.hadamard import block_size, padded


def slice_rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Rows `start` to `stop` (outputs, or a column-parallel rank's part). Raises InputError where a trellis cannot."""
    n, _ = weight.shape
    _check(start, stop, n, "rows")
    if (start, stop) == (0, n):
        return weight
    sparse = None if weight.sparse is None else _sparse_rows(weight.sparse, start, stop)
    return QuantizedWeight(dense=_dense_rows(weight.dense, start, stop), sparse=sparse)


def slice_columns(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Columns `start` to `stop` (inputs, or a row-parallel rank's part). Raises InputError where a trellis cannot."""
    _, k = weight.shape
    _check(start, stop, k, "columns")
    if (start, stop) == (0, k):
        return weight
    sparse = None if weight.sparse is None else _sparse_columns(weight.sparse, start, stop)
    return QuantizedWeight(dense=_dense_columns(weight.dense, start, stop), sparse=sparse)


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The matrix whose rows are those of `parts`, in order; None where no single container holds them.

    They must agree in format, bits, groups and column scales, and in the dtype of residuals; a trellis never joins,
    since its rotation runs over all rows.
    """
    if len(parts) == 1:
        return parts[0]
    dense = _join_dense([part.dense for part in parts])
    present = [part.sparse for part in parts if part.sparse is not None]
    if dense is None or len({sparse.row_scales is None for sparse in present}) > 1:
        return None
    return QuantizedWeight(dense=dense, sparse=_join_sparse(parts, present) if present else None)


def _dense_rows(dense: Dense, start: int, stop: int) -> Dense:
    match dense:
        case Codebook():
            return replace(dense, codes=dense.codes[start:stop], levels=dense.levels[start:stop])
        case Grid():
            zero_points = None if dense.zero_points is None else dense.zero_points[start:stop]
            return replace(
                dense,
                codes=dense.codes[start:stop],
                scales=dense.scales[start:stop],
                zero_points=zero_points,
            )
        case Trellis():
            end = _block_end(dense.shape[0], start, stop, "rows")
            return replace(dense, codes=dense.codes[start:end], output_scales=dense.output_scales[start:stop])


def _dense_columns(dense: Dense, start: int, stop: int) -> Dense:
    match dense:
        case Codebook():
            return replace(dense, codes=dense.codes[:, start:stop])
        case Grid():
            size = min(dense.group_size, dense.shape[1])
            group = math.gcd(size, start) if start else size
            first = torch.arange(start, stop, group, device=dense.codes.device) // size
            return replace(
                dense,
                codes=dense.codes[:, start:stop],
                scales=dense.scales[:, first],
                zero_points=None if dense.zero_points is None else dense.zero_points[:, first],
                column_scales=None if dense.column_scales is None else dense.column_scales[start:stop],
                group_size=group,
            )
        case Trellis():
            end = _block_end(dense.shape[1], start, stop, "columns")
            return replace(
                dense, codes=dense.codes[:, start:end], input_scales=dense.input_scales[start:stop]
            )


def _block_end(width: int, start: int, stop: int, side: str) -> int:
    """The end of the slice in padded codes; raises InputError where the cut goes through a Hadamard block."""
    block = block_size(padded(width))
    end = start + padded(stop - start)
    if start % block or block_size(padded(stop - start)) != block or (stop != width and end != stop):
        raise InputError(
            f"a trellis of {width} {side} cannot be cut to {side} {start} to {stop}: its rotation mixes blocks of "
            f"{block}; serve it on one GPU (or with pipeline parallelism), or quantize with kmeans or gptq."
        )
    return end


def _sparse_rows(sparse: Sparse, start: int, stop: int) -> Sparse | None:
    first, last = (int(sparse.indptr[at]) for at in (start, stop))
    if first == last:
        return None
    return Sparse(
        indptr=sparse.indptr[start : stop + 1] - first,
        indices=sparse.indices[first:last],
        values=sparse.values[first:last],
        row_scales=None if sparse.row_scales is None else sparse.row_scales[start:stop],
        shape=(stop - start, sparse.shape[1]),
    )


def _sparse_columns(sparse: Sparse, start: int, stop: int) -> Sparse | None:
    inside = (sparse.indices >= start) & (sparse.indices < stop)
    if not inside.any():
        return None
    counts = torch.bincount(sparse.rows[inside], minlength=sparse.shape[0])
    return Sparse(
        indptr=_pointers(counts),
        indices=sparse.indices[inside] - start,
        values=sparse.values[inside],
        row_scales=sparse.row_scales,
        shape=(sparse.shape[0], stop - start),
    )


def _join_dense(parts: Sequence[Dense]) -> Dense | None:
    first = parts[0]
    if isinstance(first, Codebook):
        books = [part for part in parts if isinstance(part, Codebook) and part.bits == first.bits]
        if len(books) == len(parts):
            return replace(
                first,
                codes=torch.cat([book.codes for book in books]),
                levels=torch.cat([book.levels for book in books]),
            )
    if isinstance(first, Grid):
        grids = [part for part in parts if isinstance(part, Grid) and _same_grid(first, part)]
        if len(grids) == len(parts):
            zero_points = [grid.zero_points for grid in grids if grid.zero_points is not None]
            return replace(
                first,
                codes=torch.cat([grid.codes for grid in grids]),
                scales=torch.cat([grid.scales for grid in grids]),
                zero_points=torch.cat(zero_points) if zero_points else None,
            )
    return None


def _same_grid(one: Grid, other: Grid) -> bool:
    """Whether only codes, scales and zero points tell the two apart."""
    k = one.shape[1]
    if (one.bits, min(one.group_size, k), k) != (other.bits, min(other.group_size, k), other.shape[1]):
        return False
    if (one.zero_points is None) != (other.zero_points is None):
        return False
    if one.column_scales is None or other.column_scales is None:
        return one.column_scales is other.column_scales
    return torch.equal(one.column_scales, other.column_scales)


def _join_sparse(parts: Sequence[QuantizedWeight], present: Sequence[Sparse]) -> Sparse:
    counts: list[Tensor] = []
    for part in parts:
        n = part.shape[0]
        counts.append(
            present[0].indptr.new_zeros(n)
            if part.sparse is None
            else part.sparse.indptr.diff()  # its rows, empty
        )
    row_scales = None
    if present[0].row_scales is not None:
        row_scales = torch.cat(
            [
                part.sparse.row_scales
                if part.sparse is not None and part.sparse.row_scales is not None
                else present[0].row_scales.new_zeros(part.shape[0])
                for part in parts
            ]
        )
    return Sparse(
        indptr=_pointers(torch.cat(counts)),
        indices=torch.cat([sparse.indices for sparse in present]),
        values=torch.cat([sparse.values for sparse in present]),
        row_scales=row_scales,
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
    )


def _pointers(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _check(start: int, stop: int, size: int, side: str) -> None:
    if not 0 <= start < stop <= size:
        raise InputError(
            f"{side} {start} to {stop} are no part of a matrix of {size} {side}; give a start below the stop, "
            f"both within 0 to {size}."
        )
