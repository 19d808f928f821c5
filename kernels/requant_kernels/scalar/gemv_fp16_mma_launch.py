"""Launches of `gemv_fp16_mma.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.common.occupancy import ctas_per_sm
from requant_kernels.launch_config import Launch, LaunchConfig, Shape, tiles_of, warps_have_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16MmaConfig(LaunchConfig):
    """`num_warps` in `warp_groups`, each with rows of its own, share the activations."""

    num_warps: int
    tiles_per_warp_group: int = 1
    num_stages: int = 2  # of the multistage buffer of codes and activations
    warp_groups: int = 1
    prefetch: bool = True  # load the next stage before waiting for the current one
    max_ctas_per_sm: int | None = None

    @property
    def tiles_per_cta(self) -> int:
        return self.tiles_per_warp_group * self.warp_groups


def prefers_fp16_mma(shape: Shape) -> bool:
    """Which tensor-core kernel of a grid: this one for several tokens, or for 4 bits without residuals."""
    return shape.m_bucket > 1 or (shape.bits == 4 and "+" not in shape.format)


def fp16_mma(shape: Shape, device: torch.device) -> Fp16MmaConfig | None:
    """One CTA per SM, so that each SM reads the activations once: up to seven tiles, or two warp groups of seven. Eight
    warps while registers last: with four, times differ by a fifth from one GPU to another."""
    if not prefers_fp16_mma(shape) or "+" in shape.format:
        return None
    tiles, k_tiles = tiles_of(shape)
    own = next((count for count in (1, 2, 3, 4, 7, 14) if tiles <= count * num_sms(device)), None)
    if own is None:
        return None
    num_warps = min(8 if own <= 4 else 4, 1 << k_tiles.bit_length() - 1)
    warp_groups = 2 if own == 14 and num_warps > 1 else 1
    per_group = own // warp_groups
    return Fp16MmaConfig(
        num_warps=num_warps, tiles_per_warp_group=per_group, num_stages=3 if own == 1 else 2, warp_groups=warp_groups,
        prefetch=own > 4, max_ctas_per_sm=ctas_per_sm(-(-tiles // (per_group * warp_groups)), device),
    )  # fmt: skip


# by warp groups: warps, tiles per group, stages
LAUNCHES = {
    1: [(4, 2, 2), (4, 2, 3), (8, 1, 3), (8, 2, 2), (8, 2, 3), (4, 7, 2), (4, 4, 2), (8, 4, 2)],
    2: [
        (4, 1, 3), (4, 2, 2), (4, 2, 3), (4, 4, 2), (4, 7, 2), (8, 1, 2), (8, 1, 3), (8, 2, 2), (8, 2, 3), (8, 4, 2),
        (8, 7, 2), (4, 7, 3), (16, 1, 2), (16, 1, 3), (16, 2, 2),
    ],
    4: [(8, 1, 2), (8, 1, 3), (8, 2, 2), (8, 2, 3), (16, 1, 2), (16, 1, 3), (16, 2, 2), (16, 2, 3)],
}  # fmt: skip


def candidates(shape: Shape) -> Sequence[Fp16MmaConfig]:
    if shape.format != "grid" or shape.m_bucket > 8:
        return ()
    return [
        Fp16MmaConfig(
            num_warps=w, tiles_per_warp_group=t, num_stages=s, warp_groups=groups, prefetch=prefetch
        )
        for prefetch, groups in product((False, True), LAUNCHES)
        for w, t, s in LAUNCHES[groups]
    ]


def makes_sense(config: Fp16MmaConfig, shape: Shape) -> bool:
    return warps_have_work(
        shape,
        num_warps=config.num_warps,
        tiles_per_cta=config.tiles_per_cta,
        warp_groups=config.warp_groups,
    )


LAUNCH = Launch(
    config=Fp16MmaConfig,
    rule=fp16_mma,
    candidates=candidates,
    makes_sense=makes_sense,
    measured_beside_gemv=True,
)
