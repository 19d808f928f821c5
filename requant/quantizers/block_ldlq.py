"""Trellis codes with error feedback: tiles of 16 by 16, each coded for a target that makes up for the errors of others.

With block Cholesky factors H = L D L' and G = M C M', unit lower triangular in blocks of 16, the loss of an error E is

    tr(G E H E') = tr(C F D F'),   F = M' E L

so tiles (i, j) are coded from the last corner to the first, each for the target that makes F_ij small:

    W_ij + A_ij + B_ij,   A_ij = sum_{l > j} E_il L_lj,   B_ij = sum_{m > i} M_mi' (E + A)_mj

G = I, where B vanishes, is the block LDLQ of QuIP# (Tseng et al. 2024, arXiv 2402.04396) and QTIP (arXiv 2406.11235).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from requant.formats.hadamard import TILE
from requant.formats.trellis_codes import code_values, codes_of_states, from_tiles, to_tiles
from requant.quantizers.damping import damped_cholesky
from requant.quantizers.method import Bits
from requant.quantizers.viterbi import tail_biting_states

AT_ONCE = 2**26  # numbers of a copy of a Hessian


def block_ldl(hessian: Float[Tensor, "c c"], *, damp: float) -> Float[Tensor, "c c"]:
    """L - I of H + d I = L D L', L unit lower triangular in blocks of TILE; d as `damped_cholesky` says."""
    lower, _ = damped_cholesky(hessian, damp)
    size = len(lower)
    factor = torch.empty(size, size, device=hessian.device).mT  # by columns
    step = TILE * _rows_at_once(TILE * size)
    for start in range(0, size, step):
        slices = [slice(at, at + TILE) for at in range(start, min(start + step, size), TILE)]
        diagonal = torch.stack([lower[here, here] for here in slices])
        columns = torch.stack([lower[:, here] for here in slices])
        # [blocks, size, TILE]
        unit = torch.linalg.solve_triangular(diagonal, columns, upper=False, left=False)
        for here, solved in zip(slices, unit, strict=True):
            factor[:, here] = solved
            factor[here, here] = 0
    return factor


def code_tiles(
    tiles: Float[Tensor, "b 256"], values: Float[Tensor, "s v"], bits: Bits
) -> tuple[UInt8[Tensor, "b 256"], Float[Tensor, "b 256"]]:
    """The nearest paths, as codes and as values."""
    vector = values.shape[1]
    states = tail_biting_states(tiles.view(tiles.shape[0], -1, vector), values, bits=bits)
    return codes_of_states(states, bits=bits, weights_per_step=vector), values[states].flatten(1)


def block_ldlq(
    target: Float[Tensor, "r c"], across: Float[Tensor, "c c"], *, code: str, bits: Bits
) -> UInt8[Tensor, "r c"]:
    """One-sided feedback: the column blocks from the last to the first, all tiles of one at once."""
    values = code_values(code, target.device)
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    error = torch.zeros_like(target)
    for start in range(target.shape[1] - TILE, -1, -TILE):
        here, later = slice(start, start + TILE), slice(start + TILE, None)
        wanted = target[:, here] + error[:, later] @ across[later, here]
        shape = (wanted.shape[0], TILE)
        new, found = code_tiles(to_tiles(wanted), values, bits)
        codes[:, here] = from_tiles(new, shape)
        error[:, here] = target[:, here] - from_tiles(found, shape)
    return codes


def two_sided_block_ldlq(
    target: Float[Tensor, "m r c"],
    across: Sequence[Float[Tensor, "c c"]],
    down: Sequence[Float[Tensor, "r r"]],
    *,
    code: str,
    bits: Bits,
) -> list[UInt8[Tensor, "r c"]]:
    """Two-sided feedback: anti-diagonals of tiles from the last corner, as tiles on one do not touch each other.

    Down an anti-diagonal rows ascend and columns descend. A is kept with its rows of tiles in reverse, B with its columns,
    so that what an anti-diagonal feeds back to is a slice of each, updated in place. Each of m matrices feeds back by
    products of its own, whose shapes do not depend on m, so that its codes do not either.
    """
    count, r, c = len(target), target.shape[1] // TILE, target.shape[2] // TILE
    values = code_values(code, target.device)
    left = target.view(count, r, TILE, c, TILE).transpose(2, 3)  # tiles [m, r, c, 16, 16]
    a = torch.zeros(count, r, TILE, c * TILE, device=target.device)
    b = torch.zeros(count, c, r * TILE, TILE, device=target.device)
    across_rows = [each.view(c, TILE, c * TILE) for each in across]
    down_rows = [each.view(r, TILE, r * TILE) for each in down]
    codes = torch.empty(count, r, c, TILE * TILE, dtype=torch.uint8, device=target.device)
    m = torch.arange(count, device=target.device)[:, None]
    for diagonal in range(r + c - 2, -1, -1):
        top, bottom = max(0, diagonal - c + 1), min(r - 1, diagonal)
        first, last = diagonal - bottom, diagonal - top
        i = torch.arange(top, bottom + 1, device=target.device)
        j = diagonal - i
        fed = a.view(count, r, TILE, c, TILE)[m, r - 1 - i, :, j]
        wanted = left[m, i, j] + fed + b.view(count, c, r, TILE, TILE)[m, c - 1 - j, i]
        new, found = code_tiles(wanted.view(-1, TILE * TILE), values, bits)
        codes[m, i, j] = new.view(count, -1, TILE * TILE)
        error = left[m, i, j] - found.view_as(wanted)
        reversed_error, both = error.flip(1), error + fed
        columns, rows = slice(last * TILE), slice(bottom * TILE)  # beyond them L and M have nothing
        to_a = a[:, r - 1 - bottom : r - top, :, columns]
        to_b = b[:, c - 1 - last : c - first, rows]
        for each in range(count):
            to_a[each].baddbmm_(reversed_error[each], across_rows[each][first : last + 1, :, columns])
            to_b[each].baddbmm_(down_rows[each][top : bottom + 1, :, rows].mT, both[each])
    return [from_tiles(each, (r * TILE, c * TILE)) for each in codes.flatten(1, 2)]


def white_trace(hessian: Float[Tensor, "c c"], *, damp: float) -> tuple[float, float]:
    """With L and D of `block_ldl`: `tr(L^-1 H L^-T)`, the loss of white errors fed back through L, and the mean squared norm
    of a row of L^-1, by which feedback widens their variance.

    As H = L D L' - d I, the trace is `tr D - d |L^-1|^2`; with B the blocks of C on the diagonal, L^-1 = B C^-1, D = B B'.
    """
    if not hessian.diagonal().any():
        return 0.0, 1.0  # exactly, whatever is added to it
    lower, added = damped_cholesky(hessian, damp)
    size = len(lower)
    blocks = torch.stack([lower[at : at + TILE, at : at + TILE] for at in range(0, size, TILE)])
    inverse = torch.linalg.solve_triangular(lower, torch.eye(size, device=lower.device), upper=False)
    del lower
    step, norms = _rows_at_once(TILE * size), torch.zeros((), dtype=torch.float64, device=hessian.device)
    for own, rows in zip(blocks.split(step), inverse.reshape(-1, TILE, size).split(step), strict=True):
        norms += (own @ rows).square().sum(dtype=torch.float64)
    trace = blocks.square().sum(dtype=torch.float64) - added * norms
    return max(0.0, trace.item()), norms.item() / size


def _rows_at_once(length: int) -> int:
    """Rows of so many numbers in AT_ONCE of them: a Hessian of wide layers takes gigabytes, and so would every copy."""
    return max(1, AT_ONCE // length)
