"""Validation of a checkpoint folder before use: it may come from an untrusted author or a damaged disk.

In order, each step trusting only what the ones before established: names of files, JSON of bounded size, the
version, the module table, the headers of the weight files against the sizes of the files, every matrix
against its entry, and last the values (finite, of sane size, sparse entries in order and in range). Nothing is
allocated from a number that a file header has not confirmed, and nothing but JSON and safetensors is ever
opened.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from requant.checkpoint.header import read_folder, read_json
from requant.errors import CheckpointError
from requant.files import but_in_it, check_model_folder, path_of
from requant.formats.bands import BandsSpec
from requant.formats.contract import ContainerSpec
from requant.formats.grid import GridSpec
from requant.formats.magnitude import LARGEST
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.trellis import TrellisSpec
from requant.models.rotations import HEAD_SCALES, Rotation
from requant.models.safetensors_header import StoredTensor
from requant.models.safetensors_reader import TensorReader
from requant.models.weight_files import INDEX_FILE, WEIGHTS_FILE

FORMAT_VERSION = 7
CHUNK_BYTES = 1 << 26
PLAIN_VERSION = 1  # of checkpoints whose embedding and head are not quantized
# the first with quantized embedding and head; see `PackedSpec.version` for versions 3 and 4
EMBEDDING_AND_HEAD_VERSION = 2
ROTATION_VERSION = 5  # the first with rotations that are folded into the model
TRELLIS_TABLE_VERSION = 6  # the first whose embedding and head may have trellis codes, and bands
TOKEN_TABLE_VERSION = 7  # the first whose vocabulary may list token tables beside embedding and head
MAX_SEED = 1 << 31


@dataclass(frozen=True, kw_only=True)
class CheckpointHeader:
    """What is known of a checkpoint without reading weights."""

    path: Path
    config: dict[str, Any]
    modules: dict[str, PackedSpec]
    embedding_and_head: dict[str, PackedSpec]  # where they are quantized
    rotation: Rotation | None  # that is folded into the model
    tensors: dict[str, StoredTensor]

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config` of config.json: version, recipe hash, calibration."""
        return self.config["quantization_config"]

    @property
    def files(self) -> list[Path]:
        return sorted({stored.file for stored in self.tensors.values()})


def check_depth(path: str | Path, config: Any, header: CheckpointHeader) -> None:
    """Refuse a config.json that asks for no blocks, or for more than there are tensors, before so many are built."""
    depth = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= depth <= len(header.tensors):
        raise CheckpointError(
            f"{path}: config.json asks for {depth} blocks, but the weight files hold {len(header.tensors)} tensors; "
            "download the checkpoint again."
        )


def read_header(path: str | Path, *, trust_remote_code: bool = False) -> CheckpointHeader:
    """Read and check everything but the values; costs milliseconds whatever the size of the weights."""
    path = path_of(path, "a checkpoint")
    if not os.path.isdir(path):  # unlike Path.is_dir, false for a name too long to be one
        raise CheckpointError(f"{path} is not a folder; give the folder that `requant quantize` wrote.")
    if not any(os.path.lexists(path / name) for name in ("config.json", WEIGHTS_FILE, INDEX_FILE)):
        raise CheckpointError(
            f"{path} holds no checkpoint{but_in_it(path)}; give the folder that `requant quantize` wrote."
        )
    check_model_folder(path)
    config = read_json(path / "config.json")
    if not trust_remote_code and _mentions_code(config):
        raise CheckpointError(
            f"{path / 'config.json'}: auto_map asks to run Python code of the checkpoint's author; "
            "read that code, then pass trust_remote_code=True if you trust it."
        )
    entry = config.get("quantization_config")
    modules = parse_quantization(entry, where=path)
    embedding_and_head = parse_embedding_and_head(entry, modules)
    rotation = parse_rotation(entry)
    tensors = read_folder(path)
    check_matrices({**modules, **embedding_and_head}, tensors)
    return CheckpointHeader(
        path=path,
        config=config,
        modules=modules,
        embedding_and_head=embedding_and_head,
        rotation=rotation,
        tensors=tensors,
    )


def parse_quantization(entry: Any, *, where: str | Path) -> dict[str, PackedSpec]:
    """Check method and version of a `quantization_config`; returns its module table."""
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{where} is not quantized (config.json has no quantization_config); "
            "run `requant quantize` on it first."
        )
    if entry.get("quant_method") != "requant":
        method = repr(entry.get("quant_method"))[:60]
        raise CheckpointError(
            f"{where} was written by another tool (quant_method {method}, not 'requant'); "
            "load it with that tool."
        )
    version = entry.get("format_version")
    if type(version) is not int:
        raise CheckpointError(f"{where}: config.json names no format_version; quantize the model again.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version}, newer than the {FORMAT_VERSION} that this requant reads; "
            "upgrade with `pip install --upgrade requant`."
        )
    if version < PLAIN_VERSION:
        raise CheckpointError(
            f"{where} has format version {version}, older than the {PLAIN_VERSION} that this requant still reads; "
            f"write it again with `requant quantize --recipe {where}/recipe.yaml`."
        )
    modules = entry.get("modules")
    if not isinstance(modules, dict) or not modules:
        raise CheckpointError(f"{where}: config.json lists no quantized modules; quantize the model again.")
    specs = {name: PackedSpec.from_json(name, spec) for name, spec in modules.items()}
    banded = next((name for name, spec in specs.items() if isinstance(spec.dense, BandsSpec)), None)
    if banded is not None:
        raise CheckpointError(
            f"config.json: {banded[:60]} in modules has bands, which only an embedding or head may have; download the "
            "checkpoint again."
        )
    early = next((name for name, spec in specs.items() if spec.version > version), None)
    if early is not None:
        raise CheckpointError(
            f"config.json: the entry of {early[:60]} needs format version {specs[early].version}, but version {version} "
            "is given; download the checkpoint again."
        )
    return specs


def version_of(
    modules: Mapping[str, PackedSpec],
    embedding_and_head: Mapping[str, PackedSpec],
    rotation: Rotation | None = None,
    *,
    token_tables: bool = False,
) -> int:
    """The oldest version that can hold these tables, some of them `token_tables`, and the rotation of the model."""
    oldest = EMBEDDING_AND_HEAD_VERSION if embedding_and_head else PLAIN_VERSION
    if rotation is not None:
        oldest = ROTATION_VERSION
    if not all(isinstance(spec.dense, GridSpec) for spec in embedding_and_head.values()):
        oldest = TRELLIS_TABLE_VERSION
    if token_tables:
        oldest = TOKEN_TABLE_VERSION
    return max([oldest, *(spec.version for spec in modules.values())])


def parse_rotation(entry: Any) -> Rotation | None:
    """The rotation in a `quantization_config` that `parse_quantization` accepted; None where the model has none."""
    if "rotation" not in entry:
        return None
    found = entry["rotation"]
    seed = found.get("seed") if isinstance(found, dict) and found.keys() == {"seed"} else None
    if type(seed) is not int or not 0 <= seed < MAX_SEED or entry["format_version"] < ROTATION_VERSION:
        raise CheckpointError(
            f"config.json: rotation is {repr(found)[:60]}, not {{'seed': a whole number}} in format version "
            f"{ROTATION_VERSION}; upgrade requant, or download the checkpoint again."
        )
    return Rotation(seed=seed)


def parse_embedding_and_head(entry: Any, modules: Mapping[str, PackedSpec]) -> dict[str, PackedSpec]:
    """The table of quantized embedding, head and token tables in a `quantization_config` that `parse_quantization` accepted.

    They are grids, or trellises whose rows are not mixed, without a sparse part, because an embedding reads single rows.
    """
    table = entry.get("vocabulary", {})
    if not isinstance(table, dict) or (len(table) > 2 and entry["format_version"] < TOKEN_TABLE_VERSION):
        raise CheckpointError(
            "config.json: vocabulary does not list an embedding and a head; download the checkpoint again."
        )
    if table and entry["format_version"] == PLAIN_VERSION:
        raise CheckpointError(
            f"config.json: format version {PLAIN_VERSION} has no vocabulary, but {next(iter(table))[:60]} is "
            "listed in one; download the checkpoint again."
        )
    found = {name: PackedSpec.from_json(name, spec) for name, spec in table.items()}
    for name, spec in found.items():
        if name in modules or spec.sparse is not None or not _holds_rows(spec.dense):
            raise CheckpointError(
                f"config.json: {name} in vocabulary is not a plain grid, and no trellis of unmixed rows, of its own; "
                "download the checkpoint again."
            )
        if not isinstance(spec.dense, GridSpec) and entry["format_version"] < TRELLIS_TABLE_VERSION:
            raise CheckpointError(
                f"config.json: {name} in vocabulary is not a grid, which needs format version {TRELLIS_TABLE_VERSION}, but "
                f"version {entry['format_version']} is given; download the checkpoint again."
            )
    return found


def _holds_rows(dense: ContainerSpec) -> bool:
    """Whether an embedding can look its rows up in such codes."""
    if isinstance(dense, BandsSpec):
        return all(map(_holds_rows, dense.parts))
    if isinstance(dense, TrellisSpec):
        return bool(dense.row_step)
    return isinstance(dense, GridSpec) and not dense.column_scales


def check_matrices(modules: Mapping[str, PackedSpec], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that dtypes and shapes of every matrix's tensors match its entry, and that no tensor is missing or left
    over."""
    expected: set[str] = set()
    for name, spec in modules.items():
        for suffix, tensor in spec.tensors().items():
            key = f"{name}.{suffix}"
            stored = tensors.get(key)
            if stored is None:
                raise CheckpointError(
                    f"{key} is missing from the weight files; download the checkpoint again."
                )
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{key} is {stored.dtype} {list(stored.shape)} in {stored.file.name}, but config.json "
                    f"asks for {tensor.dtype} {list(tensor.shape)}; download the checkpoint again."
                )
            expected.add(key)
    for key in tensors.keys() - expected:
        parent, _, suffix = key.rpartition(".")
        if (
            parent in modules
            and suffix not in ("bias", HEAD_SCALES)
            and (suffix, tensors[key].shape) != (GUARD_TENSOR, (0,))
        ):
            raise CheckpointError(
                f"{key} is in {tensors[key].file.name}, but the entry of {parent} in config.json "
                "has no such tensor; download the checkpoint again."
            )


def check_all_values(modules: Mapping[str, PackedSpec], tensors: Mapping[str, StoredTensor]) -> None:
    """`check_values` of every matrix and the values of all that is not quantized, read from the files; packed codes are
    not read, since any bits are valid codes."""
    owned = {f"{name}.{suffix}" for name, spec in modules.items() for suffix in spec.tensors()}
    read = TensorReader(tensors)
    check_plain_values(tensors.keys() - owned, read)
    for name, spec in modules.items():
        suffixes = [suffix for suffix, tensor in spec.tensors().items() if tensor.dtype != torch.int32]
        check_values(name, spec, read.matrix(name, suffixes))


def check_plain_values(names: Iterable[str], read: TensorReader) -> None:
    """Raise CheckpointError for a tensor that is not quantized and holds NaN, infinity or what float16 cannot hold."""
    for name in names:
        stored = read.tensors[name]
        if not stored.dtype.is_floating_point or 0 in stored.shape:
            continue
        # in parts: the file is mapped, and the largest tensors are not to be held twice
        parts = read(name).flatten().split(CHUNK_BYTES // stored.dtype.itemsize)
        # torch's maximum is NaN where any of them is; Python's `max` would drop a NaN that is not the first
        largest = float(torch.stack([part.float().abs().max() for part in parts]).max())
        if not largest <= LARGEST:
            what = f"{largest:.3g}, beyond float16" if math.isfinite(largest) else "NaN or infinity"
            raise CheckpointError(
                f"{name} in {stored.file.name} holds {what}; the checkpoint is damaged, download it again."
            )


def check_values(name: str, spec: PackedSpec, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for values of a matrix that no writer makes: NaN, unsorted indices, ..."""
    if what := spec.flaw(tensors):
        raise CheckpointError(
            f"{name}: {what}; the checkpoint is damaged, download it again or quantize again."
        )


def _mentions_code(config: dict[str, Any]) -> bool:
    """`auto_map` on any level: sub-configurations can name code too."""
    pending: list[Any] = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if value.get("auto_map"):
                return True
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return False
