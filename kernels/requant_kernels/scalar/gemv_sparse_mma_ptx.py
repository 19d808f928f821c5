"""The PTX of `gathered.py`: products of a warp, its activations in shared memory column by column, and residuals from there.

A *column* of shared memory is 16 bytes: the activations of eight tokens. That is a row of an 8 x 8 matrix for `stmatrix` and
`ldmatrix`, and both turn it over: the registers of a right operand, as a warp loaded them, become 32 columns, and 32 columns
from anywhere in a block become right operands again. So one instruction gathers 32 activations of eight tokens.

    column 32 s + 8 t + 4 j + 2 kh + e of a block stands at 32 s + 16 j + 8 kh + 2 t + e: what a register of the right
    operand has is 128 bytes

Residuals are entries (`entries.py`), sixteen a product: entry i is column i of a left operand that has its value in its own
row and zeros elsewhere, and the gathered column is row i of the right one. A lane makes its part of the left operand out of
the four entries of its columns: two values that stand in one register are kept where their rows are its own (HSET2, LOP3).

Every text is for the four registers that a lane has of `[warp, lane, 4]` (`pack=4`); of what a lane has once, the first.
"""

from functools import cache

from requant_kernels.scalar.gemm_sm90_ptx import pair_asm

COLUMNS_BYTES = 4096  # of a warp: 256 columns
ENTRY_BYTES = 256  # 64 entries
WARP_BYTES = COLUMNS_BYTES + ENTRY_BYTES
NONE = 1 << 30  # an entry that is none: zero, in the first column
OWN_ROWS = 0xE2  # the bits of a place that say the row: 4 g + t above four, rh above one
NEXT_ROWS = 0x2  # the bit of rows 8 and more


def _names(first: int, count: int = 4) -> list[str]:
    return [f"${first + i}" for i in range(count)]


def _product(dtype: str, a: list[str], b: list[str], c: list[str]) -> str:
    real = dtype.replace("fp", "f")
    d, a4, b2, c4 = (f"{{{', '.join(names)}}}" for names in (_names(0), a, b, c))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{real}.{real}.f32 {d}, {a4}, {b2}, {c4};"


@cache
def slab_asm(dtype: str) -> str:
    """Sums + both planes of a slab times its activations. Operands: even plane, odd plane, activations, sums."""
    even = _product(dtype, _names(4), _names(12, 2), _names(16))
    return "{ .reg .b32 z;\n" + even + "\n" + _product(dtype, _names(8), _names(14, 2), _names(0)) + " }"


SLAB_CONSTRAINTS = ",".join(["=f"] * 4 + ["r"] * 12 + ["f"] * 4)

# sums of a group of columns, the scales of both rows in 32 bits, sums: $0..3 = $4..7 scale + $12..15
SCALE = """{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $8; cvt.f32.f16 a, l; cvt.f32.f16 b, h;
fma.rn.f32 $0, $4, a, $12; fma.rn.f32 $1, $5, a, $13;
fma.rn.f32 $2, $6, b, $14; fma.rn.f32 $3, $7, b, $15; }"""
SCALE_CONSTRAINTS = ",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 4 + ["f"] * 4)


def zero_asm(dtype: str, factor: float, addend: float) -> str:
    """Two zero points in 32 bits -> the pairs that `grid_dequant_ptx` takes, in the order of words."""
    text = pair_asm(dtype, factor, addend).replace("$2", "$4")
    return text[: text.rindex("}")] + " mov.b32 $2, $0; mov.b32 $3, $1; }"


ZERO_CONSTRAINTS = ",".join(["=&r"] * 4 + ["r"] * 4)

# all of Triton's own shared memory: `gathered.py` asks for one piece
BASE = "mov.u32 $0, global_smem;"
# $4: the place of this lane's column, $8..11: the activations of a slab
STAGE = """{ .reg .b32 z; mov.b32 z, 0;
stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$4], {$8, $9, $10, $11};
mov.b32 $0, z; mov.b32 $1, z; mov.b32 $2, z; mov.b32 $3, z; }"""
STAGE_CONSTRAINTS = ",".join(["=r"] * 4 + ["r"] * 8)


def _round(dtype: str, entry: str, number: int, count: str, done: str) -> list[str]:
    """32 entries, of which every lane has one and shared memory all; it ends where `count` of them are fewer."""
    lines = [  # the column of this lane's entry, by the bits of its place: plane, t, kh, e
        f"shr.u32 b0, {entry}, 16;", "and.b32 b0, b0, 0xF00;", f"shr.u32 b1, {entry}, 14;",
        "lop3.b32 b0, b1, 0x60, b0, 0xEA;", f"shr.u32 b1, {entry}, 11;", "lop3.b32 b0, b1, 0x80, b0, 0xEA;",
        f"shr.u32 b1, {entry}, 12;", "lop3.b32 b0, b1, 0x10, b0, 0xEA;", "add.u32 b0, b0, $4;",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {b0, b1, b2, b3}, [b0];",
    ]  # fmt: skip
    for half in range(2):
        if half:
            lines += [f"setp.le.s32 p, {count}, {32 * number + 16};", f"@p bra {done};"]
        for part in range(2):  # columns 2 t, 2 t + 1 of the left operand, then eight further
            at = 128 * number + 64 * half + 32 * part
            lines += [
                f"ld.shared.v2.b32 {{c0, c1}}, [$12 + {at}];", f"prmt.b32 c{2 + part}, c0, c1, 0x5410;",
                "prmt.b32 c4, c0, c1, 0x7632;", "and.b32 c4, c4, 0x00E200E2;",
            ]  # fmt: skip
            if dtype == "bf16":
                lines += [
                    f"mov.b32 {{l, h}}, c{2 + part};", "cvt.f32.f16 f0, l;", "cvt.f32.f16 f1, h;",
                    f"cvt.rn.bf16x2.f32 c{2 + part}, f1, f0;",
                ]  # fmt: skip
            for row in range(2):
                lines += [
                    f"set.eq.u32.f16x2 c5, c4, {'s0' if row == 0 else 's1'};",
                    f"and.b32 a{2 * part + row}, c5, c{2 + part};",
                ]  # fmt: skip
        lines.append(
            _product(dtype, [f"a{i}" for i in range(4)], [f"b{2 * half}", f"b{2 * half + 1}"], _names(0))
        )
    return lines


@cache
def gather_asm(dtype: str) -> str:
    """Sums + the residuals of a block. Operands: the warp's columns, where this lane puts its entry, where it finds those of
    its columns of the left operand; the first two rounds' entries; how many there are; the rows g in two halves, as a place
    says them; where this lane's first entry is in memory; sums.
    """
    lines = [f"mov.b32 ${i}, ${32 + i};" for i in range(4)]
    lines += ["mov.b32 s0, $28;", f"or.b32 s1, s0, {NEXT_ROWS << 16 | NEXT_ROWS};"]
    lines += ["st.shared.b32 [$8], $16;", "st.shared.b32 [$8 + 128], $20;", "bar.warp.sync 0xffffffff;"]
    for number in range(2):
        lines += [f"setp.le.s32 p, $24, {32 * number};", "@p bra DONE;"]
        lines += _round(dtype, f"${16 + 4 * number}", number, "$24", "DONE")
    lines += [
        "sub.s32 t0, $24, 64;",
        "sub.s32 t1, $8, $4;",
        f"sub.s32 t1, t1, {COLUMNS_BYTES};",
        "shr.u32 t1, t1, 2;",
    ]
    lines += ["mov.b64 w, $36;", "setp.le.s32 p, t0, 0;", "@p bra DONE;", 'MORE: .pragma "nounroll";']
    lines += ["add.s64 w, w, 128;", f"mov.b32 t2, {NONE};", "setp.lt.s32 p, t1, t0;"]
    lines += ["@p ld.global.b32 t2, [w + 128];", "bar.warp.sync 0xffffffff;", "st.shared.b32 [$8], t2;"]
    lines += ["bar.warp.sync 0xffffffff;", *_round(dtype, "t2", 0, "t0", "DONE")]
    lines += [
        "sub.s32 t0, t0, 32;",
        "setp.gt.s32 p, t0, 0;",
        "@p bra MORE;",
        "DONE: bar.warp.sync 0xffffffff;",
    ]
    names = [
        f"{letter}{i}"
        for letter, count in (("a", 4), ("b", 4), ("c", 6), ("s", 2), ("t", 3))
        for i in range(count)
    ]
    head = f"{{ .reg .pred p; .reg .b64 w; .reg .b16 l, h; .reg .f32 f0, f1; .reg .b32 {', '.join(names)};\n"
    return head + "\n".join(lines) + " }"


GATHER_CONSTRAINTS = ",".join(["=&f"] * 4 + ["r"] * 28 + ["f"] * 4 + ["l"] * 4)

# $4: a lane's place, $8..11: its sums
GIVE = """st.shared.v4.f32 [$4], {$8, $9, $10, $11};
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"""
GIVE_CONSTRAINTS = ",".join(["=r"] * 4 + ["r"] * 4 + ["f"] * 4)
FETCH = "ld.shared.f32 $0, [$1];"
