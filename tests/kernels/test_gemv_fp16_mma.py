"""`gemv_fp16_mma` without a GPU: the machine code that ptxas makes of it, its masks, and what it supports."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.autotune import OF_HALVES
from requant_kernels.common.packing import GridLayout
from requant_kernels.launch_config import AHEAD, HALVES, TEAM, DecodeConfig, decode_setting
from requant_kernels.scalar.gemv_fp16_mma import (
    gemv_fp16_mma_kernel,
    kernel_config,
    masked_codes,
    smem_bytes,
    supports,
)

from .cases import Case, random_layout
from .compile_offline import Machine, compile_kernel

FAST = (16, 2, 2, HALVES | TEAM, 0)
# instructions per weight in the loop, two tiles per warp; `gemv.py` has 2.1 to 2.3
CEILING = {2: 1.6, 3: 1.7, 4: 1.6}


def machine_of(setting: tuple[int, ...], layout: GridLayout, dtype: torch.dtype = torch.float16) -> Machine:
    config = decode_setting(setting)
    assert supports(torch.zeros(8, layout.k).half(), layout, config)
    name = "fp16" if dtype == torch.float16 else "bf16"
    return compile_kernel(
        gemv_fp16_mma_kernel,
        {"CONFIG": kernel_config(layout, dtype, config)},
        capability=90,
        dtype=name,
        pointers={"x_ptr": f"*{name}", "s_ptr": "*fp16"},
        absent=("bias_ptr",) if layout.zero_points is not None else ("bias_ptr", "z_ptr"),
        warps=config.warps,
        max_registers=config.max_registers,
    )


def plain_grid(bits: int, **given: object) -> GridLayout:
    layout = random_layout(Case(format="grid", bits=bits, n=64, m=8, **({"k": 2048} | given)), "cpu")  # pyright: ignore[reportArgumentType]
    assert isinstance(layout, GridLayout)
    return layout


@pytest.mark.parametrize("bits", CEILING)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=() if s == FAST else pytest.mark.slow) for s in OF_HALVES if not s[3] & AHEAD and s[1] > 1],
    ids=str,
)  # fmt: skip
def test_one_instruction_makes_two_weights(setting: tuple[int, ...], bits: int) -> None:
    """Nothing but a mask is done to the weights; the sums of activations are made once for all tiles of a warp."""
    warps, tiles = setting[:2]
    layout = plain_grid(bits)
    if not supports(torch.zeros(8, layout.k).half(), layout, decode_setting(setting)):
        assert warps * tiles >= 32  # more codes than shared memory holds
        return
    machine = machine_of(setting, layout)
    assert machine.registers * warps * 32 <= 65536
    assert machine.mma_loop["HMMA"] == 16 * tiles + 16
    assert machine.mma_loop.total() / (128 * tiles) < CEILING[bits]
    assert machine.mma_loop["HFMA2"] == 0 and machine.mma_loop["BAR"] <= 1
    assert machine.stack <= 32  # ptxas spills a few registers of the largest
    assert smem_bytes(layout, decode_setting(setting)) <= machine.shared[0]


@pytest.mark.parametrize("bits", CEILING)
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
    config = DecodeConfig(warps=8, tiles=2, unroll=2, teams=2)
    x, plain = torch.zeros(8, 1024).half(), plain_grid(3, k=1024)
    assert supports(x, plain, config) and supports(x[:2], plain, config)
    assert supports(x[:1], plain, config) and not supports(x.repeat(2, 1), plain, config)
    assert not supports(
        torch.zeros(8, 1028).half()[:, :1024], plain, config
    )  # rows that are not 16-byte aligned
    for groups in (3, 8):  # unequal shares of the tokens, or shares that begin with an odd one
        assert not supports(x, plain, replace(config, warps=24, teams=groups))
    assert not supports(
        x[:1], plain_grid(3, k=1024, density=0.01), config
    )  # it would leave out the residuals
    assert not supports(x, plain, replace(config, tiles=16))  # more shared memory than a CTA gets
    for case in (
        Case(format="codebook", bits=3, n=32, k=1024, m=8), Case(format="grid", bits=5, n=32, k=1024, m=8),
        Case(format="grid", bits=3, n=32, k=1000, m=8), Case(format="grid", bits=3, n=32, k=1024, m=8, density=0.01),
        Case(format="grid", bits=3, n=32, k=1024, m=8, group_size=64),
        Case(format="grid", bits=3, n=32, k=1024, m=8, column_scales=True),
    ):  # fmt: skip
        assert not supports(torch.zeros(8, case.k).half(), random_layout(case, "cpu"), config), case
