"""The kernels compiled for real GPUs without one: no spills, no data moved between lanes, instructions a weight."""

import json
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.common.fragment_dequant import operands  # noqa: E402
from requant_kernels.common.sparse_spmm import finish_kernel  # noqa: E402
from requant_kernels.heuristics import TABLE, distance_of, least_warps, registers_of  # noqa: E402
from requant_kernels.launch_config import GATHERED, STAGED, decode_setting  # noqa: E402
from requant_kernels.scalar.dequantize import dequantize_kernel  # noqa: E402
from requant_kernels.scalar.gemm import multiply_kernel  # noqa: E402
from requant_kernels.scalar.gemm_sm90_ptx import reserve_asm  # noqa: E402
from requant_kernels.scalar.gemv import decode_kernel  # noqa: E402

from .cases import Case, random_layout  # noqa: E402
from .compile_offline import Machine, compile_kernel  # noqa: E402

SPARSE = ("rows_ptr", "sp_ptr", "si_ptr", "sv_ptr", "sr_ptr")
WEIGHTS = 128  # of a lane in one block


def arguments(
    kind: str, bits: int, dtype: torch.dtype = torch.float16
) -> tuple[dict, dict[str, str], tuple[str, ...]]:
    """Constants, pointer types and absent pointers of a layout, from the launcher's own function."""
    _, constants = operands(
        random_layout(Case(format=kind, bits=bits, n=16, k=256, m=1), "cpu"), dtype, asm=True
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
    config = decode_setting(launch)
    constants |= {
        "RESERVE": reserve_asm(8) if config.staged else None, "EVEN": not sparse,
        "MS": tokens if sparse else 1, "SLOTS": 1 if sparse else 0, "W": launch[0],
        "R": launch[1], "UNROLL": launch[2], "N": max(8, tokens),
        "AHEAD": config.ahead and tokens <= 8, "PDL": capability >= 90,
    }  # fmt: skip
    absent += ("bias_ptr", "sr_ptr") if sparse else ("bias_ptr", *SPARSE)
    return compile_kernel(
        decode_kernel, constants, capability=capability, dtype="fp16" if dtype == torch.float16 else "bf16",
        pointers=pointers | {"sv_ptr": "*fp16"}, absent=absent, warps=launch[0],
        max_registers=launch[4] or None,
    )  # fmt: skip


CEILING = {  # instructions a weight in the loop
    ("grid", 2): 2.2,
    ("grid", 3): 2.45,
    ("grid", 4): 2.4,
    ("codebook", 2): 2.3,
    ("codebook", 3): 2.6,
    ("codebook", 4): 3.9,
}


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        pytest.param(*key, marks=() if key in (("grid", 3), ("codebook", 3)) else pytest.mark.slow)
        for key in CEILING
    ],
)
def test_decode_instructions_a_weight(kind: str, bits: int) -> None:
    machine = decode_machine(kind, bits, launch=(4, 1, 1, 1, 0))
    assert machine.stack == 0
    assert machine.registers <= 160  # 12 warps a multiprocessor
    assert machine.loop / WEIGHTS < CEILING[kind, bits]
    assert machine.opcodes["HMMA"] == 16
    assert machine.opcodes["SHFL"] <= 16  # lanes exchange nothing before the last sum


@pytest.mark.parametrize("tokens", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_residuals_are_taken_without_waiting_for_other_warps(tokens: int) -> None:
    """Slots, gathers and sums have one layout: nothing goes through shared memory beside the blocks."""
    machine = decode_machine(
        "grid", 3, launch=(4, 1, *map(int, distance_of("grid+s", 3, tokens)), 128), sparse=True, tokens=tokens
    )
    assert machine.stack <= 16
    assert machine.barriers == 0


def test_staged_residuals_wait_for_no_warp_in_the_loop() -> None:
    machine = decode_machine("grid", 3, launch=(4, 1, 3, STAGED, 128), sparse=True, tokens=1)
    assert machine.stack == 0
    assert machine.barriers == 0
    assert machine.opcodes["LDGSTS"] > 0


def chosen_launches() -> list[tuple[str, int, tuple[int, ...], bool, int]]:
    """Every launch of the decode kernel that the table or the rule can choose, up to 4 bits."""
    found = set()
    for kind, bits, warps, sparse, tokens in product(
        ("grid", "codebook"), (2, 3, 4), (1, 2, 4, 8, 16), (False, True), (1, 8, 16)
    ):
        registers = registers_of(kind, bits, tokens)
        name = kind + "+s" * sparse
        if (warps < 16 or registers) and warps >= least_warps(name, tokens):
            distance = map(int, distance_of(name, bits, tokens))
            found.add((kind, bits, (warps, 1, *distance, registers), sparse, tokens))
    for table in json.loads(TABLE.read_text()).values():
        for name, setting in table.items():
            kernel, kind, bits, _, tokens = name.split()
            if kernel == "decode" and int(bits) <= 4 and not setting[3] & GATHERED:
                own, _, sparse = kind.partition("+")
                found.add((own, int(bits), tuple(setting), bool(sparse), int(tokens)))
    return sorted(found)


FAST = {
    ("grid", 3, (4, 1, 4, STAGED, 128), True, 1),
    ("grid", 3, (8, 1, 3, 0, 128), True, 8),
    ("grid", 3, (4, 1, 1, 1, 128), False, 1),
}


@pytest.mark.parametrize(
    ("kind", "bits", "launch", "sparse", "tokens"),
    [pytest.param(*c, marks=() if c in FAST else pytest.mark.slow) for c in chosen_launches()],
)
def test_no_launch_spills(kind: str, bits: int, launch: tuple[int, ...], sparse: bool, tokens: int) -> None:
    machine = decode_machine(kind, bits, launch=launch, sparse=sparse, tokens=tokens)
    assert (
        machine.stack <= 24
    )  # six registers, outside of the loop: measured the fastest all the same (8 warps, residuals)
    assert machine.registers * launch[0] * 32 <= 65536


@pytest.mark.parametrize(
    ("capability", "kind", "bits", "dtype"),
    [(80, "grid", 3, torch.bfloat16), (89, "codebook", 3, torch.float16), (90, "grid", 8, torch.bfloat16)],
)
def test_decode_compiles_with_residuals(capability: int, kind: str, bits: int, dtype: torch.dtype) -> None:
    launch = (4, 1, 2, 0, registers_of(kind, bits, 1))
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
