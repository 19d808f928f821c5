"""The PTX of `staged.py`: products of a warp, activations to shared memory column by column, and residuals from there.

A *column* of shared memory is 16 bytes: the activations of eight tokens. That is a row of an 8 x 8 matrix for `stmatrix` and
`ldmatrix`, and both turn it over: the registers of a right operand, as a warp loaded them, become columns, and 32 columns
from anywhere become right operands again. So one instruction gathers 32 activations of eight tokens.

A residual of row r takes position r of the inner dimension of a product: the left operand is then a diagonal, and
`sum over slots of value[row, slot] x[column[row, slot], token]` is one product of tensor cores for every slot of 16 rows.

    column c stands at c ^ (c >> 2 & 6), so that the eight columns of a register of a right operand, 8 t + e, meet no other
    in a bank

Every text is for the four registers that a lane has of `[warp, lane, 4]` (`pack=4`).
"""

from functools import cache

from requant_kernels.pieces import pair_asm

COLUMN_BYTES = 16
RESULT_BYTES = 512  # of a warp: 16 rows x 8 tokens, float32


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
    """Two zero points in 32 bits -> the pairs that `grid_asm` takes, in the order of words."""
    text = pair_asm(dtype, factor, addend).replace("$2", "$4")
    return text[: text.rindex("}")] + " mov.b32 $2, $0; mov.b32 $3, $1; }"


ZERO_CONSTRAINTS = ",".join(["=&r"] * 4 + ["r"] * 4)

# all of Triton's own shared memory: `staged.py` asks for one piece
BASE = "mov.u32 $0, global_smem;"
# $4: the place of this lane's column, $8..11: the activations of a slab
STAGE = """{ .reg .b32 z; mov.b32 z, 0;
stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$4], {$8, $9, $10, $11};
mov.b32 $0, z; mov.b32 $1, z; mov.b32 $2, z; mov.b32 $3, z; }"""
STAGE_CONSTRAINTS = ",".join(["=r"] * 4 + ["r"] * 8)


@cache
def chunk_asm(dtype: str) -> str:
    """Sums + a chunk of residuals. Operands: the places of this lane's columns, a slot each; the diagonals' values of row g
    and slots 0..3, of row g + 8, of both for slots 4..7; sums."""
    lines = []
    for slot in range(4):
        b = [f"b{slot}_{i}" for i in range(4)]
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{', '.join(b)}}}, [${4 + slot}];")
    for slot in range(4):
        for half in range(2):
            a = [f"${8 + 8 * half + slot}", "z", "z", f"${12 + 8 * half + slot}"]
            first = slot == half == 0
            b = [f"b{slot}_{2 * half + i}" for i in range(2)]
            lines.append(_product(dtype, a, b, _names(24) if first else _names(0)))
    registers = ["z"] + [f"b{slot}_{i}" for slot in range(4) for i in range(4)]
    return f"{{ .reg .b32 {', '.join(registers)};\nmov.b32 z, 0;\n" + "\n".join(lines) + " }"


CHUNK_CONSTRAINTS = ",".join(["=f"] * 4 + ["r"] * 20 + ["f"] * 4)

# $4: a lane's place, $8..11: its sums
GIVE = """st.shared.v4.f32 [$4], {$8, $9, $10, $11};
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"""
GIVE_CONSTRAINTS = ",".join(["=r"] * 4 + ["r"] * 4 + ["f"] * 4)
FETCH = "ld.shared.f32 $0, [$1];"
