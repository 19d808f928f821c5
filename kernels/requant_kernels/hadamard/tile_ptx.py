"""The blocks of PTX that kernels inline for the Hadamard transform of a tile, by the stages of `tile_builder.py`.

a warp, a tile          for kernels that do nothing else (`batched.py`, `tile_kernel.py`)
register_*, sum_*       for kernels that keep values in registers (`registers.py`), in tf32
fused_*                 for a product whose CTAs each rotate the token (`trellis/fused_hadamard.py`), in tf32
"""

from functools import cache
from typing import cast

from requant_kernels.common.ptx import Ptx, PtxBuilder, inline_ptx
from requant_kernels.hadamard.tile_builder import VALUES_BYTES, Exchange, TileBuilder

# shared memory of a transform fused into another kernel: high bytes, low bytes, the kernel's cross-warp sums, 32 words
LOW_BYTES_OFFSET = 4096 + 64  # the 64 avoid bank conflicts between high and low bytes
SUMS_OFFSET = 2 * LOW_BYTES_OFFSET
MIN_SUM_BYTES, MAX_SUM_BYTES = 16384, 28672


@cache
def warp_transform_ptx() -> Ptx:
    """256 values of a warp. Outputs: 8. Inputs: 8 values; 8 times the lane's signs of the first product, and of the
    second."""
    ptx = TileBuilder()
    ptx.transform_warp([f"${8 + i}" for i in range(8)], "$16", "$24", [f"${i}" for i in range(8)])
    return ptx.build(["=f"] * 8 + ["f"] * 8 + ["r"] * 16)


@cache
def tile_transform_ptx(mix_bit_11: bool, int8: bool) -> Ptx:
    """A tile. Outputs: 8. Inputs: 8 values, 8 times the lane's signs of each of the three products.

    A lane's outputs are four neighbours of row g of the 16, at column 16 warp + 4 t, then of row g + 8. With `int8` it
    stores their bytes instead (the outputs are undefined), and takes 8 times each the address of its high bytes of row g,
    that of its low bytes, and that of the tile's scales and sums, which one thread stores.
    """
    ptx = TileBuilder()
    outputs = [f"${i}" for i in range(8)]
    declarations = f".shared .align 16 .b32 values[{VALUES_BYTES // 4}];\n"
    results = [ptx.register("result") for _ in range(8)] if int8 else outputs
    values = [f"${8 + i}" for i in range(8)]
    thread, lane, warp = ptx.thread()
    exchange = ptx.exchange("values", lane, warp)
    ptx.transform_tile(exchange, values, ("$16", "$24", "$32"), mix_bit_11, results)
    constraints = ["=f"] * 8 + ["f"] * 8 + ["r"] * 24
    if int8:
        smem = ("maxima", "totals", "high_totals")
        found = ptx.quantize(results, smem, lane, warp, "global", ("$40", "$48"))
        ptx.emit(f"setp.eq.u32 p, {thread}, 0;", f"@p st.global.v4.b32 [$56], {{{', '.join(found)}}};")
        ptx.emit(*(f"mov.b32 {name}, 0;" for name in outputs))
        declarations += "".join(f".shared .b32 {name}[16];\n" for name in smem) + ".reg .pred p;\n"
        constraints += ["l"] * 24
    return ptx.build(constraints, declarations)


@cache
def register_transform_ptx(
    second_mixes_halves: bool, third_mixes_halves: bool, *, tiles: int = 1, waits: bool = False
) -> Ptx:
    """Tiles that stay in registers, for tensors of one element per thread (`registers.py`).

    Outputs: 8 per tile. Inputs: as many values, the signs of three products, the four addresses of `exchange_ptx`.
    """
    ptx, count = TileBuilder(tf32=True), 8 * tiles
    outputs, values = [f"${i}" for i in range(count)], [f"${count + i}" for i in range(count)]
    results = [ptx.register("result") for _ in range(count)]
    first, second, third, *addresses = (f"${2 * count + i}" for i in range(7))
    ptx.transform_tile(
        cast(Exchange, tuple(addresses)), values, (first, second, third), third_mixes_halves, results,
        second_mixes_halves=second_mixes_halves, waits=waits,
    )  # fmt: skip
    ptx.emit(*(f"mov.b32 {to}, {result};" for to, result in zip(outputs, results, strict=True)))
    return ptx.build(["=f"] * count + ["f"] * count + ["r"] * 7)


@cache
def register_transform_int8_ptx(
    second_mixes_halves: bool, third_mixes_halves: bool, *, next_four: int, waits: bool = False
) -> Ptx:
    """The same in int8, stored in global memory.

    Outputs, the same in all threads: the tile's scale, the sum of its integers, the sum of their high bytes, and what
    `sum_warp_ptx` has stored before, added. Inputs: 8 values, the signs of three products, the four addresses of
    `exchange_ptx`, that of 64 words of shared memory, of the thread's high bytes, and of its low bytes.
    """
    ptx = TileBuilder(tf32=True)
    values = [f"${4 + i}" for i in range(8)]
    results = [ptx.register("result") for _ in range(8)]
    _, lane, warp = ptx.thread()
    ptx.transform_tile(
        ("$15", "$16", "$17", "$18"),
        values,
        ("$12", "$13", "$14"),
        third_mixes_halves,
        results,
        second_mixes_halves=second_mixes_halves,
        waits=waits,
    )
    words = ["$19", *(ptx.new("words", f"add.u32 {{d}}, $19, {64 * i};") for i in (1, 2, 3))]
    scale, total, _, high_total = ptx.quantize(
        results, tuple(words[:3]), lane, warp, "global", ("$20", "$21"), next_four=next_four,
        meanwhile=lambda: ptx.sum_of_warps(lane, words[3], "$3"),
    )  # fmt: skip
    ptx.emit(*(f"mov.b32 ${i}, {value};" for i, value in enumerate((scale, total, high_total))))
    return ptx.build(["=f"] * 4 + ["f"] * 8 + ["r"] * 8 + ["l"] * 2)


@cache
def exchange_ptx() -> Ptx:
    """The addresses of `TileBuilder.exchange`, which kernels compute once.

    Outputs: 4. Inputs: the address of VALUES_BYTES of shared memory per tile, the lane, the warp.
    """
    ptx = TileBuilder()
    ptx.emit(*(f"mov.b32 ${i}, {address};" for i, address in enumerate(ptx.exchange("$4", "$5", "$6"))))
    return ptx.build(["=r"] * 4 + ["r"] * 3)


def fused_smem_bytes(sum_bytes: int) -> int:
    """Shared memory of a transform fused into a kernel whose cross-warp sums take `sum_bytes`."""
    return SUMS_OFFSET + max(MIN_SUM_BYTES, sum_bytes) + 128


@cache
def fused_transform_ptx(mix_bit_11: bool, smem_bytes: int) -> Ptx:
    """A tile in int8 that stays in shared memory, for tensors of one element per thread.

    Outputs: scale and sum, the same in all lanes. Inputs: 8 values, the signs of three products, the four addresses of
    `exchange_ptx`, that of `smem_bytes` of shared memory, the addresses of the lane's high bytes of row g and of its low
    bytes, below SUMS_OFFSET, where the values were exchanged.
    """
    ptx = TileBuilder(tf32=True)
    results = [ptx.register("result") for _ in range(8)]
    values = [f"${2 + i}" for i in range(8)]
    _, lane, warp = ptx.thread()
    ptx.transform_tile(("$13", "$14", "$15", "$16"), values, ("$10", "$11", "$12"), mix_bit_11, results)
    maxima, totals = (ptx.new("words", f"add.u32 {{d}}, $17, {smem_bytes - 128 + 64 * i};") for i in range(2))
    scale, total = ptx.quantize(results, (maxima, totals), lane, warp, "shared", ("$18", "$19"))
    ptx.emit(f"mov.b32 $0, {scale};", f"mov.b32 $1, {total};")
    return ptx.build(["=f"] * 2 + ["f"] * 8 + ["r"] * 10)


@cache
def sum_warp_ptx() -> Ptx:
    """The sum over a warp of one value per thread, into shared memory.

    Output: the sum, in every lane. Inputs: the value, its lane and warp, the address of 16 words, one for each warp.
    """
    ptx = PtxBuilder()
    total = "$1"
    for lanes in (16, 8, 4, 2, 1):
        other = ptx.new("other", f"shfl.sync.bfly.b32 {{d}}, {total}, {lanes}, 0x1f, 0xffffffff;")
        total = ptx.new("total", f"add.f32 {{d}}, {total}, {other};")
    own = ptx.new("own", "mad.lo.u32 {d}, $3, 4, $4;")
    ptx.emit("setp.eq.u32 p, $2, 0;", f"@p st.shared.b32 [{own}], {total};", f"mov.b32 $0, {total};")
    return ptx.build(["=f", "f", "r", "r", "r"], ".reg .pred p;\n")


@cache
def sum_of_warps_ptx(waits: bool) -> Ptx:
    """The sum of what `sum_warp_ptx` stored, in every thread; `waits`: at a barrier, unless there was one since.

    Output: the sum. Inputs: the lane, the address of the 16 words.
    """
    ptx = TileBuilder()
    if waits:
        ptx.emit("bar.sync 0;")
    ptx.sum_of_warps("$1", "$2", "$0")
    return ptx.build(["=f", "r", "r"])


@cache
def allocate_smem_ptx(size: int) -> Ptx:
    """Output: the address of `size` bytes of shared memory. Input: one, ignored."""
    return Ptx(text=f"{{ .shared .align 16 .b8 smem[{size}]; mov.u32 $0, smem; }}", constraints="=r,r")


@cache
def load_eight_ptx(dtype: str) -> Ptx:
    """Load eight neighbours, float16 or bfloat16, as float32. Outputs: 8. Input: the address."""
    lines = ["ld.global.v4.b32 {a0, a1, a2, a3}, [$address];"]
    for i in range(4):
        if dtype == "bf16":
            lines += [f"shl.b32 $x{2 * i}, a{i}, 16;", f"and.b32 $x{2 * i + 1}, a{i}, 0xffff0000;"]
        else:
            lines += [
                f"mov.b32 {{l, h}}, a{i};",
                f"cvt.f32.f16 $x{2 * i}, l;",
                f"cvt.f32.f16 $x{2 * i + 1}, h;",
            ]
    return inline_ptx(
        lines,
        outputs={f"x{i}": "=f" for i in range(8)},
        inputs={"address": "l"},
        registers={"b32": "a0, a1, a2, a3", "b16": "l, h"},
    )
