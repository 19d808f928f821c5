"""The position of every bit of a code in `packed_codes`.

A *k_tile* is 16 rows x 256 columns of W, what a warp dequantizes at a time: 16 steps of `mma.m16n8k16` with W as the left
operand. Lane `4 g + t` holds rows g and g + 8 (`rh`) of that operand and, of a step's 16 columns, 2t and 2t + 1 (`e`) in
both halves of eight (`kh`). The column of W at a position along K is free, as long as the activations use the same order.
Step j is

    column = 32 (j // 2) + 8 t + 4 (j % 2) + 2 kh + e          j = 0..15

so a lane reads eight consecutive activations at once, and two steps (`mma_k32`) cover 32 consecutive columns, the finest
group. The 32 codes of one (row, t, kh), 2 columns x 16 steps, fill exactly `bits` 32-bit words, and a lane's 16-byte load is
(kh, rh) of one word: already the registers of the A fragment, without shared memory or shuffles.

Within a word there are two orders, each designed for its decoder (`dequant_ptx.py`):
- grid: a field at bit s of a 16-bit half is an fp16 subnormal, so `(word & mask) * 2^(15-s) - zero` is the exact
  weight: one LOP3 and one HFMA2 per two weights. With 5 to 7 bits, those beyond the first 4 are in other words and are
  rotated to their position. Eight bits are bytes, which PRMT puts under the exponent of 1024.
- codebook: a nibble is a selector of PRMT, a lookup in 8 bytes: four lookups give four high bytes, four more the low bytes,
  two more interleave them into four exact fp16 (or bf16) levels.

    a word of a 2-bit grid (both halves alike)       bit   15 14  13 12  11 10  9 8  7 6  5 4  3 2  1 0
                                                     step    7      5      3     1    6    4    2    0

    a word of a 3-bit grid: five steps in each half, two of them rotated by 9 bits; bit 15 of the three words is step 15
                                                     bit   15   14 13 12  11 10 9  8 7 6  5 4 3  2 1 0
                                                     step  15       3        1       4      2      0
"""

from dataclasses import dataclass
from functools import cache

K_TILE = 256  # columns of a k_tile
ROW_TILE = 16  # rows of a k_tile
MMA_STEPS = 16  # of K = 16, per k_tile


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
    stride = 16 if bits > 6 else 4  # distance between two steps inside a half
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

    A 16-bit half has the fields of the unrotated word and those of the word rotated by `rotation`. Three bits leave bit
    15 of every half free: those bits of the three words together form the last step.
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
            if bits == 4:  # two steps per half word; bit 3 of a code is where PRMT's sign mode reads it
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
