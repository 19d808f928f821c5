"""From gate and up to down in one launch: finish both products, act(gate) * up, rotate.

    h = act(output_scales * H gate + bias) * (output_scales * H up + bias);   activations = H (input_scales * h)

Gate, up and down have blocks of the same size, since the outputs of the first two are the inputs of the third. So a CTA has
a tile of a token, or a block of two tiles, and needs no other values. Rounding as in `gated.py`.
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
from requant_kernels.common.pdl import wait_for_previous_launch
from requant_kernels.hadamard.registers import (
    ALLOCATE,
    NATURAL,
    TileTransform,
    allocate_smem,
    index_of,
    lane_and_warp,
    load_eight,
    tile_transform,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.step import dense_gate
from requant_kernels.step.gated import activated
from requant_kernels.step.rotated import (
    MAX_TILES,
    NUM_WARPS,
    Target,
    finished,
    load_product,
    rotate,
    rotate_and_store,
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
    SHAPE: tl.constexpr, ALLOCATE: tl.constexpr, DTYPE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`num_tiles` tiles of one token; grid (tiles / num_tiles, tokens)."""
    FINISH: tl.constexpr = SHAPE.finish
    BEFORE: tl.constexpr = FINISH.order
    AFTER: tl.constexpr = FINISH.after
    NEXT: tl.constexpr = 1 << FINISH.after[2]
    COUNT: tl.constexpr = SHAPE.num_tiles
    WIDTH: tl.constexpr = SHAPE.width
    TARGET: tl.constexpr = SHAPE.target
    HELD: tl.constexpr = TARGET.transform.after
    GATE: tl.constexpr = SHAPE.gate
    UP: tl.constexpr = SHAPE.up
    CROSSES: tl.constexpr = SHAPE.crosses
    token, tile = tl.program_id(1).to(tl.int64), tl.program_id(0) * COUNT
    lane, warp = lane_and_warp()
    index = tile * 4096 + index_of(lane, warp, AFTER)
    smem = allocate_smem(lane, ALLOCATE)
    gate_scales, up_scales, gate_bias, up_bias, input_scales = (), (), (), (), ()
    for t in tl.static_range(COUNT):  # what no previous launch has written
        gate_scales = gate_scales + load_eight(gate_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        up_scales = up_scales + load_eight(up_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        input_scales = input_scales + load_eight(input_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        if gate_bias_ptr is not None:
            gate_bias = gate_bias + load_eight(gate_bias_ptr, t * 4096 + index, WIDTH, NEXT)
        if up_bias_ptr is not None:
            up_bias = up_bias + load_eight(up_bias_ptr, t * 4096 + index, WIDTH, NEXT)
    wait_for_previous_launch(PDL, False)
    gate, up = (), ()
    for t in tl.static_range(COUNT):
        first = (tile + t) * 4096 + index_of(lane, warp, BEFORE)
        gate = gate + load_product(gate_ptr, token, first, WIDTH, GATE, FINISH)
        up = up + load_product(up_ptr, token, first, WIDTH, UP, FINISH)
    if COUNT == 1:  # a tile of each: transform both at once
        both = rotate(gate + up, lane, smem, 0, False, FINISH, False)
        gate, up = both[0:8], both[8:16]
    else:
        gate = rotate(gate, lane, smem, 0, False, FINISH, CROSSES)
        up = rotate(up, lane, smem, 0, True, FINISH, CROSSES)
    y = ()
    for i in tl.static_range(8 * COUNT):
        g = finished(gate[i], gate_scales[i], None if gate_bias_ptr is None else gate_bias[i], DTYPE)
        u = finished(up[i], up_scales[i], None if up_bias_ptr is None else up_bias[i], DTYPE)
        y = y + (activated(g, ACTIVATION) * u.to(tl.float32),)
    h = ()
    for i in tl.static_range(8 * COUNT):
        h = h + (y[i].to(DTYPE),)
    held = index_of(lane, warp, HELD)
    rotate_and_store(
        h, input_scales, lane, held, smem, token, tile, y_ptr, scales_ptr, 0, True, TARGET, CROSSES
    )


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
) -> RotatedActivations:
    """`activation` of the finished gate times the finished up, rounded to `dtype`, rotated for the matrix that reads it."""
    if dense_gate.supports(gate, up, form):
        return dense_gate.dense_gate(gate, up, activation, dtype, input_scales=input_scales, form=form)
    m, f = gate.values.shape[-2:]
    found, device = form.empty(m, input_scales.device), input_scales.device
    ctas = -(-f // (tiles_of_block(f) * HADAMARD_TILE))
    launch(
        rotated_gate_kernel,
        (ctas, m, 1),
        (
            gate.values, up.values, gate.output_scales, up.output_scales, gate.bias, up.bias, input_scales, found.values,
            found.scales,
        ),
        _constants(f, gate.source, up.source, form, dtype, activation, supports_pdl(device)),
        smem_bytes=apart_smem_bytes(ctas * m, device),
    )  # fmt: skip
    return found


@cache
def _constants(
    width: int, gate: Source, up: Source, form: ActivationForm, dtype: torch.dtype, activation: str, pdl: bool
) -> dict[str, object]:
    options: dict[str, object] = {"launch_pdl": True} if pdl else {}
    finish, tiles = tile_transform(NATURAL, width & -width), tiles_of_block(width)
    shape = GateShape(
        width=width, num_tiles=tiles, crosses=tiles > 1, finish=finish, gate=gate, up=up,
        target=target_of(form, finish.after, width),
    )  # fmt: skip
    return {
        "SHAPE": shape, "ALLOCATE": ALLOCATE, "DTYPE": TYPES[dtype], "ACTIVATION": activation, "PDL": pdl,
        "num_warps": NUM_WARPS, "num_stages": 1, **options,
    }  # fmt: skip
