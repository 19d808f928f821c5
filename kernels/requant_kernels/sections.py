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

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

SECTION = 4096  # values of a program, which share a scale in fixed point
MANY = 512  # sections from which on a program makes all of its block: what it has read serves them all
LARGEST = tl.constexpr(32512.0)  # 127 * 256


@cache
def turn_asm() -> tuple[str, str]:
    """Both products of a warp: 8 outputs, 8 values, 8 times the lane's signs of the first, 8 times of the second."""
    lines: list[str] = []
    names: list[str] = []

    def new() -> str:
        names.append(f"t{len(names)}")
        return names[-1]

    def split(low: str, high: str) -> tuple[str, str]:
        """Pairs of bfloat16: the values rounded, and what is left of them."""
        rounded, left = new(), new()
        a, b = new(), new()
        lines.extend([
            f"cvt.rn.bf16x2.f32 {rounded}, {high}, {low};",
            f"shl.b32 {a}, {rounded}, 16;", f"and.b32 {b}, {rounded}, 0xffff0000;",
            f"sub.f32 {a}, {low}, {a};", f"sub.f32 {b}, {high}, {b};",
            f"cvt.rn.bf16x2.f32 {left}, {b}, {a};",
        ])  # fmt: skip
        return rounded, left

    def product(signs: str, first: tuple[str, str], second: tuple[str, str], out: list[str]) -> None:
        """out = signs [16, 16] @ columns whose rows 2 t, 2 t + 1 are `first`, 2 t + 8, 2 t + 9 `second`."""
        opposite = new()
        lines.append(f"xor.b32 {opposite}, {signs}, 0x80008000;")
        parts, sums = list(zip(split(*first), split(*second), strict=True)), ["0f00000000"] * 4
        for i, part in enumerate(parts[::-1]):
            to = out if i else [new() for _ in range(4)]
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{', '.join(to)}}}, "
                f"{{{signs}, {signs}, {signs}, {opposite}}}, {{{part[0]}, {part[1]}}}, {{{', '.join(sums)}}};"
            )
            sums = to

    x = [f"${8 + i}" for i in range(8)]
    upper, lower = [new() for _ in range(4)], [new() for _ in range(4)]
    product("$16", (x[0], x[1]), (x[2], x[3]), upper)
    product("$16", (x[4], x[5]), (x[6], x[7]), lower)
    product("$24", (upper[0], upper[1]), (lower[0], lower[1]), ["$0", "$1", "$4", "$5"])
    product("$24", (upper[2], upper[3]), (lower[2], lower[3]), ["$2", "$3", "$6", "$7"])
    text = "{ .reg .b32 " + ", ".join(names) + ";\n" + "\n".join(lines) + " }"
    return text, ",".join(["=f"] * 8 + ["f"] * 8 + ["r"] * 16)


@triton.jit
def _sign(i, j, MASK: tl.constexpr):
    """bfloat16 bits of entry (i, j), i and j below 16: signs over the bits of MASK, the identity over the others."""
    odd = (0x6996 >> (i & j & MASK)) & 1
    return tl.where(((i ^ j) & (15 & ~MASK)) == 0, 0x3F80 | (odd << 15), 0)


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
    PAIRED: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr = 1, ARRANGED: tl.constexpr = False,
    OWN: tl.constexpr = 1,
):  # fmt: skip
    """OWN sections, 1 or P, of one token; grid (tokens, sections / OWN), 16 warps; loads of V values; MASK: the mixed bits
    from bit 8 on.

    x is the sum of PARTS matrices one behind the other. ARRANGED: y in the order of `trellis_wgmma.py`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, section = tl.program_id(0).to(tl.int64), tl.program_id(1) * OWN
    base, own = section // P * P, section % P
    lane, warp = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 16)[None, :, None, None]
    eight = tl.arange(0, 8 // V)[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]
    place = warp * 256 + lane * 8 + eight
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    g, t = lane // 4 + eight * 0 + warp * 0, lane % 4 * 2
    second = _sign(g, t, 7) | (_sign(g, t + 1, 7) << 16)
    first = second
    if PAIRED:  # without bit 0, which is the lowest of a lane's registers
        first = _sign(g, t, 6) | (_sign(g, t + 1, 6) << 16)
    signs = _sign(row, column, MASK).to(tl.int16).to(tl.bfloat16, bitcast=True)
    factors = ()
    for p in tl.static_range(P):
        bits = own & p
        bits ^= bits >> 4
        factor = (1 - 2 * ((0x6996 >> (bits & 15)) & 1)).to(tl.float32) * ROOT
        if before_ptr is not None:
            source = (base + p) * 4096 + place
            factor *= tl.load(before_ptr + source, mask=source < width, other=0.0).to(tl.float32)
        factors = factors + (factor,)
    scale, bias = (), ()
    for o in tl.static_range(OWN):
        at = (section + o) * 4096 + row * 256 + tl.arange(0, 256)[None, :]
        if after_ptr is not None:
            scale = scale + (tl.load(after_ptr + at, mask=at < out_width, other=0.0).to(tl.float32),)
        if bias_ptr is not None:
            bias = bias + (tl.load(bias_ptr + at, mask=at < out_width, other=0.0).to(tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = ()
    for p in tl.static_range(P):
        source = (base + p) * 4096 + place
        for part in tl.static_range(PARTS):
            matrix = x_ptr + (token + part * tl.num_programs(0)) * stride_x
            x = x + (tl.load(matrix + source, mask=source < width, other=0.0),)
    mixed = ()
    for o in tl.static_range(OWN):
        z = tl.zeros([32, 16, 8 // V, V], tl.float32)
        # always; the branch keeps the loads together, which else wait for one another's registers
        if width > 0:
            for p in tl.static_range(P):
                whole = x[p * PARTS].to(tl.float32)
                for part in tl.static_range(1, PARTS):
                    whole += x[p * PARTS + part]
                odd = (0x6996 >> (o & p)) & 1  # the signs of a program's first section are in the factors
                z += whole * (-factors[p] if odd else factors[p])
        mixed = mixed + (z,)
    for o in tl.static_range(OWN):
        z = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, (mixed[o], first, second), dtype=tl.float32, is_pure=False, pack=8
        )
        z = tl.reshape(tl.permute(z, (1, 0, 2, 3)), [16, 256])
        high = z.to(tl.bfloat16)
        low = (z - high.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(signs, high, tl.dot(signs, low))
        at = (section + o) * 4096 + row * 256 + tl.arange(0, 256)[None, :]
        inside = at < out_width
        if scales_ptr is not None:
            sections = tl.num_programs(1) * OWN
            finish_fixed(y, at, token, section + o, sections, out_width, y_ptr, scales_ptr, stride_y)
        else:
            if after_ptr is not None:
                y *= scale[o]
            if bias_ptr is not None:
                y += bias[o]
            if added_ptr is not None:
                y += tl.load(added_ptr + token * out_width + at, mask=inside, other=0.0)
            if ARRANGED:
                y = tl.reshape(tl.permute(tl.reshape(y, [16, 4, 4, 8, 2]), (0, 1, 3, 2, 4)), [16, 256])
            tl.store(y_ptr + token * stride_y + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def rotate_sections(
    x: Tensor, y: Tensor, scales: Tensor | None, *, size: int, sections: int, width: int, out_width: int, pdl: bool,
    before: Tensor | None = None, after: Tensor | None = None, bias: Tensor | None = None, added: Tensor | None = None,
    paired: bool = False, arranged: bool = False,
) -> None:  # fmt: skip
    """Write y, rotated by blocks of `size`; in fixed point where there are `scales`, then sums of neighbours if `paired`.

    x [m, width], or [parts, m, width], whose parts are added first.
    """
    text, names = turn_asm()
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    blocks = max(1, size // SECTION)
    own = blocks if x.shape[-2] * sections >= MANY and sections % blocks == 0 and blocks <= 4 else 1
    section_kernel[(x.shape[-2], sections // own)](
        x, before, after, bias, added, y, scales, width, out_width, x.stride(-2), y.stride(0), ASM=text, CONSTRAINTS=names,
        P=blocks, OWN=own, V=16 // x.element_size() if x.element_size() > 2 else 8, MASK=min(size, SECTION) - 1 >> 8,
        ROOT=size**-0.5 * (2 if paired else 1), PAIRED=paired, PDL=pdl,
        PARTS=x.shape[0] if x.dim() == 3 else 1, ARRANGED=arranged, num_warps=16, num_stages=1, **launch,
    )  # fmt: skip
