"""What a format is: a container of codes, and the packed spec that describes how the container is stored.

A new format is one file with two classes that have these methods, and one line in `registry.py`. Other code asks which
format a matrix has only where a format is special: `bands` are taken apart where codes are multiplied, looked up or counted;
trellis codes bring rotations of the input and the output, which kernels fuse and vLLM's shards have to divide; exporters
write grids alone. `tests/requant/formats/test_contract.py` holds every registered format to the contract.

Names of stored tensors are suffixes: tensor `codes` of matrix `model.layers.0.mlp.up_proj` is
`model.layers.0.mlp.up_proj.codes`.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from requant.formats.tensor_spec import TensorSpec

TrainableParams = dict[str, Tensor]  # float32 leaves of one matrix, by field


@runtime_checkable
class Container(Protocol):
    """Codes, and a rule that turns them into floats, `[n, k]`; a frozen dataclass."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def bits(self) -> int | float:
        """Bits of a code: a whole number, or with quarters."""
        ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantize(self) -> Float[Tensor, "n k"]:
        """float32, the same bit for bit wherever the container is computed."""
        ...

    def spec(self) -> "ContainerSpec":
        """The spec that `pack` gives, without packing the codes."""
        ...

    def pack(self) -> tuple["ContainerSpec", dict[str, Tensor]]:
        """The spec, and the tensors it lists, on the device of the codes."""
        ...

    def slice_rows(self, start: int, stop: int) -> "Container":
        """The rows as a container; raises InputError where the format cannot be cut there."""
        ...

    def slice_columns(self, start: int, stop: int) -> "Container": ...

    def join_key(self) -> Hashable | None:
        """Containers of one class with equal keys can be joined by rows; None never joins."""
        ...

    @classmethod
    def join_rows(cls, parts: Sequence[Any]) -> "Container":
        """One container of the rows of all; their join keys are equal."""
        ...

    def trainable_params(self) -> TrainableParams:
        """The float fields that a checkpoint stores, as they are; codes stay fixed."""
        ...

    def with_trainable_params(self, params: Mapping[str, Tensor]) -> "Container":
        """Trained fields, rounded to the 8 or 16 bits in which they will be stored."""
        ...

    def decode(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """What the float weight has beside its trainable parameters: contiguous tensors, floats among them in `dtype`."""
        ...

    def weight_of(self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
        """The float weight from both, differentiable; of the container's own it reads no tensor."""
        ...

    def scaled_rows(
        self, decoded: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Float[Tensor, " r"], Float[Tensor, "r k"]]]:
        """Trainable `s` and decoded `U` of all rows from top to bottom, where `weight_of` is `s[:, None] * U`; none where it
        is more than that."""
        ...

    def kernel_layout(self, csr: Any) -> Any:
        """The layout of `requant_kernels`, with residuals `Sparse.csr()`; ValueError where no kernel takes it."""
        ...


@runtime_checkable
class ContainerSpec(Protocol):
    """Dtypes and shapes of all tensors of a container, as a function of a few plain values; a frozen dataclass."""

    format: ClassVar[str]  # its key in the registry and in `config.json`
    size_parts: ClassVar[
        Mapping[str, str]
    ]  # suffix -> the part as which its bytes are reported, if not itself

    @property
    def bits(self) -> int | float: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_codes(self) -> int:
        """Codes that are stored, of `bits` each: one a weight, or one for each weight that a mask keeps."""
        ...

    @property
    def row_step(self) -> int:
        """The fewest neighbouring rows that are a function of their own part of every tensor: 1 where each row is, 16 where
        codes of 16 rows are tied; 0: all rows depend on all."""
        ...

    @property
    def version(self) -> int:
        """The first version of the checkpoint format that has what this spec says."""
        ...

    def tensors(self) -> dict[str, TensorSpec]:
        """Suffix -> dtype and shape, in the order of the file."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The keys of its own in the entry of `config.json`: all but format, bits and shape."""
        ...

    @classmethod
    def from_json(cls, name: str, entry: dict[str, Any]) -> "ContainerSpec":
        """Parse and check an entry; raises CheckpointError with the name of the matrix and the key."""
        ...

    def flaw(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What is wrong with finite values of the right dtype and shape, or None; codes need not be given."""
        ...

    def packed_rows(self, tensors: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Tensor]:
        """The stored tensors of some rows, whole steps of `row_step` (the last may be short); ValueError where that is 0."""
        ...

    def unpack(self, tensors: Mapping[str, Tensor]) -> Container:
        """The inverse of `Container.pack`."""
        ...
