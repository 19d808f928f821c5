"""Safetensors shards, written tensor by tensor, with checksums taken on the way.

Tensors of one unit (a matrix) stay in one shard. At most one shard waits in memory, because the header with
all sizes comes first in the file; within a shard wide dtypes come first, so that every tensor is aligned.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from requant.checkpoint.header import DTYPES, INDEX_FILE, WEIGHTS_FILE
from requant.errors import OutputError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_shards(
    folder: Path, units: Iterable[Mapping[str, Tensor]], *, max_shard_bytes: int
) -> dict[str, str]:
    """Write `model*.safetensors`, and an index where there are several; returns sha256 by file name."""
    parts: list[tuple[Path, str, dict[str, int]]] = []  # file, sha256, bytes by tensor
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = folder / f"part-{len(parts):05d}"
        digest = write_safetensors(file, shard)
        parts.append((file, digest, {name: tensor.nbytes for name, tensor in shard.items()}))
        shard.clear()

    for unit in units:
        if shard and _size(shard) + _size(unit) > max_shard_bytes:
            flush()
        shard.update({name: tensor.detach().cpu() for name, tensor in unit.items()})
    flush()
    checksums: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, (file, digest, sizes) in enumerate(parts, start=1):
        name = WEIGHTS_FILE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        file.rename(folder / name)
        checksums[name] = digest
        weight_map |= dict.fromkeys(sizes, name)
    if len(parts) > 1:
        total = sum(sum(sizes.values()) for _, _, sizes in parts)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_bytes(folder / INDEX_FILE, json.dumps(index, indent=2).encode())
    return checksums


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """One safetensors file of CPU tensors, on disk when this returns; gives its sha256."""
    ordered = sorted(
        tensors.items(), key=lambda item: -item[1].itemsize
    )  # stable: the given order within a width
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if (free := shutil.disk_usage(path.parent).free) < end + len(text):
        raise OutputError(
            f"{path.parent.parent} has {free:,} bytes free, but the next weight file needs {end:,}; "
            "free some space or choose another --output."
        )
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text, *(_raw(tensor) for _, tensor in ordered)):
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """A small file, on disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
