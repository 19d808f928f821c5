"""GGUF: one file for llama.cpp, with every quantized weight reproduced exactly.

Uniform grids become the smallest of llama.cpp's block types that hold them exactly (`gguf_blocks.py`); embedding, head
and norms keep their numbers (norms as float32, which llama.cpp wants). llama.cpp multiplies with inputs rounded to 8
bits, so its logits differ from ours by that.

For `llama`, the rows of q and k are permuted: rotary embedding combines the two halves of a head in transformers and
neighbouring pairs in llama.cpp. Scales are permuted with their rows, so this is exact too.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from requant.errors import InputError
from requant.exporters.folder import Written
from requant.exporters.gguf_blocks import bytes_of_row, encode
from requant.exporters.gguf_metadata import add_architecture, rope_factors
from requant.exporters.gguf_tokenizer import add_tokenizer
from requant.exporters.source import Source
from requant.extras import requirement
from requant.formats.other_programs import BLOCK_BITS, block_type, grid_of, grid_spec_of, misfit
from requant.formats.packed_spec import PackedSpec
from requant.models.llama_cpp import ARCHITECTURES, check_architecture

FILE = "model.gguf"
PAIRED = ("q_proj", "k_proj")
FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write(source: Source, folder: Path) -> Written:
    """`model.gguf` into `folder`, matrix by matrix. Raises InputError for what no type holds exactly."""
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            f"GGUF export needs the package `gguf`; install it with `pip install {requirement('gguf')}`."
        ) from error
    check_architecture(source.config)
    types = {name: _type_of(source, name, spec) for name, spec in source.specs.items()}
    architecture, paired = ARCHITECTURES[source.config.model_type]
    writer = gguf.GGUFWriter(folder / FILE, architecture)
    try:
        add_architecture(writer, source.config, name=source.path.name)
        add_tokenizer(writer, source.path, source.config)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(_file_type(gguf, list(types.values())))
        factors = rope_factors(source.config)
        _add_tensor_infos(writer, gguf, source, types, architecture)
        if factors is not None:
            writer.add_tensor_info(
                "rope_freqs.weight", tuple(factors.shape), np.dtype(np.float32), factors.nbytes
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data in _data(source, types, paired=paired):
            writer.write_tensor_data(data.contiguous().view(torch.uint8).numpy())
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
    finally:
        writer.close()
    used = ", ".join(f"{list(types.values()).count(kind)} x {kind}" for kind in sorted(set(types.values())))
    return Written(
        files=[FILE],
        loading=f"llama.cpp reads it: `llama-cli -m {FILE}`.",
        notes=[f"blocks: {used}; llama.cpp rounds the inputs of a product to 8 bits."],
    )


def _add_tensor_infos(
    writer: Any, gguf: Any, source: Source, types: dict[str, str], architecture: str
) -> None:
    """Name, shape, bytes and type of every tensor that `_data` gives, in the same order. Raises InputError."""
    key = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(key, source.config.num_hidden_layers)

    def add(name: str, shape: tuple[int, ...], read_as: type, size: int, kind: str) -> None:
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise InputError(f"llama.cpp has no tensor for {name[:80]}; export --to dense.")
        # given a kind, the writer takes uint8 shapes for bytes, and any other for what they are
        writer.add_tensor_info(renamed, shape, np.dtype(read_as), size, gguf.GGMLQuantizationType[kind])

    for name, spec in source.specs.items():
        kind, (n, k) = types[name], spec.shape
        if kind in BLOCK_BITS:
            row = bytes_of_row(kind, k)
            add(f"{name}.weight", (n, row), np.uint8, n * row, kind)
        else:
            add(f"{name}.weight", (n, k), np.float32, n * k * source.dtype.itemsize, kind)
    for name in source.plain_names():
        shape = tuple(source.header.tensors[name].shape)
        dtype = _stored(source.plain_dtype(name), len(shape))
        add(name, shape, np.float32, math.prod(shape) * dtype.itemsize, _float_type(name, dtype))


def paired_rows(n: int, heads: int) -> Tensor:
    """Index of the source row of each row of llama.cpp's q or k: the two halves of a head are interleaved."""
    return torch.arange(n).view(heads, 2, n // heads // 2).transpose(1, 2).flatten()


def _data(source: Source, types: dict[str, str], *, paired: bool) -> Iterator[Tensor]:
    """What `_add_tensor_infos` announced, in its order."""
    order = list(source.specs)
    for expected, (name, weight) in zip(order, source.weights(), strict=True):
        assert name == expected
        if types[name] in BLOCK_BITS:
            yield encode(grid_of(weight), types[name])[_rows(source, name, weight.shape[0], paired=paired)]
        else:
            yield source.floats(name, weight)
    for name, tensor in source.plain():
        parent, _, last = name.rpartition(".")
        rows = (
            _rows(source, parent, tensor.shape[0], paired=paired)
            if last in ("weight", "bias")
            else slice(None)
        )
        yield tensor[rows].to(_stored(tensor.dtype, tensor.dim()))


def _rows(source: Source, name: str, n: int, *, paired: bool) -> Any:
    kind = name.rpartition(".")[2]
    if not paired or kind not in PAIRED:
        return slice(None)
    config = source.config
    return paired_rows(n, config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads)


def _type_of(source: Source, name: str, spec: PackedSpec) -> str:
    """A matrix's type: blocks, or plain floats for an embedding or head that no block holds."""
    what = misfit(spec)
    if what is None:
        return str(block_type(grid_spec_of(spec)))
    if name in source.header.embedding_and_head:
        return _float_type(name, source.dtype)
    raise InputError(f"{name} {what}, which no type of llama.cpp holds exactly; export --to dense.")


def _float_type(name: str, dtype: torch.dtype) -> str:
    """llama.cpp's type of plain numbers; raises InputError for those that it has none for (float64, float8, integers)."""
    if dtype not in FLOATS:
        raise InputError(f"{name[:80]} is {dtype}, which is no type of llama.cpp; give --dtype float16.")
    return FLOATS[dtype]


def _stored(dtype: torch.dtype, dimensions: int) -> torch.dtype:
    """Vectors (norms, biases) are float32 in llama.cpp."""
    return torch.float32 if dimensions == 1 else dtype


def _file_type(gguf: Any, types: list[str]) -> Any:
    """The type of most matrices, as llama.cpp records it for the file."""
    return gguf.LlamaFileType[f"MOSTLY_{max(set(types), key=lambda kind: (types.count(kind), kind))}"]
