"""Hadamard transform in plain Triton, log2(S) butterfly stages: without PTX, and for blocks of less than 256 values.

Blocks of one value are not mixed: the kernel then only scales, adds and converts. `pair` still needs sums and differences of
neighbours, which is one stage without its factor.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE

MAX_INT = tl.constexpr(32512.0)  # 127 * 256


@triton.jit
def _store_int8(y, at, token, tile, tiles, out_width, y_ptr, scales_ptr, stride_y):
    """Store 16-bit fixed point, high and low bytes separately, with the scale and the sum of the tile's integers, and of its
    high bytes alone."""
    largest = tl.max(tl.abs(y))
    scale = tl.where(largest > 0, largest * (1.0 / MAX_INT), 1.0)
    # adding 1.5 * 2^23 rounds to the nearest integer, and leaves it in the low bits
    q = (y * (1.0 / scale) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    high = (q + 128) >> 8
    inside = at < out_width
    address = y_ptr + 2 * token * stride_y + at
    tl.store(address, high.to(tl.int8), mask=inside)
    tl.store(address + stride_y, (q - high * 256).to(tl.int8), mask=inside)
    own = scales_ptr + (token * tiles + tile) * 4
    tl.store(own, scale)
    tl.store(own + 1, tl.sum(q).to(tl.float32))
    tl.store(own + 2, scale * 256)
    tl.store(own + 3, tl.sum(high).to(tl.float32))


@triton.jit
def hadamard_butterfly_kernel(
    x_ptr, input_scales_ptr, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, scales_ptr, in_width, out_width, stride_x,
    stride_y, SIZE: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, PAIR: tl.constexpr, PDL: tl.constexpr,
    SPLITS: tl.constexpr = 1, PERMUTE: tl.constexpr = False,
):  # fmt: skip
    """SIZE values of one token, in blocks of 2^LOG; grid (tokens, CTAs of SIZE values); int8 if scales are given.

    x is the sum of SPLITS consecutive matrices. PERMUTE: y in the order of `trellis/gemm_sm90.py`.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < out_width
    wait_for_previous_launch(PDL, False)
    x = tl.load(x_ptr + token * stride_x + at, mask=at < in_width, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        own = x_ptr + (token + split * tl.num_programs(0)) * stride_x
        x += tl.load(own + at, mask=at < in_width, other=0.0).to(tl.float32)
    if input_scales_ptr is not None:
        x *= tl.load(input_scales_ptr + at, mask=at < in_width, other=0.0).to(tl.float32)
    for stage in tl.static_range(1 if PAIR else 0, LOG):
        pair = tl.permute(tl.reshape(x, [SIZE >> (stage + 1), 2, 1 << stage]), (0, 2, 1))
        left, right = tl.split(pair)
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), [SIZE])
    x *= FACTOR
    if scales_ptr is not None:
        _store_int8(
            x, at, token, tl.program_id(1), tl.num_programs(1), out_width, y_ptr, scales_ptr, stride_y
        )
    else:
        if output_scales_ptr is not None:
            x *= tl.load(output_scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if addend_ptr is not None:
            x += tl.load(addend_ptr + token * out_width + at, mask=inside, other=0.0)
        if PERMUTE:
            at = (at & ~63) | (at >> 1 & 7) << 3 | (at >> 4 & 3) << 1 | (at & 1)
        tl.store(y_ptr + token * stride_y + at, x.to(y_ptr.dtype.element_ty), mask=inside)


def transform_butterfly(
    x: Tensor, y: Tensor, scales: Tensor | None, *, block_size: int, columns: int, in_width: int, out_width: int,
    pdl: bool, input_scales: Tensor | None = None, output_scales: Tensor | None = None, bias: Tensor | None = None,
    addend: Tensor | None = None, pair: bool = False, permute: bool = False, factor: float = 1.0,
) -> None:  # fmt: skip
    """Write y, `columns` values of every token of x [m, in_width] or [splits, m, in_width]. See `hadamard_transform`."""
    size = HADAMARD_TILE if scales is not None or block_size == 1 else block_size
    if block_size == 1:
        stages = {"LOG": int(pair), "FACTOR": factor, "PAIR": False}
    else:
        factor *= block_size**-0.5 * (2 if pair else 1)
        stages = {"LOG": block_size.bit_length() - 1, "FACTOR": factor, "PAIR": pair}
    launch(
        hadamard_butterfly_kernel,
        (x.shape[-2], triton.cdiv(columns, size), 1),
        (x, input_scales, output_scales, bias, addend, y, scales, in_width, out_width, x.stride(-2), y.stride(0)),
        interned(
            SIZE=size, **stages, PDL=pdl, SPLITS=x.shape[0] if x.dim() == 3 else 1, PERMUTE=permute,
            num_warps=min(16, max(1, size // 512)), **pdl_option(pdl),
        ),
    )  # fmt: skip
