"""Several matrices, or bands of one, in one trellis launch: each keeps its loop, and few registers spill."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.launch_config import Shape  # noqa: E402
from requant_kernels.trellis import gemv_launch  # noqa: E402
from requant_kernels.trellis.gemv_group import group_constants, trellis_gemv_group_kernel  # noqa: E402
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig  # noqa: E402
from requant_kernels.trellis.layout import k64_per_unit  # noqa: E402
from requant_kernels.trellis.rounding import is_coarse  # noqa: E402

from .compile_offline import Machine, compile_kernel, counts_instructions  # noqa: E402
from .trellis_machines import Parts, trellis_machine  # noqa: E402


def group_machine(
    parts: Parts,
    configs: Sequence[TrellisGemvConfig],
    tokens: int,
    columns: int | None = None,
    *,
    finish: str | None = None,
) -> Machine:
    """Matrices in one launch; `columns` as `k` of `trellis_machine`. `finish`: the type of finished outputs."""
    kinds: list[Any] = []
    int8 = tokens <= 4 or (finish is None and all(is_coarse(code, bits) for code, bits in parts))
    for (code, bits), config in zip(parts, configs, strict=True):
        quad_bits = round(4 * bits)
        k64_count = k64_per_unit(quad_bits)
        units = (
            config.num_warps * config.units_per_step if columns is None else -(-columns // (64 * k64_count))
        )
        kinds.append((code, quad_bits, math.gcd(quad_bits * k64_count // 4, 4), config, units, int8))
    given = group_constants(tuple(kinds), tokens) | {"PDL": True, "EARLY_TRIGGER": False}
    if columns is not None:
        given |= {
            name: 1
            for name in ("M", "hadamard_tiles")
            if (tokens if name == "M" else -(-columns // 4096)) == 1
        }
    types = {
        "x_ptrs": "*i8" if int8 else "*fp16",
        "scales_ptrs": "*fp32",
        "codes_ptrs": "*i32",
        "y_ptrs": f"*{finish or 'fp32'}",
    }
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
    wanted = f"sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [{configs[0].num_warps}, 1]"
    assert all(wanted in layouts[layout] for layout in used)
