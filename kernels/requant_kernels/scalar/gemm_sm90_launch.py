"""Launches of `gemm_sm90.py`. `trellis/gemm_sm90.py` has the same fields (`trellis/gemm_sm90_launch.py`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from requant_kernels.common.device import H200_SMS, num_sms
from requant_kernels.launch_config import ROWS, Launch, LaunchConfig, Shape, tiles_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSm90Config(LaunchConfig):
    """A CTA has `tokens_per_cta` and `num_warps` x `tiles_per_warp` x 16 rows; `split_k` CTAs split K."""

    tokens_per_cta: int = 64
    num_warps: int = 4
    tiles_per_warp: int = 1
    prefetch_at: int = 0  # the K step of a tile during which the codes of the next tile are loaded
    split_k: int = 1


def gemm_sm90(shape: Shape, device: torch.device) -> GemmSm90Config:
    """16 warps per SM, or one CTA of 8 if accumulators or residuals need the registers of the others."""
    ctas_at_once = num_sms(device)
    if shape.m_bucket > 64:
        num_warps = 8
    elif "+" in shape.format:
        num_warps = 16 if shape.bits + (shape.format == "codebook+s") <= 4 else 8
    else:
        num_warps = 4 if shape.n < 128 * num_sms(device) else 8
        ctas_at_once = num_sms(device) * 16 // num_warps
    tokens = min(128, shape.m_bucket)
    ctas = -(-shape.n // (ROWS * num_warps)) * -(-shape.m_bucket // tokens)
    split_k = max(1, min(8, tiles_of(shape)[1] // 4, round(ctas_at_once / ctas)))
    return GemmSm90Config(tokens_per_cta=tokens, num_warps=num_warps, split_k=split_k)


# tokens, warps and tiles per CTA, the step at which codes are prefetched; splits of K
LAUNCHES = [
    ((32, 4, 1, 0), (1, 2, 3, 4, 6, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 3, 4, 6, 8)),
    ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
    ((128, 4, 2, 2), (1, 2, 4)), ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 3), (1, 2, 4)),
]  # fmt: skip


def configs(launches: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[GemmSm90Config]:
    return [
        GemmSm90Config(tokens_per_cta=m, num_warps=w, tiles_per_warp=t, prefetch_at=at, split_k=split_k)
        for (m, w, t, at), splits in launches
        for split_k in splits
    ]


def candidates(_shape: Shape) -> Sequence[GemmSm90Config]:
    return configs(LAUNCHES)


def makes_sense(config: GemmSm90Config, shape: Shape) -> bool:
    """Whether the tokens fill CTAs and, with split-K, all CTAs are resident on an H200 at once."""
    tokens, k_tiles = shape.m_bucket, shape.k // 256
    tiles = config.num_warps * config.tiles_per_warp
    ctas = -(-shape.n // (ROWS * tiles)) * -(-tokens // config.tokens_per_cta) * config.split_k
    most = H200_SMS * 16 // tiles
    width = config.tokens_per_cta == tokens if tokens <= 64 else config.tokens_per_cta >= 64
    return width and config.split_k * 4 <= max(4, k_tiles) and (config.split_k == 1 or ctas <= 1.1 * most)


LAUNCH = Launch(config=GemmSm90Config, rule=gemm_sm90, candidates=candidates, makes_sense=makes_sense)
