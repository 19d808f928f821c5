"""`gemv_fp16_mma` without a GPU: the machine code that ptxas makes of it, its masks, and what it supports."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.common.launch import aligned
from requant_kernels.common.packing import GridLayout
from requant_kernels.launch_config import Shape
from requant_kernels.scalar.gemv_fp16_mma import (
    fits,
    gemv_fp16_mma_kernel,
    kernel_config,
    smem_bytes,
    supports,
)
from requant_kernels.scalar.gemv_fp16_mma_launch import Fp16MmaConfig, candidates
from requant_kernels.scalar.gemv_fp16_mma_ptx import masked_codes

from .cases import Case, random_layout
from .compile_offline import Machine, compile_kernel, counts_instructions

CPU = torch.device("cpu")
FAST = Fp16MmaConfig(num_warps=16, tiles_per_warp_group=2, num_stages=2, warp_groups=2, prefetch=False)
LAUNCHES = [
    config
    for config in candidates(Shape("grid", 2, 8192, 8192, 8))
    if isinstance(config, Fp16MmaConfig) and not config.prefetch and config.tiles_per_warp_group > 1
]
# instructions per weight in the loop, two tiles per warp; `gemv.py` has 2.1 to 2.3
CEILING = {2: 1.6, 3: 1.7, 4: 1.6}


def machine_of(config: Fp16MmaConfig, layout: GridLayout, dtype: torch.dtype = torch.float16) -> Machine:
    assert supports(layout, 8, CPU) and fits(layout, config, CPU)
    name = "fp16" if dtype == torch.float16 else "bf16"
    return compile_kernel(
        gemv_fp16_mma_kernel,
        {"CONFIG": kernel_config(layout, dtype, config)},
        capability=90,
        dtype=name,
        pointers={"x_ptr": f"*{name}", "scales_ptr": "*fp16"},
        absent=("bias_ptr",) if layout.zero_points is not None else ("bias_ptr", "zeros_ptr"),
        warps=config.num_warps,
    )


def plain_grid(bits: int, **given: object) -> GridLayout:
    layout = random_layout(Case(format="grid", bits=bits, n=64, m=8, **({"k": 2048} | given)), "cpu")  # pyright: ignore[reportArgumentType]
    assert isinstance(layout, GridLayout)
    return layout


@counts_instructions
@pytest.mark.parametrize("bits", CEILING)
@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=() if c == FAST else pytest.mark.slow) for c in LAUNCHES], ids=str
)
def test_one_instruction_makes_two_weights(config: Fp16MmaConfig, bits: int) -> None:
    """Nothing but a mask is done to the weights; the sums of activations are made once for all tiles of a warp."""
    warps, tiles = config.num_warps, config.tiles_per_warp_group
    layout = plain_grid(bits)
    if not fits(layout, config, CPU):
        assert warps * tiles >= 32  # more codes than shared memory holds
        return
    machine = machine_of(config, layout)
    assert machine.registers * warps * 32 <= 65536
    assert machine.mma_loop["HMMA"] == 16 * tiles + 16
    assert machine.mma_loop.total() / (128 * tiles) < CEILING[bits]
    assert machine.mma_loop["HFMA2"] == 0 and machine.mma_loop["BAR"] <= 1
    assert machine.stack <= 32  # ptxas spills a few registers of the largest
    assert smem_bytes(layout, config) <= machine.shared[0]


@counts_instructions
@pytest.mark.parametrize(
    "bits", [pytest.param(bits, marks=() if bits == 3 else pytest.mark.slow) for bits in CEILING]
)
def test_bfloat16_and_zero_points_cost_little(bits: int) -> None:
    plain, zeros = plain_grid(bits), plain_grid(bits, zero_points=True)
    machines = [
        machine_of(FAST, layout, dtype)
        for layout, dtype in ((plain, torch.float16), (plain, torch.bfloat16), (zeros, torch.float16))
    ]
    assert all(machine.stack == 0 and machine.registers <= 128 for machine in machines)
    most = machines[0].mma_loop.total()
    assert all(machine.mma_loop.total() < 1.2 * most for machine in machines)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", CEILING)
def test_fields_stay_within_the_mantissa(bits: int, dtype: str) -> None:
    """A field that reached the exponent would not have the value of its code."""
    for codes in masked_codes(bits, dtype):
        masks = 0
        for _, _, mask in codes.parts:
            assert masks & mask == 0
            masks |= mask
        assert masks == ((1 << bits) - 1 << codes.shift) * 0x10001 and codes.shift + bits <= (
            10 if dtype == "fp16" else 7
        )


def test_supports() -> None:
    config = Fp16MmaConfig(num_warps=8, tiles_per_warp_group=2, num_stages=2, warp_groups=2)
    plain = plain_grid(3, k=1024)
    assert all(supports(plain, m, CPU) == (m <= 8) for m in (1, 2, 8, 9, 16)) and fits(plain, config, CPU)
    for groups in (3, 8):  # unequal shares of the tokens, or shares that begin with an odd one
        assert not fits(plain, replace(config, num_warps=24, warp_groups=groups), CPU)
    assert not fits(
        plain, replace(config, tiles_per_warp_group=16), CPU
    )  # more shared memory than a CTA gets
    for case in (
        Case(format="codebook", bits=3, n=32, k=1024, m=8), Case(format="grid", bits=5, n=32, k=1024, m=8),
        Case(format="grid", bits=3, n=32, k=1000, m=8), Case(format="grid", bits=3, n=32, k=1024, m=8, density=0.01),
        Case(format="grid", bits=3, n=32, k=1024, m=8, group_size=64),
        Case(format="grid", bits=3, n=32, k=1024, m=8, column_scales=True),
    ):  # fmt: skip
        assert not supports(random_layout(case, "cpu"), 1, CPU), case  # it would leave out the residuals


def test_rows_that_are_not_aligned_are_copied() -> None:
    rows = torch.zeros(8, 1028).half()
    assert aligned(rows[:, :1024]).stride(0) == 1024 and aligned(rows[:1, 3:1027]).data_ptr() % 16 == 0
    one, whole = rows[:1, :1024], torch.zeros(8, 1024).half()
    assert aligned(one) is one and aligned(whole) is whole
