"""V of a trellis as float16, exactly, in the rotated basis: for many tokens, where cuBLAS multiplies.

Also the way for whatever has no kernel of its own: without inline PTX, V is decoded by plain Triton (`portable.py`).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_ptx
from requant_kernels.common.launch import launch
from requant_kernels.common.ptx import inline_ptx
from requant_kernels.trellis.code_ptx import decode_ptx, load_codes_ptx
from requant_kernels.trellis.gemv import load_registers
from requant_kernels.trellis.layout import TILE, TrellisLayout, k64_per_unit
from requant_kernels.trellis.portable import MAX_TOKENS, portable_dequantize, portable_gemv
from requant_kernels.trellis.rotate import rotate_input, rotate_output

# where the condition is not zero
STORE_16_BYTES = inline_ptx(
    "setp.ne.b32 p, $condition, 0; @p st.global.v4.b32 [$address], {$a, $b, $c, $d};",
    inputs={"address": "l", **dict.fromkeys("abcd", "r"), "condition": "r"}, registers={"pred": "p"},
)  # fmt: skip


@triton.jit
def trellis_dequantize_kernel(
    codes_ptr, out_ptr, units, columns, DECODE: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
    COUNT: tl.constexpr, V: tl.constexpr, J: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out float16 `[rows, columns]` = V; grid: (tiles of 16 rows, W units of J x 64 columns), a unit a warp.

    COUNT words of a lane and unit, loaded V at a time.
    """
    lane, warp = tl.arange(0, 32)[None, :], tl.arange(0, W)[:, None]
    previous_lane = (lane + 28) % 32 + warp * 0
    types: tl.constexpr = (tl.int32,) * 16
    tile, unit = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + warp
    at = (tile * units + tl.minimum(unit, units - 1)) * (32 * COUNT) + lane * V
    words = load_registers((codes_ptr + at).to(tl.int64), LOAD, COUNT)
    for k64 in tl.static_range(J):
        pairs = tl.inline_asm_elementwise(
            DECODE[k64].text, DECODE[k64].constraints, words + (previous_lane,), dtype=types, is_pure=False, pack=1
        )  # fmt: skip
        column = (unit * J + k64) * 64 + lane % 4 * 16
        inside = (column < columns).to(tl.int32)
        for i in tl.static_range(4):
            row = tile * 16 + lane // 4 * 2 + i // 2
            address = (out_ptr + row * columns + column + i % 2 * 8).to(tl.int64)
            tl.inline_asm_elementwise(
                STORE.text, STORE.constraints, (address,) + pairs[4 * i : 4 * i + 4] + (inside,), dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


@cache
def dequantize_constants(code: str, quad_bits: int, vector: int, *, num_warps: int) -> dict[str, object]:
    """What the kernel is compiled for, one mapping for `launch`."""
    k64_count = k64_per_unit(quad_bits)
    words = quad_bits * k64_count // 4
    return {
        "DECODE": tuple(decode_ptx(code, quad_bits, k64) for k64 in range(k64_count)),
        "LOAD": (load_codes_ptx(words, vector, 0),), "STORE": STORE_16_BYTES, "COUNT": words, "V": vector,
        "J": k64_count, "W": num_warps, "num_warps": num_warps,
    }  # fmt: skip


def supports(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Any number of tokens on any GPU."""
    return True


def matmul(
    x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: None = None, *, asm: bool | None = None
) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: by cuBLAS, or without PTX, up to 16 tokens, by plain Triton. `asm` None: inline
    PTX where the device has it."""
    asm = supports_ptx(x.device) if asm is None else asm
    rotated = rotate_input(x, layout, -(-layout.k // TILE) * TILE, asm=asm)
    if x.shape[0] > MAX_TOKENS:
        product = torch.nn.functional.linear(rotated, dequantize(layout, asm=asm))
    else:
        product = portable_gemv(rotated, layout)
    return rotate_output(product, x, layout, bias, asm=asm)


def dequantize(layout: TrellisLayout, *, asm: bool) -> Tensor:
    """V float16 [r, c], in the rotated basis; r and c are multiples of 16."""
    tiles, units, _, _, vector = layout.packed_codes.shape
    columns = -(-layout.k // TILE) * TILE
    out = torch.empty(tiles * TILE, columns, dtype=torch.float16, device=layout.packed_codes.device)
    if not asm:
        portable_dequantize(layout, out)
        return out
    constants = dequantize_constants(layout.code, layout.quad_bits, vector, num_warps=4)
    grid = (tiles, triton.cdiv(units, 4), 1)
    launch(trellis_dequantize_kernel, grid, (layout.packed_codes, out, units, columns), constants)
    return out
