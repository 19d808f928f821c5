"""The trellis kernels compiled for real GPUs without one: no spills, instructions a weight."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.common.slots import Slots  # noqa: E402
from requant_kernels.experts.route import gather_kernel, route_kernel  # noqa: E402
from requant_kernels.experts.scale import combine_kernel, gate_kernel  # noqa: E402
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE  # noqa: E402
from requant_kernels.launch_config import Shape, m_bucket  # noqa: E402
from requant_kernels.trellis import gemv_kernel, gemv_launch  # noqa: E402
from requant_kernels.trellis.dequantize import dequantize_constants, trellis_dequantize_kernel  # noqa: E402
from requant_kernels.trellis.gemv_group import group_constants, trellis_gemv_group_kernel  # noqa: E402
from requant_kernels.trellis.gemv_kernel import gemv_constants, trellis_gemv_kernel  # noqa: E402
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig  # noqa: E402
from requant_kernels.trellis.layout import k64_per_unit  # noqa: E402
from requant_kernels.trellis.lookup import BLOCK, band, trellis_lookup_kernel  # noqa: E402

from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402

TRELLIS_CEILING = {  # instructions a weight, in the loop over steps
    ("mul1", 2): 3.2, ("pair", 2): 1.75, ("mul1", 4): 3.4, ("mul1", 2.25): 3.5, ("3inst", 2): 5.5,
}  # fmt: skip


def trellis_machine(
    code: str, bits: float, *, launch: tuple[int, ...] = (8, 2, 1), tokens: int = 1, capability: int = 90,
    k: int | None = None, fused: bool = False, finished: bool = False, slots: Slots | None = None,
) -> Machine:  # fmt: skip
    """`launch`: warps, tiles, units a step; the integers of `k` columns as Triton takes them, or any of whole steps.
    `finished`: with output scales and a bias, for an output that is not rotated. `slots`: of a stack of experts."""
    quad_bits = round(4 * bits)
    config = TrellisGemvConfig(num_warps=launch[0], tiles_per_cta=launch[1], units_per_step=launch[2])
    vector = math.gcd(quad_bits * k64_per_unit(quad_bits) // 4, 4)
    units, integers = launch[0] * launch[2], {}
    if k is not None:  # Triton compiles anew for an integer that is 1 or a multiple of 16
        units = -(-k // (64 * k64_per_unit(quad_bits)))
        integers = {
            "M": tokens,
            "units": units,
            "hadamard_tiles": -(-k // HADAMARD_TILE),
            "rows": 16,
        }
    kind = (k & -k, torch.float16) if fused and k is not None else None
    given = gemv_constants(code, quad_bits, vector, config, tokens, units, kind) | {
        "PDL": capability >= 90,
        "EARLY_TRIGGER": False,
        "SLOTS": slots,
    }
    given |= {name: 1 for name, value in integers.items() if value == 1}
    pointers = dict.fromkeys(("units", "rows", "hadamard_tiles"), "i32")
    pointers |= {
        "codes_ptr": "*i32",
        "y_ptr": "*bf16" if finished else "*fp32",
        "x_ptr": "*i8" if given["SHAPE"].int8 and not fused else "*fp16",
    }
    pointers |= {"scales_ptr": "*fp32", "input_scales_ptr": "*fp16"}
    absent = () if given["SHAPE"].int8 and not fused else ("scales_ptr",)
    absent += () if fused else ("input_scales_ptr",)
    pointers |= {"output_scales_ptr": "*fp16", "bias_ptr": "*bf16", "addend_ptr": "*fp32"}
    pointers |= {"experts_ptr": "*i64", "matrices_ptr": "*i32"}
    absent += () if slots else ("experts_ptr", "matrices_ptr")
    absent += ("addend_ptr",) if finished else ("output_scales_ptr", "bias_ptr", "addend_ptr")
    return compile_kernel(
        trellis_gemv_kernel, given, capability=capability, pointers=pointers, warps=launch[0], absent=absent,
        aligned=tuple(name for name, value in integers.items() if value % 16 == 0),
    )  # fmt: skip


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "shared"),
    [
        pytest.param(*kind, shared, marks=() if shared or kind == ("mul1", 2) else pytest.mark.slow)
        for shared in (True, False)
        for kind in TRELLIS_CEILING
    ],
)
def test_trellis_instructions_a_weight(
    code: str, bits: float, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shared`: our sum over the warps in shared memory; else Triton's."""
    unroll = 2 if bits == 2 else 1
    gemv_constants.cache_clear()
    if not shared:
        monkeypatch.setattr(gemv_kernel, "MAX_SUM_BYTES", 0)
    machine = trellis_machine(code, bits, launch=(8, 2, unroll))
    gemv_constants.cache_clear()
    assert machine.stack == 0
    assert machine.registers <= 128
    k64_count = unroll * k64_per_unit(round(4 * bits))  # of a step; 64 weights a lane and k64
    assert machine.inner / (64 * k64_count) < TRELLIS_CEILING[code, bits]
    if code != "3inst":
        assert machine.opcodes["IMMA"] == (16 if code == "mul1" else 8) * k64_count
        assert machine.opcodes["IDP"] == 0
    if shared:
        assert machine.opcodes["SHFL"] == 2 * k64_count  # the bits before a segment, of each row tile
        assert machine.opcodes["BAR"] <= 2


@counts_instructions
@pytest.mark.parametrize(
    ("code", "tokens"),
    [
        ("mul1", 1),
        ("3inst", 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("pair", 1), ("mul1", 8))),
    ],
)
def test_an_output_that_is_not_rotated_is_finished_without_spills(code: str, tokens: int) -> None:
    plain = trellis_machine(code, 2, tokens=tokens)
    machine = trellis_machine(code, 2, tokens=tokens, finished=True)
    assert machine.stack == 0 and machine.barriers == plain.barriers
    assert machine.inner == plain.inner  # the loop over steps is the same
    assert machine.instructions <= plain.instructions + 120


GATES, DOWNS = (768, 2048, 2), (2048, 768, 1)  # n, k, parts
FAST_EXPERTS = (  # both launches of uneven bits, and a gate that is not fused with the rotation
    (("mul1", 2.25), GATES),
    (("mul1", 2.25), DOWNS),
    (("pair", 2), GATES),
    (("3inst", 2), GATES),
)


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "n", "k", "parts"),
    [
        pytest.param(*kind, *shape, marks=() if (kind, shape) in FAST_EXPERTS else pytest.mark.slow)
        for kind in (("mul1", 2), ("mul1", 2.25), ("mul1", 4), ("pair", 2), ("3inst", 2))
        for shape in (GATES, DOWNS)
    ],
)
def test_experts_add_little_to_the_loop_and_do_not_spill(
    code: str, bits: float, n: int, k: int, parts: int
) -> None:
    """Qwen3-30B-A3B, one token: the launches that `experts/step.py` makes of gates and ups, and of downs."""
    config = gemv_launch.trellis_slots(Shape(code, bits, n, k, 1), 8 * parts, torch.device("cpu"))
    fused = config.num_warps == 16
    assert fused == (parts == 2 and code != "3inst" and bits <= 3)
    launch = config.num_warps, config.tiles_per_cta, config.units_per_step
    plain = trellis_machine(code, bits, launch=launch, k=k, fused=fused)
    slots = Slots(parts=parts, experts=128, per_token=8 if parts == 2 else 1)
    machine = trellis_machine(code, bits, launch=launch, k=k, fused=fused, slots=slots)
    assert machine.stack == 0 and machine.registers <= 65536 // (32 * max(config.num_warps, 8))
    assert machine.inner <= 1.1 * plain.inner and machine.opcodes["IMMA"] == plain.opcodes["IMMA"]
    assert machine.instructions <= plain.instructions + 150


@counts_instructions
@pytest.mark.parametrize("kernel", [gate_kernel, combine_kernel], ids=lambda kernel: kernel.__name__)
def test_what_follows_the_experts_products_is_small(kernel) -> None:
    constants = {"BLOCK": 256, "PDL": True}
    constants |= {"NUM_EXPERTS": 128, "SILU": True} if kernel is gate_kernel else {"PER_TOKEN": 8}
    pointers = {"z_ptr": "*fp32", "scales_ptr": "*fp16", "experts_ptr": "*i64", "weights_ptr": "*bf16"}
    pointers |= {"h_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    pointers |= {"rows_ptr": "*i32"}
    absent: list[tuple[str, ...]] = [("biases_ptr", "rows_ptr")]
    if prompts := kernel is combine_kernel:
        absent.append(("biases_ptr",))
    for own in absent:
        machine = compile_kernel(kernel, constants, capability=90, pointers=pointers, warps=4, absent=own)
        assert machine.stack == 0 and machine.instructions < 500 + 100 * prompts


@counts_instructions
@pytest.mark.parametrize("per_group", [pytest.param(32, marks=pytest.mark.slow), 256])
def test_what_precedes_the_experts_products_of_prompts_is_small(per_group: int) -> None:
    """128 experts, 8 a token."""
    constants = {"PER_TOKEN": 8, "EXPERTS": 128, "PADDED": 128, "N": per_group, "BLOCK": 1024, "GROUPS": 32}
    integers = dict.fromkeys(("order_ptr",), "*i64") | dict.fromkeys(("slots", "groups", "k"), "i32")
    pointers: dict[str, Any] = integers | dict.fromkeys(
        ("ends_ptr", "tokens_ptr", "rows_ptr", "groups_ptr"), "*i32"
    )
    machine = compile_kernel(route_kernel, constants, capability=90, pointers=pointers, warps=4)
    assert machine.stack == 0 and machine.instructions < 2500
    machine = compile_kernel(
        gather_kernel, {"COLUMNS": 2048, "PDL": True}, capability=90, warps=4, aligned=("k",),
        pointers=pointers | {"x_ptr": "*fp16"},
    )  # fmt: skip
    assert machine.stack == 0 and machine.instructions < 150
    assert machine.opcodes["LDG"] == 1 + 2 and machine.opcodes["STG"] == 2  # 16 bytes a thread


@counts_instructions
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize(
    ("code", "bits"),
    [("mul1", 2.75), ("mul1", 3.75), ("mul1", 8), ("pair", 4), ("pair", 2.25), ("3inst", 2.25)],
)
def test_no_trellis_launch_spills(code: str, bits: float, tokens: int) -> None:
    rule = gemv_launch.trellis_gemv(Shape(code, bits, 8192, 8192, tokens), torch.device("cpu"))
    machine = trellis_machine(
        code,
        bits,
        launch=(rule.num_warps, rule.tiles_per_cta, rule.units_per_step),
        tokens=tokens,
        capability=80,
    )
    assert machine.stack == 0


Parts = tuple[tuple[str, float], ...]  # code and bits


def group_machine(
    parts: Parts,
    configs: Sequence[TrellisGemvConfig],
    tokens: int,
    columns: int | None = None,
    *,
    finish: str | None = None,
) -> Machine:
    """Matrices in one launch; `columns` as `k` of `trellis_machine`. `finish`: the type of finished outputs."""
    kinds = []
    for (code, bits), config in zip(parts, configs, strict=True):
        quad_bits = round(4 * bits)
        k64_count = k64_per_unit(quad_bits)
        units = (
            config.num_warps * config.units_per_step if columns is None else -(-columns // (64 * k64_count))
        )
        kinds.append((code, quad_bits, math.gcd(quad_bits * k64_count // 4, 4), config, units))
    given = group_constants(tuple(kinds), tokens) | {"PDL": True, "EARLY_TRIGGER": False}
    if columns is not None:
        given |= {
            name: 1
            for name in ("M", "hadamard_tiles")
            if (tokens if name == "M" else -(-columns // 4096)) == 1
        }
    types = {"x_ptrs": "*i8", "scales_ptrs": "*fp32", "codes_ptrs": "*i32", "y_ptrs": f"*{finish or 'fp32'}"}
    types |= {"tiles": "i32", "columns": "i32"}
    if finish is None:
        given |= dict.fromkeys(("output_scales_ptrs", "rows", "stride_y"))
    else:
        types |= {"output_scales_ptrs": "*fp16", "rows": "i32"}
    pointers: dict[str, Any] = {name: (kind,) * len(parts) for name, kind in types.items()}
    return compile_kernel(
        trellis_gemv_group_kernel, given, capability=90,
        pointers=pointers | {"hadamard_tiles": "i32"}
        | ({} if finish is None else {"stride_y": "i32"}),
        warps=configs[0].num_warps, aligned=() if columns is None else ("columns",),
    )  # fmt: skip


@counts_instructions
@pytest.mark.parametrize(
    ("parts", "tokens"),
    [((("mul1", 1.75), ("mul1", 2), ("mul1", 2.75)), 1),
     pytest.param((("mul1", 2.5), ("mul1", 3), ("mul1", 3.25)), 1, marks=pytest.mark.slow),
     ((("pair", 2), ("mul1", 2.75)), 1),
     ((("mul1", 2), ("mul1", 2.75)), 8),
     pytest.param((("mul1", 1.75), ("mul1", 2), ("mul1", 2.75)), 8, marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_matrices_in_one_launch_keep_their_loops(parts: Parts, tokens: int) -> None:
    configs = [TrellisGemvConfig(num_warps=8, tiles_per_cta=2, units_per_step=1)] * len(parts)
    machine = group_machine(parts, configs, tokens)
    alone = [trellis_machine(*part, launch=(8, 2, 1), tokens=tokens) for part in parts]
    assert machine.stack == 0
    assert machine.registers <= (128 if tokens == 1 else 168)
    wanted = sorted(loop for own in alone for loop in own.mma_loops)
    assert len(machine.mma_loops) == len(wanted) == len(parts)
    for got, want in zip(machine.mma_loops, wanted, strict=True):
        assert got <= want + 16


@counts_instructions
@pytest.mark.parametrize(
    ("parts", "sizes", "tokens"),
    [pytest.param(*launch, tokens, marks=() if tokens == fast else pytest.mark.slow)
     for *launch, fast in (
         ((("mul1", 1.25), ("mul1", 1.75), ("mul1", 2.25)), (4096, 1024, 1024), 1),
         ((("pair", 1.75), ("pair", 2), ("pair", 2.5)), (4096, 1024, 1024), 1),
         ((("mul1", 2.5), ("mul1", 3.25), ("mul1", 3.5)), (4096, 1024, 1024), 8),
         ((("mul1", 4), ("mul1", 4.75)), (5120, 1024), 16),
         ((("mul1", 3), ("mul1", 2.75)), (14336, 14336), 16))
     for tokens in (1, 8, 16)],
    ids=str,
)  # fmt: skip
def test_launches_of_several_matrices_spill_little(parts: Parts, sizes: tuple[int, ...], tokens: int) -> None:
    shapes = [Shape(code, bits, n, 4096, tokens) for (code, bits), n in zip(parts, sizes, strict=True)]
    machine = group_machine(parts, gemv_launch.trellis_group(shapes, torch.device("cpu")), tokens, 4096)
    assert machine.stack <= 32  # a few registers of one token: the fastest launches spill so much


@counts_instructions
@pytest.mark.parametrize(
    ("bits", "tokens"), [((5, 4, 3.5, 3), 8), ((7.5, 6.5, 6, 5.5), 1), ((7.5, 6.5, 6, 5.5), 16)], ids=str
)
def test_bands_of_a_head_spill_nothing(bits: tuple[float, ...], tokens: int) -> None:
    """Up to 4 bits a CTA has two tiles, but where a band has more."""
    shapes = [
        Shape("mul1", own, n, 4096, tokens) for own, n in zip(bits, (16032, 16032, 32064, 64128), strict=True)
    ]
    configs = gemv_launch.trellis_group(shapes, torch.device("cpu"))
    parts = tuple(("mul1", own) for own in bits)
    assert group_machine(parts, configs, tokens, 4096, finish="bf16").stack == 0


@pytest.mark.parametrize(("columns", "tokens"), [(256, 1), pytest.param(256, 8, marks=pytest.mark.slow)])
def test_bands_of_one_unit_have_one_element_a_thread(columns: int, tokens: int) -> None:
    """Where a matrix is no wider than a unit. What a lane loads and multiplies is said in PTX, so nothing else may be."""
    bits = (6.25, 5.25, 4.75, 4.25)
    shapes = [
        Shape("mul1", own, n, columns, tokens) for own, n in zip(bits, (512, 512, 1024, 2048), strict=True)
    ]
    configs = gemv_launch.trellis_group(shapes, torch.device("cpu"))
    machine = group_machine(tuple(("mul1", own) for own in bits), configs, tokens, columns, finish="bf16")
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<\{(.*?)\}>", machine.layout_ir))
    used = re.findall(r"elementwise_inline_asm .*mma.*tensor<\S+, (#\w+)>", machine.layout_ir)
    assert len(used) == len(bits)
    for layout in used:
        assert "sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [8, 1]" in layouts[layout]


Odd = tuple[
    str, float, int, int, int, tuple[int, ...] | None
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
        *(("pair", bits) for bits in (1, 2, 2.25, 4, 8)),
        *(("3inst", bits) for bits in (1, 2, 2.25, 3.5, 4, 8)),
    ]
    for shape in ((37, 200), (8192, 11072))
    for tokens in (1, 5, 9, 16)
]
EVERY_ODD += [
    (code, bits, 8192, 11072, tokens, launch)
    for code, bits in (("mul1", 2), ("pair", 2), ("mul1", 4))
    for launch in gemv_launch.LAUNCHES
    for tokens in (1, 8, 16)
    if launch[1] * tokens <= 32
]


@counts_instructions
@pytest.mark.parametrize(
    ("code", "bits", "n", "k", "tokens", "launch"),
    [*ODD, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY_ODD if case not in ODD)],
)
def test_trellis_of_columns_that_are_no_whole_steps(
    code: str, bits: float, n: int, k: int, tokens: int, launch: tuple[int, int, int] | None
) -> None:
    rule = gemv_launch.trellis_gemv(Shape(code, bits, n, k, m_bucket(tokens)), torch.device("cpu"))
    chosen, k64_count = launch is None, k64_per_unit(round(4 * bits))
    launch = launch or (rule.num_warps, rule.tiles_per_cta, rule.units_per_step)
    assert -(-k // (64 * k64_count)) % (launch[0] * launch[2])  # some warps' units lie beyond the end
    machine = trellis_machine(code, bits, launch=launch, tokens=tokens, k=k)
    if chosen or tokens == 1:  # what the tuner tries for more tokens may spill; then it is not the fastest
        assert machine.stack <= 16
    assert machine.registers * launch[0] * 32 <= 65536
    assert machine.barriers == 0
    if (code, bits) in TRELLIS_CEILING and tokens == 1 and launch[:2] == (8, 2):
        assert machine.inner / (64 * k64_count * launch[2]) < TRELLIS_CEILING[code, bits]


@pytest.mark.parametrize("launch", [(16, 1, 8), (8, 1, 3), (8, 7, 1)])
def test_trellis_launches_that_do_not_fit_are_refused(launch: tuple[int, int, int]) -> None:
    why = (
        "does not divide a Hadamard tile of 4096: use fewer warps or fewer units"
        if launch[1] == 1
        else "14 sums a lane"
    )
    with pytest.raises(ValueError, match=why):
        trellis_machine("mul1", 2, launch=launch)


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
    ("code", "bits", "k", "launch"),
    [("pair", 2, 4096, (16, 2, 1)), ("mul1", 4, 256, (16, 1, 2)), ("mul1", 2, 4096, (16, 7, 1)),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("mul1", 2, 2048, (16, 4, 1)), ("pair", 2, 4096, (16, 7, 1))))],
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
def test_rows_of_bands_are_looked_up_without_spills() -> None:
    machine = lookup_machine((("mul1", 7.5), ("mul1", 6.5), ("mul1", 6), ("mul1", 5.5)), "fp32")
    assert machine.stack == 0 and machine.registers <= 40
    assert machine.instructions < 1100


def lookup_machine(bands: Parts, dtype: str) -> Machine:
    found = []
    for code, bits in bands:
        quad_bits = round(4 * bits)
        found.append(band(code, quad_bits, math.gcd(quad_bits * k64_per_unit(quad_bits) // 4, 4)))
    types = {"codes_ptrs": "*i32", "output_scales_ptrs": "*fp16", "sizes": "i32", "units": "i32"}
    pointers: dict[str, Any] = {
        name: (kind,) * len(bands) for name, kind in (types | {"columns": "i32"}).items()
    }
    return compile_kernel(
        trellis_lookup_kernel, {"BANDS": tuple(found), "BLOCK": BLOCK}, capability=90, warps=4, aligned=("columns",),
        pointers=pointers | {"tokens_ptr": "*i64", "out_ptr": f"*{dtype}", "columns": "i32"},
    )  # fmt: skip
