"""`gemv_int8_mma` on the GPU, against the float64 reference."""

import pytest
import torch
from requant_kernels.fallback import reference
from requant_kernels.scalar.gemv_int8_mma import fits, gemv_int8_mma, supports
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig

from .cases import Case, random_layout, relative_error

pytestmark = pytest.mark.gpu

CASES = [
    Case(format="grid", bits=bits, n=100, k=k, m=1, group_size=group, bias=bias, dtype=dtype)
    for bits in (2, 3, 4)
    for k, group, bias, dtype in (
        (4096, 128, False, torch.float16), (1280, 128, True, torch.bfloat16), (2048, 512, False, torch.float16),
        (768, 768, False, torch.float16),
    )
]  # fmt: skip
CASES += [
    Case(format="grid", bits=bits, n=200, k=k, m=1, density=density, bias=bias, dtype=dtype)
    for bits in (2, 3, 4)
    for k, density, bias, dtype in (
        (4096, 0.01, True, torch.float16), (1280, 0.05, False, torch.bfloat16), (8192, 0.002, False, torch.float16),
    )
]  # fmt: skip
CASES += [
    Case(format="grid", bits=bits, n=200, k=k, m=1, group_size=group, density=density, zero_points=True)
    for bits in (2, 3, 4)
    for k, group, density in ((4096, 128, 0.0), (1024, 256, 0.01), (8192, 128, 0.002))
]
LAUNCHES = [
    (1, 1, 4),
    (2, 2, 3),
    (4, 1, 5),
    (4, 2, 2),
    (8, 1, 2),
    (4, 7, 2),
    (8, 3, 2),
    (16, 2, 2),
]  # warps, tiles, stages


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_against_reference(number: int) -> None:
    torch.manual_seed(0)
    case, (warps, tiles, stages) = CASES[number], LAUNCHES[number % len(LAUNCHES)]
    layout = random_layout(case, "cuda")
    x = torch.randn(1, case.k, device="cuda", dtype=case.dtype)
    x[0, ::77] *= 50
    bias = torch.randn(case.n, device="cuda", dtype=case.dtype) if case.bias else None
    config = Int8MmaConfig(num_warps=warps, tiles_per_cta=tiles, num_stages=stages)
    assert supports(layout, 1, x.device) and fits(layout, config, x.device)  # pyright: ignore[reportArgumentType]
    y = gemv_int8_mma(x, layout, bias, config)
    assert relative_error(y, reference.linear(x, layout, bias)) < (
        1e-3 if case.dtype == torch.float16 else 6e-3
    )
    for _ in range(3):
        assert torch.equal(y, gemv_int8_mma(x, layout, bias, config))
