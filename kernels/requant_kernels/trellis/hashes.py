"""The PTX of the trellis codes whose values are byte sums: windows of a lane's bits, their hashes, the integer tensor core.

The value of `mul1` is the sum of the four bytes of a 32-bit hash, so the weight times an activation is a dot product of
four bytes with four equal activations: the hash as it is, is an operand of `mma.m16n8k32`. `pair` takes two weights from
one hash, b0 + b1 + b2 + b3 and b0 - b1 - b2 + b3, whose products with x1 and x2 have the sum

    b0 (x1 + x2) + b1 (x1 - x2) + b2 (x1 - x2) + b3 (x1 + x2)

so that one operand register serves two weights. Nothing is summed and nothing converted before the tensor core.

A lane `4 g + t` holds the bits of rows 2 g and 2 g + 1 of tile t of a group of four, a *part* of 8 T bits where four columns
take T; the parts of 1, 2 or 4 groups are whole words together (`rings.py`). The 32 bits before a part are the last ones of
lane `4 (g - 1) + t`, around the ring. Every window has the same place in every lane. A register that holds a
window in its low half is masked by LOP3, in its high half shifted, between them PRMT takes two bytes. A window that
begins in one register and ends in the next one has no zeros beside it: PRMT takes its two bytes twice, and the multiplier
is divided by what makes one of two. So one funnel shift serves all windows at distance 0, 8, 16 and 24. Where h(high half)
is known, the low half needs no mask either, on the multiplier's pipe instead of the integer one:

    hash(F mod 2^16) = F * C - 2^16 hash(F / 2^16)      (mod 2^32)
    hash(x) = (2^16 x + x) * C / (2^16 + 1)             (mod 2^32, where 1 / (2^16 + 1) = 1 - 2^16)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

ROW_CODES = 16
HASH = {
    "mul1": (0x83DCD12D, 0),
    "pair": (0x4E6DA66B, 0x3C6EF35F),
    "3inst": (89226354, 64248484),
}  # multiplier, addend
# the most tiles whose windows are cut in turn; more come one after the other, in the registers of one
AT_ONCE = 4
ACROSS = 24  # the offset of a window that ends in the next register
WEIGHTS = {"mul1": 1, "pair": 2, "3inst": 1}  # of one hash
OFFSET = {
    "mul1": 510.0,
    "pair": 255.0,
}  # times the sum of the fixed-point operands: what the sums are too large


def groups_of(four: int) -> int:
    """Groups whose parts are whole words together: parts of 8 `four` bits."""
    return 4 // math.gcd(four, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """16 bits from bit `offset` of the 32 bits that begin at bit `start` of a part, counted from its end; those from bit
    ACROSS of them end in the next 32."""

    start: int
    offset: int


@cache
def windows(code: str, four: int, after: int, across: bool = False) -> tuple[Window, ...]:
    """Where each window of a part lies, first row first: 32 for `mul1`, 16 for `pair`; `after`: bits behind the part;
    `across`: whether windows may end in the next register, where that saves a shift."""
    length, weights = 8 * four, WEIGHTS[code]
    ends = [length - i // 4 * four - (i % 4 + 1) * four // 4 for i in range(weights - 1, 32, weights)]
    found: dict[int, Window] = {}

    def take(start: int, last: int) -> None:
        for by in range(0, last + 1, 8):
            if start + by in ends:
                found.setdefault(start + by, Window(start=start, offset=by))

    for start in range(-after % 32, length - 31, 32):  # whole words cost nothing
        take(start, ACROSS if across else 16)
    for end in sorted(ends):
        start = end
        while start not in found and start in ends:
            left = [e for e in range(start + 32, start + 56, 8) if e in ends and e not in found]
            follows = across and bool(left) and start + ACROSS in ends and start + ACROSS not in found
            take(start, ACROSS if follows else 16)
            if follows and left[0] > start + 32:
                take(start + 32, 16)
                break
            start = start + 32 if follows else -1
    return tuple(found[end] for end in ends)


def goes_across(code: str, tiles: int) -> bool:
    """Whether windows that end in the next register are ahead: by times, not by counts, which are always lower."""
    return WEIGHTS[code] > 1 or tiles > AT_ONCE


class Text:
    """Lines of PTX; each `new` has a fresh register."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def register(self) -> str:
        self.count += 1
        return f"t{self.count - 1}"

    def new(self, line: str) -> str:
        name = self.register()
        self.lines.append(line.format(d=name))
        return name

    def text(self) -> str:
        names = ", ".join(f"t{i}" for i in range(self.count))
        return "{ .reg .b32 " + names + ";\n" + "\n".join(self.lines) + " }"


class Part:
    """The hashes of one lane's rows of one tile, each computed when first asked for."""

    spare = 32  # low halves that may do without a mask, for which the multiplier's pipe has room

    def __init__(
        self, text: Text, code: str, four: int, words: list[str], index: int, source: str, *, across: bool = False
    ) -> None:  # fmt: skip
        """`words` of all parts, of which this is number `index`; `source`: the lane with the bits before."""
        self.text, self.code, self.words = text, code, words[::-1]
        self.after, self.top = 8 * four * (groups_of(four) - 1 - index), 8 * four - 32
        self.windows = windows(code, four, self.after, across)
        self.registers: dict[int, str] = {}
        self.hashes: dict[int, str] = {}
        self.before = text.new(f"shfl.sync.idx.b32 {{d}}, {self._register(0)}, {source}, 0x1f, 0xffffffff;")

    @property
    def shifts(self) -> int:
        """Funnel shifts of its windows."""
        starts = {w.start for w in self.windows} | {w.start + 32 for w in self.windows if w.offset == ACROSS}
        return sum((start + self.after) % 32 > 0 for start in starts)

    def _register(self, start: int) -> str:
        """The 32 bits from `start` on, counted from the end of the part."""
        if start not in self.registers:
            word, shift = divmod(self.after + start, 32)
            if start == self.top + 32:
                self.registers[start] = self.before
                return self.before
            if start > self.top + 32:  # no more than a byte of it counts
                self.registers[start] = self.text.new(
                    f"shr.b32 {{d}}, {self.before}, {start - self.top - 32};"
                )
                return self.registers[start]
            if start > self.top:
                low, high, shift = self._register(self.top), self.before, start - self.top
            elif shift:
                low, high = self.words[word], self.words[word + 1]
            else:
                self.registers[start] = self.words[word]
                return self.words[word]
            self.registers[start] = self.text.new(f"shf.r.wrap.b32 {{d}}, {low}, {high}, {shift};")
        return self.registers[start]

    def hash(self, index: int) -> str:
        """Of window `index`."""
        if index in self.hashes:
            return self.hashes[index]
        window, new = self.windows[index], self.text.new
        multiplier, addend = HASH[self.code]
        register = self._register(window.start)
        above = Window(start=window.start, offset=16)
        if window.offset == 0 and above in self.windows and self.spare > 0:
            self.spare -= 1
            high = self.hash(self.windows.index(above))
            both = (addend + (addend << 16)) & 0xFFFFFFFF
            product = new(f"mad.lo.u32 {{d}}, {register}, 0x{multiplier:08x}, 0x{both:08x};")
            value = new(f"mad.lo.u32 {{d}}, {high}, 0xffff0000, {product};")
        else:
            match window.offset:
                case 0:
                    x = new(f"and.b32 {{d}}, {register}, 0xffff;")
                case 8:
                    x = new(f"prmt.b32 {{d}}, {register}, 0x0, 0x4421;")
                case 24:
                    following = self._register(window.start + 32)
                    x = new(f"prmt.b32 {{d}}, {register}, {following}, 0x4343;")
                    multiplier = multiplier * (1 - (1 << 16)) & 0xFFFFFFFF
                case _:
                    x = new(f"shr.b32 {{d}}, {register}, 16;")
            value = new(f"mad.lo.u32 {{d}}, {x}, 0x{multiplier:08x}, 0x{addend:08x};")
        self.hashes[index] = value
        return value


def multiply_group(
    text: Text, code: str, four: int, group: int, words: list[list[str]], operand: Callable[[int, int], str],
    sums: list[list[str]], slabs: int, source: str, *, apart: int = 0, made: int = 0,
    outputs: list[list[str]] | None = None,
) -> None:  # fmt: skip
    """Part `group` of every tile's `words`, times what `operand` has for a slab and a hash of a row; `sums` get new names.

    `apart`: how far the two hashes of a row are apart that a product takes, if not half a row. `made`: how many operands
    PRMT makes. As many low halves are hashed without a mask as leave both pipes the same to do. `outputs`: the names that
    the last sums get.
    """
    tiles, a_row = len(words), ROW_CODES // WEIGHTS[code]
    apart = apart or a_row // 2
    pairs = [(i, i + apart) for i in range(a_row) if i // apart % 2 == 0]
    for own in [range(tiles)] if tiles <= AT_ONCE else [range(r, r + 1) for r in range(tiles)]:
        across = goes_across(code, tiles)
        parts = {r: Part(text, code, four, words[r], group, source, across=across) for r in own}
        for part in parts.values():
            part.spare = (part.shifts + made // tiles) // 2
        for pair in pairs:
            x = [[operand(slab, i) for i in pair] for slab in range(slabs)]
            for i in (r * slabs + slab for r in own for slab in range(slabs)):
                a = ", ".join(parts[i // slabs].hash(row * a_row + j) for j in pair for row in range(2))
                d = outputs[i] if outputs and pair == pairs[-1] else [text.register() for _ in range(4)]
                text.lines.append(
                    f"mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{{', '.join(d)}}}, {{{a}}}, "
                    f"{{{', '.join(x[i % slabs])}}}, {{{', '.join(sums[i])}}};"
                )
                sums[i] = d


@cache
def sum_asm(code: str, four: int, tiles: int, slabs: int) -> tuple[str, str]:
    """Text and constraints of `tiles` x 16 rows, `groups_of(four)` groups, times 8 `slabs` columns of activations.

    Operands: 4 accumulators a slab and tile (slabs fastest), the sums; then inputs: the same accumulators, the words of each
    tile, 4 registers of activations a group and slab (groups fastest), the lane that holds the bits before.
    """
    sums, groups = 4 * tiles * slabs, groups_of(four)
    words = four * groups // 4
    first_word, first_x = 2 * sums, 2 * sums + tiles * words
    source = f"${first_x + 4 * slabs * groups}"
    text = Text()
    sum_of = [[f"${sums + 4 * i + j}" for j in range(4)] for i in range(tiles * slabs)]
    for group in range(groups):
        x: dict[tuple[int, int], str] = {}  # where tiles come one after the other, the first one finds them

        def operand(slab: int, i: int, x: dict[tuple[int, int], str] = x, group: int = group) -> str:
            if (slab, i) not in x:
                x[slab, i] = _operand(text, code, first_x + 4 * (slab * groups + group), i)
            return x[slab, i]

        made = slabs * ROW_CODES // WEIGHTS[code]
        held = [[f"${first_word + r * words + i}" for i in range(words)] for r in range(tiles)]
        last = (
            [[f"${4 * i + j}" for j in range(4)] for i in range(tiles * slabs)]
            if group == groups - 1
            else None
        )
        multiply_group(text, code, four, group, held, operand, sum_of, slabs, source, made=made, outputs=last)
    return text.text(), ",".join(["=r"] * sums + ["r"] * (sums + tiles * words + 4 * slabs * groups + 1))


def _operand(text: Text, code: str, first: int, index: int) -> str:
    """The four activations that meet a hash, from a lane's sixteen bytes of a row of the tile."""
    if code == "mul1":
        return text.new(f"prmt.b32 {{d}}, ${first + index // 4}, 0x0, 0x{index % 4 * 0x1111:04x};")
    return text.new(f"prmt.b32 {{d}}, ${first + index // 2}, 0x0, 0x{(0x2332 if index % 2 else 0x0110):04x};")


class _Weights(Part):
    """The weights of one lane's rows of one tile, as pairs of float16, each computed when first asked for."""

    spare = 0  # dp4a runs there

    def pair(self, index: int) -> str:
        """Of columns 2 `index` and 2 `index` + 1, 8 pairs a row; byte sums lie on the bits of 1024, 1534 too large."""
        new = self.text.new
        if self.code == "3inst":
            first, second = (
                new(f"lop3.b32 {{d}}, {self.hash(2 * index + i)}, 0x8FFF8FFF, 0x3B603B60, 0x6A;")
                for i in range(2)
            )
            low = new(f"prmt.b32 {{d}}, {first}, {second}, 0x5410;")
            high = new(f"prmt.b32 {{d}}, {first}, {second}, 0x7632;")
            return new(f"add.rn.f16x2 {{d}}, {low}, {high};")
        if self.code == "pair":
            first = new(f"dp4a.u32.u32 {{d}}, {self.hash(index)}, 0x01010101, 0x6400;")
            second = new(f"dp4a.u32.s32 {{d}}, {self.hash(index)}, 0x01FFFF01, 0x65FE;")
        else:
            first, second = (
                new(f"dp4a.u32.u32 {{d}}, {self.hash(2 * index + i)}, 0x01010101, 0x6400;") for i in range(2)
            )
        return new(f"prmt.b32 {{d}}, {first}, {second}, 0x5410;")


@cache
def values_asm(code: str, four: int, group: int) -> tuple[str, str]:
    """The weights of part `group` as pairs of float16: 16 outputs, 8 a row; all words, the lane with the bits before."""
    words = four * groups_of(four) // 4
    text = Text()
    part = _Weights(text, code, four, [f"${16 + i}" for i in range(words)], group, f"${16 + words}")
    for i in range(16):
        if code == "3inst":
            text.lines.append(f"mov.b32 ${i}, {part.pair(i)};")
        else:  # exactly (sum - 1534) / 128
            unit, offset = text.new("mov.b32 {d}, 0x20002000;"), text.new("mov.b32 {d}, 0xC9FEC9FE;")
            text.lines.append(f"fma.rn.f16x2 ${i}, {part.pair(i)}, {unit}, {offset};")
    return text.text(), ",".join(["=r"] * 16 + ["r"] * (words + 1))


@cache
def float_sum_asm(code: str, four: int, tiles: int, slabs: int) -> tuple[str, str]:
    """`sum_asm` for activations in float16, 8 registers a group and slab of 8 tokens, and sums in float32."""
    sums, groups = 4 * tiles * slabs, groups_of(four)
    words = four * groups // 4
    first_word, first_x = 2 * sums, 2 * sums + tiles * words
    source = f"${first_x + 8 * slabs * groups}"
    text = Text()
    sum_of = [[f"${sums + 4 * i + j}" for j in range(4)] for i in range(tiles * slabs)]
    for group in range(groups):
        parts = [
            _Weights(
                text, code, four, [f"${first_word + r * words + i}" for i in range(words)], group, source
            )
            for r in range(tiles)
        ]
        for step in range(4):
            last = group == groups - 1 and step == 3
            a_of = [
                ", ".join(part.pair(8 * row + 2 * step + i) for i in range(2) for row in range(2))
                for part in parts
            ]
            for i in range(tiles * slabs):
                x = first_x + 8 * (i % slabs * groups + group) + 2 * step
                d = [f"${4 * i + j}" if last else text.register() for j in range(4)]
                text.lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{', '.join(d)}}}, {{{a_of[i // slabs]}}}, "
                    f"{{${x}, ${x + 1}}}, {{{', '.join(sum_of[i])}}};"
                )
                sum_of[i] = d
    return text.text(), ",".join(
        ["=f"] * sums + ["f"] * sums + ["r"] * (tiles * words + 8 * slabs * groups + 1)
    )


@cache
def words_asm(count: int, vector: int, ahead: int) -> tuple[str, str]:
    """A lane's load of its words of a tile, read once: `count` outputs, then the address, `ahead` bytes before them."""
    lines = []
    for i in range(0, count, vector):
        outputs = ", ".join(f"${j}" for j in range(i, i + vector))
        kind, target = ("b32", outputs) if vector == 1 else (f"v{vector}.b32", f"{{{outputs}}}")
        lines.append(f"ld.global.L1::no_allocate.{kind} {target}, [${count} + {ahead + 128 * i}];")
    return "\n".join(lines), ",".join(["=r"] * count + ["l"])


@cache
def activations_asm(ahead: int, *, shared: bool = False) -> tuple[str, str]:
    """A lane's load of 16 bytes of activations: 4 outputs, then the address, `ahead` bytes before them."""
    if shared:
        return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {ahead}];", "=r,=r,=r,=r,r"
    return f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {ahead}];", "=r,=r,=r,=r,l"


# a scale and a sum: 2 outputs, the address
SCALES_ASM, SCALES_CONSTRAINTS = "ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l"
# the store of 16 bytes where the condition is not zero: an output that nobody reads, the address, 4 registers, the condition
STORE_FOUR_ASM = (
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)
STORE_FOUR_CONSTRAINTS = "=r,l,r,r,r,r,r"
# a store where the condition is not zero: an output that nobody reads, the address, the value, the condition
STORE_ASM = "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }"
STORE_CONSTRAINTS = "=r,l,f,r"


@cache
def reduce_asm(warps: int, count: int, *, given: bool = False) -> tuple[str, str]:
    """Sums over the warps of `count` values a lane, in order: value i + warps j of all lanes comes to output j of warp i.

    Operands: max(1, count / warps) outputs, `count` values, warp, lane, and the address of shared memory where `given`.
    With fewer values than warps, warps repeat them. `count` is a power of two, or less than `warps`.
    """
    outputs, whole = max(1, count // warps), count & (count - 1) == 0
    value, (warp, lane) = outputs, (f"${outputs + count}", f"${outputs + count + 1}")
    text = Text()
    base = f"${outputs + count + 2}"
    if not given:
        text.lines.append(f".shared .align 16 .b32 sums[{warps * count * 32}];")
        base = text.new("mov.u32 {d}, sums;")
    own = text.new(f"mad.lo.u32 {{d}}, {lane}, 4, {base};")
    mine = text.new(f"mad.lo.u32 {{d}}, {warp}, 128, {own};")
    text.lines += [f"st.shared.b32 [{mine} + {128 * warps * i}], ${value + i};" for i in range(count)]
    text.lines.append("bar.sync 0;")
    first = text.new(f"{'and.b32' if whole else 'min.u32'} {{d}}, {warp}, {min(warps, count) - 1};")
    first = text.new(f"mad.lo.u32 {{d}}, {first}, {128 * warps}, {own};")
    for output in range(outputs):
        at = 128 * warps * warps * output
        parts = [text.new(f"ld.shared.b32 {{d}}, [{first} + {at + 128 * w}];") for w in range(warps)]
        while len(parts) > 2:
            parts = [
                text.new(f"add.f32 {{d}}, {a}, {b};") for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        text.lines.append(f"add.f32 ${output}, {parts[0]}, {parts[1]};")
    return text.text(), ",".join(["=f"] * outputs + ["f"] * count + ["r"] * (3 if given else 2))
