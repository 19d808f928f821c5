"""`gemm_sm90` on the GPU: every format, every launch configuration, activations with odd strides."""

import pytest
import torch
from requant_kernels import linear
from requant_kernels.common.device import supports_sm90
from requant_kernels.fallback import reference
from requant_kernels.launch_config import Shape
from requant_kernels.scalar import gemm_sm90_launch
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config

from .cases import Case, random_layout, relative_error

pytestmark = pytest.mark.gpu
LIMIT = {torch.float16: 3e-3, torch.bfloat16: 1.2e-2}
LAUNCHES = [
    *gemm_sm90_launch.candidates(Shape("grid", 3, 720, 2100, 128)),
    # the rule's, with residuals
    *(GemmSm90Config(tokens_per_cta=tokens, num_warps=16, split_k=2) for tokens in (32, 64)),
]

CASES = [
    Case(
        format=kind,
        bits=bits,
        n=100,
        k=1100,
        m=40,
        zero_points=bits % 2 == 1,
        density=0.01 * ((bits + which) % 2),
        bias=True,
        dtype=dtype,
    )
    for kind, widths in (("grid", range(2, 9)), ("codebook", range(2, 5)))
    for bits in widths
    for which, dtype in enumerate(LIMIT)
]
CASES += [
    Case(
        format="grid",
        bits=3,
        n=80,
        k=k,
        m=64,
        group_size=group,
        zero_points=True,
        density=density,
        column_scales=True,
    )
    for k, group in ((1024, 32), (1024, 64), (1100, 256), (2048, 512), (777, 777), (5000, 96))
    for density in (0.0, 0.02)
]
CASES += [
    Case(format=kind, bits=3, n=300, k=1500, m=m, density=density, int8_residuals=True, bias=True)
    for kind in ("grid", "codebook")
    for m in (17, 33, 65, 128, 129, 300, 512, 600)
    for density in (0.0, 0.01)
]
CASES += [
    Case(format="grid", bits=4, n=n, k=k, m=50) for n, k in ((1, 256), (16, 1), (4096, 301), (2048, 8192))
]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if not supports_sm90(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no wgmma")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case) -> None:
    torch.manual_seed(0)
    layout = random_layout(case, "cuda")
    x = torch.randn(case.m, case.k, device="cuda", dtype=case.dtype)
    bias = torch.randn(case.n, device="cuda", dtype=case.dtype) if case.bias else None
    poison = torch.full((8, case.m, case.n), torch.nan, device="cuda")
    del poison  # the allocator hands its memory to the output and the partial sums
    y = linear(x, layout, bias)
    assert relative_error(y, reference.linear(x, layout, bias)) < LIMIT[case.dtype]
    assert torch.equal(y, linear(x, layout, bias))


@pytest.mark.parametrize("config", [c for c in LAUNCHES if getattr(c, "split_k", 0) <= 2], ids=str)
def test_every_launch_config(config: GemmSm90Config) -> None:
    from requant_kernels.scalar.gemm_sm90 import gemm_sm90

    torch.manual_seed(0)
    layout = random_layout(
        Case(format="grid", bits=3, n=720, k=2100, m=90, density=0.01 * (config.split_k - 1)), "cuda"
    )
    x = torch.randn(90, 2100, device="cuda", dtype=torch.float16)
    bias = torch.randn(720, device="cuda", dtype=torch.float16)
    y = gemm_sm90(x, layout, bias, config)
    assert relative_error(y, reference.linear(x, layout, bias)) < LIMIT[torch.float16]


def test_many_residuals_in_one_k_tile() -> None:
    """More entries in a k_tile than two rounds of a warp cover."""
    layout = random_layout(Case(format="codebook", bits=3, n=64, k=1024, m=48, density=0.3), "cuda")
    for dtype, limit in LIMIT.items():
        x = torch.randn(48, 1024, device="cuda", dtype=dtype)
        assert relative_error(linear(x, layout), reference.linear(x, layout)) < limit


def test_activations_with_a_row_stride() -> None:
    layout = random_layout(Case(format="grid", bits=2, n=64, k=1024, m=48), "cuda")
    wide = torch.randn(48, 1031, device="cuda", dtype=torch.float16)
    for x in (wide[:, 3:1027], wide[:, 4:1028], wide.T.contiguous().T[:, :1024]):
        assert relative_error(linear(x, layout), reference.linear(x, layout)) < 3e-3


@pytest.mark.parametrize("m", [40, 200])
@pytest.mark.parametrize("density", [0.0, 0.01])
def test_graph_capture(m: int, density: float) -> None:
    layout = random_layout(Case(format="grid", bits=3, n=1024, k=1024, m=m, density=density), "cuda")
    x = torch.randn(m, 1024, device="cuda", dtype=torch.float16)
    linear(x, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, layout) * 1e-2, layout)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, linear(linear(x, layout) * 1e-2, layout))
