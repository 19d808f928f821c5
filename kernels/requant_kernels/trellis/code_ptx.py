"""PTX that decodes trellis codes: windows of the bit stream, their hashes, and the weights as pairs of float16 or as int8.

The state of a weight is the 16 bits of its tile's stream that end with the weight's own bits (bitshift trellis, QTIP,
arXiv 2406.11235). A computed code hashes the state and reads the weight from the hash (`codes.py`).

Lane `4 g + t` holds a *segment*: the bits of rows 2 g and 2 g + 1 of tile t of a k64, 8 T bits, where four weights take T
(`layout.py`). The first windows need the 32 bits before the segment, which are the last bits of lane `4 (g - 1) + t`. Lane
`t` takes them from lane `28 + t`, because the stream is tail-biting. Window i of a segment has the same position in every
lane, so all shift counts are constants.

Three or four windows share one funnel shift, because positions repeat every few bits. In a shifted register F:

    2 bits per weight: windows of columns     c - 4                               c     c + 4   c + 8
    their bits of F                          39..24, into the next register    31..16   23..8   15..0
    extracted by                              PRMT, see below                    SHR    PRMT    AND

`pair` needs fewer instructions when activations come as sums and differences of neighbours: half the sum of its two weights
is b0 + b3 - 255 and half the difference b1 + b2 - 255 (over 128). One float16 addition makes both (`WeightDecoder.sums`).

The integer pipe is the bottleneck, so some of the halves are extracted on the multiplier's pipe instead: DP2A, the dot
product of the halves of F with (1, 0) or (0, 1).

A window that spans two registers has no zeros next to it. PRMT duplicates its two bytes, (2^16 + 1) x, and the multiplier
is divided by that factor:  h(x) = (2^16 x + x) C / (2^16 + 1)  (mod 2^32), where 1 / (2^16 + 1) = 1 - 2^16.
"""

from dataclasses import dataclass
from functools import cache

from requant_kernels.common.ptx import Ptx, PtxBuilder
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import k64_per_unit

ROW_WEIGHTS = 16  # per row of a tile
SPANNING = 24  # offset of a window whose upper byte is in the next register
# the most row tiles whose decoding is interleaved; with more, tiles are decoded one after another in the same registers
MAX_INTERLEAVED_TILES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """16 bits at bit `offset` of the 32 bits that start at bit `start` of a segment, counted from its end. At offset
    SPANNING the upper byte is in the following 32 bits."""

    start: int
    offset: int


@cache
def windows(code: str, quad_bits: int, bits_after: int) -> tuple[Window, ...]:
    """The windows of a segment, first row first: 32 for `mul1` and `3inst`, 16 for `pair`. One that spans into the next
    register saves a funnel shift. `bits_after`: bits of the unit after the segment.
    """
    length, weights = 8 * quad_bits, CODES[code].weights_per_hash
    ends = [
        length - i // 4 * quad_bits - (i % 4 + 1) * quad_bits // 4 for i in range(weights - 1, 32, weights)
    ]
    found: dict[int, Window] = {}

    def take(start: int, last: int) -> None:
        for offset in range(0, last + 1, 8):
            if start + offset in ends:
                found.setdefault(start + offset, Window(start=start, offset=offset))

    for start in range(-bits_after % 32, length - 31, 32):  # words as loaded need no shift
        take(start, SPANNING)
    for end in sorted(ends):
        start = end
        while start not in found and start in ends:
            left = [e for e in range(start + 32, start + 56, 8) if e in ends and e not in found]
            continues = bool(left) and start + SPANNING in ends and start + SPANNING not in found
            take(start, SPANNING if continues else 16)
            if continues and left[0] > start + 32:
                take(start + 32, 16)
                break
            start = start + 32 if continues else -1
    return tuple(found[end] for end in ends)


class SegmentDecoder:
    """Appends the PTX that hashes a lane's segment; each window is hashed on first use."""

    dot_windows = (
        0  # how many halves are extracted by DP2A: as many as the multiplier's pipe has spare cycles for
    )

    def __init__(
        self, ptx: PtxBuilder, code: str, quad_bits: int, words: list[str], index: int, previous_lane: str
    ) -> None:
        """`words`: registers of a unit; the segment is number `index` in it; `previous_lane` holds the bits before."""
        self.ptx, self.code, self.words = ptx, CODES[code], words[::-1]
        self.bits_after = 8 * quad_bits * (k64_per_unit(quad_bits) - 1 - index)
        self.top = 8 * quad_bits - 32  # position of the segment's first 32 bits
        self.windows = windows(code, quad_bits, self.bits_after)
        self._shifted: dict[int, str] = {}
        self._hashes: dict[int, str] = {}
        ptx.comment(f"segment {index}: the 32 bits before it, which end the segment of the previous lane")
        own = self._bits(0)
        self.previous = ptx.new(
            "previous", f"shfl.sync.idx.b32 {{d}}, {own}, {previous_lane}, 0x1f, 0xffffffff;"
        )

    @property
    def funnel_shifts(self) -> int:
        starts = {w.start for w in self.windows}
        starts |= {w.start + 32 for w in self.windows if w.offset == SPANNING}
        return sum((start + self.bits_after) % 32 > 0 for start in starts)

    def _bits(self, start: int) -> str:
        """The 32 bits starting at `start`, counted from the end of the segment."""
        if start not in self._shifted:
            word, shift = divmod(self.bits_after + start, 32)
            if start == self.top + 32:
                self._shifted[start] = self.previous
                return self.previous
            if start > self.top + 32:  # at most one byte of it is used
                self._shifted[start] = self.ptx.new(
                    "bits", f"shr.b32 {{d}}, {self.previous}, {start - self.top - 32};"
                )
                return self._shifted[start]
            if start > self.top:
                low, high, shift = self._bits(self.top), self.previous, start - self.top
            elif shift:
                low, high = self.words[word], self.words[word + 1]
            else:
                self._shifted[start] = self.words[word]
                return self.words[word]
            self._shifted[start] = self.ptx.new("bits", f"shf.r.wrap.b32 {{d}}, {low}, {high}, {shift};")
        return self._shifted[start]

    def hash(self, index: int) -> str:
        """The register that holds the hash of window `index`."""
        if index in self._hashes:
            return self._hashes[index]
        window, new = self.windows[index], self.ptx.new
        multiplier, addend = self.code.multiplier, self.code.addend
        bits = self._bits(window.start)
        match window.offset:
            case 0 | 16 if self.dot_windows > 0:
                self.dot_windows -= 1
                half = 0x0100 if window.offset else 0x0001
                state = new("state", f"dp2a.lo.u32.u32 {{d}}, {bits}, 0x{half:04x}, 0;")
            case 0:
                state = new("state", f"and.b32 {{d}}, {bits}, 0xffff;")
            case 8:
                state = new("state", f"prmt.b32 {{d}}, {bits}, 0x0, 0x4421;")
            case 24:  # SPANNING
                following = self._bits(window.start + 32)
                state = new("state", f"prmt.b32 {{d}}, {bits}, {following}, 0x4343;")
                multiplier = multiplier * (1 - (1 << 16)) & 0xFFFFFFFF
            case _:
                state = new("state", f"shr.b32 {{d}}, {bits}, 16;")
        value = new("hash", f"mad.lo.u32 {{d}}, {state}, 0x{multiplier:08x}, 0x{addend:08x};")
        self._hashes[index] = value
        return value


class WeightDecoder(SegmentDecoder):
    """Appends the PTX that decodes hashes to weights, as pairs of float16."""

    def pair(self, index: int) -> str:
        """The weights of columns 2 `index` and 2 `index` + 1, 8 pairs per row. Byte sums are added to the bit pattern of
        1024, which gives the float16 number 1024 + sum: BYTE_SUM_OFFSET more than the sum minus its mean of 510."""
        new = self.ptx.new
        if not self.code.byte_sums:
            first, second = (
                new("masked", f"lop3.b32 {{d}}, {self.hash(2 * index + i)}, 0x8FFF8FFF, 0x3B603B60, 0x6A;")
                for i in range(2)
            )
            low = new("low", f"prmt.b32 {{d}}, {first}, {second}, 0x5410;")
            high = new("high", f"prmt.b32 {{d}}, {first}, {second}, 0x7632;")
            return new("weights", f"add.rn.f16x2 {{d}}, {low}, {high};")
        if self.code.weights_per_hash == 2:  # b0 + b1 + b2 + b3 and 510 + b0 - b1 - b2 + b3
            first = new("sum", f"dp4a.u32.u32 {{d}}, {self.hash(index)}, 0x01010101, 0x6400;")
            second = new("sum", f"dp4a.u32.s32 {{d}}, {self.hash(index)}, 0x01FFFF01, 0x65FE;")
        else:
            first, second = (
                new("sum", f"dp4a.u32.u32 {{d}}, {self.hash(2 * index + i)}, 0x01010101, 0x6400;")
                for i in range(2)
            )
        return new("weights", f"prmt.b32 {{d}}, {first}, {second}, 0x5410;")

    def integers(self, index: int, *, sums: bool) -> str:
        """Columns 4 `index` to 4 `index` + 3 of the segment as signed bytes: weights, or with `sums` half sums and half
        differences, by the factors of INTEGER_SUMS. Of such a sum the last 8 bits are rounded off, the next are the integer.
        """
        new, scaled = self.ptx.new, []
        for column in range(4 * index, 4 * index + 4):
            value = self.hash(column // self.code.weights_per_hash)
            second = self.code.weights_per_hash == 2 and column % 2 == 1
            kind, factors, mean = INTEGER_SUMS[sums, second]
            addend = 128 - mean & 0xFFFFFFFF
            scaled.append(new("scaled", f"dp4a.u32.{kind} {{d}}, {value}, 0x{factors:08X}, 0x{addend:08x};"))
        pairs = [new("pair", f"prmt.b32 {{d}}, {scaled[i]}, {scaled[i + 1]}, 0x0051;") for i in (0, 2)]
        return new("weights", f"prmt.b32 {{d}}, {pairs[0]}, {pairs[1]}, 0x5410;")

    def sums(self, index: int) -> str:
        """For `pair`: b0 + b3 - 255 and b1 + b2 - 255 of hash `index`, exactly, in units of the smallest subnormal
        float16."""
        new, value = self.ptx.new, self.hash(index)
        first = new("first", f"lop3.b32 {{d}}, {value}, 0x00FF00FF, 0x0, 0x0C;")  # 255 - b0, 255 - b2
        second = new("second", f"prmt.b32 {{d}}, {value}, 0x0, 0x4143;")  # b3, b1
        return new("sums", f"sub.rn.f16x2 {{d}}, {second}, {first};")


BYTE_SUM_OFFSET = 0x65FE  # 1534 in float16, which `WeightDecoder.pair` leaves in byte sums
# (half sums, second of two weights a hash) -> signedness of the factors of the four bytes, the factors, the mean of the sum.
# The factors are 63 and 127, not 64 and 128: these would leave two bits (one) beyond the integer, and ties, all rounded one
# way, would be a bias, the same in all rows, which the last transform gathers in one output of every block.
INTEGER_SUMS = {
    (False, False): ("u32", 0x3F3F3F3F, 510 * 63),
    (False, True): ("s32", 0x3FC1C13F, 0),
    (True, False): ("u32", 0x7F00007F, 255 * 127),
    (True, True): ("u32", 0x007F7F00, 255 * 127),
}
INTEGER_SCALES = {False: 2 / 63, True: 2 / 127}  # of `integers_ptx`, as is or of half sums: the final factor
SUM_SCALE = 2.0**24 * CODES["pair"].scale  # the final factor of the `sums` of `decode_ptx`


@cache
def decode_ptx(code: str, quad_bits: int, k64: int, *, sums: bool = False) -> Ptx:
    """The weights of segment `k64` of a unit as pairs of float16. With `sums` (`pair` only): half the sum and half the
    difference of every two weights, over SUM_SCALE.

    Outputs: 16 registers, 8 per row. Inputs: the words of the unit, the lane that holds the bits before.
    """
    ptx = PtxBuilder()
    segment = _segment(ptx, code, quad_bits, k64, outputs=16)
    ptx.comment("weights of two columns at a time")
    for i in range(16):
        if sums:
            ptx.emit(f"mov.b32 ${i}, {segment.sums(i)};")
        elif not CODES[code].byte_sums:
            ptx.emit(f"mov.b32 ${i}, {segment.pair(i)};")
        else:  # exactly (1024 + sum - 1534) / 128
            scale, offset = (
                ptx.new("scale", "mov.b32 {d}, 0x20002000;"),
                ptx.new("offset", "mov.b32 {d}, 0xC9FEC9FE;"),
            )
            ptx.emit(f"fma.rn.f16x2 ${i}, {segment.pair(i)}, {scale}, {offset};")
    return ptx.build(["=r"] * 16 + ["r"] * (len(segment.words) + 1))


@cache
def integers_ptx(code: str, quad_bits: int, k64: int, *, sums: bool = False) -> Ptx:
    """As `decode_ptx`, of a code of byte sums, rounded to int8 in units of INTEGER_SCALES: an error of 6e-5 of the weights'
    variance (half sums: 3e-5).

    Outputs: 8 registers, 4 per row, of four columns each.
    """
    ptx = PtxBuilder()
    segment = _segment(ptx, code, quad_bits, k64, outputs=8)
    ptx.comment("weights of four columns at a time")
    for i in range(8):
        ptx.emit(f"mov.b32 ${i}, {segment.integers(i, sums=sums)};")
    return ptx.build(["=r"] * 8 + ["r"] * (len(segment.words) + 1))


def _segment(ptx: PtxBuilder, code: str, quad_bits: int, k64: int, *, outputs: int) -> WeightDecoder:
    """Segment `k64` of a unit whose words, and the lane that holds the bits before, are the inputs after so many outputs."""
    words = quad_bits * k64_per_unit(quad_bits) // 4
    names = [f"${outputs + i}" for i in range(words)]
    return WeightDecoder(ptx, code, quad_bits, names, k64, f"${outputs + words}")


@cache
def load_codes_ptx(count: int, vector: int, byte_offset: int) -> Ptx:
    """A lane's load of `count` words of packed codes, `vector` at a time; each word is read only once.

    Outputs: `count` registers. Input: the address `byte_offset` bytes before the words.
    """
    lines = []
    for i in range(0, count, vector):
        outputs = ", ".join(f"${j}" for j in range(i, i + vector))
        kind, target = ("b32", outputs) if vector == 1 else (f"v{vector}.b32", f"{{{outputs}}}")
        lines.append(f"ld.global.L1::no_allocate.{kind} {target}, [${count} + {byte_offset + 128 * i}];")
    return Ptx(text="\n".join(lines), constraints=",".join(["=r"] * count + ["l"]))
