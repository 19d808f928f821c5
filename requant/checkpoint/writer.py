"""Safetensors shards, written tensor by tensor, with checksums computed while writing.

Tensors of one unit (a matrix) stay in one shard. At most one shard waits in memory, because the header with
all sizes comes first in the file; within a shard wide dtypes come first, so that every tensor is aligned. Tensors whose
sizes are known beforehand need not wait at all (`write_as_made`).
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from requant.formats.tensor_spec import TensorSpec
from requant.models.safetensors_header import DTYPES
from requant.models.weight_files import INDEX_FILE, WEIGHTS_FILE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = {"format": "pt"}  # transformers refuses a file without it
STAGED_BYTES = 1 << 26  # of a GPU's tensor that pass through pinned memory at once


def write_shards(
    folder: Path, units: Iterable[Mapping[str, Tensor]], *, max_shard_bytes: int
) -> dict[str, str]:
    """Write `model*.safetensors`, and an index where there are several; returns sha256 by file name."""
    parts: list[tuple[Path, str, dict[str, int]]] = []  # file, sha256, bytes by tensor
    shard: dict[str, Tensor] = {}
    held = 0  # its bytes: to add them up for every unit would take minutes where 18,000 matrices are written

    def flush() -> None:
        file = folder / f"part-{len(parts):05d}"
        digest = write_safetensors(file, shard)
        parts.append((file, digest, {name: tensor.nbytes for name, tensor in shard.items()}))
        shard.clear()

    for unit in units:
        if shard and held + _size(unit) > max_shard_bytes:
            flush()
            held = 0
        shard.update({name: tensor.detach().cpu() for name, tensor in unit.items()})
        held += _size(unit)
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
    _check_free(path, _size(tensors) + len(text))
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text, *(_raw(tensor) for _, tensor in ordered)):
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_as_made(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """One safetensors file of the tensors that `specs` describe, in that order, which has wide dtypes first.

    It is on disk when this returns. Each tensor is asked for when the one before is written, and comes from a GPU without a
    copy on the host. Raises OSError.
    """
    text = header_text(specs, metadata)
    _check_free(path, sum(spec.bytes for spec in specs.values()) + len(text))
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec, tensor in zip(specs.values(), tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise ValueError(
                    f"a tensor is {tensor.dtype} {tuple(tensor.shape)}, not as announced: {spec}"
                )
            for piece in _pieces(tensor.detach()):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor; those on a GPU in parts, each until the next one is asked for."""
    if not tensor.is_cuda:
        yield _raw(tensor)
        return
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    staged = torch.empty(min(STAGED_BYTES, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for part in flat.split(STAGED_BYTES):
        yield staged[: len(part)].copy_(part).numpy().data


def _check_free(path: Path, needed: int) -> None:
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(
            errno.ENOSPC, f"the disk has {free:,} bytes free, but the next weight file needs {needed:,}"
        )


def header_text(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] = METADATA) -> bytes:
    """The JSON header of a file that holds these tensors in this order, padded to eight bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
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
    held = 0  # bytes of the last one
    for unit in units:
        size = sum(spec.bytes for spec in unit.values())
        if shards[-1] and held + size > max_shard_bytes:
            shards.append({})
            held = 0
        shards[-1].update(unit)
        held += size
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
