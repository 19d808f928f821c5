"""Launches that take more shared memory than they need compute the same, bit for bit, also in a graph of many."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from requant_kernels import pack_trellis
from requant_kernels.autotune import Candidate, call
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.scalar.gemv_sparse_mma_launch import SparseMmaConfig
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig

from .cases import Case, random_layout, random_trellis

pytestmark = pytest.mark.gpu
GRID = Case(format="grid", bits=3, n=2500, k=4096, m=1)
RESIDUALS = Case(format="grid", bits=2, n=2500, k=4096, m=8, density=0.01)
CODES = Case(format="codebook", bits=3, n=2500, k=4096, m=8)


def gemv(num_warps: int, num_stages: int, *, prefetch: bool = False, staged: bool = False) -> Candidate:
    config = GemvConfig(
        num_warps=num_warps,
        num_stages=num_stages,
        prefetch=prefetch,
        stage_activations=staged,
        max_registers=128,
    )
    return Candidate("gemv", config)


def int8_mma(num_warps: int, tiles: int) -> Candidate:
    return Candidate("int8_mma", Int8MmaConfig(num_warps=num_warps, tiles_per_cta=tiles))


def trellis_gemv(num_warps: int, tiles: int, units: int, *, early: bool) -> Candidate:
    config = TrellisGemvConfig(
        num_warps=num_warps, tiles_per_cta=tiles, units_per_step=units, pdl_trigger_early=early
    )
    return Candidate("trellis_gemv", config)


@pytest.mark.parametrize(
    ("case", "m", "launch"),
    [
        (GRID, 1, gemv(8, 3)), (GRID, 1, int8_mma(8, 1)), (GRID, 1, int8_mma(16, 2)), (GRID, 8, gemv(4, 3)),
        (RESIDUALS, 1, gemv(8, 1, prefetch=True, staged=True)), (RESIDUALS, 1, int8_mma(8, 2)),
        (RESIDUALS, 8, Candidate("sparse_mma", SparseMmaConfig(num_warps=4, max_registers=128))),
        (CODES, 8, gemv(4, 1, prefetch=True)), ("mul1", 1, trellis_gemv(16, 2, 1, early=False)),
        ("mul1", 8, trellis_gemv(8, 2, 2, early=True)), ("pair", 1, trellis_gemv(16, 7, 1, early=True)),
    ],
)  # fmt: skip
def test_a_cap_on_ctas_changes_no_result(case: Case | str, m: int, launch: Candidate) -> None:
    torch.manual_seed(0)
    if isinstance(case, str):
        layout = pack_trellis(*random_trellis(2500, 4096, 2, "cuda"), bits=2, code=case)
    else:
        layout = random_layout(case, "cuda")
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    want = call(launch, x, layout)
    for cap in (1, 2, 4):
        config: Any = launch.config
        capped = launch._replace(config=replace(config, max_ctas_per_sm=cap))
        assert torch.equal(call(capped, x, layout), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [call(capped, x, layout) for _ in range(5)]
        graph.replay()
        assert all(torch.equal(one, want) for one in found)
