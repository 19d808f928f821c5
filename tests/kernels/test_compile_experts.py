"""The launches of a step of experts, compiled for sm_90: they add little to the loop of one matrix, and spill nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.experts.gemv import Slots, experts_gemv_kernel  # noqa: E402
from requant_kernels.experts.route import COUNTS, ONE_HOT, count_kernel, gather_kernel, route_kernel  # noqa: E402
from requant_kernels.experts.router import choose_kernel, logits_kernel  # noqa: E402
from requant_kernels.experts.scale import combine_kernel, gate_kernel  # noqa: E402
from requant_kernels.launch_config import Shape  # noqa: E402
from requant_kernels.trellis import gemv_launch  # noqa: E402
from requant_kernels.trellis.codes import CODES  # noqa: E402
from requant_kernels.trellis.gemv_group import group_constants  # noqa: E402
from requant_kernels.trellis.layout import k64_per_unit, words_per_load  # noqa: E402

from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402
from .trellis_machines import trellis_machine  # noqa: E402

GATES, DOWNS = (768, 2048, 2), (2048, 768, 1)  # n, k, parts


FEW, ALL = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3), tuple(quarters / 4 for quarters in range(4, 17))


def experts_machine(code: str, widths: Sequence[float], n: int, k: int, parts: int, tokens: int) -> Machine:
    """The launch of `experts/gemv.py` for so many tokens, 8 of 128 experts each."""
    shapes = [Shape(code, bits, n, k, 1) for bits in widths]
    config = gemv_launch.trellis_slots(shapes, 8 * parts * tokens, torch.device("cpu"))
    int8, kinds = CODES[code].byte_sums, []
    for bits in widths:
        quad_bits = round(4 * bits)
        units = -(-k // (64 * k64_per_unit(quad_bits)))
        kinds.append((code, quad_bits, words_per_load(quad_bits), config, units, int8))
    slots = Slots(parts=parts, experts=128, per_token=8 if parts == 2 else 1)
    given = group_constants(tuple(kinds), 1) | {"PDL": True, "SLOTS": slots, "hadamard_tiles": 1}
    pointers: dict[str, Any] = {"x_ptr": "*i8" if int8 else "*fp16", "scales_ptr": "*fp32", "y_ptr": "*fp32"}
    pointers |= {"experts_ptr": "*i32", "locations_ptr": "*i32", "tiles": "i32"}
    pointers |= {"codes_ptrs": ("*i32",) * len(widths), "columns": ("i32",) * len(widths)}
    return compile_kernel(
        experts_gemv_kernel, given, capability=90, pointers=pointers, warps=config.num_warps, aligned=("stride_x",),
        absent=() if int8 else ("scales_ptr",),
    )  # fmt: skip


@counts_instructions
@pytest.mark.parametrize(
    ("code", "widths", "n", "k", "parts", "tokens"),
    [
        *(
            pytest.param(
                code,
                (bits,),
                *shape,
                tokens,
                marks=() if (bits, shape) == (2.25, DOWNS) else pytest.mark.slow,
            )
            for code, bits in (("mul1", 2), ("mul1", 2.25), ("mul1", 4), ("pair", 2), ("3inst", 2))
            for shape in (GATES, DOWNS)
            for tokens in (1, 8)
        ),
        ("pair", FEW, *GATES, 1),
        *(
            pytest.param(code, ALL, *shape, tokens, marks=pytest.mark.slow)
            for code in ("mul1", "pair")
            for shape in (GATES, DOWNS)
            for tokens in (1, 8)
        ),
    ],
)
def test_experts_of_many_widths_are_one_launch_that_does_not_spill(
    code: str, widths: tuple[float, ...], n: int, k: int, parts: int, tokens: int
) -> None:
    """Qwen3-30B-A3B, a step of one token and of several: gates and ups, and downs. The code of a width is that of a single
    matrix."""
    machine = experts_machine(code, widths, n, k, parts, tokens)
    config = gemv_launch.trellis_slots(
        [Shape(code, bits, n, k, 1) for bits in widths], 8 * parts * tokens, torch.device("cpu")
    )
    launch = config.num_warps, config.tiles_per_cta, config.units_per_step
    plain = [trellis_machine(code, bits, launch=launch, k=k) for bits in widths]
    assert machine.stack == 0 and machine.registers <= 128
    if len(widths) == 1:
        assert machine.inner <= 1.1 * plain[0].inner and machine.opcodes["IMMA"] == plain[0].opcodes["IMMA"]
    assert machine.instructions <= 1.2 * sum(own.instructions for own in plain) + 150


@counts_instructions
@pytest.mark.parametrize("kernel", [gate_kernel, combine_kernel], ids=lambda kernel: kernel.__name__)
def test_what_follows_the_experts_products_is_small(kernel) -> None:
    constants = {"BLOCK": 256, "PDL": True}
    constants |= (
        {"NUM_EXPERTS": 128, "SILU": True} if kernel is gate_kernel else {"PER_TOKEN": 8, "ADDS": True}
    )
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
def test_a_router_is_small_and_does_not_spill() -> None:
    pointers = {"y_ptr": "*bf16", "weight_ptr": "*bf16", "logits_ptr": "*bf16", "experts": "i32", "k": "i32"}
    machine = compile_kernel(
        logits_kernel, {"ROWS": 4, "COLUMNS": 2048, "PDL": True}, capability=90, pointers=pointers, warps=4,
        aligned=("experts", "k"),
    )  # fmt: skip
    assert machine.stack == 0 and machine.instructions < 700
    pointers |= {"experts_ptr": "*i32", "weights_ptr": "*bf16"}
    constants = {"CHOSEN": 8, "NORMALIZED": True, "PADDED": 128, "PADDED_CHOSEN": 8, "PDL": True}
    machine = compile_kernel(choose_kernel, constants, capability=90, pointers=pointers, warps=1)
    assert machine.stack == 0 and machine.instructions < 1500


@counts_instructions
@pytest.mark.parametrize("per_group", [pytest.param(32, marks=pytest.mark.slow), 256])
def test_what_precedes_the_experts_products_of_prompts_is_small(per_group: int) -> None:
    """128 experts, 8 a token."""
    block = ONE_HOT // 128
    integers = dict.fromkeys(("slots", "blocks", "ctas", "groups", "k"), "i32")
    names = "experts_ptr", "counts_ptr", "tokens_ptr", "rows_ptr", "groups_ptr"
    pointers: dict[str, Any] = integers | dict.fromkeys(names, "*i32") | {"by_row_ptr": "*i16"}
    machine = compile_kernel(
        count_kernel, {"PADDED": 128, "BLOCK": block}, capability=90, pointers=pointers, warps=8
    )
    assert machine.stack == 0 and machine.instructions < 1500
    constants = {
        "PER_TOKEN": 8,
        "PADDED": 128,
        "N": per_group,
        "BLOCK": block,
        "GROUPS": 32,
        "COUNTS": COUNTS,
    }
    machine = compile_kernel(route_kernel, constants, capability=90, pointers=pointers, warps=8)
    assert machine.stack == 0 and machine.instructions < 4500
    machine = compile_kernel(
        gather_kernel, {"COLUMNS": 2048, "PDL": True}, capability=90, warps=4, aligned=("k",),
        pointers=pointers | {"x_ptr": "*fp16"},
    )  # fmt: skip
    assert machine.stack == 0 and machine.instructions < 150
    assert machine.opcodes["LDG"] == 1 + 2 and machine.opcodes["STG"] == 2  # 16 bytes a thread
