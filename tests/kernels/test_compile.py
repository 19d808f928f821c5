"""The kernels compiled for real GPUs without one: no spills, no data moved between lanes, instructions a weight."""

import json

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.blocks import operands  # noqa: E402
from requant_kernels.decode import decode_kernel  # noqa: E402
from requant_kernels.dense import dequantize_kernel  # noqa: E402
from requant_kernels.hadamard import product_kernel  # noqa: E402
from requant_kernels.residuals import finish_kernel  # noqa: E402
from requant_kernels.tall import multiply_kernel  # noqa: E402
from requant_kernels.trellis import trellis_kernel  # noqa: E402
from requant_kernels.tuning import TABLE, registers_of  # noqa: E402
from requant_kernels.words import BYTE_SUM_OFFSET, trellis_asm  # noqa: E402

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
    kind: str, bits: int, *, capability: int = 90, launch: tuple[int, ...] = (4, 1, 1, 1, 128),
    dtype: torch.dtype = torch.float16, sparse: bool = False, tokens: int = 8,
) -> Machine:  # fmt: skip
    """`launch`: warps, tiles, unroll, activations ahead, most registers."""
    constants, pointers, absent = arguments(kind, bits, dtype)
    constants |= {
        "EVEN": not sparse, "MS": tokens if sparse else 1, "SLOTS": 16 if tokens == 1 else 64 // tokens, "W": launch[0],
        "R": launch[1], "UNROLL": launch[2], "N": max(8, tokens), "AHEAD": bool(launch[3]) and tokens <= 8,
        "PDL": capability >= 90,
    }  # fmt: skip
    absent += ("bias_ptr", "sr_ptr") if sparse else ("bias_ptr", *SPARSE)
    return compile_kernel(
        decode_kernel, constants, capability=capability, dtype="fp16" if dtype == torch.float16 else "bf16",
        pointers=pointers | {"sv_ptr": "*fp16"}, absent=absent, warps=launch[0],
        max_registers=launch[4] or None,
    )  # fmt: skip


CEILING = {  # instructions a weight in the loop
    ("grid", 2): 2.2,
    ("grid", 3): 2.85,
    ("grid", 4): 2.5,
    ("codebook", 2): 2.3,
    ("codebook", 3): 2.6,
    ("codebook", 4): 3.9,
}


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        pytest.param(*key, marks=() if key in (("grid", 2), ("codebook", 3)) else pytest.mark.slow)
        for key in CEILING
    ],
)
def test_decode_instructions_a_weight(kind: str, bits: int) -> None:
    machine = decode_machine(kind, bits, launch=(4, 1, 1, 1, 0))
    assert machine.stack == 0
    assert machine.registers <= 144
    assert machine.loop / WEIGHTS < CEILING[kind, bits]
    assert machine.opcodes["HMMA"] == 16
    assert machine.opcodes["SHFL"] <= 16  # lanes exchange nothing before the last sum


def chosen_launches() -> list[tuple[str, int, tuple[int, ...], bool, int]]:
    """Every launch of the decode kernel that the table or the rule can choose, up to 4 bits."""
    found = {
        (kind, bits, (warps, 1, 1, 1, registers_of(kind + "+s" * sparse, bits, tokens)), sparse, tokens)
        for kind in ("grid", "codebook")
        for bits in (2, 3, 4)
        for warps in (4, 8, 16)
        for sparse in (False, True)
        for tokens in (1, 8, 16)
        if warps < 16 or registers_of(kind + "+s" * sparse, bits, tokens)
    }
    for table in json.loads(TABLE.read_text()).values():
        for name, setting in table.items():
            kernel, kind, bits, _, tokens = name.split()
            if kernel == "decode" and int(bits) <= 4:
                own, _, sparse = kind.partition("+")
                found.add((own, int(bits), tuple(setting), bool(sparse), int(tokens)))
    return sorted(found)


FAST = {("codebook", 4, (8, 1, 1, 1, 0), True, 8), ("grid", 3, (4, 1, 1, 1, 0), True, 1)}


@pytest.mark.parametrize(
    ("kind", "bits", "launch", "sparse", "tokens"),
    [pytest.param(*c, marks=() if c in FAST else pytest.mark.slow) for c in chosen_launches()],
)
def test_no_launch_spills(kind: str, bits: int, launch: tuple[int, ...], sparse: bool, tokens: int) -> None:
    machine = decode_machine(kind, bits, launch=launch, sparse=sparse, tokens=tokens)
    assert machine.stack <= 16  # four registers, outside of the loop: cheaper than fewer warps
    assert machine.registers * launch[0] * 32 <= 65536


@pytest.mark.parametrize(
    ("capability", "kind", "bits", "dtype"),
    [(80, "grid", 3, torch.bfloat16), (89, "codebook", 3, torch.float16), (90, "grid", 8, torch.bfloat16)],
)
def test_decode_compiles_with_residuals(capability: int, kind: str, bits: int, dtype: torch.dtype) -> None:
    launch = (4, 1, 1, 1, registers_of(f"{kind}+s", bits, 1))
    machine = decode_machine(kind, bits, capability=capability, launch=launch, dtype=dtype, sparse=True)
    assert machine.stack == 0
    name = "fp16" if dtype == torch.float16 else "bf16"
    pointers = {"xt_ptr": f"*{name}", "sv_ptr": "*i8", "sr_ptr": "*fp16"}
    constants = {"SPLIT": 2, "N": 64}
    machine = compile_kernel(
        finish_kernel,
        constants,
        capability=capability,
        dtype=name,
        pointers=pointers,
        absent=("bias_ptr",),
        warps=4,
    )
    assert machine.stack <= 8


@pytest.mark.parametrize("kind", ["grid", "codebook"])
def test_tall_feeds_the_tensor_cores_from_registers(kind: str) -> None:
    constants, pointers, absent = arguments(kind, 3)
    constants |= {"W": 8, "N": 64, "PDL": True}
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
    constants |= {"SLOTS": 16, "W": 8}
    absent += ("cs_ptr", *SPARSE)
    machine = compile_kernel(
        dequantize_kernel, constants, capability=90, pointers=pointers, absent=absent, warps=8
    )
    assert machine.stack == 0


TRELLIS_CEILING = {"mul1": 6.0, "pair": 4.6, "3inst": 7.0}  # instructions a weight


@pytest.mark.parametrize("code", TRELLIS_CEILING)
def test_trellis_instructions_a_weight(code: str) -> None:
    text, names = trellis_asm(code, 2)
    constants = {
        "ASM": text, "CONSTRAINTS": names, "CODE": code, "BITS": 2, "SCALE": 1.0, "OFFSET": BYTE_SUM_OFFSET, "W": 8,
        "EVEN": True, "N": 8, "P": 4, "PDL": True,
    }  # fmt: skip
    pointers = dict.fromkeys(("groups", "rows", "parts"), "i32") | {
        "words_ptr": "*i32", "y_ptr": "*fp32", "sums_ptr": "*fp32",
    }  # fmt: skip
    machine = compile_kernel(trellis_kernel, constants, capability=90, pointers=pointers, warps=8)
    assert machine.stack == 0
    assert machine.registers <= 80  # 24 warps a multiprocessor
    weights = 64  # of a lane in one round of two groups
    assert machine.loop / weights < TRELLIS_CEILING[code]
    if code != "3inst":
        assert machine.opcodes["IDP"] == weights  # one byte sum a weight


@pytest.mark.parametrize("capability", [80, 90])
def test_rotation_compiles(capability: int) -> None:
    constants = {"S1": 64, "S2": 128, "ROOT": 1.0, "PDL": capability >= 90}
    pointers = {"x_ptr": "*fp16", "before_ptr": "*fp16", "y_ptr": "*fp16", "sums_ptr": "*fp32"}
    pointers |= {"width": "i32", "out_width": "i32"}
    machine = compile_kernel(
        product_kernel, constants, capability=capability, pointers=pointers,
        absent=("after_ptr", "bias_ptr", "added_ptr"), warps=8,
    )  # fmt: skip
    assert machine.stack == 0
