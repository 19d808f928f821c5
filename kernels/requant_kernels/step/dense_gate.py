"""`rotated_gate.py` for many tokens, after products in float16 without split-K, of one matrix or of experts: transforms by
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
    store_permuted,
    store_vector,
    two_vectors,
    unpacked,
)
from requant_kernels.step.gated import logit_of
from requant_kernels.step.rotated import ASSEMBLY, output_of, sigmoid
from requant_kernels.trellis.operands import ActivationForm, Product, RotatedActivations

# with fewer, products of one matrix split K, and tiles of a few tokens are split among warps (`rotated_gate.py`)
MIN_TOKENS = 128


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
    z, scales_ptr, bias_ptr, input_scales_ptr, own_at, at, FACTOR: tl.constexpr, NEXT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A vector of `up`, times the scales of the next input, at `at`, and NEXT, its factor."""
    MULTIPLY: tl.constexpr = ASM.multiply
    found = ()
    if bias_ptr is None:  # both scales at once
        scales, own = load_vector(scales_ptr, own_at, True, ASM), load_vector(input_scales_ptr, at, True, ASM)
        both = ()
        for i in tl.static_range(4):
            both = both + (of_words(scales[i], own[i], MULTIPLY),)
        factors = unpacked(both, tl.float16)
        for i in tl.static_range(8):
            found = found + (z[i] * factors[i] * (FACTOR * NEXT),)
    else:
        up, factors = (
            _outputs(z, scales_ptr, bias_ptr, own_at, FACTOR, ASM),
            load_floats(input_scales_ptr, at, ASM),
        )
        for i in tl.static_range(8):
            found = found + (up[i] * factors[i] * NEXT,)
    return found


@triton.jit
def dense_gate_kernel(
    gate_ptr, up_ptr, gate_scales_ptr, up_scales_ptr, gate_bias_ptr, up_bias_ptr, input_scales_ptr, experts_ptr, y_ptr,
    tokens, columns, gate_row, up_row, y_row, SCALES: tl.constexpr, ACTIVATION: tl.constexpr,
    OTHER: tl.constexpr, PAIR: tl.constexpr, PERMUTE: tl.constexpr, VECTORS: tl.constexpr, PAIRED: tl.constexpr,
    FACTOR: tl.constexpr, WARPS: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of a token a warp; grid (tokens / WARPS, blocks). `columns` and strides in vectors. SCALES: of the sums.
    OTHER: assembly.

    `experts`, if given: one per token; scales and biases are then of all experts, [experts, columns].
    """
    lane, own_warp = lane_and_warp(WARPS)
    token, block = tl.program_id(0).to(tl.int64) * WARPS + own_warp, tl.program_id(1)
    read = tl.minimum(token, tokens - 1)
    apart = apart_of(block, columns, PAIRED)
    start, first, held = block * (32 * VECTORS), before(lane, G), after(lane, apart, G)
    signs, own_row = signs_of(lane, PAIRED), 0
    if experts_ptr is not None:
        own_row = tl.load(experts_ptr + read).to(tl.int32) * columns
    NEXT: tl.constexpr = FACTOR * (2 if PAIR else 1)
    gate_pairs = load_block(gate_ptr, read * gate_row + start + first, apart, VECTORS, ASM)
    up_pairs = load_block(up_ptr, read * up_row + start + first, apart, VECTORS, ASM)
    gate_pairs, up_pairs, pairs = mixed_groups(gate_pairs, ASM), mixed_groups(up_pairs, ASM), ()
    for v in tl.static_range(VECTORS // 2):
        of_gate, of_up = two_vectors(gate_pairs, signs, v, ASM), two_vectors(up_pairs, signs, v, ASM)
        h = ()
        for half in tl.static_range(2):
            at = start + held + (64 * v + (4 << G[0]) * half)
            gate = _outputs(
                of_gate[8 * half : 8 * half + 8], gate_scales_ptr, gate_bias_ptr, own_row + at, FACTOR * SCALES[0], ASM
            )  # fmt: skip
            up = _scaled_up(
                of_up[8 * half : 8 * half + 8], up_scales_ptr, up_bias_ptr, input_scales_ptr, own_row + at, at,
                FACTOR * SCALES[1], NEXT, ASM,
            )  # fmt: skip
            for i in tl.static_range(8):
                h = h + (gate[i] * sigmoid(logit_of(gate[i], ACTIVATION), OTHER) * up[i],)
        pairs = pairs + pairs_of(h, tl.float16, ASM)
    pairs, signs = mixed_groups(pairs, ASM), signs[2:4] + signs[0:2]
    for v in tl.static_range(VECTORS // 2):
        y = two_vectors(pairs, signs, v, ASM, PAIR)
        for half in tl.static_range(2):
            at = token * y_row + start + first + 64 * v + apart * half
            words = packed_vector(y[8 * half : 8 * half + 8], tl.float16, ASM)
            if PERMUTE:
                store_permuted(y_ptr, at, words, token < tokens, ASM)
            else:
                store_vector(y_ptr, at, words, token < tokens, ASM)


def supports(gate: Product, up: Product, form: ActivationForm) -> bool:
    """Whether the products are for many tokens, with blocks of a supported size."""
    m, width = gate.values.shape[-2:]
    return (
        (m >= MIN_TOKENS or not form.permute)
        and gate.values.dtype == up.values.dtype == torch.float16
        and gate.source.splits == up.source.splits == 1
        and not form.int8
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
    experts: torch.Tensor | None = None,
) -> RotatedActivations:
    """As `rotated_gate`, but nothing is rounded before the activations are written."""
    m, f = gate.values.shape[-2:]
    found = form.empty(m, input_scales.device)
    rows = (gate.source.row_stride, up.source.row_stride, found.values.stride(0))
    blocks, warps, _ = warp.grid_of(m, f)
    launch(
        dense_gate_kernel,
        (warps, blocks, 1),  # CUDA allows 65535 along the second dimension, and experts have more slots
        (
            gate.values, up.values, gate.output_scales, up.output_scales, gate.bias, up.bias, input_scales, experts,
            found.values, m, f // 8, *(row // 8 for row in rows),
        ),
        interned(
            SCALES=(gate.source.scale, up.source.scale), ACTIVATION=activation, OTHER=ASSEMBLY, PAIR=form.pair,
            PERMUTE=form.permute, **warp.constants_of(f),
        ),
    )  # fmt: skip
    return found
