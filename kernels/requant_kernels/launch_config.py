"""How a kernel is launched: one configuration a kernel, in named fields, and the tables that hold the measured ones.

A table is JSON: GPU name -> rows, each a shape (`format`, `bits`, `n`, `k`, `m_bucket`), a `kernel`, and the fields of that
kernel's configuration. Two files are read: `tuned/h200.json` beside this file, and the user's cache, which
`requant bench --autotune` and `kernels/bench/tune.py` write. Of a shape that both know the rows of the cache count.

A configuration follows from the shape alone and never from timing inside a call, so a captured graph and an eager call run
the same kernel.
"""

import json
import logging
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
TABLE = Path(__file__).with_name("tuned") / "h200.json"
CACHE_VARIABLE = "REQUANT_KERNEL_CACHE"


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvConfig:
    """`scalar/gemv.py`. `num_warps` divide K among them, for `tiles_per_cta` x 16 rows."""

    num_warps: int
    tiles_per_cta: int = 1
    num_stages: int = 1  # K tiles in the loop body; the codes of num_stages - 1 (at least one) are in flight
    prefetch: bool = True  # load the activations of the next K tile early; to 8 tokens
    stage_activations: bool = (
        False  # residuals of one token gather activations from shared memory, not from the cache
    )
    max_registers: int | None = None  # a thread
    max_ctas_per_sm: int | None = None  # `common/occupancy.py`


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8MmaConfig:
    """`scalar/gemv_int8_mma.py`. `num_warps` divide K among them, for `tiles_per_cta` x 16 rows."""

    num_warps: int
    tiles_per_cta: int = 1
    num_stages: int = 2  # of the multistage buffer of codes
    max_ctas_per_sm: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16MmaConfig:
    """`scalar/gemv_fp16_mma.py`. `num_warps` in `warp_groups`, each with rows of its own, share the activations."""

    num_warps: int
    tiles_per_warp_group: int = 1
    num_stages: int = 2  # of the multistage buffer of codes and activations
    warp_groups: int = 1
    prefetch: bool = True  # load the next stage before waiting for the present one
    max_ctas_per_sm: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseMmaConfig:
    """`scalar/gemv_sparse_mma.py`. `num_warps` divide K among them, for 16 rows."""

    num_warps: int
    num_stages: int = 1  # as in GemvConfig
    max_registers: int | None = None
    max_ctas_per_sm: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """`scalar/gemm.py`. A CTA has `num_warps` x 16 rows; K is divided among `split_k` of them."""

    num_warps: int = 8
    split_k: int = 1
    num_stages: int = 1  # K tiles of activations in flight


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSm90Config:
    """`scalar/gemm_sm90.py` and `trellis/gemm_sm90.py`. A CTA has `tokens_per_cta` and `num_warps` x `tiles_per_warp` x 16
    rows; K is divided among `split_k` CTAs."""

    tokens_per_cta: int = 64
    num_warps: int = 4
    tiles_per_warp: int = 1
    prefetch_at: int = 0  # the K step of a tile during which the codes of the next tile are loaded
    split_k: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisGemvConfig:
    """`trellis/gemv.py`. `num_warps` divide K among them, for `tiles_per_cta` x 16 rows."""

    num_warps: int = 8
    tiles_per_cta: int = 2
    units_per_step: int = 2  # units of columns (`trellis/layout.py`) that a warp takes at a time
    pdl_trigger_early: bool = False  # the next launch may begin before this one has waited for the one before
    max_ctas_per_sm: int | None = None


LaunchConfig = (
    GemvConfig
    | Int8MmaConfig
    | Fp16MmaConfig
    | SparseMmaConfig
    | GemmConfig
    | GemmSm90Config
    | TrellisGemvConfig
)
CONFIGS: dict[str, type[LaunchConfig]] = {
    "gemv": GemvConfig,
    "int8_mma": Int8MmaConfig,
    "fp16_mma": Fp16MmaConfig,
    "sparse_mma": SparseMmaConfig,
    "gemm": GemmConfig,
    "gemm_sm90": GemmSm90Config,
    "trellis_gemv": TrellisGemvConfig,
    "trellis_gemm_sm90": GemmSm90Config,
}


class Shape(NamedTuple):
    """What a configuration is measured for."""

    format: str  # "grid", "codebook", either with "+s" for residuals, or the name of a trellis code
    bits: float
    n: int
    k: int
    m_bucket: int  # tokens, rounded up to what a kernel is compiled for: 1, 8, 16, 32, 64, ..


Rows = dict[Shape, dict[str, LaunchConfig]]  # shape -> configuration by kernel


def m_bucket(num_tokens: int) -> int:
    """The number of tokens that configurations are kept for."""
    if num_tokens <= 16:
        return 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
    return max(32, 1 << (num_tokens - 1).bit_length())


def cache_file() -> Path:
    """Where configurations measured on this machine are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else home / "requant" / "kernels.json"


@cache
def measured(device_name: str) -> Rows:
    """The configurations of a GPU; those of the cache before those of the table."""
    found: Rows = {}
    for file in (TABLE, cache_file()):
        found |= read_table(file).get(device_name, {})
    return found


def read_table(file: Path) -> dict[str, Rows]:
    """GPU -> rows; nothing, with a warning, where the file is damaged or of an older form: it only makes calls faster."""
    if not file.exists():
        return {}
    try:
        return {device: _rows(rows) for device, rows in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        logger.warning("%s is damaged, or of an older form, and not used; delete it, and measure again", file)
        return {}


def write_table(file: Path, table: dict[str, Rows]) -> None:
    """One configuration a line."""
    devices = []
    for device, rows in table.items():
        lines = [
            json.dumps(shape._asdict() | {"bits": _number(shape.bits), "kernel": kernel} | asdict(config))
            for shape, configs in sorted(rows.items())
            for kernel, config in sorted(configs.items())
        ]
        devices.append(f"{json.dumps(device)}: [\n" + ",\n".join(lines) + "\n]")
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".writing")
    aside.write_text("{\n" + ",\n".join(devices) + "\n}\n")
    os.replace(aside, file)


def _number(bits: float) -> float:
    return int(bits) if bits == int(bits) else bits


def _rows(rows: list[dict[str, Any]]) -> Rows:
    """Rows as a file holds them; ValueError, TypeError or KeyError where they are no configurations."""
    found: Rows = {}
    if not isinstance(rows, list):
        raise TypeError("rows are a list")
    for row in rows:
        own = dict(row)
        shape = Shape(**{name: own.pop(name) for name in Shape._fields})
        kernel = own.pop("kernel")
        config = CONFIGS[kernel](**own)
        for field in fields(config):
            if not isinstance(getattr(config, field.name), field.type):  # pyright: ignore[reportArgumentType]
                raise TypeError(f"{field.name} of {row}")
        found.setdefault(shape, {})[kernel] = config
    return found
