"""From one trellis matrix to the next, across the residual stream, in one launch: finish, add, normalize, rotate.

    x += output_scales * H product + bias;   y = weight * x / rms(x);   activations = H (input_scales * y)

A CTA has a whole token, since the norm needs all of it. x is rounded where `trellis/rotate.py` and `rms_norm.py` round it;
y, where it is rotated, is not: its division by rms(x) comes after the rotation, which therefore does not wait for the sum of
squares. Either end may be absent: a model's first norm follows no product, or one that is all of x (its embedding, in
codes), and y itself is returned where no matrix rotates it, or beside that for one that does not (a router).

After a product x is read before the previous launch has finished. So that launch must not have written it, and of those
between it and the one that has, one must trigger the next only after its own wait (the launch of RoPE or the gate, here).
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
    store_eight,
    sum_of_warps,
    sum_warp,
    tile_transform,
)
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.step.rotated import (
    ASSEMBLY,
    MAX_TILES,
    NUM_WARPS,
    Target,
    load_product,
    output_factors,
    outputs_of,
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
    reads_stream: bool  # False: the product is all that the stream is
    finish: TileTransform  # for the product; without one its order is that in which the stream is read
    source: Source | None
    target: Target | None  # None: y is stored unrotated


@triton.jit
def _store_row(pointer, index, values, WIDTH: tl.constexpr, NEXT: tl.constexpr):
    store_eight(pointer, index, values, index < WIDTH, index + NEXT < WIDTH, NEXT)


@triton.jit
def rotated_norm_kernel(
    product_ptr, output_scales_ptr, bias_ptr, x_ptr, weight_ptr, input_scales_ptr, y_ptr, scales_ptr, plain_ptr, eps,
    SHAPE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token; grid (1, tokens). x `[m, width]` becomes the sum."""
    FINISH: tl.constexpr = SHAPE.finish
    BEFORE: tl.constexpr = FINISH.order
    AFTER: tl.constexpr = FINISH.after
    NEXT: tl.constexpr = 1 << FINISH.after[2]
    COUNT: tl.constexpr = SHAPE.num_tiles
    WIDTH: tl.constexpr = SHAPE.width
    SOURCE: tl.constexpr = SHAPE.source
    TARGET: tl.constexpr = SHAPE.target
    AGAIN: tl.constexpr = FINISH if TARGET is None else TARGET.transform
    HELD: tl.constexpr = AGAIN.after
    CROSSES: tl.constexpr = SHAPE.crosses
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    lane, warp = lane_and_warp()
    index, first = index_of(lane, warp, AFTER), index_of(lane, warp, BEFORE)
    smem = allocate_smem(lane, ASM)
    row = x_ptr + token * WIDTH
    output_scales, bias, weight, input_scales, x, z = (), (), (), (), (), ()
    for t in tl.static_range(COUNT):  # what the previous launch has not written
        weight = weight + load_eight(weight_ptr, t * 4096 + index, WIDTH, NEXT)
        if product_ptr is not None:
            output_scales = output_scales + load_eight(output_scales_ptr, t * 4096 + index, WIDTH, NEXT)
        if product_ptr is not None and SHAPE.reads_stream:
            x = x + load_eight(row, t * 4096 + index, WIDTH, NEXT)
        if bias_ptr is not None:
            bias = bias + load_eight(bias_ptr, t * 4096 + index, WIDTH, NEXT)
        if input_scales_ptr is not None:
            input_scales = input_scales + load_eight(input_scales_ptr, t * 4096 + index, WIDTH, NEXT)
    output, inputs = (), ()
    if product_ptr is not None:
        output = output_factors(output_scales, SOURCE, FINISH)
    if input_scales_ptr is not None:
        for i in tl.static_range(8 * COUNT):
            factor = input_scales[i].to(tl.float32) * TARGET.transform.factor
            inputs = inputs + (weight[i].to(tl.float32) * factor,)
    signs, exchange = signs_of(lane, FINISH), exchange_in(smem, lane, warp, ASM)
    held = index_of(lane, warp, HELD)
    # divided, so that the compiler knows what the product is a multiple of: it loads and stores several values at once
    floats, integers = wait_with(output + inputs, signs + exchange + (first // 8, held // 4), PDL, False)
    output, inputs = floats[: len(output)], floats[len(output) :]
    signs, exchange, first = integers[0:3], integers[3:7], 8 * integers[7]
    held = 4 * integers[8]
    if product_ptr is None:
        for t in tl.static_range(COUNT):
            x = x + load_eight(row, t * 4096 + index, WIDTH, NEXT)
    else:
        for t in tl.static_range(COUNT):
            z = z + load_product(product_ptr, token, t * 4096 + first, WIDTH, SOURCE, FINISH)
        z = rotate(z, signs, exchange, 0, False, FINISH, CROSSES)
        delta, total = outputs_of(z, output, bias), ()
        for i in tl.static_range(8 * COUNT):
            added = delta[i].to(DTYPE)
            if SHAPE.reads_stream:
                added = (x[i].to(tl.float32) + added.to(tl.float32)).to(DTYPE)
            total = total + (added,)
        x = total
        for t in tl.static_range(COUNT):
            _store_row(row, t * 4096 + index, x[8 * t : 8 * t + 8], WIDTH, NEXT)
    squares = tl.zeros([512], tl.float32)
    for i in tl.static_range(8 * COUNT):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    sum_warp(squares, lane, warp, smem, ASM)
    if plain_ptr is not None:
        scale, y = tl.rsqrt(sum_of_warps(lane, smem, True, ASM) / WIDTH + eps), ()
        for i in tl.static_range(8 * COUNT):
            normalized = (x[i].to(tl.float32) * scale).to(DTYPE)
            y = y + ((weight[i].to(tl.float32) * normalized.to(tl.float32)).to(DTYPE),)
        for t in tl.static_range(COUNT):
            _store_row(plain_ptr + token * WIDTH, t * 4096 + index, y[8 * t : 8 * t + 8], WIDTH, NEXT)
    if y_ptr is not None:
        y = ()
        if AGAIN.masks != FINISH.masks:
            signs = signs_of(lane, AGAIN)
        for i in tl.static_range(8 * COUNT):
            y = y + (x[i].to(tl.float32) * inputs[i],)
        rotate_and_store(
            y, signs, exchange, lane, warp, held, smem, token, 0, y_ptr, scales_ptr, eps, 1, COUNT == 2,
            TARGET, CROSSES, WIDTH, ASM,
        )  # fmt: skip


def supports(width: int) -> bool:
    """Whether a CTA holds a token of this many values."""
    return width % 16 == 0 and width <= MAX_TILES * HADAMARD_TILE


def rotated_norm(
    x: Tensor, product: Product | None, weight: Tensor, eps: float, *, input_scales: Tensor | None = None,
    form: ActivationForm | None = None, plain: Tensor | None = None,
) -> RotatedActivations | Tensor:  # fmt: skip
    """RMSNorm of x [m, k] plus the finished product, in x's dtype; x, contiguous, becomes the sum.

    With `input_scales` and `form` of the matrices that read it, the result is rotated for them; `plain`, contiguous, then
    becomes what it is before.
    """
    m, k = x.shape
    found = form and form.empty(m, x.device)
    if found is None:
        plain = torch.empty_like(x) if plain is None else plain
    launch(
        rotated_norm_kernel,
        (1, m, 1),
        (
            product and product.values, product and product.output_scales, product and product.bias, x, weight,
            input_scales, found and found.values, found and found.scales, plain, eps,
        ),
        _constants(
            k, product and product.source, form, supports_pdl(x.device), product is None or not product.is_all
        ),
        smem_bytes=apart_smem_bytes(m, x.device),
    )  # fmt: skip
    if found is not None:
        return found
    assert plain is not None
    return plain


@cache
def _constants(
    width: int, source: Source | None, form: ActivationForm | None, pdl: bool, reads_stream: bool
) -> dict[str, object]:
    finish = tile_transform(NATURAL, width & -width)
    shape = NormShape(
        width=width, num_tiles=-(-width // HADAMARD_TILE), crosses=tiles_of_block(width) > 1, finish=finish,
        reads_stream=reads_stream, source=source, target=form and target_of(form, finish.after, width),
    )  # fmt: skip
    return {
        "SHAPE": shape,
        "ASM": ASSEMBLY,
        "PDL": pdl,
        "num_warps": NUM_WARPS,
        "num_stages": 1,
        **pdl_option(pdl),
    }
