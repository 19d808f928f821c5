"""Codebooks: every row has its own table of `2**bits` free levels (SqueezeLLM; Kim et al. 2023, arXiv 2306.07629).

    w~[i, j] = levels[i, q[i, j]]

If the levels of all rows lie on a grid of 8 bits (`requant.formats.int8`), they are stored in 8 bits, with one float16
scale per row.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float16, UInt8
from requant_kernels import CodebookLayout, pack_codebook
from torch import Tensor

from requant.formats.bits import pack_bits, unpack_bits, word_count
from requant.formats.int8 import decode, encode, fake_quantize_int8, fits, int8_flaw
from requant.formats.json_entry import choice, matrix_shape, whole_bits
from requant.formats.tensor_spec import TensorSpec, float16_spec, int8_spec, int32_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Codebook:
    """Codes are indices into the levels of their row, which ascend as quantized; trained ones may change places."""

    codes: UInt8[Tensor, "n k"]
    levels: Float16[Tensor, "n c"]
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Float[Tensor, "n k"]:
        """float32."""
        return self.levels.float().gather(1, self.codes.long())

    def spec(self) -> "CodebookSpec":
        return CodebookSpec(
            bits=self.bits, shape=self.shape, levels="int8" if fits(self.levels) else "float16"
        )

    def pack(self) -> tuple["CodebookSpec", dict[str, Tensor]]:
        spec = self.spec()
        codes = pack_bits(self.codes, bits=self.bits)
        if spec.levels == "float16":
            return spec, {"codes": codes, "levels": self.levels}
        levels, scales = encode(self.levels)
        return spec, {"codes": codes, "levels": levels, "level_scales": scales[:, 0]}

    def slice_rows(self, start: int, stop: int) -> "Codebook":
        return replace(self, codes=self.codes[start:stop], levels=self.levels[start:stop])

    def slice_columns(self, start: int, stop: int) -> "Codebook":
        return replace(self, codes=self.codes[:, start:stop])

    def join_key(self) -> Hashable:
        return self.bits, self.shape[1]

    @classmethod
    def join_rows(cls, parts: Sequence["Codebook"]) -> "Codebook":
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            levels=torch.cat([part.levels for part in parts]),
        )

    def trainable_params(self) -> dict[str, Tensor]:
        return {"levels": self.levels}

    def with_trainable_params(self, params: Mapping[str, Tensor]) -> "Codebook":
        """Levels that are stored in 8 bits stay so."""
        levels = params["levels"].detach()
        return replace(self, levels=fake_quantize_int8(levels) if fits(self.levels) else levels.half())

    def decode(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The codes: levels are what is trained."""
        return {"codes": self.codes.contiguous()}

    def weight_of(self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        return params["levels"].gather(1, decoded["codes"].long())

    def scaled_rows(
        self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        return []

    def kernel_layout(self, csr: Any) -> CodebookLayout:
        return pack_codebook(self.codes, self.levels, bits=self.bits, sparse=csr)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodebookSpec:
    """`levels`: how they are stored; int8 ones have a float16 scale a row."""

    format: ClassVar[str] = "codebook"
    size_parts: ClassVar[Mapping[str, str]] = {"level_scales": "levels"}

    bits: int
    shape: tuple[int, int]
    levels: Literal["float16", "int8"] = "float16"

    @property
    def num_codes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def row_step(self) -> int:
        return 1

    @property
    def version(self) -> int:
        return 3 if self.levels == "int8" else 1

    def tensors(self) -> dict[str, TensorSpec]:
        n, k = self.shape
        specs = {"codes": int32_spec(n, word_count(k, self.bits))}
        if self.levels == "int8":
            return specs | {"levels": int8_spec(n, 1 << self.bits), "level_scales": float16_spec(n)}
        return specs | {"levels": float16_spec(n, 1 << self.bits)}

    def to_json(self) -> dict[str, Any]:
        return {"levels": "int8"} if self.levels == "int8" else {}

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> "CodebookSpec":
        return cls(
            bits=whole_bits(name, entry),
            shape=matrix_shape(name, entry),
            levels=choice(name, entry, "levels", ("int8",)) if "levels" in entry else "float16",
        )

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        return int8_flaw("levels", tensors)

    def packed_rows(self, tensors: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
        return {suffix: tensors[suffix][rows] for suffix in self.tensors()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Codebook:
        levels = tensors["levels"]
        if self.levels == "int8":
            levels = decode(levels, tensors["level_scales"][:, None])
        codes = unpack_bits(tensors["codes"], bits=self.bits, k=self.shape[1])
        return Codebook(codes=codes, levels=levels, bits=self.bits)
