"""V of a trellis as float16, exactly, in the rotated basis: for many tokens, which cuBLAS multiplies.

Also the fallback for cases without a kernel: without inline PTX, plain Triton decodes V (`portable.py`).
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
from requant_kernels.trellis.code_ptx import decode_ptx, load_codes_ptx
from requant_kernels.trellis.gemv_kernel import load_registers
from requant_kernels.trellis.layout import TILE, TrellisLayout, k64_per_unit
from requant_kernels.trellis.operands import ActivationForm, RotatedActivations
from requant_kernels.trellis.portable import MAX_TOKENS, portable_dequantize, portable_gemv
from requant_kernels.trellis.rotate import rotate_input, rotate_output


@triton.jit
def trellis_dequantize_kernel(
    codes_ptr, out_ptr, units, columns, DECODE: tl.constexpr, LOAD: tl.constexpr, COUNT: tl.constexpr,
    V: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """out int32 `[rows, columns]` = V, two float16 each; grid: (tiles of 16 rows, units of J x 64 columns of V), one warp.

    COUNT words per lane and unit, loaded V at a time. A lane decodes 16 columns of two rows; the warp exchanges them, so
    that adjacent lanes write adjacent words.
    """
    lane = tl.arange(0, 32)[None, :]
    types: tl.constexpr = (tl.int32,) * 16
    tile, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words = load_registers(
        (codes_ptr + (tile * units + unit) * (32 * COUNT) + lane * V).to(tl.int64), LOAD, COUNT
    )
    row, at = tile * 16 + tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    for k64 in tl.static_range(J):
        pairs = tl.inline_asm_elementwise(
            DECODE[k64].text, DECODE[k64].constraints, words + ((lane + 28) % 32,), dtype=types, is_pure=False, pack=1
        )  # fmt: skip
        for length in tl.static_range(4):  # the register index: its bits become dimensions, the highest first
            joined = ()
            for i in tl.static_range(8 >> length):
                joined = joined + (tl.join(pairs[i], pairs[i + (8 >> length)]),)
            pairs = joined
        block = tl.reshape(pairs[0], [8, 4, 2, 8])  # lane / 4, lane % 4, row, column
        block = tl.reshape(tl.permute(block, (0, 2, 1, 3)), [16, 32])
        column = (unit * J + k64) * 32 + at
        tl.store(out_ptr + row * columns + column, block, mask=column < columns)


@cache
def dequantize_constants(code: str, quad_bits: int, vector: int) -> dict[str, object]:
    """The kernel's compile-time constants, as one mapping for `launch`."""
    k64_count = k64_per_unit(quad_bits)
    words = quad_bits * k64_count // 4
    return {
        "DECODE": tuple(decode_ptx(code, quad_bits, k64) for k64 in range(k64_count)),
        "LOAD": (load_codes_ptx(words, vector, 0),), "COUNT": words, "V": vector, "J": k64_count, "num_warps": 1,
    }  # fmt: skip


def supports(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Any number of tokens on any GPU."""
    return True


def matmul(
    x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: None = None, *, asm: bool | None = None
) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: by cuBLAS, or, up to 16 tokens without PTX, by plain Triton. `asm` None: inline
    PTX if the device has it."""
    asm = supports_ptx(x.device) if asm is None else asm
    if x.shape[0] > MAX_TOKENS:
        rotated_product = product(x, layout, asm=asm)
    else:
        rotated_product = portable_gemv(rotate_input(x, layout, padded_columns(layout), asm=asm), layout)
    return rotate_output(rotated_product, x, layout, bias, asm=asm)


def activation_form(layout: TrellisLayout, num_tokens: int = 1) -> ActivationForm | None:
    """What `product` reads, for any number of tokens; None without PTX, which other operations need to rotate."""
    return (
        ActivationForm(columns=padded_columns(layout)) if supports_ptx(layout.packed_codes.device) else None
    )


def product(
    x: Tensor | RotatedActivations, layout: TrellisLayout, config: None = None, *, asm: bool = True
) -> Tensor:
    """V H (input_scales * x), float16 [m, rows], of x [m, k] or of x already rotated: by cuBLAS."""
    rotated = (
        x.values
        if isinstance(x, RotatedActivations)
        else rotate_input(x, layout, padded_columns(layout), asm=asm)
    )
    return torch.nn.functional.linear(rotated, dequantize(layout, asm=asm))


def padded_columns(layout: TrellisLayout) -> int:
    """The columns of V: a multiple of 16."""
    return -(-layout.k // TILE) * TILE


def dequantize(layout: TrellisLayout, *, asm: bool) -> Tensor:
    """V float16 [r, c], in the rotated basis; r and c are multiples of 16."""
    tiles, units, _, _, vector = layout.packed_codes.shape
    columns = padded_columns(layout)
    out = torch.empty(tiles * TILE, columns, dtype=torch.float16, device=layout.packed_codes.device)
    if not asm:
        portable_dequantize(layout, out)
        return out
    launch(
        trellis_dequantize_kernel,
        (tiles, units, 1),
        (layout.packed_codes, out.view(torch.int32), units, columns // 2),
        dequantize_constants(layout.code, layout.quad_bits, vector),
    )
    return out
