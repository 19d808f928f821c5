"""2:4 matrices: two of every four consecutive weights of a row are stored, together with which two they are.

    w~[i, j] = (q + 1/2 - 2^(bits-1)) * scale[i, g]   where column j is kept,   else 0          g = j // group_size

The mask already provides zero, so the levels leave it out: `2^bits` odd multiples of half a step. With 16 bits the values
are stored as they are, in float16, and there are no scales.

Which two of four are kept (one of six patterns) is the metadata, a bitstream of one code per group, in one of two forms:

- `packed`: the number of the pattern in `requant.sparsity.masks.PATTERNS`, in 3 bits: 0.75 bits per weight;
- `hardware`: the two kept columns in 2 bits each, the first in the low ones: 1 bit per weight. 16 columns of a row are the
  int16 that `mma.sp` reads; CUTLASS (and so `torch.sparse.to_sparse_semi_structured`) moves these words among 32 rows.

The bound is log2(6)/4 = 0.646 bits, and three groups per byte would be 0.667, but both would need a table in every reader.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Float16, UInt8
from torch import Tensor

from requant.errors import CheckpointError, InputError
from requant.formats.bits import pack_bits, unpack_bits, word_count
from requant.formats.grid import group_count
from requant.formats.json_entry import MAX_DIMENSION, choice, matrix_shape, whole_number
from requant.formats.magnitude import too_large
from requant.formats.tensor_spec import TensorSpec, float16_spec, int32_spec
from requant.sparsity.masks import GROUP, PAIRS, mask_of

MetadataForm = Literal["packed", "hardware"]
FLOAT16_BITS = 16  # values as they are
METADATA_BITS = {"packed": 3, "hardware": 4}  # of a group of four columns
METADATA_CODES = {"packed": tuple(range(6)), "hardware": tuple(i | j << 2 for i, j in PAIRS)}  # by pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class SemiStructured:
    """`codes`: those of the kept weights, ascending by column; with 16 bits their values, in float16.

    `patterns`: which two of every four columns are kept, a number of `masks.PATTERNS`. `metadata`: how they are stored.
    """

    codes: UInt8[Tensor, "n h"] | Float16[Tensor, "n h"]
    patterns: UInt8[Tensor, "n q"]
    scales: Float16[Tensor, "n g"] | None
    bits: int
    group_size: int  # columns that share a scale, a multiple of four
    metadata: MetadataForm = "packed"

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def mask(self) -> Bool[Tensor, "n k"]:
        """The kept weights."""
        return mask_of(self.patterns)

    def values(self) -> Float[Tensor, "n h"]:
        """The kept weights, float32."""
        if self.scales is None:
            return self.codes.float()
        return self._unit() * self._by_value(self.scales)

    def dequantize(self) -> Float[Tensor, "n k"]:
        """float32."""
        return scattered(self.values(), self.patterns)

    def spec(self) -> "SemiStructuredSpec":
        return SemiStructuredSpec(
            bits=self.bits, shape=self.shape, group_size=self.group_size, metadata=self.metadata
        )

    def pack(self) -> tuple["SemiStructuredSpec", dict[str, Tensor]]:
        tensors = {
            "codes": self.codes if self.scales is None else pack_bits(self.codes, bits=self.bits),
            "metadata": packed_metadata(self.patterns, self.metadata),
        }
        return self.spec(), tensors if self.scales is None else tensors | {"scales": self.scales}

    def slice_rows(self, start: int, stop: int) -> "SemiStructured":
        return replace(
            self,
            codes=self.codes[start:stop],
            patterns=self.patterns[start:stop],
            scales=None if self.scales is None else self.scales[start:stop],
        )

    def slice_columns(self, start: int, stop: int) -> "SemiStructured":
        if start % GROUP or stop % GROUP:
            raise InputError(
                f"columns {start} to {stop} of a 2:4 matrix cannot be cut out: groups of four columns stay whole; give "
                "multiples of 4."
            )
        size = min(self.group_size, self.shape[1])
        group = math.gcd(size, start) if start else size
        groups = torch.arange(start, stop, group, device=self.codes.device) // size
        return replace(
            self,
            codes=self.codes[:, start // 2 : stop // 2],
            patterns=self.patterns[:, start // GROUP : stop // GROUP],
            scales=None if self.scales is None else self.scales[:, groups],
            group_size=group,
        )

    def join_key(self) -> Hashable:
        k = self.shape[1]
        return self.bits, k, min(self.group_size, k), self.metadata

    @classmethod
    def join_rows(cls, parts: Sequence["SemiStructured"]) -> "SemiStructured":
        scales = [part.scales for part in parts if part.scales is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            patterns=torch.cat([part.patterns for part in parts]),
            scales=torch.cat(scales) if scales else None,
        )

    def trainable_params(self) -> dict[str, Tensor]:
        return {"kept": self.codes} if self.scales is None else {"scales": self.scales}

    def with_trainable_params(self, params: Mapping[str, Tensor]) -> "SemiStructured":
        if self.scales is None:
            return replace(self, codes=params["kept"].detach().half())
        return replace(self, scales=params["scales"].detach().half())

    def decode(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The patterns, and the kept weights before their scales."""
        patterns = {"patterns": self.patterns.contiguous()}
        return patterns if self.scales is None else patterns | {"unscaled": self._unit().to(dtype)}

    def weight_of(self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        if "unscaled" not in decoded:
            return scattered(params["kept"], decoded["patterns"])
        return scattered(decoded["unscaled"] * self._by_value(params["scales"]), decoded["patterns"])

    def scaled_rows(
        self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        return []

    def kernel_layout(self, csr: Any) -> Any:
        raise ValueError(
            f"no kernel multiplies 2:4 values of {self.bits} bits: load with dequantize=True, as large and as fast as the "
            "original"
        )

    def _unit(self) -> Float[Tensor, "n h"]:
        return self.codes.float() + (0.5 - float(1 << (self.bits - 1)))

    def _by_value(self, scales: Float[Tensor, "n g"] | Float16[Tensor, "n g"]) -> Float[Tensor, "n h"]:
        """The scale of each kept weight, float32."""
        groups = 2 * torch.arange(self.codes.shape[1], device=scales.device) // self.group_size
        return scales.float()[:, groups]


@dataclass(frozen=True, kw_only=True, slots=True)
class SemiStructuredSpec:
    """Group size and form of the metadata; with 16 bits the group size says nothing."""

    format: ClassVar[str] = "semi_structured"
    size_parts: ClassVar[Mapping[str, str]] = {}

    bits: int
    shape: tuple[int, int]
    group_size: int
    metadata: MetadataForm = "packed"

    @property
    def num_codes(self) -> int:
        return self.shape[0] * self.shape[1] // 2

    @property
    def row_step(self) -> int:
        return 1

    @property
    def version(self) -> int:
        return 4

    def tensors(self) -> dict[str, TensorSpec]:
        n, k = self.shape
        words = word_count(k // GROUP, METADATA_BITS[self.metadata])
        metadata = TensorSpec(dtype=torch.uint8, shape=(n, 4 * words))
        if self.bits == FLOAT16_BITS:
            return {"codes": float16_spec(n, k // 2), "metadata": metadata}
        return {
            "codes": int32_spec(n, word_count(k // 2, self.bits)),
            "metadata": metadata,
            "scales": float16_spec(n, group_count(k, self.group_size)),
        }

    def to_json(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "metadata": self.metadata}

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> "SemiStructuredSpec":
        n, k = matrix_shape(name, entry)
        metadata = choice(name, entry, "metadata", tuple(METADATA_BITS))
        group_size = whole_number(name, entry, "group_size", 1, MAX_DIMENSION)
        bits = whole_number(name, entry, "bits", 1, FLOAT16_BITS)
        if k % GROUP or group_size % GROUP or 8 < bits < FLOAT16_BITS:
            raise CheckpointError(
                f"config.json: {name} cannot be a 2:4 matrix [{n}, {k}] of {bits}-bit values in groups of {group_size}; "
                "the checkpoint is damaged, download it again."
            )
        return cls(bits=bits, shape=(n, k), group_size=group_size, metadata=metadata)

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        if (self._patterns(tensors) == len(PAIRS)).any():
            return "metadata names no two different columns, in ascending order, of a group of four"
        if self.bits == FLOAT16_BITS:
            return None
        return too_large("scales", tensors["scales"].float().abs().max() * ((1 << (self.bits - 1)) - 0.5))

    def packed_rows(self, tensors: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
        return {suffix: tensors[suffix][rows] for suffix in self.tensors()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> SemiStructured:
        codes = tensors["codes"]
        return SemiStructured(
            codes=codes
            if self.bits == FLOAT16_BITS
            else unpack_bits(codes, bits=self.bits, k=self.shape[1] // 2),
            patterns=self._patterns(tensors),
            scales=tensors.get("scales"),
            bits=self.bits,
            group_size=self.group_size,
            metadata=self.metadata,
        )

    def _patterns(self, tensors: Mapping[str, Tensor]) -> UInt8[Tensor, "n q"]:
        """The stored patterns; 6 where the code is none."""
        packed = tensors["metadata"].contiguous().view(torch.int32)
        codes = unpack_bits(packed, bits=METADATA_BITS[self.metadata], k=self.shape[1] // GROUP)
        pattern = {code: i for i, code in enumerate(METADATA_CODES[self.metadata])}
        table = [pattern.get(code, len(PAIRS)) for code in range(1 << METADATA_BITS[self.metadata])]
        return torch.tensor(table, dtype=torch.uint8, device=codes.device)[codes.long()]


def packed_metadata(patterns: UInt8[Tensor, "n q"], form: MetadataForm) -> UInt8[Tensor, "n b"]:
    """The bitstream of a row's groups, a whole number of 32-bit words."""
    codes = torch.tensor(METADATA_CODES[form], dtype=torch.uint8, device=patterns.device)[patterns.long()]
    return pack_bits(codes, bits=METADATA_BITS[form]).view(torch.uint8)


def scattered(values: Float[Tensor, "n h"], patterns: UInt8[Tensor, "n q"]) -> Float[Tensor, "n k"]:
    """The kept weights at their columns, zero elsewhere; differentiable."""
    n, h = values.shape
    columns = torch.tensor(PAIRS, device=values.device)[patterns.long()]
    zeros = values.new_zeros(n, h // 2, GROUP)
    return zeros.scatter(2, columns, values.reshape(n, h // 2, 2)).flatten(1)


def gathered(weight: Float[Tensor, "n k"], patterns: UInt8[Tensor, "n q"]) -> Float[Tensor, "n h"]:
    """The weights that the patterns keep, ascending by column."""
    columns = torch.tensor(PAIRS, device=weight.device)[patterns.long()]
    return weight.unflatten(1, (-1, GROUP)).gather(2, columns).flatten(1)
