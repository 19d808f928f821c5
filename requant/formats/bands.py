"""Bands of rows, each with codes of its own width: the embedding and head of a model whose tokens are ordered by frequency.

    w~ = [ part_0 ; part_1 ; ... ],   all of k columns

The parts are containers of any other format. Tensors of part i are stored under their names with `_i` appended, and its
entry in `config.json` is the i-th of `parts`. Each row belongs to one part, so whatever can be done with rows of a part
can be done with rows of the whole; bands are multiplied one by one, and their outputs are concatenated.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from requant.errors import CheckpointError
from requant.formats.contract import Container, ContainerSpec
from requant.formats.grid import GridSpec
from requant.formats.json_entry import choice, matrix_shape
from requant.formats.tensor_spec import TensorSpec
from requant.formats.trellis import TrellisSpec

PARTS: dict[str, type[ContainerSpec]] = {"grid": GridSpec, "trellis": TrellisSpec}  # what bands may hold
MOST_BANDS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Bands:
    """`parts` from top to bottom, two or more."""

    parts: tuple[Container, ...]

    @property
    def codes(self) -> Tensor:
        """Those of the first part."""
        return self.parts[0].codes

    @property
    def bits(self) -> float:
        """The mean over all codes."""
        return _mean_bits([part.spec() for part in self.parts])

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantize(self) -> Float[Tensor, "n k"]:
        """float32."""
        return torch.cat([part.dequantize() for part in self.parts])

    def spec(self) -> "BandsSpec":
        return BandsSpec(parts=tuple(part.spec() for part in self.parts))

    def pack(self) -> tuple["BandsSpec", dict[str, Tensor]]:
        packed = [part.pack() for part in self.parts]
        tensors = {
            _suffix(name, index): tensor
            for index, (_, own) in enumerate(packed)
            for name, tensor in own.items()
        }
        return BandsSpec(parts=tuple(spec for spec, _ in packed)), tensors

    def slice_rows(self, start: int, stop: int) -> Container:
        """One part where the rows lie in one, else bands."""
        found = [
            part.slice_rows(max(start - first, 0), min(stop, last) - first)
            for part, (first, last) in zip(self.parts, _edges(self.spec().parts), strict=True)
            if max(start, first) < min(stop, last)
        ]
        return found[0] if len(found) == 1 else Bands(parts=tuple(found))

    def slice_columns(self, start: int, stop: int) -> "Bands":
        return Bands(parts=tuple(part.slice_columns(start, stop) for part in self.parts))

    def join_key(self) -> Hashable | None:
        return None

    @classmethod
    def join_rows(cls, parts: Sequence[Any]) -> "Bands":
        raise ValueError("bands are multiplied one by one, and not joined to other matrices")

    def trainable_params(self) -> dict[str, Tensor]:
        return {
            _suffix(name, index): value
            for index, part in enumerate(self.parts)
            for name, value in part.trainable_params().items()
        }

    def with_trainable_params(self, params: Mapping[str, Tensor]) -> "Bands":
        return Bands(
            parts=tuple(
                part.with_trainable_params(_of_part(params, index)) for index, part in enumerate(self.parts)
            )
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return {
            _suffix(name, index): tensor
            for index, part in enumerate(self.parts)
            for name, tensor in part.decode(dtype).items()
        }

    def weight_of(self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        return torch.cat(
            [
                part.weight_of(_of_part(decoded, index), _of_part(params, index))
                for index, part in enumerate(self.parts)
            ]
        )

    def scaled_rows(
        self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        found = [
            part.scaled_rows(_of_part(decoded, index), _of_part(params, index))
            for index, part in enumerate(self.parts)
        ]
        return [pair for own in found for pair in own] if all(found) else []

    def kernel_layout(self, csr: Any) -> Any:
        raise ValueError("bands have a layout each: multiply them one by one")


@dataclass(frozen=True, kw_only=True, slots=True)
class BandsSpec:
    """The specs of the parts, of equal width."""

    format: ClassVar[str] = "bands"
    size_parts: ClassVar[Mapping[str, str]] = {}

    parts: tuple[ContainerSpec, ...]

    @property
    def bits(self) -> float:
        return _mean_bits(self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_codes(self) -> int:
        return sum(part.num_codes for part in self.parts)

    @property
    def row_step(self) -> int:
        """0, although rows belong to one part: they are taken from the parts (`quantized_weight.row_parts`)."""
        return 0

    @property
    def version(self) -> int:
        return 6

    def tensors(self) -> dict[str, TensorSpec]:
        return {
            _suffix(name, index): spec
            for index, part in enumerate(self.parts)
            for name, spec in part.tensors().items()
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "parts": [
                {"format": part.format, "bits": part.bits, "shape": list(part.shape)} | part.to_json()
                for part in self.parts
            ]
        }

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> "BandsSpec":
        given = entry.get("parts")
        if not isinstance(given, list) or not 2 <= len(given) <= MOST_BANDS:
            raise CheckpointError(
                f"config.json: parts of {name} are not a list of 2 to {MOST_BANDS} bands; download the checkpoint again."
            )
        parts: list[ContainerSpec] = []
        for index, own in enumerate(given):
            where = f"band {index} of {name}"
            if not isinstance(own, dict):
                raise CheckpointError(
                    f"config.json: {where} is not a JSON object; download the checkpoint again."
                )
            part = PARTS[choice(where, own, "format", tuple(PARTS))].from_json(where, own)
            known = {"format", "bits", "shape"} | part.to_json().keys()
            if unknown := sorted(map(str, own.keys() - known)):
                raise CheckpointError(
                    f"config.json: {where} has the unknown key {unknown[0]!r}; upgrade requant, or quantize again."
                )
            parts.append(part)
        spec = cls(parts=tuple(parts))
        if any(part.shape[1] != spec.shape[1] for part in parts) or matrix_shape(name, entry) != spec.shape:
            raise CheckpointError(
                f"config.json: the bands of {name} do not make its shape; download the checkpoint again."
            )
        choice(name, entry, "bits", (spec.bits,))
        return spec

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        flaws = (part.flaw(_of_part(tensors, index)) for index, part in enumerate(self.parts))
        return next((flaw for flaw in flaws if flaw), None)

    def packed_rows(self, tensors: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
        raise ValueError("rows of bands are not independent of their band: take them from its part")

    def part_tensors(self, tensors: Mapping[str, Tensor]) -> list[tuple[ContainerSpec, dict[str, Tensor]]]:
        """Every part with its own tensors, under their own names."""
        return [(part, _of_part(tensors, index)) for index, part in enumerate(self.parts)]

    def unpack(self, tensors: Mapping[str, Tensor]) -> Bands:
        return Bands(parts=tuple(part.unpack(own) for part, own in self.part_tensors(tensors)))


def _suffix(name: str, index: int) -> str:
    return f"{name}_{index}"


def _of_part(values: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The values of part `index`, without the part's number in their names."""
    end = f"_{index}"
    return {name.removesuffix(end): value for name, value in values.items() if name.endswith(end)}


def _edges(parts: Sequence[ContainerSpec]) -> list[tuple[int, int]]:
    """First and last row, exclusive, of every part."""
    return list(pairwise(accumulate((part.shape[0] for part in parts), initial=0)))


def _mean_bits(parts: Sequence[ContainerSpec]) -> float:
    codes = sum(part.num_codes for part in parts)
    return math.fsum(part.bits * part.num_codes for part in parts) / codes
