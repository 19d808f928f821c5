"""More than 16 tokens by trellis codes on Hopper: rotate and arrange the activations, multiply (`trellis_wgmma.py`).

The rotation that follows adds the partial products. Imported where it runs: Gluon is part of Triton from 3.6 on.
"""

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from requant_kernels.hadamard import rotate
from requant_kernels.hashes import groups_of, values_asm, words_asm
from requant_kernels.rings import TrellisLayout
from requant_kernels.trellis_wgmma import trellis_multiply_kernel
from requant_kernels.tuning import HopperConfig
from requant_kernels.wgmma import x_layout

GROUP, BLOCK = 64, 256  # columns of a piece and of a block
STAGE, STAGES = 256, 2  # columns of a copy of activations, and how many of them have a place


def constants(code: str, four: int, vector: int, config: HopperConfig, *, even: bool) -> dict[str, object]:
    """What the kernel is compiled for; `even`: columns are whole blocks."""
    groups = groups_of(four)
    count, units = four * groups // 4, BLOCK // GROUP // groups
    values = [values_asm(code, four, group) for group in range(groups)]
    loads = [words_asm(count, vector, 128 * count * unit) for unit in range(units if even else 1)]
    return {
        "VALUES": tuple(text for text, _ in values), "VALUES_CONSTRAINTS": values[0][1],
        "LOADS": tuple(text for text, _ in loads), "LOAD_CONSTRAINTS": loads[0][1], "COUNT": count, "V": vector,
        "J": groups, "EVEN": even, "N": config.tokens, "W": config.warps, "R": config.tiles, "AHEAD": config.ahead,
        "C": STAGE, "STAGES": STAGES,
    }  # fmt: skip


def partial_products(x: Tensor, layout: TrellisLayout, config: HopperConfig) -> Tensor:
    """V times the rotated activations: float32 [splits, m, rows], to be added."""
    m = x.shape[0]
    width = -(-layout.k // GROUP) * GROUP
    turned = torch.empty(m, width, dtype=torch.float16, device=x.device)
    rotate(
        x, turned, width=layout.k, rotated=-(-layout.k // 16) * 16, out_width=width, before=layout.input_scales,
        arranged=True, asm=True, pdl=True,
    )  # fmt: skip
    return multiply(turned, layout, config)


def multiply(arranged: Tensor, layout: TrellisLayout, config: HopperConfig) -> Tensor:
    """Float32 [splits, m, rows] of float16 [m, whole groups of 64 columns] as the kernel wants them."""
    m, (tiles, units, _, _, vector) = arranged.shape[0], layout.words.shape
    blocks = -(-layout.k // BLOCK)
    steps = -(-blocks // min(blocks, config.split))
    split, even = -(-blocks // steps), units * groups_of(layout.four) * GROUP == blocks * BLOCK
    product = torch.empty(split, m, tiles * 16, dtype=torch.float32, device=arranged.device)
    grid = (-(-tiles // (config.warps * config.tiles)), split, -(-m // config.tokens))
    trellis_multiply_kernel[grid](
        TensorDescriptor.from_tensor(arranged, [config.tokens, STAGE], x_layout()), layout.words, product, units, blocks,
        tiles - 1, steps, tiles * 16, m, **constants(layout.code, layout.four, vector, config, even=even), PDL=True,
        num_warps=config.warps, launch_pdl=True,
    )  # fmt: skip
    return product
