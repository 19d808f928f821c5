"""One token on integer tensor cores, without a GPU: what ptxas makes of it, and what it is offered."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.autotune import DECODE
from requant_kernels.byte_grid import byte_grid_kernel, constants, room_of, takes
from requant_kernels.layouts import GridLayout
from requant_kernels.rooms import MULTIPROCESSOR
from requant_kernels.settings import BYTES, DecodeConfig, decode_setting

from .cases import Case, random_layout
from .compile_offline import Machine, compile_kernel

LAUNCHES = [setting for setting in DECODE if setting[3] & BYTES]
FAST = ((4, 2, 2, BYTES, 0), (8, 2, 2, BYTES, 0))
CEILING = {2: 1.1, 3: 1.35, 4: 1.1}  # instructions a weight in the loop, one tile a warp

ONE_FAST = [pytest.param(bits, marks=() if bits == 3 else pytest.mark.slow) for bits in CEILING]


def machine_of(setting: tuple[int, ...], layout: GridLayout) -> Machine:
    absent = (
        ("bias_ptr",) if layout.sparse is not None else ("bias_ptr", "rows_ptr", "sp_ptr", "si_ptr", "sv_ptr")
    )
    absent += ("z_ptr",) if layout.zero_points is None else ()
    config = decode_setting(setting)
    assert takes(torch.zeros(1, layout.k).half(), layout, config)
    return compile_kernel(
        byte_grid_kernel,
        constants(layout, torch.float16, config),
        capability=90,
        pointers={"x_ptr": "*fp16", "s_ptr": "*fp16", "sv_ptr": "*fp16"},
        absent=absent,
        warps=config.warps,
        max_registers=config.max_registers,
    )


def plain_grid(
    bits: int, k: int = 2048, density: float = 0.0, zeros: bool = False, n: int = 64
) -> GridLayout:
    layout = random_layout(
        Case(kind="grid", bits=bits, n=n, k=k, m=1, density=density, zero_points=zeros), "cpu"
    )
    assert isinstance(layout, GridLayout)
    return layout


@pytest.mark.parametrize("bits", CEILING)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=() if s == FAST[1] else pytest.mark.slow) for s in LAUNCHES], ids=str,
)  # fmt: skip
def test_a_byte_is_a_weight(setting: tuple[int, ...], bits: int) -> None:
    warps, tiles = setting[:2]
    layout = plain_grid(bits)
    machine = machine_of(setting, layout)
    assert machine.registers * warps * 32 <= 65536
    assert machine.products["IMMA"] == machine.opcodes["IMMA"] == 8 * tiles
    assert machine.products.total() / (128 * tiles) < CEILING[bits]
    assert not {"BAR", "LDL", "STL"} & machine.products.keys()
    assert machine.stack <= 16  # ptxas spills a few registers outside of the loop
    room = room_of(layout, decode_setting(setting), 132)
    assert room.ring < room.size <= machine.shared[0] < room.size + 1024


@pytest.mark.parametrize("bits", ONE_FAST)
def test_residuals_cost_the_loop_nothing(bits: int) -> None:
    """They are asked for before the first block, a pass at two copies a lane, and multiplied after the last."""
    setting = (8, 2, 2, BYTES, 0)
    without, machine = (machine_of(setting, plain_grid(bits, density=density)) for density in (0.0, 0.02))
    assert machine.stack == 0 and machine.registers <= 128
    assert machine.products["IMMA"] == 16 and machine.products.total() < 1.04 * without.products.total()
    passes = room_of(plain_grid(bits, density=0.02), decode_setting(setting), 132).passes
    assert machine.opcodes["LDGSTS"] == without.opcodes["LDGSTS"] + 2 * passes and passes > 0


@pytest.mark.parametrize("bits", ONE_FAST)
def test_zero_points_cost_a_conversion(bits: int) -> None:
    """One for 128 weights, and their loads; nothing else is added to the loop."""
    setting = (8, 2, 2, BYTES, 0)
    without, machine = (machine_of(setting, plain_grid(bits, zeros=zeros)) for zeros in (False, True))
    assert machine.stack == 0 and machine.registers <= 128
    assert machine.products.total() < without.products.total() + 0.13 * 256


def test_passes_are_what_all_programs_have_room_for() -> None:
    layout = plain_grid(2, k=4096, density=0.01)
    assert layout.sparse is not None
    for programs, most in ((4, 2), (132, 2), (5 * 132, 1), (7 * 132, 2)):
        tall = replace(layout, words=layout.words.new_empty(2 * programs, *layout.words.shape[1:]))
        slots = replace(layout.sparse, columns=layout.words.new_empty(14 * programs, 16, 8))
        room = room_of(replace(tall, sparse=slots), decode_setting((4, 2, 2, BYTES, 0)), 132)
        share = MULTIPROCESSOR // -(-programs // 132) - 1024
        assert room.passes == most and (room.size <= share) == (programs <= 5 * 132)


def test_activations_of_several_blocks_are_on_their_way_at_once() -> None:
    """No branch lies between their loads, which would keep the second behind the first."""
    assert constants(plain_grid(2, k=8192), torch.float16, decode_setting(FAST[1]))["FIXES"] == 4
    one, four = (machine_of(FAST[1], plain_grid(2, k=k)) for k in (2048, 8192))
    assert four.opcodes["LDG"] == one.opcodes["LDG"] + 3 and four.opcodes["BRA"] <= one.opcodes["BRA"]


def test_places_that_no_block_comes_to_are_none() -> None:
    config = decode_setting((8, 2, 3, BYTES, 0))
    rings = [room_of(plain_grid(2, k=k), config, 132).ring for k in (2048, 4096, 8192)]
    assert rings == [8 * 2 * 1280 * places for places in (1, 2, 3)]


def test_only_plain_grids_are_taken() -> None:
    config = DecodeConfig(warps=4, tiles=1, unroll=2)
    x = torch.zeros(1, 1024).half()
    plain = random_layout(Case(kind="grid", bits=3, n=32, k=1024, m=1), "cpu")
    assert takes(x, plain, config)
    assert not takes(x.repeat(2, 1), plain, config)
    assert not takes(x, plain, replace(config, tiles=40))  # more than a program gets
    for case in (
        Case(kind="codebook", bits=3, n=32, k=1024, m=1), Case(kind="grid", bits=5, n=32, k=1024, m=1),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, zero_points=True, group_size=1024),
        Case(kind="grid", bits=3, n=32, k=1000, m=1),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, density=0.01, int8_residuals=True),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, group_size=64),
        Case(kind="grid", bits=3, n=32, k=1024, m=1, column_scales=True),
    ):  # fmt: skip
        assert not takes(torch.zeros(1, case.k).half(), random_layout(case, "cpu"), config), case
