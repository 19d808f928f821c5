"""The trellis path: y = output_scales * H (V (H (input_scales * x))), three launches: rotate, multiply, rotate; the first
two are one for one token of a small matrix (`one_token.py`). Residuals take one more, whose sums the last rotation adds.

V is stored as tiles of 16 x 16, each a ring of 256 codes in row order (`rings.py`); the value at a place is a function of
the 16 bits of the ring that end there (bitshift trellis, QTIP: Tseng et al. 2024, arXiv 2406.11235).

| code | weights of a window x | after the tensor core |
| --- | --- | --- |
| mul1 | byte sum of 0x83DCD12D x | / 128 |
| pair | two: b0 + b1 + b2 + b3 and 510 + b0 - b1 - b2 + b3 of 0x4E6DA66B x + 0x3C6EF35F | / 128 |
| 3inst | the two float16 in ((89226354 x + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60, added | |

To 16 tokens `byte_sums.py` multiplies, on Hopper to 512 `trellis_wgmma.py`; beyond them V is expanded to float16, exactly,
and cuBLAS multiplies. Here are that expansion and the plain kernels for the interpreter and AMD.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none
# pyright: reportAssignmentType=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.sparse_spmm import residual_sums
from requant_kernels.hadamard.rotate import rotate, rotate_fixed
from requant_kernels.heuristics import (
    DECODE_TOKENS,
    HOPPER_TOKENS,
    hopper_config,
    launches_early,
    runs_on_hopper,
    trellis_config,
)
from requant_kernels.launch_config import HopperConfig, TrellisConfig
from requant_kernels.trellis.fused_hadamard import can_fuse
from requant_kernels.trellis.gemv import byte_sums, float_sums, fused_sums, load_registers, padded_columns
from requant_kernels.trellis.hashes import (
    OFFSET,
    STORE_FOUR_ASM,
    STORE_FOUR_CONSTRAINTS,
    groups_of,
    values_asm,
    words_asm,
)
from requant_kernels.trellis.layout import TrellisLayout

ASSEMBLY = True  # False: every trellis by the plain kernels, as on AMD


@triton.jit
def _stream_end(base, lane, end, V: tl.constexpr):
    """The 32 bits of a lane's stream that end `end` bits after its begin, uint32; missing ones are any."""
    word = (end - 1) // 32
    low = tl.load(base + (word // V * 32 + lane) * V + word % V).to(tl.uint32, bitcast=True)
    word = tl.maximum(word - 1, 0)
    high = tl.load(base + (word // V * 32 + lane) * V + word % V).to(tl.uint32, bitcast=True)
    shift = ((32 - end % 32) % 32).to(tl.uint32)
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def _plain_values(words_ptr, tile, group, units, CODE: tl.constexpr, FOUR: tl.constexpr, J: tl.constexpr,
                  V: tl.constexpr):  # fmt: skip
    """Weights float32 `[16, 64]` of one group of four tiles, times 128 where they are byte sums."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    lane, place = row // 2 * 4 + column // 16, row % 2 * 16 + column % 16
    last = place | 1 if CODE == "pair" else place
    end = last // 4 * FOUR + (last % 4 + 1) * FOUR // 4  # bits of the part up to here
    base, part = words_ptr + (tile * units + group // J) * (8 * FOUR * J), group % J * (8 * FOUR)
    x = _stream_end(base, lane, part + end, V)
    before = _stream_end(base, (lane + 28) % 32, part + 8 * FOUR + end * 0, V)
    some = tl.minimum(end, 16).to(tl.uint32)
    x = ((x & ((1 << some) - 1)) | (before << some)) & 0xFFFF
    if CODE == "3inst":
        h = ((x * 89226354 + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
        low, high = (h & 0xFFFF).to(tl.uint16), (h >> 16).to(tl.uint16)
        value = low.to(tl.float16, bitcast=True).to(tl.float32) + high.to(tl.float16, bitcast=True).to(
            tl.float32
        )
        return value.to(tl.float16).to(tl.float32)
    h = x * 0x83DCD12D if CODE == "mul1" else x * 0x4E6DA66B + 0x3C6EF35F
    b0, b1 = (h & 0xFF).to(tl.int32), ((h >> 8) & 0xFF).to(tl.int32)
    b2, b3 = ((h >> 16) & 0xFF).to(tl.int32), (h >> 24).to(tl.int32)
    value = b0 + b1 + b2 + b3 - 510
    if CODE == "pair":
        value = tl.where(place % 2 == 1, b0 - b1 - b2 + b3, value)
    return value.to(tl.float32)


@triton.jit
def plain_kernel(
    x_ptr, words_ptr, y_ptr, M, K, units, rows, stride_x, CODE: tl.constexpr, FOUR: tl.constexpr, J: tl.constexpr,
    V: tl.constexpr, SCALE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """y float32 `[M, rows]` = x float16 `[M, K]` @ V^T, without assembly; grid: tiles of 16 rows."""
    tile = tl.program_id(0).to(tl.int64)
    column, token = tl.arange(0, 64)[:, None], tl.arange(0, N)[None, :]
    acc = tl.zeros([16, N], tl.float32)
    for group in range(tl.cdiv(K, 64)):
        weight = _plain_values(words_ptr, tile, group, units, CODE, FOUR, J, V).to(tl.float16)
        at = group * 64 + column
        x = tl.load(x_ptr + token.to(tl.int64) * stride_x + at, mask=(token < M) & (at < K), other=0.0)
        acc = tl.dot(weight, x, acc)
    row = tile * 16 + tl.arange(0, 16)[:, None]
    tl.store(y_ptr + token.to(tl.int64) * rows + row, acc * SCALE, mask=token < M)


@triton.jit
def plain_expand_kernel(
    words_ptr, out_ptr, units, columns, CODE: tl.constexpr, FOUR: tl.constexpr, J: tl.constexpr, V: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """out float16 `[rows, columns]` = V, without assembly; grid: (tiles of 16 rows, groups of 64 columns)."""
    tile, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = _plain_values(words_ptr, tile, group, units, CODE, FOUR, J, V) * SCALE
    row, column = tile * 16 + tl.arange(0, 16)[:, None], group * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + row * columns + column, value.to(tl.float16), mask=column < columns)


@triton.jit
def expand_kernel(
    words_ptr, out_ptr, units, columns,
    VALUES: tl.constexpr, VALUES_CONSTRAINTS: tl.constexpr, LOAD: tl.constexpr, LOAD_CONSTRAINTS: tl.constexpr,
    STORE: tl.constexpr, STORE_CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """out float16 `[rows, columns]` = V; grid: (tiles of 16 rows, W units of J x 64 columns), a unit a warp."""
    lane, warp = tl.arange(0, 32)[None, :], tl.arange(0, W)[:, None]
    before = (lane + 28) % 32 + warp * 0
    types: tl.constexpr = (tl.int32,) * 16
    tile, unit = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + warp
    at = (tile * units + tl.minimum(unit, units - 1)) * (32 * COUNT) + lane * V
    words = load_registers((words_ptr + at).to(tl.int64), LOAD, LOAD_CONSTRAINTS, COUNT)
    for part in tl.static_range(J):
        pairs = tl.inline_asm_elementwise(
            VALUES[part], VALUES_CONSTRAINTS, words + (before,), dtype=types, is_pure=False, pack=1
        )
        column = (unit * J + part) * 64 + lane % 4 * 16
        inside = (column < columns).to(tl.int32)
        for i in tl.static_range(4):
            row = tile * 16 + lane // 4 * 2 + i // 2
            address = (out_ptr + row * columns + column + i % 2 * 8).to(tl.int64)
            tl.inline_asm_elementwise(
                STORE, STORE_CONSTRAINTS, (address,) + pairs[4 * i : 4 * i + 4] + (inside,), dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


def _plain(layout: TrellisLayout) -> dict[str, object]:
    return {
        "CODE": layout.code, "FOUR": layout.four, "J": groups_of(layout.four), "V": layout.packed_codes.shape[-1],
        "SCALE": 1 / 128 if layout.code in OFFSET else 1.0,
    }  # fmt: skip


def expand(layout: TrellisLayout, *, asm: bool) -> Tensor:
    """V float16 [r, c], in the rotated basis."""
    tiles, units, _, _, vector = layout.packed_codes.shape
    columns, groups = -(-layout.k // 16) * 16, groups_of(layout.four)
    out = torch.empty(tiles * 16, columns, dtype=torch.float16, device=layout.packed_codes.device)
    if not asm:
        plain_expand_kernel[(tiles, triton.cdiv(columns, 64))](
            layout.packed_codes, out, units, columns, **_plain(layout)
        )
        return out
    values = [values_asm(layout.code, layout.four, group) for group in range(groups)]
    load, load_names = words_asm(layout.four * groups // 4, vector, 0)
    expand_kernel[(tiles, triton.cdiv(units, 4))](
        layout.packed_codes, out, units, columns, VALUES=tuple(text for text, _ in values), VALUES_CONSTRAINTS=values[0][1],
        LOAD=(load,), LOAD_CONSTRAINTS=load_names, STORE=STORE_FOUR_ASM, STORE_CONSTRAINTS=STORE_FOUR_CONSTRAINTS,
        COUNT=layout.four * groups // 4, V=vector, J=groups, W=4, num_warps=4,
    )  # fmt: skip
    return out


def trellis_linear(
    x: Tensor,
    layout: TrellisLayout,
    bias: Tensor | None,
    *,
    asm: bool,
    config: TrellisConfig | HopperConfig | None = None,
) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: fused to 16 tokens, or 512; beyond them V is expanded and cuBLAS multiplies."""
    m, rows, pdl, asm = (
        x.shape[0],
        layout.packed_codes.shape[0] * 16,
        launches_early(x.device),
        asm and ASSEMBLY,
    )
    if asm and DECODE_TOKENS < m <= HOPPER_TOKENS and runs_on_hopper(layout, x.device):
        from requant_kernels.trellis.gemm_sm90 import partial_products

        chosen = config if isinstance(config, HopperConfig) else hopper_config(layout, m, x.device)
        product = partial_products(x, layout, chosen)
    elif m > DECODE_TOKENS or not asm:
        product = _plain_product(x, layout, asm=asm, pdl=pdl)
    else:
        if not isinstance(config, TrellisConfig):
            config = trellis_config(
                layout.code, layout.bits, layout.n, layout.k, 1 if m == 1 else 8 if m <= 8 else 16, x.device
            )
        columns, before = padded_columns(layout.k), layout.input_scales
        if layout.code in OFFSET and can_fuse(x, layout, config):
            product = fused_sums(x, layout, config, pdl=pdl)
        elif layout.code in OFFSET:
            fixed, scales = rotate_fixed(
                x, before, width=layout.k, out_width=columns, paired=layout.code == "pair", asm=asm, pdl=pdl
            )
            product = byte_sums(fixed, scales, layout, config, pdl=pdl)
        else:
            turned = torch.empty(m, columns, dtype=torch.float16, device=x.device)
            rotate(
                x, turned, width=layout.k, rotated=-(-layout.k // 16) * 16, out_width=columns, before=before, asm=asm,
                pdl=pdl,
            )  # fmt: skip
            product = float_sums(turned, layout, config, pdl=pdl)
    added = None if layout.sparse is None else residual_sums(x, layout)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    rotate(
        product, y, width=rows, rotated=rows, out_width=layout.n, after=layout.output_scales, bias=bias, added=added,
        asm=asm, pdl=pdl,
    )  # fmt: skip
    return y


def _plain_product(x: Tensor, layout: TrellisLayout, *, asm: bool, pdl: bool) -> Tensor:
    """V times the rotated activations in float16: [m, rows], by cuBLAS or by the plain kernel."""
    m, padded, tiles = x.shape[0], -(-layout.k // 16) * 16, layout.packed_codes.shape[0]
    turned = torch.empty(m, padded, dtype=torch.float16, device=x.device)
    rotate(
        x, turned, width=layout.k, rotated=padded, out_width=padded, before=layout.input_scales, asm=asm, pdl=pdl
    )  # fmt: skip
    if m > DECODE_TOKENS:
        return torch.nn.functional.linear(turned, expand(layout, asm=asm))
    product = torch.empty(m, tiles * 16, dtype=torch.float32, device=x.device)
    plain_kernel[(tiles,)](
        turned, layout.packed_codes, product, m, padded, layout.packed_codes.shape[1], tiles * 16, turned.stride(0),
        **_plain(layout), N=16,
    )  # fmt: skip
    return product
