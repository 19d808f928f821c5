"""Plain weights: the folder of the original model, with the quantized matrices as ordinary numbers.

    W = round_to_dtype(dequantize(codes) + sparse)

rounded once, to the dtype of the folder, so that a program without support for quantization computes with the same values
that `requant.load(..., dequantize=True, dtype=...)` gives. The result is as large as the original. Experts that the
original's files hold as one tensor per layer (gpt-oss, Gemma 4, Granite) are put back together.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from requant.checkpoint.save import MAX_SHARD_BYTES
from requant.checkpoint.writer import write_shards
from requant.exporters.folder import Written, write_config
from requant.exporters.source import Source
from requant.models.experts import Experts, fused_again
from requant.models.file_names import module_names
from requant.models.loading import auto_class

LOADING = "It is an ordinary folder: `{}.from_pretrained` needs no requant for it."


def write(source: Source, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Written:
    """Weights and config.json into `folder`; one shard, or the experts of one layer, at most are in memory."""
    checksums = write_shards(folder, _units(source), max_shard_bytes=max_shard_bytes)
    write_config(source, folder, None)
    return Written(files=sorted(checksums), loading=LOADING.format(auto_class(source.config).__name__))


def _units(source: Source) -> Iterator[dict[str, Tensor]]:
    layers = {
        path: layer
        for path, layer in source.skeleton.named_modules()
        if isinstance(layer, Experts) and layer.fused_in_files
    }
    stored = [*(f"{name}.weight" for name in source.specs), *source.plain_names()]
    paths = module_names(source.skeleton, stored, source.skeleton.state_dict()) if layers else {}
    names = {
        path: name for name, path in paths.items() if path.startswith(tuple(f"{layer}." for layer in layers))
    }
    fused = set(names.values())
    for name in source.specs:
        if f"{name}.weight" not in fused:
            floats = source.floats(name, source.weight(name))
            yield {f"{name}.weight": floats.T.contiguous() if source.transposed(name) else floats}
    for name in source.plain_names():
        if name not in fused:
            yield {name: source.plain_tensor(name)}
    for path, layer in layers.items():
        yield _fused(source, path, layer, names)


def _fused(source: Source, path: str, layer: Experts, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a layer's experts as the original's files have them; `names` are those of single ones."""
    from transformers.core_model_loading import revert_weight_conversion

    def tensor_of(e: int, linear: str, kind: str) -> Tensor:
        name = names[f"{path}.{e}.{linear}.{kind}"]
        matrix = name.removesuffix(".weight")
        if matrix in source.specs:
            return source.floats(matrix, source.weight(matrix))
        return source.plain_tensor(name).to(source.dtype)

    joined = {f"{path}.{name}": tensor for name, tensor in fused_again(layer, tensor_of).items()}
    return {
        name: tensor.contiguous()
        for name, tensor in revert_weight_conversion(source.skeleton, joined).items()
    }
