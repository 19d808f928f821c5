"""Launches of `gemv_int8_mma.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.common.occupancy import ctas_per_sm
from requant_kernels.launch_config import Launch, LaunchConfig, Shape, tiles_of, warps_have_work
from requant_kernels.scalar.gemv_fp16_mma_launch import prefers_fp16_mma


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8MmaConfig(LaunchConfig):
    """`num_warps` split K among them, for `tiles_per_cta` x 16 rows."""

    num_warps: int
    tiles_per_cta: int = 1
    num_stages: int = 2  # of the multistage buffer of codes
    max_ctas_per_sm: int | None = None


def int8_mma(shape: Shape, device: torch.device) -> Int8MmaConfig | None:
    """At most two CTAs per SM, with as many tiles each as that takes."""
    if prefers_fp16_mma(shape):
        return None
    tiles, k_tiles = tiles_of(shape)
    own = next((count for count in (1, 2, 3, 4, 7) if tiles <= 2 * count * num_sms(device)), None)
    if own is None or ("+" in shape.format and own > 4):
        return None
    num_warps = 16 if own <= 2 and k_tiles > 32 else 8 if own <= 4 and k_tiles > 8 else 4
    cap = ctas_per_sm(-(-tiles // own), device)
    return Int8MmaConfig(num_warps=num_warps, tiles_per_cta=own, num_stages=2, max_ctas_per_sm=cap)


# warps, tiles, stages
ALL = [
    (4, 1, 2), (4, 2, 2), (4, 7, 2), (8, 1, 2), (8, 2, 2), (8, 2, 3), (8, 3, 2), (8, 4, 2), (16, 1, 2), (16, 2, 2),
    (16, 4, 2),
]  # fmt: skip
DENSE = [(4, 1, 4), (2, 2, 4), (2, 4, 2)]
RESIDUALS = [(4, 2, 3), (4, 3, 2), (4, 4, 2)]  # residuals use stages too: more stages, or wider CTAs


def candidates(shape: Shape) -> Sequence[Int8MmaConfig]:
    if shape.m_bucket > 1 or not shape.format.startswith("grid"):
        return ()
    launches = ALL + (RESIDUALS if "+" in shape.format else DENSE)
    return [Int8MmaConfig(num_warps=w, tiles_per_cta=t, num_stages=s) for w, t, s in launches]


def makes_sense(config: Int8MmaConfig, shape: Shape) -> bool:
    return warps_have_work(shape, num_warps=config.num_warps, tiles_per_cta=config.tiles_per_cta)


LAUNCH = Launch(
    config=Int8MmaConfig,
    rule=int8_mma,
    candidates=candidates,
    makes_sense=makes_sense,
    measured_beside_gemv=True,
)
