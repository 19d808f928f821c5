"""A quantized matrix: codes in the container of one format, plus sparse residuals.

A matrix `w [n, k]` (n = out_features, k = in_features) is stored as

    w~ = dense + sparse

where `dense` is the container of a registered format (`contract.py`), and `sparse` holds residuals of some weights.

| container | value of code q in row i, column j | trainable parameters |
| --- | --- | --- |
| `Grid` | `(q - zero_point[i, g]) * scale[i, g] / column_scale[j]`, g = j // group_size | scales |
| `Codebook` | `levels[i, q]` | levels |
| `SemiStructured` | `(q + 1/2 - 2^(bits - 1)) * scale[i, g]`, 0 where a 2:4 mask prunes | scales, or all values |
| `Bands` | that of the part to which row i belongs | those of its parts |
| `Trellis` | the code of the 16 bits up to q, rotated back and scaled on both sides | output scales |
| `Sparse` | residual of a weight | residuals |

Everything here is exact: scales, levels and residuals are held with the 16 bits in which they are stored, or rounded to 8
bits if they are stored in 8 (`int8.py`), and `dequantize` works in float32. So packing and unpacking, slicing and joining
give the same floats bit for bit:

    unpack(*pack(w)).dequantize() == w.dequantize()
    slice_rows(w, a, b).dequantize() == w.dequantize()[a:b]
    weight_function(w)(trainable_params(w)) == w.dequantize()           with_trainable_params(w, trainable_params(w)) == w

(The weight function may round differently; so may slices of a trellis, since they rotate other sizes.)
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from requant.errors import InputError
from requant.formats.bands import Bands, BandsSpec
from requant.formats.contract import Container, TrainableParams
from requant.formats.packed_spec import PackedSpec
from requant.formats.sparse import Sparse, join_sparse_rows, residuals_to_int8, sparse_residual

ROW_WEIGHTS = 1 << 22  # dequantized at a time where rows are asked for
ROWS, COLUMNS = "residual_rows", "residual_columns"  # beside what a container decodes to


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """What a quantizer returns and a checkpoint stores for one matrix."""

    dense: Container
    sparse: Sparse | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same codes on another device; what `pack` has made of them goes along."""
        sparse = None if self.sparse is None else _moved(self.sparse, device)
        moved = QuantizedWeight(dense=_moved(self.dense, device), sparse=sparse)
        if "_packed" in self.__dict__:
            moved.__dict__["_packed"] = self._packed
        return moved

    def dequantize(self) -> Float[Tensor, "n k"]:
        """Floats of the whole matrix, float32: dense plus sparse."""
        weight = self.dense.dequantize()
        if self.sparse is not None:
            weight[self.sparse.rows, self.sparse.indices.long()] += self.sparse.floats()
        return weight

    @cached_property
    def _packed(self) -> tuple[PackedSpec, dict[str, Tensor]]:
        dense, tensors = self.dense.pack()
        sparse, residuals = None, {}
        if (present := _present(self.sparse)) is not None:
            sparse, residuals = present.pack()
        stored = {suffix: tensor.detach().cpu() for suffix, tensor in (tensors | residuals).items()}
        return PackedSpec(dense=dense, sparse=sparse), stored


class DecodedOnce(QuantizedWeight):
    """The same, but its floats stay where they were first asked for: whoever gets them must not change them."""

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "DecodedOnce":
        return cls(dense=weight.dense, sparse=weight.sparse)

    def dequantize(self) -> Float[Tensor, "n k"]:
        return self._floats

    @cached_property
    def _floats(self) -> Tensor:
        return super().dequantize()


def with_residuals(
    dense: Container,
    weight: Float[Tensor, "n k"],
    detached: Bool[Tensor, "n k"] | None,
    *,
    int8: bool = False,
) -> QuantizedWeight:
    """The codes of `weight`, and what they lack of it where it is `detached`: in float16, or with `int8` in 8 bits."""
    sparse = None if detached is None else sparse_residual(weight, dense.dequantize(), detached)
    if sparse is not None and int8:
        sparse = residuals_to_int8(sparse)
    return QuantizedWeight(dense=dense, sparse=sparse)


def spec_of(weight: QuantizedWeight) -> PackedSpec:
    """The spec that `pack` gives, without packing the codes."""
    sparse = _present(weight.sparse)
    return PackedSpec(dense=weight.dense.spec(), sparse=None if sparse is None else sparse.spec())


def pack(weight: QuantizedWeight) -> tuple[PackedSpec, dict[str, Tensor]]:
    """The spec of a matrix and its stored tensors by suffix, on the CPU.

    Made once and kept with the weight: the workspace and the checkpoint store the same tensors.
    """
    return weight._packed


def unpack(
    spec: PackedSpec, tensors: Mapping[str, Tensor], *, device: torch.device | None = None
) -> QuantizedWeight:
    """The inverse of `pack`, where the tensors are or on a `device`; they have the dtypes and shapes of `spec.tensors()`."""
    if device is not None:  # before the bits are unpacked, which a GPU does in no time
        tensors = {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
    sparse = None if spec.sparse is None else spec.sparse.unpack(tensors)
    return QuantizedWeight(dense=spec.dense.unpack(tensors), sparse=sparse)


def unpack_rows(
    spec: PackedSpec, tensors: Mapping[str, Tensor], rows: slice, entries: slice = slice(0, 0)
) -> QuantizedWeight:
    """Some rows of a matrix from its stored tensors, whole steps of `row_step`; its residuals are `entries` of all."""
    dense = replace(spec.dense, shape=(rows.stop - rows.start, spec.shape[1]))  # type: ignore[type-var]
    taken, sparse = spec.dense.packed_rows(tensors, rows), None
    if spec.sparse is not None:
        sparse, residuals = spec.sparse.packed_rows(tensors, rows, entries)
        taken |= residuals
    return unpack(PackedSpec(dense=dense, sparse=sparse), taken)


def row_parts(
    spec: PackedSpec, tensors: Mapping[str, Tensor]
) -> list[tuple[PackedSpec, Mapping[str, Tensor]]]:
    """The bands of a matrix, from top to bottom, with their own tensors; any other matrix as it is."""
    if not isinstance(spec.dense, BandsSpec):
        return [(spec, tensors)]
    return [(PackedSpec(dense=part), own) for part, own in spec.dense.part_tensors(tensors)]


def dequantize_rows(
    spec: PackedSpec, tensors: Mapping[str, Tensor], rows: Int64[Tensor, " m"]
) -> Float[Tensor, "m k"]:
    """Floats of any rows of a matrix without residuals, float32: an embedding's. Rows of a step are dequantized together.

    Raises IndexError for a row that the matrix lacks.
    """
    parts, (n, k), step = row_parts(spec, tensors), spec.shape, spec.dense.row_step
    if not len(rows):  # of a band to which no token belongs
        return torch.empty(0, k, device=rows.device)
    if step == 1:
        return spec.dense.unpack(spec.dense.packed_rows(tensors, rows)).dequantize()
    if not 0 <= int(rows.min()) <= int(rows.max()) < n:
        raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of a matrix of {n}")
    floats, first = torch.empty(len(rows), k, device=rows.device), 0
    if len(parts) > 1:
        for part, own in parts:
            asked = (rows >= first) & (rows < first + part.shape[0])
            floats[asked] = dequantize_rows(part, own, rows[asked] - first)
            first += part.shape[0]
        return floats
    steps, which = torch.unique(rows // step, return_inverse=True)
    at_once = max(1, ROW_WEIGHTS // (step * k))
    for start in range(0, len(steps), at_once):
        own = steps[start : start + at_once]
        whole = (own[:, None] * step + torch.arange(step, device=rows.device)).flatten()
        taken = spec.dense.packed_rows(tensors, whole.clamp(max=n - 1))
        asked = (which >= start) & (which < start + at_once)
        found = (which[asked] - start) * step + rows[asked] % step
        floats[asked] = spec.dense.unpack(taken).dequantize()[found]
    return floats


def bands_of(weight: QuantizedWeight) -> list[QuantizedWeight]:
    """The bands of a matrix, from top to bottom; any other matrix as it is."""
    if not isinstance(weight.dense, Bands):
        return [weight]
    return [QuantizedWeight(dense=part, sparse=None) for part in weight.dense.parts]


def slice_rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Rows `start` to `stop` (outputs: a column-parallel rank's part). Raises InputError where the format cannot."""
    n, _ = weight.shape
    _check_slice(start, stop, n, "rows")
    if (start, stop) == (0, n):
        return weight
    sparse = None if weight.sparse is None else weight.sparse.slice_rows(start, stop)
    return QuantizedWeight(dense=weight.dense.slice_rows(start, stop), sparse=sparse)


def slice_columns(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Columns `start` to `stop` (inputs: a row-parallel rank's part). Raises InputError where the format cannot."""
    _, k = weight.shape
    _check_slice(start, stop, k, "columns")
    if (start, stop) == (0, k):
        return weight
    sparse = None if weight.sparse is None else weight.sparse.slice_columns(start, stop)
    return QuantizedWeight(dense=weight.dense.slice_columns(start, stop), sparse=sparse)


def join_key(weight: QuantizedWeight) -> Hashable | None:
    """Matrices whose codes have equal keys can be joined by rows; None never joins."""
    key = weight.dense.join_key()
    return None if key is None else (type(weight.dense), key)


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The matrix whose rows are those of `parts`, in order; None where no single container holds them.

    Their join keys have to agree, and the dtype of their residuals.
    """
    if len(parts) == 1:
        return parts[0]
    keys = {join_key(part) for part in parts}
    dtypes = {part.sparse.values.dtype for part in parts if part.sparse is not None}
    if len(keys) > 1 or None in keys or len(dtypes) > 1:
        return None
    dense = type(parts[0].dense).join_rows([part.dense for part in parts])
    sparse = join_sparse_rows([part.sparse for part in parts], [part.shape for part in parts])
    return QuantizedWeight(dense=dense, sparse=sparse)


def trainable_params(weight: QuantizedWeight) -> TrainableParams:
    """What a matrix can still learn with its codes fixed: the stored floats, as float32 copies by field."""
    params = weight.dense.trainable_params()
    if weight.sparse is not None:
        params = params | {"values": weight.sparse.floats()}
    return {name: value.detach().float().clone() for name, value in params.items()}


def with_trainable_params(weight: QuantizedWeight, params: Mapping[str, Tensor]) -> QuantizedWeight:
    """The matrix with trained parameters, rounded to the 8 or 16 bits in which they are stored."""
    sparse = None if weight.sparse is None else weight.sparse.with_values(params["values"])
    return QuantizedWeight(dense=weight.dense.with_trainable_params(params), sparse=sparse)


def decode(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What the float weight has beside its trainable parameters: contiguous tensors, floats among them in `dtype`."""
    decoded = weight.dense.decode(dtype)
    if weight.sparse is not None:
        decoded |= {ROWS: weight.sparse.rows, COLUMNS: weight.sparse.indices.long()}
    return decoded


def weight_of(
    weight: QuantizedWeight, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
) -> Float[Tensor, "n k"]:
    """The float weight from both, differentiable, where they are: of the weight's own tensors none is read."""
    dense = weight.dense.weight_of(decoded, params)
    if ROWS not in decoded:
        return dense
    return dense.index_put((decoded[ROWS], decoded[COLUMNS]), params["values"], accumulate=True)


@dataclass(frozen=True, kw_only=True)
class WeightFunction:
    """Trainable parameters -> float weight, differentiable; what does not depend on them is decoded already."""

    weight: QuantizedWeight
    decoded: Mapping[str, Tensor]

    def __call__(self, params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        return weight_of(self.weight, self.decoded, params)

    def scaled_rows(self, params: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What `Container.scaled_rows` returns, or nothing where there are residuals too."""
        return [] if ROWS in self.decoded else self.weight.dense.scaled_rows(self.decoded, params)


def weight_function(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> WeightFunction:
    """The function of the parameters that `trainable_params` gives, its floats in `dtype`."""
    return WeightFunction(weight=weight, decoded=decode(weight, dtype))


def _present(sparse: Sparse | None) -> Sparse | None:
    """A sparse part without residuals is stored as none."""
    return None if sparse is None or not sparse.values.numel() else sparse


def _moved(container: Any, device: torch.device | str) -> Any:
    if isinstance(container, Bands):
        return Bands(parts=tuple(_moved(part, device) for part in container.parts))
    values = {field.name: getattr(container, field.name) for field in fields(container)}
    return replace(container, **{name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)})


def _check_slice(start: int, stop: int, size: int, side: str) -> None:
    if not 0 <= start < stop <= size:
        raise InputError(
            f"{side} {start} to {stop} are not part of a matrix of {size} {side}; give a start below the stop, "
            f"both within 0 to {size}."
        )
