"""The kernels compiled for real GPUs without one: no spills, no data moved between lanes, instructions per weight."""

import json
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.common.fragment_dequant import dequant_operands  # noqa: E402
from requant_kernels.common.sparse_spmm import spmm_reduce_kernel  # noqa: E402
from requant_kernels.heuristics import TABLE, distance_of, least_warps, registers_of  # noqa: E402
from requant_kernels.launch_config import GATHERED, STAGED, decode_setting  # noqa: E402
from requant_kernels.scalar.dequantize import dequantize_kernel  # noqa: E402
from requant_kernels.scalar.gemm import gemm_kernel  # noqa: E402
from requant_kernels.scalar.gemv import RESERVE_PTX, GemvTiling, gemv_kernel  # noqa: E402

from .cases import Case, random_layout  # noqa: E402
from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402

SPARSE = ("row_perm_ptr", "slice_ptr", "ell_columns_ptr", "ell_values_ptr", "ell_row_scales_ptr")
WEIGHTS = 128  # of a lane in one k_tile


def arguments(
    format: str, bits: int, dtype: torch.dtype = torch.float16
) -> tuple[dict, dict[str, str], tuple[str, ...]]:
    """Constants, pointer types and absent pointers of a layout, from the launcher's own function."""
    layout = random_layout(Case(format=format, bits=bits, n=16, k=256, m=1), "cpu")
    name = "fp16" if dtype == torch.float16 else "bf16"
    pointers = {
        "scales_ptr": "*i32" if format == "codebook" else "*fp16", "xp_ptr": f"*{name}", "out_ptr": f"*{name}",
        "x_sparse_ptr": f"*{name}",
    }  # fmt: skip
    absent = ("zeros_ptr",) if format == "codebook" else ("zeros_ptr", "levels_ptr")
    return {"FORMAT": dequant_operands(layout, dtype, asm=True)[1]}, pointers, absent


def gemv_machine(
    format: str, bits: int, *, capability: int = 90, launch: tuple[int, ...] = (4, 1, 1, 1, 128),
    dtype: torch.dtype = torch.float16, sparse: bool = False, tokens: int = 8,
) -> Machine:  # fmt: skip
    """`launch`: warps, tiles, unroll, activations ahead, most registers."""
    constants, pointers, absent = arguments(format, bits, dtype)
    config = decode_setting(launch)
    constants["TILING"] = GemvTiling(
        warps=launch[0], tiles=launch[1], stages=launch[2], tokens=max(8, tokens), even_k=not sparse,
        sparse_tokens=tokens if sparse else 1, slots=1 if sparse else 0, prefetch=config.ahead and tokens <= 8,
        pdl=capability >= 90, reserve_ptx=RESERVE_PTX.format(bytes=16384) if config.staged else None,
    )  # fmt: skip
    absent += ("bias_ptr", "ell_row_scales_ptr") if sparse else ("bias_ptr", *SPARSE)
    return compile_kernel(
        gemv_kernel, constants, capability=capability, dtype="fp16" if dtype == torch.float16 else "bf16",
        pointers=pointers | {"ell_values_ptr": "*fp16"}, absent=absent, warps=launch[0],
        max_registers=launch[4] or None,
    )  # fmt: skip


CEILING = {  # instructions per weight in the loop
    ("grid", 2): 2.2,
    ("grid", 3): 2.45,
    ("grid", 4): 2.4,
    ("codebook", 2): 2.3,
    ("codebook", 3): 2.6,
    ("codebook", 4): 3.9,
}


@counts_instructions
@pytest.mark.parametrize(
    ("format", "bits"),
    [
        pytest.param(*key, marks=() if key in (("grid", 3), ("codebook", 3)) else pytest.mark.slow)
        for key in CEILING
    ],
)
def test_gemv_instructions_per_weight(format: str, bits: int) -> None:
    machine = gemv_machine(format, bits, launch=(4, 1, 1, 1, 0))
    assert machine.stack == 0
    assert machine.registers <= 160  # 12 warps a multiprocessor
    assert machine.loop / WEIGHTS < CEILING[format, bits]
    assert machine.opcodes["HMMA"] == 16
    assert machine.opcodes["SHFL"] <= 16  # lanes exchange nothing before the last sum


@pytest.mark.parametrize("tokens", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_residuals_are_taken_without_waiting_for_other_warps(tokens: int) -> None:
    """Slots, gathers and sums have one layout: nothing goes through shared memory beside the blocks."""
    machine = gemv_machine(
        "grid", 3, launch=(4, 1, *map(int, distance_of("grid+s", 3, tokens)), 128), sparse=True, tokens=tokens
    )
    assert machine.stack <= 16
    assert machine.barriers == 0


def test_staged_residuals_wait_for_no_warp_in_the_loop() -> None:
    machine = gemv_machine("grid", 3, launch=(4, 1, 3, STAGED, 128), sparse=True, tokens=1)
    assert machine.stack == 0
    assert machine.barriers == 0
    assert machine.opcodes["LDGSTS"] > 0


def chosen_launches() -> list[tuple[str, int, tuple[int, ...], bool, int]]:
    """Every launch of `gemv_kernel` that the table or the rule can choose, up to 4 bits."""
    found = set()
    for format, bits, warps, sparse, tokens in product(
        ("grid", "codebook"), (2, 3, 4), (1, 2, 4, 8, 16), (False, True), (1, 8, 16)
    ):
        registers = registers_of(format, bits, tokens)
        name = format + "+s" * sparse
        if (warps < 16 or registers) and warps >= least_warps(name, tokens):
            distance = map(int, distance_of(name, bits, tokens))
            found.add((format, bits, (warps, 1, *distance, registers), sparse, tokens))
    for table in json.loads(TABLE.read_text()).values():
        for name, setting in table.items():
            kernel, format, bits, _, tokens = name.split()
            if kernel == "decode" and int(bits) <= 4 and not setting[3] & GATHERED:
                own, _, sparse = format.partition("+")
                found.add((own, int(bits), tuple(setting), bool(sparse), int(tokens)))
    return sorted(found)


FAST = {
    ("grid", 3, (4, 1, 4, STAGED, 128), True, 1),
    ("grid", 3, (8, 1, 3, 0, 128), True, 8),
    ("grid", 3, (4, 1, 1, 1, 128), False, 1),
}


@pytest.mark.parametrize(
    ("format", "bits", "launch", "sparse", "tokens"),
    [pytest.param(*c, marks=() if c in FAST else pytest.mark.slow) for c in chosen_launches()],
)
def test_no_launch_spills(format: str, bits: int, launch: tuple[int, ...], sparse: bool, tokens: int) -> None:
    machine = gemv_machine(format, bits, launch=launch, sparse=sparse, tokens=tokens)
    assert (
        machine.stack <= 24
    )  # six registers, outside of the loop: measured the fastest all the same (8 warps, residuals)
    assert machine.registers * launch[0] * 32 <= 65536


@pytest.mark.parametrize(
    ("capability", "format", "bits", "dtype"),
    [(80, "grid", 3, torch.bfloat16), (89, "codebook", 3, torch.float16), (90, "grid", 8, torch.bfloat16)],
)
def test_gemv_compiles_with_residuals(capability: int, format: str, bits: int, dtype: torch.dtype) -> None:
    launch = (4, 1, 2, 0, registers_of(format, bits, 1))
    machine = gemv_machine(format, bits, capability=capability, launch=launch, dtype=dtype, sparse=True)
    assert machine.stack == 0
    name = "fp16" if dtype == torch.float16 else "bf16"
    pointers = {"xt_ptr": f"*{name}", "ell_values_ptr": "*i8", "ell_row_scales_ptr": "*fp16"}
    constants = {"SPLIT_K": 2, "TOKENS": 64}
    machine = compile_kernel(
        spmm_reduce_kernel,
        constants,
        capability=capability,
        dtype=name,
        pointers=pointers,
        absent=("bias_ptr",),
        warps=4,
    )
    assert machine.stack <= 8


@pytest.mark.parametrize("format", ["grid", "codebook"])
def test_gemm_feeds_the_tensor_cores_from_registers(format: str) -> None:
    constants, pointers, absent = arguments(format, 3)
    constants |= {"WARPS": 8, "TOKENS": 64, "PDL": True}
    machine = compile_kernel(
        gemm_kernel, constants, capability=90, pointers=pointers, absent=absent, warps=8, stages=3
    )
    assert machine.stack == 0
    assert machine.opcodes["HGMMA"] >= 16
    weights_to_shared = [
        line for line in machine.layout_ir.splitlines() if "local_alloc" in line and "128x32" in line
    ]
    assert not weights_to_shared


def test_dequantize_compiles() -> None:
    constants, pointers, absent = arguments("codebook", 4)
    constants |= {"SLICES": 16, "WARPS": 8}
    absent += ("column_scales_ptr", *SPARSE)
    machine = compile_kernel(
        dequantize_kernel, constants, capability=90, pointers=pointers, absent=absent, warps=8
    )
    assert machine.stack == 0
