"""The trellis without PTX, in plain Triton: for the interpreter and AMD, and as the simplest description of the decoder.

Slow: every lane gathers two words per weight.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import unreported
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import TrellisLayout, k64_per_unit

MAX_TOKENS = 16


@triton.jit
def _bits_before(base, lane, end, V: tl.constexpr):
    """The 32 bits that end `end` bits after the start of a lane's words, uint32; missing bits are undefined."""
    word = (end - 1) // 32
    low = tl.load(base + (word // V * 32 + lane) * V + word % V).to(tl.uint32, bitcast=True)
    word = tl.maximum(word - 1, 0)
    high = tl.load(base + (word // V * 32 + lane) * V + word % V).to(tl.uint32, bitcast=True)
    shift = ((32 - end % 32) % 32).to(tl.uint32)
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def decode(
    codes_ptr, tile, row, k64, column, units, CODE: tl.constexpr, QUAD_BITS: tl.constexpr, J: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """Weights in float32 at rows below 16 of a row tile and columns below 64 of a k64; 128 times too large for byte-sum
    codes."""
    lane, index = row // 2 * 4 + column // 16, row % 2 * 16 + column % 16
    last = index | 1 if CODE.weights_per_hash == 2 else index
    end = last // 4 * QUAD_BITS + (last % 4 + 1) * QUAD_BITS // 4  # bits of the segment up to here
    base, segment = codes_ptr + (tile * units + k64 // J) * (8 * QUAD_BITS * J), k64 % J * (8 * QUAD_BITS)
    state = _bits_before(base, lane, segment + end, V)
    previous = _bits_before(base, (lane + 28) % 32, segment + 8 * QUAD_BITS + end * 0, V)
    own_bits = tl.minimum(end, 16).to(tl.uint32)
    state = ((state & ((1 << own_bits) - 1)) | (previous << own_bits)) & 0xFFFF
    h = state * CODE.multiplier + CODE.addend
    if not CODE.byte_sums:
        h = (h & 0x8FFF8FFF) ^ 0x3B603B60
        low, high = (h & 0xFFFF).to(tl.uint16), (h >> 16).to(tl.uint16)
        value = low.to(tl.float16, bitcast=True).to(tl.float32) + high.to(tl.float16, bitcast=True).to(
            tl.float32
        )
        return value.to(tl.float16).to(tl.float32)
    b0, b1 = (h & 0xFF).to(tl.int32), ((h >> 8) & 0xFF).to(tl.int32)
    b2, b3 = ((h >> 16) & 0xFF).to(tl.int32), (h >> 24).to(tl.int32)
    value = b0 + b1 + b2 + b3 - 510
    if CODE.weights_per_hash == 2:
        value = tl.where(index % 2 == 1, b0 - b1 - b2 + b3, value)
    return value.to(tl.float32)


@triton.jit
def _decode_k64(
    codes_ptr, tile, k64, units, CODE: tl.constexpr, QUAD_BITS: tl.constexpr, J: tl.constexpr, V: tl.constexpr
):
    """Weights in float32 `[16, 64]` of a whole k64, as in `decode`."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    return decode(codes_ptr, tile, row, k64, column, units, CODE, QUAD_BITS, J, V)


@triton.jit
def portable_gemv_kernel(
    x_ptr, codes_ptr, y_ptr, M, K, units, rows, stride_x, CODE: tl.constexpr, QUAD_BITS: tl.constexpr,
    J: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """y float32 `[M, rows]` = x float16 `[M, K]` @ V^T; grid: tiles of 16 rows."""
    tile = tl.program_id(0).to(tl.int64)
    column, token = tl.arange(0, 64)[:, None], tl.arange(0, N)[None, :]
    acc = tl.zeros([16, N], tl.float32)
    for k64 in range(tl.cdiv(K, 64)):
        weight = _decode_k64(codes_ptr, tile, k64, units, CODE, QUAD_BITS, J, V).to(tl.float16)
        at = k64 * 64 + column
        x = tl.load(x_ptr + token.to(tl.int64) * stride_x + at, mask=(token < M) & (at < K), other=0.0)
        acc = tl.dot(weight, x, acc)
    row = tile * 16 + tl.arange(0, 16)[:, None]
    tl.store(y_ptr + token.to(tl.int64) * rows + row, acc * CODE.scale, mask=token < M)


@triton.jit
def portable_dequantize_kernel(
    codes_ptr, out_ptr, units, columns, CODE: tl.constexpr, QUAD_BITS: tl.constexpr, J: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """out float16 `[rows, columns]` = V; grid: (tiles of 16 rows, k64)."""
    tile, k64 = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = _decode_k64(codes_ptr, tile, k64, units, CODE, QUAD_BITS, J, V) * CODE.scale
    row, column = tile * 16 + tl.arange(0, 16)[:, None], k64 * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + row * columns + column, value.to(tl.float16), mask=column < columns)


def constants(layout: TrellisLayout) -> dict[str, object]:
    """The compile-time constants of kernels that use this decoder."""
    return {
        "CODE": CODES[layout.code], "QUAD_BITS": layout.quad_bits, "J": k64_per_unit(layout.quad_bits),
        "V": layout.packed_codes.shape[-1],
    }  # fmt: skip


def portable_gemv(x: Tensor, layout: TrellisLayout) -> Tensor:
    """V times rotated activations: float32 [m, rows] of x float16 [m, columns], m at most MAX_TOKENS."""
    m, (tiles, units) = x.shape[0], layout.packed_codes.shape[:2]
    y = torch.empty(m, tiles * 16, dtype=torch.float32, device=x.device)
    with unreported():
        portable_gemv_kernel[(tiles,)](
            x, layout.packed_codes, y, m, x.shape[1], units, tiles * 16, x.stride(0), **constants(layout), N=MAX_TOKENS
        )  # fmt: skip
    return y


def portable_dequantize(layout: TrellisLayout, out: Tensor) -> None:
    """Write V to `out`, float16 [r, c]."""
    tiles, units = layout.packed_codes.shape[:2]
    columns = out.shape[1]
    with unreported():
        portable_dequantize_kernel[(tiles, triton.cdiv(columns, 64))](
            layout.packed_codes, out, units, columns, **constants(layout)
        )
