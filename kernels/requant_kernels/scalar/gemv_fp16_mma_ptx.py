"""PTX of `gemv_fp16_mma.py`: codes of a 2- to 4-bit grid as 16-bit floats, with one mask per two weights.

A register of the left operand of `mma.m16n8k16` is a pair of 16-bit floats. In float16 a masked field of `bits` bits at bit
s of its half is the subnormal number code * 2^(s - 24), which the tensor core multiplies at full rate: no conversion, no
zero point. The mantissa of bfloat16 is too short for that; there one LOP3 puts the field below the exponent of 128, which
gives 128 + code * 2^s. Products are accumulated per shift s, and combined after the columns of one scale:

    sum (code - zero) x = sum_s 2^-s (P_s - (128 + 2^s zero) X_s)        P_s: products at bit s;  X_s: sums of their x

(float16: in units of 2^-24, and without the 128.) The sums X_s are an MMA with a matrix of ones, shared by all tiles of a
warp. Everything is exact up to float32 rounding.
"""

from dataclasses import dataclass
from functools import cache

from requant_kernels.common.bit_layout import grid_fields
from requant_kernels.common.dequant_ptx import MANTISSA_BITS
from requant_kernels.common.ptx import SYNCWARP, Ptx, inline_ptx, mma_k16_types, mma_line, ptx_float

# a lane's sums: rows g and g + 8 of two tokens
STORE_SUMS = inline_ptx(
    "st.shared.v4.f32 [$address], {$a, $b, $c, $d};",
    inputs={"address": "r"} | dict.fromkeys("abcd", "f"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedCodes:
    """How the codes of one mma_k16 are extracted: parts are (word, rotation to the right, mask); all at bit `shift`."""

    parts: tuple[tuple[int, int, int], ...]
    shift: int


@cache
def masked_codes(bits: int, dtype: str) -> tuple[MaskedCodes, ...]:
    """The sixteen mma_k16 of a k_tile; a field that does not fit the mantissa is moved down to bit 0."""
    found = []
    for fields in grid_fields(bits):
        low, high = fields[0], fields[-1]
        drop = low.bit if high.bit + high.width > MANTISSA_BITS[dtype] else 0
        parts = tuple(
            (f.word, (f.rotate + drop) % 32, (((1 << f.width) - 1) << (f.bit - drop)) * 0x10001)
            for f in fields
        )
        found.append(MaskedCodes(parts=parts, shift=low.bit - drop))
    return tuple(found)


_ONES = {"fp16": "0x3C003C00", "bf16": "0x3F803F80"}
_OFFSET = {"fp16": 0, "bf16": 128}  # the constant added to a field
_UNIT = {"fp16": 2.0**-24, "bf16": 1.0}  # the value of a code at bit 0 in a product


def unit_of(bits: int, dtype: str) -> float:
    """The value of one grid step in the sums of `multiply_ptx`."""
    return _UNIT[dtype] * 2.0 ** min(codes.shift for codes in masked_codes(bits, dtype))


@cache
def multiply_ptx(bits: int, dtype: str, scales: int, tiles: int, *, zeros: bool = False) -> Ptx:
    """acc += a k_tile of `tiles` row tiles times eight tokens. `scales`: per row and k_tile, 0 to 2; `zeros`: followed by as
    many zero points.

    Operands: 4 `tiles` sums (row g of tokens 2 t and 2 t + 1, then row g + 8); whether the k_tile exists; shared addresses
    of this lane's codes, of its scales, and of its activations in even and in odd mma_k32.
    """
    spans, codes = max(scales, 1), masked_codes(bits, dtype)  # span: the columns of one scale
    shifts, first, offset = sorted({c.shift for c in codes}), codes[0].shift, _OFFSET[dtype]
    zero = 0.0 if zeros else (1 << (bits - 1)) * _UNIT[dtype]
    acc = [f"acc{i}" for i in range(4 * tiles)]
    inputs = {f"{name}_in": str(i) for i, name in enumerate(acc)}
    inputs |= dict.fromkeys(("exists", "codes", "scales", "x_even", "x_odd"), "r")
    ptx = _Lines()
    ptx.add("setp.eq.s32 p, $exists, 0;", "@p bra.uni SKIP;")
    ptx.add(
        "mov.f32 none, 0f00000000;",
        f"mov.b32 one, {_ONES[dtype]};",
        f"mov.b32 offset, 0x{offset and 0x43004300:08X};",
    )
    for span in range(spans):
        begun: set[str] = set()
        for t in range(tiles):
            if scales:
                ptx.add(f"ld.shared.b32 scale{t}, [$scales + {128 * (scales * t + span)}];")
                if zeros:
                    ptx.add(f"ld.shared.b32 zero{t}, [$scales + {128 * (scales * (tiles + t) + span)}];")
        for j in range(span * 16 // spans, (span + 1) * 16 // spans):
            # activations of a pair of mma_k16, in 16 bytes
            if j % 2 == 0:
                registers = ", ".join(f"x{i}" for i in range(2 * j, 2 * j + 4))
                ptx.add(
                    f"ld.shared.v4.b32 {{{registers}}}, [{('$x_even', '$x_odd')[j // 2 % 2]} + {32 * j}];"
                )
            right = [f"x{2 * j}", f"x{2 * j + 1}"]
            # X_s, and P_s of every tile
            ptx.mma(f"ones{codes[j].shift if offset else first}_", ["one"] * 4, right, dtype, begun)
            for t in range(tiles):
                for word, rotate, _ in codes[j].parts:
                    ptx.load_word(t, word, rotate, f"[$codes + {512 * (bits * t + word)}]", begun)
                for e in range(4):
                    ptx.add(*_mask(codes[j], t, e, dtype))
                ptx.mma(f"dot{t}_{codes[j].shift}_", [f"weight{e}" for e in range(4)], right, dtype, begun)
        # per token of the lane: the contribution of offset and zero point, and the sums of activations for zero points
        ptx.add(*(f"mov.f32 {name}{i}, 0f00000000;" for name in ("excess", "x_sum") for i in range(2)))
        for shift in shifts if offset else [first]:
            for name, factor in (
                ("excess", -(offset * 2.0 ** (first - shift) + zero * 2.0**first)), ("x_sum", -_UNIT[dtype] * 2.0**first)
            ):  # fmt: skip
                ptx.add(
                    *(
                        f"fma.rn.f32 {name}{i}, ones{shift}_{i}, {ptx_float(factor)}, {name}{i};"
                        for i in range(2)
                    )
                )
        for t in range(tiles):
            ptx.add(*_join(shifts, t, scaled=scales > 0, zeros=zeros))
    rotated = sorted({(w, r) for c in codes for w, r, _ in c.parts if r})
    words = [f"code{t}_{i}_{e}" for t in range(tiles) for i in range(bits) for e in range(4)]
    words += [f"rot{t}_{w}_{r}_{e}" for t in range(tiles) for w, r in rotated for e in range(4)]
    words += [f"{name}{t}" for name in ("scale", "zero") for t in range(tiles)]
    words += ["one", "offset", *(f"weight{e}" for e in range(4)), *(f"x{i}" for i in range(32))]
    floats = [f"{name}{i}" for name in ("excess", "x_sum", "sum", "factor") for i in range(4)] + ["none"]
    floats += [f"dot{t}_{shift}_{i}" for t in range(tiles) for shift in shifts for i in range(4)]
    floats += [f"ones{shift}_{i}" for shift in shifts for i in range(4)]
    return inline_ptx(
        [*ptx.lines, "SKIP:"], outputs=dict.fromkeys(acc, "=&f"), inputs=inputs,
        registers={"pred": "p", "b16": "lo, hi", "f32": floats, "b32": words},
    )  # fmt: skip


class _Lines:
    """Lines of PTX. `begun`: accumulators that already hold a sum, and words already in registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def mma(self, sums: str, left: list[str], right: list[str], dtype: str, begun: set[str]) -> None:
        """sums (+)= left x right."""
        own = [f"{sums}{i}" for i in range(4)]
        before = own if sums in begun else ["none"] * 4
        begun.add(sums)
        self.add(mma_line("m16n8k16", mma_k16_types(dtype), own, left, right, before))

    def load_word(self, tile: int, word: int, rotate: int, address: str, begun: set[str]) -> None:
        """A word of this lane's packed codes, also rotated to the right."""
        name, rotated = f"code{tile}_{word}_", f"rot{tile}_{word}_{rotate}_"
        if name not in begun:
            self.add(f"ld.shared.v4.b32 {{{', '.join(f'{name}{e}' for e in range(4))}}}, {address};")
        if rotate and rotated not in begun:
            self.add(*(f"shf.r.wrap.b32 {rotated}{e}, {name}{e}, {name}{e}, {rotate};" for e in range(4)))
        begun |= {name, rotated}


def _mask(codes: MaskedCodes, tile: int, e: int, dtype: str) -> list[str]:
    """Lines that leave two codes in register `weight{e}`."""
    lines: list[str] = []
    for i, (word, rotate, mask) in enumerate(codes.parts):
        source = f"rot{tile}_{word}_{rotate}_{e}" if rotate else f"code{tile}_{word}_{e}"
        if i or dtype == "bf16":
            lines.append(
                f"lop3.b32 weight{e}, {source}, 0x{mask:08X}, {f'weight{e}' if i else 'offset'}, 0xEA;"
            )
        else:
            lines.append(f"and.b32 weight{e}, {source}, 0x{mask:08X};")
    return lines


def _join(shifts: list[int], tile: int, *, scaled: bool, zeros: bool) -> list[str]:
    """Lines that add a span's products of every shift to the sums of a tile."""
    lines, before = [], [f"excess{i % 2}" for i in range(4)]

    def unpack(packed: str) -> list[str]:
        """The values of rows g and g + 8."""
        return [f"mov.b32 {{lo, hi}}, {packed};", "cvt.f32.f16 factor0, lo;", "cvt.f32.f16 factor1, hi;"]

    if zeros:
        lines += unpack(f"zero{tile}")
        lines += [f"fma.rn.f32 sum{i}, factor{i // 2}, x_sum{i % 2}, {before[i]};" for i in range(4)]
        before = [f"sum{i}" for i in range(4)]
    for shift in shifts:
        factor = ptx_float(2.0 ** (shifts[0] - shift))
        lines += [f"fma.rn.f32 sum{i}, dot{tile}_{shift}_{i}, {factor}, {before[i]};" for i in range(4)]
        before = [f"sum{i}" for i in range(4)]
    acc = [f"$acc{4 * tile + i}" for i in range(4)]
    if not scaled:
        return lines + [f"add.f32 {acc[i]}, {acc[i]}, sum{i};" for i in range(4)]
    lines += unpack(f"scale{tile}")
    return lines + [f"fma.rn.f32 {acc[i]}, sum{i}, factor{i // 2}, {acc[i]};" for i in range(4)]


@cache
def copy_tokens_ptx(count: int, *, commit: bool) -> Ptx:
    """Start copying `count` tokens of a k_tile, 512 bytes each: with `commit` as a separate cp.async group, otherwise with
    the codes that are copied next.

    Operands: shared addresses of this lane's 16 bytes of even and of odd tokens; whether the k_tile exists; the number of
    tokens; the global address of the first, and the stride in bytes.
    """
    lines = ["setp.ne.s32 p, $exists, 0;", "mov.b64 from, $x;"]
    for i in range(count):
        to = ("$even", "$odd")[i % 2]
        lines += [
            f"setp.gt.and.s32 q, $tokens, {i}, p;",
            f"@q cp.async.ca.shared.global [{to} + {512 * i}], [from], 16;",
            "add.s64 from, from, $stride;",
        ]
    lines += ["cp.async.commit_group;"] * commit
    inputs = dict.fromkeys(("even", "odd", "exists", "tokens"), "r") | {"x": "l", "stride": "l"}
    return inline_ptx(lines, inputs=inputs, registers={"pred": "p, q", "b64": "from"})


@cache
def wait_ptx(in_flight: int, num_groups: int) -> Ptx:
    """Wait until all but the last `in_flight` cp.async groups of this lane have arrived, and those of the warps with the
    same columns, group number $column; named barrier 0 is the whole CTA's."""
    together = f"bar.sync barrier, {32 * num_groups};" if num_groups > 1 else SYNCWARP
    text = f"cp.async.wait_group {in_flight}; add.s32 barrier, $column, 1; {together}"
    return inline_ptx(text, inputs={"column": "r"}, registers={"b32": "barrier"})
