"""The PTX of a rotation by Hadamard blocks: 4096 values in the registers of 16 warps, 8 neighbours a lane.

    bits 0 to 7      256 values of a warp: two products with 16 x 16 signs, where the accumulators of the first are the right
                     operand of the second as they lie
    bits 8 to 11     across the warps: one product with 16 x 16 signs, whose right operand comes through shared memory
    fixed point      the largest value of all, as the bits of a float, by REDUX; four bytes of four neighbours in a store

Rows of shared memory (the 256 values of a warp) are 260 words apart, and 16 columns of it lie so that a lane of the third
product ends with four neighbours of rows g and g + 8: what it reads as column 2 t + e of tile i is value 4 t + 2 i + e. Of
every other pair of 16 columns the tiles are swapped. So no access of a warp meets a bank twice.

Values enter the tensor cores as two bfloat16, high and low part, so that a product is good to 2^-16.
"""

import struct
from functools import cache

LARGEST = 32512  # 127 * 256, of fixed point: its high byte is never 128
SMALLEST = 0x03800000  # 2^-120, the least scale, which has an inverse
ROW = 1040  # bytes from one warp's values to the next one's
VALUES = 16 * ROW  # of shared memory
PLANE = 4096 + 64  # bytes from high ones to low ones in shared memory: banks apart
SUMS = 2 * PLANE  # where the sums over the warps begin that come later
LEAST_SUMS = 16384  # their bytes, at least, and at most
MOST_SUMS = 28672
ROUND = 0x4B400000  # bits of 1.5 * 2^23: adding it leaves the nearest integer in the low bits


class _Turns:
    """Lines of PTX; each `new` has a fresh register."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: list[str] = []

    def register(self) -> str:
        self.names.append(f"t{len(self.names)}")
        return self.names[-1]

    def new(self, line: str) -> str:
        name = self.register()
        self.lines.append(line.format(d=name))
        return name

    def split(self, low: str, high: str) -> tuple[str, str]:
        """Pairs of bfloat16: the values rounded, and what is left of them."""
        rounded = self.new(f"cvt.rn.bf16x2.f32 {{d}}, {high}, {low};")
        a, b = self.new(f"shl.b32 {{d}}, {rounded}, 16;"), self.new(f"and.b32 {{d}}, {rounded}, 0xffff0000;")
        a, b = self.new(f"sub.f32 {{d}}, {low}, {a};"), self.new(f"sub.f32 {{d}}, {high}, {b};")
        return rounded, self.new(f"cvt.rn.bf16x2.f32 {{d}}, {b}, {a};")

    def product(self, signs: tuple[str, ...], rows: list[str], out: list[str]) -> None:
        """out = signs [16, 16] @ columns whose rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 are `rows`."""
        parts = list(zip(self.split(*rows[:2]), self.split(*rows[2:]), strict=True))
        sums = ["0f00000000"] * 4
        for i, part in enumerate(parts[::-1]):
            to = out if i else [self.register() for _ in range(4)]
            self.lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{', '.join(to)}}}, "
                f"{{{', '.join(signs)}}}, {{{part[0]}, {part[1]}}}, {{{', '.join(sums)}}};"
            )
            sums = to

    def signs(self, of: str) -> tuple[str, ...]:
        """The four registers of a matrix of signs whose first is `of`."""
        return of, of, of, self.new(f"xor.b32 {{d}}, {of}, 0x80008000;")

    def turn(self, x: list[str], first: str, second: str, out: list[str]) -> None:
        """Both products of a warp."""
        upper, lower = [self.register() for _ in range(4)], [self.register() for _ in range(4)]
        signs = self.signs(first)
        self.product(signs, x[:4], upper)
        self.product(signs, x[4:], lower)
        signs = self.signs(second)
        self.product(signs, upper[:2] + lower[:2], [*out[:2], *out[4:6]])
        self.product(signs, upper[2:] + lower[2:], [*out[2:4], *out[6:]])

    def across(
        self, base: str, x: list[str], signs: tuple[str, str, str], whole: bool, out: list[str]
    ) -> tuple[str, str, str]:
        """All three products; returns thread, lane and warp.

        VALUES bytes of shared memory at `base`; `whole`: bit 11 is mixed.
        """
        new = self.new
        thread = new("mov.u32 {d}, %tid.x;")
        lane, warp = new(f"and.b32 {{d}}, {thread}, 31;"), new(f"shr.u32 {{d}}, {thread}, 5;")
        base = new(f"mov.u32 {{d}}, {base};")
        # where a lane writes: pairs of columns of 16, half of one, and the swap of every other
        place = new(f"shr.u32 {{d}}, {lane}, 1;")
        place = new(f"shl.b32 {{d}}, {place}, 6;")
        half = new(f"and.b32 {{d}}, {lane}, 1;")
        place = new(f"mad.lo.u32 {{d}}, {half}, 16, {place};")
        swap = new(f"shl.b32 {{d}}, {lane}, 3;")
        swap = new(f"and.b32 {{d}}, {swap}, 32;")
        place = new(f"add.u32 {{d}}, {place}, {swap};")
        own = new(f"mad.lo.u32 {{d}}, {warp}, {ROW}, {base};")
        to = [new(f"add.u32 {{d}}, {own}, {place};")]
        place = new(f"xor.b32 {{d}}, {place}, 32;")
        to.append(new(f"add.u32 {{d}}, {own}, {place};"))
        # where it reads
        g, quarter = new(f"shr.u32 {{d}}, {lane}, 2;"), new(f"and.b32 {{d}}, {lane}, 3;")
        place = new(f"shl.b32 {{d}}, {warp}, 4;")
        swap = new(f"and.b32 {{d}}, {place}, 32;")
        place = new(f"shl.b32 {{d}}, {warp}, 6;")
        place = new(f"mad.lo.u32 {{d}}, {g}, 4, {place};")
        place = new(f"mad.lo.u32 {{d}}, {quarter}, {2 * ROW}, {place};")
        place = new(f"add.u32 {{d}}, {place}, {base};")
        begin = [new(f"add.u32 {{d}}, {place}, {swap};")]
        swap = new(f"xor.b32 {{d}}, {swap}, 32;")
        begin.append(new(f"add.u32 {{d}}, {place}, {swap};"))

        turned = [self.register() for _ in range(8)]
        self.turn(x, signs[0], signs[1], turned)
        for address, four in zip(to, ((0, 1, 4, 5), (2, 3, 6, 7)), strict=True):
            self.lines.append(f"st.shared.v4.b32 [{address}], {{{', '.join(turned[i] for i in four)}}};")
        self.lines.append("bar.sync 0;")
        third = self.signs(signs[2])
        if not whole:
            nothing = new("mov.b32 {d}, 0;")
            third = signs[2], nothing, nothing, signs[2]
        for tile in range(2):
            rows = [new(f"ld.shared.b32 {{d}}, [{begin[tile]} + {ROW * row}];") for row in (0, 1, 8, 9)]
            self.product(third, rows, [out[2 * tile + i] for i in (0, 1, 4, 5)])
        return thread, lane, warp

    def fix(
        self,
        values: list[str],
        places: tuple[str, str],
        lane: str,
        warp: str,
        space: str,
        to: tuple[str, str],
    ) -> tuple[str, str]:
        """The bytes of a lane's eight values, high and low ones apart; returns scale and sum, the same in all threads.

        `places`: 16 words of shared memory each, for the largest values and the sums of the warps.
        """
        new = self.new
        greatest = [new(f"abs.f32 {{d}}, {value};") for value in values]
        while len(greatest) > 1:
            halves = zip(greatest[::2], greatest[1::2], strict=True)
            greatest = [new(f"max.NaN.f32 {{d}}, {a}, {b};") for a, b in halves]
        begin = [new(f"mov.u32 {{d}}, {name};") for name in places]
        mine = [new(f"mad.lo.u32 {{d}}, {warp}, 4, {place};") for place in begin]
        other = new(f"and.b32 {{d}}, {lane}, 15;")
        theirs = [new(f"mad.lo.u32 {{d}}, {other}, 4, {place};") for place in begin]
        most = new(f"redux.sync.max.u32 {{d}}, {greatest[0]}, 0xffffffff;")  # bits of floats, none negative
        self.lines += [f"st.shared.b32 [{mine[0]}], {most};", "bar.sync 0;"]
        most = new(f"ld.shared.b32 {{d}}, [{theirs[0]}];")
        most = new(f"redux.sync.max.u32 {{d}}, {most}, 0xffffffff;")
        scale = new(f"mul.f32 {{d}}, {most}, 0f{_bits(1 / LARGEST):08X};")
        scale = new(f"max.NaN.f32 {{d}}, {scale}, 0f{SMALLEST:08X};")
        inverse = new(f"rcp.approx.ftz.f32 {{d}}, {scale};")
        fixed = [new(f"fma.rn.f32 {{d}}, {value}, {inverse}, 0f{ROUND:08X};") for value in values]
        for i in range(2):
            four = fixed[4 * i : 4 * i + 4]
            raised = [new(f"add.u32 {{d}}, {value}, 128;") for value in four]
            for address, source, byte in ((to[0], raised, 1), (to[1], four, 0)):
                selector = f"0x00{byte + 4}{byte}"
                pairs = [new(f"prmt.b32 {{d}}, {source[j]}, {source[j + 1]}, {selector};") for j in (0, 2)]
                both = new(f"prmt.b32 {{d}}, {pairs[0]}, {pairs[1]}, 0x5410;")
                self.lines.append(f"st.{space}.b32 [{address} + {2048 * i}], {both};")
        total = fixed[0]
        for value in fixed[1:]:
            total = new(f"add.u32 {{d}}, {total}, {value};")
        total = new(f"sub.u32 {{d}}, {total}, 0x{8 * ROUND & 0xFFFFFFFF:08x};")
        total = new(f"redux.sync.add.s32 {{d}}, {total}, 0xffffffff;")
        self.lines += [f"st.shared.b32 [{mine[1]}], {total};", "bar.sync 0;"]
        total = new(f"ld.shared.b32 {{d}}, [{theirs[1]}];")
        total = new(f"redux.sync.add.s32 {{d}}, {total}, 0xffffffff;")  # each of 16 twice
        total = new(f"shr.s32 {{d}}, {total}, 1;")
        return scale, new(f"cvt.rn.f32.s32 {{d}}, {total};")

    def text(self, declared: str = "") -> str:
        return "{ .reg .b32 " + ", ".join(self.names) + ";\n" + declared + "\n".join(self.lines) + " }"


@cache
def turn_asm() -> tuple[str, str]:
    """Both products of a warp: 8 outputs, 8 values, 8 times the lane's signs of the first, 8 times of the second."""
    t = _Turns()
    t.turn([f"${8 + i}" for i in range(8)], "$16", "$24", [f"${i}" for i in range(8)])
    return t.text(), ",".join(["=f"] * 8 + ["f"] * 8 + ["r"] * 16)


@cache
def section_asm(across: bool, fixed: bool) -> tuple[str, str]:
    """A section: 8 outputs, 8 values, 8 times the lane's signs of each of three products; `across`: bit 11 is mixed.

    A lane's outputs are four neighbours of row g of the 16, at column 16 warp + 4 t, then of row g + 8. Where `fixed`, it
    stores their bytes instead (the outputs are nothing), and takes 8 times each the address of its high bytes of row g,
    that of its low bytes, and that of the section's scale and sum, which one thread stores.
    """
    t = _Turns()
    out = [f"${i}" for i in range(8)]
    declared = f".shared .align 16 .b32 values[{VALUES // 4}];\n"
    results = [t.register() for _ in range(8)] if fixed else out
    values = [f"${8 + i}" for i in range(8)]
    thread, lane, warp = t.across("values", values, ("$16", "$24", "$32"), across, results)
    names = ["=f"] * 8 + ["f"] * 8 + ["r"] * 24
    if fixed:
        scale, total = t.fix(results, ("most", "totals"), lane, warp, "global", ("$40", "$48"))
        t.lines += [f"setp.eq.u32 p, {thread}, 0;", f"@p st.global.v2.b32 [$56], {{{scale}, {total}}};"]
        t.lines += [f"mov.b32 {name}, 0;" for name in out]
        declared += ".shared .b32 most[16];\n.shared .b32 totals[16];\n.reg .pred p;\n"
        names += ["l"] * 24
    return t.text(declared), ",".join(names)


def room_bytes(sums: int) -> int:
    """Shared memory of a rotation in the product's own launch, whose sums over the warps take so many bytes."""
    return SUMS + max(LEAST_SUMS, sums) + 128


@cache
def shared_section_asm(across: bool, room: int) -> tuple[str, str]:
    """A section in fixed point that stays in shared memory, for tensors of one element a thread.

    Operands: scale and sum, the same in all lanes; 8 values, the signs of three products, the address of `room` bytes of
    shared memory, and the addresses of the lane's high bytes of row g and of its low bytes, below SUMS, where values were.
    """
    t = _Turns()
    results = [t.register() for _ in range(8)]
    values = [f"${2 + i}" for i in range(8)]
    _, lane, warp = t.across("$13", values, ("$10", "$11", "$12"), across, results)
    places = [t.new(f"add.u32 {{d}}, $13, {room - 128 + 64 * i};") for i in range(2)]
    scale, total = t.fix(results, (places[0], places[1]), lane, warp, "shared", ("$14", "$15"))
    t.lines += [f"mov.b32 $0, {scale};", f"mov.b32 $1, {total};"]
    return t.text(), ",".join(["=f"] * 2 + ["f"] * 8 + ["r"] * 6)


@cache
def room_asm(room: int) -> tuple[str, str]:
    """The address of `room` bytes of shared memory; the input is not read."""
    return f"{{ .shared .align 16 .b8 room[{room}]; mov.u32 $0, room; }}", "=r,r"


@cache
def eight_asm(kind: str) -> tuple[str, str]:
    """Eight neighbours, float16 or bfloat16, as floats: 8 outputs, the address."""
    lines = ["ld.global.v4.b32 {a0, a1, a2, a3}, [$8];"]
    for i in range(4):
        if kind == "bf16":
            lines += [f"shl.b32 ${2 * i}, a{i}, 16;", f"and.b32 ${2 * i + 1}, a{i}, 0xffff0000;"]
        else:
            lines += [
                f"mov.b32 {{l, h}}, a{i};",
                f"cvt.f32.f16 ${2 * i}, l;",
                f"cvt.f32.f16 ${2 * i + 1}, h;",
            ]
    return "{ .reg .b32 a0, a1, a2, a3;\n.reg .b16 l, h;\n" + "\n".join(lines) + " }", ",".join(
        ["=f"] * 8 + ["l"]
    )


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")
