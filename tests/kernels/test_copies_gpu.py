"""Words through shared memory against float64, and bit for bit against words through registers."""

import pytest
import torch
from requant_kernels import naive
from requant_kernels.decode import decode
from requant_kernels.tuning import AHEAD, COPIED, STAGED, DecodeConfig, decode_setting

from .cases import Case, random_layout, relative_error

pytestmark = pytest.mark.gpu
LIMIT = {torch.float16: 3e-3, torch.bfloat16: 1.2e-2}

CASES = [
    Case(kind=kind, bits=bits, n=100, k=k, m=1, density=density, dtype=dtype)
    for kind in ("grid", "codebook")
    for bits in (2, 3, 4)
    for k, density, dtype in ((4096, 0.0, torch.float16), (5000, 0.02, torch.bfloat16))
]
CASES += [
    Case(kind="grid", bits=bits, n=64, k=k, m=1, group_size=group, zero_points=zeros, column_scales=True)
    for bits, k, group in (
        (3, 1024, 32),
        (2, 1024, 64),
        (4, 2048, 256),
        (2, 2048, 512),
        (5, 1536, 128),
        (3, 1536, 1536),
    )
    for zeros in (False, True)
]
CASES += [Case(kind="grid", bits=2, n=48, k=3072, m=m, density=0.01) for m in (2, 8, 13)]

CASES += [
    Case(kind=kind, bits=bits, n=100, k=k, m=1, density=density, dtype=dtype, bias=True)
    for kind, bits, k, density, dtype in (
        ("grid", 2, 4096, 0.01, torch.float16), ("grid", 3, 2048, 0.03, torch.bfloat16),
        ("grid", 4, 1024, 0.01, torch.float16), ("codebook", 3, 2048, 0.02, torch.float16),
        ("grid", 2, 6144, 0.002, torch.float16),
    )
]  # fmt: skip

SHAPES = [(1, 1, 4), (2, 2, 3), (4, 1, 5), (4, 2, 2), (8, 1, 2)]  # warps, tiles, depth


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_words_through_shared_memory(number: int) -> None:
    torch.manual_seed(0)
    case = CASES[number]
    layout = random_layout(case, "cuda")
    x = torch.randn(case.m, case.k, device="cuda", dtype=case.dtype)
    want = naive.linear(x, layout)
    warps, tiles, depth = SHAPES[number % len(SHAPES)]
    former = decode(x, layout, None, DecodeConfig(warps=warps, tiles=tiles, unroll=2), asm=True)
    for bits in (COPIED, COPIED | AHEAD, COPIED | STAGED):
        y = decode(x, layout, None, decode_setting((warps, tiles, depth, bits, 0)), asm=True)
        assert relative_error(y, want) < LIMIT[case.dtype]
        if case.density == 0 or not bits & STAGED:  # residuals in passes are added in another order
            assert torch.equal(y, former)
