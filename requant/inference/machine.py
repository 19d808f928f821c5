"""What `requant doctor` reports of this machine: versions, GPUs, the kernels checked on random matrices, caches.

The matrices below are of the kinds that checkpoints have by default. Each goes through the check that a loading model makes
(`kernel_check.py`): compiled here, multiplied with every number of tokens that has its own program, and compared with
the same matrix dequantized.
"""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from requant_kernels.dispatch import dispatch
from requant_kernels.launch_tables import cache_file

from requant.errors import first_line, is_out_of_memory
from requant.formats.codebook import Codebook
from requant.formats.grid import Grid, group_count
from requant.formats.quantized_weight import QuantizedWeight
from requant.formats.sparse import sparse_residual
from requant.formats.trellis import Trellis
from requant.inference.convert import kernel_layout, kernel_linear
from requant.inference.kernel_check import TOKENS, KernelCheck
from requant.models.devices import pick_device
from requant.progress import tracked
from requant.version import VERSION

PACKAGES = ("torch", "transformers", "safetensors", "triton", "numba", "scipy", "numpy")
EXTRAS = {  # as in pyproject.toml
    "data": ("datasets", "pyarrow"),
    "tasks": ("lm-eval", "accelerate", "datasets"),
    "serve": ("fastapi", "uvicorn", "llguidance"),
    "gguf": ("gguf",),
}
SIZES = {"cpu": (256, 512), "cuda": (1024, 2048)}  # rows and columns of the matrices
GROUP = 128
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class CheckedKernels:
    """The kernels that multiply one kind of matrix here; `problem` is None where all of them are right."""

    matrix: str
    kernels: tuple[str, ...]  # for the numbers of tokens in TOKENS, each once
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A folder or file that may be deleted, and its size."""

    name: str
    path: Path
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that was found; `problems` are what somebody should do something about, a sentence each."""

    requant: str
    python: str
    platform: str
    cores: int
    memory: int  # bytes
    gpus: list[dict[str, Any]]
    packages: dict[str, str | None]
    extras: dict[str, dict[str, str | None]]
    device: str  # where the kernels were checked
    kernels: list[CheckedKernels]
    caches: list[Cache]
    problems: list[str]


def examine(device: str = "auto", *, quiet: bool = True) -> Machine:
    """Look at this machine and check its kernels, which compiles them on a GPU. Raises InputError for an unknown device."""
    where = pick_device(device)
    packages = {name: _version(name) for name in PACKAGES}
    extras = {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()}
    kernels = checked_kernels(torch.device(where), quiet=quiet)
    problems = [
        f"The kernels for {each.matrix} matrices: {each.problem}." for each in kernels if each.problem
    ]
    if NVIDIA_DRIVER.exists() and not torch.cuda.is_available():
        problems.append(
            f"This machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU: install a build of torch for "
            "CUDA, or check CUDA_VISIBLE_DEVICES."
        )
    if torch.cuda.is_available() and packages["triton"] is None:
        problems.append(
            "Triton is not installed, so matrices are dequantized at every call: pip install triton."
        )
    return Machine(
        requant=VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=os.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        packages=packages,
        extras=extras,
        device=where,
        kernels=kernels,
        caches=caches(),
        problems=problems,
    )


def checked_kernels(device: torch.device, *, quiet: bool = True) -> list[CheckedKernels]:
    """Every kind of MATRICES on the device, in the dtype that models have there."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check = KernelCheck(dtype)
    found = []
    for name in tracked(list(MATRICES), label=None if quiet else "kernels", unit="matrices"):
        weight = MATRICES[name](*SIZES[device.type]).to(device)
        layout = kernel_layout(weight)
        used = dict.fromkeys(dispatch(layout, tokens, device)[0].name for tokens in TOKENS)
        problem = None
        try:
            kernel_linear(weight, check)
        except ValueError as error:
            problem = first_line(error, limit=400)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            problem = "the GPU has no memory left for the check"
        found.append(CheckedKernels(matrix=name, kernels=tuple(used), problem=problem))
    return found


def caches() -> list[Cache]:
    """Folders and files that grow with use and may be deleted, with their sizes; those that exist."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    home = Path.home()
    paths = {
        "models of the hub": Path(HF_HUB_CACHE),
        "kernels compiled by Triton": Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")),
        "blocks compiled by torch": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())),
        "launches measured here": cache_file(),
    }
    return [Cache(name=name, path=path, bytes=_size(path)) for name, path in paths.items() if path.exists()]


def _grid(bits: int, *, residuals: bool = False) -> Callable[[int, int], QuantizedWeight]:
    def build(n: int, k: int) -> QuantizedWeight:
        g = torch.Generator().manual_seed(bits)
        groups = group_count(k, GROUP)
        dense = Grid(
            codes=torch.randint(0, 1 << bits, (n, k), generator=g, dtype=torch.uint8),
            scales=(torch.rand(n, groups, generator=g) * 0.02).half(),
            zero_points=torch.randint(0, 1 << bits, (n, groups), generator=g, dtype=torch.uint8),
            column_scales=None,
            bits=bits,
            group_size=GROUP,
        )
        if not residuals:
            return QuantizedWeight(dense=dense, sparse=None)
        exact = torch.randn(n, k, generator=g) * 0.05
        sparse = sparse_residual(exact, dense.dequantize(), torch.rand(n, k, generator=g) < 0.005)
        return QuantizedWeight(dense=dense, sparse=sparse)

    return build


def _codebook(bits: int) -> Callable[[int, int], QuantizedWeight]:
    def build(n: int, k: int) -> QuantizedWeight:
        g = torch.Generator().manual_seed(bits)
        dense = Codebook(
            codes=torch.randint(0, 1 << bits, (n, k), generator=g, dtype=torch.uint8),
            levels=torch.randn(n, 1 << bits, generator=g).mul(0.05).sort(1).values.half(),
            bits=bits,
        )
        return QuantizedWeight(dense=dense, sparse=None)

    return build


def _trellis(bits: int | float, code: str = "mul1") -> Callable[[int, int], QuantizedWeight]:
    def build(n: int, k: int) -> QuantizedWeight:
        whole = int(bits)  # of every code; a quarter of a bit is one bit more in every fourth
        g = torch.Generator().manual_seed(whole)
        dense = Trellis(
            codes=torch.randint(0, 1 << whole, (n, k), generator=g, dtype=torch.uint8),
            input_scales=(torch.randint(0, 2, (k,), generator=g) * 2 - 1).half(),
            output_scales=(torch.rand(n, generator=g) * 0.1).half(),
            bits=bits,
            code=code,
        )
        return QuantizedWeight(dense=dense, sparse=None)

    return build


MATRICES: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "2-bit grid": _grid(2),
    "3-bit grid": _grid(3),
    "4-bit grid": _grid(4),
    "8-bit grid": _grid(8),
    "3-bit grid with residuals": _grid(3, residuals=True),
    "3-bit codebook": _codebook(3),
    "4-bit codebook": _codebook(4),
    "2-bit trellis": _trellis(2),
    "2-bit trellis of pairs": _trellis(2, "pair"),
    "2.25-bit trellis of pairs": _trellis(2.25, "pair"),
    "3-bit trellis": _trellis(3),
    "3.25-bit trellis": _trellis(3.25),
    "4-bit trellis": _trellis(4),
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "free": torch.cuda.mem_get_info(index)[0],
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links are not followed, and files that vanish do not count."""
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
