"""Trellis codes in a rotated basis (QTIP; Tseng et al. 2024, arXiv 2406.11235).

    w~ = diag(output_scales) H V H diag(input_scales)

V holds the values of the codes (`trellis_codes.py`), H Hadamard blocks (`hadamard.py`). V and its codes are padded to
multiples of 16 (`r`, `c`) and divided into tiles of 16 by 16, each a tail-biting sequence of 256 codes in row order.
Before finetuning, the input scales are signs, and the output scales signs times one number: such a vector is stored as
one bit per element and the magnitude. Output scales on a grid of 8 bits (`int8.py`) are stored in 8 bits.

If the rotations are folded into the model (`requant/models/rotations.py`), a side needs none of its own. A matrix whose
input is already rotated has no input scales, `w~ = diag(output_scales) H V`: the norm before it scales its input. One whose
output is not rotated has `w~ = diag(output_scales) V H diag(input_scales)`, and a scale for every single row.

`bits` may be a multiple of a quarter (`trellis_codes.step_bits`): some of four neighbouring codes then have one bit more.
`trellis_bits.py` says how they are stored.

A weight is a sum over a Hadamard block, so on a rotated side a matrix can only be cut between blocks, and only if the
slice by itself has blocks of the same size. That is rare: most matrices are one block, or a few, in either direction. A
side that is not rotated is cut between tiles. Matrices whose input is rotated by the same signs (which is so for equal
width and seed) can be joined into one product, each part of which has an H of its own; this happens in memory only, files
keep them separate.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Float16, UInt8
from requant_kernels import TrellisLayout, pack_trellis
from torch import Tensor

from requant.errors import CheckpointError, InputError
from requant.formats.bits import pack_bits, unpack_bits, word_count
from requant.formats.hadamard import TILE, block_size, hadamard, padded
from requant.formats.int8 import WIDEST_CODE, decode, encode, fake_quantize_int8, fits, int8_flaw
from requant.formats.json_entry import FLAG, MAX_BITS, choice, matrix_shape, whole_bits
from requant.formats.magnitude import too_large
from requant.formats.tensor_spec import TensorSpec, float16_spec, int8_spec, int32_spec
from requant.formats.trellis_bits import pack_tiles, unpack_tiles
from requant.formats.trellis_codes import (
    CODES,
    PERIOD,
    TILE_WEIGHTS,
    code_values,
    from_tiles,
    states_of_codes,
    to_tiles,
)

DECODED_AT_ONCE = 1 << 24  # weights, of which the states take 8 bytes each, several times over
# Bits of a code, beside the whole numbers.
QUARTERS = tuple(bits / PERIOD for bits in range(PERIOD, PERIOD * MAX_BITS) if bits % PERIOD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trellis:
    """Codes of the computed codebook `code`, a key of `trellis_codes.CODES`; without input scales k = c."""

    codes: UInt8[Tensor, "r c"]
    input_scales: Float16[Tensor, " k"] | None  # None: the input is not rotated
    output_scales: Float16[Tensor, " n"]
    bits: int | float
    code: str
    rotates_output: bool = True
    parts: tuple[
        int, ...
    ] = ()  # rows of the matrices that were joined, each rotated by itself; (): one matrix

    @property
    def shape(self) -> tuple[int, int]:
        columns = self.codes.shape[1] if self.input_scales is None else self.input_scales.shape[0]
        return self.output_scales.shape[0], columns

    def dequantize(self) -> Float[Tensor, "n k"]:
        """float32."""
        n, k = self.shape
        values = self._decoded((lambda v: v) if self.input_scales is None else hadamard)
        if self.rotates_output:
            parts = values.split(self.parts or (len(values),))
            values = torch.cat([hadamard(part.mT).mT for part in parts])
        scaled = self.output_scales.float()[:, None] * values[:n, :k]
        return scaled if self.input_scales is None else scaled * self.input_scales.float()

    def _decoded(self, finish: Callable[[Tensor], Tensor]) -> Float[Tensor, "r c"]:
        """`finish(V)`, some rows at a time: what lies between codes and values takes ten times the memory of either."""
        values, (rows, columns) = code_values(self.code, self.codes.device), self.codes.shape
        weights_per_step = CODES[self.code].weights_per_step
        step = max(1, DECODED_AT_ONCE // (TILE * columns)) * TILE
        found = torch.empty(rows, columns, device=self.codes.device)
        for start in range(0, rows, step):
            codes = self.codes[start : start + step]
            states = states_of_codes(to_tiles(codes), bits=self.bits, weights_per_step=weights_per_step)
            own = from_tiles(values[states].flatten(1), (codes.shape[0], columns))
            found[start : start + step] = finish(own)
        return found

    def spec(self) -> "TrellisSpec":
        if self.parts:
            raise ValueError("joined matrices of trellis codes are multiplied, never stored")
        signs = self.rotates_output and _has_one_magnitude(self.output_scales)
        return TrellisSpec(
            bits=self.bits,
            shape=self.shape,
            code=self.code,
            rotates_input=self.input_scales is not None,
            rotates_output=self.rotates_output,
            input_signs=self.input_scales is not None and _has_one_magnitude(self.input_scales),
            output_signs=signs,
            output_scales="int8" if not signs and fits(self.output_scales) else "float16",
        )

    def pack(self) -> tuple["TrellisSpec", dict[str, Tensor]]:
        spec = self.spec()
        rows, columns = self.codes.shape
        tiles = pack_tiles(to_tiles(self.codes), bits=self.bits)
        tensors = {"codes": tiles.view(rows // TILE, columns // TILE, -1)}
        if self.input_scales is not None:
            tensors |= _pack_scales("input", self.input_scales, signs=spec.input_signs)
        if spec.output_scales == "int8":
            numbers, magnitude = encode(self.output_scales)
            return spec, tensors | {"output_scales": numbers, "output_magnitude": magnitude}
        return spec, tensors | _pack_scales("output", self.output_scales, signs=spec.output_signs)

    def slice_rows(self, start: int, stop: int) -> "Trellis":
        end = _end_of_codes(self.shape[0], start, stop, "rows", rotated=self.rotates_output)
        return replace(self, codes=self.codes[start:end], output_scales=self.output_scales[start:stop])

    def slice_columns(self, start: int, stop: int) -> "Trellis":
        scales = self.input_scales
        end = _end_of_codes(self.shape[1], start, stop, "columns", rotated=scales is not None)
        return replace(
            self, codes=self.codes[:, start:end], input_scales=None if scales is None else scales[start:stop]
        )

    def join_key(self) -> Hashable | None:
        """Equal input scales, so that one rotation of the input serves all, and whole tiles."""
        n, k = self.shape
        if n % TILE or self.parts:
            return None
        scales = None if self.input_scales is None else self.input_scales.cpu().numpy().tobytes()
        return self.bits, self.code, k, self.rotates_output, scales

    @classmethod
    def join_rows(cls, parts: Sequence["Trellis"]) -> "Trellis":
        keys = {part.join_key() for part in parts}
        if len(keys) > 1 or None in keys:
            raise ValueError(
                "matrices of trellis codes can be joined only where their inputs are rotated alike"
            )
        return replace(
            parts[0],
            parts=tuple(part.shape[0] for part in parts) if parts[0].rotates_output else (),
            codes=torch.cat([part.codes for part in parts]),
            output_scales=torch.cat([part.output_scales for part in parts]),
        )

    def trainable_params(self) -> dict[str, Tensor]:
        """The output scales; the input scales stay signs, which cost one bit a column."""
        return {"output_scales": self.output_scales}

    def with_trainable_params(self, params: Mapping[str, Tensor]) -> "Trellis":
        """Up to WIDEST_CODE bits, output scales on a grid of 8 bits return to one; signs are on one.

        The rounding adds 1e-5 of the squared weight: nothing to the 4e-3 that codes of 4 bits leave, but a third to the
        3e-5 of 8 bits.
        """
        scales = params["output_scales"].detach()
        in_int8 = self.bits <= WIDEST_CODE and fits(self.output_scales)
        rounded = fake_quantize_int8(scales, nonzero=True) if in_int8 else scales.half()
        return replace(self, output_scales=rounded)

    def decode(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The weight before its output scales."""
        unscaled = replace(self, output_scales=torch.ones_like(self.output_scales))
        return {"unscaled": unscaled.dequantize().to(dtype)}

    def weight_of(self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        return params["output_scales"][:, None] * decoded["unscaled"]

    def scaled_rows(
        self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        return [(params["output_scales"], decoded["unscaled"])]

    def kernel_layout(self, csr: Any) -> TrellisLayout:
        return pack_trellis(
            self.codes,
            self.input_scales,
            self.output_scales,
            bits=self.bits,
            code=self.code,
            rotates_output=self.rotates_output,
            parts=self.parts,
            sparse=csr,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisSpec:
    """`input_signs`, `output_signs`: the scales of that side have one magnitude, so signs and magnitude are stored.

    `rotates_input`, `rotates_output`: the side has a rotation; without that of the input there are no input scales.
    """

    format: ClassVar[str] = "trellis"
    size_parts: ClassVar[Mapping[str, str]] = dict.fromkeys(
        [f"{side}_{kind}" for side in ("input", "output") for kind in ("scales", "signs", "magnitude")],
        "scales",
    )

    bits: int | float
    shape: tuple[int, int]
    code: str
    rotates_input: bool = True
    rotates_output: bool = True
    input_signs: bool = False
    output_signs: bool = False
    output_scales: Literal["float16", "int8"] = "float16"

    @property
    def num_codes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def row_step(self) -> int:
        return 0 if self.rotates_output or self.output_signs else TILE

    @property
    def version(self) -> int:
        if not (self.rotates_input and self.rotates_output):
            return 5
        return 3 if self.output_scales == "int8" or self.bits % 1 else 1

    def tensors(self) -> dict[str, TensorSpec]:
        n, k = self.shape
        specs = {"codes": int32_spec(-(-n // TILE), -(-k // TILE), word_count(TILE_WEIGHTS, self.bits))}
        if self.rotates_input:
            specs |= _scale_specs("input", k, signs=self.input_signs)
        if self.output_scales == "int8":
            return specs | {"output_scales": int8_spec(n), "output_magnitude": float16_spec(1)}
        return specs | _scale_specs("output", n, signs=self.output_signs)

    def to_json(self) -> dict[str, Any]:
        entry = {"code": self.code, "input_signs": self.input_signs, "output_signs": self.output_signs}
        entry |= {} if self.rotates_input else {"rotates_input": False}
        entry |= {} if self.rotates_output else {"rotates_output": False}
        return entry | ({"output_scales": "int8"} if self.output_scales == "int8" else {})

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> "TrellisSpec":
        spec = cls(
            bits=choice(name, entry, "bits", QUARTERS)
            if isinstance(entry.get("bits"), float)
            else whole_bits(name, entry),
            shape=matrix_shape(name, entry),
            code=choice(name, entry, "code", tuple(CODES)),
            rotates_input=choice(name, entry, "rotates_input", (False,))
            if "rotates_input" in entry
            else True,
            rotates_output=choice(name, entry, "rotates_output", (False,))
            if "rotates_output" in entry
            else True,
            input_signs=choice(name, entry, "input_signs", FLAG),
            output_signs=choice(name, entry, "output_signs", FLAG),
            output_scales=choice(name, entry, "output_scales", ("int8",))
            if "output_scales" in entry
            else "float16",
        )
        if spec.output_signs and spec.output_scales == "int8":
            raise CheckpointError(
                f"config.json: {name} stores its output scales as signs and as int8; download the checkpoint again."
            )
        if not spec.rotates_input and (spec.input_signs or spec.shape[1] % TILE):
            raise CheckpointError(
                f"config.json: {name} has no rotation of its input, but signs for it, or {spec.shape[1]} columns, which is "
                f"no multiple of {TILE}; download the checkpoint again."
            )
        return spec

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        if what := int8_flaw("output_scales", tensors):
            return what
        sides = [
            max(values.float().abs().max() for suffix, values in tensors.items()
                if suffix.startswith(side) and values.is_floating_point())
            for side in ("input", "output")[not self.rotates_input :]
        ]  # fmt: skip
        return too_large("output_scales", torch.stack(sides).prod())

    def packed_rows(self, tensors: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
        if not self.row_step:
            raise ValueError("rows of a trellis are not independent: the rotation mixes them")
        if isinstance(rows, slice):
            tiles: slice | Tensor = slice(rows.start // TILE, -(-rows.stop // TILE))
        else:
            tiles = rows[::TILE] // TILE
        own = {"codes": tensors["codes"][tiles], "output_scales": tensors["output_scales"][rows]}
        return {suffix: own.get(suffix, tensors[suffix]) for suffix in self.tensors()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Trellis:
        n, k = self.shape
        rows, columns, words = tensors["codes"].shape
        tiles = unpack_tiles(tensors["codes"].reshape(-1, words), bits=self.bits)
        return Trellis(
            codes=from_tiles(tiles, (rows * TILE, columns * TILE)),
            input_scales=_unpack_scales("input", tensors, k) if self.rotates_input else None,
            output_scales=_unpack_scales("output", tensors, n),
            bits=self.bits,
            code=self.code,
            rotates_output=self.rotates_output,
        )


def _has_one_magnitude(scales: Float16[Tensor, " k"]) -> bool:
    magnitude = scales.abs()
    return not (magnitude != magnitude[0]).any()


def _scale_specs(side: str, count: int, *, signs: bool) -> dict[str, TensorSpec]:
    if signs:
        return {f"{side}_signs": int32_spec(1, word_count(count, 1)), f"{side}_magnitude": float16_spec(1)}
    return {f"{side}_scales": float16_spec(count)}


def _pack_scales(side: str, scales: Float16[Tensor, " k"], *, signs: bool) -> dict[str, Tensor]:
    if not signs:
        return {f"{side}_scales": scales}
    negative = torch.signbit(scales).to(torch.uint8)
    return {f"{side}_signs": pack_bits(negative[None], bits=1), f"{side}_magnitude": scales.abs()[:1]}


def kernel_layouts(
    spec: TrellisSpec, matrices: Sequence[Mapping[str, Tensor]], device: torch.device
) -> list[TrellisLayout]:
    """What `unpack` and then `kernel_layout` give for the tensors of several matrices of one spec: in as many operations as
    for one, since rows of tiles are independent. The layouts' codes share memory. n is a multiple of 16.

    Raises ValueError for codes that no kernel takes.
    """
    count, (n, k) = len(matrices), spec.shape
    tensors = {suffix: torch.stack([m[suffix] for m in matrices]).to(device) for suffix in spec.tensors()}
    rows, columns, words = tensors["codes"].shape[1:]
    tiles = unpack_tiles(tensors["codes"].view(-1, words), bits=spec.bits)
    input_scales = _unpack_scales("input", tensors, k) if spec.rotates_input else None
    output_scales = _unpack_scales("output", tensors, n)
    joined = Trellis(
        codes=from_tiles(tiles, (count * rows * TILE, columns * TILE)),
        input_scales=None if input_scales is None else input_scales[0],
        output_scales=output_scales.flatten(),
        bits=spec.bits,
        code=spec.code,
        rotates_output=spec.rotates_output,
    ).kernel_layout(None)
    return [
        replace(
            joined,
            packed_codes=codes,
            input_scales=None if input_scales is None else input_scales[i],
            output_scales=output_scales[i],
            n=n,
        )
        for i, codes in enumerate(joined.packed_codes.chunk(count))
    ]


def _unpack_scales(side: str, tensors: Mapping[str, Tensor], count: int) -> Float16[Tensor, "*b k"]:
    """Of one matrix, or of several whose tensors are stacked."""
    scales, magnitude = tensors.get(f"{side}_scales"), tensors.get(f"{side}_magnitude")
    if scales is not None:
        return scales if magnitude is None else decode(scales, magnitude)
    assert magnitude is not None
    signs = tensors[f"{side}_signs"]
    negative = unpack_bits(signs.view(-1, signs.shape[-1]), bits=1, k=count).view(*signs.shape[:-2], count)
    return torch.where(negative.bool(), -magnitude, magnitude)


def _end_of_codes(size: int, start: int, stop: int, side: str, *, rotated: bool) -> int:
    """The end of a slice in padded codes; raises InputError where the cut goes through a Hadamard block, or a tile."""
    block = block_size(padded(size)) if rotated else TILE
    end = start + padded(stop - start)
    whole = block_size(padded(stop - start)) == block or not rotated
    if start % block or not whole or (stop != size and end != stop):
        why = "rotation mixes" if rotated else "codes are tied in"
        raise InputError(
            f"a trellis of {size} {side} cannot be cut to {side} {start} to {stop}: its {why} blocks of {block}; serve it "
            "on one GPU (or with pipeline parallelism), or quantize with kmeans or gptq."
        )
    return end
