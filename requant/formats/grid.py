"""Uniform grids: evenly spaced values, with a scale and a zero point for every group of neighbouring columns.

    w~[i, j] = (q[i, j] - zero_point[i, g]) * scale[i, g] / column_scale[j],        g = j // group_size

This is the format of rounding to nearest, GPTQ (Frantar et al. 2022, arXiv 2210.17323) and AWQ (Lin et al. 2023, arXiv
2306.00978). AWQ multiplies `column_scale` into the columns before it rounds and folds the inverse into the layer before; we
store the inverse instead, so any linear can have one.

Codes, scales and zero points belong to rows and to groups of columns, so a slice takes a part of each. A cut inside a
group makes the groups finer (their greatest common divisor) and repeats scales.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float16, Shaped, UInt8
from requant_kernels import GridLayout, pack_grid
from torch import Tensor

from requant.formats.bits import pack_bits, unpack_bits, word_count
from requant.formats.json_entry import FLAG, MAX_DIMENSION, choice, matrix_shape, whole_bits, whole_number
from requant.formats.magnitude import too_large
from requant.formats.tensor_spec import TensorSpec, float16_spec, int32_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Codes with a scale a group of `group_size` neighbouring columns (the last group may be shorter).

    `zero_points` None means symmetric: the zero sits at code `2**(bits - 1)`.
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
        """float32."""
        if self.zero_points is None:
            centred = self.codes.float() - float(1 << (self.bits - 1))
        else:
            centred = self.codes.float() - self._by_column(self.zero_points)
        values = centred * self._by_column(self.scales)
        return values if self.column_scales is None else values / self.column_scales.float()

    def spec(self) -> "GridSpec":
        return GridSpec(
            bits=self.bits,
            shape=self.shape,
            group_size=self.group_size,
            zero_points=self.zero_points is not None,
            column_scales=self.column_scales is not None,
        )

    def pack(self) -> tuple["GridSpec", dict[str, Tensor]]:
        tensors = {"codes": pack_bits(self.codes, bits=self.bits), "scales": self.scales}
        if self.zero_points is not None:
            tensors["zero_points"] = pack_bits(self.zero_points, bits=self.bits)
        if self.column_scales is not None:
            tensors["column_scales"] = self.column_scales
        return self.spec(), tensors

    def slice_rows(self, start: int, stop: int) -> "Grid":
        return replace(
            self,
            codes=self.codes[start:stop],
            scales=self.scales[start:stop],
            zero_points=None if self.zero_points is None else self.zero_points[start:stop],
        )

    def slice_columns(self, start: int, stop: int) -> "Grid":
        size = min(self.group_size, self.shape[1])
        group = math.gcd(size, start) if start else size
        groups = torch.arange(start, stop, group, device=self.codes.device) // size
        return replace(
            self,
            codes=self.codes[:, start:stop],
            scales=self.scales[:, groups],
            zero_points=None if self.zero_points is None else self.zero_points[:, groups],
            column_scales=None if self.column_scales is None else self.column_scales[start:stop],
            group_size=group,
        )

    def join_key(self) -> Hashable:
        k = self.shape[1]
        scales = None if self.column_scales is None else tuple(self.column_scales.tolist())
        return self.bits, k, min(self.group_size, k), self.zero_points is None, scales

    @classmethod
    def join_rows(cls, parts: Sequence["Grid"]) -> "Grid":
        zero_points = [part.zero_points for part in parts if part.zero_points is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zero_points=torch.cat(zero_points) if zero_points else None,
        )

    def trainable_params(self) -> dict[str, Tensor]:
        return {"scales": self.scales}

    def with_trainable_params(self, params: Mapping[str, Tensor]) -> "Grid":
        return replace(self, scales=params["scales"].detach().half())

    def decode(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The weight before its scales."""
        unscaled = replace(self, scales=torch.ones_like(self.scales))
        return {"unscaled": unscaled.dequantize().to(dtype)}

    def weight_of(self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        unscaled = decoded["unscaled"]
        groups = torch.arange(unscaled.shape[1], device=unscaled.device) // self.group_size
        return unscaled * params["scales"][:, groups]

    def scaled_rows(
        self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        return []

    def kernel_layout(self, csr: Any) -> GridLayout:
        return pack_grid(
            self.codes,
            self.scales,
            self.zero_points,
            bits=self.bits,
            group_size=self.group_size,
            column_scales=self.column_scales,
            sparse=csr,
        )

    def _by_column(self, values: Shaped[Tensor, "n g"]) -> Float[Tensor, "n k"]:
        """The value of each column's group, float32."""
        n, k = self.shape
        return values.float()[:, :, None].expand(-1, -1, self.group_size).reshape(n, -1)[:, :k]


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSpec:
    """`zero_points`, `column_scales`: whether the grid has them."""

    format: ClassVar[str] = "grid"
    size_parts: ClassVar[Mapping[str, str]] = {}

    bits: int
    shape: tuple[int, int]
    group_size: int
    zero_points: bool = False
    column_scales: bool = False

    @property
    def num_codes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def row_step(self) -> int:
        return 1

    @property
    def version(self) -> int:
        return 1

    def tensors(self) -> dict[str, TensorSpec]:
        n, k = self.shape
        groups = group_count(k, self.group_size)
        specs = {"codes": int32_spec(n, word_count(k, self.bits)), "scales": float16_spec(n, groups)}
        if self.zero_points:
            specs["zero_points"] = int32_spec(n, word_count(groups, self.bits))
        if self.column_scales:
            specs["column_scales"] = float16_spec(k)
        return specs

    def to_json(self) -> dict[str, Any]:
        return {
            "group_size": self.group_size,
            "zero_points": self.zero_points,
            "column_scales": self.column_scales,
        }

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> "GridSpec":
        return cls(
            bits=whole_bits(name, entry),
            shape=matrix_shape(name, entry),
            group_size=whole_number(name, entry, "group_size", 1, MAX_DIMENSION),
            zero_points=choice(name, entry, "zero_points", FLAG),
            column_scales=choice(name, entry, "column_scales", FLAG),
        )

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        if self.column_scales and (tensors["column_scales"] == 0).any():
            return "column_scales holds a zero, by which columns are divided"
        largest = tensors["scales"].float().abs().max() * ((1 << self.bits) - 1)
        if self.column_scales:
            largest = largest / tensors["column_scales"].float().abs().min()
        return too_large("scales", largest)

    def packed_rows(self, tensors: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
        def taken(stored: Tensor) -> Tensor:  # a negative index is an error, not a row from the end
            return stored[rows] if isinstance(rows, slice) else stored.index_select(0, rows)

        return {
            suffix: tensors[suffix] if suffix == "column_scales" else taken(tensors[suffix])
            for suffix in self.tensors()
        }

    def unpack(self, tensors: Mapping[str, Tensor]) -> Grid:
        k = self.shape[1]
        zero_points = None
        if self.zero_points:
            zero_points = unpack_bits(
                tensors["zero_points"], bits=self.bits, k=group_count(k, self.group_size)
            )
        return Grid(
            codes=unpack_bits(tensors["codes"], bits=self.bits, k=k),
            scales=tensors["scales"],
            zero_points=zero_points,
            column_scales=tensors["column_scales"] if self.column_scales else None,
            bits=self.bits,
            group_size=self.group_size,
        )


def group_count(k: int, group_size: int) -> int:
    """Groups in a row of k columns; the last one may be shorter."""
    return -(-k // group_size)
