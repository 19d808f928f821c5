"""`gemv_int8_mma` without a GPU: the machine code that ptxas makes of it, shared memory, and what it supports."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.common.occupancy import SM_SMEM_BYTES
from requant_kernels.common.packing import GridLayout
from requant_kernels.launch_config import Shape
from requant_kernels.scalar.gemv_int8_mma import (
    fits,
    gemv_int8_mma_kernel,
    kernel_config,
    smem_layout,
    supports,
)
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig, candidates

from .cases import Case, random_layout
from .compile_offline import Machine, compile_kernel, counts_instructions

CPU = torch.device("cpu")


def launch(num_warps: int, tiles: int, num_stages: int) -> Int8MmaConfig:
    return Int8MmaConfig(num_warps=num_warps, tiles_per_cta=tiles, num_stages=num_stages)


FAST = launch(8, 2, 2)
LAUNCHES = dict.fromkeys(
    config
    for format in ("grid", "grid+s")
    for config in candidates(Shape(format, 2, 8192, 8192, 1))
    if isinstance(config, Int8MmaConfig)
)
CEILING = {2: 1.1, 3: 1.35, 4: 1.1}  # instructions per weight in the loop

ONE_FAST = [pytest.param(bits, marks=() if bits == 3 else pytest.mark.slow) for bits in CEILING]


SPARSE_POINTERS = {
    "row_perm_ptr": "*i32",
    "slice_ptr": "*i32",
    "ell_columns_ptr": "*i16",
    "ell_values_ptr": "*fp16",
}


def machine_of(config: Int8MmaConfig, layout: GridLayout) -> Machine:
    absent = ["bias_ptr"]
    absent += SPARSE_POINTERS if layout.sparse is None else []
    absent += ["zeros_ptr"] if layout.zero_points is None else []
    assert supports(layout, 1, CPU) and fits(layout, config, CPU)
    return compile_kernel(
        gemv_int8_mma_kernel,
        {"CONFIG": kernel_config(layout, torch.float16, config)},
        capability=90,
        pointers={"x_ptr": "*fp16", "scales_ptr": "*fp16"} | SPARSE_POINTERS,
        absent=tuple(absent),
        warps=config.num_warps,
        max_registers=smem_layout(layout, config, 132).max_registers,
    )


def plain_grid(
    bits: int, k: int = 2048, density: float = 0.0, zeros: bool = False, n: int = 64
) -> GridLayout:
    layout = random_layout(
        Case(format="grid", bits=bits, n=n, k=k, m=1, density=density, zero_points=zeros), "cpu"
    )
    assert isinstance(layout, GridLayout)
    return layout


@counts_instructions
@pytest.mark.parametrize("bits", CEILING)
@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=() if c == FAST else pytest.mark.slow) for c in LAUNCHES], ids=str
)
def test_one_instruction_makes_four_weights(config: Int8MmaConfig, bits: int) -> None:
    warps, tiles = config.num_warps, config.tiles_per_cta
    layout = plain_grid(bits)
    machine = machine_of(config, layout)
    assert machine.registers * warps * 32 <= 65536
    assert machine.mma_loop["IMMA"] == machine.opcodes["IMMA"] == 8 * tiles
    assert machine.mma_loop.total() / (128 * tiles) < CEILING[bits]
    assert not {"BAR", "LDL", "STL"} & machine.mma_loop.keys()
    assert machine.stack <= 16  # ptxas spills a few registers outside of the loop
    smem = smem_layout(layout, config, 132)
    assert smem.pipeline < smem.size <= machine.shared[0] < smem.size + 1024


@counts_instructions
@pytest.mark.parametrize("bits", ONE_FAST)
def test_residuals_use_the_pipeline_stages(bits: int) -> None:
    """A slice is two copies per lane, issued beside or after the last weight tiles, and multiplied after the last one."""
    without, machine = (machine_of(FAST, plain_grid(bits, density=density)) for density in (0.0, 0.02))
    slices = smem_layout(plain_grid(bits, density=0.02), FAST, 132).slices_per_stage
    assert machine.stack == 0 and machine.registers <= 128 and slices > 0
    assert machine.mma_loop["IMMA"] == 16
    assert (
        machine.mma_loop.total() < without.mma_loop.total() + 24 * slices + 8
    )  # nothing in an iteration over weights
    assert machine.opcodes["LDGSTS"] == without.opcodes["LDGSTS"] + 4 * slices
    assert (
        machine.opcodes["CCTL"] == without.opcodes["CCTL"] + 1
    )  # slice bounds are prefetched to L2, not to registers


def sparse_grid(bits: int, n: int, k: int, slices: int) -> GridLayout:
    """n rows, `slices` per tile; the tensors are empty, since only their shapes are read."""
    layout = plain_grid(bits, k=k, density=0.01)
    assert layout.sparse is not None
    ell = replace(layout.sparse, columns=layout.packed_codes.new_empty(n // 16 * slices, 1, 1))
    return replace(layout, packed_codes=layout.packed_codes.new_empty(n // 16, 1), n=n, sparse=ell)


@counts_instructions
def test_activations_are_reloaded_where_one_more_cta_fits() -> None:
    """28672 x 8192, 3 bits: three CTAs per SM, as without residuals, and registers for three."""
    layout, config = sparse_grid(3, 28672, 8192, 11), FAST
    smem, dense = smem_layout(layout, config, 132), smem_layout(replace(layout, sparse=None), config, 132)
    assert smem.size == dense.size and smem.max_registers == 80
    machine = machine_of(config, layout)
    assert machine.registers == 80 and machine.stack == 0
    assert 3 * (machine.shared[0] + machine.shared[1]) <= SM_SMEM_BYTES
    wide = smem_layout(sparse_grid(3, 14784, 6144, 8), launch(4, 7, 2), 66)
    assert wide.max_registers == 255  # two CTAs of four warps could have 256
    small = smem_layout(sparse_grid(3, 8192, 8192, 11), config, 132)  # the grid has only two
    assert (
        small.max_registers is None
        and small.x_copy_offset == dense.size
        and small.size == dense.size + 2 * 8192
    )


def test_slices_per_stage() -> None:
    """The fewest steps that most tiles need, evenly filled: nine eighths of the mean number of slices, 2 W / R per step."""
    for (warps, tiles, stages), bits, slices, per_stage in (
        ((8, 2, 2), 3, 11, 2), ((4, 7, 2), 2, 11, 7), ((4, 2, 2), 4, 6, 2), ((4, 1, 2), 2, 22, 1), ((16, 1, 2), 4, 3, 1),
    ):  # fmt: skip
        smem = smem_layout(sparse_grid(bits, 8192, 4096, slices), launch(warps, tiles, stages), 132)
        assert smem.slices_per_stage == per_stage and per_stage * 1024 <= smem.pipeline // (stages * warps)


@counts_instructions
@pytest.mark.parametrize("bits", ONE_FAST)
def test_zero_points_cost_a_conversion(bits: int) -> None:
    """One per 128 weights, and their loads; nothing else is added to the loop."""
    without, machine = (machine_of(FAST, plain_grid(bits, zeros=zeros)) for zeros in (False, True))
    assert machine.stack == 0 and machine.registers <= 128
    assert machine.mma_loop.total() < without.mma_loop.total() + 0.13 * 256


@counts_instructions
def test_loads_of_several_k_tiles_are_in_flight_together() -> None:
    """No branch between the loads of activations, which would serialize them."""
    assert kernel_config(plain_grid(2, k=8192), torch.float16, FAST).k_tiles_per_step == 4
    one, four = (machine_of(FAST, plain_grid(2, k=k)) for k in (2048, 8192))
    assert four.opcodes["LDG"] == one.opcodes["LDG"] + 3 and four.opcodes["BRA"] <= one.opcodes["BRA"]


def test_stages_that_no_k_tile_reaches_are_not_allocated() -> None:
    config = launch(8, 2, 3)
    buffers = [smem_layout(plain_grid(2, k=k), config, 132).pipeline for k in (2048, 4096, 8192)]
    assert buffers == [8 * 2 * 1280 * stages for stages in (1, 2, 3)]


def test_supports() -> None:
    config = launch(4, 1, 2)
    plain = random_layout(Case(format="grid", bits=3, n=32, k=1024, m=1), "cpu")
    assert isinstance(plain, GridLayout)
    assert supports(plain, 1, CPU) and not supports(plain, 2, CPU)
    assert fits(plain, config, CPU)
    assert not fits(plain, replace(config, tiles_per_cta=40), CPU)  # more shared memory than a CTA gets
    for case in (
        Case(format="codebook", bits=3, n=32, k=1024, m=1), Case(format="grid", bits=5, n=32, k=1024, m=1),
        Case(format="grid", bits=3, n=32, k=1024, m=1, zero_points=True, group_size=1024),
        Case(format="grid", bits=3, n=32, k=1000, m=1),
        Case(format="grid", bits=3, n=32, k=1024, m=1, density=0.01, int8_residuals=True),
        Case(format="grid", bits=3, n=32, k=1024, m=1, group_size=64),
        Case(format="grid", bits=3, n=32, k=1024, m=1, column_scales=True),
    ):  # fmt: skip
        assert not supports(random_layout(case, "cpu"), 1, CPU), case
