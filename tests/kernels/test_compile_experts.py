"""The launches of a step of experts, compiled for sm_90: they add little to the loop of one matrix, and spill nothing."""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.common.slots import Slots  # noqa: E402
from requant_kernels.experts.route import gather_kernel, route_kernel  # noqa: E402
from requant_kernels.experts.scale import combine_kernel, gate_kernel  # noqa: E402
from requant_kernels.launch_config import Shape  # noqa: E402
from requant_kernels.trellis import gemv_launch  # noqa: E402

from .compile_offline import compile_kernel, counts_instructions  # noqa: E402
from .trellis_machines import trellis_machine  # noqa: E402

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
