"""The PTX of `byte_grid.py`: one token of a grid on integer tensor cores, where a byte of a word is a weight as it lies.

A register of the left operand of `mma.m16n8k32` has four bytes, so one AND makes four weights, at some bit of their bytes.
The words are those of `words.py`: planes 2 s and 2 s + 1 are the even and the odd bytes of product s (a *slab* of 32
columns), and the column of byte b of lane 4 g + t is 32 s + 8 t + 4 (b % 2) + 2 kh + b // 2.

    2 bits, product s      bits 2 (s % 4) .. of every byte of word s // 4       times 4^(s % 4)
    4 bits                 bits 4 (s % 2) .. of every byte of word s // 2       times 16^(s % 2)
    3 bits, 0 3 5          bits 0 .. of even, 1 .. of odd bytes                 times 1 and 2
            1 4 6          bits 3 .. of even, 4 .. of odd bytes                 times 8 and 16
            2 7            what lies across two bytes, and the sixteenth plane, moved into place

What a weight is too large by is the *class* of its product, and the classes are columns of the right operand: column 2 c is
the high bytes of the activations that meet class c, 2 c + 1 the low ones, and both are zero in products of other classes.
Where even and odd bytes differ by a factor of two, the activations that meet the smaller ones are doubled.

Activations are 16-bit fixed point, a scale for 128 columns: x = scale (256 high + low), both bytes signed. The zero point of
a symmetric grid, times the integers, is taken off after a group; those of other grids lie beside the scales.
"""

from functools import cache

from requant_kernels.common.bit_layout import ptx_float

SLABS = 8  # of a block: 32 columns, one product
GROUP = 128  # columns of a scale of the activations
BLOCK_BYTES = 512  # of the activations of a block: slab, high or low, t, (kh b)
LIMIT = 32512.0  # of the fixed point: high bytes stay within 127
CLASSES = {2: (0, 1, 2, 3) * 2, 3: (0, 1, 0, 0, 1, 0, 1, 0), 4: (0, 1) * 4}  # by slab
FACTORS = {2: (1, 4, 16, 64), 3: (2, 16, 0, 0), 4: (1, 16, 0, 0)}  # by class; none: 0
DOUBLED = {  # by slab: whether activations of even and of odd planes are doubled
    2: ((0, 0),) * 8,
    3: ((1, 0), (1, 0), (1, 1), (1, 0), (1, 0), (1, 0), (1, 0), (0, 1)),
    4: ((0, 0),) * 8,
}
ZERO_ASM = "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, 0; }"
# $1: where 16 bytes of activations go, over those that all lanes have multiplied; $2: from where; $3: whether there are any
AGAIN_ASM = """{ .reg .pred p; setp.ne.s32 p, $3, 0; bar.warp.sync 0xffffffff;
@p cp.async.ca.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"""
FETCH_ASM = """{ .reg .f32 a, b, c, d; ld.shared.v4.f32 {a, b, c, d}, [$1];
add.f32 a, a, b; add.f32 c, c, d; add.f32 $0, a, c; }"""
_MASKS3 = ("0x0E070E07", "0x70387038")


def _weights(bits: int, slab: int, element: int, tile: int) -> tuple[list[str], str]:
    """Lines that leave four weights in a register of the left operand, and its name."""
    d, words = f"a{element}", [f"w{tile}_{i}_{element}" for i in range(bits)]
    if bits == 2:
        return [f"and.b32 {d}, {words[slab // 4]}, 0x{0x03030303 << 2 * (slab % 4):08X};"], d
    if bits == 4:
        return [f"and.b32 {d}, {words[slab // 2]}, 0x{0x0F0F0F0F << 4 * (slab % 2):08X};"], d
    if slab == 2:
        return [
            f"shr.u32 e0, {words[0]}, 6;", f"shl.b32 e1, {words[1]}, 2;", "and.b32 e0, e0, 0x00070007;",
            f"lop3.b32 {d}, e1, 0x07000700, e0, 0xEA;",
        ], d  # fmt: skip
    if slab == 7:
        return [
            f"shr.u32 e0, {words[2]}, 5;", f"shr.u32 e1, {words[0]}, 7;", f"shr.u32 e2, {words[1]}, 6;",
            "and.b32 e0, e0, 0x040E040E;", "lop3.b32 e0, e1, 0x01000100, e0, 0xEA;",
            f"lop3.b32 {d}, e2, 0x02000200, e0, 0xEA;",
        ], d  # fmt: skip
    word, second = divmod(slab - (slab > 2), 2)
    return [f"and.b32 {d}, {words[word]}, {_MASKS3[second]};"], d


@cache
def block_asm(bits: int, scales: int, tiles: int, *, zeros: bool = False) -> str:
    """Sums += a block of `tiles` tiles. `scales`: of a row and block, 0 to 2; `zeros`: as many zero points behind them.

    Operands: 2 `tiles` outputs (rows g and g + 8 of each tile); inputs: the same, whether there is a block, this lane's
    words, its scales, its activations of classes 0 to 3, what is taken off its sums, the scales of the activations.
    """
    outputs = 2 * tiles
    inside, words, own, x0, start, of_x = (f"${2 * outputs + i}" for i in (0, 1, 2, 3, 7, 8))
    x = [x0, *(f"${2 * outputs + 4 + i}" for i in range(3))]
    registers = [f"w{t}_{i}_{e}" for t in range(tiles) for i in range(bits) for e in range(4)]
    registers += [f"b{s}_{h}" for s in range(SLABS) for h in range(2)]
    registers += [f"c{t}_{i}" for t in range(tiles) for i in range(4)] + [
        f"{name}{t}_{i}" for name in "so" for t in range(tiles) for i in range(2)
    ]
    registers += [f"a{e}" for e in range(4)] + ["e0", "e1", "e2", "z"]
    lines = [f"setp.eq.s32 p, {inside}, 0;", "@p bra.uni NONE;"]
    for t in range(tiles):
        for i in range(bits):
            names = ", ".join(f"w{t}_{i}_{e}" for e in range(4))
            lines.append(f"ld.shared.v4.b32 {{{names}}}, [{words} + {512 * (bits * t + i)}];")
        for i in range(scales):
            lines.append(f"ld.shared.b32 s{t}_{i}, [{own} + {128 * (scales * t + i)}];")
            if zeros:
                lines.append(f"ld.shared.b32 o{t}_{i}, [{own} + {128 * (scales * (tiles + t) + i)}];")
    lines += ["mov.b32 z, 0;", f"ld.shared.f32 i0, [{start}];", f"ld.shared.f32 i1, [{start} + 16];"]
    lines.append(f"ld.shared.v2.f32 {{x0, x1}}, [{of_x}];")
    for s in range(SLABS):
        lines.append(f"ld.shared.v2.b32 {{b{s}_0, b{s}_1}}, [{x[CLASSES[bits][s]]} + {64 * s}];")
    for group in range(2):
        for t in range(tiles):
            sums = [f"c{t}_{i}" for i in range(4)]
            for s in range(4 * group, 4 * group + 4):
                for e in range(4):
                    lines += _weights(bits, s, e, t)[0]
                c, before = ", ".join(sums), ", ".join(sums if s % 4 else "zzzz")
                product = f"{{{c}}}, {{a0, a1, a2, a3}}, {{b{s}_0, b{s}_1}}, {{{before}}};"
                lines.append("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 " + product)
            if scales:
                lines.append(f"mov.b32 {{l, h}}, s{t}_{min(group, scales - 1)};")
            if zeros:
                lines.append(f"mov.b32 {{zl, zh}}, o{t}_{min(group, scales - 1)};")
            for row in range(2):
                lines += [
                    f"mad.lo.s32 e0, c{t}_{2 * row}, 256, c{t}_{2 * row + 1};", "cvt.rn.f32.s32 f, e0;",
                    *([f"cvt.f32.f16 v, {'lh'[row]};", f"mul.f32 v, v, x{group};"] if scales else [f"mov.f32 v, x{group};"]),
                    *([f"cvt.f32.f16 zf, z{'lh'[row]};", f"fma.rn.f32 f, i{group}, zf, f;"] if zeros else []),
                    f"fma.rn.f32 ${2 * t + row}, f, v, ${2 * t + row};",
                    *([] if zeros else [f"fma.rn.f32 ${2 * t + row}, i{group}, v, ${2 * t + row};"]),
                ]  # fmt: skip
    head = "{ .reg .pred p; .reg .b16 l, h, zl, zh; .reg .f32 x0, x1, i0, i1, f, v, zf;\n"
    head += f".reg .b32 {', '.join(registers)};\n"
    return head + "\n".join(lines) + "\nNONE: }"


@cache
def block_constraints(tiles: int) -> str:
    return ",".join(["=&f"] * (2 * tiles) + [str(i) for i in range(2 * tiles)] + ["r"] * 9)


LOAD_ASM = """{ .reg .pred p; setp.ne.s32 p, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"""


@cache
def fix_asm(bits: int, dtype: str, *, given: bool = False, zeros: bool = False) -> str:
    """Eight neighbouring activations of each lane to fixed point. A warp has a block.

    Operands: the activations in four registers, whether they count, where bytes go (of this slab and t), where what is
    taken off goes (of this group and t), where the scale goes (of this group); `given`: where they go as they are. What is
    taken off is for one of zero point 2^(bits - 1), or, with `zeros`, 1. There is no branch, so that several of these are
    computed side by side.
    """
    zero, half = 1 if zeros else 1 << (bits - 1), bits == 3
    lines = ["setp.ne.s32 on, $5, 0;", *(f"mov.b32 r{i}, ${1 + i};" for i in range(4))]
    if given:
        lines.append("@on st.shared.v4.b32 [$9], {r0, r1, r2, r3};")
    for i in range(4):
        if dtype == "fp16":
            lines += [
                f"mov.b32 {{l, h}}, r{i};",
                f"cvt.f32.f16 f{2 * i}, l;",
                f"cvt.f32.f16 f{2 * i + 1}, h;",
            ]
        else:
            lines += [
                f"shl.b32 n, r{i}, 16;",
                f"mov.b32 f{2 * i}, n;",
                f"and.b32 n, r{i}, 0xFFFF0000;",
                f"mov.b32 f{2 * i + 1}, n;",
            ]
    lines.append("abs.f32 m, f0;")
    for i in range(1, 8):
        lines += [f"abs.f32 q, f{i};", "max.NaN.f32 m, m, q;"]
    for lanes in (1, 2, 4, 8):
        lines += [
            "mov.b32 n, m;",
            f"shfl.sync.bfly.b32 k, n, {lanes}, 0x1f, 0xffffffff;",
            "mov.b32 q, k;",
            "max.NaN.f32 m, m, q;",
        ]
    limit = LIMIT / 2 if half else LIMIT
    lines += [
        "max.NaN.f32 m, m, 0f0DA24260;",  # 1e-30
        "rcp.approx.f32 q, m;", f"mul.f32 q, q, {ptx_float(limit)};", f"mul.f32 m, m, {ptx_float(1 / limit)};",
        "mov.u32 lane, %tid.x;", "and.b32 t, lane, 3;", "shr.u32 slab, lane, 2;", "and.b32 slab, slab, 7;",
    ]  # fmt: skip
    # the factors of even and of odd planes, and the weights of their sums: half of them where activations are doubled
    if half:
        even = sum(d[0] << s for s, d in enumerate(DOUBLED[3]))
        odd = sum(d[1] << s for s, d in enumerate(DOUBLED[3]))
        lines += ["add.f32 u, q, q;"]
        for name, shift, mask in (("e", "j0", even), ("o", "j1", odd)):
            lines += [
                f"shr.u32 {shift}, {mask}, slab;", f"and.b32 {shift}, {shift}, 1;", f"setp.ne.s32 p, {shift}, 0;",
                f"selp.f32 {name}, u, q, p;", f"xor.b32 {shift}, {shift}, 1;",
            ]  # fmt: skip
    for i in range(8):
        factor = ("e" if i < 4 else "o") if half else "q"
        lines += [f"fma.rn.f32 f{i}, f{i}, {factor}, 0f4B400080;", f"mov.b32 v{i}, f{i};"]  # 1.5 2^23 + 128
    lines += [
        "add.s32 k, v0, v1;", "add.s32 n, v2, v3;", "add.s32 k, k, n;", f"sub.s32 k, k, {_signed(4 * 0x4B400080)};",
        "add.s32 n, v4, v5;", "add.s32 g, v6, v7;", "add.s32 n, n, g;", f"sub.s32 n, n, {_signed(4 * 0x4B400080)};",
    ]  # fmt: skip
    if half:
        lines += ["shl.b32 k, k, j0;", "shl.b32 n, n, j1;"]
    lines.append("add.s32 k, k, n;")
    for lanes in (1, 2):
        lines += [f"shfl.sync.bfly.b32 n, k, {lanes}, 0x1f, 0xffffffff;", "add.s32 k, k, n;"]
    if bits == 2:
        lines += ["and.b32 g, slab, 3;", "shl.b32 n, g, 1;"]
    elif bits == 4:
        lines += ["and.b32 g, slab, 1;", "shl.b32 n, g, 2;"]
    else:
        lines += [
            f"shr.u32 g, {sum(c << s for s, c in enumerate(CLASSES[3]))}, slab;",
            "and.b32 g, g, 1;",
            "mul.lo.s32 n, g, 3;",
        ]
    lines += [
        "shl.b32 k, k, n;", f"mul.lo.s32 k, k, {-zero};", "setp.eq.s32 p, g, t;", "selp.b32 k, k, 0, p;",
    ]  # fmt: skip
    for lanes in (4, 8):
        lines += [f"shfl.sync.bfly.b32 n, k, {lanes}, 0x1f, 0xffffffff;", "add.s32 k, k, n;"]
    for kh in range(2):
        a, b, c, d = (f"v{i + 2 * kh}" for i in (0, 4, 1, 5))
        lines += [
            f"prmt.b32 r0, {a}, {b}, 0x4051;", f"prmt.b32 r1, {c}, {d}, 0x4051;", f"prmt.b32 h{kh}, r0, r1, 0x5410;",
            f"prmt.b32 l{kh}, r0, r1, 0x7632;", f"xor.b32 l{kh}, l{kh}, 0x80808080;",
        ]  # fmt: skip
    lines += [
        "@on st.shared.v2.b32 [$6], {h0, h1};", "@on st.shared.v2.b32 [$6 + 32], {l0, l1};",
        "and.b32 n, lane, 12;", "setp.eq.and.s32 p, n, 0, on;", "cvt.rn.f32.s32 u, k;", "@p st.shared.f32 [$7], u;",
        "and.b32 n, lane, 15;", "setp.eq.and.s32 p, n, 0, on;", "@p st.shared.f32 [$8], m;",
    ]  # fmt: skip
    head = (
        "{ .reg .pred p, on; .reg .b16 l, h; .reg .f32 f<8>, m, q, u, e, o; .reg .b32 r<4>, v<8>, h<2>, l<2>;\n"
        ".reg .b32 n, k, g, t, slab, lane, j0, j1;\n"
    )
    return head + "\n".join(lines) + "\nmov.b32 $0, 0; }"


def _signed(value: int) -> int:
    """As a 32-bit integer."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
