"""The experts of a step of few tokens, by launches whose number does not depend on tokens or experts.

    rotate x, multiply gates and ups, rotate, scale and gate, rotate, multiply downs, rotate, scale and add

A product is one launch of the one-token GEMV (`trellis/gemv.py`) over slots (`common/slots.py`) for each width of codes that
the stack holds; a CTA whose expert has another width ends at once. Where all CTAs run at once and rotate the token
themselves (`trellis/fused_hadamard.py`), the first rotation has no launch. Tokens that choose the same expert read its codes
each by itself, from the L2 cache at best: for a few tokens that costs little, for many a GEMM is better.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from requant_kernels import heuristics
from requant_kernels.common.device import num_sms, supports_pdl, supports_ptx
from requant_kernels.common.slots import Slots
from requant_kernels.experts.scale import combine, gate
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.hadamard.tile_ptx import MAX_SUM_BYTES
from requant_kernels.hadamard.transform import hadamard_transform, hadamard_transform_int8
from requant_kernels.launch_config import Shape, TrellisGemvConfig
from requant_kernels.trellis.fused_hadamard import NUM_WARPS
from requant_kernels.trellis.gemv import BYTE_SUM_MEAN, gemv_slots, padded_columns
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.rotate import rotate_input


def supports(device: torch.device) -> bool:
    """Where there is inline PTX."""
    return supports_ptx(device)


def experts_step(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, weights: Tensor, *,
    gated: Callable[[Tensor, Tensor], Tensor] | None = None, asm: bool = True,
) -> Tensor:  # fmt: skip
    """y [m, n] of x [m, k], contiguous, by the experts int64 [m, s] of each token, and their weights [m, s].

    `gated`: h [slots, f] of gates and ups [slots, f]; None: silu(gate) * up. `asm` False: rotations without PTX.
    """
    slots, per_token = experts.flatten().contiguous(), experts.shape[1]
    weights, pdl = weights.contiguous(), supports_pdl(x.device)
    z = product(x, gate_up, slots, per_token=per_token, asm=asm)
    h = gate(z, gate_up, slots, x.dtype, silu=gated is None, pdl=pdl)
    if gated is not None:
        h = gated(h[0], h[1]).contiguous()
    return combine(product(h, down, slots, per_token=1, asm=asm), down, slots, weights, x.dtype, pdl=pdl)


def product(x: Tensor, stack: ExpertStack, experts: Tensor, *, per_token: int, asm: bool) -> Tensor:
    """H V H (input_scales * x) of every slot, float32 [parts * slots, n]; slots i of a part read row i / per_token of x."""
    pdl, first = supports_pdl(x.device), stack.layout
    total, rows = stack.parts * len(experts), -(-stack.n // TILE) * TILE
    configs = {
        bits: heuristics.trellis_slots(Shape(first.code, bits, stack.n, stack.k, 1), total, x.device)
        for bits in stack.by_bits
    }
    fused = all(_can_fuse(x, layout, configs[bits], total) for bits, (layout, _) in stack.by_bits.items())
    rotated, scales = x, None
    if not fused and first.code in BYTE_SUM_MEAN:
        rotated, scales = hadamard_transform_int8(
            x, first.input_scales, in_width=stack.k, out_width=padded_columns(stack.k), pair=first.code == "pair", asm=asm,
            pdl=pdl,
        )  # fmt: skip
    elif not fused:
        rotated = rotate_input(x, first, padded_columns(stack.k), asm=asm)
    z = torch.empty(total, rows, dtype=torch.float32, device=x.device)
    slots = Slots(parts=stack.parts, experts=stack.experts, per_token=per_token)
    for bits, (layout, matrices) in stack.by_bits.items():
        gemv_slots(rotated, scales, layout, configs[bits], z, experts, matrices, slots, fused=fused, pdl=pdl)
    y = torch.empty(total, stack.n, dtype=torch.float32, device=x.device)
    hadamard_transform(z, y, in_width=rows, columns=rows, out_width=stack.n, asm=asm, pdl=pdl)
    return y


def _can_fuse(x: Tensor, layout: TrellisLayout, config: TrellisGemvConfig, slots: int) -> bool:
    """Whether every CTA can rotate its row of x itself, and all CTAs run at once."""
    ctas = -(-layout.n // (TILE * config.tiles_per_cta)) * slots
    return (
        layout.code in BYTE_SUM_MEAN
        and config.num_warps == NUM_WARPS
        and layout.k % 256 == 0
        and layout.k <= HADAMARD_TILE
        and 128 * NUM_WARPS * 2 * config.tiles_per_cta <= MAX_SUM_BYTES
        and ctas <= num_sms(x.device)
        and x.data_ptr() % 16 == 0
    )
