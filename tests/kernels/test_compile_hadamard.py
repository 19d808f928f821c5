"""The Hadamard kernels compiled for real GPUs without one: no spills, the register layout that the PTX wants, each load
once."""

import re

import pytest

triton = pytest.importorskip("triton")

from requant_kernels.hadamard.batched import hadamard_batched_kernel  # noqa: E402
from requant_kernels.hadamard.tile_kernel import hadamard_tile_kernel  # noqa: E402
from requant_kernels.hadamard.tile_ptx import tile_transform_ptx, warp_transform_ptx  # noqa: E402

from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402

INTEGERS = {"in_width": "i32", "out_width": "i32"}


@counts_instructions
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(80, "fp16"), (90, "fp16"), (90, "fp32"), pytest.param(80, "fp32", marks=pytest.mark.slow)],
)
def test_a_warp_keeps_256_neighbours(capability: int, dtype: str) -> None:
    """The PTX of a tile needs 8 of a warp's 256 values in every lane; float16 in is the input, float32 the output
    transform."""
    int8 = dtype == "fp16"
    constants = {
        "PTX": tile_transform_ptx(mix_bit_11=True, int8=int8), "TILES": 2, "VECTOR": 8 if int8 else 4, "WARP_MASK": 15,
        "FACTOR": 1.0, "PAIR": int8, "PDL": capability >= 90,
    }  # fmt: skip
    pointers = {"x_ptr": f"*{dtype}", "y_ptr": "*i8" if int8 else "*fp16", "scales_ptr": "*fp32"}
    pointers |= {"input_scales_ptr": "*fp16", "output_scales_ptr": "*fp16", **INTEGERS}
    absent = ("output_scales_ptr",) if int8 else ("input_scales_ptr", "scales_ptr")
    machine = compile_kernel(
        hadamard_tile_kernel, constants, capability=capability, pointers=pointers, warps=16,
        absent=(*absent, "bias_ptr", "addend_ptr"), aligned=("in_width", "out_width"),
    )  # fmt: skip
    assert machine.stack == 0
    assert machine.instructions < 450
    assert machine.opcodes["BAR"] == (3 if int8 else 1)
    layouts = dict(re.findall(r"(#\w+) = #ttg.blocked<\{(.*)\}>", machine.layout_ir))
    (used,) = re.findall(r"elementwise_inline_asm .*mma.* -> tensor<\S+, (#\w+)>", machine.layout_ir)
    assert "threadsPerWarp = [32, 1, 1, 1], warpsPerCTA = [1, 16, 1, 1]" in layouts[used]


def batched_machine(
    dtype: str, *, tiles: int, splits: int, tiles_per_cta: int, permute: bool, bare: bool = False
) -> Machine:
    """The output transform (float32 in), or the input transform; `bare`: without scales, as of products of experts."""
    constants = {
        "PTX": warp_transform_ptx(), "TILES": tiles, "VECTOR": 4 if dtype == "fp32" else 8, "WARP_MASK": 15, "FACTOR": 1.0,
        "PAIR": permute, "PDL": True, "SPLITS": splits, "PERMUTE": permute, "TILES_PER_CTA": tiles_per_cta,
    }  # fmt: skip
    pointers = {
        "x_ptr": f"*{dtype}",
        "y_ptr": "*fp16",
        "output_scales_ptr": "*fp16",
        "input_scales_ptr": "*fp16",
    }
    absent = ("input_scales_ptr" if dtype == "fp32" else "output_scales_ptr",)
    if bare:
        absent = "input_scales_ptr", "output_scales_ptr"
    return compile_kernel(
        hadamard_batched_kernel, constants, capability=90, warps=16, aligned=("in_width", "out_width"),
        pointers=pointers | INTEGERS, absent=(*absent, "bias_ptr", "addend_ptr"),
    )  # fmt: skip


@counts_instructions
@pytest.mark.parametrize(
    ("tiles", "splits", "tiles_per_cta"),
    [
        (1, 8, 1),
        (2, 2, 2),
        (4, 2, 4),
        *(pytest.param(2, 4, tiles_per_cta, marks=pytest.mark.slow) for tiles_per_cta in (1, 2)),
    ],
)
def test_splits_are_added_without_spills(tiles: int, splits: int, tiles_per_cta: int) -> None:
    machine = batched_machine("fp32", tiles=tiles, splits=splits, tiles_per_cta=tiles_per_cta, permute=False)
    assert machine.stack == 0
    # 16 bytes each, and the scales: what is read is read once
    assert machine.opcodes["LDG"] <= 2 * tiles * splits + tiles_per_cta


@counts_instructions
@pytest.mark.parametrize("tiles", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_products_of_16_bits_without_scales_keep_the_layout(tiles: int) -> None:
    """In the kernel of a tile they would run the PTX four times, in more shared memory than there is."""
    machine = batched_machine("fp16", tiles=tiles, splits=1, tiles_per_cta=tiles, permute=False, bare=True)
    assert machine.stack == 0
    assert (
        machine.opcodes["BAR"]
        == batched_machine("fp16", tiles=tiles, splits=1, tiles_per_cta=tiles, permute=False).opcodes["BAR"]
    )


@counts_instructions
def test_a_permuted_store_is_as_wide() -> None:
    plain, permuted = (
        batched_machine("fp16", tiles=2, splits=1, tiles_per_cta=1, permute=permute)
        for permute in (False, True)
    )
    assert permuted.opcodes["STG"] == plain.opcodes["STG"] == 1
    assert permuted.instructions < plain.instructions + 40
