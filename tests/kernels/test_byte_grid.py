"""One token on integer tensor cores, without a GPU: what ptxas makes of it, and what it is offered."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.autotune import DECODE, SPARSE
from requant_kernels.common.occupancy import MULTIPROCESSOR
from requant_kernels.common.packing import GridLayout
from requant_kernels.launch_config import BYTES, DecodeConfig, decode_setting
from requant_kernels.scalar.gemv_int8_mma import byte_grid_kernel, constants, room_of, takes

from .cases import Case, random_layout
from .compile_offline import Machine, compile_kernel

LAUNCHES = sorted({setting for setting in DECODE + SPARSE if setting[3] & BYTES})
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
        max_registers=config.max_registers or room_of(layout, config, 132).registers,
    )


def plain_grid(
    bits: int, k: int = 2048, density: float = 0.0, zeros: bool = False, n: int = 64
) -> GridLayout:
    layout = random_layout(
        Case(format="grid", bits=bits, n=n, k=k, m=1, density=density, zero_points=zeros), "cpu"
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
def test_residuals_are_turns_of_the_ring(bits: int) -> None:
    """A pass is two copies a lane, asked for beside the last words or after them, and multiplied after the last block."""
    setting = (8, 2, 2, BYTES, 0)
    without, machine = (machine_of(setting, plain_grid(bits, density=density)) for density in (0.0, 0.02))
    passes = room_of(plain_grid(bits, density=0.02), decode_setting(setting), 132).passes
    assert machine.stack == 0 and machine.registers <= 128 and passes > 0
    assert machine.products["IMMA"] == 16
    assert (
        machine.products.total() < without.products.total() + 24 * passes + 8
    )  # none of them in a turn of words
    assert machine.opcodes["LDGSTS"] == without.opcodes["LDGSTS"] + 4 * passes
    assert machine.opcodes["CCTL"] == without.opcodes["CCTL"] + 1  # bounds on their way, in no register


def sparse_grid(bits: int, n: int, k: int, chunks: int) -> GridLayout:
    """n rows, `chunks` a tile, of which nothing is ever read."""
    layout = plain_grid(bits, k=k, density=0.01)
    assert layout.sparse is not None
    slots = replace(layout.sparse, columns=layout.packed_codes.new_empty(n // 16 * chunks, 1, 1))
    return replace(layout, packed_codes=layout.packed_codes.new_empty(n // 16, 1), n=n, sparse=slots)


def test_activations_come_twice_where_more_programs_have_room() -> None:
    """28672 x 8192, 3 bits: three programs a multiprocessor, as without residuals, and registers for three."""
    setting = (8, 2, 2, BYTES, 0)
    layout, config = sparse_grid(3, 28672, 8192, 11), decode_setting(setting)
    room, dense = room_of(layout, config, 132), room_of(replace(layout, sparse=None), config, 132)
    assert room.size == dense.size and room.registers == 80
    machine = machine_of(setting, layout)
    assert machine.registers == 80 and machine.stack == 0
    assert 3 * (machine.shared[0] + machine.shared[1]) <= MULTIPROCESSOR
    wide = room_of(sparse_grid(3, 14784, 6144, 8), decode_setting((4, 7, 2, BYTES, 0)), 66)
    assert wide.registers == 255  # two programs of four warps might have one more
    small = room_of(sparse_grid(3, 8192, 8192, 11), config, 132)  # two are all that there are
    assert small.registers is None and small.given_at == dense.size and small.size == dense.size + 2 * 8192


def test_passes_are_what_a_place_holds() -> None:
    """As few turns as most tiles need, and alike: nine eighths of the mean number of chunks, 2 W / R of them a pass."""
    for setting, bits, chunks, passes in (
        ((8, 2, 2), 3, 11, 2), ((4, 7, 2), 2, 11, 7), ((4, 2, 2), 4, 6, 2), ((4, 1, 2), 2, 22, 1), ((16, 1, 2), 4, 3, 1),
    ):  # fmt: skip
        room = room_of(sparse_grid(bits, 8192, 4096, chunks), decode_setting((*setting, BYTES, 0)), 132)
        warps, _, depth = setting
        assert room.passes == passes and passes * 1024 <= room.ring // (depth * warps)


@pytest.mark.parametrize("bits", ONE_FAST)
def test_zero_points_cost_a_conversion(bits: int) -> None:
    """One for 128 weights, and their loads; nothing else is added to the loop."""
    setting = (8, 2, 2, BYTES, 0)
    without, machine = (machine_of(setting, plain_grid(bits, zeros=zeros)) for zeros in (False, True))
    assert machine.stack == 0 and machine.registers <= 128
    assert machine.products.total() < without.products.total() + 0.13 * 256


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
    plain = random_layout(Case(format="grid", bits=3, n=32, k=1024, m=1), "cpu")
    assert takes(x, plain, config)
    assert not takes(x.repeat(2, 1), plain, config)
    assert not takes(x, plain, replace(config, tiles=40))  # more than a program gets
    for case in (
        Case(format="codebook", bits=3, n=32, k=1024, m=1), Case(format="grid", bits=5, n=32, k=1024, m=1),
        Case(format="grid", bits=3, n=32, k=1024, m=1, zero_points=True, group_size=1024),
        Case(format="grid", bits=3, n=32, k=1000, m=1),
        Case(format="grid", bits=3, n=32, k=1024, m=1, density=0.01, int8_residuals=True),
        Case(format="grid", bits=3, n=32, k=1024, m=1, group_size=64),
        Case(format="grid", bits=3, n=32, k=1024, m=1, column_scales=True),
    ):  # fmt: skip
        assert not takes(torch.zeros(1, case.k).half(), random_layout(case, "cpu"), config), case
