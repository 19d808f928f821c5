"""From checkpoint tensors to what one rank of a tensor-parallel layer holds and multiplies; knows nothing of vLLM.

A layer of a serving engine is one or more matrices of the checkpoint: `qkv_proj` is q, k and v one below the other,
`gate_up_proj` two, and Phi-3 has them in one matrix already. A rank holds a part of each:

    column-parallel     rows     r P to (r + 1) P of every matrix, P = rows a rank
    row-parallel        columns  r P to (r + 1) P

Tensors of a matrix arrive one at a time, whole. As soon as the last one is there the matrix is cut (exactly:
`formats/quantized_weight.py`) and packed again, so that a rank never keeps more than its part. What then fits into one
container is joined to one matrix, so that one kernel launch serves q, k and v; what does not (mixed bits, a trellis) is
launched by itself, and the outputs are concatenated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from requant.errors import CheckpointError, InputError, ModelError
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import (
    QuantizedWeight,
    join_rows,
    pack,
    slice_columns,
    slice_rows,
    unpack,
)
from requant.inference.convert import KernelLinear, kernel_linear
from requant.inference.kernel_check import KernelCheck

Shard = str | int | None  # "q", "k", "v"; 0, 1; None: the matrix is the layer's only one


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a rank takes of one matrix: rows in one or more runs (more than one where the file fuses), and columns."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]


def rank_run(size: int, mine: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The run of `mine` of `size` rows that belongs to `rank`; heads that are fewer than ranks are shared by neighbours."""
    pieces = size // mine
    if pieces * mine != size or ranks % pieces:
        raise ModelError(
            f"{size} rows in parts of {mine} do not divide among {ranks} GPUs; use a tensor-parallel size that divides "
            "the heads and the rows of every matrix."
        )
    start = rank * pieces // ranks * mine
    return start, start + mine


def fused_runs(
    sizes: Sequence[int], mine: Sequence[int], *, rank: int, ranks: int
) -> tuple[tuple[int, int], ...]:
    """The runs of a rank in a matrix of several parts one below the other, `sizes` rows each on disk."""
    runs: list[tuple[int, int]] = []
    offset = 0
    for size, own in zip(sizes, mine, strict=True):
        start, stop = rank_run(size, own, rank=rank, ranks=ranks)
        if runs and runs[-1][1] == offset + start:  # on one GPU all are one run
            runs[-1] = (runs[-1][0], offset + stop)
        else:
            runs.append((offset + start, offset + stop))
        offset += size
    return tuple(runs)


def cut(weight: QuantizedWeight, part: Part, *, where: str) -> QuantizedWeight:
    """The part of a matrix that a rank holds; raises ModelError where the format cannot be cut there."""
    try:
        narrow = slice_columns(weight, *part.columns)
        joined = join_rows([slice_rows(narrow, *run) for run in part.rows])
    except InputError as error:
        raise ModelError(f"{where}: {error}") from error
    if joined is None:
        raise ModelError(
            f"{where}: a {type(weight.dense).__name__.lower()} of fused matrices cannot be divided among GPUs; serve it "
            "on one, or quantize with kmeans or gptq."
        )
    return joined


class Collector:
    """Gathers the tensors of one layer's matrices, and keeps of each the rank's part, packed."""

    def __init__(self, name: str, specs: Mapping[Shard, PackedSpec], parts: Mapping[Shard, Part]) -> None:
        self.name = name
        self.specs = dict(specs)
        self.parts = dict(parts)
        self._waiting: dict[Shard, dict[str, Tensor]] = {shard: {} for shard in specs}
        self._ready: dict[Shard, tuple[PackedSpec, dict[str, Tensor]]] = {}

    def suffixes(self) -> dict[str, torch.dtype]:
        """Names of all tensors that any of the matrices has, with the dtype that the first of those has."""
        found: dict[str, torch.dtype] = {}
        for spec in self.specs.values():
            for suffix, tensor in spec.tensors().items():
                found.setdefault(suffix, tensor.dtype)
        return found

    def add(self, suffix: str, tensor: Tensor, shard: Shard = None) -> None:
        """Take a tensor of the checkpoint; raises CheckpointError for one that the layer's table does not list."""
        spec = self.specs.get(shard)
        expected = None if spec is None else spec.tensors().get(suffix)
        if spec is None or expected is None:
            raise CheckpointError(
                f"{self.name}: {suffix} of part {shard!r} is not in the table of config.json; download the checkpoint again."
            )
        if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
            raise CheckpointError(
                f"{self.name}: {suffix} is {tensor.dtype} {list(tensor.shape)}, but config.json asks for {expected.dtype} "
                f"{list(expected.shape)}; download the checkpoint again."
            )
        waiting = self._waiting[shard]
        waiting[suffix] = tensor
        if waiting.keys() != spec.tensors().keys():
            return
        part, (n, k) = self.parts[shard], spec.shape
        if part == Part(rows=((0, n),), columns=(0, k)):  # one GPU: as it is on disk
            self._ready[shard] = spec, dict(waiting)
        else:
            self._ready[shard] = pack(cut(unpack(spec, waiting), part, where=self.name))
        waiting.clear()

    def weights(self, device: torch.device | str = "cpu") -> list[QuantizedWeight]:
        """The rank's matrices from top to bottom, neighbours joined where one container holds them."""
        if absent := [shard for shard in self.specs if shard not in self._ready]:
            missing = sorted(self.specs[absent[0]].tensors().keys() - self._waiting[absent[0]].keys())
            raise CheckpointError(
                f"{self.name}: {missing[0]} is missing from the weight files; download the checkpoint again."
            )
        joined: list[QuantizedWeight] = []
        for shard in self.specs:
            spec, tensors = self._ready[shard]
            weight = unpack(spec, {suffix: tensor.to(device) for suffix, tensor in tensors.items()})
            both = join_rows([joined[-1], weight]) if joined else None
            joined[-1:] = [both] if both is not None else [*joined[-1:], weight]
        return joined


def kernel_modules(
    weights: Sequence[QuantizedWeight], check: KernelCheck, *, where: str
) -> list[KernelLinear]:
    """What multiplies: a module a matrix, on its device. Raises ModelError where no kernel takes one, or gets it wrong."""
    try:
        return [kernel_linear(weight, check) for weight in weights]
    except ValueError as error:
        raise ModelError(f"{where}: {error}.") from error
