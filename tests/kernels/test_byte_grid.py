"""One token on integer tensor cores, without a GPU: what ptxas makes of it, and what it is offered."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.autotune import DECODE
from requant_kernels.byte_grid import byte_grid_kernel, constants, takes
from requant_kernels.layouts import GridLayout
from requant_kernels.tuning import INTEGER, DecodeConfig, decode_setting

from .cases import Case, random_layout
from .compile_offline import compile_kernel

LAUNCHES = [setting for setting in DECODE if setting[3] & INTEGER]
CEILING = {2: 1.1, 3: 1.35, 4: 1.1}  # instructions a weight in the loop, one tile a warp


@pytest.mark.parametrize("bits", CEILING)
@pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=() if s in ((4, 2, 2, INTEGER, 0), (8, 1, 2, INTEGER, 64)) else pytest.mark.slow)
                for s in LAUNCHES], ids=str,
)  # fmt: skip
def test_a_byte_is_a_weight(setting: tuple[int, ...], bits: int) -> None:
    warps, tiles = setting[:2]
    layout = random_layout(Case(kind="grid", bits=bits, n=64, k=2048, m=1), "cpu")
    config = decode_setting(setting)
    assert isinstance(layout, GridLayout) and takes(torch.zeros(1, 2048).half(), layout, config)
    machine = compile_kernel(
        byte_grid_kernel, constants(layout, torch.float16, config), capability=90,
        pointers={"x_ptr": "*fp16", "s_ptr": "*fp16"}, absent=("rows_ptr", "bias_ptr"), warps=warps,
        max_registers=setting[4] or None,
    )  # fmt: skip
    assert machine.stack == 0
    assert machine.registers * warps * 32 <= 32768  # two programs at least
    assert machine.barriers == 0
    assert machine.opcodes["IMMA"] == 8 * tiles
    assert machine.loop / (128 * tiles) < CEILING[bits]
    assert sum(machine.shared) <= 48 << 10


def test_only_plain_grids_are_taken() -> None:
    config = DecodeConfig(warps=4, tiles=1, unroll=2)
    x = torch.zeros(1, 1024).half()
    plain = random_layout(Case(kind="grid", bits=3, n=32, k=1024, m=1), "cpu")
    assert takes(x, plain, config)
    assert not takes(x.repeat(2, 1), plain, config)
    assert not takes(x, plain, replace(config, unroll=40))  # more than a program gets
    for case in (
        Case(kind="codebook", bits=3, n=32, k=1024, m=1), Case(kind="grid", bits=5, n=32, k=1024, m=1),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, zero_points=True), Case(kind="grid", bits=3, n=32, k=1000, m=1),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, density=0.01),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, group_size=64),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, column_scales=True),
    ):  # fmt: skip
        assert not takes(torch.zeros(1, case.k).half(), random_layout(case, "cpu"), config), case
