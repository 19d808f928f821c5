"""What the tuner tries, times and keeps."""

import importlib
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import requant_kernels
import torch
from requant_kernels import autotune, pack_trellis
from requant_kernels.autotune import Candidate, candidates, winners
from requant_kernels.dispatch import shape_of
from requant_kernels.launch_config import Shape
from requant_kernels.launch_tables import read_table, write_table
from requant_kernels.registry import LAUNCHES
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig
from requant_kernels.scalar.gemv_launch import GemvConfig

from .cases import Case, random_csr, random_layout, random_trellis

CPU = torch.device("cpu")  # which counts as many SMs as an H200


def test_what_the_table_holds_of_some_times() -> None:
    def gemv(warps: int) -> Candidate:
        return Candidate("gemv", GemvConfig(num_warps=warps))

    def int8(warps: int) -> Candidate:
        return Candidate("int8_mma", Int8MmaConfig(num_warps=warps))

    def names(found: dict[Candidate, float]) -> list[tuple[str, int]]:
        return [(kernel, getattr(config, "num_warps", 0)) for kernel, config in winners(found).items()]

    assert names({gemv(1): 3.0, int8(2): 2.0, int8(4): 1.0, gemv(8): 4.0}) == [("int8_mma", 4), ("gemv", 1)]
    assert names({gemv(1): 1.0, int8(2): 2.0}) == [("gemv", 1)]
    assert names({int8(2): 2.0}) == [("int8_mma", 2)] and names({}) == []


def test_caps_are_offered_where_ctas_are_few() -> None:
    """132 SMs, at most eight CTAs each that shared memory keeps apart."""

    def caps(kernel: str, format: str, n: int, **launch: int) -> list[int | None]:
        offered: list[Any] = candidates(kernel, Shape(format, 2, n, 4096, 1), CPU)
        alike = [c for c in offered if all(getattr(c, name) == value for name, value in launch.items())]
        return sorted({c.max_ctas_per_sm for c in alike}, key=lambda cap: cap or 0)

    assert caps("gemv", "grid", 4096, num_warps=8, tiles_per_cta=1) == [None, 2, 4]  # two CTAs each
    assert caps("gemv", "grid", 132 * 16 * 8, num_warps=2, tiles_per_cta=1) == [None, 8]
    assert caps("gemv", "grid", 132 * 16 * 9, num_warps=2, tiles_per_cta=1) == [None]
    assert caps("trellis_gemv", "mul1", 14336, num_warps=16, tiles_per_cta=7) == [None, 1, 2]


def test_kernels_are_offered_for_what_they_support() -> None:
    def offered(format: str, tokens: int) -> set[str]:
        return {name for name in LAUNCHES if candidates(name, Shape(format, 3, 8192, 8192, tokens), CPU)} - {
            "gemm", "gemm_sm90", "trellis_gemv", "trellis_gemm_sm90", "trellis_gemm_int8",
        }  # fmt: skip

    assert offered("grid", 1) == {"gemv", "int8_mma", "fp16_mma"} and offered("grid", 8) == {
        "gemv",
        "fp16_mma",
    }
    assert offered("grid+s", 1) == {"gemv", "int8_mma"} and offered("grid+s", 8) == {"gemv", "sparse_mma"}
    assert offered("codebook", 1) == offered("codebook+s", 1) == offered("grid+s", 16) == {"gemv"}
    assert any(
        getattr(c, "stage_activations", False)
        for c in candidates("gemv", Shape("grid+s", 3, 8192, 8192, 1), CPU)
    )


def test_every_launch_file_is_one_of_the_registry() -> None:
    files = sorted(Path(requant_kernels.__path__[0]).rglob("*_launch.py"))
    modules = [importlib.import_module(f"requant_kernels.{f.parent.name}.{f.stem}") for f in files]
    assert len(modules) == len(LAUNCHES) and all(m.LAUNCH in LAUNCHES.values() for m in modules)


def test_residuals_are_cold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy that is timed has them at another address."""
    monkeypatch.setattr(autotune, "copies_needed", lambda stored: 3)
    copies = autotune.copies_of(
        random_layout(Case(format="grid", bits=3, n=32, k=256, m=1, density=0.1), "cpu")
    )
    for name in ("packed_codes", "sparse.columns", "sparse.values", "sparse.slice_ptr"):
        held = [attrgetter(name)(layout) for layout in copies]
        assert len({tensor.data_ptr() for tensor in held}) == 3 and torch.equal(held[0], held[2])


def test_shapes_are_those_of_the_lookup() -> None:
    plain = random_layout(Case(format="grid", bits=3, n=32, k=256, m=1), "cpu")
    sparse = random_layout(Case(format="codebook", bits=3, n=32, k=256, m=1, density=0.1), "cpu")
    trellis = pack_trellis(
        *random_trellis(32, 256, 2, "cpu"), bits=2, code="pair", sparse=random_csr(32, 256, 0.1, False, "cpu")
    )
    assert [shape_of(layout, 1).format for layout in (plain, sparse, trellis)] == [
        "grid",
        "codebook+s",
        "pair",
    ]
    buckets = [shape_of(plain, m).m_bucket for m in (1, 2, 8, 9, 17, 64, 65, 512)]
    assert buckets == [1, 8, 8, 16, 32, 64, 128, 512]


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_every_candidate_is_a_launch_for_some_shape(kernel: str) -> None:
    launch = LAUNCHES[kernel]
    tokens = {
        "gemm": (64,), "gemm_sm90": (32, 64, 256), "trellis_gemm_sm90": (16, 32, 64, 256), "trellis_gemm_int8": (64, 256),
    }.get(kernel, (1, 8))  # fmt: skip
    for format in ("mul1",) if kernel.startswith("trellis") else ("grid", "grid+s"):
        for m in tokens:
            for config in launch.candidates(Shape(format, 2, 8192, 8192, m)):
                shapes = [
                    Shape(format, 2, n, k, own)
                    for n, k in ((8192, 8192), (28672, 4096), (4096, 14336))
                    for own in tokens
                ]
                assert any(launch.makes_sense(config, shape) for shape in shapes), config


def test_processes_that_write_a_table_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism tunes in every process; a second one writes while the first puts its file in place."""
    file, replace = tmp_path / "kernels.json", os.replace
    tables: list[Any] = [
        {"A100": {Shape("grid", 2, 64, 1024, 1): {"gemv": GemvConfig(num_warps=w)}}} for w in (1, 2)
    ]

    def replace_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_table(file, tables[1])
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_late)
    write_table(file, tables[0])
    assert read_table(file) == tables[0] and list(tmp_path.iterdir()) == [file]


def test_a_cache_that_may_not_be_read_is_not_used(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(file: Path, *_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    (tmp_path / "kernels.json").write_text("{}")
    monkeypatch.setattr(Path, "read_text", refuse)
    assert read_table(tmp_path / "kernels.json") == {}
    assert "kernels.json cannot be read, and is not used" in caplog.text
