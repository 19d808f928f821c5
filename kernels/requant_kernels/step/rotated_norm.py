"""From one trellis matrix to the next, across the residual stream, in one launch: finish, add, normalize, rotate.

    x += output_scales * H product + bias;   y = weight * x / rms(x);   activations = H (input_scales * y)

A CTA has a whole token, since the norm needs all of it. Every value is rounded where `trellis/rotate.py` and `rms_norm.py`
round it. Either end may be absent: a model's first norm follows no product, and after the last one y itself is returned.
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
    SUM_THREADS,
    TileTransform,
    allocate_smem,
    index_of,
    lane_and_warp,
    load_eight,
    store_eight,
    sum_threads,
    tile_transform,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
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
class NormShape:
    """What `rotated_norm_kernel` is compiled for."""

    width: int
    num_tiles: int  # per token
    crosses: bool  # a Hadamard block is two tiles
    finish: TileTransform  # for the product; without one its order is that in which the stream is read
    source: Source | None
    target: Target | None  # None: y is stored unrotated


@triton.jit
def _store_row(pointer, index, values, WIDTH: tl.constexpr, NEXT: tl.constexpr):
    store_eight(pointer, index, values, index < WIDTH, index + NEXT < WIDTH, NEXT)


@triton.jit
def rotated_norm_kernel(
    product_ptr, output_scales_ptr, bias_ptr, x_ptr, weight_ptr, input_scales_ptr, y_ptr, scales_ptr, eps,
    SHAPE: tl.constexpr, ALLOCATE: tl.constexpr, SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token; grid (1, tokens). x `[m, width]` becomes the sum."""
    FINISH: tl.constexpr = SHAPE.finish
    BEFORE: tl.constexpr = FINISH.order
    AFTER: tl.constexpr = FINISH.after
    NEXT: tl.constexpr = 1 << FINISH.after[2]
    COUNT: tl.constexpr = SHAPE.num_tiles
    WIDTH: tl.constexpr = SHAPE.width
    SOURCE: tl.constexpr = SHAPE.source
    CROSSES: tl.constexpr = SHAPE.crosses
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    lane, warp = lane_and_warp()
    index = index_of(lane, warp, AFTER)
    smem = allocate_smem(lane, ALLOCATE)
    output_scales, bias, weight, input_scales = (), (), (), ()
    for t in tl.static_range(COUNT):  # what no previous launch has written
        weight = weight + load_eight(weight_ptr, t * 4096 + index, WIDTH, NEXT)
        if product_ptr is not None:
            output_scales = output_scales + load_eight(output_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        if bias_ptr is not None:
            bias = bias + load_eight(bias_ptr, t * 4096 + index, WIDTH, NEXT)
        if input_scales_ptr is not None:
            input_scales = input_scales + load_eight(input_scales_ptr, t * 4096 + index, WIDTH, NEXT)
    wait_for_previous_launch(PDL, False)
    x, z = (), ()
    for t in tl.static_range(COUNT):
        if product_ptr is not None:
            first = t * 4096 + index_of(lane, warp, BEFORE)
            z = z + load_product(product_ptr, token, first, WIDTH, SOURCE, FINISH)
        x = x + load_eight(x_ptr + token * WIDTH, t * 4096 + index, WIDTH, NEXT)
    if product_ptr is not None:
        z = rotate(z, lane, smem, 0, False, FINISH, CROSSES)
        total = ()
        for i in tl.static_range(8 * COUNT):
            delta = finished(z[i], output_scales[i], None if bias_ptr is None else bias[i], DTYPE)
            total = total + ((x[i].to(tl.float32) + delta.to(tl.float32)).to(DTYPE),)
        x = total
        for t in tl.static_range(COUNT):
            _store_row(x_ptr + token * WIDTH, t * 4096 + index, x[8 * t : 8 * t + 8], WIDTH, NEXT)
    squares = tl.zeros([512], tl.float32)
    for i in tl.static_range(8 * COUNT):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    scale = tl.rsqrt(sum_threads(squares, lane, warp, smem, SUM) / WIDTH + eps)
    y = ()
    for i in tl.static_range(8 * COUNT):
        normalized = (x[i].to(tl.float32) * scale).to(DTYPE)
        y = y + ((weight[i].to(tl.float32) * normalized.to(tl.float32)).to(DTYPE),)
    if input_scales_ptr is None:
        for t in tl.static_range(COUNT):
            _store_row(y_ptr + token * WIDTH, t * 4096 + index, y[8 * t : 8 * t + 8], WIDTH, NEXT)
    else:
        TARGET: tl.constexpr = SHAPE.target
        HELD: tl.constexpr = TARGET.transform.after
        held = index_of(lane, warp, HELD)
        rotate_and_store(
            y, input_scales, lane, held, smem, token, 0, y_ptr, scales_ptr, 1, COUNT == 2, TARGET, CROSSES
        )


def supports(width: int) -> bool:
    """Whether a CTA holds a token of this many values."""
    return width % 16 == 0 and width <= MAX_TILES * HADAMARD_TILE


def rotated_norm(
    x: Tensor, product: Product | None, weight: Tensor, eps: float, *, input_scales: Tensor | None = None,
    form: ActivationForm | None = None,
) -> RotatedActivations | Tensor:  # fmt: skip
    """RMSNorm of x [m, k] plus the finished product, in x's dtype; x, contiguous, becomes the sum.

    With `input_scales` and `form` of the matrices that read it, the result is rotated for them.
    """
    m, k = x.shape
    found = torch.empty_like(x) if form is None else form.empty(m, x.device)
    y, scales = (found, None) if isinstance(found, Tensor) else (found.values, found.scales)
    launch(
        rotated_norm_kernel,
        (1, m, 1),
        (
            product and product.values, product and product.output_scales, product and product.bias, x, weight,
            input_scales, y, scales, eps,
        ),
        _constants(k, product and product.source, form, supports_pdl(x.device)),
        smem_bytes=apart_smem_bytes(m, x.device),
    )  # fmt: skip
    return found


@cache
def _constants(
    width: int, source: Source | None, form: ActivationForm | None, pdl: bool
) -> dict[str, object]:
    options: dict[str, object] = {"launch_pdl": True} if pdl else {}
    finish = tile_transform(NATURAL, width & -width)
    shape = NormShape(
        width=width, num_tiles=-(-width // HADAMARD_TILE), crosses=tiles_of_block(width) > 1, finish=finish,
        source=source, target=form and target_of(form, finish.after, width),
    )  # fmt: skip
    return {
        "SHAPE": shape,
        "ALLOCATE": ALLOCATE,
        "SUM": SUM_THREADS,
        "PDL": pdl,
        "num_warps": NUM_WARPS,
        "num_stages": 1,
        **options,
    }
