"""Up to eight tokens of a grid by masks alone, without a GPU: what ptxas makes of it, and what it is offered."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.autotune import OF_HALVES
from requant_kernels.common.packing import GridLayout
from requant_kernels.launch_config import AHEAD, HALVES, TEAM, DecodeConfig, decode_setting
from requant_kernels.scalar.gemv_fp16_mma import constants, half_grid_kernel, ring_bytes, takes
from requant_kernels.scalar.gemv_fp16_mma_ptx import planes_of

from .cases import Case, random_layout
from .compile_offline import Machine, compile_kernel

FAST = (16, 2, 2, HALVES | TEAM, 0)
# instructions a weight in the loop, two tiles a warp, of which one alone copies all tokens; `decode.py` has 2.1 to 2.3
CEILING = {2: 1.6, 3: 1.7, 4: 1.6}


def machine_of(setting: tuple[int, ...], layout: GridLayout, dtype: torch.dtype = torch.float16) -> Machine:
    config = decode_setting(setting)
    assert takes(torch.zeros(8, layout.k).half(), layout, config)
    name = "fp16" if dtype == torch.float16 else "bf16"
    return compile_kernel(
        half_grid_kernel,
        constants(layout, dtype, config),
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
def test_half_a_register_is_a_weight(setting: tuple[int, ...], bits: int) -> None:
    """A mask makes two weights, and nothing else is done to them; the sums of activations serve all tiles of a warp."""
    warps, tiles = setting[:2]
    layout = plain_grid(bits)
    if not takes(torch.zeros(8, layout.k).half(), layout, decode_setting(setting)):
        assert warps * tiles >= 32  # more words than a program has room for
        return
    machine = machine_of(setting, layout)
    assert machine.registers * warps * 32 <= 65536
    assert machine.products["HMMA"] == 16 * tiles + 16
    assert machine.products.total() / (128 * tiles) < CEILING[bits]
    assert machine.products["HFMA2"] == 0 and machine.products["BAR"] <= 1
    assert machine.stack <= 32  # ptxas spills a few registers of the largest
    assert ring_bytes(layout, decode_setting(setting)) <= machine.shared[0]


@pytest.mark.parametrize("bits", CEILING)
def test_bfloat16_and_zero_points_cost_little(bits: int) -> None:
    plain, zeros = plain_grid(bits), plain_grid(bits, zero_points=True)
    machines = [
        machine_of(FAST, layout, dtype)
        for layout, dtype in ((plain, torch.float16), (plain, torch.bfloat16), (zeros, torch.float16))
    ]
    assert all(machine.stack == 0 and machine.registers <= 128 for machine in machines)
    most = machines[0].products.total()
    assert all(machine.products.total() < 1.2 * most for machine in machines)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", CEILING)
def test_fields_are_mantissas(bits: int, dtype: str) -> None:
    """No field reaches the exponent, where a code would not be what it is worth."""
    for plane in planes_of(bits, dtype):
        masks = 0
        for _, _, mask in plane.parts:
            assert masks & mask == 0
            masks |= mask
        assert masks == ((1 << bits) - 1 << plane.at) * 0x10001 and plane.at + bits <= (
            10 if dtype == "fp16" else 7
        )


def test_only_plain_grids_are_taken() -> None:
    config = DecodeConfig(warps=8, tiles=2, unroll=2, teams=2)
    x, plain = torch.zeros(8, 1024).half(), plain_grid(3, k=1024)
    assert takes(x, plain, config) and takes(x[:2], plain, config)
    assert takes(x[:1], plain, config) and not takes(x.repeat(2, 1), plain, config)
    assert not takes(torch.zeros(8, 1028).half()[:, :1024], plain, config)  # rows that 16 bytes do not reach
    for teams in (3, 8):  # tokens in no equal shares, or shares that begin with an odd one
        assert not takes(x, plain, replace(config, warps=24, teams=teams))
    assert not takes(x[:1], plain_grid(3, k=1024, density=0.01), config)  # it would leave the residuals out
    assert not takes(x, plain, replace(config, tiles=16))  # more than a program gets
    for case in (
        Case(format="codebook", bits=3, n=32, k=1024, m=8), Case(format="grid", bits=5, n=32, k=1024, m=8),
        Case(format="grid", bits=3, n=32, k=1000, m=8), Case(format="grid", bits=3, n=32, k=1024, m=8, density=0.01),
        Case(format="grid", bits=3, n=32, k=1024, m=8, group_size=64),
        Case(format="grid", bits=3, n=32, k=1024, m=8, column_scales=True),
    ):  # fmt: skip
        assert not takes(torch.zeros(8, case.k).half(), random_layout(case, "cpu"), config), case
