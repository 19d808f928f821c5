"""Launches measured on this machine, on demand: `requant bench --autotune`, REQUANT_AUTOTUNE=1, `kernels/bench/tune.py`.

Every candidate of a kernel is timed on copies of one layout with cold caches (`common/timing.py`); the best is written under
the GPU's name to `launch_config.cache_file()`, from where every later process takes it. It runs when a model is loaded,
never inside a call, and so never inside the capture of a graph.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from requant_kernels.common.device import H200_SMS
from requant_kernels.common.packing import Layout
from requant_kernels.common.timing import cold_time, copies_needed
from requant_kernels.dispatch import Kernel, forget, kernels_of, shape_of
from requant_kernels.launch_config import (
    CONFIGS,
    Fp16MmaConfig,
    GemmConfig,
    GemmSm90Config,
    GemvConfig,
    Int8MmaConfig,
    LaunchConfig,
    Shape,
    SparseMmaConfig,
    TrellisGemvConfig,
    cache_file,
    measured,
    read_table,
    write_table,
)
from requant_kernels.trellis.layout import TrellisLayout

MAX_CTAS_PER_SM = 8  # beyond so many a cap on them makes no difference
RESULT_TOLERANCE = 3e-3  # relative Frobenius distance of two launches' results


class Candidate(NamedTuple):
    """A kernel by name, and a launch of it."""

    kernel: str
    config: LaunchConfig


def _gemv(*launches: tuple[int, int, int, bool, int], stage_activations: bool = False) -> list[GemvConfig]:
    """Of warps, tiles, stages, prefetch, registers (0: as many as the compiler wants)."""
    return [
        GemvConfig(
            num_warps=num_warps, tiles_per_cta=tiles, num_stages=stages, prefetch=prefetch, max_registers=registers or None,
            stage_activations=stage_activations,
        )
        for num_warps, tiles, stages, prefetch, registers in launches
    ]  # fmt: skip


DENSE_GEMV = _gemv(
    (4, 1, 1, True, 128), (8, 1, 1, True, 128), (4, 1, 3, False, 128), (8, 1, 3, False, 128), (4, 2, 1, True, 0),
    (4, 2, 2, False, 168), (4, 1, 2, True, 128), (16, 1, 1, True, 128), (4, 1, 4, False, 128),
    # one or two warps a tile, where tiles are many: all run at once, and little or nothing is added up at the end
    (1, 1, 3, False, 128), (1, 1, 2, True, 128), (1, 1, 4, False, 128), (2, 1, 3, False, 128), (2, 1, 2, True, 128),
    (2, 1, 4, False, 128), (1, 2, 2, False, 168), (2, 2, 1, True, 0), (2, 2, 2, False, 168),
)  # fmt: skip
SPARSE_GEMV = _gemv(
    (4, 1, 1, True, 128), (8, 1, 1, True, 128), (4, 1, 3, False, 128), (8, 1, 3, False, 128), (4, 1, 2, False, 128),
    (4, 1, 4, False, 128), (2, 1, 2, False, 128), (2, 1, 3, False, 128),
)  # fmt: skip
STAGED_GEMV = _gemv(
    (4, 1, 2, False, 128), (4, 1, 3, False, 128), (4, 1, 4, False, 128), (2, 1, 2, False, 128), (8, 1, 1, True, 128),
    stage_activations=True,
)  # fmt: skip
# warps, tiles, stages
INT8_MMA = [
    (4, 1, 2), (4, 2, 2), (4, 7, 2), (8, 1, 2), (8, 2, 2), (8, 2, 3), (8, 3, 2), (8, 4, 2), (16, 1, 2), (16, 2, 2),
    (16, 4, 2),
]  # fmt: skip
DENSE_INT8_MMA = [(4, 1, 4), (2, 2, 4), (2, 4, 2)]
SPARSE_INT8_MMA = [(4, 2, 3), (4, 3, 2), (4, 4, 2)]  # residuals take stages too: more of them, or wider CTAs
# by warp groups: warps, tiles of a group, stages
FP16_MMA = {
    1: [(4, 2, 2), (4, 2, 3), (8, 1, 3), (8, 2, 2), (8, 2, 3), (4, 7, 2), (4, 4, 2), (8, 4, 2)],
    2: [
        (4, 1, 3), (4, 2, 2), (4, 2, 3), (4, 4, 2), (4, 7, 2), (8, 1, 2), (8, 1, 3), (8, 2, 2), (8, 2, 3), (8, 4, 2),
        (8, 7, 2), (4, 7, 3), (16, 1, 2), (16, 1, 3), (16, 2, 2),
    ],
    4: [(8, 1, 2), (8, 1, 3), (8, 2, 2), (8, 2, 3), (16, 1, 2), (16, 1, 3), (16, 2, 2), (16, 2, 3)],
}  # fmt: skip
# tokens, warps and tiles of a CTA, the step at which codes are loaded; splits of K
GEMM_SM90 = [
    ((32, 4, 1, 0), (1, 2, 3, 4, 6, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 3, 4, 6, 8)),
    ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
    ((128, 4, 2, 2), (1, 2, 4)), ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 3), (1, 2, 4)),
]  # fmt: skip
TRELLIS_GEMM_SM90 = [
    ((32, 4, 1, 0), (1, 2, 4, 8)), ((32, 8, 1, 0), (1, 2, 4, 8)), ((64, 4, 1, 0), (1, 2, 4, 8)),
    ((64, 4, 2, 0), (1, 2, 4, 8)), ((64, 8, 1, 0), (1, 2, 3, 4, 6, 8)), ((64, 8, 2, 0), (1, 2, 4)),
    ((128, 8, 1, 0), (1, 2, 3, 4)), ((128, 8, 2, 0), (1, 2, 4)), ((256, 8, 1, 2), (1, 2, 4, 8)),
]  # fmt: skip
# warps, tiles, units of a step
TRELLIS_GEMV = [
    (8, 2, 2), (4, 2, 2), (16, 2, 1), (16, 4, 1), (8, 2, 4), (4, 2, 4), (8, 1, 2), (16, 1, 2), (8, 4, 2), (16, 2, 4),
    (16, 2, 2), (8, 4, 1), (16, 7, 1),
]  # fmt: skip


def _int8_mma(launches: Iterable[tuple[int, int, int]]) -> list[Int8MmaConfig]:
    return [Int8MmaConfig(num_warps=w, tiles_per_cta=t, num_stages=s) for w, t, s in launches]


def _gemm_sm90(launches: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[GemmSm90Config]:
    return [
        GemmSm90Config(tokens_per_cta=m, num_warps=w, tiles_per_warp=t, prefetch_at=at, split_k=split_k)
        for (m, w, t, at), splits in launches
        for split_k in splits
    ]


def all_candidates(kernel: str, shape: Shape) -> list[LaunchConfig]:
    """The launches of a kernel that are ever timed for a format and a number of tokens, without caps on CTAs."""
    sparse, one = "+" in shape.format, shape.m_bucket == 1
    found: Sequence[LaunchConfig] = ()
    if kernel == "gemv":
        found = [*(SPARSE_GEMV if sparse else DENSE_GEMV), *(STAGED_GEMV if sparse and one else ())]
    elif kernel == "int8_mma" and one and shape.format.startswith("grid"):
        found = _int8_mma([*INT8_MMA, *(SPARSE_INT8_MMA if sparse else DENSE_INT8_MMA)])
    elif kernel == "fp16_mma" and shape.format == "grid" and shape.m_bucket <= 8:
        found = [
            Fp16MmaConfig(
                num_warps=w, tiles_per_warp_group=t, num_stages=s, warp_groups=groups, prefetch=prefetch
            )
            for prefetch, groups in product((False, True), FP16_MMA)
            for w, t, s in FP16_MMA[groups]
        ]
    elif kernel == "sparse_mma" and sparse and shape.m_bucket == 8:
        found = [
            SparseMmaConfig(num_warps=w, num_stages=s, max_registers=128) for w, s in product((4, 8), (1, 2))
        ]
    elif kernel == "gemm":
        found = [
            GemmConfig(num_warps=w, split_k=split_k, num_stages=s)
            for w, s in ((4, 2), (4, 3), (8, 2), (8, 3), (16, 2))
            for split_k in (1, 2, 4, 8)
        ]
    elif kernel == "gemm_sm90":
        found = _gemm_sm90(GEMM_SM90)
    elif kernel == "trellis_gemm_sm90":
        found = _gemm_sm90(TRELLIS_GEMM_SM90)
    elif kernel == "trellis_gemv":
        found = [
            TrellisGemvConfig(num_warps=w, tiles_per_cta=t, units_per_step=u, pdl_trigger_early=early)
            for w, t, u in TRELLIS_GEMV
            for early in (False, True)
        ]
    return list(found)


def candidates(kernel: str, shape: Shape) -> list[LaunchConfig]:
    """The launches of a kernel that make sense for a shape."""
    found = [config for config in all_candidates(kernel, shape) if makes_sense(config, shape)]
    return [capped for config in found for capped in _with_caps(config, shape)]


def tiles_per_cta(config: LaunchConfig) -> int:
    """Tiles of 16 rows that a CTA of few tokens takes."""
    if isinstance(config, Fp16MmaConfig):
        return config.tiles_per_warp_group * config.warp_groups
    return getattr(config, "tiles_per_cta", 1)


def _with_caps(config: LaunchConfig, shape: Shape) -> list[LaunchConfig]:
    """Also with as many CTAs an SM as the launch has for each, and twice as many, where that makes a difference."""
    if isinstance(config, (GemmConfig, GemmSm90Config)):
        return [config]
    ctas = -(-shape.n // (16 * tiles_per_cta(config)))
    caps = [waves * -(-ctas // H200_SMS) for waves in (1, 2)]
    return [config, *(replace(config, max_ctas_per_sm=cap) for cap in caps if cap <= MAX_CTAS_PER_SM)]


def makes_sense(config: LaunchConfig, shape: Shape) -> bool:
    """Whether warps have columns, and CTAs fill an H200 and, where K is split, are no more than it holds at once."""
    n, k, tokens, k_tiles = shape.n, shape.k, shape.m_bucket, shape.k // 256
    if isinstance(config, GemmConfig):
        ctas = n // (16 * config.num_warps) * config.split_k
        stages = (config.num_stages + 1) * tokens * 512 <= 220_000
        return config.split_k * 4 <= k_tiles and stages and ctas <= 8 * H200_SMS
    if isinstance(config, GemmSm90Config):
        tiles = config.num_warps * config.tiles_per_warp
        ctas = -(-n // (16 * tiles)) * -(-tokens // config.tokens_per_cta) * config.split_k
        most = H200_SMS * 16 // tiles
        width = config.tokens_per_cta == tokens if tokens <= 64 else config.tokens_per_cta >= 64
        return width and config.split_k * 4 <= max(4, k_tiles) and (config.split_k == 1 or ctas <= 1.1 * most)
    rows = 16 * tiles_per_cta(config)
    if isinstance(config, TrellisGemvConfig):
        columns = config.num_warps * config.units_per_step * 64
        return columns <= max(k, 1024) and n // rows >= 32 and config.tiles_per_cta * tokens <= 32
    warp_groups = config.warp_groups if isinstance(config, Fp16MmaConfig) else 1
    least_ctas = 32 if config.num_warps > 2 else 800 // config.num_warps
    return config.num_warps * 256 <= max(k, 1024) * warp_groups and n // rows >= least_ctas


def call(candidate: Candidate, x: Tensor, layout: Layout | TrellisLayout) -> Tensor:
    """One call with a launch. ValueError where the kernel does not take the layout."""
    kernel = _kernel(candidate.kernel, layout)
    if not (
        kernel.supports(layout, x.shape[0], x.device) and kernel.fits(layout, candidate.config, x.device)
    ):
        raise ValueError(f"{candidate.kernel} does not take this layout with {candidate.config}")
    return kernel.linear(x, layout, None, candidate.config)


def _kernel(name: str, layout: Layout | TrellisLayout) -> Kernel:
    return next(kernel for kernel in kernels_of(layout) if kernel.name == name)


def copies_of(layout: Any) -> list[Any]:
    """The layout and enough copies of it, residuals too, to fill the caches four times."""
    own = [getattr(layout, f.name) for f in fields(layout)]
    stored = sum(t.numel() * t.element_size() for t in own if isinstance(t, Tensor))
    return [layout] + [_copy(layout) for _ in range(copies_needed(stored) - 1)]


def _copy(held: Any) -> Any:
    """A layout, or its residuals, with tensors of its own."""
    copied: dict[str, Any] = {}
    for f in fields(held):
        value = getattr(held, f.name)
        if isinstance(value, Tensor):
            copied[f.name] = value.clone()
        elif is_dataclass(value):
            copied[f.name] = _copy(value)
    return replace(held, **copied)


def times(layout: Any, tokens: int, launches: Sequence[Candidate]) -> dict[Candidate, float]:
    """Microseconds of every launch that runs, and agrees with the first that does."""
    copies, found = copies_of(layout), {}
    x = torch.randn(tokens, layout.k, device=layout.packed_codes.device, dtype=torch.float16)
    first: Tensor | None = None
    for launch in launches:
        try:
            y = call(launch, x, layout).float()
            first = y if first is None else first
            if not (y - first).norm() < RESULT_TOLERANCE * first.norm():
                continue
            calls: list[Callable[[], object]] = [
                lambda c=c, launch=launch: call(launch, x, c) for c in copies
            ]
            found[launch] = cold_time(calls, replays=5).median
        except torch.OutOfMemoryError:
            raise
        except Exception:  # too much shared memory, too many registers: no candidate here
            torch.cuda.synchronize()
    return found


def winners(found: dict[Candidate, float]) -> dict[str, LaunchConfig]:
    """What the table should hold of these times: the best, and beside one of `int8_mma` or `fp16_mma` the best of the
    others, for layouts of this shape that those do not take."""
    best: dict[str, LaunchConfig] = {}
    for kernel, config in sorted(found, key=found.__getitem__):
        mma = kernel in ("int8_mma", "fp16_mma")
        if not best or (not mma and all(name in ("int8_mma", "fp16_mma") for name in best)):
            best[kernel] = config
    return best


def kernels_to_tune(layout: Layout | TrellisLayout, tokens: int) -> list[str]:
    """The kernels that compete for this many tokens: to 16 all that support the layout, beyond them the first."""
    device = layout.packed_codes.device
    able = [kernel.name for kernel in kernels_of(layout) if kernel.supports(layout, tokens, device)]
    able = [name for name in able if name in CONFIGS] if able and (tokens <= 16 or able[0] in CONFIGS) else []
    return able if tokens <= 16 else able[:1]


def tune(
    layouts: Sequence[Layout | TrellisLayout], tokens: Sequence[int], *, file: Path | None = None
) -> int:
    """Measure what no table has yet for these layouts; returns how many shapes were added to `file`."""
    file = file or cache_file()
    device = torch.cuda.get_device_name(layouts[0].packed_codes.device) if layouts else ""
    table = read_table(file)
    mine, added = table.setdefault(device, {}), 0
    for layout in layouts:
        for m in tokens:
            shape = shape_of(layout, m)
            if shape in mine or shape in measured(device):
                continue
            launches = [
                Candidate(kernel, config)
                for kernel in kernels_to_tune(layout, m)
                for config in candidates(kernel, shape)
            ]
            best = winners(times(layout, m, launches))
            if best:
                mine[shape] = best
                added += 1
    if added:
        write_table(file, table)
        forget()
    return added
