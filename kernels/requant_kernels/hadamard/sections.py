"""Rotation by Hadamard blocks, 4096 values a program, for few tokens: y = after * H (before * x) + bias + added.

A block of S = 2^s values mixes the s bits of the index one by one, in any order. A program makes one section of 4096 values:

    bits 12 and up   the P = S / 4096 sections of the block are added with signs while they are loaded
    bits 0 to 7      in a warp's registers, 256 values, 8 a lane: two products with 16 x 16 signs, where the accumulators
                     of the first are the right operand of the second as they lie
    bits 8 to 11     across the 16 warps: a product with 16 x 16 signs through shared memory; in blocks of less than 4096 the
                     bits from s on are left alone, which makes signs zeros and ones

Values enter the tensor cores as two bfloat16, high and low part, so that the result is good to 2^-16. In fixed point the
largest value of a section gives its scale.

The assembly of a warp asks for 8 of 256 neighbouring values in every lane, whichever (a Hadamard product over all bits
does not care how they are numbered): the loads of 16 bytes see to that, and a test of the compiled layout.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.turns import section_asm

SECTION = 4096  # values of a program, which share a scale in fixed point
LARGEST = tl.constexpr(32512.0)  # 127 * 256


@triton.jit
def signs_of(i, j, MASK: tl.constexpr):
    """bfloat16 bits of entry (i, j), i and j below 16: signs over the bits of MASK, the identity over the others."""
    odd = (0x6996 >> (i & j & MASK)) & 1
    return tl.where(((i ^ j) & (15 & ~MASK)) == 0, 0x3F80 | (odd << 15), 0)


@triton.jit
def part_factors(before_ptr, base, own, place, width, P: tl.constexpr, ROOT: tl.constexpr):
    """What the P sections from `base` on are multiplied by where they make section `own` of their block: signs, scales."""
    factors = ()
    for p in tl.static_range(P):
        bits = own & p
        bits ^= bits >> 4
        factor = (1 - 2 * ((0x6996 >> (bits & 15)) & 1)).to(tl.float32) * ROOT
        if before_ptr is not None:
            source = (base + p) * 4096 + place
            factor *= tl.load(before_ptr + source, mask=source < width, other=0.0).to(tl.float32)
        factors = factors + (factor,)
    return factors


@triton.jit
def finish_fixed(y, at, token, section, sections, out_width, y_ptr, scales_ptr, stride_y):
    """Store 16-bit fixed point, high and low bytes apart, and the section's scale and sum."""
    largest = tl.max(tl.abs(y))
    scale = tl.where(largest > 0, largest * (1.0 / LARGEST), 1.0)
    # adding 1.5 * 2^23 rounds to the nearest integer, and leaves it in the low bits
    q = (y * (1.0 / scale) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    high = (q + 128) >> 8
    inside = at < out_width
    place = y_ptr + 2 * token * stride_y + at
    tl.store(place, high.to(tl.int8), mask=inside)
    tl.store(place + stride_y, (q - high * 256).to(tl.int8), mask=inside)
    own = scales_ptr + (token * sections + section) * 2
    tl.store(own, scale)
    tl.store(own + 1, tl.sum(q).to(tl.float32))


@triton.jit
def section_kernel(
    x_ptr, before_ptr, after_ptr, bias_ptr, added_ptr, y_ptr, scales_ptr, width, out_width, stride_x, stride_y,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, P: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, ROOT: tl.constexpr,
    PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One section of one token; grid (tokens, sections), 16 warps; loads of V values; MASK: the mixed bits from bit 8 on.

    The next launch may begin when the one before this has ended, not earlier: its programs then find the machine empty and
    spread evenly.
    """
    token, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base, own = section // P * P, section % P
    lane, warp = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 16)[None, :, None, None]
    eight = tl.arange(0, 8 // V)[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]
    place = warp * 256 + lane * 8 + eight
    g, t = lane // 4 + eight * 0 + warp * 0, lane % 4 * 2
    second = signs_of(g, t, 7) | (signs_of(g, t + 1, 7) << 16)
    first = second
    if PAIRED:  # without bit 0, which is the lowest of a lane's registers
        first = signs_of(g, t, 6) | (signs_of(g, t + 1, 6) << 16)
    third = signs_of(g, t, MASK) | (signs_of(g, t + 1, MASK) << 16)
    at = section * 4096 + (g + 8 * (eight // 4)) * 256 + warp * 16 + t * 2 + eight % 4
    inside = at < out_width
    factors = part_factors(before_ptr, base, own, place, width, P, ROOT)
    if after_ptr is not None:
        after = tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = ()
    for p in tl.static_range(P):
        source = (base + p) * 4096 + place
        x = x + (tl.load(x_ptr + token * stride_x + source, mask=source < width, other=0.0),)
    z = tl.zeros([32, 16, 8 // V, V], tl.float32)
    if width > 0:  # always; the branch keeps the loads together, which else wait for one another's registers
        for p in tl.static_range(P):
            z += x[p].to(tl.float32) * factors[p]
    if scales_ptr is not None:
        high = y_ptr + 2 * token * stride_y + at - eight % 4 - eight // 4 * 2048
        low = high + stride_y
        scale = scales_ptr + (token * tl.num_programs(1) + section) * 2 + place * 0
        tl.inline_asm_elementwise(
            ASM, CONSTRAINTS,
            (z, first, second, third, high.to(tl.int64), low.to(tl.int64), scale.to(tl.int64)),
            dtype=tl.float32, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        y = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, (z, first, second, third), dtype=tl.float32, is_pure=False, pack=8
        )
        if after_ptr is not None:
            y *= after
        if bias_ptr is not None:
            y += bias
        if added_ptr is not None:
            y += tl.load(added_ptr + token * out_width + at, mask=inside, other=0.0)
        tl.store(y_ptr + token * stride_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def rotate_sections(
    x: Tensor, y: Tensor, scales: Tensor | None, *, size: int, sections: int, width: int, out_width: int, pdl: bool,
    before: Tensor | None = None, after: Tensor | None = None, bias: Tensor | None = None, added: Tensor | None = None,
    paired: bool = False,
) -> None:  # fmt: skip
    """Write y, rotated by blocks of `size`; in fixed point where there are `scales`, then sums of neighbours if `paired`."""
    mask = min(size, SECTION) - 1 >> 8
    text, names = section_asm(across=mask >= 8, fixed=scales is not None)
    early: dict[str, object] = {"launch_pdl": True} if pdl else {}
    launch(
        section_kernel,
        (x.shape[0], sections, 1),
        (x, before, after, bias, added, y, scales, width, out_width, x.stride(0), y.stride(0)),
        interned(
            ASM=text, CONSTRAINTS=names, P=max(1, size // SECTION),
            V=16 // x.element_size() if x.element_size() > 2 else 8, MASK=mask, ROOT=size**-0.5 * (2 if paired else 1),
            PAIRED=paired, PDL=pdl, num_warps=16, num_stages=1, **early,
        ),
    )  # fmt: skip
