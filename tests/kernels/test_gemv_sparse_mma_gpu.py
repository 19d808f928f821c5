"""`gemv_sparse_mma` on the GPU, against the float64 reference."""

from dataclasses import replace

import pytest
import torch
from requant_kernels.common.device import supports_sm90
from requant_kernels.fallback import reference
from requant_kernels.scalar.gemv import gemv
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.scalar.gemv_sparse_mma_launch import SparseMmaConfig

from .cases import Case, random_layout, relative_error

pytestmark = pytest.mark.gpu
LIMIT = {torch.float16: 3e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if not supports_sm90(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("no Hopper, or a Triton without Gluon")


CASES = [
    Case(format=kind, bits=bits, n=100, k=1500, m=m, density=0.02, bias=True, zero_points=zeros, dtype=dtype)
    for kind, bits, zeros in (("grid", 3, False), ("grid", 2, True), ("codebook", 3, False))
    for m in (1, 2, 5, 8)
    for dtype in LIMIT
]
CASES += [
    Case(
        format="grid", bits=4, n=330, k=k, m=5, group_size=group, zero_points=True, density=0.01, int8_residuals=int8,
        column_scales=int8,
    )
    for k, group in ((1024, 32), (1024, 64), (2048, 256), (4096, 512), (777, 777), (5000, 96), (14336, 128))
    for int8 in (False, True)
]  # fmt: skip
CASES += [
    Case(format=kind, bits=bits, n=200, k=2048, m=3, density=0.005)
    for kind, widths in (("grid", (5, 6, 7, 8)), ("codebook", (2, 4)))
    for bits in widths
]
CASES += [
    Case(format="grid", bits=3, n=n, k=k, m=8, density=0.3)
    for n, k in ((1, 256), (16, 8), (2100, 301), (64, 2048))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case: Case) -> None:
    from requant_kernels.scalar.gemv_sparse_mma import gemv_sparse_mma

    torch.manual_seed(0)
    layout = random_layout(case, "cuda")
    x = torch.randn(case.m, case.k, device="cuda", dtype=case.dtype)
    bias = torch.randn(case.n, device="cuda", dtype=case.dtype) if case.bias else None
    config = SparseMmaConfig(num_warps=4, num_stages=2)
    y = gemv_sparse_mma(x, layout, bias, config)
    assert relative_error(y, reference.linear(x, layout, bias)) < LIMIT[case.dtype]
    assert torch.equal(y, gemv_sparse_mma(x, layout, bias, config))


@pytest.mark.parametrize("launch", [(1, 3), (2, 2), (4, 4), (8, 3), (16, 1)], ids=str)
def test_every_launch_agrees(launch: tuple[int, int]) -> None:
    from requant_kernels.scalar.gemv_sparse_mma import gemv_sparse_mma

    torch.manual_seed(0)
    layout = random_layout(Case(format="grid", bits=3, n=500, k=2304, m=8, density=0.02), "cuda")
    wide = torch.randn(8, 2401, device="cuda", dtype=torch.float16)
    config = SparseMmaConfig(num_warps=launch[0], num_stages=launch[1], max_registers=128)
    for x in (wide[:, :2304], wide[:, 3:2307], wide[:, :2304].contiguous()):
        y = gemv_sparse_mma(x, layout, None, config)
        assert relative_error(y, reference.linear(x, layout)) < 3e-3
        assert torch.equal(y, gemv_sparse_mma(x, layout, None, config))


@pytest.mark.parametrize("k", [1024, 1504, 8192, 16384])
@pytest.mark.parametrize("warps", [2, 4, 8])
def test_one_token_staged(warps: int, k: int) -> None:
    torch.manual_seed(0)
    config = GemvConfig(
        num_warps=warps, num_stages=3, prefetch=False, stage_activations=True, max_registers=128
    )
    for case in (
        Case(format="grid", bits=3, n=200, k=k, m=1, density=0.02),
        Case(
            format="codebook",
            bits=3,
            n=200,
            k=k,
            m=1,
            density=0.02,
            int8_residuals=True,
            dtype=torch.bfloat16,
        ),
    ):
        layout = random_layout(case, "cuda")
        x = torch.randn(1, k, device="cuda", dtype=case.dtype)
        y = gemv(x, layout, None, config)
        assert relative_error(y, reference.linear(x, layout)) < LIMIT[case.dtype]
        assert torch.equal(y, gemv(x, layout, None, config))
        plain = gemv(x, layout, None, replace(config, stage_activations=False))
        assert relative_error(y, plain.double()) < LIMIT[case.dtype]


def test_graph_replays_on_new_activations() -> None:
    from requant_kernels.scalar.gemv_sparse_mma import gemv_sparse_mma

    layout = random_layout(Case(format="grid", bits=3, n=1024, k=1024, m=8, density=0.01), "cuda")
    x, config = torch.randn(8, 1024, device="cuda", dtype=torch.float16), SparseMmaConfig(num_warps=4)
    gemv_sparse_mma(x, layout, None, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemv_sparse_mma(gemv_sparse_mma(x, layout, None, config) * 1e-2, layout, None, config)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(
            y, gemv_sparse_mma(gemv_sparse_mma(x, layout, None, config) * 1e-2, layout, None, config)
        )
