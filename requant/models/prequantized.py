"""Originals whose weight files hold FP8 or MXFP4: their names, dtypes and values as if they were stored as floats.

Many models are published in no other form. A matrix W~ [n, k] of such a file is codes q and scales s, one for a block of
b x c weights, or one for the whole matrix:

    W_ij = q_ij s_{i // b, j // c}

fp8       q is float8 (E4M3, E5M2) with the scales `weight_scale_inv` (despite its name a factor), `scale`, `weight_scale`
          or `qscale_weight`, in blocks of `weight_block_size`, of which the last ones may be partial; or E2M1 ("FP4"), two
          a byte, the low half first, with a scale for every 32 of a row (the experts of DeepSeek-V4)
mxfp4     `X_blocks` [e, n, g, 16] and `X_scales` [e, n, g] of experts, E2M1 and powers of two for every 32 weights of a row;
          the model holds X as [e, 32 g, n] (gpt-oss)

Scales are floats, or exponents of two (E8M0: 2^(x - 127), 255 is NaN), which some files hold as plain bytes. Formats: OCP
Microscaling (MX) v1.0; DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.

transformers derives the block from the number of scales instead, n / (rows of scales), which it refuses for the 576 rows
with 5 scales of DeepSeek's `kv_a_proj_with_mqa`, and which gives other numbers where a partial block happens to divide (192
rows with 2 scales: 96 + 96, and not 128 + 64). So we read these files ourselves. The product is computed in float32 and
rounded once, to the dtype that config.json names (bfloat16), also where the model computes in float32: so a matrix that a
run leaves alone is saved as it was. What quantized the activations is left out: an original is here what its weights are.
Nothing in a file is believed before it is checked. Float8 without scales is refused where config.json says that the files
hold FP8; without a quantization_config it is what it says, numbers of 8 bits, as transformers reads it too.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from requant.errors import CheckpointError, FileError, ModelError, first_line
from requant.files import parse_json, read_small_file
from requant.models.safetensors_header import StoredTensor, read_shard
from requant.models.weight_files import weight_files

FORMATS = {"fp8": "FP8", "mxfp4": "MXFP4"}  # quant_method -> name
FLOATS = ("float32", "bfloat16", "float16")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the negative ones
MX_BLOCK = 32  # weights of a row that share a scale
_OF_ACTIVATIONS = re.compile(r"[._](activation_scale|input_scale|qscale_act)$")
_CHUNK = 1 << 18  # weights that are dequantized at once


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatTensor:
    """A tensor of the float view: what it is as floats, and how the files store it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: tuple[str, StoredTensor]  # by its name in the file
    scales: tuple[str, StoredTensor] | None = None  # None: stored as it is
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale
    transposed: bool = False  # of the stored matrices

    @property
    def bytes(self) -> int:
        """Bytes in the weight files, scales included."""
        return self.stored[1].bytes + (0 if self.scales is None else self.scales[1].bytes)


def check_stored(path: str, entry: Any) -> None:
    """Raise ModelError for a folder, whose config.json has `entry` as its `quantization_config`, that is not read here."""
    if not isinstance(entry, dict):
        raise ModelError(
            f"{path} cannot be loaded (quantization_config in config.json is not a mapping); download the model again."
        )
    method = entry.get("quant_method")
    if not _is_taken(entry):
        raise ModelError(
            f"{path} is quantized already (quant_method {str(method)[:40]}); give the original model, whose files may hold "
            "floats, FP8 (fp8) or MXFP4 (mxfp4), or load it with the tool that wrote it."
        )
    try:
        float_view(path)
    except CheckpointError as error:
        raise ModelError(f"{path} cannot be loaded ({first_line(error)}).") from error


def _is_taken(entry: Mapping[str, Any]) -> bool:
    method = entry.get("quant_method")
    return isinstance(method, str) and method in FORMATS


def float_view(folder: str | Path) -> dict[str, FloatTensor]:
    """Every tensor of a model's weight files as floats, by name, from headers alone.

    Files of another format than FORMATS are described as they are. Raises ModelError for FP8 and MXFP4 files whose names,
    shapes or dtypes contradict one another, CheckpointError for files that are damaged.
    """
    config = _config(folder)
    entry = config.get("quantization_config")
    tensors = {name: stored for file in weight_files(folder) for name, stored in read_shard(file).items()}
    if not isinstance(entry, dict) or not _is_taken(entry):
        return {name: _plain(name, each) for name, each in tensors.items()}
    view = _View(folder=str(folder), entry=entry, dtype=float_dtype(config), tensors=tensors)
    return view.mxfp4() if entry["quant_method"] == "mxfp4" else view.fp8()


def stored_float_dtypes(folder: str | Path) -> set[torch.dtype]:
    """The dtypes in which a folder's weight files hold their matrices; none where those are FP8 or MXFP4. Of a folder
    without weights that of its config.json."""
    config = _config(folder)
    if config.get("quantization_config") is not None:
        return set()
    view = float_view(folder)
    return {tensor.dtype for tensor in view.values() if len(tensor.shape) > 1} or {float_dtype(config)}


def float_state(folder: str) -> tuple[dict[str, Any], torch.dtype]:
    """A state dict of a folder in FP8 or MXFP4, and the dtype in which its matrices are dequantized.

    Its values are read when transformers' loader takes them (`value[...]`, as of a slice of a safetensors file), so that
    no second copy of the model is held.
    """
    opened = cache(lambda file: safe_open(file, framework="pt"))
    state = {name: _Pending(folder, tensor, opened) for name, tensor in float_view(folder).items()}
    return state, float_dtype(_config(folder))


def scales_of_plain(path: str) -> list[str]:
    """Names of the scales in a folder that stand beside float8 tensors which are read without them."""
    view = float_view(path)
    plain = [name for name, tensor in view.items() if tensor.scales is None and tensor.dtype in FP8]
    return sorted(scale for name in plain for scale in _scale_names(name) if scale in view)


def check_no_codes(path: str, model: Any) -> None:
    """Raise ModelError where the files in `path` hold integers, without scales that are applied here, for what the loaded
    `model` holds as floats: transformers casts such codes without a word."""
    from transformers.core_model_loading import revert_weight_conversion

    codes = {
        name: tensor.dtype
        for name, tensor in float_view(path).items()
        if tensor.scales is None and not tensor.dtype.is_floating_point
    }
    if not codes:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            stored = revert_weight_conversion(model, {name: parameter})
            # some files name the tensors of the body without its prefix ("h.0..." of GPT-2)
            names = (
                each for own in stored for each in (own, own.removeprefix(f"{model.base_model_prefix}."))
            )
            if (found := next((each for each in names if each in codes), None)) is not None:
                kind = str(codes[found]).removeprefix("torch.")
                raise ModelError(
                    f"{path}: {found[:80]} is stored as {kind}, codes without the scales to read them by; give the "
                    "original in floats, FP8 or MXFP4."
                )


class _Pending:
    """Stands in a state dict for a tensor that is not read yet."""

    def __init__(self, folder: str, tensor: FloatTensor, opened: Callable[[Path], Any]) -> None:
        self.folder, self.tensor, self.opened = folder, tensor, opened

    def __getitem__(self, _: Any) -> Tensor:
        tensor = self.tensor
        name, stored = tensor.stored
        values = self.opened(stored.file).get_tensor(name)
        if tensor.scales is None:
            return values
        name, stored = tensor.scales
        scales = _float_scales(self.opened(stored.file).get_tensor(name))
        if not torch.isfinite(scales).all():
            raise ModelError(
                f"{self.folder}: {name[:80]} holds a scale that is NaN or infinite; download the model again."
            )
        values = values.flatten(-2) if tensor.transposed else values
        return dequantize(
            values, scales, block=tensor.block, dtype=tensor.dtype, transposed=tensor.transposed
        )


@torch.no_grad()
def dequantize(
    values: Tensor,
    scales: Float[Tensor, "..."],
    *,
    block: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool = False,
) -> Float[Tensor, "..."]:
    """q s in `dtype`: float8 [..., n, k], or bytes of two E2M1 [..., n, k / 2], with a scale for each `block`.

    `transposed` gives [..., k, n].
    """
    packed = values.dtype in (torch.int8, torch.uint8)
    *lead, n, k = values.shape
    k *= 2 if packed else 1
    matrices, rows = values.reshape(math.prod(lead), n, values.shape[-1]), max(1, _CHUNK // max(1, k))
    grid_of = (-(-n // block[0]), -(-k // block[1]))
    grids = (
        scales.reshape(1, 1, 1).expand(len(matrices), 1, 1)
        if scales.numel() == 1
        else scales.reshape(len(matrices), *grid_of)
    )
    found = torch.empty((len(matrices), k, n) if transposed else (len(matrices), n, k), dtype=dtype)
    for index, matrix in enumerate(matrices):
        out = found[index].T if transposed else found[index]
        for start in range(0, n, rows):
            part = matrix[start : start + rows]
            grid = grids[index][torch.arange(start, start + len(part)) // block[0]]
            if grid.shape[1] > 1:
                grid = grid.repeat_interleave(block[1], 1)[:, :k]
            out[start : start + rows] = (_e2m1(part) if packed else part.float()) * grid
    return found.reshape(*lead, *found.shape[1:])


def _e2m1(packed: Tensor) -> Float[Tensor, "m k"]:
    """Bytes [m, k / 2] as the two numbers that each holds."""
    halves = torch.tensor([*E2M1, *(-value for value in E2M1)])
    # of every byte, the low half first
    pairs = torch.stack((halves.repeat(16), halves.repeat_interleave(16)), 1)
    return pairs[packed.view(torch.uint8).long()].flatten(1)


def _float_scales(scales: Tensor) -> Float[Tensor, "..."]:
    """Scales in float32; the exponent 255, which stands for NaN, gives an infinity, and either is refused."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.float()
    return torch.exp2(scales.view(torch.uint8).float() - 127)


def _plain(name: str, stored: StoredTensor) -> FloatTensor:
    return FloatTensor(dtype=stored.dtype, shape=stored.shape, stored=(name, stored))


@dataclass(frozen=True, kw_only=True)
class _View:
    """The tensors of a folder, and how they go together."""

    folder: str
    entry: Mapping[str, Any]
    dtype: torch.dtype  # of what is dequantized
    tensors: Mapping[str, StoredTensor]

    def fp8(self) -> dict[str, FloatTensor]:
        found, used = {}, set()
        for name, stored in self.tensors.items():
            scale = next((each for each in _scale_names(name) if each in self.tensors), None)
            if stored.dtype in FP8 or (stored.dtype == torch.int8 and scale is not None):
                if scale is None:
                    self._refuse(f"{name[:80]} is stored as float8 without scales")
                used.add(scale)
                found[name] = self._scaled(name, stored, scale)
        orphans = [name for name in self.tensors if name.endswith("_scale_inv") and name not in used]
        if orphans:
            self._refuse(f"{orphans[0][:80]} are scales without weights in float8")
        return found | dict(self._rest(found, used))

    def mxfp4(self) -> dict[str, FloatTensor]:
        found, used = {}, set()
        for blocks, stored in self.tensors.items():
            name, scale = blocks.removesuffix("_blocks"), blocks.removesuffix("_blocks") + "_scales"
            if name == blocks:
                continue
            if scale not in self.tensors:
                self._refuse(f"{blocks[:80]} has no scales")
            if name in self.tensors:
                self._refuse(f"{name[:80]} is there as floats, too")
            used |= {blocks, scale}
            found[name] = self._microscaled(blocks, stored, scale)
        orphans = [name for name in self.tensors if name.endswith("_scales") and name not in used]
        if orphans:
            self._refuse(f"{orphans[0][:80]} are scales without blocks")
        return found | dict(self._rest(found, used))

    def _rest(self, found: Mapping[str, Any], used: set[str]) -> Iterator[tuple[str, FloatTensor]]:
        """What is stored as floats (or integers), without scales of activations."""
        for name, stored in self.tensors.items():
            if name not in found and name not in used and not _OF_ACTIVATIONS.search(name):
                yield name, _plain(name, stored)

    def _scaled(self, name: str, stored: StoredTensor, scale: str) -> FloatTensor:
        """A matrix, or several, in float8, or in E2M1 if they are bytes."""
        if len(stored.shape) < 2:
            self._refuse(f"{name[:80]} is stored as float8, but has shape {list(stored.shape)}")
        *lead, n, k = stored.shape
        given, packed = self._scales(scale), stored.dtype == torch.int8
        shape = (*lead, n, 2 * k if packed else k)
        block = (1, MX_BLOCK) if packed else self._block_size()
        found = _layout(shape, given.shape, block)
        if found is None or (packed and found != block):
            blocks = "one scale" if block is None else f"blocks of {block[0]} x {block[1]}"
            self._refuse(f"{name[:80]} {list(shape)}, with {blocks}, has scales of shape {list(given.shape)}")
        return FloatTensor(
            dtype=self.dtype, shape=shape, stored=(name, stored), scales=(scale, given), block=found
        )

    def _microscaled(self, name: str, stored: StoredTensor, scale: str) -> FloatTensor:
        """The experts of MXFP4, which are held transposed."""
        given = self._scales(scale)
        of_blocks = len(stored.shape) == 4 and stored.shape[3] == MX_BLOCK // 2
        if not of_blocks or {stored.dtype, given.dtype} != {torch.uint8} or given.shape != stored.shape[:3]:
            self._refuse(
                f"{name[:80]} {list(stored.shape)} with scales {list(given.shape)} are not blocks of {MX_BLOCK} numbers "
                "of 4 bits, and bytes"
            )
        experts, n, groups, _ = stored.shape
        return FloatTensor(
            dtype=self.dtype,
            shape=(experts, groups * MX_BLOCK, n),
            stored=(name, stored),
            scales=(scale, given),
            block=(1, MX_BLOCK),
            transposed=True,
        )

    def _scales(self, name: str) -> StoredTensor:
        stored = self.tensors[name]
        if stored.dtype not in SCALES:
            self._refuse(f"{name[:80]} are scales of dtype {stored.dtype}")
        return stored

    def _block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, from config.json; None: one scale per matrix."""
        size = self.entry.get("weight_block_size")
        if size is None:
            return None
        if not (
            isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)
        ):
            self._refuse(f"weight_block_size in config.json is {str(size)[:40]}")
        return size[0], size[1]

    def _refuse(self, what: str) -> NoReturn:
        name = FORMATS[self.entry["quant_method"]]
        raise ModelError(f"{self.folder} cannot be read as {name} ({what}); download the model again.")


def _scale_names(name: str) -> list[str]:
    """What the scales of a tensor may be called."""
    stem = name.removesuffix(".weight")
    own = [f"{name}_scale_inv", f"{name}_scale"]
    return own if stem == name else [*own, f"{stem}.scale", f"{stem}.qscale_weight"]


def _layout(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where the scales fit none of the known layouts."""
    *lead, n, k = shape
    whole = max(1, n), max(1, k)
    if block is None:
        if math.prod(scales) == 1 or scales in (tuple(lead), (*lead, 1, 1)):
            return whole
        halves = lead and n % 2 == 0 and scales == (*lead, 2, 1)  # gate and up of fused experts
        block = (n // 2, k) if halves else (1, k)
    block = max(1, min(block[0], n)), max(1, min(block[1], k))
    grid = (*lead, -(-n // block[0]), -(-k // block[1]))
    return block if scales == grid or math.prod(scales) == math.prod(grid) == 1 else None


def float_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which the model computes."""
    text = config.get("text_config")
    for each in (config, text if isinstance(text, dict) else {}):
        name = str(each.get("dtype", each.get("torch_dtype"))).removeprefix("torch.")
        if name in FLOATS:
            return getattr(torch, name)
    return torch.bfloat16


def _config(folder: str | Path) -> dict[str, Any]:
    """config.json, empty where it cannot be read: those who need it say so."""
    try:
        config = parse_json(read_small_file(Path(folder) / "config.json"))
    except (OSError, ValueError, RecursionError, FileError):
        return {}
    return config if isinstance(config, dict) else {}
