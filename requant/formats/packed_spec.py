"""The entry of one matrix in `config.json`, and the tensors that follow from it.

Every shape and dtype on disk is a function of the entry, so a folder can be checked from JSON and file headers
alone, before a byte of weights is read or a buffer allocated. `requant/checkpoint/format.md` explains the layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from requant.errors import CheckpointError
from requant.formats.contract import ContainerSpec
from requant.formats.json_entry import choice, whole_number
from requant.formats.registry import FORMATS
from requant.formats.sparse import SparseSpec
from requant.formats.tensor_spec import TensorSpec

# With the tensors of a matrix an empty `weight` is stored. A loader that does not know the format then finds a weight of
# the wrong shape, and stops; without it, transformers would fill the layer with random numbers and go on.
GUARD_TENSOR = "weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSpec:
    """What one quantized matrix stores: the spec of its codes, and that of its residuals if it has any."""

    dense: ContainerSpec
    sparse: SparseSpec | None = None

    @property
    def format(self) -> str:
        """The name of the format in the registry."""
        return self.dense.format

    @property
    def bits(self) -> int | float:
        return self.dense.bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape

    @property
    def num_entries(self) -> int:
        """Residuals."""
        return 0 if self.sparse is None else self.sparse.num_entries

    @property
    def version(self) -> int:
        """The first version of the checkpoint format that has what this entry says."""
        return self.dense.version if self.sparse is None else max(self.dense.version, self.sparse.version)

    @property
    def bytes(self) -> int:
        """Everything stored for the matrix."""
        return sum(spec.bytes for spec in self.tensors().values())

    def tensors(self) -> dict[str, TensorSpec]:
        """Suffix -> dtype and shape of everything stored for the matrix, in the order of the file."""
        return self.dense.tensors() | ({} if self.sparse is None else self.sparse.tensors())

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"format": self.format, "bits": self.bits, "shape": list(self.shape)}
        return (
            entry | self.dense.to_json() | ({"sparse": 0} if self.sparse is None else self.sparse.to_json())
        )

    @classmethod
    def from_json(cls, name: str, entry: Any) -> "PackedSpec":
        """Parse and check an entry; raises CheckpointError with the name of the matrix and the key."""
        if not isinstance(entry, dict):
            raise CheckpointError(
                f"config.json: the entry of {name} is not a JSON object; download it again."
            )
        dense = FORMATS[choice(name, entry, "format", tuple(FORMATS))].from_json(name, entry)
        n, k = dense.shape
        num_entries = whole_number(name, entry, "sparse", 0, n * k)
        sparse = None
        if num_entries:
            sparse = SparseSpec.from_json(name, entry, shape=(n, k), num_entries=num_entries)
        spec = cls(dense=dense, sparse=sparse)
        if unknown := sorted(map(str, entry.keys() - spec.to_json().keys())):
            raise CheckpointError(
                f"config.json: {name} has the unknown key {unknown[0]!r}; upgrade requant, or quantize again."
            )
        return spec

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What is wrong with the values of tensors whose dtypes and shapes are right, or None.

        Packed codes need not be among the tensors, since any bits are valid codes.
        """
        for suffix, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{suffix} holds NaN or infinity"
        return self.dense.flaw(tensors) or (None if self.sparse is None else self.sparse.flaw(tensors))
