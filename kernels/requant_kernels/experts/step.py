"""The experts of a step of few tokens, in a number of launches that does not depend on tokens or experts.

    rotate x, multiply gates and ups, rotate, scale and gate, rotate, multiply downs, rotate, scale and add

A product is one launch of the one-token GEMV (`trellis/gemv.py`) over slots (`common/slots.py`) per bit width in the stack;
a CTA whose expert has another width exits at once. If all CTAs are resident at once and rotate the token themselves
(`trellis/fused_hadamard.py`), the first rotation needs no launch. Tokens that choose the same expert each read its codes,
from the L2 cache at best: that costs little for a few tokens; for many a GEMM is better.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.slots import Slots
from requant_kernels.experts.scale import combine, gate
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.launch_config import Shape
from requant_kernels.trellis import gemv
from requant_kernels.trellis.gemv_launch import trellis_slots
from requant_kernels.trellis.layout import TILE


def supports(device: torch.device) -> bool:
    """Devices with inline PTX."""
    return supports_ptx(device)


def experts_step(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, weights: Tensor, *,
    gated: Callable[[Tensor, Tensor], Tensor] | None = None, asm: bool = True,
) -> Tensor:  # fmt: skip
    """y [m, n] of x [m, k], contiguous, with the experts int64 [m, s] of each token, and their weights [m, s].

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
    """H V H (input_scales * x) for every slot, float32 [parts * slots, n]; slot i of a part reads row i / per_token of x."""
    pdl, first = supports_pdl(x.device), stack.layout
    total, rows = stack.parts * len(experts), -(-stack.n // TILE) * TILE
    configs = {
        bits: trellis_slots(Shape(first.code, bits, stack.n, stack.k, 1), total, x.device)
        for bits in stack.by_bits
    }
    fused = all(
        gemv.can_fuse(x, layout, configs[bits], slots=total) for bits, (layout, _) in stack.by_bits.items()
    )
    rotated = x if fused else gemv.rotate_activations(x, first, gemv.activation_form(first, 1), asm=asm)
    z = torch.empty(total, rows, dtype=torch.float32, device=x.device)
    slots = Slots(parts=stack.parts, experts=stack.experts, per_token=per_token)
    for bits, (layout, matrices) in stack.by_bits.items():
        slot_products = gemv.SlotProducts(y=z, experts=experts, matrices=matrices, slots=slots)
        gemv.launch_gemv(rotated, layout, configs[bits], slot_products=slot_products)
    y = torch.empty(total, stack.n, dtype=torch.float32, device=x.device)
    hadamard_transform(z, y, in_width=rows, columns=rows, out_width=stack.n, asm=asm, pdl=pdl)
    return y
