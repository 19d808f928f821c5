"""Where every bit of a code lives in the kernels' words, and the PTX that turns words into weights.

A *block* is 16 rows x 256 columns. `mma.m16n8k16` wants from lane `4 g + t` the weights of rows g and g + 8 (`rh`) at
columns 2t, 2t + 1 (`e`) of both halves (`kh`) of a 16-column plane. We choose which matrix column meets which plane:

    column in block = 32 (j // 2) + 8 t + 4 (j % 2) + 2 kh + e          j = plane, 0..15

so that a lane reads eight neighbouring activations at once, and so that two planes cover 32 neighbouring columns, which
is the finest group. The 32 codes of one (row, t, kh), 2 columns x 16 planes, fill exactly `bits` 32-bit words: one lane
loads 16 bytes (rh, kh) of each word, already in the registers in which the tensor cores want them. Nothing moves
between lanes.

Inside a word, two orders, each for its decoder:
- grid: bit s of a 16-bit half is bit s of an fp16 subnormal, so `(word & mask) * 2^(15-s) - zero` is the weight: one
  LOP3 and one HFMA2 for two weights. Bits 2..1 above 2 (or 4) live in words of their own and are rotated into place.
  Eight bits are plain bytes, which PRMT puts under the exponent of 1024.
- codebook: a nibble is a selector of PRMT, a byte lookup in 8 bytes: four lookups give four high bytes, four more the
  low bytes, two more weave them into four exact fp16 (or bf16) levels.
"""

import struct
from dataclasses import dataclass
from functools import cache

PLANES = 16
HALF = 8  # planes that one asm block makes: more would hold more registers than a warp has to spare
BLOCK = 256  # columns of a block
ROWS = 16  # rows of a block


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
    """The fields of every plane, low bits first."""
    if bits < 5:
        return _paired_fields(bits)
    widths = {5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [4, 4]}[bits]
    stride = 16 if bits > 6 else 4  # distance of two planes inside a half
    span = 16 if bits > 6 else 8  # bits of a half that planes of one rotation take
    shifts = [stride * i for i in range(span // stride)]
    planes: list[list[Field]] = [[] for _ in range(PLANES)]
    first_word, lsb = 0, 0
    for width in widths:
        rotations = [span * a + width * c for a in range(16 // span) for c in range(stride // width)]
        for plane in range(PLANES):
            group, i = divmod(plane, len(shifts))
            word, r = divmod(group, len(rotations))
            planes[plane].append(
                Field(word=first_word + word, rotate=rotations[r], bit=shifts[i] + lsb, width=width, lsb=lsb)
            )
        first_word += width
        lsb += width
    return tuple(tuple(fields) for fields in planes)


def _paired_fields(bits: int) -> tuple[tuple[Field, ...], ...]:
    """2 to 4 bits: both planes of a pair at one bit of their halves, so that one factor lifts both.

    A half of 16 bits has the fields of one rotation and, moved down by `turn`, those of another. Three bits leave bit 15
    of every half: the three words together hold the last plane there.
    """
    a_half = 16 // bits
    turn = (a_half + 1) // 2 * bits
    planes: list[tuple[Field, ...]] = []

    def add(word: int, rotate: int, bit: int) -> None:
        planes.append((Field(word=word, rotate=rotate, bit=bit, width=bits, lsb=0),))

    for word in range(bits):
        for i in range(a_half // 2):
            add(word, 0, bits * i)
            add(word, turn, bits * i)
        if bits == 3 and word == 0:
            add(0, 0, 6)
            add(1, 0, 6)
    if bits == 3:
        add(2, 0, 6)
        planes.append(tuple(Field(word=i, rotate=9 - i, bit=6 + i, width=1, lsb=i) for i in range(3)))
    return tuple(planes)


@cache
def codebook_positions(bits: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """`[e][plane][code bit] -> (word, bit)` for 2..4 bits, where nibbles select bytes."""
    table = []
    for e in range(2):
        planes = []
        for plane in range(PLANES):
            nibble = e + 2 * (plane % 2)
            if bits == 4:  # two planes of a half word; bit 3 of a code where PRMT's sign mode finds it
                word, half = divmod(plane // 2, 2)
                low = [(word, 16 * half + 4 * nibble + c) for c in range(3)]
                planes.append((*low, (word, 8 * nibble + (3 if half else 7))))
                continue
            word, quarter = divmod(plane // 2, 4)
            half, high = quarter % 2, quarter // 2
            at = 16 * half + 4 * nibble
            code = [(word, at + 2 * high), (word, at + 2 * high + 1)]
            if bits == 3:
                code.append((2, at + 2 * word + high))
            planes.append(tuple(code))
        table.append(tuple(planes))
    return tuple(table)


@cache
def bit_positions(kind: str, bits: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """`[e][plane][code bit] -> (word, bit)`: the whole layout of a block's codes."""
    if kind == "codebook" and bits <= 4:
        return codebook_positions(bits)
    if bits == 8:  # bytes: planes 2 w and 2 w + 1 in word w, their two columns side by side
        return tuple(
            tuple(tuple((p // 2, 16 * (p % 2) + 8 * e + c) for c in range(8)) for p in range(PLANES))
            for e in range(2)
        )
    return tuple(
        tuple(
            tuple((f.word, f.position(e) + c) for f in fields for c in range(f.width))
            for fields in grid_fields(bits)
        )
        for e in range(2)
    )


def flat_positions(kind: str, bits: int) -> tuple[int, ...]:
    """`bit_positions` as one tuple of `32 word + bit`, what a kernel can take as a constant."""
    return tuple(
        32 * word + bit for half in bit_positions(kind, bits) for plane in half for word, bit in plane
    )


class _Ptx:
    """Lines of one asm block; rotated words are made once."""

    def __init__(self, inputs: dict[int, str]) -> None:
        self.lines: list[str] = []
        self.registers: list[str] = []
        self.rotated: dict[tuple[int, int], str] = {(word, 0): name for word, name in inputs.items()}

    def new(self, text: str) -> str:
        """One instruction whose destination `{d}` is a fresh register."""
        name = f"t{len(self.registers)}"
        self.registers.append(name)
        self.lines.append(text.format(d=name))
        return name

    def rotate(self, word: int, amount: int) -> str:
        if (word, amount) not in self.rotated:
            source = self.rotated[word, 0]
            self.rotated[word, amount] = self.new(f"shf.r.wrap.b32 {{d}}, {source}, {source}, {amount};")
        return self.rotated[word, amount]

    def give(self, plane: int, text: str) -> None:
        """One instruction that leaves a plane's weights at e = 0 and 1 in an output."""
        self.lines.append(text.format(d=f"${plane}"))

    def text(self) -> str:
        body = "\n".join(self.lines)
        return f"{{ .reg .b32 {', '.join(self.registers)};\n{body} }}"


MANTISSA = {"fp16": 10, "bf16": 7}
UNIT = {"fp16": 2.0**-9, "bf16": 2.0**-10}  # what one step of a grid is worth after `grid_asm`


def _multiplier(dtype: str, bit: int) -> int:
    """Bits of the pair of floats that lift a subnormal at `bit` to UNIT: 2^(15 - bit), or 2^(123 - bit) in bf16."""
    half = (30 - bit) << 10 if dtype == "fp16" else (250 - bit) << 7
    return half << 16 | half


def _unit_zero(dtype: str, zero: int) -> int:
    """Bits of the pair (-zero * UNIT), for a power of two `zero`."""
    exponent = zero.bit_length() - 1
    half = 0x8000 | ((exponent + 6) << 10 if dtype == "fp16" else (exponent + 117) << 7)
    return half << 16 | half


@cache
def grid_asm(bits: int, dtype: str, groups: int, half: int) -> str:
    """Half of a block's planes, `(code - zero) * UNIT`, from `bits` words; `groups` zero points a block, 0 for symmetric.

    Operands: 8 outputs (a plane's weights at e = 0 and 1), `bits` words, then for each group of this half (one at
    least) the pair -(zero + zero_bias) * UNIT.
    """
    if bits == 8:
        return _bytes_asm(dtype, groups, half)
    ptx = _Ptx({w: f"${HALF + w}" for w in range(bits)})
    room = MANTISSA[dtype]
    for plane, fields in enumerate(grid_fields(bits)[half * HALF : (half + 1) * HALF]):
        if groups:
            addend = f"${HALF + bits + plane * groups // PLANES}"
        else:
            addend = f"0x{_unit_zero(dtype, 1 << (bits - 1)):08x}"
        pieces = [fields] if bits <= room else [fields[:1], fields[1:]]
        for i, piece in enumerate(pieces):
            low, high = piece[0], piece[-1]
            drop = low.bit if high.bit + high.width > room else 0
            value = ""
            for f in piece:
                register = ptx.rotate(f.word, (f.rotate + drop) % 32)
                half = ((1 << f.width) - 1) << (f.bit - drop)
                mask = half << 16 | half
                if value:
                    value = ptx.new(f"lop3.b32 {{d}}, {register}, 0x{mask:08x}, {value}, 0xEA;")
                else:
                    value = ptx.new(f"and.b32 {{d}}, {register}, 0x{mask:08x};")
            multiplier = ptx.new(f"mov.b32 {{d}}, 0x{_multiplier(dtype, low.bit - drop - low.lsb):08x};")
            if not groups and i == 0:
                addend = ptx.new(f"mov.b32 {{d}}, {addend};")
            line = f"fma.rn.{dtype.replace('fp', 'f')}x2 {{d}}, {value}, {multiplier}, {addend};"
            if i == len(pieces) - 1:
                ptx.give(plane, line)
            else:
                addend = ptx.new(line)
    return ptx.text()


def zero_bias(bits: int, dtype: str) -> int:
    """What is added to a zero point before it becomes an operand of `grid_asm`: bytes ride on the fp16 of 1024."""
    return 1024 if bits == 8 and dtype == "fp16" else 0


def _bytes_asm(dtype: str, groups: int, half: int) -> str:
    """`grid_asm` of 8 bits: PRMT puts two bytes into two halves, in fp16 under the exponent of 1024."""
    ptx = _Ptx({w: f"${HALF + w}" for w in range(8)})
    for plane in range(half * HALF, (half + 1) * HALF):
        word, selector = f"${HALF + plane // 2}", ("0x4140", "0x4342")[plane % 2]
        if groups:
            addend = f"${HALF + 8 + plane % HALF * groups // PLANES}"
        elif dtype == "fp16":
            addend = ptx.new("mov.b32 {d}, 0xC080C080;")  # -(1024 + 128) * UNIT, twice
        else:
            addend = ptx.new(f"mov.b32 {{d}}, 0x{_unit_zero(dtype, 128):08x};")
        if dtype == "fp16":
            value = ptx.new(f"prmt.b32 {{d}}, {word}, 0x64646464, {selector};")
            unit = ptx.new("mov.b32 {d}, 0x18001800;")  # UNIT, twice
            ptx.give(plane % HALF, f"fma.rn.f16x2 {{d}}, {value}, {unit}, {addend};")
            continue
        value = ptx.new(f"prmt.b32 {{d}}, {word}, 0x0, {selector};")
        for lsb in (0, 4):
            shifted = ptx.new(f"shr.b32 {{d}}, {value}, {lsb};") if lsb else value
            nibble = ptx.new(f"and.b32 {{d}}, {shifted}, 0x000f000f;")
            multiplier = ptx.new(f"mov.b32 {{d}}, 0x{_multiplier(dtype, -lsb):08x};")
            line = f"fma.rn.bf16x2 {{d}}, {nibble}, {multiplier}, {addend};"
            if lsb:
                ptx.give(plane % HALF, line)
            else:
                addend = ptx.new(line)
    return ptx.text()


@cache
def codebook_asm(bits: int, half: int) -> str:
    """Half of a block's planes, levels, from `bits` words and a row's byte tables: all high bytes, all low bytes.

    Operands: 8 outputs (a plane's weights at e = 0 and 1), `bits` words, the table words.
    """
    tables = [f"${HALF + bits + i}" for i in range(1 << (bits - 1))]
    middle = len(tables) // 2
    ptx = _Ptx({w: f"${HALF + w}" for w in range(bits)})

    def lookup(table: list[str], selector: str, mask: str) -> str:
        if bits < 4:
            return ptx.new(f"prmt.b32 {{d}}, {table[0]}, {table[-1]}, {selector};")
        low = ptx.new(f"prmt.b32 {{d}}, {table[0]}, {table[1]}, {selector};")
        high = ptx.new(f"prmt.b32 {{d}}, {table[2]}, {table[3]}, {selector};")
        return ptx.new(f"lop3.b32 {{d}}, {mask}, {high}, {low}, 0xCA;")

    def weave(selector: str, mask: str, plane: int) -> None:
        high, low = lookup(tables[:middle], selector, mask), lookup(tables[middle:], selector, mask)
        ptx.give(plane % HALF, f"prmt.b32 {{d}}, {low}, {high}, 0x5140;")
        ptx.give(plane % HALF + 1, f"prmt.b32 {{d}}, {low}, {high}, 0x7362;")

    own = range(half * bits // 2, (half + 1) * bits // 2) if bits != 3 else range(half, half + 1)
    for word in own:
        register = ptx.rotate(word, 0)
        if bits == 4:
            selector = ptx.new(f"and.b32 {{d}}, {register}, 0x77777777;")
            shifted = ptx.new(f"shl.b32 {{d}}, {register}, 4;")
            for i, (source, shift) in enumerate(((register, 0), (shifted, 16))):
                mask = ptx.new(f"prmt.b32 {{d}}, {source}, {source}, 0xBA98;")
                weave(
                    ptx.new(f"shr.b32 {{d}}, {selector}, 16;") if shift else selector, mask, 4 * word + 2 * i
                )
            continue
        for high in range(2):
            source = ptx.rotate(word, 2 * high)
            if bits == 2:
                selector = ptx.new(f"and.b32 {{d}}, {source}, 0x33333333;")
            else:  # bit `2 * word + high` of the nibble comes to bit 2
                third = ptx.rotate(2, (2 * word + high - 2) % 32)
                third = ptx.new(f"and.b32 {{d}}, {third}, 0x44444444;")
                selector = ptx.new(f"lop3.b32 {{d}}, {source}, 0x33333333, {third}, 0xEA;")
            weave(selector, "", 8 * word + 4 * high)
            weave(ptx.new(f"shr.b32 {{d}}, {selector}, 16;"), "", 8 * word + 4 * high + 2)
    return ptx.text()


def constraints(inputs: int) -> str:
    """Of an asm block with 8 registers out and `inputs` in."""
    return ",".join(["=r"] * HALF + ["r"] * inputs)


def float_bits(value: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex().upper()
