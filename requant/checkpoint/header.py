"""The JSON files and the tensors of a checkpoint's folder, from the headers of its weight files."""

import re
from pathlib import Path
from typing import Any

from requant.errors import CheckpointError
from requant.files import parse_json, read_small_file
from requant.models.safetensors_header import StoredTensor, read_tensors
from requant.models.weight_files import INDEX_FILE, WEIGHTS_FILE

CHECKSUMS_FILE = "checksums.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size."""
    try:
        value = parse_json(read_small_file(path))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; the checkpoint is incomplete, download it again."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({type(error).__name__}); download it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}, not an object; download it again."
        )
    return value


def read_folder(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of `model.safetensors`, or of the shards that the index names, by name."""
    if (path / WEIGHTS_FILE).is_file():
        return read_tensors([path / WEIGHTS_FILE])
    if not (path / INDEX_FILE).is_file():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{path} holds pickled weights only ({pickles[0]}), which can run code when opened; "
                "ask its author for safetensors."
            )
        raise CheckpointError(f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; download it again.")
    table = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map; download it again.")
    names = set(map(str, table.values()))
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise CheckpointError(
                f"{path / INDEX_FILE} names the shard {name[:60]!r}, which is not a plain file name; "
                "do not use this folder."
            )
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, but {INDEX_FILE} names it; download it again.")
    tensors = read_tensors(path / name for name in sorted(names))
    stored = {key: tensor.file.name for key, tensor in tensors.items()}
    if stored != table:
        wrong = min(key for key in stored.keys() | table.keys() if stored.get(key) != table.get(key))
        raise CheckpointError(
            f"{path / INDEX_FILE} says that {wrong[:80]} is in {str(table.get(wrong, 'no shard'))[:60]}, "
            f"but it is in {stored.get(wrong, 'no shard')}; download the checkpoint again."
        )
    return tensors
