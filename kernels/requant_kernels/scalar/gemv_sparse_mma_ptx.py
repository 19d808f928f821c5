"""PTX of `gemv_sparse_mma.py`: residuals as an MMA, activations gathered by `ldmatrix`.

Activations in shared memory: a column is 16 bytes, one value for each of eight tokens, which is a row of the 8 x 8 matrices
of `stmatrix` and `ldmatrix`. Both transpose: `stmatrix` turns the registers of a right operand, as a warp loaded them, into
32 columns; `ldmatrix` turns any 32 columns of a k_tile back into right operands. Column 32 s + 8 t + 4 j + 2 kh + e of a
k_tile is stored at 32 s + 16 j + 8 kh + 2 t + e, so that one operand register is 128 contiguous bytes.

Residuals as an MMA: sixteen entries are the inner dimension. Entry i is column i of the left operand, with its value in its
own row and zeros elsewhere; the gathered activations are row i of the right operand. A lane builds its part of the left
operand from the four entries of its columns: of the two values in a register it keeps those in its own rows (HSET2, LOP3).

Tensors of the kernel are `[warp, lane, 4]`, so a block takes four registers of every operand (`pack=4`): those of an operand
`name` are $name0 to $name3; if a lane has a value only once, just the first is used.
"""

from functools import cache

from requant_kernels.common.ptx import (
    SYNCWARP,
    Ptx,
    broadcast_pair_lines,
    inline_ptx,
    mma_k16_types,
    mma_line,
)

X_TILE_BYTES = 4096  # the activations of a warp's k_tile: 256 columns
WARP_BYTES = X_TILE_BYTES + 256  # and 64 entries
NO_ENTRY = 1 << 30  # a zero in the first column


def _four(*names: str, constraint: str = "r") -> dict[str, str]:
    return {f"{name}{i}": constraint for name in names for i in range(4)}


def _mma(dtype: str, sums: str, left: list[str], right: list[str], before: str) -> str:
    d, c = ([f"${name}{i}" for i in range(4)] for name in (sums, before))
    return mma_line("m16n8k16", mma_k16_types(dtype), d, left, right, c)


@cache
def multiply_ptx(dtype: str) -> Ptx:
    """sums = before + 32 columns of weights, two mma_k16, times their activations."""
    x = [f"$x{i}" for i in range(4)]
    even = _mma(dtype, "sums", [f"$even{i}" for i in range(4)], x[:2], "before")
    odd = _mma(dtype, "sums", [f"$odd{i}" for i in range(4)], x[2:], "sums")
    inputs = _four("even", "odd", "x") | _four("before", constraint="f")
    return inline_ptx(
        [even, odd], outputs=_four("sums", constraint="=f"), inputs=inputs, registers={"b32": "unused"}
    )


# sums = before + part * the scales of rows g and g + 8, two float16 in a register
SCALE = inline_ptx(
    """mov.b32 {l, h}, $scales0; cvt.f32.f16 a, l; cvt.f32.f16 b, h;
fma.rn.f32 $sums0, $part0, a, $before0; fma.rn.f32 $sums1, $part1, a, $before1;
fma.rn.f32 $sums2, $part2, b, $before2; fma.rn.f32 $sums3, $part3, b, $before3;""",
    outputs=_four("sums", constraint="=&f"),
    inputs=_four("part", constraint="f") | _four("scales") | _four("before", constraint="f"),
    registers={"b16": "l, h", "f32": "a, b"},
)


def zero_points_ptx(dtype: str, factor: float, addend: float) -> Ptx:
    """Two zero points in a register -> the pairs that `grid_dequant_ptx` takes, in the order of the packed codes."""
    lines, registers = broadcast_pair_lines(dtype, factor, addend)
    text = "\n".join(lines).replace("$pair", "$zeros0").replace("$low", "$pairs0").replace("$high", "$pairs1")
    copies = "mov.b32 $pairs2, $pairs0; mov.b32 $pairs3, $pairs1;"
    return inline_ptx(
        [text, copies], outputs=_four("pairs", constraint="=&r"), inputs=_four("zeros"), registers=registers
    )


_NO_RESULT = "mov.b32 $unused0, 0; mov.b32 $unused1, 0; mov.b32 $unused2, 0; mov.b32 $unused3, 0;"
# activations of 32 columns, transposed; $address0: the destination of this lane's column
STORE_X = inline_ptx(
    """mov.b32 zero, 0;
stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$address0], {$x0, $x1, $x2, $x3};
"""
    + _NO_RESULT.replace(", 0;", ", zero;"),
    outputs=_four("unused", constraint="=r"), inputs=_four("address", "x"), registers={"b32": "zero"},
)  # fmt: skip
STORE_SUMS = inline_ptx(
    f"st.shared.v4.f32 [$address0], {{$sums0, $sums1, $sums2, $sums3}};\n{_NO_RESULT}",
    outputs=_four("unused", constraint="=r"), inputs=_four("address") | _four("sums", constraint="f"),
)  # fmt: skip


def _gather_round(dtype: str, entry: str, number: int, count: str) -> list[str]:
    """32 entries, one per lane in register `entry` and all in shared memory; jumps to DONE once `count`
    entries are multiplied."""
    # the address of the entry's column, from the bits of its index: mma_k16 << 8, t, kh, e
    lines = [
        f"shr.u32 b0, {entry}, 16;", "and.b32 b0, b0, 0xF00;", f"shr.u32 b1, {entry}, 14;",
        "lop3.b32 b0, b1, 0x60, b0, 0xEA;", f"shr.u32 b1, {entry}, 11;", "lop3.b32 b0, b1, 0x80, b0, 0xEA;",
        f"shr.u32 b1, {entry}, 12;", "lop3.b32 b0, b1, 0x10, b0, 0xEA;", "add.u32 b0, b0, $x_smem0;",
        # right operands: the activations of 32 columns
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {b0, b1, b2, b3}, [b0];",
    ]  # fmt: skip
    for half in range(2):
        if half:
            lines += [f"setp.le.s32 p, {count}, {32 * number + 16};", "@p bra DONE;"]
        for part in range(
            2
        ):  # the entries of columns 2 t and 2 t + 1 of the left operand, then those 8 further
            offset = 128 * number + 64 * half + 32 * part
            # two entries: values in c2 or c3, the index bits that give the row in c4
            lines += [
                f"ld.shared.v2.b32 {{c0, c1}}, [$load_at0 + {offset}];", f"prmt.b32 c{2 + part}, c0, c1, 0x5410;",
                "prmt.b32 c4, c0, c1, 0x7632;", "and.b32 c4, c4, 0x00E200E2;",
            ]  # fmt: skip
            if dtype == "bf16":
                lines += [
                    f"mov.b32 {{l, h}}, c{2 + part};", "cvt.f32.f16 f0, l;", "cvt.f32.f16 f1, h;",
                    f"cvt.rn.bf16x2.f32 c{2 + part}, f1, f0;",
                ]  # fmt: skip
            # keep a value only in its row: this lane's row g, then g + 8
            for row in range(2):
                lines += [
                    f"set.eq.u32.f16x2 c5, c4, row{row};",
                    f"and.b32 a{2 * part + row}, c5, c{2 + part};",
                ]
        lines.append(
            _mma(dtype, "sums", [f"a{i}" for i in range(4)], [f"b{2 * half}", f"b{2 * half + 1}"], "sums")
        )
    return lines


@cache
def gather_ptx(dtype: str) -> Ptx:
    """sums = before + the residuals of a k_tile.

    Operands: the shared address of the warp's activations; where this lane stores its entry, and where it loads those of its
    columns of the left operand; the entries of the first two rounds; the number of entries; row g in both halves, encoded as
    in an index; sums; the global address of this lane's first entry. Most k_tiles have less than 64 entries; others loop.
    """
    lines = [f"mov.b32 $sums{i}, $before{i};" for i in range(4)]
    # the row bits of an index are 0xE2: g above four fields, rh (8 rows further) above one
    lines += ["mov.b32 row0, $row0;", f"or.b32 row1, row0, {0x2 << 16 | 0x2};"]
    lines += ["st.shared.b32 [$store_at0], $first0;", "st.shared.b32 [$store_at0 + 128], $second0;", SYNCWARP]
    for number, entry in enumerate(("$first0", "$second0")):
        lines += [f"setp.le.s32 p, $count0, {32 * number};", "@p bra DONE;"]
        lines += _gather_round(dtype, entry, number, "$count0")
    # left: entries beyond 64; lane: this thread's, from where it stores its entry
    lines += [
        "sub.s32 left, $count0, 64;", "sub.s32 lane, $store_at0, $x_smem0;", f"sub.s32 lane, lane, {X_TILE_BYTES};",
        "shr.u32 lane, lane, 2;", "mov.b64 address, $entries0;", "setp.le.s32 p, left, 0;", "@p bra DONE;",
        'MORE: .pragma "nounroll";', "add.s64 address, address, 128;", f"mov.b32 entry, {NO_ENTRY};",
        "setp.lt.s32 p, lane, left;", "@p ld.global.b32 entry, [address + 128];", SYNCWARP,
        "st.shared.b32 [$store_at0], entry;", SYNCWARP, *_gather_round(dtype, "entry", 0, "left"),
        "sub.s32 left, left, 32;", "setp.gt.s32 p, left, 0;", "@p bra MORE;",
        f"DONE: {SYNCWARP}",
    ]  # fmt: skip
    fragments = [f"{name}{i}" for name, count in (("a", 4), ("b", 4), ("c", 6)) for i in range(count)]
    inputs = _four("x_smem", "store_at", "load_at", "first", "second", "count", "row")
    inputs |= _four("before", constraint="f") | _four("entries", constraint="l")
    return inline_ptx(
        lines, outputs=_four("sums", constraint="=&f"), inputs=inputs,
        registers={
            "pred": "p", "b64": "address", "b16": "l, h", "f32": "f0, f1",
            "b32": [*fragments, "row0", "row1", "left", "lane", "entry"],
        },
    )  # fmt: skip
