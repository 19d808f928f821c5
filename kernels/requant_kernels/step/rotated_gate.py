"""From gate and up to down in one launch: finish both products, act(gate) * up, rotate.

    h = act(output_scales * H gate + bias) * (output_scales * H up + bias);   activations = H (input_scales * h)

Gate, up and down have blocks of the same size, since the outputs of the first two are the inputs of the third. So a CTA has
a tile of a token, or a block of two tiles, and needs no other values. Rounding as in `gated.py`.

Of experts a token is a slot (`experts/gemv.py`), whose own expert has the scales.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.occupancy import apart_smem_bytes
from requant_kernels.common.pdl import pdl_option, wait_with
from requant_kernels.hadamard.registers import (
    NATURAL,
    TileTransform,
    allocate_smem,
    exchange_in,
    index_of,
    lane_and_warp,
    load_eight,
    signs_of,
    tile_transform,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.step import dense_gate
from requant_kernels.step.gated import logit_of
from requant_kernels.step.rotated import (
    ASSEMBLY,
    MAX_TILES,
    NUM_WARPS,
    Target,
    input_factors,
    load_product,
    output_factors,
    outputs_of,
    rotate,
    rotate_and_store,
    rounded,
    sigmoid,
    target_of,
    tiles_of_block,
)
from requant_kernels.trellis.operands import ActivationForm, Product, RotatedActivations, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class GateShape:
    """What `rotated_gate_kernel` is compiled for."""

    width: int
    num_tiles: int  # per CTA
    crosses: bool  # a Hadamard block is two tiles
    finish: TileTransform
    gate: Source
    up: Source
    target: Target


@triton.jit
def rotated_gate_kernel(
    gate_ptr, up_ptr, gate_scales_ptr, up_scales_ptr, gate_bias_ptr, up_bias_ptr, input_scales_ptr, y_ptr, scales_ptr,
    experts_ptr, SHAPE: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`num_tiles` tiles of one token; grid (tiles / num_tiles, tokens). `experts`, if given: one per token, chosen before
    the previous launch; scales and biases are then of all experts, `[experts, width]`."""
    FINISH: tl.constexpr = SHAPE.finish
    BEFORE: tl.constexpr = FINISH.order
    AFTER: tl.constexpr = FINISH.after
    NEXT: tl.constexpr = 1 << FINISH.after[2]
    COUNT: tl.constexpr = SHAPE.num_tiles
    WIDTH: tl.constexpr = SHAPE.width
    TARGET: tl.constexpr = SHAPE.target
    AGAIN: tl.constexpr = TARGET.transform
    HELD: tl.constexpr = AGAIN.after
    GATE: tl.constexpr = SHAPE.gate
    UP: tl.constexpr = SHAPE.up
    CROSSES: tl.constexpr = SHAPE.crosses
    token, tile = tl.program_id(1).to(tl.int64), tl.program_id(0) * COUNT
    lane, warp = lane_and_warp()
    index = tile * 4096 + index_of(lane, warp, AFTER)
    first = tile * 4096 + index_of(lane, warp, BEFORE)
    held = index_of(lane, warp, HELD)
    smem = allocate_smem(lane, ASM)
    if experts_ptr is not None:
        own = tl.load(experts_ptr + token).to(tl.int64) * WIDTH
        gate_scales_ptr += own
        up_scales_ptr += own
        if gate_bias_ptr is not None:
            gate_bias_ptr += own
        if up_bias_ptr is not None:
            up_bias_ptr += own
    gate_scales, up_scales, gate_bias, up_bias, input_scales = (), (), (), (), ()
    for t in tl.static_range(COUNT):  # what no previous launch has written
        gate_scales = gate_scales + load_eight(gate_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        up_scales = up_scales + load_eight(up_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        input_scales = input_scales + load_eight(input_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        if gate_bias_ptr is not None:
            gate_bias = gate_bias + load_eight(gate_bias_ptr, t * 4096 + index, WIDTH, NEXT)
        if up_bias_ptr is not None:
            up_bias = up_bias + load_eight(up_bias_ptr, t * 4096 + index, WIDTH, NEXT)
    signs, exchange = signs_of(lane, FINISH), exchange_in(smem, lane, warp, ASM)
    # divided, so that the compiler knows what the product is a multiple of: it loads and stores several values at once
    floats, integers = wait_with(
        output_factors(gate_scales, GATE, FINISH) + output_factors(up_scales, UP, FINISH)
        + input_factors(input_scales, TARGET), signs + exchange + (first // 8, held // 4), PDL, False,
    )  # fmt: skip
    gate_factors, up_factors = floats[: 8 * COUNT], floats[8 * COUNT : 16 * COUNT]
    factors = floats[16 * COUNT :]
    signs, exchange, first = integers[0:3], integers[3:7], 8 * integers[7]
    held = 4 * integers[8]
    gate, up = (), ()
    for t in tl.static_range(COUNT):
        gate = gate + load_product(gate_ptr, token, t * 4096 + first, WIDTH, GATE, FINISH)
        up = up + load_product(up_ptr, token, t * 4096 + first, WIDTH, UP, FINISH)
    if COUNT == 1:  # a tile of each: transform both at once
        both = rotate(gate + up, signs, exchange, 0, False, FINISH, False)
        gate, up = both[0:8], both[8:16]
    else:
        gate = rotate(gate, signs, exchange, 0, False, FINISH, CROSSES)
        up = rotate(up, signs, exchange, 0, True, FINISH, CROSSES)
    gate = rounded(outputs_of(gate, gate_factors, gate_bias), DTYPE, ASM)
    up = rounded(outputs_of(up, up_factors, up_bias), DTYPE, ASM)
    y = ()
    for i in tl.static_range(8 * COUNT):
        y = y + (gate[i] * sigmoid(logit_of(gate[i], ACTIVATION), ASM),)
    y, h = rounded(y, DTYPE, ASM), ()
    for i in tl.static_range(8 * COUNT):
        h = h + (y[i] * up[i],)
    y, h = rounded(h, DTYPE, ASM), ()
    for i in tl.static_range(8 * COUNT):
        h = h + (y[i] * factors[i],)
    if AGAIN.masks != FINISH.masks:
        signs = signs_of(lane, AGAIN)
    rotate_and_store(
        h, signs, exchange, lane, warp, held, smem, token, tile, y_ptr, scales_ptr, None, 0, True, TARGET,
        CROSSES, WIDTH, ASM,
    )  # fmt: skip


def supports(width: int) -> bool:
    """Whether a CTA holds a Hadamard block of this many values."""
    return width % 16 == 0 and tiles_of_block(width) <= MAX_TILES


TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def rotated_gate(
    gate: Product,
    up: Product,
    activation: str,
    dtype: torch.dtype,
    *,
    input_scales: Tensor,
    form: ActivationForm,
    experts: Tensor | None = None,
) -> RotatedActivations:
    """`activation` of the finished gate times the finished up, rounded to `dtype`, rotated for the matrix that reads it.

    `experts`: int, of each row of the products, whose scales are then those of all experts, [experts, n], and their biases.
    """
    if dense_gate.supports(gate, up, form):
        return dense_gate.dense_gate(
            gate, up, activation, input_scales=input_scales, form=form, experts=experts
        )
    m, f = gate.values.shape[-2:]
    found, device = form.empty(m, input_scales.device), input_scales.device
    ctas = -(-f // (tiles_of_block(f) * HADAMARD_TILE))
    launch(
        rotated_gate_kernel,
        (ctas, m, 1),
        (
            gate.values, up.values, gate.output_scales, up.output_scales, gate.bias, up.bias, input_scales, found.values,
            found.scales, experts,
        ),
        _constants(f, gate.source, up.source, form, dtype, activation, supports_pdl(device)),
        smem_bytes=apart_smem_bytes(ctas * m, device),
    )  # fmt: skip
    return found


@cache
def _constants(
    width: int, gate: Source, up: Source, form: ActivationForm, dtype: torch.dtype, activation: str, pdl: bool
) -> dict[str, object]:
    finish, tiles = tile_transform(NATURAL, width & -width), tiles_of_block(width)
    shape = GateShape(
        width=width, num_tiles=tiles, crosses=tiles > 1, finish=finish, gate=gate, up=up,
        target=target_of(form, finish.after, width),
    )  # fmt: skip
    return {
        "SHAPE": shape, "ASM": ASSEMBLY, "DTYPE": TYPES[dtype], "ACTIVATION": activation, "PDL": pdl,
        "num_warps": NUM_WARPS, "num_stages": 1, **pdl_option(pdl),
    }  # fmt: skip
