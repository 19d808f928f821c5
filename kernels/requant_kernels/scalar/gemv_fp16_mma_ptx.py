"""The PTX of `half_grid.py`: a few tokens of a grid, where 16 bits of a word are two weights as they lie.

A register of the left operand of `mma.m16n8k16` is a pair of 16-bit floats. A masked field at bit s of a half, with zeros
elsewhere, is the float16 subnormal code * 2^(s - 24): one AND makes two weights, and nothing is multiplied or subtracted
from them. bfloat16 has no subnormals that a product survives; there the field goes under the exponent of 128, by one LOP3:
128 + code * 2^s. What weights are too large by is undone after a group of columns, whose products are kept apart by s:

    sum (code - zero) x = sum_s 2^-s (P_s - (128 + 2^s zero) X_s)        P_s: products at bit s;  X_s: sums of their x

(float16: units of 2^-24, and no 128). The sums X_s are products with ones, made once for all tiles of a warp. All is
exact but for float32's own rounding.
"""

from dataclasses import dataclass
from functools import cache

from requant_kernels.common.bit_layout import MANTISSA_BITS, grid_fields, ptx_float

TOKENS = 8  # columns of the right operand
TOKENS_BYTES = 4096  # of a block
_ONES = {"fp16": "0x3C003C00", "bf16": "0x3F803F80"}
_MAGIC = {"fp16": 0, "bf16": 128}
UNIT = {"fp16": 2.0**-24, "bf16": 1.0}  # what one step of a grid at bit 0 is worth in a product


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """How 16 columns leave their words: parts are (word, rotation to the right, mask); at bit `at` of their halves."""

    parts: tuple[tuple[int, int, int], ...]
    at: int


@cache
def planes_of(bits: int, dtype: str) -> tuple[Plane, ...]:
    """The sixteen planes of a block; where a field does not fit the mantissa it is moved down to bit 0."""
    found = []
    for fields in grid_fields(bits):
        low, high = fields[0], fields[-1]
        drop = low.bit if high.bit + high.width > MANTISSA_BITS[dtype] else 0
        parts = tuple(
            (f.word, (f.rotate + drop) % 32, (((1 << f.width) - 1) << (f.bit - drop)) * 0x10001)
            for f in fields
        )
        found.append(Plane(parts=parts, at=low.bit - drop))
    return tuple(found)


def unit_of(bits: int, dtype: str) -> float:
    """What one step of the grid is worth in the sums of `block_asm`."""
    return UNIT[dtype] * 2.0 ** min(plane.at for plane in planes_of(bits, dtype))


@cache
def block_asm(bits: int, dtype: str, scales: int, tiles: int, *, zeros: bool = False) -> str:
    """Sums += a block of `tiles` tiles times eight tokens. `scales`: of a row and block, 0 to 2; `zeros`: as many zero
    points behind them.

    Operands: 4 `tiles` outputs (row g of tokens 2 t and 2 t + 1, then row g + 8); inputs: the same, whether there is a
    block, and in shared memory this lane's words, its scales, its activations of even and of odd slabs.
    """
    outputs, spans, planes = 4 * tiles, max(scales, 1), planes_of(bits, dtype)
    inside, words, own, *slabs = (f"${2 * outputs + i}" for i in range(5))
    x = [f"b{i}" for i in range(32)]
    ats, first, magic = sorted({plane.at for plane in planes}), planes[0].at, _MAGIC[dtype]
    zero = 0.0 if zeros else (1 << (bits - 1)) * UNIT[dtype]
    ptx = _Lines()
    ptx.add(f"setp.eq.s32 p, {inside}, 0;", "@p bra.uni NONE;")
    ptx.add(
        "mov.f32 zf, 0f00000000;",
        f"mov.b32 one, {_ONES[dtype]};",
        f"mov.b32 magic, 0x{magic and 0x43004300:08X};",
    )
    for span in range(spans):
        begun: set[str] = set()
        for t in range(tiles):
            if scales:
                ptx.add(f"ld.shared.b32 s{t}, [{own} + {128 * (scales * t + span)}];")
                if zeros:
                    ptx.add(f"ld.shared.b32 z{t}, [{own} + {128 * (scales * (tiles + t) + span)}];")
        for j in range(span * 16 // spans, (span + 1) * 16 // spans):
            if j % 2 == 0:
                slab = ", ".join(x[2 * j : 2 * j + 4])
                ptx.add(f"ld.shared.v4.b32 {{{slab}}}, [{slabs[j // 2 % 2]} + {32 * j}];")
            right = f"{{{x[2 * j]}, {x[2 * j + 1]}}}"
            ptx.product(f"x{planes[j].at if magic else first}_", ["one"] * 4, right, dtype, begun)
            for t in range(tiles):
                for word, rotate, _ in planes[j].parts:
                    ptx.word(t, word, rotate, f"[{words} + {512 * (bits * t + word)}]", begun)
                for e in range(4):
                    ptx.add(*_masked(planes[j], t, e, dtype))
                ptx.product(f"c{t}_{planes[j].at}_", [f"a{e}" for e in range(4)], right, dtype, begun)
        # what the products are too large by, and the sums of activations that zero points meet, of both tokens of a lane
        ptx.add(*(f"mov.f32 {name}{i}, 0f00000000;" for name in "ot" for i in range(2)))
        for at in ats if magic else [first]:
            for name, factor in (
                ("o", -(magic * 2.0 ** (first - at) + zero * 2.0**first)), ("t", -UNIT[dtype] * 2.0**first)
            ):  # fmt: skip
                ptx.add(
                    *(f"fma.rn.f32 {name}{i}, x{at}_{i}, {ptx_float(factor)}, {name}{i};" for i in range(2))
                )
        for t in range(tiles):
            ptx.add(*_collect(ats, t, scaled=scales > 0, zeros=zeros))
    registers = [f"w{t}_{i}_{e}" for t in range(tiles) for i in range(bits) for e in range(4)]
    turned = sorted({(w, r) for p in planes for w, r, _ in p.parts if r})
    registers += [f"r{t}_{w}_{r}_{e}" for t in range(tiles) for w, r in turned for e in range(4)]
    registers += [f"{name}{t}" for name in "sz" for t in range(tiles)]
    registers += ["one", "magic", *(f"a{e}" for e in range(4)), *x]
    floats = [f"{name}{i}" for name in "otuv" for i in range(4)] + ["zf"]
    floats += [f"{name}_{at}_{i}" for name in (f"c{t}" for t in range(tiles)) for at in ats for i in range(4)]
    floats += [f"x{at}_{i}" for at in ats for i in range(4)]
    head = f"{{ .reg .pred p; .reg .b16 l, h; .reg .f32 {', '.join(floats)};\n.reg .b32 {', '.join(registers)};\n"
    return head + "\n".join(ptx.lines) + "\nNONE: }"


class _Lines:
    """Lines of PTX. What a span has begun: accumulators, that need no zeros any more, and words, that are in registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def product(self, sums: str, left: list[str], right: str, dtype: str, begun: set[str]) -> None:
        """sums += left x right."""
        own, real = ", ".join(f"{sums}{i}" for i in range(4)), dtype.replace("fp", "f")
        before = own if sums in begun else ", ".join(["zf"] * 4)
        begun.add(sums)
        kind = f"m16n8k16.row.col.f32.{real}.{real}.f32"
        self.add(f"mma.sync.aligned.{kind} {{{own}}}, {{{', '.join(left)}}}, {right}, {{{before}}};")

    def word(self, tile: int, word: int, rotate: int, place: str, begun: set[str]) -> None:
        """A word of this lane, and turned to the right."""
        name, turned = f"w{tile}_{word}_", f"r{tile}_{word}_{rotate}_"
        if name not in begun:
            self.add(f"ld.shared.v4.b32 {{{', '.join(f'{name}{e}' for e in range(4))}}}, {place};")
        if rotate and turned not in begun:
            self.add(*(f"shf.r.wrap.b32 {turned}{e}, {name}{e}, {name}{e}, {rotate};" for e in range(4)))
        begun |= {name, turned}


def _masked(plane: Plane, tile: int, e: int, dtype: str) -> list[str]:
    """Lines that leave two weights in register `a{e}`."""
    lines: list[str] = []
    for i, (word, rotate, mask) in enumerate(plane.parts):
        source = f"r{tile}_{word}_{rotate}_{e}" if rotate else f"w{tile}_{word}_{e}"
        if i or dtype == "bf16":
            lines.append(f"lop3.b32 a{e}, {source}, 0x{mask:08X}, {f'a{e}' if i else 'magic'}, 0xEA;")
        else:
            lines.append(f"and.b32 a{e}, {source}, 0x{mask:08X};")
    return lines


def _collect(ats: list[int], tile: int, *, scaled: bool, zeros: bool) -> list[str]:
    """Lines that add a span's products, by their bits, to the sums of a tile."""
    lines, before = [], [f"o{i % 2}" for i in range(4)]

    def both(packed: str) -> list[str]:
        return [f"mov.b32 {{l, h}}, {packed};", "cvt.f32.f16 v0, l;", "cvt.f32.f16 v1, h;"]

    if zeros:
        lines += both(f"z{tile}") + [f"fma.rn.f32 u{i}, v{i // 2}, t{i % 2}, {before[i]};" for i in range(4)]
        before = [f"u{i}" for i in range(4)]
    for at in ats:
        factor = ptx_float(2.0 ** (ats[0] - at))
        lines += [f"fma.rn.f32 u{i}, c{tile}_{at}_{i}, {factor}, {before[i]};" for i in range(4)]
        before = [f"u{i}" for i in range(4)]
    if not scaled:
        return lines + [f"add.f32 ${4 * tile + i}, ${4 * tile + i}, u{i};" for i in range(4)]
    return (
        lines
        + both(f"s{tile}")
        + [f"fma.rn.f32 ${4 * tile + i}, u{i}, v{i // 2}, ${4 * tile + i};" for i in range(4)]
    )


@cache
def block_constraints(tiles: int) -> str:
    return ",".join(["=&f"] * (4 * tiles) + [str(i) for i in range(4 * tiles)] + ["r"] * 5)


@cache
def tokens_asm(count: int, *, commit: bool) -> str:
    """Begin to copy `count` tokens of a block, 512 bytes each; with `commit`, as a group of their own, else with the words
    that are requested next.

    Operands: where this lane's 16 bytes of even tokens go, and of odd ones (the other slab of two, so that the eight lanes
    that read at once meet all banks), whether there is a block, how many tokens there are, from where, and how far apart.
    """
    lines = ["setp.ne.s32 p, $3, 0;", "mov.b64 from, $5;"]
    for i in range(count):
        lines += [
            f"setp.gt.and.s32 q, $4, {i}, p;",
            f"@q cp.async.ca.shared.global [${1 + i % 2} + {512 * i}], [from], 16;",
        ]
        lines += ["add.s64 from, from, $6;"]
    lines += ["cp.async.commit_group;"] * commit
    return "{ .reg .pred p, q; .reg .b64 from;\n" + "\n".join(lines) + " mov.b32 $0, 0; }"


TOKENS_CONSTRAINTS = "=r,r,r,r,r,l,l"


@cache
def arrived_asm(later: int, teams: int) -> str:
    """Until this lane's copies have come, but for the last `later` groups, and those of the warps that share its columns,
    which are numbered `$1`."""
    together = f"bar.sync n, {32 * teams};" if teams > 1 else "bar.warp.sync 0xffffffff;"
    number = "add.s32 n, $1, 1;"  # 0 is the barrier of the whole program
    return f"{{ .reg .b32 n; cp.async.wait_group {later}; {number} {together} mov.b32 $0, 0; }}"


GIVE_ASM = "st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"
GIVE_CONSTRAINTS = "=r,r,f,f,f,f"
