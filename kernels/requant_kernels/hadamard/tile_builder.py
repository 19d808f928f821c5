"""PTX of the Hadamard transform of a tile: 4096 values in the registers of 16 warps, 8 adjacent ones per lane.

A transform of 2^s values mixes the s bits of the index one by one, in any order; four bits at a time are a product with a
16 x 16 matrix of signs, one `mma.m16n8k16` for each 8 columns.

    bits 0 to 7      256 values of a warp: two products. The accumulators of the first are, without moving, the right
                     operand of the second
    bits 8 to 11     across the 16 warps: one product, whose right operand comes through shared memory
    int8             optionally: the largest absolute value, by REDUX on the bits of floats; then high and low bytes of
                     16-bit fixed point, four neighbours per store

In shared memory the 256 values of a warp are 260 words apart, and 16 columns are arranged so that a lane of the third
product ends with four neighbours of rows g and g + 8: what it reads as column 2 t + e of its n8 tile i is value 4 t + 2 i +
e. In every other pair of 16 columns the two n8 tiles are swapped. This avoids all bank conflicts.

Values enter the tensor cores as two bfloat16, the rounded value and the remainder, so a product is accurate to 2^-16. Where
a kernel does more than transform, they enter as tf32, of which the tensor cores ignore the low 13 bits, so a product takes
no other instructions and is accurate to 2^-12: what such a kernel writes is rounded to 16 bits anyway. Cutting off bits
makes values smaller by 2^-11.5 on average (of normal ones, in the sense of least squares), which the kernel's factor makes
good (TF32_FACTOR).
"""

import struct
from collections.abc import Callable

from requant_kernels.common.ptx import PtxBuilder, mma_k16_types, mma_line

HADAMARD_TILE = 4096  # values per CTA, which share a scale in int8
MAX_INT = 32512  # 127 * 256, the fixed-point limit: the high byte is never 128
MIN_SCALE_BITS = 0x03800000  # 2^-120, the smallest scale that has an inverse
ROUNDING_BITS = 0x4B400000  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
TF32_FACTOR = (1 + 2**-11.47) ** 3  # of a transform by three products in tf32
WARP_STRIDE = 1040  # bytes from one warp's values to the next warp's, in shared memory
VALUES_BYTES = 16 * WARP_STRIDE


# addresses in shared memory: two where a lane writes, two where it reads
Exchange = tuple[str, str, str, str]


class TileBuilder(PtxBuilder):
    """Appends the stages of a tile's transform; `tf32`: in tf32, less TF32_FACTOR."""

    def __init__(self, *, tf32: bool = False) -> None:
        super().__init__()
        self.tf32 = tf32

    def split_bf16(self, low: str, high: str) -> tuple[str, str]:
        """Pairs of bfloat16: two float32 values rounded, and their remainders."""
        rounded = self.new("rounded", f"cvt.rn.bf16x2.f32 {{d}}, {high}, {low};")
        a = self.new("value", f"shl.b32 {{d}}, {rounded}, 16;")
        b = self.new("value", f"and.b32 {{d}}, {rounded}, 0xffff0000;")
        a, b = (
            self.new("rest", f"sub.f32 {{d}}, {low}, {a};"),
            self.new("rest", f"sub.f32 {{d}}, {high}, {b};"),
        )
        return rounded, self.new("rests", f"cvt.rn.bf16x2.f32 {{d}}, {b}, {a};")

    def multiply(self, signs: tuple[str, ...], rows: list[str], out: list[str]) -> None:
        """out = signs [16, 16] @ a matrix of 8 columns, whose rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 are `rows`."""
        if self.tf32:
            sums = ["0f00000000"] * 4
            for i in range(2):
                to = out if i else [self.register("acc") for _ in range(4)]
                own, part = signs[4 * i : 4 * i + 4], rows[2 * i : 2 * i + 2]
                self.emit(mma_line("m16n8k8", "f32.tf32.tf32.f32", to, own, part, sums))
                sums = to
            return
        parts = list(zip(self.split_bf16(*rows[:2]), self.split_bf16(*rows[2:]), strict=True))
        sums = ["0f00000000"] * 4
        for i, part in enumerate(parts[::-1]):  # the remainders first
            to = out if i else [self.register("acc") for _ in range(4)]
            self.emit(mma_line("m16n8k16", mma_k16_types("bf16"), to, signs, part, sums))
            sums = to

    def sign_fragment(self, quadrant: str, *, mixes_halves: bool = True) -> tuple[str, ...]:
        """The left operand's four registers; `quadrant` holds a lane's signs of 8 x 8: [[H, H], [H, -H]], or
        [[H, 0], [0, H]] if the halves are not mixed. In tf32 two operands of eight columns, eight registers: columns 2 t
        and 2 t + 1 of the sixteen are t and t + 4 of the first, 2 t + 8 and 2 t + 9 those of the second."""
        zero = self.new("zero", "mov.b32 {d}, 0;")
        negated = self.new("negated", f"xor.b32 {{d}}, {quadrant}, 0x80008000;") if mixes_halves else zero
        if not self.tf32:
            return (
                (quadrant, quadrant, quadrant, negated) if mixes_halves else (quadrant, zero, zero, quadrant)
            )

        def even_and_odd(pair: str) -> tuple[str, str]:
            """Two bfloat16 as float32, which tf32 holds exactly."""
            even = self.new("sign", f"shl.b32 {{d}}, {pair}, 16;")
            return even, self.new("sign", f"and.b32 {{d}}, {pair}, 0xffff0000;")

        even, odd = even_and_odd(quadrant)
        # computed in another way, so that ptxas holds both: an operand's registers are adjacent, so it would copy them
        # before every product
        even_again = self.new("sign", f"prmt.b32 {{d}}, {quadrant}, {zero}, 0x1044;")
        odd_again = self.new("sign", f"prmt.b32 {{d}}, {quadrant}, {zero}, 0x3244;")
        if not mixes_halves:
            return even, zero, odd, zero, zero, even_again, zero, odd_again
        minus_even, minus_odd = even_and_odd(negated)
        third_even = self.new("sign", f"prmt.b32 {{d}}, {zero}, {quadrant}, 0x5400;")
        third_odd = self.new("sign", f"prmt.b32 {{d}}, {zero}, {quadrant}, 0x7600;")
        return even, even_again, odd, odd_again, third_even, minus_even, third_odd, minus_odd

    def transform_warp(
        self, x: list[str], first: str, second: str, out: list[str], *, second_mixes_halves: bool = True
    ) -> None:
        """The two products of a warp's 256 values."""
        self.comment("bits 0, 1, 3, 4: values 0 to 3 and 4 to 7 of all lanes are two n8 tiles, column g")
        upper, lower = [self.register("acc") for _ in range(4)], [self.register("acc") for _ in range(4)]
        signs = self.sign_fragment(first)
        self.multiply(signs, x[:4], upper)
        self.multiply(signs, x[4:], lower)
        self.comment("bits 2, 5, 6, 7: the accumulators are the right operand, in which g has become the row")
        signs = self.sign_fragment(second, mixes_halves=second_mixes_halves)
        self.multiply(signs, upper[:2] + lower[:2], [*out[:2], *out[4:6]])
        self.multiply(signs, upper[2:] + lower[2:], [*out[2:4], *out[6:]])

    def thread(self) -> tuple[str, str, str]:
        """Number of the thread, its lane and its warp."""
        thread = self.new("thread", "mov.u32 {d}, %tid.x;")
        lane = self.new("lane", f"and.b32 {{d}}, {thread}, 31;")
        return thread, lane, self.new("warp", f"shr.u32 {{d}}, {thread}, 5;")

    def exchange(self, smem: str, lane: str, warp: str) -> Exchange:
        """Where a lane writes and reads between the second product and the third, in shared memory from `smem` on."""
        new = self.new
        base = new("base", f"mov.u32 {{d}}, {smem};")
        self.comment(
            "where a lane writes: its pair of 16 columns, its half of one, and the swap of every other pair"
        )
        offset = new("offset", f"shr.u32 {{d}}, {lane}, 1;")
        offset = new("offset", f"shl.b32 {{d}}, {offset}, 6;")
        half = new("half", f"and.b32 {{d}}, {lane}, 1;")
        offset = new("offset", f"mad.lo.u32 {{d}}, {half}, 16, {offset};")
        swap = new("swap", f"shl.b32 {{d}}, {lane}, 3;")
        swap = new("swap", f"and.b32 {{d}}, {swap}, 32;")
        offset = new("offset", f"add.u32 {{d}}, {offset}, {swap};")
        own = new("own", f"mad.lo.u32 {{d}}, {warp}, {WARP_STRIDE}, {base};")
        first = new("store_to", f"add.u32 {{d}}, {own}, {offset};")
        offset = new("offset", f"xor.b32 {{d}}, {offset}, 32;")
        store_to = first, new("store_to", f"add.u32 {{d}}, {own}, {offset};")
        self.comment(
            "where it reads: rows 2 t of 16 columns, which are the warp's, column g of both n8 tiles"
        )
        g, quarter = new("g", f"shr.u32 {{d}}, {lane}, 2;"), new("quarter", f"and.b32 {{d}}, {lane}, 3;")
        offset = new("offset", f"shl.b32 {{d}}, {warp}, 4;")
        swap = new("swap", f"and.b32 {{d}}, {offset}, 32;")
        offset = new("offset", f"shl.b32 {{d}}, {warp}, 6;")
        offset = new("offset", f"mad.lo.u32 {{d}}, {g}, 4, {offset};")
        offset = new("offset", f"mad.lo.u32 {{d}}, {quarter}, {2 * WARP_STRIDE}, {offset};")
        offset = new("offset", f"add.u32 {{d}}, {offset}, {base};")
        first = new("load_from", f"add.u32 {{d}}, {offset}, {swap};")
        swap = new("swap", f"xor.b32 {{d}}, {swap}, 32;")
        return *store_to, first, new("load_from", f"add.u32 {{d}}, {offset}, {swap};")

    def transform_tile(
        self, exchange: Exchange, x: list[str], signs: tuple[str, str, str], mix_bit_11: bool, out: list[str], *,
        second_mixes_halves: bool = True, waits: bool = False,
    ) -> None:  # fmt: skip
        """All three products, through VALUES_BYTES of shared memory per tile (`exchange`).

        For several tiles x and out hold eight values each, tile after tile, and the tiles share a barrier. Without
        `mix_bit_11` (blocks of less than 4096) the third matrix is [[H, 0], [0, H]]. `waits`: a barrier before the first
        write, needed if other warps may still read the results of the kernel's previous transform.
        """
        new, store_to, load_from = self.new, exchange[:2], exchange[2:]
        count = len(x) // 8
        mixed = [self.register("mixed") for _ in x]
        for tile in range(count):
            own_values = slice(8 * tile, 8 * tile + 8)
            self.transform_warp(
                x[own_values], signs[0], signs[1], mixed[own_values], second_mixes_halves=second_mixes_halves
            )
        if waits:
            self.emit("bar.sync 0;")
        for tile in range(count):
            for address, four in zip(store_to, ((0, 1, 4, 5), (2, 3, 6, 7)), strict=True):
                values = ", ".join(mixed[8 * tile + i] for i in four)
                self.emit(f"st.shared.v4.b32 [{address} + {tile * VALUES_BYTES}], {{{values}}};")
        self.emit("bar.sync 0;")
        self.comment("bits 8 to 11: rows are warps")
        third = self.sign_fragment(signs[2], mixes_halves=mix_bit_11)
        columns = [
            [
                new("row", f"ld.shared.b32 {{d}}, [{load_from[n8]} + {tile * VALUES_BYTES + WARP_STRIDE * row}];")
                for row in (0, 1, 8, 9)
            ]
            for tile in range(count) for n8 in range(2)
        ]  # fmt: skip
        for i, rows in enumerate(columns):
            self.multiply(third, rows, [out[8 * (i // 2) + 2 * (i % 2) + j] for j in (0, 1, 4, 5)])

    def sum_of_warps(self, lane: str, words: str, out: str) -> None:
        """The sum of 16 words of shared memory, in every thread."""
        own = self.new("own", f"and.b32 {{d}}, {lane}, 15;")
        own = self.new("own", f"mad.lo.u32 {{d}}, {own}, 4, {words};")
        total = self.new("total", f"ld.shared.b32 {{d}}, [{own}];")
        for lanes in (8, 4, 2, 1):
            other = self.new("other", f"shfl.sync.bfly.b32 {{d}}, {total}, {lanes}, 0x1f, 0xffffffff;")
            total = self.new("total", f"add.f32 {{d}}, {total}, {other};")
        self.emit(f"mov.b32 {out}, {total};")

    def quantize(
        self, values: list[str], smem: tuple[str, ...], lane: str, warp: str, space: str, to: tuple[str, str],
        next_four: int = 2048, meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:  # fmt: skip
        """Store the high and the low bytes of a lane's eight values at the addresses `to` in state space `space`, the second
        four `next_four` bytes after the first; returns the scale and the sum of the integers, the same in all threads, then
        those of the high bytes alone if `smem` has words for their sums.

        `smem`: 16 words of shared memory each for the warps' largest values, their sums, and optionally the high bytes'.
        `meanwhile` appends what can be done while other warps look for their largest value.
        """
        new = self.new
        self.comment("the largest absolute value of a lane, a warp, all warps")
        greatest = [new("abs", f"abs.f32 {{d}}, {value};") for value in values]
        while len(greatest) > 1:
            halves = zip(greatest[::2], greatest[1::2], strict=True)
            greatest = [new("greatest", f"max.NaN.f32 {{d}}, {a}, {b};") for a, b in halves]
        begin = [new("begin", f"mov.u32 {{d}}, {name};") for name in smem]
        of_warp = [new("of_warp", f"mad.lo.u32 {{d}}, {warp}, 4, {address};") for address in begin]
        other = new("other", f"and.b32 {{d}}, {lane}, 15;")
        of_other = [new("of_other", f"mad.lo.u32 {{d}}, {other}, 4, {address};") for address in begin]
        # the bits of nonnegative floats compare like integers
        most = new("most", f"redux.sync.max.u32 {{d}}, {greatest[0]}, 0xffffffff;")
        self.emit(f"st.shared.b32 [{of_warp[0]}], {most};")
        meanwhile()
        self.emit("bar.sync 0;")
        most = new("most", f"ld.shared.b32 {{d}}, [{of_other[0]}];")
        most = new("most", f"redux.sync.max.u32 {{d}}, {most}, 0xffffffff;")
        self.comment("the scale, and the values as integers in the low bits of a float")
        scale = new("scale", f"mul.f32 {{d}}, {most}, 0f{_float_bits(1 / MAX_INT):08X};")
        scale = new("scale", f"max.NaN.f32 {{d}}, {scale}, 0f{MIN_SCALE_BITS:08X};")
        inverse = new("inverse", f"rcp.approx.ftz.f32 {{d}}, {scale};")
        integers = [
            new("integer", f"fma.rn.f32 {{d}}, {value}, {inverse}, 0f{ROUNDING_BITS:08X};")
            for value in values
        ]
        self.comment("bytes of four neighbours: (q + 128) / 256, and q mod 256 as a signed byte")
        high_total = "0"
        for i in range(2):
            four = integers[4 * i : 4 * i + 4]
            raised = [new("raised", f"add.u32 {{d}}, {value}, 128;") for value in four]
            for address, source, byte in ((to[0], raised, 1), (to[1], four, 0)):
                selector = f"0x00{byte + 4}{byte}"
                pairs = [
                    new("pair", f"prmt.b32 {{d}}, {source[j]}, {source[j + 1]}, {selector};") for j in (0, 2)
                ]
                both = new("bytes", f"prmt.b32 {{d}}, {pairs[0]}, {pairs[1]}, 0x5410;")
                self.emit(f"st.{space}.b32 [{address} + {next_four * i}], {both};")
                if byte == 1 and len(smem) > 2:
                    high_total = new("high_total", f"dp4a.s32.s32 {{d}}, {both}, 0x01010101, {high_total};")
        self.comment("the sum of the integers of a lane, a warp, all warps")
        total = integers[0]
        for value in integers[1:]:
            total = new("total", f"add.u32 {{d}}, {total}, {value};")
        total = new("total", f"sub.u32 {{d}}, {total}, 0x{8 * ROUNDING_BITS & 0xFFFFFFFF:08x};")
        sums = [total, high_total][: len(smem) - 1]
        sums = [new("total", f"redux.sync.add.s32 {{d}}, {own}, 0xffffffff;") for own in sums]
        self.emit(
            *(f"st.shared.b32 [{at}], {own};" for at, own in zip(of_warp[1:], sums, strict=True)),
            "bar.sync 0;",
        )
        sums = [new("total", f"ld.shared.b32 {{d}}, [{at}];") for at in of_other[1:]]
        sums = [new("total", f"redux.sync.add.s32 {{d}}, {own}, 0xffffffff;") for own in sums]
        sums = [new("total", f"shr.s32 {{d}}, {own}, 1;") for own in sums]  # each of 16 warps was added twice
        sums = [new("total", f"cvt.rn.f32.s32 {{d}}, {own};") for own in sums]
        found = [scale, sums[0]]
        if len(smem) > 2:
            found += [new("high_scale", f"mul.f32 {{d}}, {scale}, 0f{_float_bits(256.0):08X};"), sums[1]]
        return found


def _float_bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")
