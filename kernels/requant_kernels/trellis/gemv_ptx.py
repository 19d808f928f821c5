"""PTX of `gemv.py`: MMAs of hashes and activations, loads, the cross-warp reduction, stores.

**Byte-sum codes on integer tensor cores.** The value of `mul1` is the sum of the four bytes of a hash, so weight times
activation is a dot product of four bytes with four copies of the activation. The hash, straight from the multiplier, is an
operand register of `mma.m16n8k32` with unsigned bytes: nothing is summed, shuffled or converted. `pair` derives two weights
from one hash, b0 + b1 + b2 + b3 and b0 - b1 - b2 + b3, and their products with x1 and x2 add up to

    b0 (x1 + x2) + b1 (x1 - x2) + b2 (x1 - x2) + b3 (x1 + x2)

so one operand register serves two weights; the rotation writes sums and differences of neighbours instead of x1, x2.

**Float16 on floating-point tensor cores**, `mma.m16n8k16`. The values of `3inst` are not sums of bytes. Of sums, DP4A makes
1024 + b0 + b1 + b2 + b3 in float16, exactly, which is BYTE_SUM_OFFSET too much for every weight: its product with the
activations is one more MMA for all row tiles, whose sums the kernel subtracts. A weight costs one and a half instructions
more than as four bytes (DP4A, half of a PRMT), but an MMA does for eight weights of eight tokens in 16 bits what otherwise
four do, each for as many issue cycles.
"""

from functools import cache

from requant_kernels.common.ptx import Ptx, PtxBuilder, inline_ptx, mma_k16_types, mma_line
from requant_kernels.trellis.code_ptx import (
    BYTE_SUM_OFFSET,
    MAX_INTERLEAVED_TILES,
    ROW_WEIGHTS,
    SegmentDecoder,
    WeightDecoder,
)
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import k64_per_unit


class ReplicatedActivations:
    """The B operands of a k64: the four bytes multiplied by a hash, built on first use and shared by all row tiles."""

    def __init__(self, ptx: PtxBuilder, code: str, first_registers: list[int]) -> None:
        """`first_registers`: per n8 tile, the first of the four registers with a lane's sixteen bytes of a row of its
        tile."""
        self.ptx, self.weights_per_hash = ptx, CODES[code].weights_per_hash
        self.first_registers = first_registers
        self._operands: dict[tuple[int, int], str] = {}

    def operand(self, n8: int, index: int) -> str:
        """The operand multiplied by hash `index` of a row."""
        if (n8, index) not in self._operands:
            if self.weights_per_hash == 1:  # one activation four times
                source, selector = index // 4, index % 4 * 0x1111
            else:  # a sum and a difference: s d d s
                source, selector = index // 2, 0x2332 if index % 2 else 0x0110
            self._operands[n8, index] = self.ptx.new(
                "x", f"prmt.b32 {{d}}, ${self.first_registers[n8] + source}, 0x0, 0x{selector:04x};"
            )
        return self._operands[n8, index]


@cache
def int8_mma_ptx(code: str, quad_bits: int, row_tiles: int, n8_tiles: int) -> Ptx:
    """Multiply `row_tiles` x 16 rows of a unit by 8 `n8_tiles` columns of int8 activations, accumulating in int32.

    Outputs: 4 accumulators for each row tile and n8 tile (n8 tiles fastest). Inputs: the same accumulators, the words of
    each row tile, 4 registers of activations for each n8 tile and k64 (k64 fastest), the lane that holds the bits before.
    """
    accumulators, k64_count = 4 * row_tiles * n8_tiles, k64_per_unit(quad_bits)
    words = quad_bits * k64_count // 4
    first_word, first_x = 2 * accumulators, 2 * accumulators + row_tiles * words
    previous_lane = f"${first_x + 4 * n8_tiles * k64_count}"
    hashes_of_row = ROW_WEIGHTS // CODES[code].weights_per_hash
    # k is 32 bytes per MMA, 8 hashes: each lane supplies two, from both halves of a row of its tile
    hash_pairs = [(i, i + hashes_of_row // 2) for i in range(hashes_of_row // 2)]
    ptx = PtxBuilder()
    sums = [[f"${accumulators + 4 * i + j}" for j in range(4)] for i in range(row_tiles * n8_tiles)]
    interleaved = row_tiles if row_tiles <= MAX_INTERLEAVED_TILES else 1
    for k64 in range(k64_count):
        activations = ReplicatedActivations(
            ptx, code, [first_x + 4 * (n8 * k64_count + k64) for n8 in range(n8_tiles)]
        )
        for first_tile in range(0, row_tiles, interleaved):
            tiles = range(first_tile, first_tile + interleaved)
            segments = {}
            for r in tiles:
                own = [f"${first_word + r * words + i}" for i in range(words)]
                segments[r] = SegmentDecoder(ptx, code, quad_bits, own, k64, previous_lane)
            for segment in segments.values():
                # as many as balance the integer pipe against the multiplier's
                replications = n8_tiles * hashes_of_row // row_tiles
                segment.dot_windows = (segment.funnel_shifts + replications) // 2
            ptx.comment(f"k64 {k64}, row tiles {tiles[0]} to {tiles[-1]}: hash and multiply")
            for pair in hash_pairs:
                x = [[activations.operand(n8, i) for i in pair] for n8 in range(n8_tiles)]
                last = k64 == k64_count - 1 and pair == hash_pairs[-1]
                for r in tiles:
                    for n8 in range(n8_tiles):
                        i = r * n8_tiles + n8
                        hashes = [segments[r].hash(row * hashes_of_row + j) for j in pair for row in range(2)]
                        d = [f"${4 * i + j}" if last else ptx.register("acc") for j in range(4)]
                        ptx.emit(mma_line("m16n8k32", "s32.u8.s8.s32", d, hashes, x[n8], sums[i]))
                        sums[i] = d
    inputs = accumulators + row_tiles * words + 4 * n8_tiles * k64_count + 1
    return ptx.build(["=r"] * accumulators + ["r"] * inputs)


@cache
def fp16_mma_ptx(code: str, quad_bits: int, row_tiles: int, n8_tiles: int) -> Ptx:
    """`int8_mma_ptx` for float16 activations, 8 registers for each n8 tile and k64, accumulating in float32. Of byte sums
    there are 4 accumulators more for each n8 tile: of BYTE_SUM_OFFSET times the activations."""
    products, byte_sums = row_tiles * n8_tiles, CODES[code].byte_sums
    accumulators, k64_count = 4 * (products + n8_tiles * byte_sums), k64_per_unit(quad_bits)
    words = quad_bits * k64_count // 4
    first_word, first_x = 2 * accumulators, 2 * accumulators + row_tiles * words
    previous_lane = f"${first_x + 8 * n8_tiles * k64_count}"
    ptx = PtxBuilder()
    sums = [[f"${accumulators + 4 * i + j}" for j in range(4)] for i in range(accumulators // 4)]
    offset = (
        [ptx.new("offset", f"mov.b32 {{d}}, 0x{BYTE_SUM_OFFSET * 0x10001:08x};")] * 4 if byte_sums else []
    )
    for k64 in range(k64_count):
        segments = [
            WeightDecoder(
                ptx, code, quad_bits, [f"${first_word + r * words + i}" for i in range(words)], k64, previous_lane
            )
            for r in range(row_tiles)
        ]  # fmt: skip
        ptx.comment(f"k64 {k64}: decode and multiply 16 columns at a time")
        for k16 in range(4):
            last = k64 == k64_count - 1 and k16 == 3
            a_of = [
                [segment.pair(8 * row + 2 * k16 + i) for i in range(2) for row in range(2)]
                for segment in segments
            ]
            for i in range(accumulators // 4):
                x = first_x + 8 * (i % n8_tiles * k64_count + k64) + 2 * k16
                d = [f"${4 * i + j}" if last else ptx.register("acc") for j in range(4)]
                b = [f"${x}", f"${x + 1}"]
                a = a_of[i // n8_tiles] if i < products else offset
                ptx.emit(mma_line("m16n8k16", mma_k16_types("fp16"), d, a, b, sums[i]))
                sums[i] = d
    inputs = row_tiles * words + 8 * n8_tiles * k64_count + 1
    return ptx.build(["=f"] * accumulators + ["f"] * accumulators + ["r"] * inputs)


@cache
def load_activations_ptx(byte_offset: int, *, shared: bool = False) -> Ptx:
    """A lane's load of 16 bytes of activations, `byte_offset` bytes after the address."""
    space, address = ("shared", "r") if shared else ("global", "l")
    return inline_ptx(
        f"ld.{space}.v4.b32 {{$x0, $x1, $x2, $x3}}, [$address + {byte_offset}];",
        outputs=dict.fromkeys(("x0", "x1", "x2", "x3"), "=r"),
        inputs={"address": address},
    )


# per Hadamard tile
LOAD_SCALES = inline_ptx(
    "ld.global.v2.f32 {$scale, $total}, [$address];",
    outputs={"scale": "=f", "total": "=f"},
    inputs={"address": "l"},
)
# predicated on a nonzero condition
STORE = inline_ptx(
    "setp.ne.b32 p, $condition, 0; @p st.global.f32 [$address], $value;",
    inputs={"address": "l", "value": "f", "condition": "r"}, registers={"pred": "p"},
)  # fmt: skip


@cache
def cross_warp_sum_ptx(num_warps: int, count: int, *, given_memory: bool = False) -> Ptx:
    """Sum `count` values of every lane over the warps in a fixed order: value i + num_warps j becomes output j of warp i.

    Outputs: max(1, count / num_warps). Inputs: `count` values, warp, lane; if `given_memory` also a shared memory address.
    With fewer values than warps, several warps compute the same ones. `count` is a power of two, or less than `num_warps`.
    """
    outputs, power_of_two = max(1, count // num_warps), count & (count - 1) == 0
    value, (warp, lane) = outputs, (f"${outputs + count}", f"${outputs + count + 1}")
    ptx, declarations = PtxBuilder(), ""
    base = f"${outputs + count + 2}"
    if not given_memory:
        declarations = f".shared .align 16 .b32 sums[{num_warps * count * 32}];\n"
        base = ptx.new("base", "mov.u32 {d}, sums;")
    ptx.comment("store this lane's values, [value, warp, lane]")
    of_lane = ptx.new("of_lane", f"mad.lo.u32 {{d}}, {lane}, 4, {base};")
    of_warp = ptx.new("of_warp", f"mad.lo.u32 {{d}}, {warp}, 128, {of_lane};")
    ptx.emit(*(f"st.shared.b32 [{of_warp} + {128 * num_warps * i}], ${value + i};" for i in range(count)))
    ptx.emit("bar.sync 0;")
    ptx.comment("load all warps' parts of the values that this warp adds")
    limit = min(num_warps, count) - 1
    first = ptx.new("first", f"{'and.b32' if power_of_two else 'min.u32'} {{d}}, {warp}, {limit};")
    first = ptx.new("first", f"mad.lo.u32 {{d}}, {first}, {128 * num_warps}, {of_lane};")
    for output in range(outputs):
        at = 128 * num_warps * num_warps * output
        parts = [
            ptx.new("part", f"ld.shared.b32 {{d}}, [{first} + {at + 128 * w}];") for w in range(num_warps)
        ]
        while len(parts) > 2:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [ptx.new("part", f"add.f32 {{d}}, {a}, {b};") for a, b in pairs]
        ptx.emit(f"add.f32 ${output}, {parts[0]}, {parts[1]};")
    constraints = ["=f"] * outputs + ["f"] * count + ["r"] * (3 if given_memory else 2)
    return ptx.build(constraints, declarations)
