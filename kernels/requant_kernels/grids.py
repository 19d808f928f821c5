"""A block of a grid of 2 to 4 bits times one token, without making weights of the codes.

The usual way costs a HFMA2 for two weights: `(code - zero) * unit`. Here the masked word itself is the left operand of
the tensor cores. A code at bit s of a 16-bit half is the fp16 subnormal `code * 2^(s-24)`, which tensor cores multiply
exactly; the accumulator is fp32, so nothing is lost however small the products are. What is left to do per group:

    sum (code - zero) x = sum_s 2^(24-s) [ sum_{planes at bit s} code 2^(s-24) x  -  zero sum_{planes at bit s} 2^(s-24) x ]

- The factor 2^-s. One token leaves seven of the eight columns of a tensor core empty. Planes at the i-th bit meet the
  activations in column i alone, zeros elsewhere: one accumulator holds the sums of all bits apart, and they are joined
  once, at the end of the launch. Both planes of a pair stand at one bit (`words.py`).
- The subtrahend is one more product, of a constant left operand, made once for all tiles of a program; it is what the
  accumulator of the group begins with.
- bf16 products of subnormals vanish: there a field rides on the exponent of 128, `128 + code 2^s`, and 128 goes into the
  subtrahend. 128 costs an fp32 sum seven of its 24 bits, and bf16 activations have 8.

For more tokens every bit would need an accumulator of its own; that was slower than making weights (measured).
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

import torch
import triton
import triton.language as tl

from requant_kernels.blocks import halves, left_operand, right_operand, rows_like_products
from requant_kernels.layouts import GridLayout, Layout
from requant_kernels.words import constraints, field_asm, field_shifts, flat_places


@triton.constexpr_function
def distinct(shifts):
    """The bits at which the fields of a block stand, each once, rising."""
    return sorted({int(s) for s in shifts})


@triton.constexpr_function
def chain_of(shifts, slab):
    """Which of the distinct bits the two planes of a slab have."""
    return sorted({int(s) for s in shifts}).index(int(shifts[slab]))


@triton.jit
def spread_powers(SHIFTS: tl.constexpr, N: tl.constexpr, SIGN: tl.constexpr):
    """2^(SIGN s) of the bit s that a column stands for, `[N]`; 0 for the columns that stand for none."""
    column = tl.arange(0, N)
    powers = tl.zeros([N], tl.float32)
    for c in tl.static_range(len(distinct(SHIFTS))):
        powers = tl.where(column == c, 2.0 ** (SIGN * distinct(SHIFTS)[c]), powers)
    return powers


@triton.jit
def fields(words, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, FIELDS: tl.constexpr, BFLOAT: tl.constexpr):
    """Sixteen planes `[lane, warp, tile, (kh rh)]` of pairs of fields (`words.field_asm`, or the same in plain Triton)."""
    planes = ()
    if ASM is None:
        for plane in tl.static_range(16):
            value = tl.zeros_like(words[0])
            for i in tl.static_range(3 * plane, 3 * plane + 3):
                if FIELDS[3 * i + 2] != 0:
                    value |= (words[FIELDS[3 * i]] >> FIELDS[3 * i + 1]) & FIELDS[3 * i + 2]
            planes = planes + ((value | 0x43004300) if BFLOAT else value,)
    else:
        for half in tl.static_range(2):
            planes = planes + tl.inline_asm_elementwise(
                ASM[half], CONSTRAINTS, words, dtype=(tl.int32,) * 8, is_pure=True, pack=1
            )
    return planes


@triton.jit
def _tiles_alike(product, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """`[warp, 16, N]` -> `[warp, 16 R, N]`."""
    wide = tl.broadcast_to(tl.reshape(product, [W, 1, 16, N]), [W, R, 16, N])
    return tl.reshape(wide, [W, 16 * R, N])


@triton.jit
def multiply_fields(acc, loaded, tables, tokens, like_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
                    FIELDS: tl.constexpr, SHIFTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                    ZEROS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """acc `[warp, rows, N]` += block @ token, spread over the columns, in steps of 2^-24 (fp16) or 1 (bf16)."""
    dtype = like_ptr.dtype.element_ty
    GROUPS: tl.constexpr = 256 // GROUP if GROUP > 0 and GROUP < 256 else 1
    SLABS: tl.constexpr = 8 // GROUPS
    FLOOR: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 0.0
    planes = fields(loaded[:BITS], ASM, CONSTRAINTS, FIELDS, dtype == tl.bfloat16)
    minus_one = tl.full([W, 16, 32], 0x8001 if dtype == tl.float16 else 0xBF80, tl.uint16).to(
        dtype, bitcast=True
    )
    for group in tl.static_range(GROUPS):
        zero = 1 << (BITS - 1)
        if ZEROS:
            zero = tables[0] if GROUP == 0 else loaded[BITS + GROUPS + group]
            zero = rows_like_products(zero.to(tl.float32), W, R, N)
        part = tl.zeros([W, 16, N], tl.float32)
        for slab in tl.static_range(group * SLABS, (group + 1) * SLABS):
            part = tl.dot(minus_one, right_operand(tokens[slab], dtype, W, N), part)
        # a field is worth 2^s codes, and in bf16 128 more
        part = _tiles_alike(part, W, R, N) * (zero * spread_powers(SHIFTS, N, 1)[None, None, :] + FLOOR)
        for slab in tl.static_range(group * SLABS, (group + 1) * SLABS):
            even, odd = halves(planes[2 * slab], dtype), halves(planes[2 * slab + 1], dtype)
            part = tl.dot(left_operand(even, odd, W, R), right_operand(tokens[slab], dtype, W, N), part)
        if GROUP > 0:
            part *= rows_like_products(loaded[BITS + group].to(tl.float32), W, R, N)
        acc += part
    return acc


NO_FIELDS: dict[str, object] = {"FIELDS": None, "SHIFTS": None}


def field_constants(layout: Layout, dtype: torch.dtype, asm: bool) -> dict[str, object]:
    """What the decode kernel takes instead of `blocks.operands`' constants, to multiply the fields of a grid."""
    name, bits = "fp16" if dtype == torch.float16 else "bf16", layout.bits
    return {
        "ASM": tuple(field_asm(bits, name, half) for half in range(2)) if asm else None,
        "CONSTRAINTS": constraints(bits) if asm else None,
        "POSITIONS": None,
        "FIELDS": None if asm else flat_places(bits, name),
        "SHIFTS": field_shifts(bits, name),
        "UNIT": 2.0**-24 if name == "fp16" else 1.0,
    }


def has_fields(layout: Layout) -> bool:
    """Whether there is such a kernel for a layout."""
    return isinstance(layout, GridLayout) and layout.bits <= 4
