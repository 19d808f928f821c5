"""The weight files in a model's folder, by the names that transformers gives them."""

from pathlib import Path

from requant.errors import FileError
from requant.files import parse_json, read_small_file

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = "model*.safetensors"  # other files may hold the same weights again


def weight_files(folder: str | Path) -> list[Path]:
    """The files from which transformers reads the weights: the one file, or else the shards that the index names.

    A folder may hold both, or shards of another division. Without an index that can be read, all that look like weights.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    try:
        named = set(parse_json(read_small_file(folder / INDEX_FILE))["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, FileError):
        return sorted(file for file in folder.glob(WEIGHT_FILES) if file.is_file())  # a link may lead nowhere
    return sorted(file for file in folder.iterdir() if file.name in named and file.is_file())


def folder_bytes(folder: str | Path) -> int:
    """Bytes of the files from which a model's weights are read; 0 for a folder without weights."""
    return sum(file.stat().st_size for file in weight_files(folder))
