"""Launches of `gemm_sm90.py`, with the fields of `scalar/gemm_sm90_launch.py`, and of the experts of a prompt."""

import dataclasses
from collections.abc import Sequence

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.launch_config import ROWS, Launch, Shape, tiles_of
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config, configs, makes_sense


def trellis_gemm_sm90(shape: Shape, device: torch.device) -> GemmSm90Config:
    """The rotation that adds the partial products adds partial sums of its own too: 8 of both together."""
    n, m, k_tiles = shape.n, shape.m_bucket, tiles_of(shape)[1]
    tokens, rows = min(256, m), -(-n // ROWS) * ROWS
    ctas, most = -(-n // 128) * -(-m // tokens), max(1, 8 * 4096 // max(4096, rows & -rows))
    split_k = max(1, min(most, k_tiles, round(num_sms(device) * (2 if m <= 64 else 1) / ctas)))
    return dataclasses.replace(cta_of(shape.bits, tokens), split_k=split_k)


def cta_of(bits: float, tokens: int) -> GemmSm90Config:
    """A CTA of so many tokens: of 64 four warps of two tiles, else eight of one."""
    small = tokens == 64 and bits <= 4
    return GemmSm90Config(
        tokens_per_cta=tokens, num_warps=4 if small else 8, tiles_per_warp=2 if small else 1,
        prefetch_at=2 if tokens == 256 else 0,
    )  # fmt: skip


GROUP_TOKENS = (32, 64, 128, 256)  # of one expert, that a CTA has at most


def trellis_groups(bits: float, slots: int, experts: int) -> GemmSm90Config:
    """`slots` tokens divided among `experts` matrices, a CTA's all of one (`experts/prefill.py`). By a model, not measured.

    A CTA takes time for its weights, as much as for 43 tokens, and for its N tokens, of which an expert's last CTA has half
    in the mean: r / N + 1 / 2 CTAs for the r tokens of an expert, whose time is least at N = sqrt(86 r).
    """
    wanted = (86 * slots / experts) ** 0.5
    return cta_of(bits, next((n for n in GROUP_TOKENS if wanted < 2**0.5 * n), GROUP_TOKENS[-1]))


# tokens, warps and tiles of a CTA, the step at which codes are loaded; splits of K
LAUNCHES = [
    ((32, 4, 1, 0), (1, 2, 4, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 4, 8)),
    ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
    ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 0), (1, 2, 4)), ((256, 8, 1, 2), (1, 2, 4, 8)),
]  # fmt: skip


def candidates(_shape: Shape) -> Sequence[GemmSm90Config]:
    return configs(LAUNCHES)


LAUNCH = Launch(config=GemmSm90Config, rule=trellis_gemm_sm90, candidates=candidates, makes_sense=makes_sense)
