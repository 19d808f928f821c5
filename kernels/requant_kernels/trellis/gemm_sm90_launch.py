"""Launches of `gemm_sm90.py`, with the fields of `scalar/gemm_sm90_launch.py`, and of the experts of a prompt."""

import dataclasses
from collections.abc import Sequence
from functools import cache

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.launch_config import ROWS, Launch, Shape, tiles_of
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config, configs, makes_sense
from requant_kernels.trellis.rounding import MAX_BITS

MANY = 4096  # rows, or columns
MOST_BITS_OF_TWO_TILES = 4.25  # for 64 tokens: with more, a warp of two tiles spills registers


def trellis_gemm_sm90(shape: Shape, device: torch.device) -> GemmSm90Config:
    """The rotation that reduces split-K also adds partial sums of its own: at most 8 of both together. Up to 64 tokens there
    are two CTAs for every SM, and three with up to 16, and with 64 if codes are fine and columns many; where rows are many
    as well, five, of four warps with two tiles each, by the time of steps (`eval/results/steps-h200.json`). These are not
    resident together: an SM holds two. Above, a second wave of few CTAs costs more than idle SMs, so splits are rounded
    down."""
    n, m, k_tiles = shape.n, shape.m_bucket, tiles_of(shape)[1]
    tokens, rows = max(16, min(256, m)), -(-n // ROWS) * ROWS
    ctas, most = -(-n // 128) * -(-m // tokens), max(1, 8 * 4096 // max(4096, rows & -rows))
    fine = m == 64 and shape.bits > MAX_BITS and shape.k >= MANY
    large = fine and n >= MANY and shape.bits <= MOST_BITS_OF_TWO_TILES
    per_sm = 5 if large else 3 if fine or m <= 16 else 2
    wanted = round(per_sm * num_sms(device) / ctas) if m <= 64 else num_sms(device) // ctas
    split_k = max(1, min(most, k_tiles, wanted))
    split_k = -(-k_tiles // -(-k_tiles // split_k))  # that have columns
    two_tiles = large and split_k > 1
    return GemmSm90Config(
        tokens_per_cta=tokens, num_warps=4 if two_tiles else 8, tiles_per_warp=2 if two_tiles else 1, split_k=split_k,
        prefetch_at=2 if tokens == 256 else 0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PdlPosition:
    """The position of a product among several of the same activations, which overlap by programmatic dependent launch.

    The first one waits for the activations before it lets the second start, so that the others need not wait for them: their
    CTAs run beside its last ones. Each of the others waits for the one before it at its end, so whatever waits for the last
    one waits for all.
    """

    first: bool = True
    last: bool = True
    ctas_before: int = 0  # CTAs of those before

    def of_launch(self, *, first: bool, last: bool) -> str:
        """PDL of a kernel for one launch of this product, its first or last or another: `alone`, `first` or `later`."""
        if not (self.first and first):
            return "later"
        return "alone" if self.last and last else "first"


ALONE = PdlPosition()


@cache
def overlapping_configs(
    shapes: tuple[Shape, ...], configs: tuple[GemmSm90Config, ...], device: torch.device
) -> list[GemmSm90Config]:
    """The launches of products that overlap: up to 64 tokens, with no more splits of K than one matrix of all their rows
    would have, since their CTAs share the GPU."""
    if shapes[0].m_bucket > 64:
        return list(configs)
    rows = sum(shape.n for shape in shapes)
    joined = [trellis_gemm_sm90(shape._replace(n=rows), device) for shape in shapes]
    return [
        own if own.split_k <= fewer.split_k else fewer for own, fewer in zip(configs, joined, strict=True)
    ]


def num_ctas(config: GemmSm90Config, tiles: int, num_tokens: int) -> int:
    """CTAs of a product of `tiles` row tiles."""
    rows = config.num_warps * config.tiles_per_warp
    return -(-tiles // rows) * -(-num_tokens // config.tokens_per_cta) * config.split_k


def launches(
    config: GemmSm90Config, tiles: int, num_tokens: int, sms: int, position: PdlPosition = ALONE
) -> list[tuple[GemmSm90Config, int]]:
    """The launches of a product and the row tiles of each: one, or two if CTAs of 256 tokens would leave half of the GPU
    idle in the last wave. That wave then has 128 tokens per CTA and takes about half the time: 28672 rows and 512 tokens are
    448 CTAs, three waves on an H200's 132 SMs and one of 52, which become 104."""
    rows, columns = config.num_warps * config.tiles_per_warp, -(-num_tokens // config.tokens_per_cta)
    begun = position.ctas_before % sms  # CTAs of the wave in which this product starts
    waves, left = divmod(begun + num_ctas(config, tiles, num_tokens), sms)
    divides = config.tokens_per_cta == 256 and config.split_k == 1 and position.last
    if not divides or waves == 0 or not 0 < 2 * left <= sms:
        return [(config, tiles)]
    whole = (waves * sms - begun) // columns * rows
    return [(config, whole), (GemmSm90Config(tokens_per_cta=128, num_warps=8), tiles - whole)]


GROUP_TOKENS = (32, 64, 256)  # most tokens of one expert per CTA


def group_tokens(slots: int, experts: int) -> int:
    """Tokens per CTA of `slots` tokens divided among `experts` matrices; a CTA has tokens of one expert (`experts/gemm.py`).

    Weights are decoded once per CTA, and an expert's last CTA is half full on average. On an H200 32 were best at 8 tokens
    per expert, 64 at 32 and at 128 (3 % less time than 128 with thirteen widths, 9 % with one of `pair`), and in an earlier
    form of the kernel 256 at 256 (`eval/results/experts-prefill-h200.json`).
    """
    per_expert = slots / experts
    return 32 if per_expert <= 16 else 64 if per_expert <= 192 else 256


def group_cta(tokens: int) -> GemmSm90Config:
    """The CTA for up to so many tokens of one expert: 64 with four warps of two tiles take 5 % more time with one width of
    `pair`, and 22 with thirteen, which need all registers."""
    return GemmSm90Config(tokens_per_cta=tokens, num_warps=8, prefetch_at=2 if tokens == 256 else 0)


# tokens, warps and tiles per CTA, the k step at which codes are prefetched; splits of K
LAUNCHES = [
    ((16, 8, 1, 0), (1, 2, 4, 8)), ((32, 4, 1, 0), (1, 2, 4, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)),
    ((64, 4, 1, 0), (1, 2, 4, 8)), ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)),
    ((64, 8, 2, 0), (1, 2, 4)), ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 0), (1, 2, 4)), ((256, 8, 1, 2), (1, 2, 4, 8)),
]  # fmt: skip


def candidates(_shape: Shape) -> Sequence[GemmSm90Config]:
    return configs(LAUNCHES)


LAUNCH = Launch(config=GemmSm90Config, rule=trellis_gemm_sm90, candidates=candidates, makes_sense=makes_sense)
