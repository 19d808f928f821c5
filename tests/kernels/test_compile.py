"""The kernels compiled for real GPUs without one: no spills, no data moved between lanes, instructions a weight."""

import json
import math
import re
from itertools import product

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels import byte_sums  # noqa: E402
from requant_kernels.autotune import TRELLIS  # noqa: E402
from requant_kernels.blocks import operands  # noqa: E402
from requant_kernels.byte_sums import byte_sum_kernel, padded_columns  # noqa: E402
from requant_kernels.byte_sums import constants as trellis_constants  # noqa: E402
from requant_kernels.decode import decode_kernel  # noqa: E402
from requant_kernels.dense import dequantize_kernel  # noqa: E402
from requant_kernels.hashes import STORE_FOUR_ASM, STORE_FOUR_CONSTRAINTS, groups_of, values_asm, words_asm  # noqa: E402
from requant_kernels.pieces import reserve_asm  # noqa: E402
from requant_kernels.residuals import finish_kernel  # noqa: E402
from requant_kernels.rooms import room_constants, room_of  # noqa: E402
from requant_kernels.sections import SECTION, section_kernel  # noqa: E402
from requant_kernels.tall import multiply_kernel  # noqa: E402
from requant_kernels.trellis import expand_kernel  # noqa: E402
from requant_kernels.tuning import (  # noqa: E402
    COPIED,
    GATHERED,
    STAGED,
    TABLE,
    TrellisConfig,
    decode_setting,
    distance_of,
    least_warps,
    registers_of,
)
from requant_kernels.tuning import trellis_config as rule_of_trellis  # noqa: E402
from requant_kernels.turns import section_asm  # noqa: E402

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
    config, copied = decode_setting(launch), bool(launch[3] & COPIED)
    case = Case(kind=kind, bits=bits, n=512, k=4096, m=1, density=0.01 * sparse)
    room = room_of(random_layout(case, "cpu"), config, 8, 132, staged=config.staged) if copied else None
    constants |= room_constants(room, config, dtype) | {
        "TAKE": 2 if copied and config.staged else int(copied and config.ahead and tokens == 1),
        "RESERVE": reserve_asm(8) if launch[3] & STAGED and not copied else None,
        "EVEN": not sparse or copied, "MS": tokens if sparse else 1, "SLOTS": 1 if sparse else 0, "W": launch[0],
        "R": launch[1], "UNROLL": 1 if copied else launch[2], "N": max(8, tokens),
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


@pytest.mark.parametrize(
    ("bits", "launch", "sparse", "ceiling"),
    [
        (2, (4, 2, 3, COPIED | STAGED, 128), False, 1.65),
        pytest.param(3, (4, 2, 2, COPIED | STAGED, 128), False, 1.8, marks=pytest.mark.slow),
        pytest.param(2, (4, 1, 3, COPIED, 96), False, 1.85, marks=pytest.mark.slow),
        (3, (4, 1, 3, COPIED | STAGED, 128), True, 2.0),
    ],
)
def test_copied_words_reach_the_lane_that_asked_for_them(
    bits: int, launch: tuple[int, ...], sparse: bool, ceiling: float
) -> None:
    """One layout for requests and reads, a lane's 16 bytes: no lane waits for another."""
    machine = decode_machine("grid", bits, launch=launch, sparse=sparse, tokens=1)
    assert machine.stack == 0
    assert machine.barriers == 0
    assert machine.loop / WEIGHTS / launch[1] < ceiling
    assert sum(machine.shared) <= 48 << 10  # with 1024 of the driver's: more would have to be asked for
    assert machine.opcodes["LDGSTS"] >= bits * launch[1] * launch[2]
    kinds = dict(re.findall(r"^(#\w+) = #ttg.blocked<{(.*)}>$", machine.layout_ir, re.MULTILINE))
    used = re.findall(
        r"(?:cp.async.cg|ld.shared.v4).*?: tensor<32x\d+x\d+x4xi\d+, (#\w+)>", machine.layout_ir
    )
    want = (
        f"sizePerThread = [1, 1, 1, 4], threadsPerWarp = [32, 1, 1, 1], warpsPerCTA = [1, {launch[0]}, 1, 1]"
    )
    assert used and all(kinds[name].startswith(want) for name in used)


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


TRELLIS_CEILING = {  # instructions a weight, in the loop over steps
    ("mul1", 2): 3.2, ("pair", 2): 1.75, ("mul1", 4): 3.4, ("mul1", 2.25): 3.5, ("3inst", 2): 5.5,
}  # fmt: skip


def trellis_machine(
    code: str, bits: float, *, launch: tuple[int, int, int] = (8, 2, 1), tokens: int = 1, capability: int = 90,
    k: int | None = None, fused: bool = False,
) -> Machine:  # fmt: skip
    """`launch`: warps, tiles, units a step; the integers of `k` columns as Triton takes them, or any of whole steps."""
    four = round(4 * bits)
    config = TrellisConfig(warps=launch[0], tiles=launch[1], unroll=launch[2])
    vector = math.gcd(four * groups_of(four) // 4, 4)
    units, integers = launch[0] * launch[2], {}
    if k is not None:  # Triton compiles anew for an integer that is 1 or a multiple of 16
        units = -(-k // (64 * groups_of(four)))
        integers = {"M": tokens, "units": units, "sections": padded_columns(k) // SECTION, "rows": 16}
    kind = (k & -k, "fp16") if fused and k is not None else None
    given = trellis_constants(code, four, vector, config, tokens, units, kind) | {"PDL": capability >= 90}
    given |= {name: 1 for name, value in integers.items() if value == 1}
    pointers = dict.fromkeys(("units", "rows", "sections"), "i32")
    pointers |= {
        "words_ptr": "*i32",
        "y_ptr": "*fp32",
        "x_ptr": "*i8" if given["FIXED"] and not fused else "*fp16",
    }
    return compile_kernel(
        byte_sum_kernel, given, capability=capability, pointers=pointers | {"scales_ptr": "*fp32", "before_ptr": "*fp16"},
        warps=launch[0],
        absent=("scales_ptr",) if fused else ("before_ptr",) if given["FIXED"] else ("scales_ptr", "before_ptr"),
        aligned=tuple(name for name, value in integers.items() if value % 16 == 0),
    )  # fmt: skip


@pytest.mark.parametrize(("code", "bits"), TRELLIS_CEILING)
@pytest.mark.parametrize("shared", [True, False])
def test_trellis_instructions_a_weight(
    code: str, bits: float, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(byte_sums, "MOST_SHARED", 0)
    unroll = 2 if bits == 2 else 1
    machine = trellis_machine(code, bits, launch=(8, 2, unroll))
    assert machine.stack == 0
    assert machine.registers <= 128
    groups = unroll * groups_of(round(4 * bits))  # of a step; 64 weights a lane and group
    assert machine.inner / (64 * groups) < TRELLIS_CEILING[code, bits]
    if code != "3inst":
        assert machine.opcodes["IMMA"] == (16 if code == "mul1" else 8) * groups
        assert machine.opcodes["IDP"] == 0
    if shared:
        assert machine.opcodes["SHFL"] == 2 * groups  # the bits before a part, of each tile
        assert machine.opcodes["BAR"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(
    ("code", "bits"), [("mul1", 2.75), ("mul1", 3.75), ("mul1", 8), ("pair", 4), ("3inst", 2.25)]
)
def test_no_trellis_launch_spills(code: str, bits: float, tokens: int) -> None:
    rule = rule_of_trellis(code, bits, 8192, 8192, tokens, torch.device("cpu"))
    machine = trellis_machine(
        code, bits, launch=(rule.warps, rule.tiles, rule.unroll), tokens=tokens, capability=80
    )
    assert machine.stack == 0


Odd = tuple[
    str, float, int, int, int, tuple[int, int, int] | None
]  # code, bits, n, k, tokens, launch or the rule's
ODD: list[Odd] = [
    ("mul1", 2, 37, 200, 1, None),
    ("mul1", 2.25, 37, 200, 5, None),  # a single unit
    ("mul1", 8, 64, 1408, 16, None),
    ("pair", 2, 8192, 256, 5, None),
    ("pair", 2, 48, 11008, 9, None),
    ("pair", 2, 80, 5120, 5, (16, 2, 4)),
    ("3inst", 3.25, 37, 200, 1, None),
    ("mul1", 2, 8192, 11072, 1, None),
]
EVERY_ODD: list[Odd] = [
    (*kind, *shape, tokens, None)
    for kind in [
        *(("mul1", bits) for bits in (1, 2, 2.25, 2.5, 3.5, 4, 8)),
        *(("pair", bits) for bits in (1, 2, 4, 8)),
        *(("3inst", bits) for bits in (1, 2, 2.25, 3.5, 4, 8)),
    ]
    for shape in ((37, 200), (8192, 11072))
    for tokens in (1, 5, 9, 16)
]
EVERY_ODD += [
    (code, bits, 8192, 11072, tokens, launch)
    for code, bits in (("mul1", 2), ("pair", 2), ("mul1", 4))
    for launch in TRELLIS
    for tokens in (1, 8, 16)
    if launch[1] * tokens <= 32
]


@pytest.mark.parametrize(
    ("code", "bits", "n", "k", "tokens", "launch"),
    [*ODD, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY_ODD if case not in ODD)],
)
def test_trellis_of_columns_that_are_no_whole_steps(
    code: str, bits: float, n: int, k: int, tokens: int, launch: tuple[int, int, int] | None
) -> None:
    rule = rule_of_trellis(code, bits, n, k, tokens, torch.device("cpu"))
    chosen, groups = launch is None, groups_of(round(4 * bits))
    launch = launch or (rule.warps, rule.tiles, rule.unroll)
    assert -(-k // (64 * groups)) % (launch[0] * launch[2])  # some warps' units lie beyond the end
    machine = trellis_machine(code, bits, launch=launch, tokens=tokens, k=k)
    if chosen or tokens == 1:  # what the tuner tries for more tokens may spill; then it is not the fastest
        assert machine.stack <= 16
    assert machine.registers * launch[0] * 32 <= 65536
    assert machine.barriers == 0
    if (code, bits) in TRELLIS_CEILING and tokens == 1 and launch[:2] == (8, 2):
        assert machine.inner / (64 * groups * launch[2]) < TRELLIS_CEILING[code, bits]


@pytest.mark.parametrize("launch", [(16, 1, 8), (8, 1, 3), (8, 7, 1)])
def test_trellis_launches_that_do_not_fit_are_refused(launch: tuple[int, int, int]) -> None:
    why = (
        "no whole part of a section of 4096: fewer warps, or less unroll"
        if launch[1] == 1
        else "14 sums a lane"
    )
    with pytest.raises(ValueError, match=why):
        trellis_machine("mul1", 2, launch=launch)


@pytest.mark.parametrize("units", [{}, {"units": 1}], ids=str)
def test_expansion_compiles(units: dict[str, int]) -> None:
    groups = groups_of(9)
    values = [values_asm("mul1", 9, group) for group in range(groups)]
    load, load_names = words_asm(9, 1, 0)
    constants = {
        "VALUES": tuple(text for text, _ in values), "VALUES_CONSTRAINTS": values[0][1], "LOAD": (load,),
        "LOAD_CONSTRAINTS": load_names, "STORE": STORE_FOUR_ASM, "STORE_CONSTRAINTS": STORE_FOUR_CONSTRAINTS, "COUNT": 9,
        "V": 1, "J": groups, "W": 4, **units,
    }  # fmt: skip
    pointers = {"words_ptr": "*i32", "out_ptr": "*fp16", "units": "i32", "columns": "i32"}
    machine = compile_kernel(expand_kernel, constants, capability=90, pointers=pointers, warps=4)
    assert machine.stack == 0
    assert machine.opcodes["IDP"] == 32 * groups
    assert machine.instructions < 8 * 32 * groups


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_rotation_keeps_256_values_in_a_warp(capability: int, dtype: str) -> None:
    fixed = dtype == "fp16"  # the rotation of activations; the other one is that of outputs
    text, names = section_asm(across=True, fixed=fixed)
    constants = {
        "ASM": text, "CONSTRAINTS": names, "P": 2, "V": 8 if fixed else 4, "MASK": 15, "ROOT": 1.0, "PAIRED": fixed,
        "PARTS": 1, "ARRANGED": False, "OWN": 1, "PDL": capability >= 90,
    }  # fmt: skip
    pointers = {"x_ptr": f"*{dtype}", "y_ptr": "*i8" if fixed else "*fp16", "scales_ptr": "*fp32"}
    pointers |= {"before_ptr": "*fp16", "after_ptr": "*fp16", "width": "i32", "out_width": "i32"}
    absent = ("after_ptr",) if fixed else ("before_ptr", "scales_ptr")
    machine = compile_kernel(
        section_kernel, constants, capability=capability, pointers=pointers, warps=16,
        absent=(*absent, "bias_ptr", "added_ptr"), aligned=("width", "out_width"),
    )  # fmt: skip
    assert machine.stack == 0
    assert machine.instructions < 450
    assert machine.opcodes["BAR"] == (3 if fixed else 1)
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<\{(.*)\}>", machine.layout_ir))
    (used,) = re.findall(r"elementwise_inline_asm .*mma.* -> tensor<\S+, (#\w+)>", machine.layout_ir)
    assert "threadsPerWarp = [32, 1, 1, 1], warpsPerCTA = [1, 16, 1, 1]" in layouts[used]


@pytest.mark.parametrize(
    ("code", "bits", "k", "launch"),
    [("pair", 2, 4096, (16, 2, 1)), ("mul1", 2, 2048, (16, 4, 1)), ("mul1", 4, 256, (16, 1, 2)),
     ("mul1", 2, 4096, (16, 7, 1)), ("pair", 2, 4096, (16, 7, 1))],
)  # fmt: skip
def test_one_token_is_rotated_without_spills(
    code: str, bits: int, k: int, launch: tuple[int, int, int]
) -> None:
    plain = trellis_machine(code, bits, launch=launch, k=k)
    machine = trellis_machine(code, bits, launch=launch, k=k, fused=True)
    assert machine.stack == 0
    assert machine.registers <= 128
    assert machine.opcodes["HMMA"] == 12
    assert machine.opcodes["BAR"] == 4  # three of the rotation
    assert machine.inner <= plain.inner + 16
    assert machine.shared[1] <= (32768 if launch[1] <= 4 else 40960)
