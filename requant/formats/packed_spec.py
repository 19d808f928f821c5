"""The entry of one matrix in `config.json`, and the tensors that follow from it.

Every shape and dtype on disk is a function of the entry, so a folder is judged from JSON and file headers
alone, before a byte of weights is read or a buffer allocated. format.md explains the layout.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from requant.errors import CheckpointError
from requant.formats.containers import INDEX_TILE, group_count
from requant.formats.hadamard import TILE
from requant.formats.trellis_codes import CODES, PERIOD

MAX_BITS = 8
MAX_DIMENSION = 1 << 31
_FLAG = (False, True)
# Keys of an entry that only one format has, with the values allowed; none listed: any whole number.
_KEYS: dict[str, dict[str, tuple[Any, ...]]] = {
    "grid": {"group_size": (), "zero_points": _FLAG, "column_scales": _FLAG},
    "codebook": {},
    "trellis": {"code": tuple(CODES), "input_signs": _FLAG, "output_signs": _FLAG},
}
# Widths of a trellis whose code takes one weight a step, beside the whole ones.
QUARTERS = tuple(bits / PERIOD for bits in range(PERIOD, PERIOD * MAX_BITS) if bits % PERIOD)
# Vectors that may be stored in 8 bits; an entry names them only if they are.
VECTORS = {"codebook": "levels", "trellis": "output_scales"}


# Beside the tensors of a matrix lies an empty `weight`. A loader that does not know the format then finds a weight of
# the wrong shape, and stops; without it, transformers would fill the layer with random numbers and go on.
GUARD_TENSOR = "weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSpec:
    """What one quantized matrix stores: the three formats, and `sparse`, the number of entries beside them.

    Fields of another format keep their defaults. `bits` of a trellis may be quarters. `input_signs`, `output_signs`:
    the scales of a trellis on that side have one magnitude, so that one bit each and the magnitude are stored.
    `levels`, `output_scales`: int8 numbers beside a magnitude (`requant.int8`), of every row and of the vector.
    """

    format: Literal["grid", "codebook", "trellis"]
    bits: int | float
    shape: tuple[int, int]
    group_size: int = 0
    zero_points: bool = False
    column_scales: bool = False
    code: str = ""
    input_signs: bool = False
    output_signs: bool = False
    levels: Literal["float16", "int8"] = "float16"
    output_scales: Literal["float16", "int8"] = "float16"
    sparse: int = 0
    sparse_values: Literal["float16", "int8"] = "float16"
    sparse_counts: Literal["uint8", "uint16"] = "uint8"
    sparse_scales: Literal["rows", "matrix"] = "rows"

    @property
    def tiles(self) -> int:
        """256-column tiles in a row."""
        return -(-self.shape[1] // INDEX_TILE)

    @property
    def version(self) -> int:
        """The first format version that has what this entry says: 8 bits, one scale of all residuals, quarters of a bit."""
        shortened = "int8" in (self.levels, self.output_scales) or self.sparse_scales == "matrix"
        return 3 if shortened or self.bits % 1 else 1

    @property
    def bytes(self) -> int:
        """Everything stored for the matrix."""
        return sum(spec.bytes for spec in self.tensors().values())

    def tensors(self) -> dict[str, TensorSpec]:
        """Suffix -> dtype and shape of everything stored for the matrix, in the order of the file."""
        n, k = self.shape
        match self.format:
            case "grid":
                g = group_count(k, self.group_size)
                specs = {"codes": _packed(n, words(k, self.bits)), "scales": _halves(n, g)}
                if self.zero_points:
                    specs["zero_points"] = _packed(n, words(g, self.bits))
                if self.column_scales:
                    specs["column_scales"] = _halves(k)
            case "codebook":
                specs = {"codes": _packed(n, words(k, self.bits))}
                if self.levels == "int8":
                    specs |= {"levels": _bytes(n, 1 << int(self.bits)), "level_scales": _halves(n)}
                else:
                    specs["levels"] = _halves(n, 1 << int(self.bits))
            case "trellis":
                specs = {"codes": _packed(-(-n // TILE), -(-k // TILE), words(TILE * TILE, self.bits))}
                specs |= _signed("input", k, self.input_signs)
                if self.output_scales == "int8":
                    specs |= {"output_scales": _bytes(n), "output_magnitude": _halves(1)}
                else:
                    specs |= _signed("output", n, self.output_signs)
        if self.sparse:
            specs["sparse_counts"] = TensorSpec(
                dtype=getattr(torch, self.sparse_counts), shape=(n, self.tiles)
            )
            specs["sparse_indices"] = TensorSpec(dtype=torch.uint8, shape=(self.sparse,))
            specs["sparse_values"] = TensorSpec(
                dtype=getattr(torch, self.sparse_values), shape=(self.sparse,)
            )
            if self.sparse_values == "int8":
                specs["sparse_scales"] = _halves(1 if self.sparse_scales == "matrix" else n)
        return specs

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"format": self.format, "bits": self.bits, "shape": list(self.shape)}
        entry |= {key: getattr(self, key) for key in _KEYS[self.format]}
        vector = VECTORS.get(self.format)
        if vector is not None and getattr(self, vector) == "int8":
            entry[vector] = "int8"
        entry["sparse"] = self.sparse
        if self.sparse:
            entry |= {"sparse_values": self.sparse_values, "sparse_counts": self.sparse_counts}
            if self.sparse_scales == "matrix":
                entry["sparse_scales"] = "matrix"
        return entry

    @classmethod
    def from_json(cls, name: str, entry: Any) -> "PackedSpec":
        """Parse and check an entry; raises CheckpointError with the name of the matrix and the key."""
        if not isinstance(entry, dict):
            raise CheckpointError(f"config.json: the entry of {name} is no JSON object; download it again.")
        kind = _choice(name, entry, "format", tuple(_KEYS))
        bits = (
            _choice(name, entry, "bits", QUARTERS)
            if _has_quarters(kind, entry)
            else _whole(name, entry, "bits", 1, MAX_BITS)
        )
        shape = entry.get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            raise CheckpointError(f"config.json: {name} has shape {shape!r} where [n, k] belongs.")
        n, k = (_bounded(name, "shape", size, 1, MAX_DIMENSION) for size in shape)
        sparse = _whole(name, entry, "sparse", 0, n * k)
        fields: dict[str, Any] = {}
        for key, allowed in _KEYS[kind].items():
            fields[key] = (
                _choice(name, entry, key, allowed) if allowed else _whole(name, entry, key, 1, MAX_DIMENSION)
            )
        if kind in VECTORS and VECTORS[kind] in entry:
            vector = VECTORS[kind]
            fields[vector] = _choice(name, entry, vector, ("int8",))
            if fields.get("output_signs"):
                raise CheckpointError(
                    f"config.json: {name} stores its output scales as signs and as int8; download the checkpoint again."
                )
        if sparse:
            fields["sparse_values"] = _choice(name, entry, "sparse_values", ("float16", "int8"))
            fields["sparse_counts"] = _choice(name, entry, "sparse_counts", ("uint8", "uint16"))
            if "sparse_scales" in entry and fields["sparse_values"] == "int8":
                fields["sparse_scales"] = _choice(name, entry, "sparse_scales", ("matrix",))
        layout = cls(format=kind, bits=bits, shape=(n, k), sparse=sparse, **fields)
        if unknown := sorted(map(str, entry.keys() - layout.to_json().keys())):
            raise CheckpointError(
                f"config.json: {name} has the unknown key {unknown[0]!r}; upgrade requant, or quantize again."
            )
        return layout


def words(count: int, bits: int | float) -> int:
    """32-bit words of a row of `count` codes."""
    return math.ceil(count * bits / 32)


def _has_quarters(kind: str, entry: dict[str, Any]) -> bool:
    code = entry.get("code")
    one_a_step = isinstance(code, str) and code in CODES and CODES[code].weights_per_step == 1
    return kind == "trellis" and one_a_step and isinstance(entry.get("bits"), float)


def _packed(*shape: int) -> TensorSpec:
    return TensorSpec(dtype=torch.int32, shape=shape)


def _bytes(*shape: int) -> TensorSpec:
    return TensorSpec(dtype=torch.int8, shape=shape)


def _halves(*shape: int) -> TensorSpec:
    return TensorSpec(dtype=torch.float16, shape=shape)


def _signed(side: str, count: int, signs: bool) -> dict[str, TensorSpec]:
    """The scales of one side of a trellis."""
    if signs:
        return {f"{side}_signs": _packed(1, words(count, 1)), f"{side}_magnitude": _halves(1)}
    return {f"{side}_scales": _halves(count)}


def _whole(name: str, entry: dict[str, Any], key: str, low: int, high: int) -> int:
    return _bounded(name, key, entry.get(key), low, high)


def _bounded(name: str, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        raise CheckpointError(
            f"config.json: {name} has {key} = {_short(value)}, not a whole number from {low} to {high}; "
            "the checkpoint is damaged, download it again."
        )
    return value


def _choice(name: str, entry: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    value = entry.get(key)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise CheckpointError(
            f"config.json: {name} has {key} = {_short(value)}, not one of {', '.join(map(repr, allowed))}; "
            "upgrade requant, or download the checkpoint again."
        )
    return value


def _short(value: Any) -> str:
    """A hostile value may be megabytes long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
