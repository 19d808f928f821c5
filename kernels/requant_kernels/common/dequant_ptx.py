"""PTX that dequantizes packed codes in registers, half a k_tile (`bit_layout.py`) at a time.

A block has STEPS_PER_ASM outputs, each with a step's two weights (e = 0 and 1); its inputs are the words of the codes, and
whatever else the format needs. It is returned as a `PtxBuilder`, whose lines `scalar/gemm_sm90_ptx.py` reuses.
"""

from collections.abc import Callable
from functools import cache

from requant_kernels.common.bit_layout import MMA_STEPS, grid_fields
from requant_kernels.common.ptx import PtxBuilder

STEPS_PER_ASM = 8  # steps per asm block: more would need more registers than a warp can spare
MANTISSA_BITS = {"fp16": 10, "bf16": 7}
GRID_STEP = {
    "fp16": 2.0**-9,
    "bf16": 2.0**-10,
}  # the value of one grid step in the output of `grid_dequant_ptx`


def _multiplier(dtype: str, bit: int) -> int:
    """Bits of the pair of floats that scale a subnormal at `bit` to GRID_STEP: 2^(15 - bit), or 2^(123 - bit) in bf16."""
    half = (30 - bit) << 10 if dtype == "fp16" else (250 - bit) << 7
    return half << 16 | half


def _negative_zero_point(dtype: str, zero: int) -> int:
    """Bits of the pair (-zero * GRID_STEP), for a power of two `zero`."""
    exponent = zero.bit_length() - 1
    half = 0x8000 | ((exponent + 6) << 10 if dtype == "fp16" else (exponent + 117) << 7)
    return half << 16 | half


@cache
def grid_dequant_ptx(bits: int, dtype: str, groups: int, half: int) -> PtxBuilder:
    """Half of a k_tile's steps, `(code - zero) * GRID_STEP`, from `bits` words; `groups` zero points per k_tile, 0:
    symmetric.

    Operands: 8 outputs (a step's weights at e = 0 and 1), `bits` words, then for each group of this half (at least one)
    the pair -(zero + zero_bias) * GRID_STEP.

    For every step: mask the field out of both halves of the word (`field`), which gives two subnormals; one fused
    multiply-add scales them to grid steps and subtracts the zero point. A field above the mantissa is shifted down first; a
    code wider than the mantissa takes one multiply-add per field.
    """
    if bits == 8:
        return _byte_dequant_ptx(dtype, groups, half)
    ptx = PtxBuilder()
    rotated = _rotations(ptx, bits)
    mantissa = MANTISSA_BITS[dtype]
    steps = grid_fields(bits)[half * STEPS_PER_ASM : (half + 1) * STEPS_PER_ASM]
    for step, fields in enumerate(steps):
        if groups:
            addend = f"${STEPS_PER_ASM + bits + step * groups // MMA_STEPS}"
        else:
            addend = f"0x{_negative_zero_point(dtype, 1 << (bits - 1)):08x}"
        parts = [fields] if bits <= mantissa else [fields[:1], fields[1:]]
        for i, part in enumerate(parts):
            low, high = part[0], part[-1]
            drop = low.bit if high.bit + high.width > mantissa else 0
            value = ""
            for f in part:
                register = rotated(f.word, (f.rotate + drop) % 32)
                field = ((1 << f.width) - 1) << (f.bit - drop)
                mask = field << 16 | field
                if value:
                    value = ptx.new("field", f"lop3.b32 {{d}}, {register}, 0x{mask:08x}, {value}, 0xEA;")
                else:
                    value = ptx.new("field", f"and.b32 {{d}}, {register}, 0x{mask:08x};")
            multiplier = ptx.new(
                "scale", f"mov.b32 {{d}}, 0x{_multiplier(dtype, low.bit - drop - low.lsb):08x};"
            )
            if not groups and i == 0:
                addend = ptx.new("zero", f"mov.b32 {{d}}, {addend};")
            line = f"fma.rn.{dtype.replace('fp', 'f')}x2 {{d}}, {value}, {multiplier}, {addend};"
            if i == len(parts) - 1:
                ptx.emit(line.format(d=f"${step}"))
            else:
                addend = ptx.new("partial", line)
    return ptx


def zero_bias(bits: int, dtype: str) -> int:
    """Added to a zero point before it is an operand of `grid_dequant_ptx`: bytes come with the fp16 value 1024."""
    return 1024 if bits == 8 and dtype == "fp16" else 0


def _rotations(ptx: PtxBuilder, bits: int) -> Callable[[int, int], str]:
    """`rotated(word, amount)`: the register that holds a word of the codes rotated right; each is computed once."""
    made = {(word, 0): f"${STEPS_PER_ASM + word}" for word in range(bits)}

    def rotated(word: int, amount: int) -> str:
        if (word, amount) not in made:
            source = made[word, 0]
            made[word, amount] = ptx.new("codes", f"shf.r.wrap.b32 {{d}}, {source}, {source}, {amount};")
        return made[word, amount]

    return rotated


def _byte_dequant_ptx(dtype: str, groups: int, half: int) -> PtxBuilder:
    """`grid_dequant_ptx` for 8 bits. PRMT moves two bytes into two halves.

    fp16: under the exponent of 1024, so one multiply-add remains. bf16 has 7 mantissa bits: one multiply-add per nibble.
    """
    ptx = PtxBuilder()
    for step in range(half * STEPS_PER_ASM, (half + 1) * STEPS_PER_ASM):
        word, selector = f"${STEPS_PER_ASM + step // 2}", ("0x4140", "0x4342")[step % 2]
        if groups:
            addend = f"${STEPS_PER_ASM + 8 + step % STEPS_PER_ASM * groups // MMA_STEPS}"
        elif dtype == "fp16":
            addend = ptx.new("zero", "mov.b32 {d}, 0xC080C080;")  # -(1024 + 128) * GRID_STEP, twice
        else:
            addend = ptx.new("zero", f"mov.b32 {{d}}, 0x{_negative_zero_point(dtype, 128):08x};")
        if dtype == "fp16":
            value = ptx.new("bytes", f"prmt.b32 {{d}}, {word}, 0x64646464, {selector};")
            multiplier = ptx.new("scale", "mov.b32 {d}, 0x18001800;")  # GRID_STEP, twice
            ptx.emit(f"fma.rn.f16x2 ${step % STEPS_PER_ASM}, {value}, {multiplier}, {addend};")
            continue
        value = ptx.new("bytes", f"prmt.b32 {{d}}, {word}, 0x0, {selector};")
        for lsb in (0, 4):
            shifted = ptx.new("shifted", f"shr.b32 {{d}}, {value}, {lsb};") if lsb else value
            nibble = ptx.new("nibble", f"and.b32 {{d}}, {shifted}, 0x000f000f;")
            multiplier = ptx.new("scale", f"mov.b32 {{d}}, 0x{_multiplier(dtype, -lsb):08x};")
            line = f"fma.rn.bf16x2 {{d}}, {nibble}, {multiplier}, {addend};"
            if lsb:
                ptx.emit(line.format(d=f"${step % STEPS_PER_ASM}"))
            else:
                addend = ptx.new("partial", line)
    return ptx


@cache
def codebook_dequant_ptx(bits: int, half: int) -> PtxBuilder:
    """Half of a k_tile's steps, levels, from `bits` words and a row's byte tables: all high bytes, then all low bytes.

    Operands: 8 outputs (a step's weights at e = 0 and 1), `bits` words, the table registers.

    For every two steps: four nibbles are isolated as a PRMT selector (`sel`) and looked up in the tables of high bytes and
    of low bytes; two PRMTs interleave the bytes into two pairs of 16-bit floats. A 4-bit selector reaches only 8
    bytes, so 4-bit codes look up both halves of the table and bit 3, replicated over a byte (`msb`), selects between them.
    """
    tables = [f"${STEPS_PER_ASM + bits + i}" for i in range(1 << (bits - 1))]
    middle = len(tables) // 2
    ptx = PtxBuilder()
    rotated = _rotations(ptx, bits)

    def lookup(name: str, table: list[str], selector: str, mask: str) -> str:
        if bits < 4:
            return ptx.new(name, f"prmt.b32 {{d}}, {table[0]}, {table[-1]}, {selector};")
        low = ptx.new(name, f"prmt.b32 {{d}}, {table[0]}, {table[1]}, {selector};")
        high = ptx.new(name, f"prmt.b32 {{d}}, {table[2]}, {table[3]}, {selector};")
        return ptx.new(name, f"lop3.b32 {{d}}, {mask}, {high}, {low}, 0xCA;")

    def two_steps(selector: str, mask: str, step: int) -> None:
        high = lookup("high", tables[:middle], selector, mask)
        low = lookup("low", tables[middle:], selector, mask)
        output = step % STEPS_PER_ASM
        ptx.emit(
            f"prmt.b32 ${output}, {low}, {high}, 0x5140;", f"prmt.b32 ${output + 1}, {low}, {high}, 0x7362;"
        )

    own = range(half * bits // 2, (half + 1) * bits // 2) if bits != 3 else range(half, half + 1)
    for word in own:
        codes = rotated(word, 0)
        if bits == 4:
            selector = ptx.new("sel", f"and.b32 {{d}}, {codes}, 0x77777777;")
            shifted = ptx.new("shifted", f"shl.b32 {{d}}, {codes}, 4;")
            for i, (source, shift) in enumerate(((codes, 0), (shifted, 16))):
                mask = ptx.new("msb", f"prmt.b32 {{d}}, {source}, {source}, 0xBA98;")
                chosen = ptx.new("sel", f"shr.b32 {{d}}, {selector}, 16;") if shift else selector
                two_steps(chosen, mask, 4 * word + 2 * i)
            continue
        for high in range(2):
            source = rotated(word, 2 * high)
            if bits == 2:
                selector = ptx.new("sel", f"and.b32 {{d}}, {source}, 0x33333333;")
            else:  # bit `2 * word + high` of the third word's nibble becomes bit 2 of the selector
                third = rotated(2, (2 * word + high - 2) % 32)
                third = ptx.new("third", f"and.b32 {{d}}, {third}, 0x44444444;")
                selector = ptx.new("sel", f"lop3.b32 {{d}}, {source}, 0x33333333, {third}, 0xEA;")
            two_steps(selector, "", 8 * word + 4 * high)
            two_steps(ptx.new("sel", f"shr.b32 {{d}}, {selector}, 16;"), "", 8 * word + 4 * high + 2)
    return ptx


def dequant_constraints(inputs: int) -> list[str]:
    """The constraints of a block with `inputs` inputs: the words of the codes, and what the format needs."""
    return ["=r"] * STEPS_PER_ASM + ["r"] * inputs
