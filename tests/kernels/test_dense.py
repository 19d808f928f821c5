"""What is between the products of many tokens: right, in the interpreter, and compiled for sm_90 without spills."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.experts import dense_combine
from requant_kernels.hadamard import warp
from requant_kernels.hadamard.warp_ptx import ASM
from requant_kernels.step import dense_gate, dense_rope
from requant_kernels.step.rotated import ASSEMBLY
from requant_kernels.trellis.operands import ActivationForm, Product, Source

from .compile_offline import Machine, compile_kernel, counts_instructions

FLOAT16 = (
    "gate_ptr", "up_ptr", "gate_scales_ptr", "up_scales_ptr", "input_scales_ptr", "q_ptr", "k_ptr", "v_ptr",
    "q_scales_ptr", "k_scales_ptr", "v_scales_ptr", "y_ptr", "z_ptr", "scales_ptr",
)  # fmt: skip
BFLOAT16 = (
    "x_ptr",
    "cos_ptr",
    "sin_ptr",
    "keys_ptr",
    "values_ptr",
    "q_norm_ptr",
    "k_norm_ptr",
    "weights_ptr",
)
NUMBERS = (
    "tokens", "columns", "x_row", "y_row", "gate_row", "up_row", "length", "per_text", "trig_row", "cache_head", "per_token",
)  # fmt: skip
ARGUMENTS = (
    dict.fromkeys(FLOAT16, "*fp16") | dict.fromkeys(BFLOAT16, "*bf16") | dict.fromkeys(NUMBERS, "i32")
    | {"position_ptr": "*i64", "experts_ptr": "*i16", "rows_ptr": "*i32", "eps": "fp32"}
)  # fmt: skip
BIASES = ("gate_bias_ptr", "up_bias_ptr", "q_bias_ptr", "k_bias_ptr", "v_bias_ptr")


def test_beside_whole_matrices(interpreted) -> None:
    interpreted("emulate_dense.py")


def machine(kernel, *, capability: int = 90, absent: tuple[str, ...] = (), **constants) -> Machine:
    for option in ("num_warps", "num_stages"):
        constants.pop(option, None)
    return compile_kernel(
        kernel, constants, capability=capability, warps=warp.NUM_WARPS, pointers=ARGUMENTS,
        absent=(*absent, *(name for name in BIASES if name in kernel.arg_names)), aligned=NUMBERS,
    )  # fmt: skip


def rotation(width: int) -> Machine:
    return machine(warp.rotate_kernel, **warp.constants_of(width))


def gate(width: int, capability: int = 90, *, experts: bool = False) -> Machine:
    """Of experts, in the form that their products of `pair` read."""
    return machine(
        dense_gate.dense_gate_kernel, capability=capability, **warp.constants_of(width), SCALES=(128.0, 1.0),
        ACTIVATION="silu", OTHER=ASSEMBLY, PAIR=experts, PERMUTE=experts,
        absent=() if experts else ("experts_ptr",),
    )  # fmt: skip


def combine(width: int) -> Machine:
    return machine(
        dense_combine.dense_combine_kernel,
        **warp.constants_of(width),
        SCALE=128.0,
        ADDS=True,
        absent=("biases_ptr",),
    )


def rope(q_width: int, k_width: int, head_dim: int, splits: int = 1) -> Machine:
    row = q_width + 2 * k_width
    sources = tuple((width, Source(splits=splits, row_stride=row)) for width in (q_width, k_width, k_width))
    shape = dense_rope.shape_of(head_dim, sources)
    return machine(dense_rope.dense_rope_kernel, SHAPE=shape, ASM=ASM)


CASES = {  # what is compiled, its values a lane, most instructions for each
    "rotation": (lambda: rotation(4096), 128, 11),
    "rotation, blocks of 512": (lambda: rotation(13824), 16, 16),
    "rotation, blocks of 256": (lambda: rotation(11008), 16, 17),
    "gate, 8B": (lambda: gate(14336), 64, 28),
    "gate, blocks of 4096": (lambda: gate(12288), 128, 29),
    "gate, blocks of 256": (lambda: gate(11008), 16, 44),
    "gate, experts": (lambda: gate(768, experts=True), 16, 55),
    "combine, experts": (lambda: combine(2048), 64, 20),
    "rope, 8B": (lambda: rope(4096, 1024, 128), 192, 20),
    "rope, partial sums": (lambda: rope(4096, 1024, 128, splits=8), 192, 30),
}


@counts_instructions
@pytest.mark.parametrize("name", CASES)
def test_everything_stays_in_registers(name: str) -> None:
    compiled, values, instructions = CASES[name]
    found = compiled()
    assert found.stack == 0 and found.shared[0] == 0
    assert sum(".128" in line for line in found.listing[0] if line.startswith("LDG")) >= values // 8
    assert found.instructions <= instructions * values


@pytest.mark.parametrize("capability", [80, 89])
def test_other_gpus_have_the_instructions(capability: int) -> None:
    found = gate(2048, capability)
    assert found.stack == 0 and found.opcodes["HMMA"] == 96


def product(values: torch.Tensor) -> Product:
    return Product(values=values, output_scales=torch.ones(values.shape[-1]).half(), bias=None)


def test_the_gate_takes_products_of_many_tokens() -> None:
    """No split-K, no rows that do not begin at vectors, and what the GEMM of fewer tokens reads only of many."""
    whole, form = torch.zeros(8, 4096 + 8).half(), ActivationForm(columns=4096)
    good = product(whole[:, :4096])
    assert dense_gate.supports(good, good, form)
    assert not dense_gate.supports(good, good, replace(form, int8=True))
    permuted, many = replace(form, permute=True), product(whole[:1, :4096].expand(dense_gate.MIN_TOKENS, -1))
    assert dense_gate.supports(many, many, permuted) and not dense_gate.supports(good, good, permuted)
    for bad in (whole[:, 1:4097], whole[None, :, :4096].expand(2, -1, -1), whole.float()[:, :4096]):
        assert not dense_gate.supports(good, product(bad), form)


@pytest.mark.parametrize(
    ("m", "widths", "head_dim", "taken"),
    [
        (1025, (4096, 1024, 1024), 128, True),
        (128, (2048, 512, 512), 64, True),
        (127, (4096, 1024, 1024), 128, False),  # `rotated_rope.py`
        (1025, (4096, 256, 256), 128, False),  # blocks of 256
        (1025, (8192, 1024, 1024), 128, False),  # of 8192
        (1025, (4096, 1024, 1024), 32, False),
    ],
)
def test_rope_takes_products_of_many_tokens(
    m: int, widths: tuple[int, ...], head_dim: int, taken: bool
) -> None:
    parts = [product(torch.zeros(1).half().expand(m, width)) for width in widths]
    keys, cos = torch.zeros(1, 1, 1, head_dim).bfloat16(), torch.zeros(m, head_dim).bfloat16()
    assert dense_rope.supports(parts, (None, None), keys, cos) == taken
    assert not dense_rope.supports(parts, (None, None), keys, cos.float())
