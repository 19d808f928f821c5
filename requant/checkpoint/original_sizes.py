"""Bits per weight of an original, as its weight files store it: 16 or 32 of floats, less where they hold FP8 or MXFP4.

    bits per weight = 8 (bytes of codes and scales) / weights

of all matrices that are quantized, each found by its name in the files, where several may be fused into one tensor.
"""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from requant.models.experts import Experts
from requant.models.file_names import disk_names, names_in_files
from requant.models.prequantized import FloatTensor, float_view
from requant.models.weight_files import folder_bytes


def stores_floats(folder: str | Path) -> bool:
    """Whether the weight files of a folder hold no FP8 or MXFP4."""
    return all(tensor.scales is None for tensor in float_view(folder).values())


def float_bytes(folder: str | Path) -> int:
    """Bytes of the weight files of a folder if they held floats in place of FP8 and MXFP4."""
    coded = [tensor for tensor in float_view(folder).values() if tensor.scales is not None]
    return folder_bytes(folder) + sum(_floats(tensor) - tensor.bytes for tensor in coded)


def original_bits(model: nn.Module, folder: str | Path, names: Iterable[str]) -> float | None:
    """Bits per weight of the matrices `names` in a folder's files; None where none of them is found there."""
    view = float_view(folder)
    renamed = names_in_files(model, view.keys())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    fused = _fused_experts(model)
    found: dict[str, FloatTensor] = {}
    for name in names:
        wanted = [f"{renamed.get(name, name)}.weight", *fused.get(name, ())]
        stored = next(
            (each for full in wanted for each in (full, full.removeprefix(prefix)) if each in view), None
        )
        if stored is not None:
            found[stored] = view[stored]
    weights = sum(math.prod(tensor.shape) for tensor in found.values())
    return 8 * sum(tensor.bytes for tensor in found.values()) / weights if weights else None


def whole_bits(folder: str | Path) -> float:
    """Bits per weight of all weight files, headers included."""
    return 8 * folder_bytes(folder) / sum(math.prod(tensor.shape) for tensor in float_view(folder).values())


def _fused_experts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Matrix of an expert -> what files that fuse the experts of a layer may call the tensor that it is part of."""
    found: dict[str, tuple[str, ...]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Experts):
            fused = [f"{path}.{name}" for name in ("gate_up_proj", "up_proj", "down_proj")]
            *first, down = disk_names(model, dict.fromkeys(fused, torch.empty(0))).values()
            for e in range(len(layer)):
                found |= {f"{path}.{e}.{name}": tuple(first) for name in layer.names[:-1]}
                found[f"{path}.{e}.{layer.names[-1]}"] = (down,)
    return found


def _floats(tensor: FloatTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
