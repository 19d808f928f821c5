"""The end of a CTA of `gemv_kernel.py`: the sums of its warps are added, in a fixed order, and stored.

Where an output is not rotated it is finished here: scaled, and given its bias and the product of the residuals.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

import triton
import triton.language as tl


@triton.jit
def _token_and_row(lane, index, cta, last_tile, SHAPE: tl.constexpr):
    """The position of result `index` of a lane."""
    if SHAPE.columns_per_token == 2:  # row of the lane, n8 tile, row tile
        half, n8, of = index % 2, index // 2 % SHAPE.n8_tiles, index // (2 * SHAPE.n8_tiles)
        token = lane % 4 + 4 * n8
    else:  # token of the lane's two, row of the lane, n8 tile, row tile
        half, n8, of = index // 2 % 2, index // 4 % SHAPE.n8_tiles, index // (4 * SHAPE.n8_tiles)
        token = lane % 4 * 2 + index % 2 + 8 * n8
    tile = tl.minimum(cta * SHAPE.row_tiles + of, last_tile).to(tl.int64)
    return token, tile * 16 + lane // 4 * 2 + half


@triton.jit
def _sum_warps_by_triton(y, SHAPE: tl.constexpr):
    """[32, results] summed over the warps, and the result index of each column."""
    RESULTS: tl.constexpr = SHAPE.results
    LOG: tl.constexpr = SHAPE.results.bit_length() - 1
    for level in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(RESULTS >> (level + 1)):
            joined = joined + (tl.join(y[2 * i], y[2 * i + 1]),)
        y = joined
    column, index = tl.arange(0, RESULTS)[None, :], tl.arange(0, RESULTS)[None, :] * 0
    for level in tl.static_range(LOG):  # bit i of the index is dimension i
        index = index | ((column >> (LOG - 1 - level) & 1) << level)
    return tl.reshape(tl.sum(y[0], 0), [32, RESULTS]), index


@triton.jit
def _store_scaled(
    y, token, row, inside, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, rows, stride_y
):  # fmt: skip
    """Store the results selected by `inside`, in y's type; y and addend `[M, rows]`."""
    inside = inside & (row < rows)
    y *= tl.load(output_scales_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row, mask=inside, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * stride_y + row
    if addend_ptr is not None:
        y += tl.load(addend_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_warps_and_store(
    y, lane, warp, cta, last_tile, sums_at, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, M, rows, stride_y,
    SHAPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y: a lane's results. Other operands as in `multiply_tiles`."""
    W: tl.constexpr = SHAPE.num_warps
    Y: tl.constexpr = SHAPE.results
    if PTX.sum_warps is None:
        total, index = _sum_warps_by_triton(y, SHAPE)
        token, row = _token_and_row(tl.arange(0, 32)[:, None], index, cta, last_tile, SHAPE)
        total *= SHAPE.output_scale
        if output_scales_ptr is None:
            tl.store(y_ptr + token.to(tl.int64) * stride_y + row, total, mask=token < M)
        else:
            _store_scaled(
                total, token, row, token < M, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, rows, stride_y
            )
    else:
        OUTPUTS: tl.constexpr = Y // W if Y > W else 1
        output_types: tl.constexpr = (tl.float32,) * OUTPUTS
        y = tl.inline_asm_elementwise(
            PTX.sum_warps.text, PTX.sum_warps.constraints, y + (warp + lane * 0, lane + warp * 0) + sums_at,
            dtype=output_types, is_pure=False, pack=1,
        )  # fmt: skip
        for i in tl.static_range(OUTPUTS):
            token, row = _token_and_row(lane, warp % Y + i * W, cta, last_tile, SHAPE)
            inside = (token < M) & (warp + i * W < Y)
            result = y[i] * SHAPE.output_scale
            if output_scales_ptr is None:
                address = (y_ptr + token.to(tl.int64) * stride_y + row).to(tl.int64)
                tl.inline_asm_elementwise(
                    PTX.store.text, PTX.store.constraints, (address, result, inside.to(tl.int32)), dtype=tl.int32,
                    is_pure=False, pack=1,
                )  # fmt: skip
            else:
                _store_scaled(
                    result, token, row, inside, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, rows, stride_y
                )
