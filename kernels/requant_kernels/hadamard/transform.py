"""The entry point of the Hadamard transforms: y = output_scales * H (input_scales * x) + bias + addend.

H is block diagonal: blocks of the largest power of two that divides the width, 8192 = 2^13 or 11008 = 43 * 2^8. For blocks
of 256 and more the transform runs on tensor cores (`tile_kernel.py`, for many tokens `batched.py`), otherwise as
butterflies. Output for the integer tensor cores of `trellis/gemv.py` is quantized in the same launch.
"""

from typing import Any

import torch
from torch import Tensor

from requant_kernels.hadamard.batched import transform_batched
from requant_kernels.hadamard.butterfly import transform_butterfly
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE, transform_tiles

MIN_TENSOR_CORE_BLOCK = 256
FEW_TOKENS = 16  # above, there are enough CTAs without one per tile


def hadamard_transform(
    x: Tensor, y: Tensor, *, in_width: int, columns: int, out_width: int, asm: bool, pdl: bool,
    input_scales: Tensor | None = None, output_scales: Tensor | None = None, bias: Tensor | None = None,
    addend: Tensor | None = None, scales: Tensor | None = None, pair: bool = False, permute: bool = False,
    rotate: bool = True, block_size: int | None = None, factor: float = 1.0,
) -> None:  # fmt: skip
    """Write y [m, out_width], whose first `columns` values, a multiple of 16, are transformed.

    Args:
        x: [m, in_width], or contiguous split-K partial sums [splits, m, in_width], which are added; zero beyond in_width.
        y: any float type; with `scales` int8 [2 m, out_width], as in `hadamard_transform_int8`.
        addend: float32 [m, out_width], for example the product of the residuals.
        pair: sums and differences of neighbours, as the code `pair` multiplies them, instead of their transform: the first
            stage is omitted, and the rest doubled.
        permute: y in the order in which `trellis/gemm_sm90.py` reads it.
        rotate: False: H is the identity; only scales, sums and the form of y remain.
        block_size: of H, a power of two that divides `columns`; None: the largest.
        factor: of x.
    """
    if block_size is None:
        block_size = columns & -columns if rotate else 1
    most = max(columns, out_width)
    if not asm or block_size < MIN_TENSOR_CORE_BLOCK:
        transform_butterfly(
            x, y, scales, block_size=block_size, columns=most, in_width=in_width, out_width=out_width, pdl=pdl,
            input_scales=input_scales, output_scales=output_scales, bias=bias, addend=addend, pair=pair, permute=permute,
            factor=factor,
        )  # fmt: skip
        return
    if (
        in_width % 16
        or x.stride(-2) % 16
        or x.data_ptr() % 16
        or (input_scales is not None and input_scales.data_ptr() % 16)
    ):  # lanes cannot load 16 bytes
        x = torch.nn.functional.pad(x, (0, columns - in_width)).clone(memory_format=torch.contiguous_format)
        if input_scales is not None:
            input_scales = torch.nn.functional.pad(input_scales, (0, columns - in_width)).clone()
        in_width = columns
    common: dict[str, Any] = {
        "block_size": block_size, "tiles": -(-most // HADAMARD_TILE), "in_width": in_width, "out_width": out_width,
        "pdl": pdl, "input_scales": input_scales, "output_scales": output_scales, "bias": bias, "addend": addend,
        "factor": factor,
    }  # fmt: skip
    # unscaled 16-bit products give the tile kernel no load that would fix its register layout
    bare = x.element_size() == 2 and input_scales is None and output_scales is None
    if scales is None and (permute or bare or x.dim() == 3 or x.shape[-2] > FEW_TOKENS):
        transform_batched(x, y, pair=pair, permute=permute, **common)
    else:
        transform_tiles(x, y, scales, pair=pair, **common)


def hadamard_transform_int8(
    x: Tensor, input_scales: Tensor | None, *, in_width: int, out_width: int, pair: bool, asm: bool, pdl: bool,
    rotate: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """H (input_scales * x) in 16-bit fixed point: int8 [2 m, out_width], the high bytes of each token, then its low bytes;
    and float32 [m, tiles, 4]: the scale of a tile of 4096 values, and the sum of its integers; then those of its high bytes
    alone, which are the same values in 8 bits."""
    m, tiles = x.shape[0], -(-in_width // HADAMARD_TILE)
    y = torch.empty(2 * m, out_width, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, tiles, 4, dtype=torch.float32, device=x.device)
    hadamard_transform(
        x, y, in_width=in_width, columns=-(-in_width // 16) * 16, out_width=out_width, asm=asm, pdl=pdl,
        input_scales=input_scales, scales=scales, pair=pair,
        rotate=rotate,
    )  # fmt: skip
    return y, scales
