"""The operations after the products of experts: scales and biases of each slot's own matrix, the gate, and the sum over a
token's experts. Elementwise, in plain Triton; or scales and the gate between two rotations (`step/rotated_gate.py`).

    h_j = silu(s_gate z_gate + b_gate) * (s_up z_up + b_up)          y_t = sum_j w_j (s_j z_j + b_j)
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.step import rotated_gate
from requant_kernels.trellis.operands import ActivationForm, Product, RotatedActivations

BLOCK = 256


@triton.jit
def _scaled(z_ptr, scales_ptr, biases_ptr, slot, matrix, at, inside, n):
    """s z + b of a slot, float32."""
    z = tl.load(z_ptr + slot * n + at, mask=inside, other=0.0).to(tl.float32)
    z *= tl.load(scales_ptr + matrix * n + at, mask=inside, other=0.0).to(tl.float32)
    if biases_ptr is not None:
        z += tl.load(biases_ptr + matrix * n + at, mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def gate_kernel(
    z_ptr, scales_ptr, biases_ptr, experts_ptr, h_ptr, n, NUM_EXPERTS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z [2, slots, n] -> h [slots, n], or without SILU [2, slots, n], only scaled; grid (slots, blocks)."""
    slot, slots = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    wait_for_previous_launch(PDL, False)
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    gate = _scaled(z_ptr, scales_ptr, biases_ptr, slot, expert, at, inside, n)
    up = _scaled(z_ptr, scales_ptr, biases_ptr, slot + slots, expert + NUM_EXPERTS, at, inside, n)
    if SILU:
        gate = gate / (1.0 + tl.exp(-gate)) * up
    else:
        tl.store(h_ptr + (slot + slots) * n + at, up.to(h_ptr.dtype.element_ty), mask=inside)
    tl.store(h_ptr + slot * n + at, gate.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    z_ptr, scales_ptr, biases_ptr, experts_ptr, weights_ptr, rows_ptr, y_ptr, n, PER_TOKEN: tl.constexpr, ADDS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z [tokens * PER_TOKEN, n] -> y [tokens, n], or with ADDS added to it; grid (tokens, blocks). `rows`: index into z and
    experts, per slot."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    wait_for_previous_launch(PDL, False)
    y = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PER_TOKEN):
        slot = token * PER_TOKEN + i
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        if rows_ptr is not None:
            slot = tl.load(rows_ptr + slot).to(tl.int64)
        expert = tl.load(experts_ptr + slot).to(tl.int64)
        y += weight * _scaled(z_ptr, scales_ptr, biases_ptr, slot, expert, at, inside, n)
    y = y.to(y_ptr.dtype.element_ty)
    if ADDS:  # rounded before, as where the sum is an operation of its own
        x = tl.load(y_ptr + token * n + at, mask=inside, other=0.0)
        y = (x.to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * n + at, y, mask=inside)


def gate(
    z: Tensor, stack: ExpertStack, experts: Tensor, dtype: torch.dtype, *, silu: bool, pdl: bool
) -> Tensor:
    """h [slots, n] of z [2 slots, n]; without `silu` gates and ups [2, slots, n]."""
    slots, n = len(experts), stack.n
    h = torch.empty((slots, n) if silu else (2, slots, n), dtype=dtype, device=z.device)
    launch(
        gate_kernel, (slots, triton.cdiv(n, BLOCK), 1), (z, stack.output_scales, stack.biases, experts, h, n),
        interned(NUM_EXPERTS=stack.experts, SILU=silu, BLOCK=BLOCK, PDL=pdl, num_warps=4, **pdl_option(pdl)),
    )  # fmt: skip
    return h


def gate_and_rotate(
    z: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    experts: Tensor,
    dtype: torch.dtype,
    form: ActivationForm,
) -> RotatedActivations:
    """silu(gate) * up of products z [2, slots, n] that are not rotated yet, rotated for the downs in `form`; where
    `rotated_gate.supports` n."""
    gates, ups = gate_and_up(z, gate_up)
    assert down.layout.input_scales is not None
    return rotated_gate.rotated_gate(
        gates, ups, "silu", dtype, input_scales=down.layout.input_scales, form=form, experts=experts
    )


def gate_and_up(z: Tensor, gate_up: ExpertStack) -> tuple[Product, Product]:
    """Products z [2, slots, n] with the scales and biases of all experts."""
    scales, biases = gate_up.output_scales.chunk(2), [None, None]
    if gate_up.biases is not None:
        biases = gate_up.biases.chunk(2)
    gates, ups = (
        Product(values=values, output_scales=own, bias=bias)
        for values, own, bias in zip(z.chunk(2), scales, biases, strict=True)
    )
    return gates, ups


def combine(
    z: Tensor, stack: ExpertStack, experts: Tensor, weights: Tensor, y: Tensor, *, rows: Tensor | None = None, adds: bool,
    pdl: bool,
) -> None:  # fmt: skip
    """Write y [m, n], contiguous, of z [m s, n] and weights [m, s], or with `adds` add to it. `rows` int32 [m s]: maps slots
    to z and experts in another order."""
    (m, per_token), n = weights.shape, stack.n
    launch(
        combine_kernel, (m, triton.cdiv(n, BLOCK), 1), (z, stack.output_scales, stack.biases, experts, weights, rows, y, n),
        interned(PER_TOKEN=per_token, ADDS=adds, BLOCK=BLOCK, PDL=pdl, num_warps=4, **pdl_option(pdl)),
    )  # fmt: skip
