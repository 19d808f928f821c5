"""The sparse part of a matrix: residuals `w - dense` of some weights, in compressed sparse rows (CSR).

    w~ = dense + sparse

SqueezeLLM's dense-and-sparse decomposition (Kim et al. 2023, arXiv 2306.07629), with one deviation: we store the residual,
not the weight, so that the dense codes need no holes and a kernel computes `dense @ x + sparse @ x` without a mask.

On disk an index is one byte, the column within its tile of 256 columns, and a count for every (row, tile) replaces row
pointers. `requant/checkpoint/format.md` compares this with other encodings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float16, Int8, Int32, Int64
from torch import Tensor

from requant.formats.json_entry import choice
from requant.formats.magnitude import too_large
from requant.formats.tensor_spec import TensorSpec, float16_spec

INDEX_TILE = 256  # columns a sparse index spans on disk and in the kernels: one byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """Residuals in CSR order, columns ascending within a row.

    `values` are float16, or int8 with one float16 scale a row. Where all rows share one scale it is stored once.
    """

    indptr: Int64[Tensor, " p"]  # n + 1
    indices: Int32[Tensor, " z"]
    values: Float16[Tensor, " z"] | Int8[Tensor, " z"]
    row_scales: Float16[Tensor, " n"] | None
    shape: tuple[int, int]

    @property
    def rows(self) -> Int64[Tensor, " z"]:
        """The row of every residual."""
        counts = self.indptr.diff()
        return torch.repeat_interleave(torch.arange(self.shape[0], device=counts.device), counts)

    def floats(self) -> Float[Tensor, " z"]:
        """The residuals, float32."""
        if self.row_scales is None:
            return self.values.float()
        return self.values.float() * self.row_scales.float()[self.rows]

    def dequantize(self) -> Float[Tensor, "n k"]:
        """float32, zero where there is no residual."""
        dense = torch.zeros(self.shape, device=self.values.device)
        dense[self.rows, self.indices.long()] = self.floats()
        return dense

    def csr(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """indptr, indices, values, row scales: as `requant_kernels` takes them."""
        return self.indptr, self.indices, self.values, self.row_scales

    def spec(self) -> "SparseSpec":
        """The spec that `pack` gives."""
        return self._spec(tile_counts(self))

    def pack(self) -> tuple["SparseSpec", dict[str, Tensor]]:
        """The spec, and the tensors it lists."""
        counts = tile_counts(self)
        spec = self._spec(counts)
        tensors = {
            "sparse_counts": counts.to(getattr(torch, spec.counts)),
            "sparse_indices": (self.indices % INDEX_TILE).to(torch.uint8),
            "sparse_values": self.values,
        }
        if self.row_scales is not None:
            tensors["sparse_scales"] = self.row_scales[:1] if spec.scales == "matrix" else self.row_scales
        return spec, tensors

    def slice_rows(self, start: int, stop: int) -> "Sparse | None":
        """The residuals of some rows; None where there is none."""
        first, last = (int(self.indptr[at]) for at in (start, stop))
        if first == last:
            return None
        return Sparse(
            indptr=self.indptr[start : stop + 1] - first,
            indices=self.indices[first:last],
            values=self.values[first:last],
            row_scales=None if self.row_scales is None else self.row_scales[start:stop],
            shape=(stop - start, self.shape[1]),
        )

    def slice_columns(self, start: int, stop: int) -> "Sparse | None":
        """The residuals of some columns, renumbered; None where there is none."""
        inside = (self.indices >= start) & (self.indices < stop)
        if not inside.any():
            return None
        counts = torch.bincount(self.rows[inside], minlength=self.shape[0])
        return Sparse(
            indptr=_row_pointers(counts),
            indices=self.indices[inside] - start,
            values=self.values[inside],
            row_scales=self.row_scales,
            shape=(self.shape[0], stop - start),
        )

    def with_values(self, values: Float[Tensor, " z"]) -> "Sparse":
        """Other residuals of the same weights, rounded to the 8 or 16 bits in which they are stored."""
        values = values.detach()
        if self.row_scales is None:
            return replace(self, values=values.half())
        scales = self.row_scales
        if (scales == scales[0]).all():  # a single scale grows with the largest residual
            scales = torch.maximum(scales, (values.abs().amax() / 127).half())
        steps = (values / scales.float()[self.rows]).round().clamp(-127, 127)
        return replace(self, values=steps.to(torch.int8), row_scales=scales)

    def _spec(self, counts: Int64[Tensor, "n t"]) -> "SparseSpec":
        scales = self.row_scales
        one_scale = scales is not None and len(scales) > 1 and bool((scales == scales[0]).all())
        return SparseSpec(
            shape=self.shape,
            num_entries=self.values.numel(),
            values="float16" if scales is None else "int8",
            # A full tile has 256 entries, one more than a byte counts.
            counts="uint16" if (counts == INDEX_TILE).any() else "uint8",
            scales="matrix" if one_scale else "rows",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSpec:
    """Dtypes and shapes of the tensors of `num_entries` residuals, at least one.

    `scales`, of int8 values: one a row, or one for the matrix.
    """

    shape: tuple[int, int]
    num_entries: int
    values: Literal["float16", "int8"] = "float16"
    counts: Literal["uint8", "uint16"] = "uint8"
    scales: Literal["rows", "matrix"] = "rows"

    @property
    def tiles(self) -> int:
        """256-column tiles in a row."""
        return -(-self.shape[1] // INDEX_TILE)

    @property
    def version(self) -> int:
        """The first version of the checkpoint format that has what this spec says."""
        return 3 if self.scales == "matrix" else 1

    def tensors(self) -> dict[str, TensorSpec]:
        """Suffix -> dtype and shape, in the order of the file."""
        n, _ = self.shape
        specs = {
            "sparse_counts": TensorSpec(dtype=getattr(torch, self.counts), shape=(n, self.tiles)),
            "sparse_indices": TensorSpec(dtype=torch.uint8, shape=(self.num_entries,)),
            "sparse_values": TensorSpec(dtype=getattr(torch, self.values), shape=(self.num_entries,)),
        }
        if self.values == "int8":
            specs["sparse_scales"] = float16_spec(1 if self.scales == "matrix" else n)
        return specs

    def to_json(self) -> dict[str, Any]:
        """Its keys in the entry of `config.json`."""
        entry = {"sparse": self.num_entries, "sparse_values": self.values, "sparse_counts": self.counts}
        return entry | ({"sparse_scales": "matrix"} if self.scales == "matrix" else {})

    @classmethod
    def from_json(
        cls, name: str, entry: dict[str, Any], *, shape: tuple[int, int], num_entries: int
    ) -> "SparseSpec":
        """Parse and check an entry; raises CheckpointError with the name of the matrix and the key."""
        values = choice(name, entry, "sparse_values", ("float16", "int8"))
        counts = choice(name, entry, "sparse_counts", ("uint8", "uint16"))
        scales = "rows"
        if "sparse_scales" in entry and values == "int8":
            scales = choice(name, entry, "sparse_scales", ("matrix",))
        return cls(shape=shape, num_entries=num_entries, values=values, counts=counts, scales=scales)

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What is wrong with counts and indices of the right dtype and shape, or None."""
        counts = tensors["sparse_counts"].long()
        total = int(counts.sum())
        if total != self.num_entries:
            return f"sparse_counts sums to {total}, but {self.num_entries} sparse entries are stored"
        columns = torch.full((self.tiles,), INDEX_TILE, device=counts.device)
        columns[-1] = self.shape[1] - (self.tiles - 1) * INDEX_TILE
        if (counts > columns).any():
            return "sparse_counts has more entries in a 256-column tile than the tile has columns"
        tile = entry_tiles(counts)
        index = tensors["sparse_indices"].long()
        if (index >= columns[tile % self.tiles]).any():
            return f"sparse_indices points past the last of {self.shape[1]} columns"
        if ((tile * INDEX_TILE + index).diff() <= 0).any():
            return "sparse_indices is not strictly ascending within a row (unsorted or duplicate entries)"
        if self.values == "int8":
            return too_large("sparse_scales", tensors["sparse_scales"].float().abs().max() * 127)
        return None

    def packed_rows(
        self, tensors: Mapping[str, Tensor], rows: slice, entries: slice
    ) -> "tuple[SparseSpec | None, dict[str, Tensor]]":
        """Spec and stored tensors of some rows, whose residuals are `entries`; None where there is none."""
        num_entries = entries.stop - entries.start
        if not num_entries:
            return None, {}
        taken = {
            "sparse_counts": tensors["sparse_counts"][rows],
            "sparse_indices": tensors["sparse_indices"][entries],
            "sparse_values": tensors["sparse_values"][entries],
        }
        if self.values == "int8":
            scales = tensors["sparse_scales"]
            taken["sparse_scales"] = scales if self.scales == "matrix" else scales[rows]
        shape = rows.stop - rows.start, self.shape[1]
        return replace(self, shape=shape, num_entries=num_entries), taken

    def unpack(self, tensors: Mapping[str, Tensor]) -> Sparse:
        """The inverse of `Sparse.pack`."""
        counts = tensors["sparse_counts"].long()
        scales = tensors.get("sparse_scales")
        offset = entry_tiles(counts) % self.tiles * INDEX_TILE
        return Sparse(
            indptr=_row_pointers(counts.sum(1)),
            indices=(offset + tensors["sparse_indices"].long()).int(),
            values=tensors["sparse_values"],
            row_scales=None if scales is None else scales.expand(self.shape[0]).contiguous(),
            shape=self.shape,
        )


def sparse_residual(
    weight: Float[Tensor, "n k"], dense: Float[Tensor, "n k"], mask: Bool[Tensor, "n k"]
) -> Sparse | None:
    """`weight - dense` where `mask` is True, in float16; None where it is True nowhere."""
    return sparse_at(weight.float() - dense.float(), mask)


def sparse_at(values: Float[Tensor, "n k"], mask: Bool[Tensor, "n k"]) -> Sparse | None:
    """The elements of `values` where `mask` is True, in float16; None where it is True nowhere."""
    rows, columns = mask.nonzero(as_tuple=True)  # row-major, so columns ascend within a row
    if rows.numel() == 0:
        return None
    return Sparse(
        indptr=_row_pointers(mask.sum(1)),
        indices=columns.int(),
        values=values[rows, columns].half(),
        row_scales=None,
        shape=(values.shape[0], values.shape[1]),
    )


def sparse_mask(sparse: Sparse | None, shape: tuple[int, int], device: torch.device) -> Bool[Tensor, "n k"]:
    """True where `sparse` has a residual."""
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    if sparse is not None:
        mask[sparse.rows, sparse.indices.long()] = True
    return mask


def residuals_to_int8(sparse: Sparse) -> Sparse:
    """The residuals as multiples of 1/127 of the largest; the error is at most 1/254 of it.

    One scale serves all rows: residuals differ less between rows than 8 bits resolve, and 16 bits a row would cost more
    than the values of a sparse row.
    """
    floats = sparse.floats()
    scale = (floats.abs().amax() / 127).half()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = (floats / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return replace(sparse, values=values, row_scales=scale.repeat(sparse.shape[0]))


def join_sparse_rows(parts: Sequence[Sparse | None], shapes: Sequence[tuple[int, int]]) -> Sparse | None:
    """The residuals of matrices stacked by rows; all have the same dtype, or None for a matrix without any."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    counts = [
        present[0].indptr.new_zeros(n) if part is None else part.indptr.diff()
        for part, (n, _) in zip(parts, shapes, strict=True)
    ]
    row_scales = None
    if present[0].row_scales is not None:
        row_scales = torch.cat(
            [
                present[0].row_scales.new_zeros(n)
                if part is None or part.row_scales is None
                else part.row_scales
                for part, (n, _) in zip(parts, shapes, strict=True)
            ]
        )
    return Sparse(
        indptr=_row_pointers(torch.cat(counts)),
        indices=torch.cat([part.indices for part in present]),
        values=torch.cat([part.values for part in present]),
        row_scales=row_scales,
        shape=(sum(n for n, _ in shapes), shapes[0][1]),
    )


def tile_counts(sparse: Sparse) -> Int64[Tensor, "n t"]:
    """Residuals in every (row, 256-column tile)."""
    n, k = sparse.shape
    tiles = -(-k // INDEX_TILE)
    tile = sparse.rows * tiles + sparse.indices.long() // INDEX_TILE
    return torch.bincount(tile, minlength=n * tiles).view(n, tiles)


def entry_tiles(counts: Int64[Tensor, "n t"]) -> Int64[Tensor, " z"]:
    """The running number `row * tiles + tile` of the tile of every residual, in stored order."""
    return torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts.flatten())


def _row_pointers(counts: Int64[Tensor, " n"]) -> Int64[Tensor, " p"]:
    return F.pad(counts.cumsum(0), (1, 0))
