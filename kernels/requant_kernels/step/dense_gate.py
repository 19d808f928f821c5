"""`rotated_gate.py` for many tokens, after products by cuBLAS or in int8, without split-K: float16 input, transforms by
`hadamard/products.py`."""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard import products
from requant_kernels.hadamard.products import sides, transformed
from requant_kernels.step.gated import activated
from requant_kernels.step.rotated import output_of
from requant_kernels.trellis.operands import ActivationForm, Product, RotatedActivations

VALUES, NUM_WARPS = 4096, 4  # per CTA; values of each of the three
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def dense_gate_kernel(
    gate_ptr, up_ptr, gate_scales_ptr, up_scales_ptr, gate_bias_ptr, up_bias_ptr, input_scales_ptr, y_ptr, tokens,
    gate_row, up_row, y_row, A: tl.constexpr, B: tl.constexpr, L: tl.constexpr, FACTOR: tl.constexpr,
    GATE_SCALE: tl.constexpr, UP_SCALE: tl.constexpr, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A block of L tokens; grid (blocks, tokens / L)."""
    a, b = tl.arange(0, A), tl.arange(0, B)
    token = tl.program_id(1).to(tl.int64) * L + tl.arange(0, L)[:, None, None]
    inside = token < tokens
    first = tl.program_id(0) * (A * B)
    index = first + a[None, :, None] * B + b[None, None, :]
    turned = first + a[None, None, :] * B + b[None, :, None]
    gate = tl.load(gate_ptr + token * gate_row + index, mask=inside, other=0.0)
    up = tl.load(up_ptr + token * up_row + index, mask=inside, other=0.0)
    gate = transformed(gate, L, A, B, FACTOR * GATE_SCALE)
    up = transformed(up, L, A, B, FACTOR * UP_SCALE)
    gate_bias, up_bias = None, None
    if gate_bias_ptr is not None:
        gate_bias = tl.load(gate_bias_ptr + turned)
    if up_bias_ptr is not None:
        up_bias = tl.load(up_bias_ptr + turned)
    gate = output_of(gate, tl.load(gate_scales_ptr + turned).to(tl.float32), gate_bias).to(DTYPE)
    up = output_of(up, tl.load(up_scales_ptr + turned).to(tl.float32), up_bias).to(DTYPE)
    h = (activated(gate, ACTIVATION) * up.to(tl.float32)).to(DTYPE)
    h = (h.to(tl.float32) * tl.load(input_scales_ptr + turned).to(tl.float32)).to(DTYPE)
    y = transformed(h, L, B, A, FACTOR)
    tl.store(y_ptr + token * y_row + index, y.to(y_ptr.dtype.element_ty), mask=inside)


def supports(gate: Product, up: Product, form: ActivationForm) -> bool:
    """Whether the products are for many tokens, with blocks of a supported size."""
    width = gate.values.shape[-1]
    return (
        gate.values.dtype == up.values.dtype == torch.float16
        and gate.source.splits == up.source.splits == 1
        and not form.permute
        and products.supports(width & -width)
    )


def dense_gate(
    gate: Product,
    up: Product,
    activation: str,
    dtype: torch.dtype,
    *,
    input_scales: Tensor,
    form: ActivationForm,
) -> RotatedActivations:
    """As `rotated_gate`."""
    m, f = gate.values.shape[-2:]
    found, block_size = form.empty(m, input_scales.device), f & -f
    a, b = sides(block_size)
    own = VALUES // block_size
    launch(
        dense_gate_kernel,
        (f // block_size, -(-m // own), 1),
        (
            gate.values, up.values, gate.output_scales, up.output_scales, gate.bias, up.bias, input_scales, found.values,
            m, gate.source.row_stride, up.source.row_stride, found.values.stride(0),
        ),
        interned(
            A=a, B=b, L=own, FACTOR=block_size**-0.5, GATE_SCALE=gate.source.scale, UP_SCALE=up.source.scale,
            DTYPE=TYPES[dtype], ACTIVATION=activation,
            num_warps=NUM_WARPS, num_stages=1,
        ),
    )  # fmt: skip
    return found
