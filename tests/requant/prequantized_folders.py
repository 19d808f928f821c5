"""Folders of tiny models whose weight files hold FP8 or MXFP4, written here independently of what reads them."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MATRICES = r"(proj|kv_a_proj_with_mqa|q_a_proj|w[123])\.weight$"
SCALES = r"(_scale_inv|\.scale|weight_scale)$"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def blocks_of(weight: Tensor, rows: int, columns: int) -> list[tuple[int, int, Tensor]]:
    """Every block of a matrix with its place in the grid of scales."""
    n, k = weight.shape
    return [
        (i // rows, j // columns, weight[i : i + rows, j : j + columns])
        for i in range(0, n, rows)
        for j in range(0, k, columns)
    ]


def fp8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes in E4M3 and scales of blocks, a block at a time."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i, j, block in blocks_of(weight.float(), rows, columns):
        scales[i, j] = block.abs().max() / 448
        into = codes[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        into.copy_((block / scales[i, j]).to(codes.dtype))
    return codes, scales


def e2m1(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[.., k] as bytes [.., k / 32, 16], the low half first, and exponents [.., k / 32]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = torch.log2(groups.abs().amax(-1).clamp(min=1e-12) / 6).ceil()
    codes = ((groups / exponents.exp2()[..., None])[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def rewrite(
    source: Path, target: Path, tensors: Mapping[str, Tensor], entry: Mapping[str, Any] | None
) -> Path:
    """`source` with other tensors, in bfloat16 where they are floats, and a quantization_config, if any."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored = {
        name: (
            tensor.bfloat16() if tensor.dtype == torch.float32 and not re.search(SCALES, name) else tensor
        ).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"dtype": "bfloat16", **({} if entry is None else {"quantization_config": dict(entry)})}
    (target / "config.json").write_text(json.dumps(config))
    return target


def fp8_folder(source: Path, target: Path, *, block: int | None, matrices: str = MATRICES) -> Path:
    """In blocks of `block` x `block`, or with one scale a matrix and static activations."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if re.search(matrices, name) and tensor.dim() == 2:
            codes, scales = fp8(tensor, *((block, block) if block else tensor.shape))
            tensors |= {name: codes, f"{name}_scale_inv": scales if block else scales[0, 0]}
            if block is None:
                tensors[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
        else:
            tensors[name] = tensor
    size = [block, block] if block else None
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    return rewrite(source, target, tensors, entry | {"weight_block_size": size})


def mxfp4_folder(source: Path, target: Path) -> Path:
    """The experts of gpt-oss as its files have them, from a folder that holds them as floats."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = e2m1(tensor.mT)
        else:
            tensors[name] = tensor
    return rewrite(source, target, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def fp4_folder(source: Path, target: Path) -> Path:
    """DeepSeek-V4: experts as pairs of E2M1 in bytes, the rest in FP8 blocks, with exponents and floats as scales."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        scale = f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            packed, exponents = e2m1(tensor)
            tensors |= {
                name: packed.flatten(-2).view(torch.int8),
                scale: exponents.view(torch.float8_e8m0fnu),
            }
        elif name.endswith(("wq_a.weight", "wkv.weight")):
            tensors[name], tensors[scale] = fp8(tensor, 24, 24)
        else:
            tensors[name] = tensor
    entry = {"quant_method": "fp8", "weight_block_size": [24, 24], "scale_fmt": "ue8m0"}
    folder = rewrite(source, target, tensors, entry)
    config = json.loads((folder / "config.json").read_text()) | {"expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
