"""The trellis kernel of the byte-sum codes (`mul1`, `pair`), 1 to 16 tokens: hashes go straight to the integer tensor core.

    y = SCALE * sum over sections s of scale_s * (sum over bytes of hash bytes x fixed-point activations - OFFSET sum q)

Rotated activations are 16-bit fixed point with one scale a section of 4096 columns and token, `q = 256 high + low`, the
signed bytes two columns of the right operand (`hadamard.py` writes them). Products and sums are exact in int32: a section
adds at most 4096 * 4 * 255 * 128 < 2^30. At its end the sums become float32.

Everything is addressed by lane: tensors are [warps, 32], one element a thread, and the assembly of `hashes.py` says what a
lane loads, hashes and multiplies. A warp owns units of J x 64 columns (`rings.py`) of `R` tiles of 16 rows; nothing moves
between warps before the last sum, whose order is fixed. The words of the first step are requested before the rotation has
ended. Codes that are no byte sums (`3inst`) take the same way in float16, the floating-point tensor cores and float32.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import shared_room
from requant_kernels.hadamard.sections import SECTION
from requant_kernels.launch_config import TrellisConfig
from requant_kernels.trellis.fused_hadamard import rotate_token, token_constants, token_factors, token_kind
from requant_kernels.trellis.hashes import (
    OFFSET,
    SCALES_ASM,
    SCALES_CONSTRAINTS,
    STORE_ASM,
    STORE_CONSTRAINTS,
    activations_asm,
    float_sum_asm,
    groups_of,
    reduce_asm,
    sum_asm,
    words_asm,
)
from requant_kernels.trellis.layout import TrellisLayout

MOST_SHARED = (
    32768  # bytes that the sum over the warps may take; above it Triton's own, which has four barriers more
)


@triton.jit
def load_registers(address, TEXTS: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr):
    """COUNT registers of int32 from each of the addresses of a lane, by the texts of one load each."""
    types: tl.constexpr = (tl.int32,) * COUNT
    found = ()
    for i in tl.static_range(len(TEXTS)):
        got = tl.inline_asm_elementwise(TEXTS[i], CONSTRAINTS, (address,), dtype=types, is_pure=False, pack=1)
        found = found + got
    return found


@triton.jit
def _load_words(words, unit, units, LOADS: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr,
                EVEN: tl.constexpr, W: tl.constexpr, U: tl.constexpr):  # fmt: skip
    """The words of U units a warp of every tile in `words` (addresses of its unit 0): tiles slowest.

    `LOADS`: one text a unit where EVEN; else one for all, because units beyond the end are not where the others lie.
    """
    found = ()
    for r in tl.static_range(len(words)):
        if EVEN:
            found = found + load_registers(
                words[r] + unit.to(tl.int64) * (128 * COUNT), LOADS, CONSTRAINTS, COUNT
            )
        else:
            for u in tl.static_range(U):
                at = tl.minimum(unit + u * W, units - 1)  # beyond the end, what is read meets zeros
                found = found + load_registers(
                    words[r] + at.to(tl.int64) * (128 * COUNT), LOADS, CONSTRAINTS, COUNT
                )
    return found


@triton.jit(do_not_specialize=["steps", "last_tile"])
def byte_sum_kernel(
    x_ptr, scales_ptr, before_ptr, words_ptr, y_ptr, M, units, rows, last_tile, steps, sections, stride_x,
    SUM: tl.constexpr, SUM_CONSTRAINTS: tl.constexpr, LOADS: tl.constexpr, LOAD_CONSTRAINTS: tl.constexpr,
    XLOADS: tl.constexpr, XLOAD_CONSTRAINTS: tl.constexpr, SLOAD: tl.constexpr, SLOAD_CONSTRAINTS: tl.constexpr,
    STORE: tl.constexpr, STORE_CONSTRAINTS: tl.constexpr, REDUCE: tl.constexpr, REDUCE_CONSTRAINTS: tl.constexpr,
    COUNT: tl.constexpr, V: tl.constexpr, J: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr,
    W: tl.constexpr, R: tl.constexpr, U: tl.constexpr, S: tl.constexpr, C: tl.constexpr, LOG: tl.constexpr,
    FIXED: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, FUSED: tl.constexpr, EIGHT: tl.constexpr,
    EIGHT_CONSTRAINTS: tl.constexpr, BEFORE: tl.constexpr, BEFORE_CONSTRAINTS: tl.constexpr, SHARED: tl.constexpr,
    SHARED_CONSTRAINTS: tl.constexpr, TURN: tl.constexpr, TURN_CONSTRAINTS: tl.constexpr, PLANE: tl.constexpr,
    SUMS: tl.constexpr, MASK: tl.constexpr, ROOT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """y float32 `[M, rows]`; x int8 `[2 M, stride_x]`: high and low bytes of a token; scales `[M, sections, 2]`: scale, sum.
    Where not FIXED, x float16 `[M, stride_x]`, without scales, and a slab is 8 tokens. Where FUSED, x is the only token
    itself, `stride_x` columns, which every program rotates (`one_token.py`).

    Grid: R tiles of 16 rows each. A step is U units a warp, each of J groups, PER steps a section; C = 4 R S sums a
    lane, S slabs of 4 tokens.
    """
    lane, warp = tl.arange(0, 32)[None, :], tl.arange(0, W)[:, None]
    types: tl.constexpr = ((tl.int32 if FIXED else tl.float32),) * C
    Y: tl.constexpr = C // 2 if FIXED else C  # results a lane
    outputs: tl.constexpr = (tl.float32,) * (Y // W if Y > W else 1)
    BYTES: tl.constexpr = 1 if FIXED else 2  # of an activation
    before = (lane + 28) % 32 + warp * 0
    words = ()
    for r in tl.static_range(R):  # where tiles run out, the last one is computed, and written, twice alike
        tile = tl.minimum(tl.program_id(0) * R + r, last_tile).to(tl.int64)
        start = (words_ptr + tile * units * (32 * COUNT)).to(tl.int64)
        words = words + (start + lane * (4 * V) + warp * 0,)
    ahead = _load_words(words, warp, units, LOADS, LOAD_CONSTRAINTS, COUNT, EVEN, W, U)
    if FUSED:
        factors = token_factors(before_ptr, lane, warp, stride_x, BEFORE, BEFORE_CONSTRAINTS, ROOT)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    if FUSED:
        room, own_scale, own_total = rotate_token(
            x_ptr, factors, lane, warp, stride_x, EIGHT, EIGHT_CONSTRAINTS, SHARED, SHARED_CONSTRAINTS, TURN,
            TURN_CONSTRAINTS, PLANE, MASK, PAIRED,
        )  # fmt: skip
        factors = (own_scale, tl.where(warp == 0, own_total * -OFFSET, 0.0))
    activations = ()
    scales = ()
    for slab in tl.static_range(S):  # columns beyond the tokens' are computed and never stored
        column = tl.minimum(lane // 4 + 8 * slab, (2 * M if FIXED else M) - 1) + warp * 0
        if FUSED:
            activations = activations + (room + column * PLANE + lane % 4 * 16,)
        else:
            activations = activations + ((x_ptr + column * stride_x + lane % 4 * 16).to(tl.int64),)
        if FIXED and not FUSED:
            token = tl.minimum(lane % 4 + 4 * slab, M - 1) + warp * 0
            scales = scales + ((scales_ptr + token * sections * 2).to(tl.int64),)
    x = ()
    for slab in tl.static_range(S):
        x = x + load_registers(activations[slab] + warp * (64 * J * BYTES), XLOADS, XLOAD_CONSTRAINTS, 4)
    y = ()
    for _ in tl.static_range(Y):
        y = y + (tl.zeros([W, 32], tl.float32),)
    for section in range(sections):
        sums = y
        if FIXED:
            sums = ()
            for _ in tl.static_range(C):
                sums = sums + (tl.zeros([W, 32], tl.int32),)
        if FIXED and not FUSED:
            factors = ()
            for slab in tl.static_range(S):
                scale, total = tl.inline_asm_elementwise(
                    SLOAD, SLOAD_CONSTRAINTS, (scales[slab] + section * 8,), dtype=(tl.float32, tl.float32),
                    is_pure=False, pack=1,
                )  # fmt: skip
                factors = factors + (scale, tl.where(warp == 0, total * -OFFSET, 0.0))
        for step in range(section * PER, tl.minimum(section * PER + PER, steps)):
            now, at_hand = ahead, x
            unit = tl.minimum(step + 1, steps - 1) * (U * W) + warp
            ahead = _load_words(words, unit, units, LOADS, LOAD_CONSTRAINTS, COUNT, EVEN, W, U)
            x = ()
            for slab in tl.static_range(S):
                x = x + load_registers(
                    activations[slab] + unit * (64 * J * BYTES), XLOADS, XLOAD_CONSTRAINTS, 4
                )
            if step < steps:  # always; without the branch the compiler sinks the loads below
                for u in tl.static_range(U):
                    operands = sums
                    for r in tl.static_range(R):
                        operands = operands + now[(r * U + u) * COUNT : (r * U + u + 1) * COUNT]
                    for slab in tl.static_range(S):
                        operands = (
                            operands
                            + at_hand[(slab * U + u) * 4 * J * BYTES : (slab * U + u + 1) * 4 * J * BYTES]
                        )
                    sums = tl.inline_asm_elementwise(
                        SUM, SUM_CONSTRAINTS, operands + (before,), dtype=types, is_pure=False, pack=1
                    )
        if FIXED:
            total = ()
            for i in tl.static_range(Y):
                both = sums[2 * i].to(tl.float32) * 256.0 + sums[2 * i + 1].to(tl.float32)
                total = total + (y[i] + (both + factors[i // 2 % S * 2 + 1]) * factors[i // 2 % S * 2],)
            y = total
        else:
            y = sums
    if REDUCE is None:
        for level in tl.static_range(LOG):
            joined = ()
            for i in tl.static_range(Y >> (level + 1)):
                joined = joined + (tl.join(y[2 * i], y[2 * i + 1]),)
            y = joined
        at, index = tl.arange(0, Y)[None, :], tl.arange(0, Y)[None, :] * 0
        for level in tl.static_range(LOG):  # bit i of the index is dimension i
            index = index | ((at >> (LOG - 1 - level) & 1) << level)
        total = tl.reshape(tl.sum(y[0], 0), [32, Y]) * SCALE
        token, row = _place(tl.arange(0, 32)[:, None], index, last_tile, FIXED, R, S)
        tl.store(y_ptr + token.to(tl.int64) * rows + row, total, mask=token < M)
    else:
        y = tl.inline_asm_elementwise(
            REDUCE,
            REDUCE_CONSTRAINTS,
            y + (warp + lane * 0, lane + warp * 0) + ((room + SUMS,) if FUSED else ()),
            dtype=outputs,
            is_pure=False,
            pack=1,
        )
        for i in tl.static_range(len(outputs)):
            token, row = _place(lane, warp % Y + i * W, last_tile, FIXED, R, S)
            address = (y_ptr + token.to(tl.int64) * rows + row).to(tl.int64)
            inside = ((token < M) & (warp + i * W < Y)).to(tl.int32)
            tl.inline_asm_elementwise(
                STORE,
                STORE_CONSTRAINTS,
                (address, y[i] * SCALE, inside),
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _place(lane, index, last_tile, FIXED: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """Token and row of one of a lane's sums."""
    if FIXED:  # row of the lane, slab, tile
        half, slab, of = index % 2, index // 2 % S, index // (2 * S)
        token = lane % 4 + 4 * slab
    else:  # token of the lane's two, row of the lane, slab, tile
        half, slab, of = index // 2 % 2, index // 4 % S, index // (4 * S)
        token = lane % 4 * 2 + index % 2 + 8 * slab
    tile = tl.minimum(tl.program_id(0) * R + of, last_tile).to(tl.int64)
    return token, tile * 16 + lane // 4 * 2 + half


def padded_columns(k: int) -> int:
    """Columns that the activations need: whole sections, zero beyond the end."""
    return -(-k // SECTION) * SECTION


@cache
def constants(
    code: str, four: int, vector: int, config: TrellisConfig, tokens: int, units: int,
    fused: tuple[int, str] | None = None,
) -> dict[str, object]:  # fmt: skip
    """Everything that the kernel is compiled for but the launch; `four`: bits of four columns; `fused`: `token_kind`."""
    groups, fixed = groups_of(four), code in OFFSET
    width, wide = (4, 1) if fixed else (8, 2)  # tokens of a slab, bytes of an activation
    slabs = 1 if tokens <= width else 2 if tokens <= 2 * width else 4
    count, span, sums = four * groups // 4, config.warps * config.unroll, 4 * config.tiles * slabs
    text, names = (sum_asm if fixed else float_sum_asm)(code, four, config.tiles, slabs)
    even = units % span == 0
    loads = [
        words_asm(count, vector, 128 * count * config.warps * u) for u in range(config.unroll if even else 1)
    ]
    at = [config.warps * groups * u + group for u in range(config.unroll) for group in range(groups)]
    if SECTION % (64 * groups * span):
        raise ValueError(
            f"{config} takes {64 * groups * span} columns a step, no whole part of a section of {SECTION}: "
            "fewer warps, or less unroll, in powers of two"
        )
    results = sums // 2 if fixed else sums
    if results & (results - 1) and results > config.warps:
        raise ValueError(f"{config}: {results} sums a lane are no power of two, and more than the warps")
    reduce, reduce_names = None, None
    if 128 * config.warps * results <= MOST_SHARED:
        reduce, reduce_names = reduce_asm(config.warps, results, given=fused is not None)
    x_loads = [
        activations_asm(64 * wide * i + 16 * j, shared=fused is not None) for i in at for j in range(wide)
    ]
    return {
        **token_constants(fused, paired=code == "pair", tiles=config.tiles),
        "SUM": text, "SUM_CONSTRAINTS": names, "LOADS": tuple(t for t, _ in loads), "LOAD_CONSTRAINTS": loads[0][1],
        "XLOADS": tuple(t for t, _ in x_loads), "XLOAD_CONSTRAINTS": x_loads[0][1], "SLOAD": SCALES_ASM,
        "SLOAD_CONSTRAINTS": SCALES_CONSTRAINTS,
        "STORE": STORE_ASM, "STORE_CONSTRAINTS": STORE_CONSTRAINTS, "COUNT": count, "V": vector, "J": groups,
        "SCALE": 1 / 128 if fixed else 1.0, "OFFSET": OFFSET.get(code, 0.0), "EVEN": even, "W": config.warps,
        "R": config.tiles, "U": config.unroll, "S": slabs, "C": sums, "LOG": results.bit_length() - 1, "FIXED": fixed,
        "REDUCE": reduce, "REDUCE_CONSTRAINTS": reduce_names, "PER": SECTION // (64 * groups * span),
    }  # fmt: skip


def byte_sums(
    x: Tensor, scales: Tensor, layout: TrellisLayout, config: TrellisConfig, *, pdl: bool
) -> Tensor:
    """V times rotated activations: float32 [m, rows] of x int8 [2 m, columns] and scales float32 [m, sections, 2]."""
    return _launch(x, scales, scales.shape[0], layout, config, pdl)


def fused_sums(x: Tensor, layout: TrellisLayout, config: TrellisConfig, *, pdl: bool) -> Tensor:
    """V H (input_scales * x), float32 [1, rows], of the only token (`one_token.py`)."""
    return _launch(x, None, 1, layout, config, pdl, token_kind(x))


def float_sums(x: Tensor, layout: TrellisLayout, config: TrellisConfig, *, pdl: bool) -> Tensor:
    """V times rotated activations: float32 [m, rows] of x float16 [m, columns], for codes that are no byte sums."""
    return _launch(x, None, x.shape[0], layout, config, pdl)


def _launch(
    x: Tensor, scales: Tensor | None, m: int, layout: TrellisLayout, config: TrellisConfig, pdl: bool,
    fused: tuple[int, str] | None = None,
) -> Tensor:  # fmt: skip
    tiles, units = layout.packed_codes.shape[:2]
    y = torch.empty(m, tiles * 16, dtype=torch.float32, device=x.device)
    early = {"launch_pdl": True} if pdl else {}
    before, sections, stride = (
        (layout.input_scales, 1, layout.k) if fused else (None, x.shape[1] // SECTION, x.stride(0))
    )
    steps = triton.cdiv(units, config.warps * config.unroll)
    given = constants(layout.code, layout.four, layout.packed_codes.shape[-1], config, m, units, fused)
    programs = triton.cdiv(tiles, config.tiles)
    launch(
        byte_sum_kernel,
        (programs, 1, 1),
        (x, scales, before, layout.packed_codes, y, m, units, tiles * 16, tiles - 1, steps, sections, stride),
        interned(**given, PDL=pdl, EARLY=config.early, num_warps=config.warps, num_stages=1, **early),
        room=shared_room(programs, config, x.device),
    )
    return y
