"""Hadamard transforms of many tokens: right, in the interpreter, and compiled for sm_90 without spills."""

import pytest

pytest.importorskip("triton")

import triton.language as tl
from requant_kernels.hadamard.products import NUM_WARPS, VALUES, rotate_kernel, sides
from requant_kernels.step import dense_gate

from .compile_offline import Machine, compile_kernel, counts_instructions

HALF = ("gate_ptr", "up_ptr", "gate_scales_ptr", "up_scales_ptr", "input_scales_ptr", "y_ptr")
NUMBERS = ("tokens", "x_row", "y_row", "gate_row", "up_row")
ARGUMENTS = dict.fromkeys(HALF, "*fp16") | dict.fromkeys(NUMBERS, "i32") | {"x_ptr": "*bf16"}


def test_beside_whole_matrices(interpreted) -> None:
    interpreted("interpret_products.py")


def rotation(block_size: int) -> Machine:
    a, b = sides(block_size)
    constants = {"A": a, "B": b, "L": VALUES // block_size, "FACTOR": block_size**-0.5}
    return compile_kernel(
        rotate_kernel, constants, capability=90, warps=NUM_WARPS, pointers=ARGUMENTS, aligned=NUMBERS
    )


def gate(block_size: int) -> Machine:
    a, b = sides(block_size)
    constants = {
        "A": a, "B": b, "L": dense_gate.VALUES // block_size, "FACTOR": block_size**-0.5, "GATE_SCALE": 128.0,
        "UP_SCALE": 1.0, "DTYPE": tl.bfloat16, "ACTIVATION": "silu",
    }  # fmt: skip
    return compile_kernel(
        dense_gate.dense_gate_kernel, constants, capability=90, warps=dense_gate.NUM_WARPS, pointers=ARGUMENTS,
        absent=("gate_bias_ptr", "up_bias_ptr"), aligned=NUMBERS,
    )  # fmt: skip


CASES = {  # what is compiled, most instructions of a warp and value that it holds
    "rotation, 8B": (lambda: rotation(4096), 16384 / 8, 0.42),
    "rotation, blocks of 256": (lambda: rotation(256), 16384 / 8, 0.42),
    "gate, 8B": (lambda: gate(2048), 4096 / 4, 1.7),
    "gate, blocks of 4096": (lambda: gate(4096), 4096 / 4, 1.9),
}


@counts_instructions
@pytest.mark.parametrize("name", CASES)
def test_everything_stays_in_registers(name: str) -> None:
    compiled, values, instructions = CASES[name]
    machine = compiled()
    assert machine.stack == 0 and machine.registers <= 168
    assert machine.instructions <= instructions * values
