"""compressed-tensors, format `pack-quantized`: read by vLLM and transformers without a plugin.

A uniform grid is stored as

| tensor | dtype, shape | from our checkpoint |
| --- | --- | --- |
| `weight_packed` | int32 [n, ceil(k bits / 32)] | `codes`, as they are: the same bitstream |
| `weight_scale` | fp16 [n, g] | `scales`, as they are |
| `weight_zero_point` | int32 [ceil(n bits / 32), g] | zero points, packed down the columns instead of along the rows |
| `weight_shape` | int64 [2] | n, k |

Both formats store code and zero point with the offset 2^(bits - 1), so `(code - zero_point) scale` is the same number.
A reader multiplies in its own dtype: in float16 and float32 the scale is exact and the product rounded once; in bfloat16
the scale is rounded too (relative error up to 2^-9). Matrices of equal bits, group size and symmetry form a config
group; a single group is named by layer class, which every reader supports.

Not expressible: codebooks, trellis codes, sparse parts, AWQ's column scales (they differ from matrix to matrix, so they
cannot be folded into the layer before), groups that do not divide the columns. A quantized embedding or head becomes plain
numbers again.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor, nn

from requant.checkpoint.save import MAX_SHARD_BYTES
from requant.checkpoint.writer import write_shards
from requant.errors import InputError
from requant.exporters.folder import Written, write_config
from requant.exporters.source import Source
from requant.formats.bits import pack_bits
from requant.formats.grid import Grid
from requant.formats.other_programs import grid_of, grid_spec_of, inexpressible
from requant.formats.quantized_weight import QuantizedWeight
from requant.models.file_names import module_names

VERSION = "0.15.0"  # the layout of zero points and of odd bit widths since this version of the package
LOADING = "vLLM reads it as it is; transformers does with the package `compressed-tensors`."
LOADING_WITH_ZERO_POINTS = (
    "vLLM reads it as it is. transformers, with the package `compressed-tensors` up to 0.20 at least, reads its zero points "
    "only with `from_pretrained(..., quantization_config=CompressedTensorsConfig(dequantize=True))`; quantize with "
    "`requant quantize --for transformers` for grids without zero points."
)
LOADING_SEVERAL = (
    "Bits or group sizes differ, and vLLM needs equal ones for q, k and v, and for gate and up. "
)
BY_TRANSFORMERS = {  # by whether there are zero points; its dequantize=True takes one group for the matrices of all
    False: "transformers reads it with the package `compressed-tensors`.",
    True: "Do not load it in transformers: with the package `compressed-tensors` up to 0.20 at least, it reads zero points "
    "of one number of bits and one group size only; `requant quantize --for transformers` makes what it reads.",
}
Group = tuple[int, int | None, bool]  # bits, group size (None: one group per row), symmetric


def write(source: Source, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Written:
    """Weights and config.json into `folder`. Raises InputError for what the format cannot express."""
    groups = _groups(source)
    checksums = write_shards(folder, _units(source), max_shard_bytes=max_shard_bytes)
    write_config(source, folder, quantization(source, groups))
    notes = []
    if source.dtype == torch.bfloat16:
        notes.append(
            "config.json says bfloat16, so readers round the scales (relative error up to 0.2 %); "
            "--dtype float16 keeps them exact."
        )
    zero_points = not all(symmetric for _, _, symmetric in groups)
    if zero_points and len(groups) == 1:
        notes.append(
            "zero points: vLLM reads them; transformers, with compressed-tensors up to 0.20 at least, only with "
            "quantization_config=CompressedTensorsConfig(dequantize=True)."
        )
    if source.header.embedding_and_head:
        notes.append("embedding and head are written as plain numbers: readers expect them so.")
    loading = LOADING_WITH_ZERO_POINTS if zero_points else LOADING
    if len(groups) > 1:
        by_transformers = "misreads these, as they have zero points" if zero_points else "reads these"
        notes.append(
            f"{len(groups)} kinds of grids, by bits, group size and zero points: vLLM fuses q, k, v and gate, up, which "
            f"then need one kind each; transformers {by_transformers}."
        )
        loading = LOADING_SEVERAL + BY_TRANSFORMERS[zero_points]
    return Written(files=sorted(checksums), loading=loading, notes=notes)


def quantization(source: Source, groups: dict[Group, list[str]]) -> dict[str, Any]:
    """`quantization_config` of config.json.

    Readers look layers up by name: transformers by its own, vLLM mostly by those in the files. Where they differ, since
    transformers renames what it loads (EXAONE), both are given.
    """
    linears = {path for path, module in source.skeleton.named_modules() if isinstance(module, nn.Linear)}
    stored = [*(f"{name}.weight" for name in source.specs), *source.plain_names()]
    found = module_names(source.skeleton, stored, source.skeleton.state_dict())
    paths = {name.removesuffix(".weight"): path.removesuffix(".weight") for name, path in found.items()}
    quantized = {paths[name] for names in groups.values() for name in names}
    ignored = {name: path for name, path in paths.items() if path in linears - quantized}
    tied = sorted(linears - quantized - set(ignored.values()))  # a head that the files do not hold
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{index}": {
                "targets": ["Linear"] if len(groups) == 1 else _both(names, paths),
                "format": "pack-quantized",
                "weights": _arguments(*key),
                "input_activations": None,
                "output_activations": None,
            }
            for index, (key, names) in enumerate(groups.items())
        },
        "ignore": [*_both(list(ignored), paths), *tied],
    }


def _both(names: list[str], paths: Mapping[str, str]) -> list[str]:
    """Layers by their names in the files and by those in the model, each once."""
    return list(dict.fromkeys([*names, *(paths[name] for name in names)]))


def _arguments(bits: int, group_size: int | None, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _groups(source: Source) -> dict[Group, list[str]]:
    """Matrices by the config group that describes them; raises for the first that none can describe."""
    if source.experts:
        raise InputError(
            "this model is a mixture of experts, whose compressed-tensors form has not been tested with any reader; "
            "export --to dense."
        )
    groups: dict[Group, list[str]] = {}
    modules = source.header.modules
    for name, spec in modules.items():
        what = inexpressible(spec)
        if what is None and not isinstance(source.layers[name], nn.Linear):
            what = f"is not a linear layer but a {type(source.layers[name]).__name__}"
        if what is not None:
            raise InputError(f"{name} {what}, which compressed-tensors cannot express; export --to dense.")
    grids = {name: grid_spec_of(spec) for name, spec in modules.items()}
    # one scale per row in every matrix
    all_rows = all(grid.group_size >= grid.shape[1] for grid in grids.values())
    for name, grid in grids.items():
        whole_row = all_rows or grid.group_size > grid.shape[1]
        key = (grid.bits, None if whole_row else grid.group_size, not grid.zero_points)
        groups.setdefault(key, []).append(name)
    return groups


def _units(source: Source) -> Iterator[dict[str, Tensor]]:
    for name, weight in source.weights():
        if name in source.header.embedding_and_head:
            yield {f"{name}.weight": source.floats(name, weight)}
        else:
            yield {f"{name}.{suffix}": tensor for suffix, tensor in packed(weight).items()}
    for name, tensor in source.plain():
        yield {name: tensor}


def packed(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of one matrix by suffix."""
    grid = grid_of(weight)
    tensors: dict[str, Tensor] = {
        "weight_packed": pack_bits(grid.codes, bits=grid.bits),
        "weight_scale": grid.scales,
        "weight_shape": torch.tensor(grid.shape, dtype=torch.int64),
    }
    if grid.zero_points is not None:
        tensors["weight_zero_point"] = _down_the_columns(grid)
    return tensors


def _down_the_columns(grid: Grid) -> Int32[Tensor, "w g"]:
    assert grid.zero_points is not None
    return pack_bits(grid.zero_points.T.contiguous(), bits=grid.bits).T.contiguous()
