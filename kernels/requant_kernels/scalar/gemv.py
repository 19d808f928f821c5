"""GEMV for 1 to 16 tokens in plain Triton: `y = x @ (dense + sparse)^T`, one launch, any format and any GPU.

A CTA has 16 rows, or a few tiles of 16; its warps share the columns, a k_tile of 256 at a time (`common/bit_layout.py` draws
its bits). W is the left MMA operand, the tokens the right one. The batch dimension of a three-dimensional `tl.dot` is the
warp, so every warp multiplies its own k_tiles and warps exchange nothing until the end, where one `tl.sum` over the warps,
in a fixed order, gives the same result in every run. The dense part needs no shared memory before that sum.

- **Software pipeline.** The packed codes of the next k_tiles and the next activations are loaded before the current k_tile
  is multiplied. A branch that is always taken separates the two: without it ptxas moves the loads after the arithmetic to
  save registers, and a warp waits for memory in every k_tile (14.1 -> 10.6 us at 8192 x 8192, 2 bits). Codes in flight are a
  multistage buffer in registers; the loop body has one k_tile per stage of the buffer, so that no register is copied.
- **Residuals** of one token are gathered in the same loop (`gemv_residuals.py`); the 16 rows of a tile have about equally
  many (`common/sparse.py`). Per k_tile a thread takes `SLOTS` slots. Slots are loaded two k_tiles ahead and their
  activations one, so neither latency is exposed (22.4 -> 20.0 us for 8 tokens at 8192 x 8192, 3 bits; 15.1 -> 8.6 at 4096 x
  4096). With `staged` the activations are first copied to shared memory, where a gather does not cost a cache line per
  residual. For several tokens a preceding launch transposes the activations, so that a gather reads all tokens of a column
  together.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none, reportAssignmentType=none, reportReturnType=none, reportOptionalMemberAccess=none

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.fragment_dequant import (
    DequantFormat,
    activation_operand,
    activation_pairs,
    dequant_operands,
    dequantize_half,
    load_k_tile,
    load_row_constants,
    rows_to_accumulator,
    sparse_operands,
    weight_operand,
)
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import padded_smem_bytes
from requant_kernels.common.packing import Layout
from requant_kernels.common.pdl import pdl_option
from requant_kernels.common.sparse_spmm import transpose_kernel
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.scalar.gemv_residuals import (
    finish_slots,
    first_slot,
    gather,
    load_slots,
    multiply_slot,
    stage_activations,
    zero_sums,
)

MOST_STAGED = 18432  # columns: with the final sum they fit the 48 KB that a launch may use without opting in
# The address of `bytes` of shared memory, declared in addition to Triton's own.
RESERVE_PTX = "{{ .shared .align 1024 .b8 activations[{bytes}];\n mov.u32 $0, activations; }}"


@dataclass(frozen=True, kw_only=True)
class GemvTiling:
    """The compile-time shape of a launch, as one constexpr argument.

    `even_k`: K is a multiple of 256 `warps`, nothing is masked along K. `sparse_tokens`: 1, or the tokens of the
    transposed activations. `slots`: slots of a row per thread and k_tile. `stages` of packed codes, including the
    current k_tile. `prefetch`: also load the activations of the next k_tile. `reserve_ptx`: if not None, activations
    are staged there.
    """

    warps: int
    tiles: int
    stages: int
    tokens: int
    even_k: bool
    sparse_tokens: int
    slots: int
    prefetch: bool
    pdl: bool
    reserve_ptx: str | None

    @property
    def staged(self) -> bool:
        return self.reserve_ptx is not None

    @property
    def in_flight(self) -> int:
        """k_tiles per warp that are loaded ahead."""
        return max(self.stages - 1, 1)

    @property
    def slot_lanes(self) -> int:
        """Slots of a row that are loaded together, one per thread."""
        return max(2 * self.warps // self.tiles, 8)

    @property
    def slot_stride(self) -> int:
        """Distance between a thread's slots: `slot_lanes` slots of 16 rows."""
        return 16 * self.slot_lanes


@triton.jit
def load_activations(x_ptr, token, stride_x, k_tile, k_tiles, K, EVEN_K: tl.constexpr):
    """Activations of one k_tile per warp, in pairs: eight int32 `[t, g, warp, token / 8, (j kh)]`, one per mma_k32."""
    t, four = tl.arange(0, 4), tl.arange(0, 4)
    pair = (tl.minimum(k_tile, k_tiles - 1) if EVEN_K else k_tile)[None, None, :, None, None] * 128
    pair += t[:, None, None, None, None] * 4 + four[None, None, None, None, :]
    pointer = x_ptr + token[None, :, None, :, None].to(tl.int64) * stride_x + pair
    x = ()
    for k32 in tl.static_range(8):
        if EVEN_K:
            x = x + (tl.load(pointer + k32 * 16),)
        else:
            x = x + (tl.load(pointer + k32 * 16, mask=(pair + k32 * 16) * 2 < K, other=0),)
    return x


@triton.jit
def _multiply_k_tile(acc, loaded, row_constants, x, like_ptr, levels_ptr, tiles, FORMAT: tl.constexpr,
                     ZEROS: tl.constexpr, TILING: tl.constexpr):  # fmt: skip
    """acc `[warp, rows, tokens]` += k_tile @ x; with group scales, the sums are scaled one group at a time."""
    WARPS: tl.constexpr = TILING.warps
    TILES: tl.constexpr = TILING.tiles
    TOKENS: tl.constexpr = TILING.tokens
    GROUP: tl.constexpr = FORMAT.group_size
    GROUPS: tl.constexpr = FORMAT.groups
    steps = ()
    for half in tl.static_range(2):
        steps = steps + dequantize_half(
            loaded, row_constants, levels_ptr, tiles, like_ptr, FORMAT, ZEROS, WARPS, TILES, half
        )
    part = acc
    for k32 in tl.static_range(8):
        if GROUP > 0 and k32 * GROUPS % 8 == 0:
            part = tl.zeros([WARPS, 16 * TILES, TOKENS], tl.float32)
        weight = weight_operand(steps[2 * k32], steps[2 * k32 + 1], WARPS, TILES)
        part = tl.dot(weight, activation_operand(x[k32], like_ptr.dtype.element_ty, WARPS, TOKENS), part)
        if GROUP > 0 and (k32 + 1) * GROUPS % 8 == 0:
            scale = loaded[FORMAT.bits + k32 * GROUPS // 8].to(tl.float32)
            acc += part * rows_to_accumulator(scale, WARPS, TILES, TOKENS)
    return acc if GROUP > 0 else part


@triton.jit(do_not_specialize=["last_tile", "iterations"])
def gemv_kernel(
    x_ptr, x_sparse_ptr, codes_ptr, scales_ptr, zeros_ptr, levels_ptr, row_perm_ptr, slice_ptr, ell_columns_ptr,
    ell_values_ptr, ell_row_scales_ptr, bias_ptr, y_ptr, M, K, n, last_tile, iterations, stride_x, stride_y,
    FORMAT: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ W^T; grid: row tiles / TILING.tiles. Each iteration takes `stages` k_tiles per warp."""
    WARPS: tl.constexpr = TILING.warps
    TILES: tl.constexpr = TILING.tiles
    STAGES: tl.constexpr = TILING.stages
    TOKENS: tl.constexpr = TILING.tokens
    EVEN_K: tl.constexpr = TILING.even_k
    SLOTS: tl.constexpr = TILING.slots
    SPARSE: tl.constexpr = slice_ptr is not None
    # if TILES does not divide the number of tiles, the last tile is computed and written more than once, identically
    tiles = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), last_tile).to(tl.int64)
    tiles = tiles[None, :]
    position = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, 16 * TILES) // 16, last_tile).to(tl.int64)
    row = position * 16 + tl.arange(0, 16 * TILES) % 16
    k_tiles = tl.cdiv(K, 256)
    warp = tl.arange(0, WARPS)

    # Prologue: weights do not depend on the previous kernel, so their loads come before the PDL wait.
    row_constants = load_row_constants(scales_ptr, zeros_ptr, tiles, FORMAT, WARPS, TILES)
    if SPARSE:
        slot, end, left = first_slot(slice_ptr, position, iterations, TILING)
        current = load_slots(ell_columns_ptr, ell_values_ptr, slot, end, SLOTS, TILING)
        slot += SLOTS * TILING.slot_stride
        upcoming = load_slots(ell_columns_ptr, ell_values_ptr, slot, end, SLOTS, TILING)
    IN_FLIGHT: tl.constexpr = TILING.in_flight
    buffer = ()  # every warp's k_tiles in flight
    for stage in tl.static_range(IN_FLIGHT):
        first = (stage * WARPS + warp)[:, None]
        loaded = load_k_tile(
            codes_ptr, scales_ptr, zeros_ptr, tiles, first, k_tiles, FORMAT, EVEN_K and stage == 0
        )
        buffer = buffer + (loaded,)
    out = row
    if row_perm_ptr is not None:
        out = tl.load(row_perm_ptr + row).to(tl.int64)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + out, mask=out < n, other=0.0)
    if ell_row_scales_ptr is not None:
        row_scale = tl.load(ell_row_scales_ptr + row)
    if TILING.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    base = 0
    if TILING.staged:
        base = stage_activations(x_sparse_ptr, K, TILING)
    if SPARSE:
        gathered = ()
        for i in tl.static_range(SLOTS):
            gathered = gathered + (gather(x_sparse_ptr, current[i][0], base, TILING),)
        sums = zero_sums(TILING)
    token = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, TOKENS // 8)[None, :]
    token = tl.minimum(token, M - 1)  # the surplus columns are computed but never stored
    acc = tl.zeros([WARPS, 16 * TILES, TOKENS], tl.float32)
    if TILING.prefetch:
        next_x = load_activations(x_ptr, token, stride_x, warp, k_tiles, K, EVEN_K)

    for iteration in range(iterations):
        for stage in tl.static_range(STAGES):
            k_tile = (iteration * STAGES + stage) * WARPS + warp
            # masked: loads beyond the matrix would lengthen the tail
            ahead = (k_tile + IN_FLIGHT * WARPS)[:, None]
            loaded = load_k_tile(codes_ptr, scales_ptr, zeros_ptr, tiles, ahead, k_tiles, FORMAT, False)
            buffer = buffer + (loaded,)
            if SPARSE:  # multiply what was gathered for this k_tile, gather for the next, load slots for the one after
                slot += SLOTS * TILING.slot_stride
                following, arrived, gathered = (), gathered, ()
                for i in tl.static_range(SLOTS):
                    sums = multiply_slot(sums, current[i][1], arrived[i], TILING)
                    gathered = gathered + (gather(x_sparse_ptr, upcoming[i][0], base, TILING),)
                    at = slot + i * TILING.slot_stride
                    following = following + load_slots(ell_columns_ptr, ell_values_ptr, at, end, 1, TILING)
                current, upcoming = upcoming, following
            if TILING.prefetch:
                x = next_x
                next_x = load_activations(x_ptr, token, stride_x, k_tile + WARPS, k_tiles, K, EVEN_K)
            else:
                x = load_activations(x_ptr, token, stride_x, k_tile, k_tiles, K, EVEN_K)
            # always true: the branch keeps ptxas from moving the loads above below the arithmetic
            if (iteration * STAGES + stage) * WARPS < k_tiles:
                acc = _multiply_k_tile(acc, buffer[0], row_constants, x, y_ptr, levels_ptr, tiles, FORMAT,
                                       zeros_ptr is not None, TILING)  # fmt: skip
            buffer = buffer[1:]

    y = tl.sum(acc, 0)
    if not FORMAT.codebook:
        if FORMAT.group_size == 0:
            y *= tl.load(scales_ptr + position * 16 + row % 8 * 2 + row % 16 // 8).to(tl.float32)[:, None]
        y *= 1.0 / FORMAT.grid_step
    if SPARSE:
        sums = finish_slots(sums, current, upcoming, gathered, slot, end, left, ell_columns_ptr, ell_values_ptr,
                             x_sparse_ptr, base, TILING)  # fmt: skip
        if ell_row_scales_ptr is not None:
            sums *= row_scale.to(tl.float32)[:, None]
        if TILING.sparse_tokens < TOKENS:  # one token: the other columns are never stored
            sums = tl.broadcast_to(sums, [16 * TILES, TOKENS])
        y += sums
    if bias_ptr is not None:
        y += bias.to(tl.float32)[:, None]
    m = tl.arange(0, TOKENS)
    tl.store(
        y_ptr + m[None, :].to(tl.int64) * stride_y + out[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(m < M)[None, :] & (out < n)[:, None],
    )


def slots_per_k_tile(layout: Layout, config: GemvConfig) -> int:
    """Slots per thread and k_tile of its warp, chosen so that most tiles have none left after the last k_tile."""
    assert layout.sparse is not None
    slices = layout.sparse.columns.shape[0] / layout.packed_codes.shape[0]
    steps = -(-layout.k // (256 * config.num_warps)) + 1
    return min(3, max(1, round(slices / (steps * max(config.num_warps // (4 * config.tiles_per_cta), 1)))))


@cache
def _constants(
    format: DequantFormat, max_registers: int | None, **tiling: int | bool | str | None
) -> Mapping[str, object]:
    """The constexpr arguments and options of a launch; equal arguments return the same object, as `launch` requires."""
    options = {"num_warps": tiling["warps"], "num_stages": 1, **pdl_option(bool(tiling["pdl"]))}
    if max_registers:
        options["maxnreg"] = max_registers
    return {"FORMAT": format, "TILING": GemvTiling(**tiling), **options}  # pyright: ignore[reportArgumentType]


def supports(layout: Layout, num_tokens: int, device: torch.device) -> bool:
    """Up to 16 tokens of any layout."""
    return num_tokens <= 16


def gemv(
    x: Tensor, layout: Layout, bias: Tensor | None, config: GemvConfig, *, asm: bool | None = None
) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 16, rows contiguous. `asm` None: inline PTX if the device has it."""
    m, k = x.shape
    asm, pdl = supports_ptx(x.device) if asm is None else asm, supports_pdl(x.device)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    tensors, format = dequant_operands(layout, x.dtype, asm)
    tokens = 8 if m <= 8 else 16
    sparse_tokens = 1 if m == 1 or layout.sparse is None else tokens
    x_sparse = x
    if sparse_tokens > 1:
        x_sparse = torch.empty(k, sparse_tokens, dtype=x.dtype, device=x.device)
        constants = interned(TOKENS=sparse_tokens, BLOCK=256, PDL=pdl, **pdl_option(pdl))
        launch(transpose_kernel, (triton.cdiv(k, 256), 1, 1), (x, x_sparse, m, k, x.stride(0)), constants)
    staged = config.stage_activations and asm and sparse_tokens == 1 and layout.sparse is not None
    staged = staged and k % 8 == 0 and k <= MOST_STAGED and x.data_ptr() % 16 == 0
    pairs = activation_pairs(x, layout)
    tiles, k_tiles = layout.packed_codes.shape[:2]
    ctas = triton.cdiv(tiles, config.tiles_per_cta)
    launch(
        gemv_kernel,
        (ctas, 1, 1),
        (
            pairs, x_sparse, *tensors, *sparse_operands(layout), bias, y, m, k, layout.n, tiles - 1,
            triton.cdiv(triton.cdiv(k_tiles, config.num_warps), config.num_stages), pairs.stride(0), y.stride(0),
        ),
        _constants(
            format,
            config.max_registers,
            warps=config.num_warps,
            tiles=config.tiles_per_cta,
            stages=config.num_stages,
            tokens=tokens,
            even_k=k % (256 * config.num_warps) == 0,
            sparse_tokens=sparse_tokens,
            slots=0 if layout.sparse is None else slots_per_k_tile(layout, config),
            prefetch=config.prefetch and tokens == 8,
            pdl=pdl,
            reserve_ptx=RESERVE_PTX.format(bytes=-(-k // 1024) * 2048) if staged else None,
        ),
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, x.device),
    )  # fmt: skip
    return y
