"""Words through shared memory against float64, and bit for bit against words through registers."""

import pytest
import torch
from requant_kernels.fallback import reference
from requant_kernels.launch_config import AHEAD, COPIED, STAGED, DecodeConfig, decode_setting
from requant_kernels.scalar.gemv import decode

from .cases import Case, random_layout, relative_error

pytestmark = pytest.mark.gpu
LIMIT = {torch.float16: 3e-3, torch.bfloat16: 1.2e-2}

CASES = [
    Case(kind="grid", bits=2, n=100, k=4096, m=1),
    Case(kind="grid", bits=3, n=100, k=4096, m=1, dtype=torch.bfloat16),
    Case(kind="grid", bits=4, n=100, k=5000, m=1, density=0.02),
    Case(kind="codebook", bits=3, n=100, k=5000, m=1, density=0.02),
    Case(kind="grid", bits=3, n=64, k=1024, m=1, group_size=32, zero_points=True),
    Case(kind="grid", bits=2, n=64, k=2048, m=1, group_size=512, column_scales=True),
    Case(kind="grid", bits=3, n=64, k=1536, m=1, group_size=1536, zero_points=True),
    Case(kind="grid", bits=2, n=48, k=3072, m=8, density=0.01),
    Case(kind="grid", bits=2, n=48, k=3072, m=13),
    Case(kind="grid", bits=2, n=100, k=4096, m=1, density=0.01, bias=True),
    Case(kind="grid", bits=3, n=100, k=2048, m=1, density=0.03, bias=True, dtype=torch.bfloat16),
    Case(kind="grid", bits=4, n=100, k=1024, m=1, density=0.01, int8_residuals=True),
    Case(kind="grid", bits=2, n=100, k=6144, m=1, density=0.002),
]
SHAPES = [(1, 1, 4), (2, 2, 3), (4, 1, 5), (4, 2, 2), (8, 1, 2)]  # warps, tiles, depth


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_words_through_shared_memory(number: int) -> None:
    torch.manual_seed(0)
    case = CASES[number]
    layout = random_layout(case, "cuda")
    x = torch.randn(case.m, case.k, device="cuda", dtype=case.dtype)
    want = reference.linear(x, layout)
    warps, tiles, depth = SHAPES[number % len(SHAPES)]
    former = decode(x, layout, None, DecodeConfig(warps=warps, tiles=tiles, unroll=2), asm=True)
    for bits in (COPIED | AHEAD, COPIED | STAGED) if case.m == 1 else (COPIED,):
        y = decode(x, layout, None, decode_setting((warps, tiles, depth, bits, 0)), asm=True)
        assert relative_error(y, want) < LIMIT[case.dtype]
        if case.density == 0 or not bits & STAGED:  # residuals in passes are added in another order
            assert torch.equal(y, former)
