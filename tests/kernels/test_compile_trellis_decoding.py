"""Trellis codes decoded without a product, whole matrices or looked-up rows: compiled for sm_90, few instructions."""

import math
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from requant_kernels.trellis.dequantize import dequantize_constants, trellis_dequantize_kernel  # noqa: E402
from requant_kernels.trellis.layout import k64_per_unit  # noqa: E402
from requant_kernels.trellis.lookup import BLOCK, band, trellis_lookup_kernel  # noqa: E402

from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402
from .trellis_machines import Parts  # noqa: E402


@counts_instructions
@pytest.mark.parametrize("units", [{}, {"units": 1}], ids=str)
def test_dequantize_compiles(units: dict[str, int]) -> None:
    constants = dequantize_constants("mul1", 9, 1) | units
    pointers = {"codes_ptr": "*i32", "out_ptr": "*i32", "units": "i32", "columns": "i32"}
    machine = compile_kernel(trellis_dequantize_kernel, constants, capability=90, pointers=pointers, warps=1)
    weights = 32 * constants["J"]  # of a lane
    assert machine.stack == 0
    assert machine.opcodes["IDP"] == weights
    assert machine.opcodes["STS"] == 0
    assert machine.instructions < 13 * weights


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [
        pytest.param(*kind, dtype, marks=() if dtype == "fp32" or kind == ("mul1", 2) else pytest.mark.slow)
        for kind in (("mul1", 2), ("pair", 2.25), ("3inst", 3.5), ("mul1", 8))
        for dtype in ("fp32", "bf16")
    ],
)
def test_rows_are_looked_up_without_spills(code: str, bits: float, dtype: str) -> None:
    """float32 to be rotated back, or what the caller asks for."""
    machine = lookup_machine(((code, bits),), dtype)
    assert machine.stack == 0 and machine.registers <= 40
    assert machine.instructions < 380


@counts_instructions
@pytest.mark.parametrize("angles", [False, True], ids=["rows", "start of a step"])
def test_rows_of_bands_are_looked_up_without_spills(angles: bool) -> None:
    machine = lookup_machine(
        (("mul1", 7.5), ("mul1", 6.5), ("mul1", 6), ("mul1", 5.5)), "fp32", angles=angles
    )
    assert machine.stack == 0 and machine.registers <= 40
    assert machine.instructions < (1160 if angles else 1100)


def lookup_machine(bands: Parts, dtype: str, *, angles: bool = False) -> Machine:
    """`angles`: a row of RoPE's tables is copied as well."""
    found = []
    for code, bits in bands:
        quad_bits = round(4 * bits)
        found.append(band(code, quad_bits, math.gcd(quad_bits * k64_per_unit(quad_bits) // 4, 4)))
    types = {"codes_ptrs": "*i32", "output_scales_ptrs": "*fp16", "sizes": "i32", "units": "i32"}
    pointers: dict[str, Any] = {
        name: (kind,) * len(bands) for name, kind in (types | {"columns": "i32"}).items()
    }
    copied = ("cos_table_ptr", "sin_table_ptr", "cos_ptr", "sin_ptr")
    pointers |= {"tokens_ptr": "*i64", "out_ptr": f"*{dtype}", "columns": "i32", "position_ptr": "*i64"}
    pointers |= dict.fromkeys(copied, "*bf16") | {"length": "i32", "head_dim": "i32"}
    return compile_kernel(
        trellis_lookup_kernel,
        {"BANDS": tuple(found), "BLOCK": BLOCK, "D": 128 if angles else 1, "PDL": True}, capability=90, warps=4,
        aligned=("columns",), pointers=pointers,
        absent=() if angles else ("position_ptr", *copied, "length", "head_dim"),
    )  # fmt: skip
