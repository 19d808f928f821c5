"""Launches of `gemv.py`, of several matrices at once (`gemv_group.py`), and of the experts of a decoding step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.common.occupancy import ctas_per_sm
from requant_kernels.launch_config import ROWS, Launch, LaunchConfig, Shape
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import k64_per_unit
from requant_kernels.trellis.rounding import MAX_BITS

# A cap helps where all CTAs of four warps would fit on fewer SMs than there are. Of more than these an SM, registers hold
# some back anyway.
MOST_CTAS = 4
# Of experts, above which CTAs of fewer warps are faster: there are enough to fill the GPU.
MANY_SLOTS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisGemvConfig(LaunchConfig):
    """`num_warps` split K among them, for `tiles_per_cta` x 16 rows."""

    num_warps: int = 8
    tiles_per_cta: int = 2
    units_per_step: int = 2  # units of columns (`trellis/layout.py`) that a warp processes at a time
    pdl_trigger_early: bool = False  # trigger the next launch before waiting for the previous one
    max_ctas_per_sm: int | None = None


def trellis_gemv(shape: Shape, device: torch.device) -> TrellisGemvConfig:
    """A step of all warps stays within a Hadamard tile of 4096 columns."""
    n, k, bits, m = shape.n, shape.k, shape.bits, shape.m_bucket
    whole = bits == int(bits)  # with quarter bits a unit is up to four groups
    byte_sums = CODES[shape.format].byte_sums
    if m == 1 and bits <= 4 and byte_sums:
        return trellis_one_token(shape, device)
    if m == 8 and byte_sums:
        return trellis_eight_tokens(shape, device)
    many_columns = k >= 8192 and not (m == 1 and byte_sums)
    small = n <= (4096 if many_columns else 2048) and m != 8
    return TrellisGemvConfig(
        num_warps=16 if small else 8,
        tiles_per_cta=1 if small or m > 8 or bits > 4 else 2,
        units_per_step=2 if whole and bits <= 4 else 1,
    )


def launch_of(
    shape: Shape, num_warps: int, tiles_per_cta: int, k64_count: int, *, max_ctas_per_sm: int | None = None
) -> TrellisGemvConfig:
    """Steps of so many k64 a warp, or of fewer if some warps would have no columns: a power of two of units."""
    units = min(k64_count, shape.k // (64 * num_warps)) // k64_per_unit(round(4 * shape.bits))
    return TrellisGemvConfig(
        num_warps=num_warps, tiles_per_cta=tiles_per_cta, units_per_step=1 << max(1, units).bit_length() - 1,
        max_ctas_per_sm=max_ctas_per_sm,
    )  # fmt: skip


def even_cap(ctas: int, device: torch.device) -> int | None:
    """The CTAs of four warps an SM that spread them over all SMs (`common/occupancy.py`); None where no more would fit."""
    even = ctas_per_sm(ctas, device)
    return even if even <= MOST_CTAS else None


def trellis_one_token(shape: Shape, device: torch.device) -> TrellisGemvConfig:
    """`mul1` or `pair`, at most 4 bits. Few rows: with up to 4096 columns one CTA of 16 warps per SM, which rotates the
    token itself (`trellis/fused_hadamard.py`); with more, one tile for every CTA of eight. Otherwise CTAs of two tiles."""
    n, k, bits = shape.n, shape.k, shape.bits
    whole = bits == int(bits)
    tiles = next((count for count in (1, 2, 4, 7) if n <= ROWS * count * num_sms(device)), None)
    if tiles is None or (k > 4096 and tiles > 2):
        return TrellisGemvConfig(num_warps=8 if whole or tiles == 4 else 4, tiles_per_cta=2, units_per_step=2)
    if tiles > 2 and k < 1024 * k64_per_unit(round(4 * bits)):  # 16 warps would have too few columns
        return launch_of(shape, 8, 2, 1)
    if k > 4096:
        return launch_of(shape, 8, 1, 4, max_ctas_per_sm=ctas_per_sm(-(-n // ROWS), device))
    if tiles > 2:
        return launch_of(shape, 16, tiles, 1)
    return launch_of(shape, 16, tiles, 4 if whole else 1, max_ctas_per_sm=1)


def trellis_eight_tokens(shape: Shape, device: torch.device) -> TrellisGemvConfig:
    """`mul1` or `pair`: one CTA per SM if the rows are few, of four warps where there are several CTAs an SM
    (`eval/results/step-launches-h200.json`)."""
    tiles, coarse = -(-shape.n // ROWS), shape.bits <= MAX_BITS
    if tiles > 4 * num_sms(device):
        return launch_of(shape, 4, 2, 4, max_ctas_per_sm=even_cap(-(-tiles // 2), device))
    if tiles > 2 * num_sms(device):
        return launch_of(shape, 8, 2, 2)
    if tiles > num_sms(device):
        if shape.k > 4096:
            return launch_of(shape, 8, 2, 4, max_ctas_per_sm=1)
        return launch_of(shape, 16, 2, 4 if coarse else 1, max_ctas_per_sm=1)
    if coarse:  # one CTA an SM, as below, was 2 % slower in a step
        return launch_of(shape, 8, 2, 4)
    if shape.k > 4096:
        return launch_of(shape, 16, 1, 4, max_ctas_per_sm=1)
    return launch_of(shape, 8, 1, 2, max_ctas_per_sm=1)


def trellis_group(shapes: Sequence[Shape], device: torch.device) -> list[TrellisGemvConfig]:
    """Several matrices in one launch (`trellis/gemv_group.py`): CTAs of 16 warps as long as all are resident at once,
    otherwise of four, which end one by one while others go on (`eval/results/products-h200.json`)."""
    k, m, bits = shapes[0].k, shapes[0].m_bucket, max(shape.bits for shape in shapes)
    two_a_hash = all(CODES[shape.format].weights_per_hash == 2 for shape in shapes)
    widest_unit = max(k64_per_unit(round(4 * shape.bits)) for shape in shapes)

    def ctas(tiles: int) -> int:
        return sum(-(-shape.n // (ROWS * tiles)) for shape in shapes)

    cap = None
    resident = next((tiles for tiles in (1, 2, 3, 4) if ctas(tiles) <= num_sms(device)), None)
    if m > 8 and bits > MAX_BITS:  # activations of 16 bits take many registers
        launch = 8, 1, 2 if bits <= 4 else 1
    elif ctas(2) > 2 * num_sms(device):
        four_tiles = two_a_hash and m == 1 and ctas(4) > 3 * num_sms(device)
        four_tiles |= m == 8 and bits > MAX_BITS and k <= 2048
        long_steps = bits <= (5 if k > 2048 else 3.5)  # with few columns there are as many of half the length
        launch = (4, 4, 2) if four_tiles else (4, 2, 4 if long_steps else 2)
        cap = even_cap(ctas(launch[1]), device)
    elif k < 1024 * widest_unit:  # some of 16 warps would have no columns
        launch = (8, 2, 2) if k >= 512 * widest_unit else (4, 2, 4)
    elif bits > 4:
        launch = 8, 1, 4 if m == 1 else 1
    elif m == 1 and resident is not None:
        launch = 16, resident, 2 if resident == 1 else 1
    else:
        launch = (16, 2, 4) if two_a_hash else (16, 1, 4)
    return [launch_of(shape, *launch, max_ctas_per_sm=cap) for shape in shapes]


def trellis_slots(shapes: Sequence[Shape], slots: int, device: torch.device) -> TrellisGemvConfig:
    """One token times each of `slots` matrices of equal sizes, which have one of several widths each (`experts/gemv.py`), by
    a rule that no table replaces. Measured up to 4 bits (`eval/results/experts-launches-h200.json`), where four warps are
    best, and for many slots with few columns two. Steps are long only where every width has units for them."""
    k, tiles = shapes[0].k, -(-shapes[0].n // ROWS)
    units = min(-(-k // (64 * k64_per_unit(round(4 * shape.bits)))) for shape in shapes)
    many = slots >= MANY_SLOTS
    if max(shape.bits for shape in shapes) > 4 or not CODES[shapes[0].format].byte_sums:
        num_warps = 8 if units >= 16 and not many else 4 if k > 1024 or not many else 2
        return TrellisGemvConfig(num_warps=num_warps, tiles_per_cta=1)
    if many and k <= 1024:
        long = len({shape.bits for shape in shapes}) == 1 and units >= 8
        return TrellisGemvConfig(num_warps=2, tiles_per_cta=2 if long else 1, units_per_step=2 if long else 1)
    long = units >= 32
    one_tile = not long and 4 * tiles * slots <= 24 * num_sms(device)  # the warps that fit with one
    return TrellisGemvConfig(num_warps=4, tiles_per_cta=1 if one_tile else 2, units_per_step=2 if long else 1)


# warps, tiles, units per step
LAUNCHES = [
    (8, 2, 2), (4, 2, 2), (16, 2, 1), (16, 4, 1), (8, 2, 4), (4, 2, 4), (8, 1, 2), (16, 1, 2), (8, 4, 2), (16, 2, 4),
    (16, 2, 2), (8, 4, 1), (16, 7, 1), (4, 2, 1), (4, 4, 1), (8, 2, 1), (8, 1, 1),
]  # fmt: skip


def candidates(_shape: Shape) -> Sequence[TrellisGemvConfig]:
    return [
        TrellisGemvConfig(num_warps=w, tiles_per_cta=t, units_per_step=u, pdl_trigger_early=early)
        for w, t, u in LAUNCHES
        for early in (False, True)
    ]


def makes_sense(config: TrellisGemvConfig, shape: Shape) -> bool:
    """Whether every warp has columns, the CTAs fill an H200, and the accumulators fit in registers."""
    columns = config.num_warps * config.units_per_step * 64
    ctas = shape.n // (ROWS * config.tiles_per_cta)
    return columns <= max(shape.k, 1024) and ctas >= 32 and config.tiles_per_cta * shape.m_bucket <= 32


LAUNCH = Launch(config=TrellisGemvConfig, rule=trellis_gemv, candidates=candidates, makes_sense=makes_sense)
