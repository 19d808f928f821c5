"""The kernels compiled for real GPUs without one: no spills, no data moved between lanes, instructions a weight."""

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.blocks import operands  # noqa: E402
from requant_kernels.decode import decode_kernel  # noqa: E402
from requant_kernels.dense import dequantize_kernel  # noqa: E402
from requant_kernels.tall import multiply_kernel  # noqa: E402
from requant_kernels.trellis import trellis_kernel  # noqa: E402
from requant_kernels.words import trellis_asm  # noqa: E402

from .cases import Case, random_layout  # noqa: E402
from .compile_offline import Machine, compile_kernel  # noqa: E402

SPARSE = ("rows_ptr", "sp_ptr", "si_ptr", "sv_ptr", "sr_ptr")
WEIGHTS = 128  # of a lane in one block


def arguments(
    kind: str, bits: int, dtype: torch.dtype = torch.float16
) -> tuple[dict, dict[str, str], tuple[str, ...]]:
    """Constants, pointer types and absent pointers of a layout, from the launcher's own function."""
    _, constants = operands(
        random_layout(Case(kind=kind, bits=bits, n=16, k=256, m=1), "cpu"), dtype, asm=True
    )
    name = "fp16" if dtype == torch.float16 else "bf16"
    scales = {"s_ptr": "*i32" if kind == "codebook" else "*fp16", "xa_ptr": f"*{name}", "out_ptr": f"*{name}"}
    absent = ("z_ptr",) if kind == "codebook" else ("z_ptr", "levels_ptr")
    return constants, scales, absent


def decode_machine(
    kind: str, bits: int, *, capability: int = 90, unroll: int = 1, dtype: torch.dtype = torch.float16,
    sparse: bool = False, tokens: int = 8,
) -> Machine:  # fmt: skip
    constants, pointers, absent = arguments(kind, bits, dtype)
    constants |= {
        "EVEN": not sparse, "MS": tokens if sparse else 1, "SLOTS": 8, "W": 4, "R": 1, "UNROLL": unroll, "CHUNKS": 4,
        "N": tokens, "PDL": capability >= 90,
    }  # fmt: skip
    absent += ("bias_ptr", "sr_ptr") if sparse else ("bias_ptr", *SPARSE)
    return compile_kernel(
        decode_kernel, constants, capability=capability, dtype="fp16" if dtype == torch.float16 else "bf16",
        pointers=pointers | {"sv_ptr": "*fp16"}, absent=absent, warps=4,
    )  # fmt: skip


CEILING = {
    ("grid", 2): 1.8,
    ("grid", 3): 2.4,
    ("grid", 4): 2.0,
    ("codebook", 2): 2.2,
    ("codebook", 3): 2.4,
    ("codebook", 4): 3.6,
}


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        pytest.param(*key, marks=() if key in (("grid", 2), ("codebook", 3)) else pytest.mark.slow)
        for key in CEILING
    ],
)
def test_decode_instructions_a_weight(kind: str, bits: int) -> None:
    one, two = (decode_machine(kind, bits, unroll=unroll) for unroll in (1, 2))
    assert one.stack == two.stack == 0
    assert one.registers <= 144
    assert (two.instructions - one.instructions) / WEIGHTS < CEILING[kind, bits]
    assert two.opcodes["HMMA"] - one.opcodes["HMMA"] == 16
    assert two.opcodes["BAR"] == one.opcodes["BAR"]  # nothing is exchanged between warps in the loop
    assert two.opcodes["SHFL"] == one.opcodes["SHFL"]  # nor between lanes


@pytest.mark.parametrize(
    ("capability", "kind", "bits", "dtype"),
    [(80, "grid", 3, torch.bfloat16), (89, "codebook", 3, torch.float16), (90, "grid", 8, torch.bfloat16)],
)
def test_decode_compiles_with_residuals(capability: int, kind: str, bits: int, dtype: torch.dtype) -> None:
    assert decode_machine(kind, bits, capability=capability, dtype=dtype, sparse=True).stack == 0


@pytest.mark.parametrize("kind", ["grid", "codebook"])
def test_tall_feeds_the_tensor_cores_from_registers(kind: str) -> None:
    constants, pointers, absent = arguments(kind, 3)
    constants |= {"SPLIT": 2, "STEPS": 16, "W": 8, "N": 64}
    machine = compile_kernel(
        multiply_kernel, constants, capability=90, pointers=pointers, absent=absent, warps=8, stages=3
    )
    assert machine.stack == 0
    assert machine.opcodes["HGMMA"] >= 16
    weights_to_shared = [
        line for line in machine.layout_ir.splitlines() if "local_alloc" in line and "128x32" in line
    ]
    assert not weights_to_shared


def test_dense_compiles() -> None:
    constants, pointers, absent = arguments("codebook", 4)
    constants |= {"SLOTS": 16, "W": 8, "STEPS": 4}
    absent += ("cs_ptr", *SPARSE)
    machine = compile_kernel(
        dequantize_kernel, constants, capability=90, pointers=pointers, absent=absent, warps=8
    )
    assert machine.stack == 0


@pytest.mark.parametrize("code", ["mul1", "pair"])
def test_trellis_compiles(code: str) -> None:
    text, names = trellis_asm(code, 2)
    constants = {
        "ASM": text, "CONSTRAINTS": names, "CODE": code, "BITS": 2, "SCALE": 1.0, "W": 8, "STEPS": 16, "EVEN": True, "N": 8,
    }  # fmt: skip
    pointers = {"words_ptr": "*i32", "y_ptr": "*fp32", "groups": "i32", "rows": "i32"}
    machine = compile_kernel(trellis_kernel, constants, capability=90, pointers=pointers, warps=8)
    assert machine.stack == 0
    assert machine.registers <= 64  # 32 warps a multiprocessor
    assert machine.opcodes["IDP"] == 32  # one byte sum a weight: a lane has 32 in a step
    assert machine.instructions < 420
