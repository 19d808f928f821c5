"""The kernel of `gemv.py`: how a CTA multiplies its row tiles, on integer or fp16 tensor cores (`gemv_ptx.py`).

    y = output_scale * sum over Hadamard tiles h of scale_h * (sum of hash bytes x int8 activations - byte_sum_mean * sum q)

The rotated activations are 16-bit fixed point with one scale for each token and Hadamard tile of 4096 columns:
q = 256 high + low, whose signed bytes are two columns of the B operand (`hadamard/` writes them). More than four tokens
would take twice the MMAs: there the high bytes alone are read, as q over 256, rounded, if the codes are coarser than 8 bits
(`rounding.py`); otherwise the activations are float16. Products and sums of bytes are exact in int32: a Hadamard tile adds
at most 4096 * 4 * 255 * 128 < 2^30. At its end the sums are converted to float32. Float16 activations, and `3inst`, whose
values are not byte sums, go through the same steps on the floating-point tensor cores.

A warp owns units of J x 64 columns (`layout.py`) of `row_tiles` x 16 rows. All addressing is by lane: tensors are [warps,
32], one element per thread, and PTX defines what a lane loads, hashes and multiplies. Warps exchange nothing before the
final reduction, whose order is fixed, so every run gives the same bits. Loads are one step ahead: the codes of the next step
are loaded before those of this one are multiplied, those of the first step before the previous launch has finished.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

from requant_kernels.common.pdl import wait_for_previous_launch, wait_with
from requant_kernels.common.ptx import Ptx
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.trellis.code_ptx import load_codes_ptx
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.fused_hadamard import Token, fused_hadamard, load_factors, prepare, rotate_token
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.gemv_ptx import (
    LOAD_SCALES,
    STORE,
    cross_warp_sum_ptx,
    fp16_mma_ptx,
    int8_mma_ptx,
    load_activations_ptx,
)
from requant_kernels.trellis.gemv_store import add_warps_and_store
from requant_kernels.trellis.layout import k64_per_unit

# in 8 columns of an MMA: high and low bytes of each
MOST_EXACT_TOKENS = 4
# shared memory limit of our cross-warp reduction; above it Triton's, which has four barriers more
MAX_SUM_BYTES = 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvShape:
    """The numbers that `trellis_gemv_kernel` is compiled for. A step is `units_per_step` units of every warp."""

    num_warps: int
    row_tiles: int  # per CTA
    units_per_step: int
    columns_per_token: int  # of the MMA: 2 for a high and a low byte, 1 for high bytes alone or float16
    n8_tiles: int  # tiles of 8 columns
    k64_per_unit: int
    words: int  # per lane and unit
    vector: int  # words per load
    steps_per_hadamard_tile: int
    whole_steps: bool  # the number of units is a multiple of the step
    int8: bool  # byte sums times int8; otherwise float16
    activation_bytes: int
    # per lane: 4 row_tiles n8_tiles; of byte sums in float16 4 n8_tiles more, for their offset
    accumulators: int
    results: int  # per lane: of row tiles, over columns_per_token
    output_scale: float
    byte_sum_mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvPtx:
    """The inline assembly of `trellis_gemv_kernel`."""

    mma: Ptx
    load_codes: tuple[Ptx, ...]  # one per unit of a whole step, otherwise one for all
    load_activations: tuple[Ptx, ...]
    load_scales: Ptx
    sum_warps: Ptx | None  # None: Triton's reduction
    store: Ptx


@triton.jit
def load_registers(address, LOADS: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT int32 registers with each of LOADS, all from the same lane address."""
    types: tl.constexpr = (tl.int32,) * COUNT
    found = ()
    for i in tl.static_range(len(LOADS)):
        found = found + tl.inline_asm_elementwise(
            LOADS[i].text, LOADS[i].constraints, (address,), dtype=types, is_pure=False, pack=1
        )
    return found


@triton.jit
def _chunk(registers, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """Chunk number INDEX of COUNT registers."""
    return registers[INDEX * COUNT : (INDEX + 1) * COUNT]


@triton.jit
def _load_codes(addresses, unit, units, LOADS: tl.constexpr, SHAPE: tl.constexpr):
    """A warp's packed words of the units of a step, row tiles slowest; `addresses`: unit 0 of every row tile."""
    U: tl.constexpr = SHAPE.units_per_step
    found = ()
    for r in tl.static_range(len(addresses)):
        if SHAPE.whole_steps:
            found = found + load_registers(
                addresses[r] + unit.to(tl.int64) * (128 * SHAPE.words), LOADS, SHAPE.words
            )
        else:
            for u in tl.static_range(U):
                # past the end the last unit is read again; it is multiplied by zero activations
                at = tl.minimum(unit + u * SHAPE.num_warps, units - 1)
                found = found + load_registers(
                    addresses[r] + at.to(tl.int64) * (128 * SHAPE.words), LOADS, SHAPE.words
                )
    return found


@triton.jit
def _load_activations(addresses, unit, LOADS: tl.constexpr, SHAPE: tl.constexpr):
    """The activations for a warp's units of a step, n8 tiles slowest."""
    x = ()
    for n8 in tl.static_range(len(addresses)):
        x = x + load_registers(
            addresses[n8] + unit * (64 * SHAPE.k64_per_unit * SHAPE.activation_bytes), LOADS, 4
        )
    return x


@triton.jit
def _load_scales(addresses, hadamard_tile, warp, PTX: tl.constexpr, SHAPE: tl.constexpr):
    """Per token of a lane: the scale of the Hadamard tile, and in warp 0 the excess of the byte sums over the values."""
    factors = ()
    for i in tl.static_range(len(addresses)):
        scale, total = tl.inline_asm_elementwise(
            PTX.text, PTX.constraints, (addresses[i] + hadamard_tile * 16,), dtype=(tl.float32, tl.float32),
            is_pure=False, pack=1,
        )  # fmt: skip
        factors = factors + (scale, tl.where(warp == 0, total * -SHAPE.byte_sum_mean, 0.0))
    return factors


@triton.jit
def _add_hadamard_tile(y, sums, factors, SHAPE: tl.constexpr):
    """y + scale * (256 high + low - excess), for int32 sums of high and low bytes; high - excess, of high bytes alone."""
    S: tl.constexpr = SHAPE.n8_tiles
    total = ()
    for i in tl.static_range(len(y)):
        if SHAPE.columns_per_token == 2:
            own = sums[2 * i].to(tl.float32) * 256.0 + sums[2 * i + 1].to(tl.float32)
            scale, excess = factors[i // 2 % S * 2], factors[i // 2 % S * 2 + 1]
        else:
            own = sums[i].to(tl.float32)
            scale, excess = factors[i // 4 % S * 4 + i % 2 * 2], factors[i // 4 % S * 4 + i % 2 * 2 + 1]
        total = total + (y[i] + (own + excess) * scale,)
    return total


@triton.jit
def _subtract_offsets(y, SHAPE: tl.constexpr):
    """The results of byte sums in float16: sums minus those of the offset, the last of `y`, equal in all row tiles."""
    Y: tl.constexpr = SHAPE.results
    total = ()
    for i in tl.static_range(Y):
        total = total + (y[i] - y[Y + i % (4 * SHAPE.n8_tiles)],)
    return total


@triton.jit
def multiply_tiles(
    cta, x_ptr, scales_ptr, input_scales_ptr, codes_ptr, y_ptr, output_scales_ptr, bias_ptr, addend_ptr, M, units, rows,
    stride_y, last_tile, steps, hadamard_tiles, stride_x, sums_at, SHAPE: tl.constexpr, PTX: tl.constexpr,
    FUSED: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """`trellis_gemv_kernel` for the row tiles of CTA number `cta`. WAIT: the previous launch has not been waited for yet.
    The rows of y and of the addend are `stride_y` apart.

    sums_at: shared memory address for the cross-warp reduction, in a tuple; empty if `PTX.sum_warps` allocates its own.
    """
    LOAD_CODES: tl.constexpr = PTX.load_codes
    LOAD_ACTIVATIONS: tl.constexpr = PTX.load_activations
    LOAD_SCALES: tl.constexpr = PTX.load_scales
    W: tl.constexpr = SHAPE.num_warps
    R: tl.constexpr = SHAPE.row_tiles
    U: tl.constexpr = SHAPE.units_per_step
    S: tl.constexpr = SHAPE.n8_tiles
    COLUMNS: tl.constexpr = SHAPE.columns_per_token
    Y: tl.constexpr = SHAPE.results
    lane, warp = tl.arange(0, 32)[None, :], tl.arange(0, W)[:, None]
    ACCUMULATORS: tl.constexpr = SHAPE.accumulators
    accumulator_types: tl.constexpr = ((tl.int32 if SHAPE.int8 else tl.float32),) * ACCUMULATORS
    previous_lane = (lane + 28) % 32 + warp * 0
    codes = ()
    for r in tl.static_range(R):  # past the end the last tile is computed, and written, again
        tile = tl.minimum(cta * R + r, last_tile).to(tl.int64)
        start = (codes_ptr + tile * units * (32 * SHAPE.words)).to(tl.int64)
        codes = codes + (start + lane * (4 * SHAPE.vector) + warp * 0,)
    next_words = _load_codes(codes, warp, units, LOAD_CODES, SHAPE)
    if FUSED is not None:
        held = load_factors(input_scales_ptr, lane, warp, stride_x, FUSED), prepare(lane, warp, FUSED)
        if WAIT:
            held = wait_with(held[0], held[1], PDL, EARLY_TRIGGER)
        smem, scale, total = rotate_token(x_ptr, scales_ptr, held[0], held[1], lane, warp, stride_x, FUSED)
        factors = (scale, tl.where(warp == 0, total * -SHAPE.byte_sum_mean, 0.0))
    elif WAIT:
        wait_for_previous_launch(PDL, EARLY_TRIGGER)
    activations = ()
    scales = ()
    for n8 in tl.static_range(S):  # columns beyond the tokens are computed but never stored
        column = tl.minimum(lane // 4 + 8 * n8, COLUMNS * M - 1) + warp * 0
        if SHAPE.int8 and COLUMNS == 1:
            column *= 2  # high bytes are every other row
        if FUSED is not None:
            activations = activations + (smem + column * FUSED.low_bytes + lane % 4 * 16,)
        else:
            activations = activations + ((x_ptr + column * stride_x + lane % 4 * 16).to(tl.int64),)
        if SHAPE.int8 and FUSED is None:
            for i in tl.static_range(2 // COLUMNS):
                own = lane % 4 + 4 * n8 if COLUMNS == 2 else lane % 4 * 2 + i + 8 * n8
                token = tl.minimum(own, M - 1) + warp * 0
                scales = scales + (
                    (scales_ptr + token * hadamard_tiles * 4 + (4 - 2 * COLUMNS)).to(tl.int64),
                )
    next_x = _load_activations(activations, warp, LOAD_ACTIVATIONS, SHAPE)
    y = ()
    for _ in tl.static_range(Y if SHAPE.int8 else ACCUMULATORS):
        y = y + (tl.zeros([W, 32], tl.float32),)
    COUNT: tl.constexpr = SHAPE.words
    X_COUNT: tl.constexpr = 4 * SHAPE.k64_per_unit * SHAPE.activation_bytes  # registers per unit and n8 tile
    PER: tl.constexpr = SHAPE.steps_per_hadamard_tile
    for hadamard_tile in range(hadamard_tiles):
        sums = y
        if SHAPE.int8:
            sums = ()
            for _ in tl.static_range(ACCUMULATORS):
                sums = sums + (tl.zeros([W, 32], tl.int32),)
        if SHAPE.int8 and FUSED is None:
            factors = _load_scales(scales, hadamard_tile, warp, LOAD_SCALES, SHAPE)
        for step in range(hadamard_tile * PER, tl.minimum(hadamard_tile * PER + PER, steps)):
            words, x = next_words, next_x
            unit = tl.minimum(step + 1, steps - 1) * (U * W) + warp
            next_words = _load_codes(codes, unit, units, LOAD_CODES, SHAPE)
            next_x = _load_activations(activations, unit, LOAD_ACTIVATIONS, SHAPE)
            if step < steps:  # always true; without the branch ptxas moves the loads after the products
                for u in tl.static_range(U):
                    operands = sums
                    for r in tl.static_range(R):
                        operands = operands + _chunk(words, r * U + u, COUNT)
                    for n8 in tl.static_range(S):
                        operands = operands + _chunk(x, n8 * U + u, X_COUNT)
                    sums = tl.inline_asm_elementwise(
                        PTX.mma.text, PTX.mma.constraints, operands + (previous_lane,), dtype=accumulator_types,
                        is_pure=False, pack=1,
                    )  # fmt: skip
        y = _add_hadamard_tile(y, sums, factors, SHAPE) if SHAPE.int8 else sums
    if ACCUMULATORS > COLUMNS * Y:
        y = _subtract_offsets(y, SHAPE)
    if FUSED is not None:
        sums_at = (smem + FUSED.sums_offset,)
    add_warps_and_store(
        y, lane, warp, cta, last_tile, sums_at, output_scales_ptr, bias_ptr, addend_ptr, y_ptr, M, rows, stride_y, SHAPE, PTX
    )  # fmt: skip


@triton.jit(do_not_specialize=["steps", "last_tile"], do_not_specialize_on_alignment=["M"])
def trellis_gemv_kernel(
    x_ptr, scales_ptr, input_scales_ptr, codes_ptr, y_ptr, output_scales_ptr, bias_ptr, addend_ptr, M, units, rows,
    last_tile, steps, hadamard_tiles, stride_x,
    SHAPE: tl.constexpr, PTX: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr,
):  # fmt: skip
    """y float32 `[M, rows]`, or with output scales finished, of any type; grid: CTAs of `row_tiles` tiles of 16 rows.

    x is int8 `[2 M, stride_x]`, high and low bytes of each token, with `[M, hadamard_tiles, 4]` scales and sums; or float16
    `[M, stride_x]` without scales, if SHAPE says so; or, with FUSED, the single unrotated token of `stride_x` columns, which
    every CTA rotates, and combines before if it is split attention: then the scales are the logarithms of the parts.
    """
    multiply_tiles(
        tl.program_id(0), x_ptr, scales_ptr, input_scales_ptr, codes_ptr, y_ptr, output_scales_ptr, bias_ptr, addend_ptr, M,
        units, rows, rows, last_tile, steps, hadamard_tiles, stride_x, (), SHAPE, PTX, FUSED, PDL, EARLY_TRIGGER,
        True,
    )  # fmt: skip


@cache
def gemv_constants(
    code: str, quad_bits: int, vector: int, config: TrellisGemvConfig, tokens: int, units: int,
    token: Token | None = None, *, int8: bool = True, given_memory: bool = False,
) -> dict[str, object]:  # fmt: skip
    """SHAPE, PTX and FUSED of the kernel. `token`: what every CTA rotates, if it is not rotated yet. `int8`: the activations
    are bytes, of which more than MOST_EXACT_TOKENS are multiplied by the high ones alone; otherwise float16. `given_memory`:
    the cross-warp reduction takes the address of its shared memory.

    Raises ValueError if the launch config does not divide the matrix.
    """
    k64_count, activation_bytes = k64_per_unit(quad_bits), 1 if int8 else 2
    columns_per_token = 2 if int8 and tokens <= MOST_EXACT_TOKENS else 1
    n8_tiles = 1 if columns_per_token * tokens <= 8 else 2
    words, step_units = quad_bits * k64_count // 4, config.num_warps * config.units_per_step
    results = 4 * config.tiles_per_cta * n8_tiles // columns_per_token
    offsets = 0 if int8 or not CODES[code].byte_sums else 4 * n8_tiles
    if HADAMARD_TILE % (64 * k64_count * step_units):
        raise ValueError(
            f"{config} takes {64 * k64_count * step_units} columns a step, which does not divide a Hadamard tile of "
            f"{HADAMARD_TILE}: use fewer warps or fewer units per step, in powers of two"
        )
    if results & (results - 1) and results > config.num_warps:
        raise ValueError(f"{config}: {results} sums a lane are not a power of two, and more than the warps")
    whole_steps = units % step_units == 0
    unit_offsets = [config.num_warps * u for u in range(config.units_per_step)]
    shape = GemvShape(
        num_warps=config.num_warps, row_tiles=config.tiles_per_cta, units_per_step=config.units_per_step,
        columns_per_token=columns_per_token, n8_tiles=n8_tiles, k64_per_unit=k64_count, words=words, vector=vector,
        steps_per_hadamard_tile=HADAMARD_TILE // (64 * k64_count * step_units), whole_steps=whole_steps, int8=int8,
        activation_bytes=activation_bytes, accumulators=columns_per_token * results + offsets, results=results,
        output_scale=CODES[code].scale, byte_sum_mean=CODES[code].byte_sum_mean,
    )  # fmt: skip
    fused = None
    if token is not None:
        fused = fused_hadamard(token, pair=CODES[code].weights_per_hash == 2, row_tiles=config.tiles_per_cta)
    sum_warps = None
    if 128 * config.num_warps * results <= MAX_SUM_BYTES:
        sum_warps = cross_warp_sum_ptx(
            config.num_warps, results, given_memory=given_memory or fused is not None
        )
    ptx = GemvPtx(
        mma=(int8_mma_ptx if int8 else fp16_mma_ptx)(code, quad_bits, config.tiles_per_cta, n8_tiles),
        load_codes=tuple(
            load_codes_ptx(words, vector, 128 * words * offset)
            for offset in (unit_offsets if whole_steps else unit_offsets[:1])
        ),
        load_activations=tuple(
            load_activations_ptx(64 * activation_bytes * (offset * k64_count + k64) + 16 * j, shared=fused is not None)
            for offset in unit_offsets for k64 in range(k64_count) for j in range(activation_bytes)
        ),
        load_scales=LOAD_SCALES, sum_warps=sum_warps, store=STORE,
    )  # fmt: skip
    return {"SHAPE": shape, "PTX": ptx, "FUSED": fused}
