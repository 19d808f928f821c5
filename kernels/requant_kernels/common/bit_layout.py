"""Where every bit of a code lives in `packed_codes`, and the PTX that dequantizes packed codes in registers.

A *k_tile* is 16 rows x 256 columns of W, what a warp dequantizes at a time: 16 steps of `mma.m16n8k16` with W as the left
operand. Of that operand lane `4 g + t` holds rows g and g + 8 (`rh`), and of a step's 16 columns 2t and 2t + 1 (`e`) in both
halves of eight (`kh`). Which column of W a position along K means is free, as long as the activations follow. Step j is

    column = 32 (j // 2) + 8 t + 4 (j % 2) + 2 kh + e          j = 0..15

so a lane reads eight consecutive activations at once, and two steps (`mma_k32`) cover 32 consecutive columns, the finest
group. The 32 codes of one (row, t, kh), 2 columns x 16 steps, fill exactly `bits` 32-bit words, and a lane's 16-byte load is
(kh, rh) of one word: already the registers of the A fragment, without shared memory or shuffles.

Within a word there are two orders, each made for its decoder:
- grid: a field at bit s of a 16-bit half is an fp16 subnormal, so `(word & mask) * 2^(15-s) - zero` is the exact weight: one
  LOP3 and one HFMA2 for two weights. Of 5 to 7 bits those beyond the first 4 lie in other words and are rotated into place.
  Eight bits are bytes, which PRMT puts under the exponent of 1024.
- codebook: a nibble is a selector of PRMT, a lookup in 8 bytes: four lookups give four high bytes, four more the low bytes,
  two more interleave them into four exact fp16 (or bf16) levels.

    a word of a 2-bit grid (both halves alike)       bit   15 14  13 12  11 10  9 8  7 6  5 4  3 2  1 0
                                                     step    7      5      3     1    6    4    2    0

    a word of a 3-bit grid: five steps in each half, two of them rotated by 9 bits; bit 15 of the three words is step 15
                                                     bit   15   14 13 12  11 10 9  8 7 6  5 4 3  2 1 0
                                                     step  15       3        1       4      2      0
"""

import struct
from dataclasses import dataclass
from functools import cache

K_TILE = 256  # columns of a k_tile
ROW_TILE = 16  # rows of a k_tile
MMA_STEPS = 16  # of K = 16 in a k_tile
STEPS_PER_ASM = 8  # dequantized by one asm block: more would hold more registers than a warp can spare


@dataclass(frozen=True, kw_only=True)
class Field:
    """`width` bits of a code, from code bit `lsb` on: in `word`, rotated right by `rotate`, at bit `bit` of half e."""

    word: int
    rotate: int
    bit: int
    width: int
    lsb: int

    def position(self, e: int) -> int:
        """First bit in the stored 32-bit word."""
        return (16 * e + self.bit + self.rotate) % 32


@cache
def grid_fields(bits: int) -> tuple[tuple[Field, ...], ...]:
    """The fields of every MMA step of a grid, low bits first."""
    if bits < 5:
        return _single_fields(bits)
    widths = {5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [4, 4]}[bits]
    stride = 16 if bits > 6 else 4  # distance of two steps inside a half
    span = 16 if bits > 6 else 8  # bits of a half that the steps of one rotation use
    shifts = [stride * i for i in range(span // stride)]
    steps: list[list[Field]] = [[] for _ in range(MMA_STEPS)]
    first_word, lsb = 0, 0
    for width in widths:
        rotations = [span * a + width * c for a in range(16 // span) for c in range(stride // width)]
        for step in range(MMA_STEPS):
            group, i = divmod(step, len(shifts))
            word, r = divmod(group, len(rotations))
            steps[step].append(
                Field(word=first_word + word, rotate=rotations[r], bit=shifts[i] + lsb, width=width, lsb=lsb)
            )
        first_word += width
        lsb += width
    return tuple(tuple(fields) for fields in steps)


def _single_fields(bits: int) -> tuple[tuple[Field, ...], ...]:
    """2 to 4 bits: a code is one field; both steps of an mma_k32 have it at the same bit, so one multiplier serves both.

    A half of 16 bits has the fields of the word as it is and those of the word rotated by `rotation`. Three bits leave bit
    15 of every half free: those bits of the three words together are the last step.
    """
    codes_per_half = 16 // bits
    rotation = (codes_per_half + 1) // 2 * bits
    steps: list[tuple[Field, ...]] = []

    def add(word: int, rotate: int, bit: int) -> None:
        steps.append((Field(word=word, rotate=rotate, bit=bit, width=bits, lsb=0),))

    for word in range(bits):
        for i in range(codes_per_half // 2):
            add(word, 0, bits * i)
            add(word, rotation, bits * i)
        if bits == 3 and word == 0:
            add(0, 0, 6)
            add(1, 0, 6)
    if bits == 3:
        add(2, 0, 6)
        steps.append(tuple(Field(word=i, rotate=9 - i, bit=6 + i, width=1, lsb=i) for i in range(3)))
    return tuple(steps)


@cache
def codebook_bit_positions(bits: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """`[e][step][code bit] -> (word, bit)` for 2..4 bits, where nibbles select bytes."""
    table = []
    for e in range(2):
        steps = []
        for step in range(MMA_STEPS):
            nibble = e + 2 * (step % 2)
            if bits == 4:  # two steps a half word; bit 3 of a code is where PRMT's sign mode finds it
                word, half = divmod(step // 2, 2)
                low = [(word, 16 * half + 4 * nibble + c) for c in range(3)]
                steps.append((*low, (word, 8 * nibble + (3 if half else 7))))
                continue
            word, quarter = divmod(step // 2, 4)
            half, high = quarter % 2, quarter // 2
            bit = 16 * half + 4 * nibble
            code = [(word, bit + 2 * high), (word, bit + 2 * high + 1)]
            if bits == 3:
                code.append((2, bit + 2 * word + high))
            steps.append(tuple(code))
        table.append(tuple(steps))
    return tuple(table)


@cache
def bit_positions(format: str, bits: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """`[e][step][code bit] -> (word, bit)`: the whole layout of a k_tile's codes; `format` is "grid" or "codebook"."""
    if format == "codebook" and bits <= 4:
        return codebook_bit_positions(bits)
    if bits == 8:  # bytes: steps 2 w and 2 w + 1 in word w, their two columns side by side
        return tuple(
            tuple(tuple((j // 2, 16 * (j % 2) + 8 * e + c) for c in range(8)) for j in range(MMA_STEPS))
            for e in range(2)
        )
    return tuple(
        tuple(
            tuple((f.word, f.position(e) + c) for f in fields for c in range(f.width))
            for fields in grid_fields(bits)
        )
        for e in range(2)
    )


def flat_bit_positions(format: str, bits: int) -> tuple[int, ...]:
    """`bit_positions` as one tuple of `32 word + bit`, which a kernel can take as a constant."""
    return tuple(
        32 * word + bit for half in bit_positions(format, bits) for step in half for word, bit in step
    )


class _Ptx:
    """Instructions of one asm block in order; every rotation of a word is made once.

    Not `ptx.PtxBuilder`, which imports this module: registers here are numbered through the block, whatever their names.
    """

    def __init__(self, words: dict[int, str]) -> None:
        self.lines: list[str] = []
        self.registers: list[str] = []
        self.rotated: dict[tuple[int, int], str] = {(word, 0): name for word, name in words.items()}

    def new(self, name: str, instruction: str) -> str:
        """Append an instruction whose destination `{d}` is a fresh register `%nameN`."""
        register = f"%{name}{len(self.registers)}"
        self.registers.append(register)
        self.lines.append(instruction.format(d=register))
        return register

    def rotate(self, word: int, amount: int) -> str:
        if (word, amount) not in self.rotated:
            source = self.rotated[word, 0]
            self.rotated[word, amount] = self.new(
                "codes", f"shf.r.wrap.b32 {{d}}, {source}, {source}, {amount};"
            )
        return self.rotated[word, amount]

    def output(self, step: int, instruction: str) -> None:
        """Append the instruction that writes a step's two weights (e = 0 and 1) to its output operand."""
        self.lines.append(instruction.format(d=f"${step}"))

    def text(self) -> str:
        body = "\n".join(self.lines)
        return f"{{ .reg .b32 {', '.join(self.registers)};\n{body} }}"


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
def grid_dequant_ptx(bits: int, dtype: str, groups: int, half: int) -> str:
    """Half of a k_tile's steps, `(code - zero) * GRID_STEP`, from `bits` words; `groups` zero points a k_tile, 0: symmetric.

    Operands: 8 outputs (a step's weights at e = 0 and 1), `bits` words, then for each group of this half (at least one)
    the pair -(zero + zero_bias) * GRID_STEP.

    For every step: mask the field out of both halves of the word (`%field`), which makes two subnormals, and one fused
    multiply-add lifts them to grid steps and subtracts the zero point. A field above the mantissa is shifted down first; a
    code that is wider than the mantissa takes one multiply-add for each of its fields.
    """
    if bits == 8:
        return _byte_dequant_ptx(dtype, groups, half)
    ptx = _Ptx({w: f"${STEPS_PER_ASM + w}" for w in range(bits)})
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
                register = ptx.rotate(f.word, (f.rotate + drop) % 32)
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
                ptx.output(step, line)
            else:
                addend = ptx.new("partial", line)
    return ptx.text()


def zero_bias(bits: int, dtype: str) -> int:
    """What is added to a zero point before it is an operand of `grid_dequant_ptx`: bytes come with the fp16 value 1024."""
    return 1024 if bits == 8 and dtype == "fp16" else 0


def _byte_dequant_ptx(dtype: str, groups: int, half: int) -> str:
    """`grid_dequant_ptx` of 8 bits. PRMT moves two bytes into two halves.

    fp16: under the exponent of 1024, so one multiply-add remains. bf16 has 7 bits of mantissa: one multiply-add a nibble.
    """
    ptx = _Ptx({w: f"${STEPS_PER_ASM + w}" for w in range(8)})
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
            ptx.output(step % STEPS_PER_ASM, f"fma.rn.f16x2 {{d}}, {value}, {multiplier}, {addend};")
            continue
        value = ptx.new("bytes", f"prmt.b32 {{d}}, {word}, 0x0, {selector};")
        for lsb in (0, 4):
            shifted = ptx.new("shifted", f"shr.b32 {{d}}, {value}, {lsb};") if lsb else value
            nibble = ptx.new("nibble", f"and.b32 {{d}}, {shifted}, 0x000f000f;")
            multiplier = ptx.new("scale", f"mov.b32 {{d}}, 0x{_multiplier(dtype, -lsb):08x};")
            line = f"fma.rn.bf16x2 {{d}}, {nibble}, {multiplier}, {addend};"
            if lsb:
                ptx.output(step % STEPS_PER_ASM, line)
            else:
                addend = ptx.new("partial", line)
    return ptx.text()


@cache
def codebook_dequant_ptx(bits: int, half: int) -> str:
    """Half of a k_tile's steps, levels, from `bits` words and a row's byte tables: all high bytes, then all low bytes.

    Operands: 8 outputs (a step's weights at e = 0 and 1), `bits` words, the table registers.

    For every two steps: four nibbles are isolated as a PRMT selector (`%sel`), looked up in the table of high bytes and in
    that of low bytes, and two PRMTs interleave the bytes into two pairs of 16-bit floats. A 4-bit selector reaches only 8
    bytes, so 4-bit codes look up both halves of the table and bit 3, spread over a byte (`%msb`), selects between them.
    """
    tables = [f"${STEPS_PER_ASM + bits + i}" for i in range(1 << (bits - 1))]
    middle = len(tables) // 2
    ptx = _Ptx({w: f"${STEPS_PER_ASM + w}" for w in range(bits)})

    def lookup(name: str, table: list[str], selector: str, mask: str) -> str:
        if bits < 4:
            return ptx.new(name, f"prmt.b32 {{d}}, {table[0]}, {table[-1]}, {selector};")
        low = ptx.new(name, f"prmt.b32 {{d}}, {table[0]}, {table[1]}, {selector};")
        high = ptx.new(name, f"prmt.b32 {{d}}, {table[2]}, {table[3]}, {selector};")
        return ptx.new(name, f"lop3.b32 {{d}}, {mask}, {high}, {low}, 0xCA;")

    def two_steps(selector: str, mask: str, step: int) -> None:
        high = lookup("high", tables[:middle], selector, mask)
        low = lookup("low", tables[middle:], selector, mask)
        ptx.output(step % STEPS_PER_ASM, f"prmt.b32 {{d}}, {low}, {high}, 0x5140;")
        ptx.output(step % STEPS_PER_ASM + 1, f"prmt.b32 {{d}}, {low}, {high}, 0x7362;")

    own = range(half * bits // 2, (half + 1) * bits // 2) if bits != 3 else range(half, half + 1)
    for word in own:
        codes = ptx.rotate(word, 0)
        if bits == 4:
            selector = ptx.new("sel", f"and.b32 {{d}}, {codes}, 0x77777777;")
            shifted = ptx.new("shifted", f"shl.b32 {{d}}, {codes}, 4;")
            for i, (source, shift) in enumerate(((codes, 0), (shifted, 16))):
                mask = ptx.new("msb", f"prmt.b32 {{d}}, {source}, {source}, 0xBA98;")
                chosen = ptx.new("sel", f"shr.b32 {{d}}, {selector}, 16;") if shift else selector
                two_steps(chosen, mask, 4 * word + 2 * i)
            continue
        for high in range(2):
            source = ptx.rotate(word, 2 * high)
            if bits == 2:
                selector = ptx.new("sel", f"and.b32 {{d}}, {source}, 0x33333333;")
            else:  # bit `2 * word + high` of the third word's nibble becomes bit 2 of the selector
                third = ptx.rotate(2, (2 * word + high - 2) % 32)
                third = ptx.new("third", f"and.b32 {{d}}, {third}, 0x44444444;")
                selector = ptx.new("sel", f"lop3.b32 {{d}}, {source}, 0x33333333, {third}, 0xEA;")
            two_steps(selector, "", 8 * word + 4 * high)
            two_steps(ptx.new("sel", f"shr.b32 {{d}}, {selector}, 16;"), "", 8 * word + 4 * high + 2)
    return ptx.text()


def asm_constraints(inputs: int) -> str:
    """Of an asm block with STEPS_PER_ASM registers out and `inputs` in."""
    return ",".join(["=r"] * STEPS_PER_ASM + ["r"] * inputs)


def ptx_float(value: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex().upper()
