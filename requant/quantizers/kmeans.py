"""A codebook per row by weighted 1-D k-means: the dense part of SqueezeLLM.

    minimize  sum_j F_j (w_j - level[code_j])^2      over 2^bits levels and all codes, row by row

with F the Fisher diagonal, so that levels go where the loss is steep. Kim et al., "SqueezeLLM:
Dense-and-Sparse Quantization" (2023, arXiv 2306.07629), equation 3. They seed Lloyd's iteration at random; we
solve for the optimum:

1. Sort a row. The best clusters are intervals, and prefix sums of F, F w, F w^2 give the cost of any interval.
2. Rows of more than 128 columns are merged to 128 atoms, each a run of neighbours. The runs hold equal shares of
   integral (dF/dw)^(1/3) dw, the density of levels of the best fine quantizer (Panter and Dite, 1951).
3. Dynamic programming over atoms, D_c[j] = min_i D_(c-1)[i] + cost(i, j): exact on atoms, so exact on rows of
   up to 128 columns.
4. A second dynamic program moves all boundaries of a wide row together, by small steps; Lloyd's iteration ends
   the search.

Wide rows come within 0.2 % of the minimum cost at 2 to 4 bits, 1 % at 5 and 6 % at 6 (starting from the density alone,
Lloyd stops 5 to 50 % above). At 7 and 8 bits 128 atoms are too few, and step 4 starts from the density of step 2. Levels
are rounded, to 8 bits relative to the row's largest (`formats/int8.py`) or to float16, and codes are chosen afterwards.
Everything is float64 except the costs of step 3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float16, Int64, UInt8
from torch import Tensor

from requant.calibration.stats import LinearStats
from requant.errors import NumericalError
from requant.formats.codebook import Codebook, CodebookSpec
from requant.formats.int8 import WIDEST_CODE, fake_quantize_int8
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, with_residuals
from requant.formats.sparse import SparseSpec
from requant.quantizers.checks import check_bits, check_level_bits, check_weight, statistic
from requant.quantizers.density import SortedRows, density_edges, run_cost, sort_rows, with_ends
from requant.quantizers.method import Bits, Losses, Method
from requant.quantizers.outliers import check_outlier_fraction, outlier_count, outlier_mask

ATOMS = 128
ATOM_BITS = 6  # widest code of which a level still has two atoms
REACH = 4  # strides that an edge may move at once
MAX_ITERATIONS = 200  # of Lloyd; rows of 1408 columns settle in 10 to 60


@dataclass(frozen=True, kw_only=True)
class KmeansConfig:
    """Options of `kmeans`; outliers: `outliers.py`."""

    bits: int = 4
    """Bits of a code; a row has 2^bits levels."""
    level_bits: int = 8
    """Bits of a level: 8 or 16; always 16 with codes of 7 and 8 bits."""
    outlier_fraction: float = 0.0
    """Fraction of the weights, those whose codes would cost most, that are stored as floats; not in mode `paper`."""

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_level_bits(self.level_bits)
        check_outlier_fraction(self.outlier_fraction)


def quantize(
    weight: Float[Tensor, "n k"],
    stats: LinearStats,
    config: KmeansConfig,
    *,
    detached: Bool[Tensor, "n k"] | None = None,
) -> QuantizedWeight:
    """Fit the levels of every row to `stats.fisher`; detached weights count nothing.

    A row whose Fisher is zero everywhere was never reached by a gradient; its weights count alike.
    Raises InputError without `stats.fisher`, NumericalError if a weight is not finite or a Fisher value is
    negative.
    """
    check_weight(weight)
    fisher = statistic(stats.fisher, "fisher", tuple(weight.shape))
    own_outliers = detached is None  # where no mask of mode `paper` is given
    if detached is None:
        detached = outlier_mask(
            weight.float(), fisher, bits=config.bits, outlier_fraction=config.outlier_fraction
        )
    fitted = torch.cat(
        [
            fit_levels(
                weight[rows].double(),
                fisher[rows].double(),
                None if detached is None else detached[rows],
                bits=config.bits,
            )
            for rows in row_chunks(weight, elements=1 << 22)
        ]
    )
    levels = rounded(fitted, level_bits=config.level_bits)
    codebook = Codebook(codes=nearest_codes(weight.float(), levels), levels=levels, bits=config.bits)
    return with_residuals(codebook, weight.float(), detached, int8=own_outliers)


def rounded(levels: Float[Tensor, "n c"], *, level_bits: int) -> Float16[Tensor, "n c"]:
    """Levels as they are stored."""
    return (
        fake_quantize_int8(levels)
        if level_bits == 8 and levels.shape[1] <= 1 << WIDEST_CODE
        else levels.half()
    )


def row_chunks(rows: Tensor, *, elements: int, width: int | None = None) -> Iterator[slice]:
    """Slices of rows that hold about `elements` numbers, at `width` (default: the row length) a row."""
    step = max(1, elements // (width or rows.shape[1]))
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))


def fit_levels(
    weight: Float[Tensor, "n k"],
    fisher: Float[Tensor, "n k"],
    detached: Bool[Tensor, "n k"] | None,
    *,
    bits: int,
) -> Float[Tensor, "n c"]:
    """The ascending levels of every row; the highest repeats where a row has fewer distinct weights."""
    rows = sort_rows(weight, row_weights(fisher, detached))
    k, count = weight.shape[1], 2**bits
    if k > ATOMS and bits > ATOM_BITS:
        edges = shift_edges(rows, density_edges(rows, count), strides=(16, 8, 4, 2, 1))
    else:
        atoms = density_edges(rows, ATOMS)
        edges = atoms if atoms.shape[1] <= count + 1 else atoms.gather(1, optimal_edges(rows, atoms, count))
        if k > ATOMS:
            edges = shift_edges(rows, edges, strides=(4, 2, 1))
    levels = centroids(rows, edges, torch.full_like(rows.mass[:, :1], float("nan")))
    return lloyd(rows, fill_empty(levels, count))


def row_weights(fisher: Float[Tensor, "n k"], detached: Bool[Tensor, "n k"] | None) -> Float[Tensor, "n k"]:
    """Fisher with zeros for detached weights, scaled to mean one in a row; rows of zeros become uniform."""
    if (fisher < 0).any():
        raise NumericalError(
            "stats.fisher holds negative values, but it is a mean of squares: calibrate it again."
        )
    kept = torch.ones_like(fisher) if detached is None else (~detached).to(fisher.dtype)
    kept = torch.where(kept.any(1, keepdim=True), kept, torch.ones_like(kept))
    weights = fisher * kept
    weights = torch.where(weights.any(1, keepdim=True), weights, kept)
    return weights / weights.mean(1, keepdim=True)


def optimal_edges(rows: SortedRows, atoms: Int64[Tensor, "n e"], count: int) -> Int64[Tensor, "n p"]:
    """The cheapest cut of the atoms into `count` runs, as indices into `atoms`, by dynamic programming."""
    end = atoms.shape[1] - 1
    # On a CPU the cost tables of a chunk should stay in cache, on a GPU they should fill it.
    elements = 1 << (23 if atoms.is_cuda else 18)
    cuts = []
    for chunk in row_chunks(atoms, elements=elements, width=(end + 1) ** 2):
        cost = interval_costs(rows, chunk, atoms[chunk])
        best = [cost[:, 0]]  # best[c][:, j]: the first j atoms in c + 1 runs
        for _ in range(count - 1):
            best.append((best[-1][:, :, None] + cost).amin(1))
        cut = torch.full_like(atoms[chunk, :1], end)
        path = [cut]
        for reached in reversed(best[:-1]):
            into = cost.gather(2, cut[:, None].expand(-1, end + 1, -1))[:, :, 0]
            cut = (reached + into).argmin(1, keepdim=True)
            path.append(cut)
        path.append(torch.zeros_like(cut))
        cuts.append(torch.cat(path[::-1], 1))
    return torch.cat(cuts)


def interval_costs(rows: SortedRows, chunk: slice, atoms: Int64[Tensor, "b e"]) -> Float[Tensor, "b e e"]:
    """Cost of one level for the atoms i to j - 1, float32; infinite where i > j."""
    at = torch.stack([total[chunk].gather(1, atoms) for total in (rows.mass, rows.moment, rows.energy)])
    cost = run_cost(at[:, :, None, :] - at[:, :, :, None]).float()
    index = torch.arange(atoms.shape[1], device=atoms.device)
    return cost.masked_fill_(index[:, None] > index, float("inf"))


def shift_edges(
    rows: SortedRows, edges: Int64[Tensor, "n e"], *, strides: tuple[int, ...]
) -> Int64[Tensor, "n e"]:
    """Move all edges of a row together, each by up to REACH strides, as is cheapest; one stride after another."""
    k = rows.values.shape[1]
    offsets = torch.arange(-REACH, REACH + 1, device=edges.device)[:, None]
    shifted = []
    for chunk in row_chunks(edges, elements=1 << (25 if edges.is_cuda else 13), width=len(offsets) ** 2):
        sums = torch.stack([rows.mass[chunk], rows.moment[chunk], rows.energy[chunk]])
        part = edges[chunk]
        for stride in strides:
            choices = (part.T[1:-1, None] + stride * offsets).clamp(0, k)
            part = with_ends(best_choices(sums, choices).T, k)
        shifted.append(part)
    return torch.cat(shifted)


def best_choices(sums: Float[Tensor, "3 n j"], choices: Int64[Tensor, "i o n"]) -> Int64[Tensor, "i n"]:
    """One of o positions for each of the i inner edges, at the least total cost of the runs between them.

    Rows come last here: the loops inside torch run over them.
    """
    inner, offsets, n = choices.shape
    at = sums.gather(2, choices.permute(2, 0, 1).reshape(n, -1).expand(3, -1, -1))
    at = at.view(3, n, inner, offsets).permute(0, 2, 3, 1).contiguous()
    best = [run_cost(at[:, 0])]  # best[i][o]: the runs up to inner edge i, if it takes its choice o
    for i in range(1, inner):
        cost = run_cost(at[:, i, None, :] - at[:, i - 1, :, None])
        cost.masked_fill_(choices[i, None, :] < choices[i - 1, :, None], float("inf"))
        best.append(cost.add_(best[-1][:, None]).amin(0))
    choice = (best[-1] + run_cost(sums[:, None, :, -1] - at[:, -1])).argmin(0, keepdim=True)
    path = [choices[-1].gather(0, choice)]
    for i in range(inner - 1, 0, -1):
        reached = at[:, i].gather(1, choice.expand(3, -1, -1))
        cost = run_cost(reached - at[:, i - 1]).masked_fill_(path[-1] < choices[i - 1], float("inf"))
        choice = (best[i - 1] + cost).argmin(0, keepdim=True)
        path.append(choices[i - 1].gather(0, choice))
    return torch.cat(path[::-1])


def centroids(
    rows: SortedRows, edges: Int64[Tensor, "n e"], empty: Float[Tensor, "n _"]
) -> Float[Tensor, "n c"]:
    """The weighted mean of every run, `empty` where a run weighs nothing."""
    mass = rows.mass.gather(1, edges).diff()
    return torch.where(mass > 0, rows.moment.gather(1, edges).diff() / mass, empty)


def fill_empty(levels: Float[Tensor, "n _"], count: int) -> Float[Tensor, "n c"]:
    """Ascending levels, `count` per row; the highest replaces NaN and missing ones."""
    levels = torch.nn.functional.pad(levels, (0, count - levels.shape[1]), value=float("nan"))
    highest = levels.nan_to_num(nan=float("-inf")).amax(1, keepdim=True)
    return torch.where(levels.isnan(), highest, levels).sort(1).values


def lloyd(rows: SortedRows, levels: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """Nearest level, then weighted mean, until nothing moves: O(c log k) a row and iteration."""
    for _ in range(MAX_ITERATIONS):
        inner = torch.searchsorted(rows.values, midpoints(levels))
        moved = centroids(rows, with_ends(inner, rows.values.shape[1]), levels)
        if torch.equal(moved, levels):
            break
        levels = moved
    return levels


def midpoints(levels: Float[Tensor, "n c"]) -> Float[Tensor, "n c-1"]:
    """The boundaries at which the nearest level changes."""
    return (levels[:, 1:] + levels[:, :-1]) / 2


def nearest_codes(weight: Float[Tensor, "n k"], levels: Float16[Tensor, "n c"]) -> UInt8[Tensor, "n k"]:
    """The nearest level of every weight, the lower one at a tie."""
    boundaries = midpoints(levels.double())
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for rows in row_chunks(weight, elements=1 << 22):
        codes[rows] = torch.searchsorted(boundaries[rows], weight[rows].double().contiguous()).to(torch.uint8)
    return codes


def packed_spec(config: Any, shape: tuple[int, int], *, finetuned: bool = False) -> PackedSpec:
    """What is stored for a codebook per row, with the outliers of `config.outlier_fraction`."""
    levels = "int8" if config.level_bits == 8 and config.bits <= WIDEST_CODE else "float16"
    dense = CodebookSpec(bits=config.bits, shape=shape, levels=levels)
    outliers = outlier_count(config.outlier_fraction, shape)
    if not outliers:
        return PackedSpec(dense=dense)
    scales = "matrix" if shape[0] > 1 else "rows"
    sparse = SparseSpec(shape=shape, num_entries=outliers, values="int8", scales=scales)
    return PackedSpec(dense=dense, sparse=sparse)


def outlier_cost(stats: LinearStats, config: Any) -> Float[Tensor, "n k"]:
    """The Fisher diagonal."""
    assert stats.fisher is not None  # gathered as `predictor_needs`
    return statistic(stats.fisher, "fisher", tuple(stats.fisher.shape))


def predicted_losses(
    weight: Float[Tensor, "n k"], stats: LinearStats, config: Any, widths: Sequence[Bits]
) -> Losses:
    """`1/2 sum F e^2` of levels of the optimal density."""
    return codebook_losses(weight, outlier_cost(stats, config), widths)


def codebook_losses(
    weight: Float[Tensor, "n k"], cost: Float[Tensor, "n k"], widths: Sequence[Bits]
) -> Losses:
    """`1/2 sum cost e^2` with levels at the means of the runs that `density_edges` cuts (Panter and Dite 1951)."""
    losses = dict.fromkeys(widths, 0.0)
    for part in row_chunks(weight, elements=1 << 22):
        rows = sort_rows(weight[part].double(), cost[part].double().clamp(min=1e-30))
        for bits in widths:
            edges = density_edges(rows, 1 << int(bits))
            running = torch.stack([total.gather(1, edges) for total in (rows.mass, rows.moment, rows.energy)])
            losses[bits] += 0.5 * run_cost(running.diff()).sum().item()
    return losses


METHOD = Method(
    summary="a codebook per row by weighted k-means, as in SqueezeLLM",
    config=KmeansConfig,
    quantize=quantize,
    needs=frozenset({"fisher"}),
    packed_spec=packed_spec,
    predicted_losses=predicted_losses,
    outlier_cost=outlier_cost,
    seconds_per_weight={"cpu": 4e-7, "cuda": 2e-8},
    detach={"outlier_fraction": 0.0045, "significant_fraction": 0.0005},
)
