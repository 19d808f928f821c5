"""The kernels compiled for real GPUs without one: no spills, no data moved between lanes, instructions per weight."""

from dataclasses import replace
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.common.fragment_dequant import dequant_operands  # noqa: E402
from requant_kernels.common.sparse_spmm import spmm_reduce_kernel  # noqa: E402
from requant_kernels.launch_config import Shape  # noqa: E402
from requant_kernels.launch_tables import TABLE, read_table  # noqa: E402
from requant_kernels.scalar.dequantize import dequantize_kernel  # noqa: E402
from requant_kernels.scalar.gemm import gemm_kernel  # noqa: E402
from requant_kernels.scalar.gemv import RESERVE_PTX, GemvTiling, gemv_kernel  # noqa: E402
from requant_kernels.scalar.gemv_launch import (  # noqa: E402
    GemvConfig,
    gemv_least_warps,
    gemv_registers,
    gemv_stages,
)

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
    format: str, bits: int, config: GemvConfig, *, capability: int = 90, dtype: torch.dtype = torch.float16,
    sparse: bool = False, tokens: int = 8,
) -> Machine:  # fmt: skip
    constants, pointers, absent = arguments(format, bits, dtype)
    constants["TILING"] = GemvTiling(
        warps=config.num_warps, tiles=config.tiles_per_cta, stages=config.num_stages, tokens=max(8, tokens),
        even_k=not sparse,
        sparse_tokens=tokens if sparse else 1, slots=1 if sparse else 0, prefetch=config.prefetch and tokens <= 8,
        pdl=capability >= 90, reserve_ptx=RESERVE_PTX.format(bytes=16384) if config.stage_activations else None,
    )  # fmt: skip
    absent += ("bias_ptr", "ell_row_scales_ptr") if sparse else ("bias_ptr", *SPARSE)
    return compile_kernel(
        gemv_kernel, constants, capability=capability, dtype="fp16" if dtype == torch.float16 else "bf16",
        pointers=pointers | {"ell_values_ptr": "*fp16"}, absent=absent, warps=config.num_warps,
        max_registers=config.max_registers,
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
    machine = gemv_machine(format, bits, GemvConfig(num_warps=4))
    assert machine.stack == 0
    assert machine.registers <= 160  # 12 warps per SM
    assert machine.loop / WEIGHTS < CEILING[format, bits]
    assert machine.opcodes["HMMA"] == 16
    assert machine.opcodes["SHFL"] <= 16  # lanes exchange nothing before the last sum


@pytest.mark.parametrize("tokens", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_residuals_are_taken_without_waiting_for_other_warps(tokens: int) -> None:
    """Slots, gathers and sums have one layout: nothing goes through shared memory in the loop."""
    stages, prefetch = gemv_stages(Shape("grid+s", 3, 4096, 4096, tokens))
    config = GemvConfig(num_warps=4, num_stages=stages, prefetch=prefetch, max_registers=128)
    machine = gemv_machine("grid", 3, config, sparse=True, tokens=tokens)
    assert machine.stack <= 16
    assert machine.barriers == 0


def test_staged_residuals_wait_for_no_warp_in_the_loop() -> None:
    config = GemvConfig(num_warps=4, num_stages=3, prefetch=False, stage_activations=True, max_registers=128)
    machine = gemv_machine("grid", 3, config, sparse=True, tokens=1)
    assert machine.stack == 0
    assert machine.barriers == 0
    assert machine.opcodes["LDGSTS"] > 0


Launch = tuple[
    str, int, GemvConfig, bool, int
]  # format without residuals, bits, config, residuals or not, tokens


def chosen_launches() -> list[Launch]:
    """Every launch of `gemv.py` that the table or the rule can choose, up to 4 bits."""
    found: dict[Launch, None] = {}
    for format, bits, warps, sparse, tokens in product(
        ("grid", "codebook"), (2, 3, 4), (1, 2, 4, 8, 16), (False, True), (1, 8, 16)
    ):
        shape = Shape(format + "+s" * sparse, bits, 4096, 4096, tokens)
        if (warps < 16 or gemv_registers(shape)) and warps >= gemv_least_warps(shape):
            stages, prefetch = gemv_stages(shape)
            config = GemvConfig(
                num_warps=warps, num_stages=stages, prefetch=prefetch, max_registers=gemv_registers(shape)
            )
            found[format, bits, config, sparse, tokens] = None
    for shape, configs in (pair for rows in read_table(TABLE).values() for pair in rows.items()):
        for config in configs.values():
            if isinstance(config, GemvConfig) and shape.bits <= 4:
                own, _, sparse = shape.format.partition("+")
                same_code = replace(config, max_ctas_per_sm=None)
                found[own, int(shape.bits), same_code, bool(sparse), shape.m_bucket] = None
    return list(found)


def is_fast(format: str, bits: int, config: GemvConfig, sparse: bool, tokens: int) -> bool:
    """One that stands for the others where time is short; those with residuals are in the two tests before."""
    launch = config.num_warps, config.tiles_per_cta, config.num_stages, config.max_registers
    plain = not config.stage_activations and not sparse
    return plain and (format, bits, launch, tokens) == ("grid", 3, (4, 1, 1, 128), 1)


@pytest.mark.parametrize(
    ("format", "bits", "config", "sparse", "tokens"),
    [pytest.param(*c, marks=() if is_fast(*c) else pytest.mark.slow) for c in chosen_launches()],
)
def test_no_launch_spills(format: str, bits: int, config: GemvConfig, sparse: bool, tokens: int) -> None:
    machine = gemv_machine(format, bits, config, sparse=sparse, tokens=tokens)
    # six registers, outside of the loop: measured the fastest all the same (8 warps, residuals)
    assert machine.stack <= 24
    assert machine.registers * config.num_warps * 32 <= 65536


@pytest.mark.parametrize(
    ("capability", "format", "bits", "dtype"),
    [
        (80, "grid", 3, torch.bfloat16),
        (89, "codebook", 3, torch.float16),
        pytest.param(90, "grid", 8, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_gemv_compiles_with_residuals(capability: int, format: str, bits: int, dtype: torch.dtype) -> None:
    registers = gemv_registers(Shape(format, bits, 4096, 4096, 1))
    config = GemvConfig(num_warps=4, num_stages=2, prefetch=False, max_registers=registers)
    machine = gemv_machine(format, bits, config, capability=capability, dtype=dtype, sparse=True)
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
