"""From checkpoint tensors to what one rank of a tensor-parallel layer holds and multiplies; knows nothing of vLLM.

A layer of a serving engine is one or more matrices of the checkpoint: `qkv_proj` is q, k and v stacked by rows,
`gate_up_proj` two, and Phi-3 has them in one matrix already. A rank holds a part of each:

    column-parallel     rows     r P to (r + 1) P of every matrix, P = rows a rank
    row-parallel        columns  r P to (r + 1) P

Tensors of a matrix arrive one at a time, whole. As soon as the last one has arrived, the matrix is cut (exactly:
`formats/quantized_weight.py`; trellis codes by `vllm_trellis.py`) and packed again, so that a rank never keeps more than
its part. Matrices that then fit into one container are joined, so that one product serves q, k and v; those that do not
(mixed bits) are multiplied separately, and the outputs are concatenated. A matrix that no kernel supports, or that one
computes wrongly on this machine, is held as floats.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from requant.checkpoint.validate import check_values
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
from requant.formats.trellis import Trellis
from requant.inference.convert import kernel_linear
from requant.inference.kernel_check import KernelCheck
from requant.integrations.vllm_trellis import (
    Gather,
    GatheredInput,
    GatheredOutput,
    InputRotation,
    OutputRotation,
    divide_columns,
    divide_rows,
)

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank multiplies, and where its rotation runs over all ranks, what it does before or after."""

    weight: QuantizedWeight
    rotation: OutputRotation | InputRotation | None = None


def shares(weight: QuantizedWeight, part: Part, *, rank: int, ranks: int, where: str) -> list[Share]:
    """The rank's part of a matrix, from top to bottom; raises ModelError where the format cannot be divided so."""
    try:
        narrow = slice_columns(weight, *part.columns)
        return [Share(weight=slice_rows(narrow, *run)) for run in part.rows]
    except InputError as error:
        dense, by_rows = weight.dense, part.columns == (0, weight.shape[1])
        if isinstance(dense, Trellis) and by_rows and dense.rotates_output:
            own, rotation = divide_rows(weight, part.rows, rank=rank, ranks=ranks, where=where)
        elif isinstance(dense, Trellis) and not by_rows and dense.input_scales is not None:
            own, rotation = divide_columns(weight, rank=rank, ranks=ranks, where=where)
        else:
            raise ModelError(f"{where}: {error}") from error
        return [Share(weight=own, rotation=rotation)]


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A share, packed until all of the layer are there."""

    spec: PackedSpec
    tensors: Mapping[str, Tensor]
    rotation: OutputRotation | InputRotation | None

    def unpacked(self, device: torch.device | str) -> Share:
        tensors = {suffix: tensor.to(device) for suffix, tensor in self.tensors.items()}
        return Share(weight=unpack(self.spec, tensors), rotation=self.rotation)


class Collector:
    """Gathers the tensors of one layer's matrices, and keeps of each the rank's share, packed."""

    def __init__(
        self,
        name: str,
        specs: Mapping[Shard, PackedSpec],
        parts: Mapping[Shard, Part],
        *,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """`device` cuts, where there is something to cut."""
        self.name, self.specs, self.parts = name, dict(specs), dict(parts)
        self.rank, self.ranks, self.device = rank, ranks, device
        self._waiting: dict[Shard, dict[str, Tensor]] = {shard: {} for shard in specs}
        self._ready: dict[Shard, list[_Stored]] = {}

    def suffixes(self) -> dict[str, torch.dtype]:
        """Names of all tensors that any of the matrices has, with the dtype that the first of those has."""
        found: dict[str, torch.dtype] = {}
        for spec in self.specs.values():
            for suffix, tensor in spec.tensors().items():
                found.setdefault(suffix, tensor.dtype)
        return found

    def add(self, suffix: str, tensor: Tensor, shard: Shard = None) -> None:
        """Take a tensor of the checkpoint; raises CheckpointError for one that the layer's table does not list, and with the
        last one of a matrix for values that no writer makes."""
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
        check_values(self.name, spec, waiting)
        part, (n, k) = self.parts[shard], spec.shape
        if part == Part(rows=((0, n),), columns=(0, k)):  # one GPU: as it is on disk
            self._ready[shard] = [_Stored(spec=spec, tensors=dict(waiting), rotation=None)]
        else:
            weight = unpack(spec, {suffix: tensor.to(self.device) for suffix, tensor in waiting.items()})
            found = shares(weight, part, rank=self.rank, ranks=self.ranks, where=self.name)
            self._ready[shard] = [
                _Stored(spec=own, tensors=tensors, rotation=share.rotation)
                for share in found
                for own, tensors in [pack(share.weight)]
            ]
        waiting.clear()

    def shares(self, device: torch.device | str = "cpu") -> list[Share]:
        """The rank's shares from top to bottom, on a device."""
        if absent := [shard for shard in self.specs if shard not in self._ready]:
            missing = sorted(self.specs[absent[0]].tensors().keys() - self._waiting[absent[0]].keys())
            raise CheckpointError(
                f"{self.name}: {missing[0]} is missing from the weight files; download the checkpoint again."
            )
        return [stored.unpacked(device) for shard in self.specs for stored in self._ready[shard]]


@dataclass(kw_only=True)
class Conversion:
    """Makes what multiplies. One for all layers of a process: kernels are checked, and a reason is logged, once."""

    check: KernelCheck
    said: set[str] = field(default_factory=set)

    def modules(
        self, found: Sequence[Share], *, where: str, ranks: int = 1, gather: Gather | None = None
    ) -> list[nn.Module]:
        """Modules whose outputs, side by side, are those of the layer; neighbours that can be are one."""
        made: list[nn.Module] = []
        for group in _neighbours(found):
            products = self.products([share.weight for share in group], where=where)
            rotations = [share.rotation for share in group]
            if rotations[0] is None:
                made += products
                continue
            assert gather is not None
            if isinstance(rotations[0], InputRotation):
                made.append(GatheredInput(products[0], rotations[0], gather))
            else:
                outputs = [each for each in rotations if isinstance(each, OutputRotation)]
                made.append(GatheredOutput(products, outputs, ranks, gather))
        return made

    def products(self, weights: Sequence[QuantizedWeight], *, where: str) -> list[nn.Module]:
        """One product of matrices that can be joined, or one each, where the kernels do not take the joined one."""
        joined = join_rows(weights)
        assert joined is not None
        try:
            return [kernel_linear(joined, self.check)]
        except ValueError as error:
            if len(weights) > 1:
                return [self.products([weight], where=where)[0] for weight in weights]
            if str(error) not in self.said:
                self.said.add(str(error))
                logger.warning(
                    "%s and matrices like it are held as %s, 16 bits per weight: %s",
                    where, str(self.check.dtype).removeprefix("torch."), error,
                )  # fmt: skip
            return [float_linear(joined, self.check.dtype)]


def float_linear(weight: QuantizedWeight, dtype: torch.dtype) -> nn.Linear:
    """A plain layer with the floats of a matrix, which a CUDA graph can hold."""
    n, k = weight.shape
    layer = nn.Linear(k, n, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.dequantize().to(dtype), requires_grad=False)
    return layer


def _neighbours(found: Sequence[Share]) -> list[list[Share]]:
    """Shares one below the other that one matrix can hold, and that are rotated alike."""
    groups: list[list[Share]] = []
    for share in found:
        last = groups[-1] if groups else []
        alike = bool(last) and type(last[-1].rotation) is type(share.rotation)
        if alike and join_rows([*(each.weight for each in last), share.weight]) is not None:
            last.append(share)
        else:
            groups.append([share])
    return groups
