"""The decode kernel: `y = x @ (dense + sparse)^T` for 1 to 16 tokens, one launch, no shared memory in the loop.

A program owns 16 rows; its warps share the columns among them, 256 at a time (`words.py` has the bit diagram). Weights
are the left operand of the tensor cores, tokens the right one. The batch dimension of a three-dimensional `tl.dot` is
the warp: every warp multiplies its own blocks and nothing is exchanged before the end, where one `tl.sum` over the warps,
in a fixed order, makes the result the same in every run.

- All loads of `UNROLL` blocks are issued before the first is used: short matrices are read in one breath.
- The shapes of the loads look odd on purpose. Triton gives lanes to the contiguous dimension first and then to dimension
  0, 1, ..: `[lane, warp, 8]` makes a lane load the 16 bytes that it will multiply, so that all reshapes and permutes below
  are renamings of registers. Another compiler may move data instead; it will be slower, and right.
- Sparse residuals: rows are sorted by their number (`layouts.py`), so 16 rows have about equal lengths and share one
  rectangle of slots. Slots are fetched first, the activations are gathered while the dense part runs, sums come last.
- `USE_ASM` selects the PTX of `words.py`; without it the same bits are taken apart by plain Triton (interpreter, AMD).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.layouts import CodebookLayout, Layout
from requant_kernels.tuning import DecodeConfig
from requant_kernels.words import UNIT, codebook_asm, constraints, flat_positions, grid_asm


@triton.jit
def load_block(w_ptr, s_ptr, z_ptr, tiles, block, blocks, BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
               W: tl.constexpr):  # fmt: skip
    """The words of one block a warp and tile (`tiles`, `block`: `[warp, tile]`), its scales, its zero points."""
    lane, four = tl.arange(0, 32), tl.arange(0, 4)
    at = (tiles * blocks + block)[None, :, :, None] * (BITS * 128)
    at += lane[:, None, None, None] * 4 + four[None, None, None, :]
    loaded = ()
    for i in tl.static_range(BITS):
        if EVEN:
            word = tl.load(w_ptr + at + i * 128, eviction_policy="evict_first")
        else:
            inside = (block < blocks)[None, :, :, None]
            word = tl.load(w_ptr + at + i * 128, mask=inside, other=0, eviction_policy="evict_first")
        loaded = loaded + (word,)
    if GROUP > 0:
        loaded = loaded + _load_groups(s_ptr, tiles, block, blocks, GROUP, EVEN, W)
    if GROUP > 0 and z_ptr is not None:
        loaded = loaded + _load_groups(z_ptr, tiles, block, blocks, GROUP, EVEN, W)
    return loaded


@triton.jit
def _load_groups(pointer, tiles, block, blocks, GROUP: tl.constexpr, EVEN: tl.constexpr, W: tl.constexpr):
    """A scale (or zero point) a row and group of one block a warp, each `[t, g, warp, tile, rh]`."""
    a_block: tl.constexpr = 256 // GROUP if GROUP < 256 else 1
    a_group: tl.constexpr = GROUP // 256 if GROUP > 256 else 1
    loaded = ()
    for i in tl.static_range(a_block):
        groups = tl.cdiv(blocks, a_group) * a_block
        at = row_offsets(tiles * groups + block // a_group * a_block + i)
        if EVEN:
            loaded = loaded + (tl.load(pointer + at),)
        else:
            loaded = loaded + (tl.load(pointer + at, mask=(block < blocks)[None, None, :, :, None], other=0.0),)
    return loaded


@triton.jit
def row_offsets(base):
    """`[t, g, warp, tile, rh]`: where a lane finds what belongs to its rows g and g + 8 (the four t read the same)."""
    t, g, rh = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2)
    same = t[:, None, None, None, None] * 0 + g[None, :, None, None, None] * 2 + rh[None, None, None, None, :]
    return same + base[None, None, :, :, None] * 16


@triton.jit
def _like_words(rows, W: tl.constexpr, R: tl.constexpr):
    """A value a row `[t, g, warp, tile, rh]` -> `[lane, warp, tile, 4]`, the shape of words."""
    rows = tl.reshape(tl.permute(rows, (1, 0, 2, 3, 4)), [32, W, R, 1, 2])
    return tl.reshape(tl.broadcast_to(rows, [32, W, R, 2, 2]), [32, W, R, 4])


@triton.jit
def _like_products(rows, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """A value a row `[t, g, warp, tile, rh]` -> `[warp, rows, N]`, the shape of products."""
    rows = tl.reshape(tl.permute(rows, (2, 3, 4, 1, 0)), [W, R, 2, 8, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(rows, [W, R, 2, 8, N // 8, 4, 2]), [W, 16 * R, N])


@triton.jit
def _code(words, POSITIONS: tl.constexpr, e: tl.constexpr, plane: tl.constexpr, BITS: tl.constexpr):
    """Plain Triton: one code of every 32-bit word, by the table of bit positions."""
    code = tl.zeros_like(words[0])
    for c in tl.static_range(BITS):
        code += ((words[POSITIONS[(e * 16 + plane) * BITS + c] // 32] >> (POSITIONS[(e * 16 + plane) * BITS + c] % 32)) & 1) << c
    return code


@triton.jit
def _decode_plain(words, rows_zero, levels_ptr, tiles, dtype, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr,
                  BITS: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """`decode_block` without assembly; one step of a grid is worth 1."""
    row = tl.arange(0, 32)[:, None, None, None] // 4 + 8 * (tl.arange(0, 4)[None, None, None, :] % 2)
    row = tiles[None, :, :, None] * 16 + row
    planes = ()
    for plane in tl.static_range(16):
        low, high = _code(words, POSITIONS, 0, plane, BITS), _code(words, POSITIONS, 1, plane, BITS)
        if CODEBOOK:
            at = levels_ptr + row * (1 << BITS)
            low, high = tl.load(at + low), tl.load(at + high)
        else:
            zero = _like_words(rows_zero[plane * GROUPS // 16], W, R).to(tl.float32) if ZEROS else 1 << (BITS - 1)
            low, high = low - zero, high - zero
        planes = planes + (tl.join(low.to(dtype), high.to(dtype)),)
    return planes


@triton.jit
def _zero_pairs(zero, UNIT: tl.constexpr, dtype, W: tl.constexpr, R: tl.constexpr):
    """Zero points `[t, g, warp, tile, rh]` -> the pair -zero * UNIT in 32 bits, in the shape of words."""
    half = (zero.to(tl.float32) * (-UNIT)).to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return _like_words(half * 0x10001, W, R)


@triton.jit
def decode_block(loaded, tables, levels_ptr, tiles, like_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
                 POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                 ZEROS: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """The 16 planes `[lane, warp, tile, (kh rh), e]` of a block: levels, or steps of the grid times UNIT."""
    dtype = like_ptr.dtype.element_ty
    GROUPS: tl.constexpr = 256 // GROUP if GROUP > 0 and GROUP < 256 else 1
    zero = tables if GROUP == 0 else loaded[BITS + GROUPS :]  # a zero point a row rides in `tables`
    if ASM is None:
        planes = _decode_plain(loaded, zero, levels_ptr, tiles, dtype, POSITIONS, CODEBOOK, BITS, GROUPS, ZEROS, W, R)
    else:
        operands = ()
        if CODEBOOK:
            operands = tables
        elif ZEROS:
            for i in tl.static_range(GROUPS):
                operands = operands + (_zero_pairs(zero[i], UNIT, dtype, W, R),)
        pairs = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, loaded[:BITS] + operands, dtype=(tl.int32,) * 16, is_pure=True, pack=1
        )
        planes = ()
        for i in tl.static_range(16):
            planes = planes + (halves(pairs[i], dtype),)
    return planes


@triton.jit
def load_tables(s_ptr, z_ptr, tiles, CODEBOOK: tl.constexpr, TABLES: tl.constexpr, GROUP: tl.constexpr,
                W: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """What belongs to the rows for the whole launch: byte tables of a codebook, or one zero point a row."""
    tables = ()
    same = tl.arange(0, W)[:, None] * 0 + tiles
    if CODEBOOK:
        for i in tl.static_range(TABLES):
            tables = tables + (_like_words(tl.load(s_ptr + row_offsets(same * TABLES + i)), W, R),)
    elif z_ptr is not None and GROUP == 0:
        tables = (tl.load(z_ptr + row_offsets(same)),)
    return tables


@triton.jit
def load_tokens(x_ptr, token, stride_x, block, blocks, K, EVEN: tl.constexpr):
    """Activations of one block a warp, in pairs: eight int32 `[t, g, warp, token / 8, (j kh)]`, two planes each."""
    t, four = tl.arange(0, 4), tl.arange(0, 4)
    pair = (tl.minimum(block, blocks - 1) if EVEN else block)[None, None, :, None, None] * 128
    pair += t[:, None, None, None, None] * 4 + four[None, None, None, None, :]
    pointer = x_ptr + token[None, :, None, :, None].to(tl.int64) * stride_x + pair
    tokens = ()
    for slab in tl.static_range(8):
        if EVEN:
            tokens = tokens + (tl.load(pointer + slab * 16),)
        else:
            tokens = tokens + (tl.load(pointer + slab * 16, mask=(pair + slab * 16) * 2 < K, other=0),)
    return tokens


@triton.jit
def halves(pair, dtype):
    """int32 -> the two 16-bit floats that it holds, in a new last dimension."""
    low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@triton.jit
def _multiply_block(acc, loaded, tables, tokens, like_ptr, levels_ptr, tiles, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
                    POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                    ZEROS: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                    N: tl.constexpr):  # fmt: skip
    """acc `[warp, rows, N]` += block @ tokens."""
    GROUPS: tl.constexpr = 0 if GROUP == 0 else (256 // GROUP if GROUP < 256 else 1)
    planes = decode_block(loaded, tables, levels_ptr, tiles, like_ptr, ASM, CONSTRAINTS, POSITIONS,
                          CODEBOOK, BITS, GROUP, ZEROS, UNIT, W, R)  # fmt: skip
    part = acc
    for slab in tl.static_range(8):
        if GROUP > 0 and slab * GROUPS % 8 == 0:
            part = tl.zeros([W, 16 * R, N], tl.float32)
        weight = tl.reshape(tl.join(planes[2 * slab], planes[2 * slab + 1]), [8, 4, W, R, 2, 2, 2, 2])
        weight = tl.permute(weight, (2, 3, 5, 0, 7, 1, 4, 6))  # g t w tile kh rh e j -> w (tile rh g) (j t kh e)
        x = tl.reshape(halves(tokens[slab], like_ptr.dtype.element_ty), [4, 8, W, N // 8, 2, 4])
        x = tl.permute(x, (2, 4, 0, 5, 3, 1))  # t g w nt j (kh e) -> w (j t kh e) (nt g)
        part = tl.dot(tl.reshape(weight, [W, 16 * R, 32]), tl.reshape(x, [W, 32, N]), part)
        if GROUP > 0 and (slab + 1) * GROUPS % 8 == 0:
            scale = loaded[BITS + slab * GROUPS // 8].to(tl.float32)
            acc += part * _like_products(scale, W, R, N)
    return acc if GROUP > 0 else part


@triton.jit
def load_slots(si_ptr, sv_ptr, first, last, SLOTS: tl.constexpr):
    """Columns and residuals of `SLOTS` chunks of 8 from chunk `first` of every row on: `[rows, SLOTS, 8]`."""
    row, chunk, eight = tl.arange(0, first.shape[0]), tl.arange(0, SLOTS), tl.arange(0, 8)
    chunks = first[:, None] + chunk[None, :]
    at = chunks[:, :, None].to(tl.int64) * 128 + (row % 16)[:, None, None] * 8 + eight[None, None, :]
    inside = (chunks < last[:, None])[:, :, None]
    column = tl.load(si_ptr + at, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32) & 0xFFFF
    return column, tl.load(sv_ptr + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _gather(xs_ptr, column, MS: tl.constexpr):
    """Activations at `column`: `[rows, chunks, 8, MS]`, MS neighbouring tokens of the transposed activations."""
    return tl.load(xs_ptr + column[:, :, :, None] * MS + tl.arange(0, MS)[None, None, None, :])


@triton.jit
def _sparse_sums(value, x):
    """Sums over the slots of a row: `[rows, MS]`."""
    return tl.sum(tl.sum(value.to(tl.float32)[:, :, :, None] * x.to(tl.float32), 2), 1)


@triton.jit(do_not_specialize=["last_tile"])
def decode_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, z_ptr, levels_ptr, rows_ptr, sp_ptr, si_ptr, sv_ptr, sr_ptr, bias_ptr, y_ptr,
    M, K, n, last_tile, stride_x, stride_y,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, POSITIONS: tl.constexpr, CODEBOOK: tl.constexpr, BITS: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, MS: tl.constexpr,
    SLOTS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, UNROLL: tl.constexpr, CHUNKS: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y `[M, n]` = x `[M, K]` @ weight^T; grid: R tiles of 16 rows each. GROUP 0: one scale a row."""
    # where the number of tiles is odd, the last tile is computed, and written, twice alike
    tiles = tl.minimum(tl.program_id(0) * R + tl.arange(0, R), last_tile).to(tl.int64)
    tiles = tiles[None, :]
    position = tl.minimum(tl.program_id(0) * R + tl.arange(0, 16 * R) // 16, last_tile).to(tl.int64)
    row = position * 16 + tl.arange(0, 16 * R) % 16
    ZEROS: tl.constexpr = z_ptr is not None
    SPARSE: tl.constexpr = sp_ptr is not None
    blocks = tl.cdiv(K, 256)
    warp = tl.arange(0, W)
    tables = load_tables(s_ptr, z_ptr, tiles, CODEBOOK, TABLES, GROUP, W, R)
    if SPARSE:
        chunk, last = tl.load(sp_ptr + position), tl.load(sp_ptr + position + 1)
        column, value = load_slots(si_ptr, sv_ptr, chunk, last, SLOTS)
    ahead = ()
    for u in tl.static_range(UNROLL):
        ahead = ahead + (load_block(w_ptr, s_ptr, z_ptr, tiles, (u * W + warp)[:, None], blocks, BITS, GROUP, EVEN, W),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SPARSE:
        gathered = _gather(xs_ptr, column, MS)
    token = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, N // 8)[None, :]
    token = tl.minimum(token, M - 1)  # the surplus columns are computed and never stored
    acc = tl.zeros([W, 16 * R, N], tl.float32)
    tokens = load_tokens(x_ptr, token, stride_x, warp, blocks, K, EVEN)
    for c in range(CHUNKS):
        now = ahead
        if CHUNKS > 1:
            ahead = ()
            for u in tl.static_range(UNROLL):
                block = ((c + 1) * UNROLL + u) * W + warp
                ahead = ahead + (load_block(w_ptr, s_ptr, z_ptr, tiles, block[:, None], blocks, BITS, GROUP, False, W),)
        for u in tl.static_range(UNROLL):
            at_hand = tokens
            if CHUNKS > 1 or u + 1 < UNROLL:
                block = (c * UNROLL + u + 1) * W + warp
                tokens = load_tokens(x_ptr, token, stride_x, block, blocks, K, EVEN)
            if (c * UNROLL + u) * W < blocks:  # always; the branch keeps the loads above from sinking below
                acc = _multiply_block(acc, now[u], tables, at_hand, y_ptr, levels_ptr, tiles, ASM, CONSTRAINTS,
                                      POSITIONS, CODEBOOK, BITS, GROUP, ZEROS, UNIT, W, R, N)  # fmt: skip
    y = tl.sum(acc, 0)
    if not CODEBOOK:
        if GROUP == 0:
            y *= tl.load(s_ptr + position * 16 + row % 8 * 2 + row % 16 // 8).to(tl.float32)[:, None]
        y *= 1.0 / UNIT
    if SPARSE:
        sums = _sparse_sums(value, gathered)
        chunk += SLOTS
        while tl.max(last - chunk, 0) > 0:
            column, value = load_slots(si_ptr, sv_ptr, chunk, last, SLOTS)
            sums += _sparse_sums(value, _gather(xs_ptr, column, MS))
            chunk += SLOTS
        if sr_ptr is not None:
            sums *= tl.load(sr_ptr + row).to(tl.float32)[:, None]
        if MS < N:
            sums = tl.broadcast_to(sums, [16 * R, N])  # one token: the other columns are never stored
        y += sums
    out = row
    if rows_ptr is not None:
        out = tl.load(rows_ptr + row).to(tl.int64)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out < n, other=0.0).to(tl.float32)[:, None]
    m = tl.arange(0, N)
    tl.store(
        y_ptr + m[None, :].to(tl.int64) * stride_y + out[:, None],
        y.to(y_ptr.dtype.element_ty),
        mask=(m < M)[None, :] & (out < n)[:, None],
    )


@triton.jit
def transpose_kernel(x_ptr, xt_ptr, M, K, stride_x, MS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """xt `[K, MS]` = x `[M, K]` transposed, zero beyond M."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, MS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = (token < M)[None, :] & (column < K)[:, None]
    x = tl.load(x_ptr + token[None, :].to(tl.int64) * stride_x + column[:, None], mask=inside, other=0.0)
    tl.store(xt_ptr + column[:, None] * MS + token[None, :], x, mask=(column < K)[:, None])


def operands(layout: Layout, dtype: torch.dtype, asm: bool) -> tuple[tuple[Tensor | None, ...], dict[str, object]]:
    """The weight's arguments of a kernel (words, scales or tables, zero points, levels) and its decoding constants."""
    name = "fp16" if dtype == torch.float16 else "bf16"
    codebook = isinstance(layout, CodebookLayout)
    use_asm = asm and not (codebook and layout.bits > 4)
    if codebook:
        tables = 1 << (layout.bits - 1) if use_asm else 0
        group, inputs = 0, tables
        scales = layout.levels if layout.tables is None else layout.tables[int(name == "bf16")]
        tensors = (layout.words, scales, None, layout.levels)
        text = codebook_asm(layout.bits) if use_asm else None
    else:
        tables, group = 0, layout.kernel_group
        inputs = 0 if layout.zero_points is None else max(1, 256 // group) if group else 1
        tensors = (layout.words, layout.scales, layout.zero_points, None)
        text = grid_asm(layout.bits, name, inputs) if use_asm else None
    return tensors, {
        "ASM": text,
        "CONSTRAINTS": constraints(layout.bits + inputs) if use_asm else None,
        "POSITIONS": None if use_asm else flat_positions("codebook" if codebook else "grid", layout.bits),
        "CODEBOOK": codebook,
        "BITS": layout.bits,
        "TABLES": tables,
        "GROUP": group,
        "UNIT": UNIT[name] if use_asm else 1.0,
    }


def sparse_operands(layout: Layout) -> tuple[Tensor | None, ...]:
    """rows, starts, columns, values and row scales; None where the layout has no sparse part."""
    sparse = layout.sparse
    if sparse is None:
        return layout.rows, None, None, None, None
    return layout.rows, sparse.starts, sparse.columns, sparse.values, sparse.row_scales


def dense_tokens(x: Tensor, layout: Layout) -> Tensor:
    """The activations that meet the dense part: divided by `column_scales` where there are any."""
    if isinstance(layout, CodebookLayout) or layout.column_scales is None:
        return x
    return x / layout.column_scales.to(x.dtype)


def decode(x: Tensor, layout: Layout, bias: Tensor | None, config: DecodeConfig, *, asm: bool) -> Tensor:
    """y [m, n] of x [m, k], 1 <= m <= 16, rows contiguous."""
    m, k = x.shape
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    tensors, constants = operands(layout, x.dtype, asm)
    launch = {"launch_pdl": True} if config.pdl else {}
    n_tokens = 8 if m <= 8 else 16
    width = 1 if m == 1 or layout.sparse is None else n_tokens
    gathered = x
    if width > 1:
        gathered = torch.empty(k, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(k, 256),)
        transpose_kernel[grid](x, gathered, m, k, x.stride(0), MS=width, BLOCK=256, PDL=config.pdl, **launch)
    dense = dense_tokens(x, layout)
    if k % 2 or dense.stride(0) % 2 or dense.data_ptr() % 4:  # the kernel reads activations in pairs
        dense = torch.nn.functional.pad(dense, (0, k % 2)).clone(memory_format=torch.contiguous_format)
    pairs = dense.view(torch.int32)
    tiles, span = layout.words.shape[0], config.warps * config.unroll
    if config.max_registers:
        launch["maxnreg"] = config.max_registers
    decode_kernel[(triton.cdiv(tiles, config.tiles),)](
        pairs, gathered, *tensors, *sparse_operands(layout), bias, y, m, k, layout.n, tiles - 1, pairs.stride(0),
        y.stride(0), **constants, EVEN=k % (256 * span) == 0, MS=width, SLOTS=config.slots, W=config.warps,
        R=config.tiles, UNROLL=config.unroll, CHUNKS=triton.cdiv(triton.cdiv(k, 256), span), N=n_tokens,
        PDL=config.pdl, num_warps=config.warps, num_stages=1, **launch,
    )  # fmt: skip
    return y
