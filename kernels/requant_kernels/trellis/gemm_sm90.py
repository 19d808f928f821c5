"""More than 16 tokens by trellis codes on Hopper: rotate and arrange the activations, multiply (`trellis_wgmma.py`).

The rotation that follows adds the partial products. Imported where it runs: Gluon is part of Triton from 3.6 on.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.rotate import rotate
from requant_kernels.launch_config import HopperConfig
from requant_kernels.scalar.gemm_sm90_kernel import x_layout
from requant_kernels.trellis.gemm_sm90_kernel import trellis_multiply_kernel
from requant_kernels.trellis.hashes import groups_of, values_asm, words_asm
from requant_kernels.trellis.layout import TrellisLayout

GROUP, BLOCK = 64, 256  # columns of a piece and of a block
PIECES = BLOCK // GROUP


def stages(tokens: int) -> tuple[int, int]:
    """Columns of a copy of activations, and how many of them have a place in shared memory."""
    return (BLOCK, 2) if tokens <= 128 else (BLOCK // 2, 3)


def most_registers(config: HopperConfig, four: int) -> int | None:
    """Of a thread, where 16 warps shall find a place on a multiprocessor; None: as many as the compiler wants."""
    return 128 if config.tokens <= 64 and config.tiles == 1 and four <= 16 else None


@cache
def constants(code: str, four: int, vector: int, config: HopperConfig, *, even: bool) -> dict[str, object]:
    """What the kernel is compiled for; `even`: columns are whole blocks."""
    groups = groups_of(four)
    count, units = four * groups // 4, PIECES // groups
    values = [values_asm(code, four, group) for group in range(groups)]
    stage, places = stages(config.tokens)
    loads = [words_asm(count, vector, 128 * count * unit) for unit in range(units if even else 1)]
    return {
        "VALUES": tuple(text for text, _ in values), "VALUES_CONSTRAINTS": values[0][1],
        "LOADS": tuple(text for text, _ in loads), "LOAD_CONSTRAINTS": loads[0][1], "COUNT": count, "V": vector,
        "J": groups, "EVEN": even, "N": config.tokens, "W": config.warps, "R": config.tiles, "AHEAD": config.ahead,
        "C": stage, "STAGES": places,
    }  # fmt: skip


def partial_products(x: Tensor, layout: TrellisLayout, config: HopperConfig) -> Tensor:
    """V times the rotated activations: float32 [splits, m, rows], to be added."""
    m, (tiles, units, _, _, vector) = x.shape[0], layout.packed_codes.shape
    width, blocks = -(-layout.k // GROUP) * GROUP, -(-layout.k // BLOCK)
    turned = torch.empty(m, width, dtype=torch.float16, device=x.device)
    rotate(
        x, turned, width=layout.k, rotated=-(-layout.k // 16) * 16, out_width=width, before=layout.input_scales,
        arranged=True, asm=True, pdl=True,
    )  # fmt: skip
    steps = -(-blocks // min(blocks, config.split))
    split, even = -(-blocks // steps), units * groups_of(layout.four) * GROUP == blocks * BLOCK
    product = torch.empty(split, m, tiles * 16, dtype=torch.float32, device=x.device)
    box = [config.tokens, stages(config.tokens)[0]]
    launch(
        trellis_multiply_kernel,
        (-(-tiles // (config.warps * config.tiles)), split, -(-m // config.tokens)),
        (
            TensorDescriptor.from_tensor(turned, box, x_layout()), layout.packed_codes, product, units, blocks, tiles - 1,
            steps, tiles * 16, m,
        ),
        interned(
            **constants(layout.code, layout.four, vector, config, even=even), PDL=True, num_warps=config.warps,
            launch_pdl=True, maxnreg=most_registers(config, layout.four),
        ),
    )  # fmt: skip
    return product
