"""2:4 masks and S-STE's projection in one pass over the matrix; the torch formulas are in `requant/sparsity/masks.py`.

    keep2                 mask of the two largest of four: j stays if fewer than two of its group come before it, where i
                          comes before j if s_i > s_j, or s_i = s_j and i < j
    keep2_transposable    mask of the largest of 90 sums over a 4 x 4 block, each (row 0 + row 1) + (row 2 + row 3) of
                          sums of two scores, in float32
    soft_threshold        sign(w) max(|w| - t, 0), t the second smallest magnitude of the group

A thread holds whole groups, or whole blocks, in registers: nothing is shared, and loads and stores are 4 values wide. So
each kernel is memory-bound if its arithmetic is short enough: 6 comparisons per group for `keep2`; for the 90 patterns 186
additions and 90 comparisons per block of 16. All comparisons and sums are torch's, in the same order, so masks and
projections are equal bit for bit, including ties and zeros, and masks also for infinities and NaN. The scale of S-STE is
summed in float64 in another order.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_SCORE = torch.finfo(torch.float32).max / 16  # sums of eight stay finite
GROUPS_PER_CTA = 512  # groups of four values
BLOCKS_PER_CTA = 128  # blocks of 4 x 4 values, one per thread
PAIRS = tuple(itertools.combinations(range(4), 2))
# the patterns as four indices into PAIRS, one per row, in the order of `requant.sparsity.masks.TRANSPOSABLE`
BLOCK_PATTERNS = tuple(
    rows
    for rows in itertools.product(range(6), repeat=4)
    if all(sum(column in PAIRS[pair] for pair in rows) == 2 for column in range(4))
)
BITS = tuple(
    sum(1 << (4 * row + column) for row, pair in enumerate(rows) for column in PAIRS[pair])
    for rows in BLOCK_PATTERNS
)
ROW_PAIRS = tl.constexpr(tuple(itertools.chain(*BLOCK_PATTERNS)))
PATTERN_BITS = tl.constexpr(BITS)
PATTERNS = tl.constexpr(len(BITS))


@triton.jit
def _columns(values, SIZE: tl.constexpr):
    """[4 SIZE] -> the four columns [SIZE] of its groups."""
    even, odd = tl.split(tl.reshape(values, [SIZE, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _joined(first, second, third, fourth, SIZE: tl.constexpr):
    """The inverse of `_columns`."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [4 * SIZE])


@triton.jit
def _finite(scores, LARGEST: tl.constexpr, NAN: tl.constexpr):
    """Scores in float32, clamped to LARGEST; NaN becomes NAN."""
    scores = scores.to(tl.float32)
    clamped = tl.minimum(tl.maximum(scores, -LARGEST), LARGEST)
    return tl.where(scores == scores, clamped, NAN)


@triton.jit
def keep2_kernel(scores_ptr, mask_ptr, numel, LARGEST: tl.constexpr, SIZE: tl.constexpr):
    """Grid: SIZE groups per CTA."""
    at = tl.program_id(0).to(tl.int64) * (4 * SIZE) + tl.arange(0, 4 * SIZE)
    scores = tl.load(scores_ptr + at, mask=at < numel, other=0.0)
    a, b, c, d = _columns(_finite(scores, LARGEST, float("-inf")), SIZE)
    ab, ac, ad = (a >= b).to(tl.int32), (a >= c).to(tl.int32), (a >= d).to(tl.int32)
    bc, bd, cd = (b >= c).to(tl.int32), (b >= d).to(tl.int32), (c >= d).to(tl.int32)
    kept = _joined(
        (ab + ac + ad >= 2).to(tl.int8),
        (1 - ab + bc + bd >= 2).to(tl.int8),
        (2 - ac - bc + cd >= 2).to(tl.int8),
        (3 - ad - bd - cd >= 2).to(tl.int8),
        SIZE,
    )
    tl.store(mask_ptr + at, kept, mask=at < numel)


@triton.jit
def _pair_sums(scores_ptr, at, inside, LARGEST: tl.constexpr, SIZE: tl.constexpr):
    """The sums of the six pairs of a row of each block, in the order of PAIRS."""
    scores = tl.load(scores_ptr + at, mask=inside, other=0.0)
    a, b, c, d = _columns(_finite(scores, LARGEST, -LARGEST), SIZE)
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def _row_of_mask(bits, ROW: tl.constexpr, SIZE: tl.constexpr):
    """The mask of row ROW of each block, [4 SIZE]."""
    row = bits >> (4 * ROW)
    return _joined(
        (row & 1).to(tl.int8),
        ((row >> 1) & 1).to(tl.int8),
        ((row >> 2) & 1).to(tl.int8),
        ((row >> 3) & 1).to(tl.int8),
        SIZE,
    )


@triton.jit
def keep2_transposable_kernel(scores_ptr, mask_ptr, k, LARGEST: tl.constexpr, SIZE: tl.constexpr):
    """Grid: four rows, SIZE blocks of four columns."""
    column = tl.program_id(1) * (4 * SIZE) + tl.arange(0, 4 * SIZE)
    inside = column < k
    at = tl.program_id(0).to(tl.int64) * 4 * k + column
    sums = (
        _pair_sums(scores_ptr, at, inside, LARGEST, SIZE),
        _pair_sums(scores_ptr, at + k, inside, LARGEST, SIZE),
        _pair_sums(scores_ptr, at + 2 * k, inside, LARGEST, SIZE),
        _pair_sums(scores_ptr, at + 3 * k, inside, LARGEST, SIZE),
    )
    best = tl.full([SIZE], float("-inf"), tl.float32)
    bits = tl.zeros([SIZE], tl.int32)
    for i in tl.static_range(PATTERNS):
        upper = sums[0][ROW_PAIRS[4 * i]] + sums[1][ROW_PAIRS[4 * i + 1]]
        total = upper + (sums[2][ROW_PAIRS[4 * i + 2]] + sums[3][ROW_PAIRS[4 * i + 3]])
        bits = tl.where(total > best, PATTERN_BITS[i], bits)
        best = tl.maximum(total, best)
    for row in tl.static_range(4):
        tl.store(mask_ptr + at + row * k, _row_of_mask(bits, row, SIZE), mask=inside)


@triton.jit
def _thresholded(value, threshold):
    """A zero keeps the sign of w, as in torch; `-kept` would be `0 - kept` in Triton."""
    sign = tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))
    return sign * tl.maximum(tl.abs(value) - threshold, 0.0)


@triton.jit
def soft_threshold_kernel(weight_ptr, projected_ptr, sums_ptr, numel, FITS: tl.constexpr, SIZE: tl.constexpr):
    """Grid: SIZE groups per CTA. With FITS the CTA's sums of w s and of s s go to `sums_ptr`, float64, instead of s."""
    at = tl.program_id(0).to(tl.int64) * (4 * SIZE) + tl.arange(0, 4 * SIZE)
    stored = tl.load(weight_ptr + at, mask=at < numel, other=0.0)
    weight = stored.to(tl.float32)
    a, b, c, d = _columns(weight, SIZE)
    low, high = tl.minimum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(a), tl.abs(b))
    other_low, other_high = tl.minimum(tl.abs(c), tl.abs(d)), tl.maximum(tl.abs(c), tl.abs(d))
    t = tl.minimum(tl.maximum(low, other_low), tl.minimum(high, other_high))
    projected = _joined(
        _thresholded(a, t), _thresholded(b, t), _thresholded(c, t), _thresholded(d, t), SIZE
    ).to(stored.dtype)
    if FITS:
        s = projected.to(tl.float64)
        tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(weight.to(tl.float64) * s, 0))
        tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(s * s, 0))
    else:
        tl.store(projected_ptr + at, projected, mask=at < numel)


def keep2(scores: Tensor) -> Tensor:
    """Bool [..., k], the mask of the two largest of every four scores; k a multiple of 4."""
    scores = scores.contiguous()
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if scores.numel():
        keep2_kernel[(triton.cdiv(scores.numel(), 4 * GROUPS_PER_CTA),)](
            scores,
            mask.view(torch.int8),
            scores.numel(),
            LARGEST=torch.finfo(scores.dtype).max,
            SIZE=GROUPS_PER_CTA,
        )
    return mask


def keep2_transposable(scores: Tensor) -> Tensor:
    """Bool [n, k], two ones in every group of four of a row and of a column; n and k multiples of 4."""
    scores = scores.contiguous()
    n, k = scores.shape
    mask = torch.empty(n, k, dtype=torch.bool, device=scores.device)
    if scores.numel():
        keep2_transposable_kernel[(n // 4, triton.cdiv(k, 4 * BLOCKS_PER_CTA))](
            scores,
            mask.view(torch.int8),
            k,
            LARGEST=LARGEST_SCORE,
            SIZE=BLOCKS_PER_CTA,
        )
    return mask


def soft_threshold(weight: Tensor) -> Tensor:
    """[..., k], at most two non-zeros of every four; k a multiple of 4."""
    weight = weight.contiguous()
    projected = torch.empty_like(weight)
    if weight.numel():
        grid = (triton.cdiv(weight.numel(), 4 * GROUPS_PER_CTA),)
        soft_threshold_kernel[grid](weight, projected, None, weight.numel(), FITS=False, SIZE=GROUPS_PER_CTA)
    return projected


def least_squares_scale(weight: Tensor) -> Tensor:
    """`<w, s> / <s, s>`, s the soft threshold of w; 1 where s is zero."""
    weight = weight.contiguous()
    ctas = triton.cdiv(weight.numel(), 4 * GROUPS_PER_CTA)
    sums = torch.zeros(max(1, ctas), 2, dtype=torch.float64, device=weight.device)
    if weight.numel():
        soft_threshold_kernel[(ctas,)](weight, None, sums, weight.numel(), FITS=True, SIZE=GROUPS_PER_CTA)
    product, energy = sums.sum(0)
    return torch.where(energy > 0, product / energy, 1.0).to(weight.dtype)
