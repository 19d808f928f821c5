"""PTX of `gemv_int8_mma.py`: one token of a 2- to 4-bit grid on int8 tensor cores.

A register of the left operand of `mma.m16n8k32` holds four unsigned bytes. One AND of a packed word leaves four codes in
such a register, each at some bit offset in its byte. They are not shifted: the MMA multiplies them as they are.

The packed codes are those of `bit_layout.py`. mma_k32 number s (32 of the 256 columns of a k_tile) takes the even bytes
from mma_k16 number 2 s and the odd ones from 2 s + 1; byte b of lane 4 g + t is column 32 s + 8 t + 4 (b % 2) + 2 kh + b
// 2.

    2 bits, mma_k32 s        bits 2 (s % 4) .. of every byte of word s // 4       too large by 4^(s % 4)
    4 bits                   bits 4 (s % 2) .. of every byte of word s // 2       too large by 16^(s % 2)
    3 bits, s = 0 3 5        bits 0 .. of even, 1 .. of odd bytes                 by 1 and 2
                1 4 6        bits 3 .. of even, 4 .. of odd bytes                 by 8 and 16
                2 7          codes that cross a byte, shifted

The factor is undone per *shift class*. The right operand has eight columns and one token needs two, the high and the low
bytes of its activations: class c uses columns 2 c and 2 c + 1, and an MMA of that class has zeros in all others. So
products are accumulated per factor in int32 and rescaled once at the end. Where even and odd bytes differ by a factor of
two, the activations of the smaller ones are doubled.

Activations are 16-bit fixed point with one scale per 128 columns: x = scale (256 high + low), both bytes signed. The zero
point times the sum of the activations is subtracted per group.
"""

from functools import cache

from requant_kernels.common.ptx import Ptx, inline_ptx, mma_line, ptx_float

MMA_K32 = 8  # per k_tile of 256 columns
X_TILE_BYTES = 512  # the quantized activations of a k_tile: mma_k32, high or low byte, t, (kh b)
MAX_FIXED_POINT = 32512.0  # the high byte stays within 127
SHIFT_CLASS = {2: (0, 1, 2, 3) * 2, 3: (0, 1, 0, 0, 1, 0, 1, 0), 4: (0, 1) * 4}  # by mma_k32
CLASS_FACTOR = {2: (1, 4, 16, 64), 3: (2, 16, 0, 0), 4: (1, 16, 0, 0)}  # by class; 0: unused
DOUBLED = {  # by mma_k32: whether the activations of the even and of the odd bytes are doubled
    2: ((0, 0),) * 8,
    3: ((1, 0), (1, 0), (1, 1), (1, 0), (1, 0), (1, 0), (1, 0), (0, 1)),
    4: ((0, 0),) * 8,
}
_MASKS3 = ("0x0E070E07", "0x70387038")

STORE_ZEROS = inline_ptx(
    "mov.b32 zero, 0; st.shared.v4.b32 [$address], {zero, zero, zero, zero};",
    inputs={"address": "r"}, registers={"b32": "zero"},
)  # fmt: skip
# a row's sum over the four lanes that share it
LOAD_REDUCE = inline_ptx(
    "ld.shared.v4.f32 {a, b, c, d}, [$address];\nadd.f32 a, a, b; add.f32 c, c, d; add.f32 $sum, a, c;",
    outputs={"sum": "=f"}, inputs={"address": "r"}, registers={"f32": "a, b, c, d"},
)  # fmt: skip
# a lane's eight activations, zeros if its k_tile does not exist
LOAD_X = inline_ptx(
    "setp.ne.s32 p, $exists, 0;\nmov.b32 $x0, 0; mov.b32 $x1, 0; mov.b32 $x2, 0; mov.b32 $x3, 0;\n"
    "@p ld.global.v4.b32 {$x0, $x1, $x2, $x3}, [$address];",
    outputs={f"x{i}": "=&r" for i in range(4)}, inputs={"address": "l", "exists": "r"}, registers={"pred": "p"},
)  # fmt: skip


def _extract_codes(bits: int, mma: int, element: int, tile: int) -> list[str]:
    """Lines that leave four codes of one mma_k32 in register `weight{element}` of the left operand."""
    out, word = f"weight{element}", [f"code{tile}_{i}_{element}" for i in range(bits)]
    if bits == 2:
        return [f"and.b32 {out}, {word[mma // 4]}, 0x{0x03030303 << 2 * (mma % 4):08X};"]
    if bits == 4:
        return [f"and.b32 {out}, {word[mma // 2]}, 0x{0x0F0F0F0F << 4 * (mma % 2):08X};"]
    if mma == 2:
        return [
            f"shr.u32 tmp0, {word[0]}, 6;", f"shl.b32 tmp1, {word[1]}, 2;", "and.b32 tmp0, tmp0, 0x00070007;",
            f"lop3.b32 {out}, tmp1, 0x07000700, tmp0, 0xEA;",
        ]  # fmt: skip
    if mma == 7:
        return [
            f"shr.u32 tmp0, {word[2]}, 5;", f"shr.u32 tmp1, {word[0]}, 7;", f"shr.u32 tmp2, {word[1]}, 6;",
            "and.b32 tmp0, tmp0, 0x040E040E;", "lop3.b32 tmp0, tmp1, 0x01000100, tmp0, 0xEA;",
            f"lop3.b32 {out}, tmp2, 0x02000200, tmp0, 0xEA;",
        ]  # fmt: skip
    index, upper = divmod(mma - (mma > 2), 2)
    return [f"and.b32 {out}, {word[index]}, {_MASKS3[upper]};"]


@cache
def multiply_ptx(bits: int, scales: int, tiles: int, *, zeros: bool = False) -> Ptx:
    """acc += a k_tile of `tiles` row tiles times the token. `scales`: per row and k_tile, 0 to 2; `zeros`: followed by as
    many zero points.

    Operands: 2 `tiles` sums, of rows g and g + 8; whether the k_tile exists; shared addresses of this lane's codes, of its
    scales, of its activations for shift classes 0 to 3, of the sums of activations, and of the activations' scales.
    """
    acc = [f"acc{i}" for i in range(2 * tiles)]
    inputs = {f"{name}_in": str(i) for i, name in enumerate(acc)} | dict.fromkeys(
        ("exists", "codes", "scales", *(f"x_class{c}" for c in range(4)), "x_sums", "x_scales"), "r"
    )
    registers = [f"code{t}_{i}_{e}" for t in range(tiles) for i in range(bits) for e in range(4)]
    registers += [f"x{s}_{h}" for s in range(MMA_K32) for h in range(2)]
    registers += [f"dot{t}_{i}" for t in range(tiles) for i in range(4)]
    registers += [f"{name}{t}_{i}" for name in ("scale", "zero") for t in range(tiles) for i in range(2)]
    registers += [*(f"weight{e}" for e in range(4)), "tmp0", "tmp1", "tmp2", "none"]
    lines = ["setp.eq.s32 p, $exists, 0;", "@p bra.uni SKIP;"]
    # all loads of the k_tile first: codes, scales, zero points, activations
    for t in range(tiles):
        for i in range(bits):
            words = ", ".join(f"code{t}_{i}_{e}" for e in range(4))
            lines.append(f"ld.shared.v4.b32 {{{words}}}, [$codes + {512 * (bits * t + i)}];")
        for i in range(scales):
            lines.append(f"ld.shared.b32 scale{t}_{i}, [$scales + {128 * (scales * t + i)}];")
            if zeros:
                lines.append(f"ld.shared.b32 zero{t}_{i}, [$scales + {128 * (scales * (tiles + t) + i)}];")
    lines += ["mov.b32 none, 0;", "ld.shared.f32 x_sum0, [$x_sums];", "ld.shared.f32 x_sum1, [$x_sums + 16];"]
    lines.append("ld.shared.v2.f32 {x_scale0, x_scale1}, [$x_scales];")
    for s in range(MMA_K32):
        lines.append(f"ld.shared.v2.b32 {{x{s}_0, x{s}_1}}, [$x_class{SHIFT_CLASS[bits][s]} + {64 * s}];")
    for half in range(2):  # 128 columns, one scale of the activations
        for t in range(tiles):
            # four MMAs in int32: columns 2 t and 2 t + 1 of row g, then of row g + 8
            dot, weights = [f"dot{t}_{i}" for i in range(4)], [f"weight{e}" for e in range(4)]
            for s in range(4 * half, 4 * half + 4):
                for e in range(4):
                    lines += _extract_codes(bits, s, e, t)
                before = dot if s % 4 else ["none"] * 4
                x = [f"x{s}_0", f"x{s}_1"]
                lines.append(mma_line("m16n8k32", "s32.u8.s8.s32", dot, weights, x, before))
            # acc += (256 high + low - zero point * sum of x) * scale of the row * scale of x
            if scales:
                lines.append(f"mov.b32 {{scale_lo, scale_hi}}, scale{t}_{min(half, scales - 1)};")
            if zeros:
                lines.append(f"mov.b32 {{zero_lo, zero_hi}}, zero{t}_{min(half, scales - 1)};")
            for row, side in enumerate(("lo", "hi")):
                lines += [
                    f"mad.lo.s32 tmp0, dot{t}_{2 * row}, 256, dot{t}_{2 * row + 1};",
                    "cvt.rn.f32.s32 sum, tmp0;",
                ]
                if scales:
                    lines += [f"cvt.f32.f16 factor, scale_{side};", f"mul.f32 factor, factor, x_scale{half};"]
                else:
                    lines.append(f"mov.f32 factor, x_scale{half};")
                if zeros:
                    lines += [f"cvt.f32.f16 zero, zero_{side};", f"fma.rn.f32 sum, x_sum{half}, zero, sum;"]
                lines.append(f"fma.rn.f32 $acc{2 * t + row}, sum, factor, $acc{2 * t + row};")
                if not zeros:  # the zero point of a symmetric grid is in x_sum already
                    lines.append(f"fma.rn.f32 $acc{2 * t + row}, x_sum{half}, factor, $acc{2 * t + row};")
    return inline_ptx(
        [*lines, "SKIP:"],
        outputs=dict.fromkeys(acc, "=&f"), inputs=inputs,
        registers={
            "pred": "p", "b16": "scale_lo, scale_hi, zero_lo, zero_hi",
            "f32": "x_scale0, x_scale1, x_sum0, x_sum1, sum, factor, zero", "b32": registers,
        },
    )  # fmt: skip


@cache
def quantize_ptx(bits: int, dtype: str, *, copy: bool = False, zeros: bool = False) -> Ptx:
    """Quantize eight adjacent activations per lane to fixed point; a warp has one k_tile.

    Operands: the activations in four registers; whether they exist; shared addresses for the bytes (of this mma_k32 and t),
    for the sums of activations (of this 128-column group and t), for the scale (of this group); with `copy`, one for the
    unchanged activations. The sums are multiplied by minus the zero point of a symmetric grid, 2^(bits - 1), or with
    `zeros` by -1. There is no branch, so that several k_tiles can be interleaved.
    """
    zero, half = 1 if zeros else 1 << (bits - 1), bits == 3
    inputs = {f"x{i}": "r" for i in range(4)} | dict.fromkeys(
        ("exists", "to_bytes", "to_sums", "to_scale", *(["to_copy"] * copy)), "r"
    )
    lines = ["setp.ne.s32 on, $exists, 0;", *(f"mov.b32 pair{i}, $x{i};" for i in range(4))]
    if copy:
        lines.append("@on st.shared.v4.b32 [$to_copy], {pair0, pair1, pair2, pair3};")
    # to float32
    for i in range(4):
        if dtype == "fp16":
            lines += [
                f"mov.b32 {{lo, hi}}, pair{i};", f"cvt.f32.f16 f{2 * i}, lo;", f"cvt.f32.f16 f{2 * i + 1}, hi;",
            ]  # fmt: skip
        else:
            lines += [
                f"shl.b32 n, pair{i}, 16;", f"mov.b32 f{2 * i}, n;",
                f"and.b32 n, pair{i}, 0xFFFF0000;", f"mov.b32 f{2 * i + 1}, n;",
            ]  # fmt: skip
    # the largest magnitude of 128 columns: of the lane, then of 16 lanes; NaN propagates
    lines.append("abs.f32 max, f0;")
    for i in range(1, 8):
        lines += [f"abs.f32 q, f{i};", "max.NaN.f32 max, max, q;"]
    for lanes in (1, 2, 4, 8):
        lines += [
            "mov.b32 n, max;", f"shfl.sync.bfly.b32 sum, n, {lanes}, 0x1f, 0xffffffff;", "mov.b32 q, sum;",
            "max.NaN.f32 max, max, q;",
        ]  # fmt: skip
    # q: 1 / scale, max: scale; t and mma32 of this lane
    limit = MAX_FIXED_POINT / 2 if half else MAX_FIXED_POINT
    lines += [
        "max.NaN.f32 max, max, 0f0DA24260;",  # 1e-30
        "rcp.approx.f32 q, max;", f"mul.f32 q, q, {ptx_float(limit)};", f"mul.f32 max, max, {ptx_float(1 / limit)};",
        "mov.u32 lane, %tid.x;", "and.b32 t, lane, 3;", "shr.u32 mma32, lane, 2;", "and.b32 mma32, mma32, 7;",
    ]  # fmt: skip
    # 3 bits: 1 / scale of the even and of the odd bytes, doubled by DOUBLED; shifts that give their sums the same weight
    if half:
        even = sum(d[0] << s for s, d in enumerate(DOUBLED[3]))
        odd = sum(d[1] << s for s, d in enumerate(DOUBLED[3]))
        lines += ["add.f32 u, q, q;"]
        for name, shift, mask in (("even", "shift_even", even), ("odd", "shift_odd", odd)):
            lines += [
                f"shr.u32 {shift}, {mask}, mma32;", f"and.b32 {shift}, {shift}, 1;", f"setp.ne.s32 p, {shift}, 0;",
                f"selp.f32 {name}, u, q, p;", f"xor.b32 {shift}, {shift}, 1;",
            ]  # fmt: skip
    # round: adding 1.5 * 2^23 + 128 leaves the integer, plus 128, in the low bits of the float
    for i in range(8):
        factor = ("even" if i < 4 else "odd") if half else "q"
        lines += [f"fma.rn.f32 f{i}, f{i}, {factor}, 0f4B400080;", f"mov.b32 v{i}, f{i};"]
    # the sum of the integers: the lane's eight, then over the four lanes of an mma_k32
    offset = _as_int32(4 * 0x4B400080)
    lines += [
        "add.s32 sum, v0, v1;", "add.s32 n, v2, v3;", "add.s32 sum, sum, n;", f"sub.s32 sum, sum, {offset};",
        "add.s32 n, v4, v5;", "add.s32 class, v6, v7;", "add.s32 n, n, class;", f"sub.s32 n, n, {offset};",
    ]  # fmt: skip
    if half:
        lines += ["shl.b32 sum, sum, shift_even;", "shl.b32 n, n, shift_odd;"]
    lines.append("add.s32 sum, sum, n;")
    for lanes in (1, 2):
        lines += [f"shfl.sync.bfly.b32 n, sum, {lanes}, 0x1f, 0xffffffff;", "add.s32 sum, sum, n;"]
    # times the factor of the shift class and the zero point; lane t keeps the sum of class t, over the four mma_k32
    if bits == 2:
        lines += ["and.b32 class, mma32, 3;", "shl.b32 n, class, 1;"]
    elif bits == 4:
        lines += ["and.b32 class, mma32, 1;", "shl.b32 n, class, 2;"]
    else:
        lines += [
            f"shr.u32 class, {sum(c << s for s, c in enumerate(SHIFT_CLASS[3]))}, mma32;", "and.b32 class, class, 1;",
            "mul.lo.s32 n, class, 3;",
        ]  # fmt: skip
    lines += [
        "shl.b32 sum, sum, n;", f"mul.lo.s32 sum, sum, {-zero};", "setp.eq.s32 p, class, t;", "selp.b32 sum, sum, 0, p;",
    ]  # fmt: skip
    for lanes in (4, 8):
        lines += [f"shfl.sync.bfly.b32 n, sum, {lanes}, 0x1f, 0xffffffff;", "add.s32 sum, sum, n;"]
    # high bytes (rounded up by the 128) and low bytes (signed again by the XOR), in the order of the right operand
    for kh in range(2):
        a, b, c, d = (f"v{i + 2 * kh}" for i in (0, 4, 1, 5))
        lines += [
            f"prmt.b32 pair0, {a}, {b}, 0x4051;", f"prmt.b32 pair1, {c}, {d}, 0x4051;",
            f"prmt.b32 high{kh}, pair0, pair1, 0x5410;", f"prmt.b32 low{kh}, pair0, pair1, 0x7632;",
            f"xor.b32 low{kh}, low{kh}, 0x80808080;",
        ]  # fmt: skip
    # every lane stores its bytes; lanes 0 to 3 of 16 store the sums, lane 0 of 16 the scale
    lines += [
        "@on st.shared.v2.b32 [$to_bytes], {high0, high1};", "@on st.shared.v2.b32 [$to_bytes + 32], {low0, low1};",
        "and.b32 n, lane, 12;", "setp.eq.and.s32 p, n, 0, on;", "cvt.rn.f32.s32 u, sum;", "@p st.shared.f32 [$to_sums], u;",
        "and.b32 n, lane, 15;", "setp.eq.and.s32 p, n, 0, on;", "@p st.shared.f32 [$to_scale], max;",
    ]  # fmt: skip
    eight = [f"f{i}" for i in range(8)]
    words = [*(f"pair{i}" for i in range(4)), *(f"v{i}" for i in range(8)), "high0", "high1", "low0", "low1"]
    return inline_ptx(
        lines, inputs=inputs,
        registers={
            "pred": "p, on", "b16": "lo, hi", "f32": [*eight, "max", "q", "u", "even", "odd"],
            "b32": [*words, "n", "sum", "class", "t", "mma32", "lane", "shift_even", "shift_odd"],
        },
    )  # fmt: skip


STORE_F32 = inline_ptx("st.shared.f32 [$address], $value;", inputs={"address": "r", "value": "f"})


def _as_int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
