"""`rotated_gate.py` for many tokens, after products by cuBLAS or in int8, without split-K: float16 input, transforms by
`hadamard/warp.py`."""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none

import torch
import triton
import triton.language as tl

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard import warp
from requant_kernels.hadamard.warp import (
    after,
    apart_of,
    before,
    lane_and_warp,
    load_block,
    load_floats,
    load_vector,
    mixed_groups,
    of_words,
    packed_vector,
    pairs_of,
    signs_of,
    store_vector,
    two_vectors,
    unpacked,
)
from requant_kernels.step.gated import logit_of
from requant_kernels.step.rotated import ASSEMBLY, output_of, sigmoid
from requant_kernels.trellis.operands import ActivationForm, Product, RotatedActivations


@triton.jit
def _outputs(z, scales_ptr, bias_ptr, at, FACTOR: tl.constexpr, ASM: tl.constexpr):
    """A vector of a product's outputs."""
    scales, found = load_floats(scales_ptr, at, ASM), ()
    if bias_ptr is not None:
        bias = load_floats(bias_ptr, at, ASM)
    for i in tl.static_range(8):
        found = found + (output_of(z[i], scales[i] * FACTOR, bias[i] if bias_ptr is not None else None),)
    return found


@triton.jit
def _scaled_up(
    z, scales_ptr, bias_ptr, input_scales_ptr, at, FACTOR: tl.constexpr, NEXT: tl.constexpr, ASM: tl.constexpr
):
    """A vector of `up`, times the scales of the next input and NEXT, its factor."""
    MULTIPLY: tl.constexpr = ASM.multiply
    found = ()
    if bias_ptr is None:  # both scales at once
        scales, own = load_vector(scales_ptr, at, True, ASM), load_vector(input_scales_ptr, at, True, ASM)
        both = ()
        for i in tl.static_range(4):
            both = both + (of_words(scales[i], own[i], MULTIPLY),)
        factors = unpacked(both, tl.float16)
        for i in tl.static_range(8):
            found = found + (z[i] * factors[i] * (FACTOR * NEXT),)
    else:
        up, factors = (
            _outputs(z, scales_ptr, bias_ptr, at, FACTOR, ASM),
            load_floats(input_scales_ptr, at, ASM),
        )
        for i in tl.static_range(8):
            found = found + (up[i] * factors[i] * NEXT,)
    return found


@triton.jit
def dense_gate_kernel(
    gate_ptr, up_ptr, gate_scales_ptr, up_scales_ptr, gate_bias_ptr, up_bias_ptr, input_scales_ptr, y_ptr, tokens, columns,
    gate_row, up_row, y_row, GATE_SCALE: tl.constexpr, UP_SCALE: tl.constexpr, ACTIVATION: tl.constexpr,
    OTHER: tl.constexpr, VECTORS: tl.constexpr, PAIRED: tl.constexpr, FACTOR: tl.constexpr, WARPS: tl.constexpr,
    G: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of a token a warp; grid (blocks, tokens / WARPS). `columns` and strides in vectors. OTHER: assembly."""
    lane, own_warp = lane_and_warp(WARPS)
    token = tl.program_id(1).to(tl.int64) * WARPS + own_warp
    read = tl.minimum(token, tokens - 1)
    apart = apart_of(tl.program_id(0), columns, PAIRED)
    start, first, held = tl.program_id(0) * (32 * VECTORS), before(lane, G), after(lane, apart, G)
    signs = signs_of(lane, PAIRED)
    gate_pairs = load_block(gate_ptr, read * gate_row + start + first, apart, VECTORS, ASM)
    up_pairs = load_block(up_ptr, read * up_row + start + first, apart, VECTORS, ASM)
    gate_pairs, up_pairs, pairs = mixed_groups(gate_pairs, ASM), mixed_groups(up_pairs, ASM), ()
    for v in tl.static_range(VECTORS // 2):
        of_gate, of_up = two_vectors(gate_pairs, signs, v, ASM), two_vectors(up_pairs, signs, v, ASM)
        h = ()
        for half in tl.static_range(2):
            at = start + held + (64 * v + (4 << G[0]) * half)
            gate = _outputs(
                of_gate[8 * half : 8 * half + 8], gate_scales_ptr, gate_bias_ptr, at, FACTOR * GATE_SCALE, ASM
            )
            up = _scaled_up(
                of_up[8 * half : 8 * half + 8], up_scales_ptr, up_bias_ptr, input_scales_ptr, at, FACTOR * UP_SCALE, FACTOR,
                ASM,
            )  # fmt: skip
            for i in tl.static_range(8):
                h = h + (gate[i] * sigmoid(logit_of(gate[i], ACTIVATION), OTHER) * up[i],)
        pairs = pairs + pairs_of(h, tl.float16, ASM)
    pairs, signs = mixed_groups(pairs, ASM), signs[2:4] + signs[0:2]
    for v in tl.static_range(VECTORS // 2):
        y = two_vectors(pairs, signs, v, ASM)
        for half in tl.static_range(2):
            at = token * y_row + start + first + 64 * v + apart * half
            words = packed_vector(y[8 * half : 8 * half + 8], tl.float16, ASM)
            store_vector(y_ptr, at, words, token < tokens, ASM)


def supports(gate: Product, up: Product, form: ActivationForm) -> bool:
    """Whether the products are for many tokens, with blocks of a supported size."""
    width = gate.values.shape[-1]
    return (
        gate.values.dtype == up.values.dtype == torch.float16
        and gate.source.splits == up.source.splits == 1
        and not (form.permute or form.pair or form.int8)
        and warp.supports(width & -width)
        and warp.readable(*(each for own in (gate, up) for each in (own.values, own.output_scales, own.bias)))
    )


def dense_gate(
    gate: Product,
    up: Product,
    activation: str,
    *,
    input_scales: torch.Tensor,
    form: ActivationForm,
) -> RotatedActivations:
    """As `rotated_gate`, but nothing is rounded before the activations are written."""
    m, f = gate.values.shape[-2:]
    found = form.empty(m, input_scales.device)
    rows = (gate.source.row_stride, up.source.row_stride, found.values.stride(0))
    launch(
        dense_gate_kernel,
        warp.grid_of(m, f),
        (
            gate.values, up.values, gate.output_scales, up.output_scales, gate.bias, up.bias, input_scales, found.values, m,
            f // 8, *(row // 8 for row in rows),
        ),
        interned(
            GATE_SCALE=gate.source.scale, UP_SCALE=up.source.scale, ACTIVATION=activation, OTHER=ASSEMBLY,
            **warp.constants_of(f),
        ),
    )  # fmt: skip
    return found
