"""The small operations of a step, compiled for sm_90 without a GPU: everything stays in registers."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from requant_kernels.step import attention, choose
from requant_kernels.step.embed import embed_kernel
from requant_kernels.step.gated import gated_kernel
from requant_kernels.step.rms_norm import add_rms_norm_kernel
from requant_kernels.step.rope_cache import rope_cache_kernel
from requant_kernels.step.rotated_rope import rotated_rope_kernel
from requant_kernels.trellis.gemv_group import trellis_gemv_group_kernel
from requant_kernels.trellis.gemv_kernel import trellis_gemv_kernel
from requant_kernels.trellis.lookup import trellis_lookup_kernel
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from .compile_offline import Machine, compile_kernel, counts_instructions

HALF = dict.fromkeys(
    ("x_ptr", "delta_ptr", "weight_ptr", "gate_ptr", "up_ptr", "q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr",
     "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr", "table_ptr", "cos_table_ptr", "sin_table_ptr",
     "logits_ptr", "kept_ptr"), "*bf16",
)  # fmt: skip
INTEGERS = dict.fromkeys(
    ("k", "n", "delta_row", "gate_row", "up_row", "q_heads", "k_heads", "head_dim", "rotary_dim", "q_row", "k_row", "v_row",
     "trig_row", "cache_head", "length", "parts", "tokens", "q_batch", "q_head", "k_batch", "k_head", "v_batch", "v_head",
     "mask_batch", "v", "logits_row"),
    "i32",
)  # fmt: skip
POINTERS = HALF | INTEGERS | {
    "eps": "fp32", "scale": "fp32", "o_ptr": "*fp32", "z_ptr": "*fp32", "mask_ptr": "*u8",
    **dict.fromkeys(("position_ptr", "tokens_ptr", "length_ptr", "largest_ptr"), "*i64"),
}  # fmt: skip


def part(stages: int, head_dim: int = 128, **other: Any) -> dict[str, Any]:
    given = {"group": 4, "head_dim": head_dim, "block": attention.BLOCK, "stages": stages, "fill": False}
    return {"SHAPE": attention.PartShape(**given | other), "PDL": True}


SEVERAL, ONE = part(attention.STAGES), part(0)
CASES = {
    "rms_norm": (add_rms_norm_kernel, {"BLOCK": 4096, "PDL": True}, (), 8),
    "rms_norm of the widest model": (add_rms_norm_kernel, {"BLOCK": 16384, "PDL": True}, (), 16),
    "gated": (gated_kernel, {"ACTIVATION": "silu", "BLOCK": 1024, "PDL": True}, (), 4),
    "rope_cache": (rope_cache_kernel, {"HEADS": 1, "D": 128, "PDL": True}, ("q_norm_ptr", "k_norm_ptr"), 2),
    "rope_cache with norms": (rope_cache_kernel, {"HEADS": 1, "D": 128, "PDL": True}, (), 2),
    "rope_cache of a prompt, with norms": (rope_cache_kernel, {"HEADS": 8, "D": 128, "PDL": True}, (), 4),
    "attention": (attention.part_kernel, SEVERAL, ("mask_ptr", "y_ptr"), 4),
    "attention, parts of one block": (attention.part_kernel, ONE, ("mask_ptr", "y_ptr"), 4),
    **{
        f"attention of {d}, splits of {'several blocks' if stages else 'one block'}": (
            attention.part_kernel,
            part(stages, d, block=attention.split_block(d), fill=True),
            ("mask_ptr", "y_ptr"), attention.SPLIT_WARPS,
        )
        for d in (64, 128, 256) for stages in (0, attention.STAGES)
    },
    "attention in one part": (attention.part_kernel, SEVERAL, ("mask_ptr", "o_ptr", "z_ptr"), 4),
    "attention with a mask": (attention.part_kernel, SEVERAL, ("position_ptr", "y_ptr"), 4),
    "attention of small heads": (attention.part_kernel, part(0, 24), ("mask_ptr", "y_ptr"), 4),
    "its parts": (
        attention.combine_kernel, {"D": 128, "PARTS": attention.MOST_PARTS, "BLOCK": 64, "PDL": True}, (), 8,
    ),
    "a few parts": (attention.combine_kernel, {"D": 128, "PARTS": 16, "BLOCK": 64, "PDL": True}, (), 1),
    "embed": (embed_kernel, {"BLOCK": 1024, "D": 128, "PDL": True}, (), 4),
    "likeliest of a part": (choose.part_kernel, {"PART": choose.PART, "LEAST": choose.LEAST_KEY, "PDL": True}, (), 4),
    "token": (choose.token_kernel, {"PARTS": 64, "LEAST": choose.LEAST_KEY, "PDL": True}, (), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str) -> None:
    assert compiled(name, specialized).stack == 0


def compiled(name: str, aligned: Callable[[Any], bool]) -> Machine:
    """One of CASES, with those integers known to be multiples of 16."""
    kernel, constants, absent, warps = CASES[name]
    return compile_kernel(
        kernel, constants, capability=90, dtype="bf16", pointers=POINTERS, absent=absent, warps=warps,
        aligned=tuple(param.name for param in kernel.params if param.name in INTEGERS and aligned(param)),
    )  # fmt: skip


def specialized(param: Any) -> bool:
    """Whether Triton compiles anew for a multiple of 16 of this argument."""
    return not (param.do_not_specialize or param.do_not_specialize_on_alignment)


LENGTHS = {  # kernel -> what follows from the lengths of prompts and caches, or the number of tokens
    rope_cache_kernel: ("length", "tokens"),
    rotated_rope_kernel: ("length", "tokens"),
    attention.part_kernel: ("parts",),
    attention.combine_kernel: ("length", "parts"),
    embed_kernel: ("length",),
    trellis_lookup_kernel: ("length",),
    trellis_gemv_kernel: ("M",),  # so that 9 to 15 tokens have the program of 16, which a model's check runs
    trellis_gemv_group_kernel: ("M",),
}


@pytest.mark.parametrize("kernel", LENGTHS, ids=lambda kernel: f"{kernel.__module__}.{kernel.__name__}")
def test_no_kernel_is_compiled_anew_for_another_length(kernel: Any) -> None:
    backend = type(CUDABackend(GPUTarget("cuda", 90, 32)))

    def triton_sees(param: Any, value: int) -> Any:
        return native_specialize_impl(
            backend, value, False, not param.do_not_specialize, not param.do_not_specialize_on_alignment
        )

    by_name = {param.name: param for param in kernel.params}
    for name in LENGTHS[kernel]:
        assert len({triton_sees(by_name[name], value) for value in (2, 100, 128, 4096, 4099)}) == 1, name


FAST_LENGTHS = ("rope_cache with norms", "attention", "its parts", "embed")  # a case of each kernel


@counts_instructions
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST_LENGTHS else pytest.mark.slow)
        for name, (kernel, *_) in CASES.items()
        if kernel in LENGTHS
    ],
)
def test_lengths_of_any_number_cost_no_instruction(name: str) -> None:
    any_length, multiple_of_16 = compiled(name, specialized), compiled(name, lambda _: True)
    assert any_length.instructions <= multiple_of_16.instructions
    assert any_length.registers <= multiple_of_16.registers
