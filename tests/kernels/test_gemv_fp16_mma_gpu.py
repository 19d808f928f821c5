"""`gemv_fp16_mma` on the GPU, against the float64 reference."""

import pytest
import torch
from requant_kernels.fallback import reference
from requant_kernels.scalar.gemv_fp16_mma import fits, gemv_fp16_mma, supports
from requant_kernels.scalar.gemv_fp16_mma_launch import Fp16MmaConfig

from .cases import Case, random_layout, relative_error

pytestmark = pytest.mark.gpu

CASES = [
    Case(format="grid", bits=bits, n=200, k=k, m=m, group_size=group, bias=bias, zero_points=zeros, dtype=dtype)
    for bits in (2, 3, 4)
    for k, m, group, bias, zeros, dtype in (
        (4096, 8, 128, False, False, torch.float16), (1280, 2, 128, True, False, torch.float16),
        (2048, 5, 512, False, False, torch.bfloat16), (768, 8, 768, False, False, torch.float16),
        (4096, 7, 128, False, True, torch.float16), (1024, 8, 256, True, True, torch.bfloat16),
        (8192, 8, 128, False, False, torch.bfloat16), (768, 3, 768, False, False, torch.bfloat16),
        (4096, 1, 128, False, True, torch.bfloat16),
    )
]  # fmt: skip
LAUNCHES = [
    (1, 1, 4, 1), (2, 2, 3, 2), (4, 1, 5, 1), (4, 2, 2, 2), (8, 1, 2, 4), (4, 7, 2, 1), (8, 3, 2, 2), (16, 1, 3, 4),
    (8, 4, 2, 2), (4, 4, 2, 4), (16, 2, 2, 2),
]  # fmt: skip  # warps, tiles, stages, warp groups


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_against_reference(number: int) -> None:
    torch.manual_seed(0)
    case, (warps, tiles, stages, groups) = CASES[number], LAUNCHES[number % len(LAUNCHES)]
    layout = random_layout(case, "cuda")
    x = torch.randn(case.m, case.k, device="cuda", dtype=case.dtype)
    x[0, ::77] *= 50
    bias = torch.randn(case.n, device="cuda", dtype=case.dtype) if case.bias else None
    config = Fp16MmaConfig(
        num_warps=warps, tiles_per_warp_group=tiles, num_stages=stages, warp_groups=groups, prefetch=number % 2 == 0
    )  # fmt: skip
    assert supports(layout, case.m, x.device) and fits(layout, config, x.device)  # pyright: ignore[reportArgumentType]
    y = gemv_fp16_mma(x, layout, bias, config)
    assert relative_error(y, reference.linear(x, layout, bias)) < (
        1e-3 if case.dtype == torch.float16 else 6e-3
    )
    for _ in range(3):
        assert torch.equal(y, gemv_fp16_mma(x, layout, bias, config))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_small_and_large_activations(scale: float) -> None:
    """Subnormal weights lose no precision, whatever the magnitude of the activations."""
    torch.manual_seed(0)
    layout = random_layout(Case(format="grid", bits=2, n=64, k=4096, m=8), "cuda")
    x = (torch.randn(8, 4096, device="cuda") * scale).half()
    config = Fp16MmaConfig(num_warps=8, tiles_per_warp_group=2)
    assert relative_error(gemv_fp16_mma(x, layout, None, config), reference.linear(x, layout)) < 1e-3
