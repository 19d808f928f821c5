"""Launches of `gemv.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.launch_config import Launch, LaunchConfig, Shape, tiles_of, warps_have_work


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvConfig(LaunchConfig):
    """`num_warps` split K among them, for `tiles_per_cta` x 16 rows."""

    num_warps: int
    tiles_per_cta: int = 1
    num_stages: int = 1  # k_tiles in the loop body; the codes of num_stages - 1 (at least one) are in flight
    prefetch: bool = True  # load the activations of the next k_tile early; up to 8 tokens
    # residuals of one token gather activations from shared memory, not from the cache
    stage_activations: bool = False
    max_registers: int | None = None  # per thread
    max_ctas_per_sm: int | None = None  # `common/occupancy.py`


def gemv_stages(shape: Shape) -> tuple[int, bool]:
    """`num_stages` and `prefetch` of GemvConfig: registers hold either the codes or the activations of further k_tiles."""
    several = shape.m_bucket > 1
    if shape.format == "grid" and not several and shape.bits <= 4:
        return (3, False) if shape.bits <= 3 else (2, True)
    if "+" not in shape.format or (not several and shape.bits <= 3 and shape.format == "codebook+s"):
        return 1, True
    return (3 if shape.format.startswith("grid") and shape.bits <= 3 and shape.m_bucket <= 8 else 2), False


def gemv_least_warps(shape: Shape) -> int:
    """The fewest warps per tile: residuals, levels and more tokens are enough work for several."""
    return 4 if shape.format.startswith("codebook") or shape.m_bucket > 1 else 2 if "+" in shape.format else 1


def gemv_registers(shape: Shape) -> int | None:
    """The register limit per thread, for 16 warps per SM; None if fewer than the compiler wants would spill."""
    few = shape.bits <= 3 or (shape.bits == 4 and shape.format.startswith("grid"))
    return 128 if shape.m_bucket <= 8 and few else None


def gemv(shape: Shape, device: torch.device) -> GemvConfig:
    """All CTAs are resident at once, with about 16 warps per SM."""
    tiles, k_tiles = tiles_of(shape)
    max_registers = gemv_registers(shape) if torch.version.hip is None else None
    num_warps = gemv_least_warps(shape)
    most = 16 if max_registers else 8  # 16 warps have 128 registers each
    while num_warps < most and tiles * num_warps < 11 * num_sms(device) and 2 * num_warps <= k_tiles:
        num_warps *= 2
    num_stages, prefetch = gemv_stages(shape)
    return GemvConfig(
        num_warps=num_warps, num_stages=num_stages, prefetch=prefetch, max_registers=max_registers
    )


def _configs(*launches: tuple[int, int, int, bool, int], stage_activations: bool = False) -> list[GemvConfig]:
    """Configs from warps, tiles, stages, prefetch, registers (0: as many as the compiler wants)."""
    return [
        GemvConfig(
            num_warps=num_warps, tiles_per_cta=tiles, num_stages=stages, prefetch=prefetch, max_registers=registers or None,
            stage_activations=stage_activations,
        )
        for num_warps, tiles, stages, prefetch, registers in launches
    ]  # fmt: skip


DENSE = _configs(
    (4, 1, 1, True, 128), (8, 1, 1, True, 128), (4, 1, 3, False, 128), (8, 1, 3, False, 128), (4, 2, 1, True, 0),
    (4, 2, 2, False, 168), (4, 1, 2, True, 128), (16, 1, 1, True, 128), (4, 1, 4, False, 128),
    # one or two warps per tile, for many tiles: all are resident at once, and little or nothing is reduced at the end
    (1, 1, 3, False, 128), (1, 1, 2, True, 128), (1, 1, 4, False, 128), (2, 1, 3, False, 128), (2, 1, 2, True, 128),
    (2, 1, 4, False, 128), (1, 2, 2, False, 168), (2, 2, 1, True, 0), (2, 2, 2, False, 168),
)  # fmt: skip
RESIDUALS = _configs(
    (4, 1, 1, True, 128), (8, 1, 1, True, 128), (4, 1, 3, False, 128), (8, 1, 3, False, 128), (4, 1, 2, False, 128),
    (4, 1, 4, False, 128), (2, 1, 2, False, 128), (2, 1, 3, False, 128),
)  # fmt: skip
STAGED = _configs(
    (4, 1, 2, False, 128), (4, 1, 3, False, 128), (4, 1, 4, False, 128), (2, 1, 2, False, 128), (8, 1, 1, True, 128),
    stage_activations=True,
)  # fmt: skip


def candidates(shape: Shape) -> Sequence[GemvConfig]:
    if "+" not in shape.format:
        return DENSE
    return RESIDUALS + STAGED if shape.m_bucket == 1 else RESIDUALS


def makes_sense(config: GemvConfig, shape: Shape) -> bool:
    return warps_have_work(shape, num_warps=config.num_warps, tiles_per_cta=config.tiles_per_cta)


LAUNCH = Launch(config=GemvConfig, rule=gemv, candidates=candidates, makes_sense=makes_sense)
