"""Safetensors shards, written tensor by tensor, with checksums computed while writing.

Tensors of one unit (a matrix) stay in one shard. At most one shard waits in memory, because the header with
all sizes comes first in the file; within a shard wide dtypes come first, so that every tensor is aligned.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from requant.formats.tensor_spec import TensorSpec
from requant.models.safetensors_header import DTYPES
from requant.models.weight_files import INDEX_FILE, WEIGHTS_FILE

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
    """One safetensors file of CPU tensors, on disk when this returns; gives its sha256. Raises OSError."""
    # stable: the given order among dtypes of one size
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    text = header_text({name: TensorSpec(dtype=t.dtype, shape=tuple(t.shape)) for name, t in ordered})
    end = _size(tensors)
    if (free := shutil.disk_usage(path.parent).free) < end + len(text):
        raise OSError(
            errno.ENOSPC, f"the disk has {free:,} bytes free, but the next weight file needs {end:,}"
        )
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text, *(_raw(tensor) for _, tensor in ordered)):
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def header_text(specs: Mapping[str, TensorSpec]) -> bytes:
    """The JSON header of a file that holds these tensors in this order, padded to eight bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.bytes
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def planned_bytes(units: Iterable[Mapping[str, TensorSpec]], *, max_shard_bytes: int) -> int:
    """Bytes of the files that `write_shards` would write."""
    shards: list[dict[str, TensorSpec]] = [{}]
    for unit in units:
        sizes = [sum(spec.bytes for spec in tensors.values()) for tensors in (shards[-1], unit)]
        if shards[-1] and sum(sizes) > max_shard_bytes:
            shards.append({})
        shards[-1].update(unit)
    total = 0
    for shard in shards:
        ordered = dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize))
        total += 8 + len(header_text(ordered)) + sum(spec.bytes for spec in ordered.values())
    return total


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
