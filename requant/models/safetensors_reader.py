"""Tensors of safetensors files by name; every file is opened once.

Opening a file parses its header. With 75,000 tensors, as many as a mixture has, that takes a tenth of a second, and reading
a small tensor less than a thousandth of it (`eval/LOG.md`, 2026-12-01).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from requant.errors import CheckpointError
from requant.models.safetensors_header import StoredTensor


class TensorReader:
    """Reads tensors that were found in the headers of their files. Files are mapped, and stay open as long as the reader is
    there; where one cannot be read, CheckpointError is raised."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        self._opened: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        file = self.tensors[name].file
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt")
            return self._opened[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); download it again.") from error

    def matrix(self, name: str, suffixes: Iterable[str]) -> dict[str, Tensor]:
        """Tensors of one matrix by suffix."""
        return {suffix: self(f"{name}.{suffix}") for suffix in suffixes}
