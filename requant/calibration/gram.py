"""Gram matrices `X'X` of tall matrices, added up over batches: they are symmetric, so the upper half is multiplied alone.

The rows of the sum are taken in panels, each from its own first column on; of a matrix with p panels (p + 1) / 2p of all
products remain. `fill_lower_half` copies the rest once, when the sum is whole.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from requant.calibration.passes import add_product

# Rows. Panels of 1024 save a little more of a matrix of 4096 or 8192 columns, less of one of 14336 (gram-h100.json), and a
# model of 1B, whose passes wait for Python, makes twice as many launches of them.
PANEL = 2048


@torch.no_grad()
def add_gram(total: Float[Tensor, "n n"], x: Float[Tensor, "m n"], scale: float) -> None:
    """`total += scale x'x`, but for what lies below the panels on the diagonal."""
    for rows in _panels(len(total)):
        add_product(total[rows, rows.start :], x[:, rows], x[:, rows.start :], scale)


def fill_lower_half(total: Float[Tensor, "n n"]) -> None:
    """Make a sum of `add_gram` symmetric, in place."""
    for rows in _panels(len(total)):
        total[rows.stop :, rows] = total[rows, rows.stop :].T


def products(n: int) -> int:
    """The entries of an n x n sum that are multiplied for every row of x."""
    return sum((rows.stop - rows.start) * (n - rows.start) for rows in _panels(n))


def _panels(n: int) -> Iterator[slice]:
    for start in range(0, n, PANEL):
        yield slice(start, min(start + PANEL, n))
