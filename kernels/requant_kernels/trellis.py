"""The trellis path: y = output_scales * H (V (H (input_scales * x))), three launches: rotate, multiply, rotate.
Residuals take one more, whose sums the last rotation adds.

V is stored as tiles of 16 x 16, each a ring of 256 codes of `bits` bits in row order; the value at a place is a function
of the 16 bits of the ring that end there (bitshift trellis, QTIP: Tseng et al. 2024, arXiv 2406.11235). A ring is kept
as a stream, first code in the highest bits, so that one funnel shift gives a lane the 32 bits that end with its four
columns of a row, and with them four windows. Four tiles lie side by side: loads are 16 bytes a lane.

| code | weights of a window x | after the tensor core |
| --- | --- | --- |
| mul1 | byte sum of 0x83DCD12D x | / 128 |
| pair | two: b0 + b1 + b2 + b3 and 510 + b0 - b1 - b2 + b3 of 0x4E6DA66B x + 0x3C6EF35F | / 128 |
| 3inst | the two float16 in ((89226354 x + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60, added | |

`dp4a` onto the bit pattern of 1024 makes a byte sum a float16 that is 1534 = 1024 + 510 too large; the tensor core
multiplies it as it is, and 1534 times the sum of the activations is taken off at the end. Rotated activations are float16
whatever the model's type is.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportPossiblyUnboundVariable=none, reportGeneralTypeIssues=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.blocks import halves
from requant_kernels.hadamard import rotate
from requant_kernels.residuals import residual_sums
from requant_kernels.rings import GROUP_TILES, TrellisLayout
from requant_kernels.tuning import DECODE_TOKENS, launches_early, trellis_warps
from requant_kernels.words import BYTE_SUM_OFFSET, trellis_asm


@triton.jit
def _window(words_ptr, tile, group, groups, BITS: tl.constexpr):
    """The two words around the end of a lane's four columns of a row: int32 `[t, g, warp, rh, tile]`."""
    t, g = tl.arange(0, 4)[:, None, None, None, None], tl.arange(0, 8)[None, :, None, None, None]
    rh, four = tl.arange(0, 2)[None, None, None, :, None], tl.arange(0, 4)[None, None, None, None, :]
    end = (16 * (8 * rh + g) + 4 * t + 4) * BITS
    last = (end - 1) // 32
    before = (last + 8 * BITS - 1) % (8 * BITS)
    at = tl.minimum(group, groups - 1)[None, None, :, None, None]  # beyond the end, what is read meets zeros
    base = words_ptr + (tile * groups + at) * (8 * BITS * 4) + four
    return tl.load(base + last * 4), tl.load(base + before * 4)


@triton.jit
def _shift(BITS: tl.constexpr, W: tl.constexpr):
    """How far the end of the four columns is from the end of its word, `[t, g, warp, rh, tile]`."""
    t, g, rh = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2)
    end = (
        16 * (8 * rh[None, None, None, :, None] + g[None, :, None, None, None])
        + 4 * t[:, None, None, None, None]
        + 4
    )
    return tl.broadcast_to((32 - end * BITS % 32) % 32, [4, 8, W, 2, 4])


@triton.jit
def _plain_value(x, CODE: tl.constexpr, second: tl.constexpr):
    """float32 of the windows x: uint32, for the interpreter and AMD."""
    if CODE == "3inst":
        h = ((x * 89226354 + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60
        low, high = (h & 0xFFFF).to(tl.uint16), (h >> 16).to(tl.uint16)
        value = low.to(tl.float16, bitcast=True).to(tl.float32) + high.to(tl.float16, bitcast=True).to(
            tl.float32
        )
        value = value.to(tl.float16).to(tl.float32)
    else:
        h = x * 0x83DCD12D if CODE == "mul1" else x * 0x4E6DA66B + 0x3C6EF35F
        b0, b1 = (h & 0xFF).to(tl.int32), ((h >> 8) & 0xFF).to(tl.int32)
        b2, b3 = ((h >> 16) & 0xFF).to(tl.int32), (h >> 24).to(tl.int32)
        value = (b0 - b1 - b2 + b3 if second else b0 + b1 + b2 + b3 - 510).to(tl.float32)
    return value


@triton.jit
def _values(
    low, high, shift, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr
):
    """Weights `[t, g, warp, rh, tile, e, kh]` of columns 4 t + 2 kh + e, OFFSET too large where there is assembly."""
    if ASM is None:
        low, high, shift = (
            low.to(tl.uint32, bitcast=True),
            high.to(tl.uint32, bitcast=True),
            shift.to(tl.uint32),
        )
        window = (low >> shift) | ((high << 1) << (31 - shift))
        values = ()
        for i in tl.static_range(4):
            if CODE == "pair":
                x = (window >> (2 * BITS * (1 - i // 2))) & 0xFFFF
            else:
                x = (window >> (BITS * (3 - i))) & 0xFFFF
            values = values + (_plain_value(x, CODE, CODE == "pair" and i % 2 == 1).to(tl.float16),)
        first, second = tl.join(values[0], values[1]), tl.join(values[2], values[3])
    else:
        first, second = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, (low, high, shift), dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        first, second = halves(first, tl.float16), halves(second, tl.float16)
    return tl.join(first, second)


@triton.jit
def _load_tokens(pairs, group, groups, EVEN: tl.constexpr):
    """Activations of one group of four tiles a warp, in pairs: int32 `[t, g, warp, token / 8, tile, kh]`."""
    at = (tl.minimum(group, groups - 1) if EVEN else group)[None, None, :, None, None, None] * 32
    return tl.load(pairs + at) if EVEN else tl.load(pairs + at, mask=at < groups * 32, other=0)


@triton.jit
def _multiply(acc, low, high, shift, x, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, CODE: tl.constexpr,
              BITS: tl.constexpr, W: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """acc `[warp, 16, N]` += a group of four tiles @ tokens."""
    weight = _values(low, high, shift, ASM, CONSTRAINTS, CODE, BITS)
    # this order of the columns makes neighbouring registers of a load the operand of one instruction
    weight = tl.reshape(weight, [4, 8, W, 2, 2, 2, 2, 2])  # t g w rh (tile: high low) e kh
    weight = tl.permute(weight, (2, 3, 1, 4, 7, 0, 5, 6))  # -> w (rh g) (high kh t low e)
    tokens = tl.reshape(halves(x, tl.float16), [4, 8, W, N // 8, 2, 2, 2, 2])  # t g w nt (high low) kh e
    tokens = tl.permute(tokens, (2, 4, 6, 0, 5, 7, 3, 1))  # -> w (high kh t low e) (nt g)
    return tl.dot(tl.reshape(weight, [W, 16, 64]), tl.reshape(tokens, [W, 64, N]), acc)


@triton.jit(do_not_specialize=["steps", "parts"])
def trellis_kernel(
    x_ptr, sums_ptr, words_ptr, y_ptr, M, groups, rows, steps, parts, stride_x,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
    OFFSET: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32 `[M, rows]` = x @ V^T * SCALE; x: int32 pairs of float16 `[M, 32 groups]`. Grid: tiles of 16 rows.

    Weights are OFFSET too large, which `sums [M, parts]` of x takes back. Two groups a round, each requested while the
    other is multiplied.
    """
    tile = tl.program_id(0).to(tl.int64)
    t, two = (
        tl.arange(0, 4)[:, None, None, None, None, None],
        tl.arange(0, 2)[None, None, None, None, None, :],
    )
    four = tl.arange(0, 4)[None, None, None, None, :, None]
    token = tl.minimum(tl.arange(0, 8)[:, None] + 8 * tl.arange(0, N // 8)[None, :], M - 1)
    pairs = x_ptr + token[None, :, None, :, None, None].to(tl.int64) * stride_x + 8 * four + 2 * t + two
    warp = tl.arange(0, W)
    shift = _shift(BITS, W)
    low, high = _window(words_ptr, tile, warp, groups, BITS)
    low_too, high_too = _window(words_ptr, tile, warp + W, groups, BITS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = _load_tokens(pairs, warp, groups, EVEN)
    x_too = _load_tokens(pairs, warp + W, groups, EVEN)
    acc = tl.zeros([W, 16, N], tl.float32)
    for step in range(0, steps, 2):
        group = step * W + warp
        # the branches keep the loads where they are (see decode.py); the first one is always taken
        if step * W < groups:
            acc = _multiply(acc, low, high, shift, x, ASM, CONSTRAINTS, CODE, BITS, W, N)
        low, high = _window(words_ptr, tile, group + 2 * W, groups, BITS)
        x = _load_tokens(pairs, group + 2 * W, groups, EVEN)
        if (step + 1) * W < groups:
            acc = _multiply(acc, low_too, high_too, shift, x_too, ASM, CONSTRAINTS, CODE, BITS, W, N)
        low_too, high_too = _window(words_ptr, tile, group + 3 * W, groups, BITS)
        x_too = _load_tokens(pairs, group + 3 * W, groups, EVEN)
    m, row = tl.arange(0, N), tile * 16 + tl.arange(0, 16)
    y = tl.sum(acc, 0)
    if OFFSET > 0:
        part = tl.arange(0, P)
        inside = (m < M)[:, None] & (part < parts)[None, :]
        sums = tl.load(sums_ptr + m[:, None] * parts + part[None, :], mask=inside, other=0.0)
        y -= OFFSET * tl.sum(sums, 1)[None, :]
    place = y_ptr + m[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(place, y * SCALE, mask=(m < M)[None, :])


@triton.jit
def expand_kernel(
    words_ptr, out_ptr, groups, columns,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
    OFFSET: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """out float16 `[rows, columns]` = V * SCALE; grid: (tiles of 16 rows, W groups of 64 columns)."""
    tile, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * W + tl.arange(0, W)
    low, high = _window(words_ptr, tile, group, groups, BITS)
    value = _values(low, high, _shift(BITS, W), ASM, CONSTRAINTS, CODE, BITS)
    value = tl.reshape(tl.permute(value, (0, 1, 2, 3, 4, 6, 5)), [4, 8, W, 2, 4, 4])  # t g w rh tile (kh e)
    t, g, rh, four = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2), tl.arange(0, 4)
    row = tile * 16 + 8 * rh[None, None, None, :, None, None] + g[None, :, None, None, None, None]
    column = group[None, None, :, None, None, None] * 64 + 16 * four[None, None, None, None, :, None]
    column += 4 * t[:, None, None, None, None, None] + four[None, None, None, None, None, :]
    tl.store(
        out_ptr + row * columns + column,
        ((value.to(tl.float32) - OFFSET) * SCALE).to(tl.float16),
        mask=column < columns,
    )


def _constants(layout: TrellisLayout, asm: bool) -> dict[str, object]:
    text, names = trellis_asm(layout.code, layout.bits) if asm else (None, None)
    plain = layout.code == "3inst"
    return {
        "ASM": text, "CONSTRAINTS": names, "CODE": layout.code, "BITS": layout.bits, "SCALE": 1.0 if plain else 1 / 128,
        "OFFSET": 0 if plain or not asm else BYTE_SUM_OFFSET,
    }  # fmt: skip


def expand(layout: TrellisLayout, *, asm: bool) -> Tensor:
    """V float16 [r, c], in the rotated basis."""
    row_tiles, groups = layout.words.shape[:2]
    out = torch.empty(
        row_tiles * 16, -(-layout.k // 16) * 16, dtype=torch.float16, device=layout.words.device
    )
    grid = (row_tiles, triton.cdiv(groups, 4))
    expand_kernel[grid](layout.words, out, groups, out.shape[1], **_constants(layout, asm), W=4, num_warps=4)
    return out


def trellis_linear(
    x: Tensor, layout: TrellisLayout, bias: Tensor | None, *, asm: bool, warps: int | None = None
) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: fused to 16 tokens, beyond them V is expanded and cuBLAS multiplies."""
    m, rows, groups = x.shape[0], layout.words.shape[0] * 16, layout.words.shape[1]
    padded, width = -(-layout.k // 16) * 16, groups * GROUP_TILES * 16
    pdl = launches_early(x.device)
    early = {"launch_pdl": True} if pdl else {}
    make = torch.empty if width == padded else torch.zeros
    turned = make(m, width, dtype=torch.float16, device=x.device)
    sums = rotate(x, turned, width=layout.k, out_width=padded, before=layout.input_scales, pdl=pdl)
    if m > DECODE_TOKENS:
        product = torch.nn.functional.linear(turned[:, :padded], expand(layout, asm=asm))
    else:
        product = torch.empty(m, rows, dtype=torch.float32, device=x.device)
        pairs, tokens = turned.view(torch.int32), 8 if m <= 8 else 16
        warps = warps or trellis_warps(layout.code, layout.bits, layout.n, layout.k, tokens, x.device)
        trellis_kernel[(layout.words.shape[0],)](
            pairs, sums, layout.words, product, m, groups, rows, triton.cdiv(groups, warps), sums.shape[1],
            pairs.stride(0), **_constants(layout, asm), W=warps, EVEN=groups % warps == 0, N=tokens,
            P=triton.next_power_of_2(sums.shape[1]), PDL=pdl, num_warps=warps, num_stages=1, **early,
        )  # fmt: skip
    added = None if layout.sparse is None else residual_sums(x, layout)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    rotate(
        product,
        y,
        width=rows,
        out_width=layout.n,
        after=layout.output_scales,
        bias=bias,
        added=added,
        pdl=pdl,
    )
    return y
