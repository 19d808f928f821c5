"""Launches of `gemv_sparse_mma.py`, which is used only where it was measured to be the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from requant_kernels.launch_config import Launch, LaunchConfig, Shape, warps_have_work


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseMmaConfig(LaunchConfig):
    """`num_warps` split K among them, for 16 rows."""

    num_warps: int
    num_stages: int = 1  # as in GemvConfig
    max_registers: int | None = None
    max_ctas_per_sm: int | None = None

    @property
    def tiles_per_cta(self) -> int:
        return 1


def candidates(shape: Shape) -> Sequence[SparseMmaConfig]:
    if "+" not in shape.format or shape.m_bucket != 8:
        return ()
    return [SparseMmaConfig(num_warps=w, num_stages=s, max_registers=128) for w, s in product((4, 8), (1, 2))]


def makes_sense(config: SparseMmaConfig, shape: Shape) -> bool:
    return warps_have_work(shape, num_warps=config.num_warps, tiles_per_cta=config.tiles_per_cta)


LAUNCH = Launch(
    config=SparseMmaConfig, candidates=candidates, makes_sense=makes_sense, measured_beside_gemv=True
)
