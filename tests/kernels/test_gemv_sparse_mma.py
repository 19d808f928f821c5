"""`gemv_sparse_mma` without a GPU: its PTX run for the lanes of a warp, and the machine code that ptxas makes of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from requant_kernels.common.fragment_dequant import scaled_activations
from requant_kernels.fallback import reference
from requant_kernels.launch_tables import TABLE, read_table
from requant_kernels.scalar.gemv_sparse_mma import gemv_sparse_mma_kernel, kernel_config
from requant_kernels.scalar.gemv_sparse_mma_launch import SparseMmaConfig
from requant_kernels.scalar.gemv_sparse_mma_ptx import (
    NO_ENTRY,
    SCALE,
    STORE_X,
    WARP_BYTES,
    X_TILE_BYTES,
    gather_ptx,
    multiply_ptx,
)

from .cases import Case, random_layout, relative_error
from .compile_offline import Machine, compile_kernel, counts_instructions
from .ptx_model import run_block, transposed_matrices

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def bits_of(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return values.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def store_activations(shared: np.ndarray, base: int, x: np.ndarray) -> None:
    """The activations of a k_tile [8, 256], 16 bits each, as a warp stores them."""
    for s in range(8):
        pairs = x[G[:, None], 32 * s + 8 * T[:, None] + np.arange(8)]  # what a lane loads, 16 bytes
        own = (pairs[:, ::2] | pairs[:, 1::2] << 16).T
        operands = {"address0": (base + 512 * s + 16 * LANE).astype(np.uint32)}
        run_block(STORE_X, operands | {f"x{i}": own[i] for i in range(4)}, (32,), shared=shared)


def test_activations_are_stored_by_columns() -> None:
    column = np.arange(256)
    place = column // 32 * 32 + column % 8 // 2 * 8 + column % 32 // 8 * 2 + column % 2
    assert sorted(place) == list(range(256))
    shared = np.zeros(2048, np.uint16)
    x = torch.randn(8, 256)
    store_activations(shared, 0, bits_of(x, torch.float16))
    assert np.array_equal(shared.reshape(256, 8)[place].T, bits_of(x, torch.float16).astype(np.uint16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("density", [0.002, 0.01, 0.05])
def test_residuals_of_a_k_tile_are_added_once(density: float, dtype: torch.dtype) -> None:
    """None, one and two rounds of 32 entries, and k_tiles with more, by the operands of `gemv_sparse_mma._add_residuals`."""
    torch.manual_seed(0)
    case = Case(
        format="grid", bits=3, n=40, k=700, m=8, density=density, int8_residuals=True, column_scales=True
    )
    layout, base = random_layout(case, "cpu"), 4096
    assert layout.sparse is not None and layout.row_perm is not None
    entries, bounds = layout.sparse.coo, layout.sparse.block_ptr
    assert entries is not None and bounds is not None
    x = torch.randn(8, 700)
    divided = torch.zeros(8, 768)
    divided[:, :700] = scaled_activations(x, layout).to(dtype)
    block = gather_ptx("fp16" if dtype == torch.float16 else "bf16")
    memory = entries.numpy().view(np.uint32)
    got, sizes = torch.zeros(48, 8), []
    for tile in range(3):
        sums = [np.zeros(32, np.uint32) for _ in range(4)]
        for k_tile in range(3):
            shared = np.full((base + WARP_BYTES) // 2, 0x7E00, np.uint16)  # NaN
            store_activations(shared, base, bits_of(divided[:, 256 * k_tile : 256 * k_tile + 256], dtype))
            begin, end = (int(edge) for edge in bounds[tile, k_tile : k_tile + 2])
            sizes.append(end - begin)
            at = begin + LANE
            loaded = [
                np.where(at + i < end, memory[np.minimum(at + i, len(memory) - 1)], NO_ENTRY) for i in (0, 32)
            ]
            entry_at = base + X_TILE_BYTES
            once = {
                "x_smem": LANE * 0 + base, "store_at": entry_at + 4 * LANE, "load_at": entry_at + 8 * T,
                "first": loaded[0], "second": loaded[1], "count": LANE * 0 + end - begin, "row": G * (32 * 0x10001),
                "entries": 4 * at,
            }  # fmt: skip
            operands: dict[str, Any] = {f"{name}0": value.astype(np.uint32) for name, value in once.items()}
            operands |= {f"before{i}": sums[i] for i in range(4)}
            sums = run_block(block, operands, (32,), shared=shared, memory=memory)
        for i in range(4):
            got[16 * tile + G + i // 2 * 8, 2 * T + i % 2] = torch.from_numpy(sums[i].view(np.float32).copy())
    want = reference.sparse(layout, torch.float64)[layout.row_perm[:40].long()] @ x.double().T
    assert relative_error(got[:40], want) < (1e-3 if dtype == torch.float16 else 8e-3)
    assert min(sizes) < 32 if density < 0.01 else max(sizes) > 64


def test_transposed_matrices_are_those_of_the_instructions() -> None:
    """`ldmatrix.trans` of 8 x 8: lane 4 g + t holds rows 2 t and 2 t + 1 of column g."""
    shared = np.arange(8 * 32, dtype=np.uint16)
    low, high = transposed_matrices(shared, (16 * LANE).astype(np.uint32))
    for matrix in range(4):
        assert np.array_equal(shared[low[matrix]], 64 * matrix + 8 * (2 * T) + G)
        assert np.array_equal(shared[high[matrix]], 64 * matrix + 8 * (2 * T + 1) + G)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_mma_and_scales_of_32_columns(name: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    weight, x = torch.randn(16, 32).to(dtype), torch.randn(8, 32).to(dtype)
    left, right = bits_of(weight, dtype), bits_of(x, dtype)
    operands: dict[str, Any] = {}
    for j, name_of in enumerate(("even", "odd")):
        for i in range(4):  # kh rh
            row, column = G + i % 2 * 8, 8 * T + 4 * j + i // 2 * 2
            operands[f"{name_of}{i}"] = left[row, column] | left[row, column + 1] << 16
    for i in range(4):  # j kh
        operands[f"x{i}"] = right[G, 8 * T + 2 * i] | right[G, 8 * T + 2 * i + 1] << 16
        operands[f"before{i}"] = np.full(32, i, np.float32).view(np.uint32)
    part = run_block(multiply_ptx(name), operands, (32,))
    scales = torch.rand(8, 2).half()
    pairs = bits_of(scales, torch.float16)
    operands = {"scales0": (pairs[:, 0] | pairs[:, 1] << 16)[G]}
    operands |= {f"part{i}": part[i] for i in range(4)}
    operands |= {f"before{i}": np.full(32, 1, np.float32).view(np.uint32) for i in range(4)}
    sums = run_block(SCALE, operands, (32,))
    want = weight.double() @ x.double().T
    for i in range(4):
        row, token = G + i // 2 * 8, 2 * T + i % 2
        exact = want[row, token] + i
        scaled = exact * scales.double()[G, i // 2] + 1
        assert np.allclose(part[i].view(np.float32), exact, rtol=1e-5, atol=1e-4)
        assert np.allclose(sums[i].view(np.float32), scaled, rtol=1e-5, atol=1e-4)


def machine_of(
    format: str, bits: int, *, launch: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float16, group: int = 128,
    zeros: bool = False, even: bool = True, bias: bool = False, registers: int | None = 128,
) -> Machine:  # fmt: skip
    """`launch`: warps, stages."""
    warps, stages = launch
    k = max(256 * warps, group) if even else max(256 * warps, group) + 256
    case = Case(
        format=format, bits=bits, n=16, k=k, m=1, group_size=group or k, zero_points=zeros, density=0.02
    )
    config = SparseMmaConfig(num_warps=warps, num_stages=stages)
    constants = replace(kernel_config(random_layout(case, "cpu"), dtype, config), pdl=True)
    name = "fp16" if dtype == torch.float16 else "bf16"
    pointers = dict.fromkeys(("scales_ptr", "zeros_ptr", "coo_ptr", "block_ptr", "row_perm_ptr"), "*i32") | {
        "bias_ptr": f"*{name}"
    }
    absent = (() if zeros else ("zeros_ptr",)) + (() if bias else ("bias_ptr",))
    return compile_kernel(
        gemv_sparse_mma_kernel, {"CONFIG": constants}, capability=90,
        dtype=name, pointers=pointers, absent=absent, warps=warps, max_registers=registers,
    )  # fmt: skip


def chosen_launches() -> list[tuple[str, int, tuple[int, int], int | None]]:
    """Of the table: format, bits, warps and stages, registers."""
    return sorted(
        (shape.format.partition("+")[0], int(shape.bits), (config.num_warps, config.num_stages), config.max_registers)
        for rows in read_table(TABLE).values()
        for shape, configs in rows.items()
        for config in configs.values()
        if isinstance(config, SparseMmaConfig)
    )  # fmt: skip


@counts_instructions
@pytest.mark.parametrize(("format", "bits", "launch", "registers"), chosen_launches())
def test_no_launch_spills(format: str, bits: int, launch: tuple[int, int], registers: int | None) -> None:
    assert machine_of(format, bits, launch=launch, registers=registers).stack == 0


@counts_instructions
@pytest.mark.parametrize(
    ("bits", "ceiling"),
    [pytest.param(2, 4.0, marks=pytest.mark.slow), (3, 4.2), pytest.param(4, 4.2, marks=pytest.mark.slow)],
)
def test_instructions_per_weight(bits: int, ceiling: float) -> None:
    """Including 1.2 for the loop over residuals beyond 64 of a k_tile, which is rarely entered."""
    machine = machine_of("grid", bits)
    assert machine.stack <= 24
    assert machine.loop / (3 * 128) < ceiling
    assert machine.barriers == 0
    assert machine.opcodes["STSM"] == 3 * 8
    assert machine.opcodes["LDSM"] == 3 * 3
    assert machine.opcodes["HMMA"] == 3 * (16 + 6)
    assert machine.opcodes["SHFL"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "bits", "group", "zeros", "dtype", "even"),
    [
        ("grid", 3, 256, True, torch.bfloat16, False), ("grid", 8, 128, True, torch.float16, True),
        ("grid", 4, 32, True, torch.float16, False), ("codebook", 3, 0, False, torch.bfloat16, True),
        ("codebook", 4, 0, False, torch.float16, False), ("grid", 2, 512, False, torch.float16, True),
    ],
)  # fmt: skip
def test_every_format_compiles(
    format: str, bits: int, group: int, zeros: bool, dtype: torch.dtype, even: bool
) -> None:
    machine = machine_of(
        format,
        bits,
        launch=(8, 1),
        dtype=dtype,
        group=group,
        zeros=zeros,
        even=even,
        bias=True,
        registers=None,
    )
    assert machine.stack == 0
