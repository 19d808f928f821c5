"""The decode kernel that gathers activations from shared memory: its PTX on the lanes of a warp, and the kernel compiled."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from requant_kernels import columns, naive, staged
from requant_kernels.layouts import Layout

from .cases import Case, random_layout, relative_error
from .compile_offline import Machine, compile_kernel
from .ptx_model import run_ptx, turned_matrices

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def place_of(column: np.ndarray) -> np.ndarray:
    """Where `staged.py` keeps a column, in columns."""
    return column ^ (column >> 2 & 6)


def own_columns(slab: int) -> np.ndarray:
    """The column whose address a lane gives to STAGE."""
    return 32 * slab + LANE % 8 // 2 * 8 + LANE // 8 * 2 + LANE % 2


def bits_of(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return values.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def stage(shared: np.ndarray, base: int, x: np.ndarray) -> None:
    """All slabs of x [8, k], 16 bits a value, as the warps leave them."""
    for slab in range(x.shape[1] // 32):
        pairs = x[G[:, None], 32 * slab + 8 * T[:, None] + np.arange(8)]  # what a lane loads, 16 bytes
        own = (pairs[:, ::2] | pairs[:, 1::2] << 16).T
        operands = {"$4": (base + 16 * place_of(own_columns(slab))).astype(np.uint32)}
        operands |= {f"${8 + i}": own[i] for i in range(4)}
        run_ptx(columns.STAGE, operands, (32,), outputs=0, shared=shared)


def test_every_column_is_staged_once_without_a_conflict() -> None:
    assert sorted(np.concatenate([own_columns(slab) for slab in range(16)])) == list(range(512))
    assert sorted(place_of(np.arange(512))) == list(range(512))
    for slab in range(8):  # eight neighbours of 16 bytes are all banks
        banks = place_of(own_columns(slab)).reshape(4, 8) % 8
        assert (np.sort(banks, 1) == np.arange(8)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
def test_a_diagonal_gathers_and_adds(int8: bool, dtype: torch.dtype) -> None:
    """Every slot of a tile, by the texts and the indices of `staged._load_chunk` and `_add_chunk`."""
    torch.manual_seed(0)
    case = Case(kind="grid", bits=3, n=40, k=500, m=8, density=0.05, int8_residuals=int8)
    layout, base = random_layout(case, "cpu"), 4096
    assert layout.sparse is not None and layout.rows is not None
    x = torch.zeros(8, 512)
    x[:, :500] = torch.randn(8, 500)
    shared = np.full((base + 512 * 16) // 2, 0x7E00, np.uint16)  # NaN
    stage(shared, base, bits_of(x, dtype))
    assert np.array_equal(
        shared[base // 2 :].reshape(512, 8)[place_of(np.arange(512))].T, bits_of(x, dtype).astype(np.uint16)
    )
    slots = layout.sparse
    every = slots.columns.view(-1).numpy().view(np.uint16).astype(np.int64)
    values = bits_of(slots.values.view(-1).float(), dtype)
    slot_at, value_at = LANE % 16 * 8 + LANE // 16 * 4, G * 8
    text, name = columns.chunk_asm("fp16" if dtype == torch.float16 else "bf16"), "fp16"
    got = torch.zeros(48, 8)
    for tile in range(3):
        sums = [np.zeros(32, np.float32).view(np.uint32) for _ in range(4)]
        for chunk in range(slots.starts[tile], slots.starts[tile + 1]):
            operands: dict[str, Any] = {}
            for i in range(4):
                column = every[chunk * 128 + slot_at + i]
                operands[f"${4 + i}"] = (base + 16 * place_of(column)).astype(np.uint32)
                for part in range(4):  # rows g and g + 8, then slots 4 .. 7 of both
                    value = values[chunk * 128 + part % 2 * 64 + part // 2 * 4 + value_at + i]
                    value = np.where(G // 2 == T, value << (16 * (G % 2)).astype(np.uint32), 0)
                    operands[f"${8 + 4 * part + i}"] = value.astype(np.uint32)
                operands[f"${24 + i}"] = sums[i]
            sums = run_ptx(text, operands, (32,), outputs=4, shared=shared)
        for i in range(4):
            got[16 * tile + G + i // 2 * 8, 2 * T + i % 2] = torch.from_numpy(sums[i].view(np.float32).copy())
    if slots.row_scales is not None:
        got *= slots.row_scales.float()[:, None]
    want = naive.sparse(layout, torch.float64)[layout.rows[:40].long()] @ x.to(dtype).double()[:, :500].T
    assert name and relative_error(got[:40], want) < (1e-3 if dtype == torch.float16 else 6e-3)


def test_turned_matrices_are_those_of_the_instructions() -> None:
    """`ldmatrix.trans` of 8 x 8: lane 4 g + t holds rows 2 t and 2 t + 1 of column g."""
    shared = np.arange(8 * 32, dtype=np.uint16)
    low, high = turned_matrices(shared, (16 * LANE).astype(np.uint32))
    for matrix in range(4):
        assert np.array_equal(shared[low[matrix]], 64 * matrix + 8 * (2 * T) + G)
        assert np.array_equal(shared[high[matrix]], 64 * matrix + 8 * (2 * T + 1) + G)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_products_and_scales_of_a_slab(name: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    weight, x = torch.randn(16, 32).to(dtype), torch.randn(8, 32).to(dtype)
    left, right = bits_of(weight, dtype), bits_of(x, dtype)
    operands: dict[str, Any] = {}
    for j in range(2):
        for i in range(4):  # kh rh
            row, column = G + i % 2 * 8, 8 * T + 4 * j + i // 2 * 2
            operands[f"${4 + 4 * j + i}"] = left[row, column] | left[row, column + 1] << 16
    for i in range(4):  # j kh
        operands[f"${12 + i}"] = right[G, 8 * T + 2 * i] | right[G, 8 * T + 2 * i + 1] << 16
        operands[f"${16 + i}"] = np.full(32, i, np.float32).view(np.uint32)
    part = run_ptx(columns.slab_asm(name), operands, (32,), outputs=4)
    scales = torch.rand(8, 2).half()
    pairs = bits_of(scales, torch.float16)
    operands = {"$8": (pairs[:, 0] | pairs[:, 1] << 16)[G]}
    operands |= {f"${4 + i}": part[i] for i in range(4)}
    operands |= {f"${12 + i}": np.full(32, 1, np.float32).view(np.uint32) for i in range(4)}
    sums = run_ptx(columns.SCALE, operands, (32,), outputs=4)
    want = weight.double() @ x.double().T
    for i in range(4):
        row, token = G + i // 2 * 8, 2 * T + i % 2
        exact = want[row, token] + i
        scaled = exact * scales.double()[G, i // 2] + 1
        assert np.allclose(part[i].view(np.float32), exact, rtol=1e-5, atol=1e-4)
        assert np.allclose(sums[i].view(np.float32), scaled, rtol=1e-5, atol=1e-4)


def staged_machine(
    kind: str, bits: int, *, launch: tuple[int, ...] = (4, 16, 3, 0), dtype: torch.dtype = torch.float16, group: int = 128,
    zeros: bool = False, int8: bool = False, k: int = 8192, bias: bool = False,
) -> Machine:  # fmt: skip
    """`launch`: warps of a tile, of a program, places of the ring, several tiles a program."""
    case = Case(
        kind=kind,
        bits=bits,
        n=16,
        k=max(256, group),
        m=1,
        group_size=group or 256,
        zero_points=zeros,
        density=0.02,
    )
    layout: Layout = random_layout(case, "cpu")
    _, constants = staged.staged_constants(layout, dtype)
    warps, program, unroll, loop = launch
    config = staged.StagedConfig(warps=warps, program=program, unroll=unroll)
    constants |= staged.launch_constants(k, config, loop=bool(loop))
    name = "fp16" if dtype == torch.float16 else "bf16"
    pointers = dict.fromkeys(("xs_ptr", "s_ptr", "z_ptr"), "*i32")
    pointers |= {"sv_ptr": "*i8" if int8 else "*fp16", "sr_ptr": "*fp16", "bias_ptr": f"*{name}"}
    absent = (() if zeros else ("z_ptr",)) + (() if int8 else ("sr_ptr",)) + (() if bias else ("bias_ptr",))
    return compile_kernel(
        staged.staged_kernel, constants, capability=90, dtype=name, pointers=pointers, absent=absent, warps=program,
        max_registers=65536 // (32 * program) if program >= 16 else 128,
    )  # fmt: skip


@pytest.mark.parametrize(("bits", "ceiling"), [(2, 2.0), (3, 2.3), (4, 2.2)])
def test_instructions_a_weight(bits: int, ceiling: float) -> None:
    machine = staged_machine("grid", bits)
    assert machine.stack <= 24
    assert machine.inner / (3 * 128) < ceiling
    assert machine.opcodes["BAR"] == 3  # all columns are there, are no longer needed, all sums are there
    assert machine.opcodes["HMMA"] == 3 * 16 + 8  # and one for every slot of a chunk
    assert machine.opcodes["LDSM"] == 4  # 32 gathered columns each
    assert machine.opcodes["STSM"] == 3 * 2
    assert machine.opcodes["SHFL"] == 0
    assert machine.shared[0] == 8192 * columns.COLUMN_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "group", "zeros", "dtype", "int8", "even"),
    [
        ("grid", 3, 256, True, torch.bfloat16, True, False), ("grid", 8, 128, True, torch.float16, False, True),
        ("grid", 4, 32, True, torch.float16, False, False), ("codebook", 3, 0, False, torch.bfloat16, True, True),
        ("codebook", 4, 0, False, torch.float16, False, False), ("grid", 2, 512, False, torch.float16, False, True),
    ],
)  # fmt: skip
def test_every_format_compiles(
    kind: str, bits: int, group: int, zeros: bool, dtype: torch.dtype, int8: bool, even: bool
) -> None:
    machine = staged_machine(
        kind,
        bits,
        launch=(4, 8, 1, 0),
        dtype=dtype,
        group=group,
        zeros=zeros,
        int8=int8,
        k=8192 if even else 1001,
        bias=True,
    )
    assert machine.registers <= 128
