"""What `wgmma.py` is made of: the PTX that turns words into scaled weights, and residuals into addends of weights.

A *piece* is a quarter of a block: 16 rows x 64 columns a tile, four planes (`words.py`), of which a lane has 16 registers.
`piece_asm` is made from the text of `grid_dequant_ptx` and `codebook_dequant_ptx`: the lines of other planes are dropped,
and one more multiplication a pair of weights puts the scale of their group on them, so that one accumulator takes a whole
row. With residuals the multiplication becomes a fused one: the residual, or zero, is its addend, and costs nothing but its
load.

The weight is rounded to the type of the activations once, as in the plain matrix. Scales of a grid stay below 128.
"""

import re
from functools import cache

import torch

from requant_kernels.common.bit_layout import (
    GRID_STEP,
    STEPS_PER_ASM,
    codebook_dequant_ptx,
    grid_dequant_ptx,
    zero_bias,
)

PIECE = 4  # planes of a piece: 64 columns of 16 bits are one line of swizzled shared memory
PIECES = 4  # of a block
TILE_BYTES = 2048  # of the residuals of a tile's piece in shared memory
UNASKED = 48 << 10  # bytes of shared memory that a program gets without asking for more


@cache
def piece_asm(
    kind: str, bits: int, dtype: str, groups: int, piece: int, *, zeros: bool = False, sparse: bool = False
) -> str:
    """The four planes of a piece, scaled; `groups` scales a block, 0: the kernel scales rows at its end.

    Operands: PIECE outputs, `bits` words, a codebook's tables, the pairs (scale, scale) of this piece's groups, where there
    are `zeros` the pairs -(zero + bias) * UNIT of them (one pair where a row has one), with `sparse` PIECE residuals.
    """
    half, quarter = divmod(piece, PIECES // 2)
    own = max(1, groups // PIECES)  # groups of this piece
    if kind == "codebook":
        text, inputs, scales = codebook_dequant_ptx(bits, half), bits + (1 << (bits - 1)), 0
    else:
        text = grid_dequant_ptx(bits, dtype, max(1, groups) if zeros else 0, half)
        inputs, scales = bits, own if groups else 0
    zero_at, real = PIECE + inputs + scales, dtype.replace("fp", "f")
    residual_at = zero_at + (own if zeros else 0)

    def operand(match: re.Match[str]) -> str:
        """An input of the half's text, counted as here."""
        index = int(match[1]) - STEPS_PER_ASM
        if index < inputs:
            return f"${PIECE + index}"
        group = index - inputs - (quarter * own if groups > 2 else 0)
        return f"${zero_at + (group if 0 <= group < own else 0)}"  # of a plane that is dropped: any will do

    head, body = text[: text.index("\n")], text[text.index("\n") + 1 : text.rindex("}")]
    registers, lines = re.findall(r"%\w+", head), []
    for line in body.strip().split("\n"):
        found = re.match(r"(\S+) \$([0-7]), ", line)
        if found is None:
            lines.append(re.sub(r"\$(\d+)", operand, line))
            continue
        output = int(found[2]) - PIECE * quarter
        if not 0 <= output < PIECE:
            continue
        target = f"s{output}" if scales or sparse else f"${output}"
        lines.append(f"{found[1]} {target}, " + re.sub(r"\$(\d+)", operand, line[found.end() :]))
        scale = f"${PIECE + inputs + output * own // PIECE}"
        if scales and sparse:
            lines.append(f"fma.rn.{real}x2 ${output}, {target}, {scale}, ${residual_at + output};")
        elif scales:
            lines.append(f"mul.rn.{real}x2 ${output}, {target}, {scale};")
        elif sparse:
            lines.append(f"add.rn.{real}x2 ${output}, {target}, ${residual_at + output};")
    if scales or sparse:
        registers += [f"s{i}" for i in range(PIECE)]
    return "{ .reg .b32 " + ", ".join(registers) + ";\n" + "\n".join(lines) + " }"


@cache
def pair_asm(dtype: str, factor: float, addend: float) -> str:
    """Two float16 in a register, `$2` -> `factor * x + addend` of the lower, twice, and of the upper, twice, as `dtype`."""
    if dtype == "fp16":
        f, c = (int(torch.tensor(v).half().view(torch.int16)) & 0xFFFF for v in (factor, addend))
        return f"""{{ .reg .b32 l, h, f, c; mov.b32 f, 0x{f:04x}{f:04x}; mov.b32 c, 0x{c:04x}{c:04x};
prmt.b32 l, $2, $2, 0x1010; prmt.b32 h, $2, $2, 0x3232;
fma.rn.f16x2 $0, l, f, c; fma.rn.f16x2 $1, h, f, c; }}"""
    f, c = (f"0f{int(torch.tensor(v).view(torch.int32)) & 0xFFFFFFFF:08X}" for v in (factor, addend))
    return f"""{{ .reg .b16 l, h; .reg .f32 a, b;
mov.b32 {{l, h}}, $2; cvt.f32.f16 a, l; cvt.f32.f16 b, h;
fma.rn.f32 a, a, {f}, {c}; fma.rn.f32 b, b, {f}, {c};
cvt.rn.bf16x2.f32 $0, a, a; cvt.rn.bf16x2.f32 $1, b, b; }}"""


def reserve_asm(tiles: int) -> str:
    """Shared memory for a piece's residuals of so many tiles; its address. Beside Triton's own, which stays aligned."""
    return f"{{ .shared .align 1024 .b8 residuals[{tiles * TILE_BYTES}];\n mov.u32 $0, residuals; }}"


def stages(tokens: int, tiles: int, *, sparse: bool) -> int:
    """Blocks of activations that shared memory has room for; two are used.

    Triton asks for more than UNASKED bytes where its own are more, and does not know of `reserve_asm`'s beside them. Where
    only both together are more, its own are made more, or the launch would be refused.
    """
    block, reserved = 512 * tokens, TILE_BYTES * tiles if sparse else 0
    barriers = 16
    return 2 if not UNASKED - reserved < 2 * block + barriers <= UNASKED else UNASKED // block + 1


_QUADS = [f"{{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}" for i in range(PIECE)]
# $1: this lane's 16 bytes of every plane
CLEAR = (
    "{ .reg .b32 z; mov.b32 z, 0;\n"
    + "\n".join(f"st.shared.v4.b32 [$1 + {512 * i}], {{z, z, z, z}};" for i in range(PIECE))
    + " mov.b32 $0, 0; }"
)
# $1: where an entry belongs in shared memory, $2: its piece, $3: this piece, $4: the entry, its value below
PUT = """{ .reg .pred p; .reg .b16 l, h; setp.eq.s32 p, $2, $3;
mov.b32 {l, h}, $4; @p st.shared.b16 [$1], l; mov.b32 $0, 0; }"""
# what a block has beyond two rounds. $1: all entries, $2: the index of this lane's first one, $3: the end, $4: the tile's
# place in shared memory, $5: this piece, $6: a mask of the value. Ends what `PUT` began: values are there for every lane to
# take, or zeros, before another lane puts a value of the next piece into the same place
PUT_MORE = """{ .reg .pred p; .reg .b16 l, h; .reg .b32 i, o, e; .reg .b64 a; add.s32 i, $2, 64;
MORE: .pragma "nounroll"; setp.ge.s32 p, i, $3; @p bra DONE;
mad.wide.s32 a, i, 4, $1; ld.global.b32 e, [a]; shr.s32 o, e, 26; setp.eq.s32 p, o, $5;
shr.u32 o, e, 15; and.b32 o, o, 0x7FE; add.s32 o, o, $4;
and.b32 e, e, $6; mov.b32 {l, h}, e; @p st.shared.b16 [o], l; add.s32 i, i, 32; bra MORE;
DONE: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"""
_ROUND = "{ .reg .f32 v; cvt.f32.f16 v, l; cvt.rn.bf16.f32 l, v; }"
PUT_MORE_BF16 = PUT_MORE.replace("mov.b32 {l, h}, e;", "mov.b32 {l, h}, e; " + _ROUND)
TO_BF16 = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; " + _ROUND + " mov.b32 $0, {l, h}; }"
# $16: this lane's 16 bytes of every plane
TAKE = "\n".join(
    [f"ld.shared.v4.b32 {quad}, [$16 + {512 * i}];" for i, quad in enumerate(_QUADS)]
    + ["bar.warp.sync 0xffffffff;"]
)
TAKE_CONSTRAINTS = ",".join(["=&r"] * 16 + ["r"])


def decoding(
    kind: str, bits: int, dtype: str, group: int, *, zeros: bool = False, sparse: bool = False
) -> dict[str, object]:
    """The decoding constants of a launch; `group` 0: one scale a row, which residuals bring into the loop."""
    tables = 1 << (bits - 1) if kind == "codebook" else 0
    groups = max(1, 256 // group) if group else int(sparse and kind == "grid")
    own = max(1, groups // PIECES)
    inputs = bits + tables + (own if groups else 0) + (own if zeros else 0) + (PIECE if sparse else 0)
    unit = GRID_STEP[dtype]
    return {
        "TEXTS": tuple(
            piece_asm(kind, bits, dtype, groups, piece, zeros=zeros, sparse=sparse) for piece in range(PIECES)
        ),
        "CONSTRAINTS": ",".join(["=r"] * PIECE + ["r"] * inputs),
        "PAIRS": (pair_asm(dtype, 1 / unit, 0.0), pair_asm(dtype, -unit, -unit * zero_bias(bits, dtype))),
        "CODEBOOK": kind == "codebook",
        "BITS": bits,
        "TABLES": tables,
        "GROUP": group,
        "UNIT": unit,
    }
