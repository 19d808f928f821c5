"""Up to eight tokens of a matrix with residuals: they are multiplied on tensor cores, from activations in shared memory;
sm_90.

Why it exists: `gemv.py` gathers the activation of every residual from the L1 cache, one cache line each, and needs a
launch before it that transposes several tokens. Here a warp leaves the activations of its k_tile, which it has in
registers anyway, in 4 KB of its own shared memory, and one `ldmatrix` gathers 32 columns of eight tokens. It is the
fastest kernel for 2 to 8 tokens with residuals, at every format whose decoder is PTX; at 8192 x 8192, 3 bits, 1 % and 8
tokens 15.7 us where `gemv.py` took 18.6.

As in `gemv.py` a CTA owns 16 rows, its warps split the columns, one k_tile of 256 at a time, and nothing is exchanged
before the reduction over warps at the end. The packed codes of later k_tiles are in flight in registers. Residuals are
COO entries in the order of the MMA operand (`sparse.py`); those of the next k_tile are loaded while this one is
multiplied.

Activations in shared memory: a column is 16 bytes, one value of each of eight tokens, which is a row of the 8 x 8
matrices of `stmatrix` and `ldmatrix`. Both transpose: the registers of a right operand, as a warp loaded them, become 32
columns, and 32 columns from anywhere in a k_tile become right operands again. Column 32 s + 8 t + 4 j + 2 kh + e of a
k_tile is stored at 32 s + 16 j + 8 kh + 2 t + e, so that one operand register is 128 contiguous bytes.

Residuals as an MMA: sixteen entries are the inner dimension. Entry i is column i of the left operand, its value in its
own row and zeros elsewhere; the gathered activations are row i of the right operand. A lane builds its part of the left
operand out of the four entries of its columns: of the two values in a register it keeps those in its own rows (HSET2,
LOP3).

Written in Gluon, where every tensor is `[warp, lane]` or `[warp, lane, 4]`: inline PTX takes the four registers of a lane
(`pack=4`), and of a value that a lane has once, the first of four copies.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.dequant_ptx import GRID_STEP, zero_bias
from requant_kernels.common.device import supports_pdl
from requant_kernels.common.fragment_dequant import DequantFormat, dequant_operands, scaled_activations
from requant_kernels.common.inline_ptx import load_f32, smem_base
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import padded_smem_bytes
from requant_kernels.common.packing import CodebookLayout, Layout
from requant_kernels.common.ptx import SYNCWARP, Ptx, broadcast_pair_lines, inline_ptx
from requant_kernels.launch_config import SparseMmaConfig

X_TILE_BYTES = gl.constexpr(4096)  # the activations of a warp's k_tile: 256 columns
WARP_BYTES = gl.constexpr(X_TILE_BYTES.value + 256)  # and 64 entries
NO_ENTRY = gl.constexpr(1 << 30)  # a zero in the first column
FOUR, EIGHT = gl.constexpr((gl.int32,) * 4), gl.constexpr((gl.int32,) * 8)


# PTX. Four registers of an operand `name` are $name0 to $name3; of one that a lane has once, only the first is used.


def _four(*names: str, constraint: str = "r") -> dict[str, str]:
    return {f"{name}{i}": constraint for name in names for i in range(4)}


def _mma(dtype: str, sums: str, left: list[str], right: list[str], before: str) -> str:
    kind = dtype.replace("fp", "f")
    d, c = (", ".join(f"${name}{i}" for i in range(4)) for name in (sums, before))
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        f"{{{d}}}, {{{', '.join(left)}}}, {{{', '.join(right)}}}, {{{c}}};"
    )


@cache
def multiply_ptx(dtype: str) -> Ptx:
    """sums = before + 32 columns of weights, two mma_k16, times their activations."""
    x = [f"$x{i}" for i in range(4)]
    even = _mma(dtype, "sums", [f"$even{i}" for i in range(4)], x[:2], "before")
    odd = _mma(dtype, "sums", [f"$odd{i}" for i in range(4)], x[2:], "sums")
    inputs = _four("even", "odd", "x") | _four("before", constraint="f")
    return inline_ptx(
        [even, odd], outputs=_four("sums", constraint="=f"), inputs=inputs, registers={"b32": "unused"}
    )


# sums = before + part * the scales of rows g and g + 8, two float16 in a register
SCALE = inline_ptx(
    """mov.b32 {l, h}, $scales0; cvt.f32.f16 a, l; cvt.f32.f16 b, h;
fma.rn.f32 $sums0, $part0, a, $before0; fma.rn.f32 $sums1, $part1, a, $before1;
fma.rn.f32 $sums2, $part2, b, $before2; fma.rn.f32 $sums3, $part3, b, $before3;""",
    outputs=_four("sums", constraint="=&f"),
    inputs=_four("part", constraint="f") | _four("scales") | _four("before", constraint="f"),
    registers={"b16": "l, h", "f32": "a, b"},
)


def zero_points_ptx(dtype: str, factor: float, addend: float) -> Ptx:
    """Two zero points in a register -> the pairs that `grid_dequant_ptx` takes, in the order of the packed codes."""
    lines, registers = broadcast_pair_lines(dtype, factor, addend)
    text = "\n".join(lines).replace("$pair", "$zeros0").replace("$low", "$pairs0").replace("$high", "$pairs1")
    copies = "mov.b32 $pairs2, $pairs0; mov.b32 $pairs3, $pairs1;"
    return inline_ptx(
        [text, copies], outputs=_four("pairs", constraint="=&r"), inputs=_four("zeros"), registers=registers
    )


_NO_RESULT = "mov.b32 $unused0, 0; mov.b32 $unused1, 0; mov.b32 $unused2, 0; mov.b32 $unused3, 0;"
# activations of 32 columns, transposed; $address0: where this lane's column goes
STORE_X = inline_ptx(
    """mov.b32 zero, 0;
stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$address0], {$x0, $x1, $x2, $x3};
"""
    + _NO_RESULT.replace(", 0;", ", zero;"),
    outputs=_four("unused", constraint="=r"), inputs=_four("address", "x"), registers={"b32": "zero"},
)  # fmt: skip
STORE_SUMS = inline_ptx(
    f"st.shared.v4.f32 [$address0], {{$sums0, $sums1, $sums2, $sums3}};\n{_NO_RESULT}",
    outputs=_four("unused", constraint="=r"), inputs=_four("address") | _four("sums", constraint="f"),
)  # fmt: skip


def _gather_round(dtype: str, entry: str, number: int, count: str) -> list[str]:
    """32 entries, one per lane in register `entry` and all in shared memory; jumps to DONE where `count` of them are
    fewer."""
    # the address of the entry's column, from the bits of its index: mma_k16 << 8, t, kh, e
    lines = [
        f"shr.u32 b0, {entry}, 16;", "and.b32 b0, b0, 0xF00;", f"shr.u32 b1, {entry}, 14;",
        "lop3.b32 b0, b1, 0x60, b0, 0xEA;", f"shr.u32 b1, {entry}, 11;", "lop3.b32 b0, b1, 0x80, b0, 0xEA;",
        f"shr.u32 b1, {entry}, 12;", "lop3.b32 b0, b1, 0x10, b0, 0xEA;", "add.u32 b0, b0, $x_smem0;",
        # right operands: the activations of 32 columns
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {b0, b1, b2, b3}, [b0];",
    ]  # fmt: skip
    for half in range(2):
        if half:
            lines += [f"setp.le.s32 p, {count}, {32 * number + 16};", "@p bra DONE;"]
        for part in range(2):  # the entries of columns 2 t and 2 t + 1 of the left operand, then 8 further
            offset = 128 * number + 64 * half + 32 * part
            # two entries: values in c2 or c3, bits of the index that say the row in c4
            lines += [
                f"ld.shared.v2.b32 {{c0, c1}}, [$load_at0 + {offset}];", f"prmt.b32 c{2 + part}, c0, c1, 0x5410;",
                "prmt.b32 c4, c0, c1, 0x7632;", "and.b32 c4, c4, 0x00E200E2;",
            ]  # fmt: skip
            if dtype == "bf16":
                lines += [
                    f"mov.b32 {{l, h}}, c{2 + part};", "cvt.f32.f16 f0, l;", "cvt.f32.f16 f1, h;",
                    f"cvt.rn.bf16x2.f32 c{2 + part}, f1, f0;",
                ]  # fmt: skip
            # keep a value where its row is this lane's row g, then g + 8
            for row in range(2):
                lines += [
                    f"set.eq.u32.f16x2 c5, c4, row{row};",
                    f"and.b32 a{2 * part + row}, c5, c{2 + part};",
                ]
        lines.append(
            _mma(dtype, "sums", [f"a{i}" for i in range(4)], [f"b{2 * half}", f"b{2 * half + 1}"], "sums")
        )
    return lines


@cache
def gather_ptx(dtype: str) -> Ptx:
    """sums = before + the residuals of a k_tile.

    Operands: the shared address of the warp's activations; where this lane stores its entry, and where it loads those of its
    columns of the left operand; the entries of the first two rounds; how many there are; row g in both halves, as an index
    says it; sums; the global address of this lane's first entry. Most k_tiles have less than 64 entries; the others loop.
    """
    lines = [f"mov.b32 $sums{i}, $before{i};" for i in range(4)]
    # the row bits of an index are 0xE2: g above four bits, 8 rows more above one
    lines += ["mov.b32 row0, $row0;", f"or.b32 row1, row0, {0x2 << 16 | 0x2};"]
    lines += ["st.shared.b32 [$store_at0], $first0;", "st.shared.b32 [$store_at0 + 128], $second0;", SYNCWARP]
    for number, entry in enumerate(("$first0", "$second0")):
        lines += [f"setp.le.s32 p, $count0, {32 * number};", "@p bra DONE;"]
        lines += _gather_round(dtype, entry, number, "$count0")
    # left: entries beyond 64; lane: of this thread, from where it stores its entry
    lines += [
        "sub.s32 left, $count0, 64;", "sub.s32 lane, $store_at0, $x_smem0;", f"sub.s32 lane, lane, {X_TILE_BYTES.value};",
        "shr.u32 lane, lane, 2;", "mov.b64 address, $entries0;", "setp.le.s32 p, left, 0;", "@p bra DONE;",
        'MORE: .pragma "nounroll";', "add.s64 address, address, 128;", f"mov.b32 entry, {NO_ENTRY.value};",
        "setp.lt.s32 p, lane, left;", "@p ld.global.b32 entry, [address + 128];", SYNCWARP,
        "st.shared.b32 [$store_at0], entry;", SYNCWARP, *_gather_round(dtype, "entry", 0, "left"),
        "sub.s32 left, left, 32;", "setp.gt.s32 p, left, 0;", "@p bra MORE;",
        f"DONE: {SYNCWARP}",
    ]  # fmt: skip
    fragments = [f"{name}{i}" for name, count in (("a", 4), ("b", 4), ("c", 6)) for i in range(count)]
    inputs = _four("x_smem", "store_at", "load_at", "first", "second", "count", "row")
    inputs |= _four("before", constraint="f") | _four("entries", constraint="l")
    return inline_ptx(
        lines, outputs=_four("sums", constraint="=&f"), inputs=inputs,
        registers={
            "pred": "p", "b64": "address", "b16": "l, h", "f32": "f0, f1",
            "b32": [*fragments, "row0", "row1", "left", "lane", "entry"],
        },
    )  # fmt: skip


SCALE_BY_ROW, STORE_X_TILE, STORE = gl.constexpr(SCALE), gl.constexpr(STORE_X), gl.constexpr(STORE_SUMS)


# Kernel.


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """The compile-time constants of one launch."""

    format: DequantFormat
    multiply: Ptx
    gather: Ptx
    zero_points: Ptx | None
    even: bool  # whether K is a multiple of 256 num_warps: nothing is masked
    num_warps: int
    unroll: int  # k_tiles per step; the codes of `unroll` - 1, one at least, are in flight
    pdl: bool

    @property
    def scales(self) -> int:
        """Scales of a row in a k_tile."""
        return 0 if self.format.group_size == 0 else max(1, 256 // self.format.group_size)

    @property
    def k_tiles_per_scale(self) -> int:
        return max(1, self.format.group_size // 256)


@gluon.constexpr_function
def lanes_layout(W):
    """`[warp, lane, 4]`: four registers per lane."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[0, 1 << i, 0] for i in range(5)],
        warp_bases=[[1 << i, 0, 0] for i in range(W.bit_length() - 1)],
        block_bases=[],
        shape=[W, 32, 4],
    )


@gluon.jit(do_not_specialize=["last_tile", "steps", "M"])
def gemv_sparse_mma_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, coo_ptr, block_ptr, row_perm_ptr, bias_ptr, y_ptr, M, K, n, last_tile, steps,
    stride_x, stride_y, CONFIG: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T, M <= 8. Grid: row tiles of 16. x_ptr: pairs; scales_ptr, zeros_ptr: pairs too, or
    tables."""
    W: gl.constexpr = CONFIG.num_warps
    UNROLL: gl.constexpr = CONFIG.unroll
    IN_FLIGHT: gl.constexpr = UNROLL - 1 if UNROLL > 1 else 1
    L: gl.constexpr = lanes_layout(W)
    LR: gl.constexpr = gl.SliceLayout(2, L)
    warp = gl.arange(0, W, gl.SliceLayout(1, LR))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, LR))[None, :] + warp * 0
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    lane4, sub = gl.expand_dims(lane, 2), warp + lane * 0
    tile = (sub * 0 + gl.program_id(0)).to(gl.int64)
    k_tiles, pairs = gl.cdiv(K, 256), gl.cdiv(K, 2)
    own_codes, lane_pair = lane4 * 4 + four, lane4 % 4 * 4 + four
    region = gl.allocate_shared_memory(
        gl.int8, [(W * WARP_BYTES + 4095) // 4096, 1, 4096], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    base = smem_base()
    x_smem = base + sub * WARP_BYTES
    own_column = x_smem + lane * 16
    bounds = _load_bounds(block_ptr, tile, sub, k_tiles)
    next_bounds = _load_bounds(block_ptr, tile, sub + W, k_tiles)
    row_operands = _row_operands(scales_ptr, zeros_ptr, tile, lane, four, CONFIG)
    group_zeros_ptr = zeros_ptr if CONFIG.format.group_size > 0 else None
    codes = ()  # of k_tiles in flight
    for u in gl.static_range(IN_FLIGHT):
        codes = codes + (
            _load_k_tile(codes_ptr, scales_ptr, group_zeros_ptr, tile, u * W + sub, k_tiles, own_codes, lane,
                         CONFIG.even and u == 0, CONFIG),
        )  # fmt: skip
    # not for synchronization: ptxas moves no load over a barrier, so the codes are requested before the wait for the bounds
    gl.thread_barrier()
    entries = _load_entries(coo_ptr, bounds, lane)
    # the epilogue's loads
    out = tile * 16 + lane % 16
    if row_perm_ptr is not None:
        out = gl.load(row_perm_ptr + out).to(gl.int64)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + out, mask=out < n, other=0.0)
    if not CONFIG.format.codebook and CONFIG.format.group_size == 0:
        scale_ptr = scales_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
        row_scale = gl.load(scale_ptr + gl.expand_dims(tile, 2) * 16 + lane4 // 4 * 2 + four // 2)
    if CONFIG.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = gl.minimum(lane4 // 4, M - 1).to(gl.int64) * stride_x
    acc = gl.zeros([W, 32, 4], gl.float32, layout=L)
    sums = gl.zeros([W, 32, 4], gl.float32, layout=L)
    for step in range(steps):
        for u in gl.static_range(UNROLL):
            k_tile = (step * UNROLL + u) * W + sub
            codes = codes + (
                _load_k_tile(codes_ptr, scales_ptr, group_zeros_ptr, tile, k_tile + IN_FLIGHT * W, k_tiles, own_codes, lane,
                             False, CONFIG),
            )  # fmt: skip
            now = entries
            entries = _load_entries(coo_ptr, next_bounds, lane)
            next_bounds = _load_bounds(block_ptr, tile, k_tile + 2 * W, k_tiles)
            if (
                step * UNROLL + u
            ) * W < k_tiles:  # always; without the branch the compiler sinks the loads below it
                x = _load_activations(x_ptr, offset, k_tile, k_tiles, lane_pair, pairs, CONFIG)
                _store_activations(x, own_column)
                acc = _multiply_k_tile(acc, codes[0], row_operands, x, zeros_ptr is not None, CONFIG)
                sums = _add_residuals(sums, now, x_smem, lane, CONFIG)
            codes = codes[1:]
    if not CONFIG.format.codebook:
        if CONFIG.format.group_size == 0:
            acc = acc * row_scale.to(gl.float32)
        acc = acc * (1.0 / CONFIG.format.grid_step)
    acc = acc + sums
    # the reduction over warps goes through the activations' shared memory
    _issue4(STORE, [_replicate(own_column), acc])
    gl.thread_barrier()
    for i in gl.static_range(4 // W if W < 4 else 1):
        m = (sub + i * W) * 2 + lane // 16  # result 32 (sub + i W) + lane of the tile: token, then row
        address = base + (lane % 8 * 4 + m // 2 % 4) * 16 + (lane % 16 // 8 * 2 + m % 2) * 4
        y = gl.zeros([W, 32], gl.float32, layout=LR)
        for w in gl.static_range(W):
            y += load_f32(address + w * WARP_BYTES)
        if bias_ptr is not None:
            y += bias.to(gl.float32)
        gl.store(
            y_ptr + m.to(gl.int64) * stride_y + out, y.to(y_ptr.dtype.element_ty), mask=(m < M) & (out < n)
        )
    if M < 0:  # never: makes the compiler see a use of the allocation, or it would drop it
        region.index(0).store(
            gl.zeros([1, 4096], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


@gluon.jit
def _replicate(value):
    """`[warp, lane]` -> `[warp, lane, 4]`, the same register four times."""
    return gl.expand_dims(value, 2) + gl.zeros([1, 1, 4], gl.int32, layout=gl.AutoLayout())


@gluon.jit
def _issue4(PTX: gl.constexpr, args):
    """Run PTX for its effect on memory, four registers of every operand at a time."""
    gl.inline_asm_elementwise(PTX.text, PTX.constraints, args, dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _zero_points(zeros, CONFIG: gl.constexpr):
    """Zero points of rows g and g + 8 -> operands of the dequantization."""
    PTX: gl.constexpr = CONFIG.zero_points
    return gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, [_replicate(zeros)], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def _row_operands(scales_ptr, zeros_ptr, tile, lane, four, CONFIG: gl.constexpr):
    """Operands of the dequantization that belong to the rows for the whole launch: lookup tables, or one zero point."""
    rows = ()
    if CONFIG.format.codebook:
        TABLES: gl.constexpr = CONFIG.format.table_registers
        tile4, lane4 = gl.expand_dims(tile, 2), gl.expand_dims(lane, 2)
        for i in gl.static_range(TABLES):
            rows = rows + (gl.load(scales_ptr + (tile4 * TABLES + i) * 16 + lane4 // 4 * 2 + four % 2),)
    elif zeros_ptr is not None and CONFIG.format.group_size == 0:
        rows = (_zero_points(gl.load(zeros_ptr + tile * 8 + lane // 4), CONFIG),)
    return rows


@gluon.jit
def _load_k_tile(
    codes_ptr, scales_ptr, zeros_ptr, tile, k_tile, k_tiles, own, lane, EVEN: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """The packed codes of a k_tile per warp, its scales, and its zero points; those of both rows of a lane in one
    register."""
    BITS: gl.constexpr = CONFIG.format.bits
    SCALES: gl.constexpr = CONFIG.scales
    PER_SCALE: gl.constexpr = CONFIG.k_tiles_per_scale
    start = gl.expand_dims((tile * k_tiles + k_tile) * (BITS * 128), 2) + own
    inside = k_tile < k_tiles
    loaded = ()
    for i in gl.static_range(BITS):
        if EVEN:
            word = gl.load(codes_ptr + start + i * 128, eviction_policy="evict_first")
        else:
            word = gl.load(
                codes_ptr + start + i * 128,
                mask=gl.expand_dims(inside, 2),
                other=0,
                eviction_policy="evict_first",
            )
        loaded = loaded + (word,)
    groups = gl.cdiv(k_tiles, PER_SCALE) * SCALES
    for i in gl.static_range(SCALES):
        at = (tile * groups + k_tile // PER_SCALE * SCALES + i) * 8 + lane // 4
        loaded = loaded + (gl.load(scales_ptr + at, mask=inside, other=0),)
    if zeros_ptr is not None:
        for i in gl.static_range(SCALES):
            at = (tile * groups + k_tile // PER_SCALE * SCALES + i) * 8 + lane // 4
            loaded = loaded + (gl.load(zeros_ptr + at, mask=inside, other=0),)
    return loaded


@gluon.jit
def _load_activations(x_ptr, offset, k_tile, k_tiles, lane_pair, pairs, CONFIG: gl.constexpr):
    """The activations of a k_tile per warp, in pairs: 16 bytes per lane for each of its eight mma_k32."""
    EVEN: gl.constexpr = CONFIG.even
    pair = gl.expand_dims((gl.minimum(k_tile, k_tiles - 1) if EVEN else k_tile) * 128, 2) + lane_pair
    x = ()
    for s in gl.static_range(8):
        if EVEN:
            x = x + (gl.load(x_ptr + offset + (pair + s * 16)),)
        else:
            x = x + (gl.load(x_ptr + offset + (pair + s * 16), mask=(pair + s * 16) < pairs, other=0),)
    return x


@gluon.jit
def _store_activations(x, own_column):
    """Transposed to shared memory, column by column."""
    for s in gl.static_range(8):
        _issue4(STORE_X_TILE, [_replicate(own_column + s * 512), x[s]])


@gluon.jit
def _multiply_k_tile(acc, loaded, rows, x, ZEROS: gl.constexpr, CONFIG: gl.constexpr):
    """acc `[warp, lane, 4]` += k_tile times activations."""
    BITS: gl.constexpr = CONFIG.format.bits
    GROUP: gl.constexpr = CONFIG.format.group_size
    SCALES: gl.constexpr = CONFIG.scales
    PER_HALF: gl.constexpr = SCALES // 2 if SCALES > 1 else 1
    DEQUANTIZE: gl.constexpr = CONFIG.format.ptx
    CONSTRAINTS: gl.constexpr = CONFIG.format.constraints
    MULTIPLY: gl.constexpr = CONFIG.multiply
    part = acc
    weights = ()
    for s in gl.static_range(8):
        if s % 4 == 0:  # half a k_tile: eight mma_k16
            given = rows
            if ZEROS and GROUP > 0:
                for i in gl.static_range(PER_HALF):
                    given = given + (
                        _zero_points(
                            loaded[BITS + SCALES + (s // 4 * PER_HALF if SCALES > 1 else 0) + i], CONFIG
                        ),
                    )
            weights = gl.inline_asm_elementwise(
                DEQUANTIZE[s // 4], CONSTRAINTS, loaded[:BITS] + given, dtype=EIGHT, is_pure=True, pack=1
            )
        if GROUP > 0 and s * SCALES % 8 == 0:
            part = gl.full_like(acc, 0.0)
        part = gl.inline_asm_elementwise(
            MULTIPLY.text, MULTIPLY.constraints, [weights[s % 4 * 2], weights[s % 4 * 2 + 1], x[s], part],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        if GROUP > 0 and (s + 1) * SCALES % 8 == 0:
            acc = _scale(part, loaded[BITS + s * SCALES // 8], acc, SCALE_BY_ROW)
    return acc if GROUP > 0 else part


@gluon.jit
def _scale(part, scales, acc, PTX: gl.constexpr):
    """acc + part times the scales of rows g and g + 8."""
    return gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, [part, _replicate(scales), acc], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def _load_bounds(block_ptr, tile, k_tile, k_tiles):
    """Where the COO entries of a k_tile begin, and how many they are."""
    at, inside = tile * (k_tiles + 1) + k_tile, k_tile < k_tiles
    begin = gl.load(block_ptr + at, mask=inside, other=0)
    return begin, gl.load(block_ptr + at + 1, mask=inside, other=0) - begin


@gluon.jit
def _load_entries(coo_ptr, bounds, lane):
    """The first two rounds of a k_tile's entries, their number, and the address of this lane's first one."""
    begin, count = bounds
    at = begin + lane
    first = gl.load(coo_ptr + at, mask=lane < count, other=NO_ENTRY)
    second = gl.load(coo_ptr + at + 32, mask=lane + 32 < count, other=NO_ENTRY)
    return first, second, count, coo_ptr.to(gl.int64) + at.to(gl.int64) * 4


@gluon.jit
def _add_residuals(sums, entries, x_smem, lane, CONFIG: gl.constexpr):
    """sums `[warp, lane, 4]` += the residuals of a k_tile times its activations in shared memory."""
    GATHER: gl.constexpr = CONFIG.gather
    first, second, count, pointer = entries
    store_at, load_at = x_smem + X_TILE_BYTES + lane * 4, x_smem + X_TILE_BYTES + lane % 4 * 8
    return gl.inline_asm_elementwise(
        GATHER.text, GATHER.constraints,
        [_replicate(x_smem), _replicate(store_at), _replicate(load_at), _replicate(first), _replicate(second),
         _replicate(count), _replicate(lane // 4 * (32 * 0x10001)), sums, _replicate(pointer)],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


# Host side.


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to eight tokens with residuals in COO order, of a format whose decoder is PTX."""
    from_memory = isinstance(layout, CodebookLayout) and layout.bits > 4
    return num_tokens <= 8 and layout.sparse is not None and layout.sparse.coo is not None and not from_memory


def kernel_config(layout: Layout, dtype: torch.dtype, config: SparseMmaConfig) -> KernelConfig:
    (_, _, zeros, _), format = dequant_operands(layout, dtype, True)
    name = "fp16" if dtype == torch.float16 else "bf16"
    step = GRID_STEP[name]
    zero_points = (
        None if zeros is None else zero_points_ptx(name, -step, -step * zero_bias(layout.bits, name))
    )
    return KernelConfig(
        format=format, multiply=multiply_ptx(name), gather=gather_ptx(name), zero_points=zero_points,
        even=layout.k % (256 * config.num_warps) == 0, num_warps=config.num_warps, unroll=config.num_stages,
        pdl=supports_pdl(layout.packed_codes.device),
    )  # fmt: skip


def gemv_sparse_mma(x: Tensor, layout: Layout, bias: Tensor | None, config: SparseMmaConfig) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 8, rows contiguous; the layout has COO residuals."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    (codes, scales, zeros, _), _ = dequant_operands(layout, x.dtype, True)
    assert codes is not None and scales is not None
    x = scaled_activations(x, layout)
    if k % 2 or x.stride(0) % 2 or x.data_ptr() % 4:  # the kernel reads activations in pairs
        x = torch.nn.functional.pad(x, (0, k % 2)).clone(memory_format=torch.contiguous_format)
    pairs, (tiles, k_tiles) = x.view(torch.int32), layout.packed_codes.shape[:2]
    assert layout.sparse is not None and layout.sparse.coo is not None
    options: dict[str, object] = {"launch_pdl": True} if supports_pdl(x.device) else {}
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    launch(
        gemv_sparse_mma_kernel,
        (tiles, 1, 1),
        (
            pairs, codes, scales.view(torch.int32), None if zeros is None else zeros.view(torch.int32), layout.sparse.coo,
            layout.sparse.block_ptr, layout.row_perm, bias, y, m, k, layout.n, tiles - 1,
            triton.cdiv(triton.cdiv(k_tiles, config.num_warps), config.num_stages), pairs.stride(0), y.stride(0),
        ),
        interned(CONFIG=kernel_config(layout, x.dtype, config), num_warps=config.num_warps, num_stages=1, **options),
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, x.device),
    )  # fmt: skip
    return y
