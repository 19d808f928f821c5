"""Launches of `gemm_sm90.py`, with the fields of `scalar/gemm_sm90_launch.py`, and of the experts of a prompt."""

import dataclasses
from collections.abc import Sequence

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.launch_config import ROWS, Launch, Shape, tiles_of
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config, configs, makes_sense


def trellis_gemm_sm90(shape: Shape, device: torch.device) -> GemmSm90Config:
    """The rotation that adds the partial products adds partial sums of its own too: 8 of both together. Beyond 64 tokens a
    second round of few CTAs costs more than idle SMs, so splits are rounded down."""
    n, m, k_tiles = shape.n, shape.m_bucket, tiles_of(shape)[1]
    tokens, rows = min(256, m), -(-n // ROWS) * ROWS
    ctas, most = -(-n // 128) * -(-m // tokens), max(1, 8 * 4096 // max(4096, rows & -rows))
    wanted = round(2 * num_sms(device) / ctas) if m <= 64 else num_sms(device) // ctas
    split_k = max(1, min(most, k_tiles, wanted))
    return dataclasses.replace(cta_of(shape.bits, tokens, whole=split_k == 1), split_k=split_k)


def cta_of(bits: float, tokens: int, *, whole: bool = False) -> GemmSm90Config:
    """A CTA of so many tokens: of 64 four warps of two tiles, else, and for `whole` products of tall matrices, which have
    CTAs enough, eight of one."""
    small = tokens == 64 and bits <= 4 and not whole
    return GemmSm90Config(
        tokens_per_cta=tokens, num_warps=4 if small else 8, tiles_per_warp=2 if small else 1,
        prefetch_at=2 if tokens == 256 else 0,
    )  # fmt: skip


def launches(
    config: GemmSm90Config, tiles: int, num_tokens: int, sms: int
) -> list[tuple[GemmSm90Config, int]]:
    """The launches of a product and the row tiles of each: one, or two where CTAs of 256 tokens would leave half of the GPU
    idle in their last round. Those of that round then have 128 tokens each, and take about half the time: 28672 rows and 512
    tokens are 448 CTAs, three rounds of an H200's 132 and one of 52, which become 104."""
    rows, columns = config.num_warps * config.tiles_per_warp, -(-num_tokens // config.tokens_per_cta)
    ctas = -(-tiles // rows) * columns
    rounds, left = divmod(ctas, sms)
    if config.tokens_per_cta != 256 or config.split_k > 1 or rounds == 0 or not 0 < 2 * left <= sms:
        return [(config, tiles)]
    whole = rounds * sms // columns * rows
    return [(config, whole), (GemmSm90Config(tokens_per_cta=128, num_warps=8), tiles - whole)]


GROUP_TOKENS = (32, 64, 128, 256)  # of one expert, that a CTA has at most


def trellis_groups(bits: float, slots: int, experts: int) -> GemmSm90Config:
    """`slots` tokens divided among `experts` matrices, a CTA's all of one (`experts/prefill.py`).

    A CTA takes time for its weights, as much as for 43 tokens, and for its N tokens, of which an expert's last CTA has half
    in the mean: r / N + 1 / 2 CTAs for the r tokens of an expert, whose time is least at N = sqrt(86 r). On an H200 that
    was the best of the four at 4 and 32 tokens an expert; at 256, where it is 148, 256 took 5 % less than 128.
    """
    wanted = (86 * slots / experts) ** 0.5
    return cta_of(bits, next((n for n in GROUP_TOKENS if wanted < 1.1 * n), GROUP_TOKENS[-1]))


# tokens, warps and tiles of a CTA, the step at which codes are loaded; splits of K
LAUNCHES = [
    ((32, 4, 1, 0), (1, 2, 4, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 4, 8)),
    ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
    ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 0), (1, 2, 4)), ((256, 8, 1, 2), (1, 2, 4, 8)),
]  # fmt: skip


def candidates(_shape: Shape) -> Sequence[GemmSm90Config]:
    return configs(LAUNCHES)


LAUNCH = Launch(config=GemmSm90Config, rule=trellis_gemm_sm90, candidates=candidates, makes_sense=makes_sense)
