"""Launches of `gemm_int8.py`, with the fields of `scalar/gemm_sm90_launch.py`."""

import dataclasses
from collections.abc import Sequence

import torch

from requant_kernels.launch_config import Launch, Shape
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config, configs, makes_sense
from requant_kernels.trellis.gemm_sm90_launch import trellis_gemm_sm90


def trellis_gemm_int8(shape: Shape, device: torch.device) -> GemmSm90Config:
    """As in float16, but four warps of two tiles for 128 tokens without split-K: 28672 x 4096 takes 34.5 us instead of 38.9
    (`pair`), 45.9 instead of 49.1 (`mul1` at 3 bits; `gemm-int8-trials-h200.json`)."""
    config = trellis_gemm_sm90(shape, device)
    if config.tokens_per_cta == 128 and config.split_k == 1:
        return dataclasses.replace(config, num_warps=4, tiles_per_warp=2)
    return config


# tokens, warps and tiles per CTA, the k step at which codes are prefetched; splits of K
LAUNCHES = [
    ((64, 4, 2, 0), (2, 4)), ((64, 8, 1, 0), (1, 2, 4)), ((128, 4, 2, 0), (1, 2, 4)), ((128, 8, 1, 0), (1, 2, 3, 4)),
    ((256, 8, 1, 2), (1, 2, 4)),
]  # fmt: skip


def candidates(_shape: Shape) -> Sequence[GemmSm90Config]:
    return configs(LAUNCHES)


LAUNCH = Launch(config=GemmSm90Config, rule=trellis_gemm_int8, candidates=candidates, makes_sense=makes_sense)
