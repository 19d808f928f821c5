"""Hadamard transforms of many tokens: a warp holds a block of 512 to 4096 values in registers, or two of 256, and waits for
no other.

A lane has vectors of eight neighbours. With bits of a value's index, t of the two low bits of its lane and g of the others:

                    in the lane                             t               g
    before          0 1 2   8 9 10 11                       3 4             5 6 7, in any order g0 g1 g2
    after           0 1 2   g0 9 10 11                      g1 g2           8 3 4
    after another   as before

Bits 2 and 9 to 11 are mixed by sums and differences of float16, two at a time, the others by `mma.m16n8k16` with a matrix of
signs: first as its left operand, then as its right one, so that the fragments of the sums are those of the next operand.

    (8 3 4 0)  times signs      sums in float32, rounded to float16      pairs of bit 8, or g0 after it
    (g0 g1 g2 1)  times signs   float32

Bit 8 tells two blocks of 256 apart, and is left alone by zeros among the signs (PAIRED). If the number of blocks is odd, the
warp of the last one computes and stores it twice.

`registers.py` splits a tile among 16 warps, for few tokens, and keeps more bits.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportGeneralTypeIssues=none, reportAssignmentType=none

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.hadamard.warp_ptx import ASM

NUM_WARPS = 4
BLOCKS = (256, 4096)  # supported sizes
NATURAL = (0, 1, 2)  # of g0 g1 g2, which of the bits 5 6 7


def supports(block_size: int) -> bool:
    """Whether a warp holds blocks of this size."""
    return BLOCKS[0] <= block_size <= BLOCKS[1] and block_size & (block_size - 1) == 0


@triton.jit
def lane_and_warp(WARPS: tl.constexpr):
    """Lane and warp of each thread."""
    thread = tl.arange(0, 32 * WARPS)
    return thread % 32, thread // 32


@triton.jit
def _added(values, BIT: tl.constexpr, ASM: tl.constexpr):
    PTX: tl.constexpr = ASM.add_lanes[BIT]
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (values,), dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def sum_of_lanes(values, BITS: tl.constexpr, ASM: tl.constexpr):
    """The sum of the values of lanes that differ in these bits of their number, in all of them."""
    for i in tl.static_range(len(BITS)):
        values = _added(values, BITS[i], ASM)
    return values


@triton.jit
def signs_of(lane, PAIRED: tl.constexpr):
    """A lane's pairs of signs, over 4, and the negated ones, in the matrices of both products of a first transform. The
    second transform exchanges the two."""
    g, k = lane // 4, lane % 4 * 2
    low, high = g & k, g & (k + 1)
    low = (low ^ low >> 1 ^ low >> 2) & 1
    high = (high ^ high >> 1 ^ high >> 2) & 1
    pair = 0x34003400 ^ low << 15 ^ high << 31
    first = pair
    if PAIRED:  # zeros where bit 0 of row and column differ
        own = 0x3400 ^ low << 15
        first = tl.where(g & 1 == 0, own, own << 16)
    return first, first ^ -2147450880, pair, pair ^ -2147450880


@triton.jit
def apart_of(block, columns, PAIRED: tl.constexpr):
    """How far vectors are apart whose bit 8 differs; `columns`: vectors of a row."""
    apart = 32
    if PAIRED:
        apart = tl.where((2 * block + 1) * 32 < columns, 32, 0)
    return apart


@triton.jit
def before(lane, G: tl.constexpr):
    """The first vector of a lane before a transform, in vectors; the next is `apart`, every second one 64 further."""
    g = lane // 4
    return lane % 4 + 4 * ((g & 1) * (1 << G[0]) + (g >> 1 & 1) * (1 << G[1]) + (g >> 2 & 1) * (1 << G[2]))


@triton.jit
def after(lane, apart, G: tl.constexpr):
    """The first vector of a lane after it. The next is `4 << G[0]` further, every second one 64."""
    t, g = lane % 4, lane // 4
    return (g & 1) * apart + (g >> 1) + 4 * ((t & 1) * (1 << G[1]) + (t >> 1) * (1 << G[2]))


@triton.jit
def load_vector(pointer, at, CONSTANT: tl.constexpr, ASM: tl.constexpr):
    """A vector as four words; `at`: in vectors. CONSTANT: nothing writes it while the kernel runs."""
    PTX: tl.constexpr = ASM.load_constant if CONSTANT else ASM.load
    types: tl.constexpr = (tl.int32,) * 4
    address = pointer.to(tl.int64) + at.to(tl.int64) * 16
    return tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (address,), dtype=types, is_pure=CONSTANT, pack=1
    )


@triton.jit
def store_vector(pointer, at, words, inside, ASM: tl.constexpr):
    """The reverse, where `inside`."""
    PTX: tl.constexpr = ASM.store
    address = pointer.to(tl.int64) + at.to(tl.int64) * 16
    tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (address,) + words + (inside.to(tl.int32),), dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def store_permuted(pointer, at, words, inside, ASM: tl.constexpr):
    """The same in the order of `trellis/gemm_sm90.py`: of every 64 columns, word 4 u + t is word 8 t + u of the row."""
    PTX: tl.constexpr = ASM.store_words
    word = (at // 8).to(tl.int64) * 32 + at % 2 * 16 + at // 2 % 4
    tl.inline_asm_elementwise(
        PTX.text, PTX.constraints, (pointer.to(tl.int64) + word * 4,) + words + (inside.to(tl.int32),), dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_floats(pointer, at, ASM: tl.constexpr):
    """The eight values of a constant vector, in float32; `at`: in vectors."""
    return unpacked(load_vector(pointer, at, True, ASM), pointer.dtype.element_ty)


@triton.jit
def unpacked(words, DTYPE: tl.constexpr):
    """The two values of each word, in float32."""
    found = ()
    for i in tl.static_range(len(words)):
        if tl.float16 == DTYPE:
            low = words[i].to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            low = (words[i] << 16).to(tl.float32, bitcast=True)
            high = (words[i] & -65536).to(tl.float32, bitcast=True)
        found = found + (low, high)
    return found


@triton.jit
def of_words(a, b, PTX: tl.constexpr):
    """A word of two operands, by one instruction."""
    return tl.inline_asm_elementwise(PTX.text, PTX.constraints, (a, b), dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def packed(low, high, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A word of two float32, rounded."""
    PTX: tl.constexpr = ASM.to_fp16 if tl.float16 == DTYPE else ASM.to_bf16
    return of_words(high, low, PTX)


@triton.jit
def packed_vector(values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The four words of eight float32."""
    found = ()
    for i in tl.static_range(4):
        found = found + (packed(values[2 * i], values[2 * i + 1], DTYPE, ASM),)
    return found


@triton.jit
def load_block(pointer, first, apart, VECTORS: tl.constexpr, ASM: tl.constexpr):
    """A lane's values before a transform, as `block_pairs`. `first`: its first vector."""
    return block_pairs(load_words(pointer, first, apart, VECTORS, ASM), ASM)


@triton.jit
def load_words(pointer, first, apart, VECTORS: tl.constexpr, ASM: tl.constexpr):
    """The words of a lane's vectors, each followed by those of the one `apart`."""
    return load_sums(pointer, first, apart, 0, 1, VECTORS, ASM)


@triton.jit
def load_sums(pointer, first, apart, matrix, SPLITS: tl.constexpr, VECTORS: tl.constexpr, ASM: tl.constexpr):
    """The same of SPLITS matrices, `matrix` vectors apart, which are added in float16."""
    ADD: tl.constexpr = ASM.add
    found = ()
    for v in tl.static_range(VECTORS // 2):
        for half in tl.static_range(2):
            own = load_vector(pointer, first + v * 64 + apart * half, False, ASM)
            for split in tl.static_range(1, SPLITS):
                words = ()
                other = load_vector(pointer, first + split * matrix + v * 64 + apart * half, False, ASM)
                for i in tl.static_range(4):
                    words = words + (of_words(own[i], other[i], ADD),)
                own = words
            found = found + own
    return found


@triton.jit
def block_pairs(words, ASM: tl.constexpr):
    """The values of `load_words` as pairs of bit 8: bit 0 fastest, then 1, 2, 9, 10, 11."""
    LOW: tl.constexpr = ASM.low_halves
    HIGH: tl.constexpr = ASM.high_halves
    found = ()
    for i in tl.static_range(len(words) // 2):
        a, b = words[i // 4 * 8 + i % 4], words[i // 4 * 8 + 4 + i % 4]
        found = found + (of_words(a, b, LOW), of_words(a, b, HIGH))
    return found


@triton.jit
def _mixed_over(pairs, STEP: tl.constexpr, ASM: tl.constexpr):
    """Sums of groups of four pairs with those STEP groups further, and differences instead of these."""
    ADD: tl.constexpr = ASM.add
    SUBTRACT: tl.constexpr = ASM.subtract
    found = ()
    for i in tl.static_range(len(pairs)):
        if i // 4 & STEP == 0:
            found = found + (of_words(pairs[i], pairs[i + 4 * STEP], ADD),)
        else:
            found = found + (of_words(pairs[i - 4 * STEP], pairs[i], SUBTRACT),)
    return found


@triton.jit
def mixed_groups(pairs, ASM: tl.constexpr):
    """Sums and differences over bits 2, 9, 10 and 11, which tell groups of four pairs apart."""
    for stage in tl.static_range(4):
        if (4 << stage) < len(pairs):
            pairs = _mixed_over(pairs, 1 << stage, ASM)
    return pairs


@triton.jit
def two_vectors(pairs, signs, V: tl.constexpr, ASM: tl.constexpr, PAIR: tl.constexpr = False):
    """Vectors 2 V and 2 V + 1 of a lane after a transform, 16 float32, of pairs whose groups are mixed.

    The two products divide by 16; the groups' sums are not divided (FACTOR). PAIR: bit 0 is not mixed.
    """
    PTX: tl.constexpr = ASM.mix_of_pairs if PAIR else ASM.mix
    types: tl.constexpr = (tl.float32,) * 8
    both = ()
    for two in tl.static_range(2):
        four = pairs[8 * V + 4 * two : 8 * V + 4 * two + 4]
        both = both + tl.inline_asm_elementwise(
            PTX.text, PTX.constraints, four + signs, dtype=types, is_pure=True, pack=1
        )
    found = ()
    for half in tl.static_range(2):
        for i in tl.static_range(8):  # bits 0, 1, 2
            found = found + (both[i // 4 * 8 + i // 2 % 2 * 4 + i % 2 * 2 + half],)
    return found


@triton.jit
def pairs_of(values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The eight pairs of two vectors, for another transform."""
    found = ()
    for i in tl.static_range(8):
        found = found + (packed(values[i], values[8 + i], DTYPE, ASM),)
    return found


def factor_of(block_size: int) -> float:
    """What a transform leaves out."""
    return (block_size // 256) ** -0.5


def constants_of(width: int) -> dict[str, Any]:
    """Of a kernel on rows of this many values. FACTOR: what a transform leaves out."""
    block_size = width & -width
    return {
        "VECTORS": max(2, block_size // 256), "PAIRED": block_size == 256, "FACTOR": factor_of(block_size),
        "WARPS": NUM_WARPS, "G": NATURAL, "ASM": ASM, "num_warps": NUM_WARPS, "num_stages": 1,
    }  # fmt: skip


def grid_of(m: int, width: int) -> tuple[int, int, int]:
    """Its CTAs for m rows."""
    return -(-width // max(512, width & -width)), -(-m // NUM_WARPS), 1


@triton.jit
def rotate_kernel(
    x_ptr, input_scales_ptr, y_ptr, tokens, columns, x_row, y_row, VECTORS: tl.constexpr, PAIRED: tl.constexpr,
    FACTOR: tl.constexpr, WARPS: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of a token a warp; grid (blocks, tokens / WARPS). `columns` and strides in vectors."""
    lane, warp = lane_and_warp(WARPS)
    token = tl.program_id(1).to(tl.int64) * WARPS + warp
    inside = token < tokens
    apart = apart_of(tl.program_id(0), columns, PAIRED)
    start, first, last = tl.program_id(0) * (32 * VECTORS), before(lane, G), after(lane, apart, G)
    row, pairs = tl.minimum(token, tokens - 1) * x_row + start, ()
    for v in tl.static_range(VECTORS // 2):
        both = ()
        for half in tl.static_range(2):
            at = first + 64 * v + apart * half
            scales = load_floats(input_scales_ptr, start + at, ASM)
            own = unpacked(load_vector(x_ptr, row + at, False, ASM), x_ptr.dtype.element_ty)
            for i in tl.static_range(8):
                both = both + (own[i] * (scales[i] * FACTOR),)
        pairs = pairs + pairs_of(both, tl.float16, ASM)
    signs = signs_of(lane, PAIRED)
    pairs = mixed_groups(pairs, ASM)
    for v in tl.static_range(VECTORS // 2):
        y = two_vectors(pairs, signs, v, ASM)
        for half in tl.static_range(2):
            at = token * y_row + start + last + (64 * v + (4 << G[0]) * half)
            store_vector(y_ptr, at, packed_vector(y[8 * half : 8 * half + 8], tl.float16, ASM), inside, ASM)


def rotate(x: Tensor, input_scales: Tensor, y: Tensor) -> None:
    """y float16 [m, k] = H (input_scales * x) of x [m, k], 16-bit, each row contiguous; blocks that `supports`."""
    m, k = x.shape
    launch(
        rotate_kernel,
        grid_of(m, k),
        (x, input_scales, y, m, k // 8, x.stride(0) // 8, y.stride(0) // 8),
        interned(**constants_of(k)),
    )


def readable(*tensors: Tensor | None) -> bool:
    """Whether values are of 16 bits, and rows begin at vectors, which are read at once."""
    return all(
        each is None
        or (
            each.dtype.itemsize == 2
            and each.data_ptr() % 16 == 0
            and (each.dim() < 2 or each.stride(-2) % 8 == 0)
        )
        for each in tensors
    )
