"""Plain weights: the folder of the original model, with the quantized matrices as ordinary numbers.

    W = round_to_dtype(dequantize(codes) + sparse)

rounded once, to the dtype of the folder, so that a program without support for quantization computes with the
same values that `requant.load(..., dequantize=True, dtype=...)` gives. As large as the original.
"""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from requant.checkpoint.save import MAX_SHARD_BYTES
from requant.checkpoint.writer import write_shards
from requant.errors import InputError
from requant.exporters.folder import Written, write_config
from requant.exporters.source import Source

LOADING = "It is an ordinary folder: `AutoModelForCausalLM.from_pretrained` needs no requant for it."


def write(source: Source, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Written:
    """Weights and config.json into `folder`; one shard at most is in memory.

    Raises InputError for a model whose files hold experts fused, for ours hold each alone.
    """
    if any(layer.fused_in_files for layer in source.experts):
        raise InputError(
            f"files of {source.config.model_type} hold the experts of a layer in one tensor, which export does not put "
            "together again; `requant.load(folder, dequantize=True)` gives the model as floats."
        )
    checksums = write_shards(folder, _units(source), max_shard_bytes=max_shard_bytes)
    write_config(source, folder, None)
    return Written(files=sorted(checksums), loading=LOADING)


def _units(source: Source) -> Iterator[dict[str, Tensor]]:
    for name, weight in source.weights():
        floats = source.floats(name, weight)
        yield {f"{name}.weight": floats.T.contiguous() if source.transposed(name) else floats}
    for name, tensor in source.plain():
        yield {name: tensor}
