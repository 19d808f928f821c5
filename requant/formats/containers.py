"""The containers of a quantized matrix, and what they stand for in floats.

A matrix `w [n, k]` (n = out_features, k = in_features) is stored as

    w~ = dense + sparse

where `dense` is one of the final classes below, each with `codes` and a rule that turns them into floats, and
`sparse` holds residuals `w - dense` at chosen places. A residual, not the weight itself, so that the dense codes
need no holes: a kernel computes `dense @ x + sparse @ x` without masking.

| container | value of code q in row i, column j | stored beside the codes |
| --- | --- | --- |
| `Grid` | `(q - zero_point[i, g]) * scale[i, g] / column_scale[j]`, g = j // group_size | scales, zero points |
| `Codebook` | `levels[i, q]` | levels |
| `Trellis` | the code of the 16 bits up to q, rotated back and scaled on both sides | scales |

Everything here is exact: scales, levels and residuals are held in the 16 bits in which they are saved, or for which 8 bits
are saved (`requant.int8`), and `dequantize` works in float32, so a saved and loaded matrix gives the same floats bit for
bit. No class unifies the containers: `match` on the type.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float16, Int8, Int32, Int64, Shaped, UInt8
from torch import Tensor

from requant.formats.hadamard import hadamard
from requant.formats.trellis_codes import CODES, code_values, from_tiles, states_of_codes, to_tiles

INDEX_TILE = 256  # columns a sparse index spans on disk and in the kernels: one byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A uniform grid per group of `group_size` neighbouring columns (the last group may be shorter).

    `zero_points` None means symmetric: the zero sits at code `2**(bits - 1)`. `column_scales` (AWQ) were multiplied
    into the columns before rounding, so they divide here.
    """

    codes: UInt8[Tensor, "n k"]
    scales: Float16[Tensor, "n g"]
    zero_points: UInt8[Tensor, "n g"] | None
    column_scales: Float16[Tensor, " k"] | None
    bits: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Float[Tensor, "n k"]:
        """Floats of the dense part, float32."""
        if self.zero_points is None:
            centred = self.codes.float() - float(1 << (self.bits - 1))
        else:
            centred = self.codes.float() - self._by_column(self.zero_points)
        values = centred * self._by_column(self.scales)
        return values if self.column_scales is None else values / self.column_scales.float()

    def _by_column(self, values: Shaped[Tensor, "n g"]) -> Float[Tensor, "n k"]:
        """What a group has, for each of its columns, float32."""
        n, k = self.shape
        return values.float()[:, :, None].expand(-1, -1, self.group_size).reshape(n, -1)[:, :k]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebook:
    """`2**bits` free levels per row, ascending (SqueezeLLM's lookup table)."""

    codes: UInt8[Tensor, "n k"]
    levels: Float16[Tensor, "n c"]
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Float[Tensor, "n k"]:
        """Floats of the dense part, float32."""
        return self.levels.float().gather(1, self.codes.long())


@dataclass(frozen=True, kw_only=True, slots=True)
class Trellis:
    """Codes of a bitshift trellis in a rotated basis (`requant.quantizers.trellis`).

        w~ = diag(output_scales) H V H diag(input_scales)

    with V the values of the codes and H Hadamard blocks (`requant.formats.hadamard`). V and its codes are padded to
    multiples of 16 (`r`, `c`); tiles of 16 by 16 are rings of 256 codes in row order. Untuned, the input scales are signs
    and the output scales signs times one number: either vector is then saved as bits. `bits` may be a quarter: every
    fourth, every second or three of four columns then carry one bit more (`trellis_codes.step_bits`).
    """

    codes: UInt8[Tensor, "r c"]
    input_scales: Float16[Tensor, " k"]
    output_scales: Float16[Tensor, " n"]
    bits: int | float
    code: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.output_scales.shape[0], self.input_scales.shape[0]

    def rotated_values(self) -> Float[Tensor, "r c"]:
        """V, float32: what the codes stand for before rotation and scales."""
        rows, columns = self.codes.shape
        states = states_of_codes(
            to_tiles(self.codes), bits=self.bits, weights_per_step=CODES[self.code].weights_per_step
        )
        values = code_values(self.code).to(self.codes.device)[states]
        return from_tiles(values.flatten(1), (rows, columns))

    def dequantize(self) -> Float[Tensor, "n k"]:
        """Floats of the dense part, float32."""
        n, k = self.shape
        turned = hadamard(hadamard(self.rotated_values()).mT).mT[:n, :k]
        return self.output_scales.float()[:, None] * turned * self.input_scales.float()


Dense = Grid | Codebook | Trellis


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """Residuals in CSR order, columns ascending within a row.

    `values` are float16, or int8 with one float16 scale a row. Where all rows share one scale it is saved once.
    """

    indptr: Int64[Tensor, " p"]  # n + 1
    indices: Int32[Tensor, " z"]
    values: Float16[Tensor, " z"] | Int8[Tensor, " z"]
    row_scales: Float16[Tensor, " n"] | None
    shape: tuple[int, int]

    @property
    def rows(self) -> Int64[Tensor, " z"]:
        counts = self.indptr.diff()
        return torch.repeat_interleave(torch.arange(self.shape[0], device=counts.device), counts)

    def floats(self) -> Float[Tensor, " z"]:
        """The residuals, float32."""
        if self.row_scales is None:
            return self.values.float()
        return self.values.float() * self.row_scales.float()[self.rows]

    def dequantize(self) -> Float[Tensor, "n k"]:
        dense = torch.zeros(self.shape, device=self.values.device)
        dense[self.rows, self.indices.long()] = self.floats()
        return dense


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """What a quantizer returns and a checkpoint stores for one matrix."""

    dense: Dense
    sparse: Sparse | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same codes on another device."""
        return QuantizedWeight(
            dense=_moved(self.dense, device),
            sparse=None if self.sparse is None else _moved(self.sparse, device),
        )

    def dequantize(self) -> Float[Tensor, "n k"]:
        """Floats of the whole matrix, float32: dense plus sparse."""
        weight = self.dense.dequantize()
        if self.sparse is not None:
            weight[self.sparse.rows, self.sparse.indices.long()] += self.sparse.floats()
        return weight


def _moved(container: Any, device: torch.device | str) -> Any:
    values = {f.name: getattr(container, f.name) for f in fields(container)}
    return replace(container, **{name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)})


def sparse_residual(
    weight: Float[Tensor, "n k"], dense: Float[Tensor, "n k"], places: Bool[Tensor, "n k"]
) -> Sparse | None:
    """`weight - dense` at `places`, in float16; None where no place is chosen."""
    return sparse_at(weight.float() - dense.float(), places)


def sparse_at(values: Float[Tensor, "n k"], places: Bool[Tensor, "n k"]) -> Sparse | None:
    """The entries of `values` at `places`, in float16; None where no place is chosen."""
    rows, columns = places.nonzero(as_tuple=True)  # row-major, so columns ascend within a row
    if rows.numel() == 0:
        return None
    indptr = torch.zeros(values.shape[0] + 1, dtype=torch.int64, device=values.device)
    indptr[1:] = places.sum(1).cumsum(0)
    return Sparse(
        indptr=indptr,
        indices=columns.int(),
        values=values[rows, columns].half(),
        row_scales=None,
        shape=(values.shape[0], values.shape[1]),
    )


def in_8_bits(sparse: Sparse) -> Sparse:
    """The residuals as multiples of 1/127 of the largest: off by 1/254 of it at most.

    One scale serves all rows: residuals differ less between rows than 8 bits resolve, and 16 bits a row would cost more
    than the values of a sparse row.
    """
    floats = sparse.floats()
    scale = (floats.abs().amax() / 127).half()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = (floats / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return replace(sparse, values=values, row_scales=scale.repeat(sparse.shape[0]))


def detached_mask(sparse: Sparse | None, shape: tuple[int, int], device: torch.device) -> Bool[Tensor, "n k"]:
    """The places that `sparse` holds, as a mask."""
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    if sparse is not None:
        mask[sparse.rows, sparse.indices.long()] = True
    return mask


def group_count(k: int, group_size: int) -> int:
    """Groups in a row of k columns; the last one may be shorter."""
    return -(-k // group_size)
