"""The kernels between trellis matrices: in an interpreter with their assembly, and compiled for sm_90 without a GPU."""

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from requant_kernels.hadamard.registers import NATURAL, tile_transform  # noqa: E402
from requant_kernels.step.rotated import ASSEMBLY, target_of, tiles_of_block  # noqa: E402
from requant_kernels.step.rotated_gate import GateShape, rotated_gate_kernel  # noqa: E402
from requant_kernels.step.rotated_norm import NormShape, rotated_norm_kernel  # noqa: E402
from requant_kernels.step.rotated_rope import Part, RopeShape, head_order, rotated_rope_kernel  # noqa: E402
from requant_kernels.trellis.operands import ActivationForm, Source  # noqa: E402

from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_beside_the_launches_that_they_replace(interpreted, cases: str) -> None:
    interpreted("emulate_rotated_step.py", cases)


PRODUCTS = dict.fromkeys(
    ("product_ptr", "gate_ptr", "up_ptr", "q_ptr", "k_ptr", "v_ptr", "scales_ptr"), "*fp32"
)
SCALES = dict.fromkeys(
    ("output_scales_ptr", "input_scales_ptr", "gate_scales_ptr", "up_scales_ptr", "q_scales_ptr", "k_scales_ptr",
     "v_scales_ptr"), "*fp16"
)  # fmt: skip
ACTIVATIONS = dict.fromkeys(
    ("x_ptr", "weight_ptr", "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr"),
    "*bf16",
)
NUMBERS = dict.fromkeys(("length", "tokens", "trig_row", "cache_head"), "i32")
ARGUMENTS = PRODUCTS | SCALES | ACTIVATIONS | NUMBERS | {"position_ptr": "*i64", "eps": "fp32"}
ARGUMENTS |= {"plain_ptr": "*bf16", "experts_ptr": "*i32"}


def machine_of(
    kernel: Any, shape: Any, y: str, absent: tuple[str, ...], *, products: str = "*fp32", **constants: Any,
) -> Machine:  # fmt: skip
    return compile_kernel(
        kernel, {"SHAPE": shape, "ASM": ASSEMBLY, "PDL": True, **constants}, capability=90, warps=16,
        pointers=ARGUMENTS | dict.fromkeys(PRODUCTS.keys() - {"scales_ptr"}, products) | {"y_ptr": y}, absent=absent,
        aligned=tuple(NUMBERS),
    )  # fmt: skip


def form_of(kind: str, width: int) -> ActivationForm:
    if kind == "int8":
        return ActivationForm(columns=-(-width // 4096) * 4096, int8=True)
    return ActivationForm(columns=width, permute=kind == "permuted")


def products_of(kind: str) -> str:
    return "*fp16" if kind == "dense" else "*fp32"  # cuBLAS gives the former


def norm(width: int, kind: str, splits: int, *, both: bool = False) -> Machine:
    """`both`: rotated, and as it is before."""
    finish = tile_transform(NATURAL, width & -width)
    target = None if kind == "plain" else target_of(form_of(kind, width), finish.after, width)
    shape = NormShape(
        width=width, num_tiles=-(-width // 4096), crosses=tiles_of_block(width) > 1, finish=finish,
        reads_stream=True, source=Source(splits=splits, row_stride=width), target=target,
    )  # fmt: skip
    y = {"int8": "*i8", "permuted": "*fp16", "dense": "*fp16", "plain": "*bf16"}[kind]
    absent = ("bias_ptr", *(() if kind == "int8" else ("scales_ptr",)))
    absent += ("input_scales_ptr", "y_ptr") if kind == "plain" else () if both else ("plain_ptr",)
    return machine_of(rotated_norm_kernel, shape, y, absent, products=products_of(kind))


def gate(width: int, kind: str, splits: int, *, experts: bool = False) -> Machine:
    finish, tiles = tile_transform(NATURAL, width & -width), tiles_of_block(width)
    source = Source(splits=splits, row_stride=2 * width)
    shape = GateShape(
        width=width, num_tiles=tiles, crosses=tiles > 1, finish=finish, gate=source, up=source,
        target=target_of(form_of(kind, width), finish.after, width),
    )  # fmt: skip
    absent = ("gate_bias_ptr", "up_bias_ptr", *(() if kind == "int8" else ("scales_ptr",)))
    absent += () if experts else ("experts_ptr",)
    y = "*i8" if kind == "int8" else "*fp16"
    return machine_of(
        rotated_gate_kernel,
        shape,
        y,
        absent,
        products=products_of(kind),
        DTYPE=tl.bfloat16,
        ACTIVATION="silu",
    )


def rope(
    widths: tuple[int, int], splits: int, normed: bool, kind: str = "", *, apart: bool = False
) -> Machine:
    source = Source(splits=splits, row_stride=6144)
    q, k = (
        Part(width=w, num_tiles=-(-w // 4096), source=source, finish=tile_transform(head_order(128), w & -w))
        for w in widths
    )
    norms = () if normed else ("q_norm_ptr", "k_norm_ptr")
    absent = ("q_bias_ptr", "k_bias_ptr", "v_bias_ptr", *norms)
    absent += ("sin_ptr",) if apart else ()
    return machine_of(
        rotated_rope_kernel,
        RopeShape(q=q, k=k, v=k, head_dim=128),
        "*bf16",
        absent,
        products=products_of(kind),
    )


CASES = {  # what is compiled, most instructions in all and behind the wait, barriers
    "norm, 8B": (lambda: norm(4096, "int8", 1), 440, 245, 4),
    "norm, 64 tokens": (lambda: norm(4096, "permuted", 4), 480, 285, 2),
    "norm, 4096 tokens": (lambda: norm(4096, "dense", 1), 390, 195, 2),
    "norm, the last one": (lambda: norm(4096, "plain", 1), 290, 155, 2),
    "norm, 3B": (lambda: norm(3072, "int8", 1), 490, 280, 4),
    "norm, 8192 wide": (lambda: norm(8192, "int8", 1), 740, 475, 8),
    "norm, Qwen3-30B-A3B, for its router too": (lambda: norm(2048, "int8", 1, both=True), 560, 320, 5),
    "gate, its experts": (lambda: gate(768, "int8", 1, experts=True), 600, 385, 5),
    "gate, 8B": (lambda: gate(14336, "int8", 1), 590, 385, 5),
    "gate, 64 tokens": (lambda: gate(14336, "permuted", 2), 615, 410, 3),
    "gate, 4096 tokens": (lambda: gate(14336, "dense", 1), 530, 325, 3),
    "gate, 1B": (lambda: gate(8192, "int8", 1), 925, 655, 10),
    "rope, 8B": (lambda: rope((4096, 1024), 1, False), 790, 175, 3),
    "rope, Qwen3-8B": (lambda: rope((4096, 1024), 1, True), 945, 255, 3),
    "rope, 8B, no cache": (lambda: rope((4096, 1024), 1, False, apart=True), 730, 145, 3),
    "rope, 64 tokens": (lambda: rope((4096, 1024), 8, True), 1270, 375, 3),
    "rope, 4096 tokens": (lambda: rope((4096, 1024), 1, False, "dense"), 810, 185, 3),
}


SLOW = (
    "norm, 3B",
    "gate, 64 tokens",
    "rope, 8B",
    "rope, 8B, no cache",
    "rope, 64 tokens",
)  # others are much like them


@counts_instructions
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_everything_stays_in_registers(name: str) -> None:
    compiled, instructions, behind, barriers = CASES[name]
    machine = compiled()
    assert machine.stack == 0 and machine.registers <= 128
    assert machine.instructions <= instructions
    wait = len(machine.codes) - machine.codes[::-1].index(
        "ACQBULK"
    )  # the last: RoPE has one for each of q, k and v
    assert sum(code != "NOP" for code in machine.codes[wait:]) <= behind
    assert machine.opcodes["BAR"] <= barriers
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<\{(.*)\}>", machine.layout_ir))
    used = re.findall(r"elementwise_inline_asm .*mma.* -> tensor<512xf32, (#\w+)>", machine.layout_ir)
    for layout in used:
        assert "sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [16]" in layouts[layout]
    assert sum(machine.shared) <= 48 << 10
