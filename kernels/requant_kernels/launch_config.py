"""What a launch may be told, and how the tables of `tuning.py` hold it: a few whole numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

# bits of the fourth number of a setting of the decode kernel; AHEAD and shares of the trellis kernel too
AHEAD, STAGED, GATHERED, BYTES, SHARE, TEAM, HALVES = 1, 2, 4, 16, 32, 128, 512
SHARES, MASKED = 3 * SHARE, BYTES | HALVES
# of a setting, by kernel; "masked" are those of the decode kernel with BYTES or HALVES
NUMBERS = {"decode": 5, "masked": 5, "tall": 3, "hopper": 5, "trellis": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """`warps` share the columns of `tiles` x 16 rows; the words of `unroll` - 1 blocks (one at least) are under way.

    Residuals: `staged`, those of one token gather its activations from shared memory; `gathered`, those of up to eight are
    entries that `gathered.py` multiplies. Neither: from the cache.
    `bytes`: one token of a grid goes to `byte_grid.py`, with a ring of `unroll` places, where it takes it. `halves`: up to
    eight go to `half_grid.py`, whose warps are so many `teams` of the same columns, with `tiles` of their own; `ahead`
    there: words are requested before those at hand are waited for.
    `shares`: 1, programs take so much shared memory that no more than this launch's share fit a multiprocessor; 2, twice
    as many; 0, as little as they need (`rooms.py`).
    """

    warps: int
    tiles: int = 1
    unroll: int = 1
    bytes: bool = False
    halves: bool = False
    teams: int = 1
    staged: bool = False
    gathered: bool = False
    ahead: bool = True  # activations of the next block are requested too; never for more than 8 tokens
    pdl: bool = False
    max_registers: int | None = None
    shares: int = 0


def decode_setting(numbers: Sequence[int]) -> DecodeConfig:
    """A setting as the tables hold it: warps, tiles, unroll, its bits, most registers (0: any)."""
    warps, tiles, unroll, bits, registers = numbers
    return DecodeConfig(
        warps=warps, tiles=tiles, unroll=unroll, ahead=bool(bits & AHEAD), staged=bool(bits & STAGED),
        gathered=bool(bits & GATHERED), max_registers=registers or None,
        bytes=bool(bits & BYTES), halves=bool(bits & HALVES), shares=bits // SHARE % 4, teams=1 << bits // TEAM % 4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TallConfig:
    """`warps` x 16 rows a program, the columns among `split` programs, `stages` blocks of activations under way."""

    warps: int = 8
    split: int = 1
    stages: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperConfig:
    """`tokens` and 16 `warps` x `tiles` rows a program, the columns among `split` programs; words are requested while piece
    `ahead` of the block before is decoded."""

    tokens: int = 64
    warps: int = 4
    tiles: int = 1
    ahead: int = 0
    split: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisConfig:
    """`warps` share the columns of `tiles` x 16 rows, `unroll` units of columns (`rings.py`) a warp at a time.

    `early`: the next launch may begin before this one waits for the one before. `shares` as in DecodeConfig.
    """

    warps: int = 8
    tiles: int = 2
    unroll: int = 2
    early: bool = False
    shares: int = 0


def trellis_setting(numbers: Sequence[int]) -> TrellisConfig:
    """A setting as the tables hold it: warps, tiles, unroll, its bits."""
    warps, tiles, unroll, bits = numbers
    return TrellisConfig(
        warps=warps, tiles=tiles, unroll=unroll, early=bool(bits & AHEAD), shares=bits // SHARE,
    )  # fmt: skip
