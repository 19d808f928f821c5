"""Up to eight tokens of a 2- to 4-bit grid on fp16 tensor cores, where one mask makes two weights; sm_90, no residuals.

Why it exists: for several tokens `gemv.py` spends a LOP3 and an HFMA2 on two weights, and activations fill its registers.
Here a register of the left operand of `mma.m16n8k16`, a pair of 16-bit floats, is made by one AND. A masked field at bit
s of a half is the float16 subnormal code * 2^(s - 24), which the tensor core multiplies at full rate: no conversion, no
zero point. bfloat16 has too short a mantissa for that; there the field goes below the exponent of 128 by one LOP3: 128 +
code * 2^s. Products are accumulated per shift s and joined after a group of columns, 4 FFMA per 64 weights:

    sum (code - zero) x = sum_s 2^-s (P_s - (128 + 2^s zero) X_s)        P_s: products at bit s;  X_s: sums of their x

(float16: in units of 2^-24, and without the 128.) The sums X_s are an MMA with ones, made once for all tiles of a warp.
All of it is exact but for the rounding of float32.

It is the fastest kernel for 2 to 8 tokens of such a grid, and at 4 bits for one token of half of the shapes that were
tuned. With residuals `gemv_int8_mma.py` (one token) and `gemv_sparse_mma.py` (up to eight) take over.

A CTA has `num_groups` warp groups. Each owns `tiles` x 16 rows; its warps split the columns, one k_tile of 256 at a time,
and warp c of every group has the same columns. Codes and scales go through the multistage buffer of `cp_async.py`. The
activations of eight tokens are as many bytes as 4-bit codes of 32 rows, so the warps with the same columns copy them
together, a share of the tokens each, into stages of their own, and meet at a named barrier before they multiply. The
reduction over the warps of a group goes through the first pipeline stage.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none, reportPossiblyUnboundVariable=none

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.bit_layout import grid_fields
from requant_kernels.common.cp_async import (
    WeightStage,
    load_k_tile,
    supports_grid,
    weight_pointers,
    weight_stage,
)
from requant_kernels.common.dequant_ptx import MANTISSA_BITS
from requant_kernels.common.device import max_smem_bytes, supports_pdl
from requant_kernels.common.inline_ptx import SMEM_UNIT, issue, load_f32, smem_base, smem_units
from requant_kernels.common.launch import aligned, interned, launch
from requant_kernels.common.occupancy import padded_smem_bytes
from requant_kernels.common.packing import GridLayout, Layout
from requant_kernels.common.ptx import SYNCWARP, Ptx, inline_ptx, ptx_float
from requant_kernels.launch_config import Fp16MmaConfig

TOKENS = 8  # columns of the right operand
X_TILE_BYTES = gl.constexpr(TOKENS * 512)  # the activations of a k_tile
STORE_SUMS = gl.constexpr(
    inline_ptx(
        "st.shared.v4.f32 [$address], {$a, $b, $c, $d};",
        inputs={"address": "r"} | dict.fromkeys("abcd", "f"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """The compile-time constants of one launch."""

    stage: WeightStage
    num_warps: int
    num_groups: int  # warp groups
    num_stages: int
    smem_units: int
    prefetch: bool  # whether the codes of a later k_tile are copied before this one is waited for
    unit: float  # what one step of the grid is worth in the sums
    copy_x: Ptx  # in the loop
    copy_x_first: Ptx  # before it, as cp.async groups of their own
    wait: Ptx
    multiply: Ptx
    pdl: bool


@gluon.jit(do_not_specialize=["last_tile", "M"])
def gemv_fp16_mma_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, K, n, last_tile, stride_x, stride_y,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T, M <= 8, K a multiple of 256. Grid: one CTA for every `num_groups` x `tiles` row
    tiles."""
    STAGE: gl.constexpr = CONFIG.stage
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = STAGE.tiles
    NUM_STAGES: gl.constexpr = CONFIG.num_stages
    STAGE_BYTES: gl.constexpr = W * STAGE.bytes
    C: gl.constexpr = W // CONFIG.num_groups  # warps that split the columns
    COPY_X: gl.constexpr = CONFIG.copy_x
    COPY_X_FIRST: gl.constexpr = CONFIG.copy_x_first
    WAIT: gl.constexpr = CONFIG.wait
    MULTIPLY: gl.constexpr = CONFIG.multiply
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    k_tiles = K // 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    group, column = warp // C, warp % C
    region = gl.allocate_shared_memory(
        gl.int8, [CONFIG.smem_units, 1, SMEM_UNIT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    base = smem_base()
    first_tile = gl.program_id(0) * (CONFIG.num_groups * R) + group * R
    codes, scales = weight_pointers(
        codes_ptr, scales_ptr, zeros_ptr, first_tile, last_tile, lane, k_tiles, STAGE
    )
    own = base + warp * STAGE.bytes
    to_codes, to_scales = own + lane * 16, own + STAGE.code_bytes + lane * 4
    for s in gl.static_range(NUM_STAGES - 1):
        load_k_tile(codes, scales, to_codes + s * STAGE_BYTES, to_scales + s * STAGE_BYTES, column + s * C, k_tiles,
                    STAGE)  # fmt: skip
    # of the tokens of its columns a warp copies its group's share. Odd tokens have the two mma_k32 of a pair swapped, so
    # that
    # the eight lanes that read at once meet all banks
    first_token = group * (8 // CONFIG.num_groups)
    x_smem = base + NUM_STAGES * STAGE_BYTES + column * X_TILE_BYTES
    even, odd = x_smem + first_token * 512 + lane * 16, x_smem + first_token * 512 + (lane ^ 4) * 16
    stride = (warp * 0 + lane * 0 + stride_x).to(gl.int64) * 2
    x = (x_ptr + first_token.to(gl.int64) * stride_x + lane * 8).to(gl.int64)
    if CONFIG.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for s in gl.static_range(NUM_STAGES - 1):
        _copy_tokens(x, stride, even + s * (C * X_TILE_BYTES), odd + s * (C * X_TILE_BYTES), column + s * C, k_tiles,
                     M - first_token, COPY_X_FIRST)  # fmt: skip
    # this lane's part of the right operand: token g, part t of the mma_k32
    mine = x_smem + lane // 4 * 512 + lane % 4 * 16
    swap = lane // 4 % 2 * 64
    acc = ()
    for _ in gl.static_range(4 * R):
        acc = acc + (gl.zeros([W, 32], gl.float32, layout=L),)
    free, stage = (NUM_STAGES - 1), 0  # the stage that was read last, and the one that is read now
    for i in range(gl.cdiv(k_tiles, C)):
        k_tile = i * C + column
        later = k_tile + (NUM_STAGES - 1) * C
        if CONFIG.prefetch:
            load_k_tile(codes, scales, to_codes + free * STAGE_BYTES, to_scales + free * STAGE_BYTES, later, k_tiles,
                        STAGE)  # fmt: skip
        issue(WAIT, [column + lane * 0])  # after it, all warps of these columns are done with stage `free`
        _copy_tokens(x, stride, even + free * (C * X_TILE_BYTES), odd + free * (C * X_TILE_BYTES), later, k_tiles,
                     M - first_token, COPY_X)  # fmt: skip
        if not CONFIG.prefetch:
            load_k_tile(codes, scales, to_codes + free * STAGE_BYTES, to_scales + free * STAGE_BYTES, later, k_tiles,
                        STAGE)  # fmt: skip
        acc = gl.inline_asm_elementwise(
            MULTIPLY.text, MULTIPLY.constraints,
            acc + ((k_tile < k_tiles).to(gl.int32), to_codes + stage * STAGE_BYTES, to_scales + stage * STAGE_BYTES,
                   mine + stage * (C * X_TILE_BYTES) + swap, mine + stage * (C * X_TILE_BYTES) - swap),
            dtype=(gl.float32,) * (4 * R), is_pure=False, pack=1,
        )  # fmt: skip
        free = stage
        stage = gl.where(stage == NUM_STAGES - 1, 0, stage + 1)
    _reduce_and_store(
        acc, scales_ptr, bias_ptr, y_ptr, M, n, base, own, warp, lane, last_tile, stride_y, L, CONFIG
    )
    if K < 0:  # never: makes the compiler see a use of the allocation, or it would drop it
        region.index(0).store(
            gl.zeros([1, SMEM_UNIT], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, W], [1, 0]))
        )


@gluon.jit
def _copy_tokens(x, stride, even, odd, k_tile, k_tiles, tokens, COPY: gl.constexpr):
    """Start copying this warp's tokens of `k_tile` `[warp, 1]`; `x`: this lane's address of the first one in k_tile 0."""
    address, exists = x + k_tile.to(gl.int64) * 512, (k_tile < k_tiles).to(gl.int32)
    issue(COPY, (even, odd, exists, tokens, address, stride))


@gluon.jit
def _reduce_and_store(acc, scales_ptr, bias_ptr, y_ptr, M, n, base, own, warp, lane, last_tile, stride_y, L: gl.constexpr,
                      CONFIG: gl.constexpr):  # fmt: skip
    """Sum over the warps of each group through the first pipeline stage, apply row scales and bias, write y."""
    W: gl.constexpr = CONFIG.num_warps
    R: gl.constexpr = CONFIG.stage.tiles
    WARP_BYTES: gl.constexpr = CONFIG.stage.bytes
    C: gl.constexpr = W // CONFIG.num_groups
    T: gl.constexpr = CONFIG.num_groups * R  # tiles of the CTA
    for r in gl.static_range(R):
        issue(STORE_SUMS, (own + r * 512 + lane * 16,) + acc[4 * r : 4 * r + 4])
    gl.thread_barrier()
    for i in gl.static_range((4 * T + W - 1) // W):
        o = (i * W + warp) * 32 + lane  # tile, token, row
        t, m, row = gl.minimum(o // 128, T - 1), o // 16 % 8, o % 16
        address = (
            base
            + t // R * (C * WARP_BYTES)
            + t % R * 512
            + (row % 8 * 4 + m // 2) * 16
            + (row // 8 * 2 + m % 2) * 4
        )
        y = gl.zeros([W, 32], gl.float32, layout=L)
        for c in gl.static_range(C):
            y += load_f32(address + c * WARP_BYTES)
        y *= CONFIG.unit
        tile = gl.minimum(gl.program_id(0) * T + t, last_tile)
        if CONFIG.stage.group == 0:
            y *= gl.load(scales_ptr + tile * 16 + row % 8 * 2 + row // 8).to(gl.float32)
        out = tile * 16 + row
        if bias_ptr is not None:
            y += gl.load(bias_ptr + out, mask=out < n, other=0.0).to(gl.float32)
        inside = (o < 128 * T) & (m < M) & (out < n)
        gl.store(y_ptr + m.to(gl.int64) * stride_y + out, y.to(y_ptr.dtype.element_ty), mask=inside)


# PTX.


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedCodes:
    """How the codes of one mma_k16 leave their words: parts are (word, rotation to the right, mask); all at bit `shift`."""

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
_OFFSET = {"fp16": 0, "bf16": 128}  # what a field rides on
_UNIT = {"fp16": 2.0**-24, "bf16": 1.0}  # what a code at bit 0 is worth in a product


def unit_of(bits: int, dtype: str) -> float:
    """What one step of the grid is worth in the sums of `multiply_ptx`."""
    return _UNIT[dtype] * 2.0 ** min(codes.shift for codes in masked_codes(bits, dtype))


@cache
def multiply_ptx(bits: int, dtype: str, scales: int, tiles: int, *, zeros: bool = False) -> Ptx:
    """acc += a k_tile of `tiles` row tiles times eight tokens. `scales`: of a row in a k_tile, 0 to 2; `zeros`: as many zero
    points behind them.

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
            right = f"{{x{2 * j}, x{2 * j + 1}}}"
            # X_s, and P_s of every tile
            ptx.mma(f"ones{codes[j].shift if offset else first}_", ["one"] * 4, right, dtype, begun)
            for t in range(tiles):
                for word, rotate, _ in codes[j].parts:
                    ptx.load_word(t, word, rotate, f"[$codes + {512 * (bits * t + word)}]", begun)
                for e in range(4):
                    ptx.add(*_mask(codes[j], t, e, dtype))
                ptx.mma(f"dot{t}_{codes[j].shift}_", [f"weight{e}" for e in range(4)], right, dtype, begun)
        # of both tokens of a lane: what offset and zero point contribute, and the sums of activations that zero points meet
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
    """Lines of PTX. `begun`: accumulators that hold a sum already, and words that are in registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def mma(self, sums: str, left: list[str], right: str, dtype: str, begun: set[str]) -> None:
        """sums (+)= left x right."""
        own, kind = ", ".join(f"{sums}{i}" for i in range(4)), dtype.replace("fp", "f")
        before = own if sums in begun else "none, none, none, none"
        begun.add(sums)
        opcode = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        self.add(f"{opcode} {{{own}}}, {{{', '.join(left)}}}, {right}, {{{before}}};")

    def load_word(self, tile: int, word: int, rotate: int, address: str, begun: set[str]) -> None:
        """A word of packed codes of this lane, and rotated to the right."""
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
        """Of rows g and g + 8."""
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
    """Start copying `count` tokens of a k_tile, 512 bytes each: as a cp.async group of their own with `commit`, else with
    the
    codes that are copied next.

    Operands: shared addresses of this lane's 16 bytes of even and of odd tokens; whether the k_tile exists; how many tokens
    there are; the global address of the first, and the stride in bytes.
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
    """Until all but the last `in_flight` cp.async groups of this lane have arrived, and those of the warps with the same
    columns,
    which are number $column; named barrier 0 is the one of the whole CTA."""
    together = f"bar.sync barrier, {32 * num_groups};" if num_groups > 1 else SYNCWARP
    text = f"cp.async.wait_group {in_flight}; add.s32 barrier, $column, 1; {together}"
    return inline_ptx(text, inputs={"column": "r"}, registers={"b32": "barrier"})


# Host side.


def smem_bytes(layout: GridLayout, config: Fp16MmaConfig) -> int:
    """Of a CTA: the stages of every warp's codes and scales, and of every column's activations."""
    codes = config.num_warps * weight_stage(layout, config.tiles_per_warp_group).bytes
    return config.num_stages * (codes + config.num_warps // config.warp_groups * X_TILE_BYTES.value)


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to eight tokens of a grid that `supports_grid` names, without residuals."""
    return num_tokens <= TOKENS and layout.sparse is None and supports_grid(layout)


def fits(layout: GridLayout, config: Fp16MmaConfig, device: torch.device) -> bool:
    """Whether warps divide into their groups, and a CTA of this launch has shared memory enough."""
    if config.num_stages < 2 or config.warp_groups not in (1, 2, 4) or config.num_warps % config.warp_groups:
        return False
    return smem_units(smem_bytes(layout, config)) * SMEM_UNIT.value <= max_smem_bytes(device) - 1024


def kernel_config(layout: GridLayout, dtype: torch.dtype, config: Fp16MmaConfig) -> KernelConfig:
    bits, stage = layout.bits, weight_stage(layout, config.tiles_per_warp_group)
    name, own_tokens = "fp16" if dtype == torch.float16 else "bf16", TOKENS // config.warp_groups
    return KernelConfig(
        stage=stage, num_warps=config.num_warps, num_groups=config.warp_groups, num_stages=config.num_stages,
        smem_units=smem_units(smem_bytes(layout, config)), prefetch=config.prefetch, unit=1 / unit_of(bits, name),
        copy_x=copy_tokens_ptx(own_tokens, commit=config.prefetch), copy_x_first=copy_tokens_ptx(own_tokens, commit=True),
        wait=wait_ptx(config.num_stages - (1 if config.prefetch else 2), config.warp_groups),
        multiply=multiply_ptx(bits, name, stage.scales, stage.tiles, zeros=stage.zeros),
        pdl=supports_pdl(layout.packed_codes.device),
    )  # fmt: skip


def gemv_fp16_mma(x: Tensor, layout: Layout, bias: Tensor | None, config: Fp16MmaConfig) -> Tensor:
    """y [m, n] of x [m, k], m <= 8, where `supports` says so."""
    assert isinstance(layout, GridLayout)
    x, m = aligned(x), x.shape[0]
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    options: dict[str, object] = {"launch_pdl": True} if supports_pdl(x.device) else {}
    tiles = layout.packed_codes.shape[0]
    ctas = triton.cdiv(tiles, config.tiles_per_warp_group * config.warp_groups)
    constants = interned(
        CONFIG=kernel_config(layout, x.dtype, config), num_warps=config.num_warps, num_stages=1, **options
    )
    launch(
        gemv_fp16_mma_kernel,
        (ctas, 1, 1),
        (
            x, layout.packed_codes, layout.scales, layout.zero_points, bias, y, m, layout.k, layout.n, tiles - 1,
            x.stride(0), y.stride(0),
        ),
        constants,
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, x.device),
    )  # fmt: skip
    return y
