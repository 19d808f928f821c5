"""How a kernel is launched: a configuration in named fields, by a rule or measured.

Each kernel has a `*_launch.py` beside it that ends in a LAUNCH: the class of its configuration, the rule for shapes
that are in no table (`launch_tables.py`), and the launches that the tuner tries (`autotune.py`). It needs no Triton.

All rules have the same goals: enough bytes in flight to hide memory latency, CTAs that spread evenly over the SMs, and few
enough registers that 16 warps fit on an SM. A configuration follows from the shape alone and never from
timing inside a call, so a captured graph and an eager call run the same kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

ROWS, K_TILE = 16, 256  # per tile of packed codes


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """A launch of one kernel, whose own subclass adds the fields.

    If there is a field `max_ctas_per_sm` (`common/occupancy.py`), the tuner tries caps on the CTAs per SM; `tiles_per_cta`,
    a field or a property, gives it the number of CTAs.
    """


class Shape(NamedTuple):
    """The key for which a configuration is measured."""

    format: str  # "grid", "codebook", either with "+s" for residuals, or the name of a trellis code
    bits: float
    n: int
    k: int
    m_bucket: int  # tokens, rounded up to what a kernel is compiled for: 1, 8, 16, 32, 64, ..


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """The launches of one kernel.

    config: the class of its configurations.
    candidates: shape -> all configurations that are ever timed for its format and number of tokens.
    makes_sense: `(config, shape)` -> whether a candidate is worth timing at the shape's sizes.
    rule: `(shape, device)` -> a configuration for a shape that is in no table; None: the kernel declines the shape.
        Without a rule the kernel is used only where it was measured to be the fastest.
    measured_beside_gemv: it competes with `gemv`. If a table has a shape without it, it was slower there.
    """

    config: type[LaunchConfig]
    candidates: Callable[[Shape], Sequence[LaunchConfig]]
    makes_sense: Callable[[Any, Shape], bool]
    rule: Callable[[Shape, torch.device], LaunchConfig | None] | None = None
    measured_beside_gemv: bool = False


def m_bucket(num_tokens: int) -> int:
    """The number of tokens under which configurations are stored."""
    if num_tokens <= 16:
        return 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
    return max(32, 1 << (num_tokens - 1).bit_length())


def tiles_of(shape: Shape) -> tuple[int, int]:
    """The numbers of tiles of 16 rows, and of 256 columns."""
    return -(-shape.n // ROWS), -(-shape.k // K_TILE)


def warps_have_work(shape: Shape, *, num_warps: int, tiles_per_cta: int, warp_groups: int = 1) -> bool:
    """For a kernel of few tokens: whether all warps have columns, and the CTAs fill an H200."""
    least_ctas = 32 if num_warps > 2 else 800 // num_warps
    return (
        num_warps * K_TILE <= max(shape.k, 1024) * warp_groups
        and shape.n // (ROWS * tiles_per_cta) >= least_ctas
    )
