"""The experts of a step of few tokens, in a number of launches that does not depend on tokens, experts or bit widths.

    rotate x, multiply gates and ups, finish and gate and rotate, multiply downs, rotate, scale and add

A product is one launch for all slots (`gemv.py`). Between the two, one launch finishes gates and ups, applies
silu(gate) * up and rotates the result (`step/rotated_gate.py`), with the scales of each slot's own matrices; for other
gates, and widths that it does not take, these are launches of their own. Tokens that choose the same expert each read its
codes, from the L2 cache at best: that costs little for a few tokens; for many a GEMM is better.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.experts.gemv import experts_gemv
from requant_kernels.experts.scale import combine, gate, gate_and_rotate
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.step import rotated_gate
from requant_kernels.trellis import gemv
from requant_kernels.trellis.operands import ActivationForm, RotatedActivations


def supports(device: torch.device) -> bool:
    """Devices with inline PTX."""
    return supports_ptx(device)


def input_form(stack: ExpertStack) -> ActivationForm:
    """What the products of a stack read."""
    return gemv.activation_form(stack.layout, 1)


def experts_step(
    x: Tensor | RotatedActivations, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, weights: Tensor, *,
    gated: Callable[[Tensor, Tensor], Tensor] | None = None, into: Tensor | None = None, asm: bool = True,
) -> Tensor:  # fmt: skip
    """y [m, n] of x [m, k], contiguous, or rotated in `input_form`, with the experts int [m, s] of each token, and their
    weights [m, s]; in the type of `into`, to which it is added, or of x, or the weights.

    `gated`: h [slots, f] of gates and ups [slots, f]; None: silu(gate) * up. `asm` False: rotations without PTX.
    """
    slots, per_token = experts.flatten().contiguous(), experts.shape[1]
    weights, pdl = weights.contiguous(), supports_pdl(slots.device)
    given = into if into is not None else x if isinstance(x, Tensor) else weights
    if isinstance(x, Tensor):
        x = gemv.rotate_activations(x, gate_up.layout, input_form(gate_up), asm=asm)
    z = experts_gemv(x, gate_up, slots, per_token=per_token)
    if gated is None and rotated_gate.supports(gate_up.n):
        h = gate_and_rotate(z.unflatten(0, (2, -1)), gate_up, down, slots, given.dtype, input_form(down))
    else:
        h = gate(_rotated_back(z, gate_up, asm=asm), gate_up, slots, given.dtype, silu=gated is None, pdl=pdl)
        if gated is not None:
            h = gated(h[0], h[1]).contiguous()
        h = gemv.rotate_activations(h, down.layout, input_form(down), asm=asm)
    z = _rotated_back(experts_gemv(h, down, slots, per_token=1), down, asm=asm)
    y = torch.empty(*weights.shape[:1], down.n, dtype=given.dtype, device=z.device) if into is None else into
    combine(z, down, slots, weights, y, adds=into is not None, pdl=pdl)
    return y


def _rotated_back(z: Tensor, stack: ExpertStack, *, asm: bool) -> Tensor:
    """H z, float32 [slots, n]."""
    y = torch.empty(len(z), stack.n, dtype=torch.float32, device=z.device)
    hadamard_transform(
        z, y, in_width=z.shape[1], columns=z.shape[1], out_width=stack.n, asm=asm, pdl=supports_pdl(z.device)
    )
    return y
