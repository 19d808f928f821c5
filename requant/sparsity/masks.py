"""2:4 masks: two of every four consecutive weights of a row stay.

| rule | keeps |
| --- | --- |
| `keep2` | the two largest scores of every group of four |
| `keep2_transposable` | the largest sum of scores among the 90 masks of a 4 x 4 block with two ones per row and column |
| `soft_threshold` | `sign(w) max(|w| - t, 0)`, t the second smallest magnitude of the group |

Only the left factor of a sparse product may be sparse (`Z = X W'` needs W sparse along its rows, `dX = dZ W` along its
columns), so training needs transposable masks: "Accelerating Transformer Pre-training with 2:4 Sparsity" (Hu et al. 2024,
arXiv 2404.01847), section 4. The soft threshold is S-STE's (Hu et al. 2024, arXiv 2409.09099): a continuous function of w,
while hard masks jump where the second and the third magnitude are equal.

On a GPU each rule is one Triton kernel that computes the same, bit for bit (`gpu.py`).

Ties are decided by position: of equal scores the first is kept, of equal blocks the mask that comes first in
`TRANSPOSABLE`; a block's sum is (row 0 + row 1) + (row 2 + row 3) in float32, on every device. So the masks have exactly two
ones per group whatever the scores are, even zeros; the soft threshold has fewer non-zeros where magnitudes are equal, as
continuity demands. NaN counts as the smallest score.
"""

import itertools

import torch
from jaxtyping import Bool, Float, Shaped, UInt8
from torch import Tensor

from requant.errors import InputError
from requant.sparsity.gpu import fastest

GROUP = 4
PAIRS = tuple(itertools.combinations(range(GROUP), 2))  # the kept columns of the six patterns of a group
BLOCKS_AT_ONCE = 1 << 14  # 4 x 4 blocks scored at once: their 90 sums are six times the matrix
LARGEST_SCORE = torch.finfo(torch.float32).max / 16  # of a transposable mask: sums of eight stay finite


def _patterns() -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(column in pair for column in range(GROUP)) for pair in PAIRS)


# the patterns of the four rows of a block with two ones a column
PAIRS_OF_ROWS = tuple(
    rows
    for rows in itertools.product(range(len(PAIRS)), repeat=GROUP)
    if all(sum(column in PAIRS[pair] for pair in rows) == 2 for column in range(GROUP))
)
PATTERNS: Bool[Tensor, "6 4"] = torch.tensor(_patterns(), device="cpu")  # not where a model is being built
TRANSPOSABLE: Bool[Tensor, "90 4 4"] = PATTERNS[torch.tensor(PAIRS_OF_ROWS, device="cpu")]


def groups_of_four(values: Shaped[Tensor, "... k"]) -> Shaped[Tensor, "... q 4"]:
    """A view with the groups apart. Raises InputError where k is not a multiple of four."""
    k = values.shape[-1]
    if k % GROUP:
        raise InputError(
            f"a matrix of {k} columns has no groups of four: 2:4 needs a multiple of 4; leave it out by --skip, or layers=."
        )
    return values.unflatten(-1, (k // GROUP, GROUP))


def keep2(scores: Float[Tensor, "... k"]) -> Bool[Tensor, "... k"]:
    """The mask of the two largest scores of every group."""
    groups_of_four(scores)
    return fastest("keep2", _keep2, scores)


def _keep2(scores: Float[Tensor, "... k"]) -> Bool[Tensor, "... k"]:
    grouped = groups_of_four(scores.nan_to_num(nan=-torch.inf))
    better: list[Tensor] = []  # of column j: how many others of the group come before it
    for j in range(GROUP):
        column = grouped[..., j, None]
        before, after = grouped[..., :j] >= column, grouped[..., j + 1 :] > column
        better.append(before.sum(-1) + after.sum(-1))
    return (torch.stack(better, -1) < 2).flatten(-2)


def keep2_transposable(scores: Float[Tensor, "n k"]) -> Bool[Tensor, "n k"]:
    """The mask with two ones in every group of four of every row and of every column, of the largest sum of scores.

    Raises InputError where n or k is not a multiple of four.
    """
    groups_of_four(scores.T)
    groups_of_four(scores)
    return fastest("keep2_transposable", _keep2_transposable, scores)


def _keep2_transposable(scores: Float[Tensor, "n k"]) -> Bool[Tensor, "n k"]:
    n, k = scores.shape
    finite = scores.float().nan_to_num(nan=-LARGEST_SCORE).clamp(-LARGEST_SCORE, LARGEST_SCORE)
    blocks = finite.view(n // 4, 4, k // 4, 4).transpose(1, 2).reshape(-1, 4, 4)
    first, second = torch.tensor(PAIRS, device=scores.device).T
    pairs = torch.tensor(PAIRS_OF_ROWS, device=scores.device).T

    def best(part: Float[Tensor, "b 4 4"]) -> Tensor:
        sums = part[..., first] + part[..., second]
        rows = [sums[:, row, pairs[row]] for row in range(4)]
        return ((rows[0] + rows[1]) + (rows[2] + rows[3])).argmax(1)

    chosen = torch.cat([best(part) for part in blocks.split(BLOCKS_AT_ONCE)])
    return TRANSPOSABLE.to(scores.device)[chosen].view(n // 4, k // 4, 4, 4).transpose(1, 2).reshape(n, k)


def soft_threshold(weight: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
    """At most two non-zeros a group; `|S(a) - S(b)| <= 2 |a - b|` in the largest element."""
    groups_of_four(weight)
    return fastest("soft_threshold", _soft_threshold, weight)


def _soft_threshold(weight: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
    grouped = groups_of_four(weight)
    threshold = grouped.abs().sort(-1).values[..., 1:2]
    return (grouped.sign() * (grouped.abs() - threshold).clamp(min=0)).flatten(-2)


def least_squares_scale(weight: Float[Tensor, "... k"]) -> Float[Tensor, ""]:
    """`beta = <w, s> / <s, s>` of `s = soft_threshold(w)`, which minimizes `|w - beta s|`; 1 where s is zero."""
    groups_of_four(weight)
    return fastest("least_squares_scale", _least_squares_scale, weight)


def _least_squares_scale(weight: Float[Tensor, "... k"]) -> Float[Tensor, ""]:
    projected = _soft_threshold(weight).double()
    energy = projected.square().sum()
    beta = (weight.double() * projected).sum() / energy
    return torch.where(energy > 0, beta, torch.ones_like(beta)).to(weight.dtype)


def flip_rate(mask: Bool[Tensor, "..."], before: Bool[Tensor, "..."]) -> float:
    """`|mask xor before| / size`, from 0 to 1."""
    return (mask ^ before).double().mean().item()


def pattern_of(mask: Bool[Tensor, "n k"]) -> UInt8[Tensor, "n q"]:
    """The number of each group's pattern in `PATTERNS`. Raises InputError unless every group has two ones."""
    grouped = groups_of_four(mask)
    if (grouped.sum(-1) != 2).any():
        raise InputError(
            "the mask is not 2:4: give one with exactly two ones in every group of four columns."
        )
    found = (grouped[..., None, :] == PATTERNS.to(mask.device)).all(-1)
    return found.to(torch.uint8).argmax(-1).to(torch.uint8)


def mask_of(patterns: UInt8[Tensor, "n q"]) -> Bool[Tensor, "n k"]:
    """The inverse of `pattern_of`."""
    return PATTERNS.to(patterns.device)[patterns.long()].flatten(-2)
