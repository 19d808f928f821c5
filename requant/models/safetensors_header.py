"""Headers of safetensors files, read without trusting them and without reading weights.

A safetensors file is eight bytes of length, a JSON header (dtype, shape and byte range of every tensor) and
the data. We parse the header ourselves, because every number in it must agree with the size of the file
before anything is allocated from it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from requant.errors import CheckpointError
from requant.files import MAX_SMALL_FILE, check_plain_file, parse_json

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor that the headers of the files describe, by name."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_shard(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in both {tensors[name].file.name} and {stored.file.name}; download the folder again, or do "
                    "not use it."
                )
            tensors[name] = stored
    return tensors


def read_shard(path: Path) -> dict[str, StoredTensor]:
    """Parse a safetensors header; its tensors must fill the file to the last byte."""
    try:
        size = check_plain_file(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_SMALL_FILE):
                raise CheckpointError(f"{path} is truncated or no safetensors file; download it again.")
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        entries = sorted((e["data_offsets"], name, e["dtype"], e["shape"]) for name, e in header.items())
        tensors: dict[str, StoredTensor] = {}
        end = 0
        for offsets, name, dtype, shape in entries:
            if not all(type(number) is int and number >= 0 for number in [*offsets, *shape]):
                raise ValueError("a negative or fractional size")
            stored = StoredTensor(file=path, dtype=DTYPES[dtype], shape=tuple(shape))
            if list(offsets) != [end, end + stored.bytes]:
                raise ValueError("data that overlaps or leaves holes")
            end += stored.bytes
            tensors[name] = stored
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has an unreadable safetensors header ({type(error).__name__}: "
            f"{str(error)[:80]}); download it again."
        ) from error
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} has {size} bytes where its header describes {8 + length + end}; "
            "the file is truncated or damaged, download it again."
        )
    return tensors
