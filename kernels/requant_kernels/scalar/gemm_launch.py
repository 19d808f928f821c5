"""Launches of `gemm.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from requant_kernels.common.device import H200_SMS, max_smem_bytes, num_sms
from requant_kernels.launch_config import ROWS, Launch, LaunchConfig, Shape, tiles_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig(LaunchConfig):
    """A CTA has `num_warps` x 16 rows; `split_k` CTAs split K."""

    num_warps: int = 8
    split_k: int = 1
    num_stages: int = 1  # k_tiles of activations in flight


def gemm(shape: Shape, device: torch.device) -> GemmConfig:
    """Two CTAs of eight warps per SM."""
    num_warps, num_stages = 8, 1
    if device.type == "cuda" and torch.version.hip is None:
        # 512 bytes of shared memory per token and k_tile
        num_stages = min(3, max(1, max_smem_bytes(device) // (512 * shape.m_bucket) - 1))
    k_tiles, ctas = tiles_of(shape)[1], -(-shape.n // (ROWS * num_warps))
    split_k = max(1, min(8, k_tiles, 2 * num_sms(device) // ctas))
    return GemmConfig(num_warps=num_warps, split_k=split_k, num_stages=num_stages)


def candidates(_shape: Shape) -> Sequence[GemmConfig]:
    return [
        GemmConfig(num_warps=w, split_k=split_k, num_stages=s)
        for w, s in ((4, 2), (4, 3), (8, 2), (8, 3), (16, 2))
        for split_k in (1, 2, 4, 8)
    ]


def makes_sense(config: GemmConfig, shape: Shape) -> bool:
    """Whether the stages fit in shared memory, and the CTAs fill an H200 with no more than a few per SM."""
    ctas = shape.n // (ROWS * config.num_warps) * config.split_k
    stages = (config.num_stages + 1) * shape.m_bucket * 512 <= 220_000
    return config.split_k * 4 <= shape.k // 256 and stages and ctas <= 8 * H200_SMS


LAUNCH = Launch(config=GemmConfig, rule=gemm, candidates=candidates, makes_sense=makes_sense)
