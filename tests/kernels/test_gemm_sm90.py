"""`gemm_sm90` compiled without a GPU: asynchronous wgmma, weights that stay in registers, no spills."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from requant_kernels.common.wgmma import x_layout
from requant_kernels.launch_config import Shape
from requant_kernels.scalar import gemm_sm90_launch
from requant_kernels.scalar.gemm_sm90 import gemm_sm90_kernel, launch_constants
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.scalar.gemm_sm90_ptx import dequant
from requant_kernels.scalar.gemm_sm90_residuals import DEFAULT_SMEM
from requant_kernels.scalar.permute import permute_kernel
from requant_kernels.scalar.splitk_reduce import splitk_reduce_kernel

from .compile_offline import Machine, compile_kernel, counts_instructions


def machine_of(
    format: str, bits: int, *, launch: tuple[int, ...] = (64, 8, 2, 0), direct: bool = False, group: int = 128,
    zeros: bool = False, sparse: bool = False, dtype: str = "fp16",
) -> Machine:  # fmt: skip
    """`launch`: tokens, warps, row tiles per warp, prefetch_at."""
    tokens, warps, tiles, ahead = launch
    config = GemmSm90Config(tokens_per_cta=tokens, num_warps=warps, tiles_per_warp=tiles, prefetch_at=ahead)
    constants = launch_constants(
        dequant(format, bits, dtype, group, zeros=zeros, sparse=sparse), config, sparse=sparse, direct=direct
    )
    pointers = dict.fromkeys(("scales_ptr", "zeros_ptr", "coo_ptr", "block_ptr"), "*i32")
    pointers |= {"out_ptr": f"*{dtype}" if direct else "*fp32", "bias_ptr": f"*{dtype}", "k_tiles": "i32"}
    pointers["x_desc"] = f"tensordesc<{dtype}[{tokens}, 256],{x_layout()!r}>"
    absent = (
        (() if zeros else ("zeros_ptr",))
        + (() if sparse else ("coo_ptr", "block_ptr"))
        + (() if direct else ("bias_ptr",))
    )
    return compile_kernel(
        gemm_sm90_kernel, {"CONFIG": constants["CONFIG"]}, capability=90, pointers=pointers, absent=absent, warps=warps,
        aligned=("width", "n_rows"),
    )  # fmt: skip


CEILING = {("grid", 2): 2.6, ("grid", 3): 2.7, ("grid", 4): 2.65, ("codebook", 3): 2.8, ("codebook", 4): 4.0}


@counts_instructions
@pytest.mark.parametrize(
    ("format", "bits"),
    [pytest.param(*key, marks=() if key == ("grid", 3) else pytest.mark.slow) for key in CEILING],
)
def test_wgmma_runs_while_weights_are_dequantized(format: str, bits: int) -> None:
    machine = machine_of(format, bits, group=128 if format == "grid" else 0)
    assert machine.stack <= 16
    assert machine.opcodes["HGMMA"] == 32  # two row tiles, sixteen mma_k16
    assert machine.opcodes["WARPGROUP"] <= 12  # one fence and one wait per k64_stage: nothing was serialized
    assert (
        machine.opcodes["STS"] == machine.opcodes["STSM"] == 0
    )  # weights go from registers to the tensor cores
    assert machine.opcodes["UTMALDG"] > 0
    assert machine.inner / 256 < CEILING[format, bits]  # two tiles of 128 weights per lane


@counts_instructions
@pytest.mark.parametrize(
    ("launch", "direct"),
    [
        pytest.param(launch, direct, marks=() if direct == fast else pytest.mark.slow)
        for launch, fast in (((32, 4, 1, 0), 0), ((64, 4, 1, 0), 1), ((64, 8, 1, 0), 0), ((128, 8, 1, 0), 1))
        for direct in (0, 1)
    ],
    ids=str,
)
def test_no_launch_of_the_heuristic_spills(launch: tuple[int, ...], direct: int) -> None:
    machine = machine_of("grid", 3, launch=launch, direct=bool(direct))
    assert machine.stack == 0
    registers_per_cta = machine.registers * launch[1] * 32
    assert 65536 // registers_per_cta >= (1 if launch[0] == 128 else 16 // launch[1])
    if direct:  # eight rows of a token at a time
        assert machine.opcodes["STG"] == launch[0] * launch[1] * 16 // (launch[1] * 32 * 8)


OPT_IN, SYSTEM = 227 << 10, 1 << 10  # bytes of shared memory of a CTA: the most, and what CUDA keeps of it
LAUNCHES = sorted({launch for launch, _ in gemm_sm90_launch.LAUNCHES} | {(32, 16, 1, 0), (64, 16, 1, 0)})


def test_every_launch_of_the_heuristic_is_tested_here() -> None:
    device = torch.device("cpu")
    for format in ("grid", "grid+s", "codebook", "codebook+s"):
        for bits in range(2, 9 if format.startswith("grid") else 5):
            for n, k in ((16, 16), (300, 1500), (4096, 4096), (32768, 8192), (128256, 4096)):
                for width in (32, 64, 128, 256, 512):
                    config = gemm_sm90_launch.gemm_sm90(Shape(format, bits, n, k, width), device)
                    tiling = config.tokens_per_cta, config.num_warps, config.tiles_per_warp
                    assert (*tiling, config.prefetch_at) in LAUNCHES


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(p, marks=() if p in ((32, 8, 1, 0), (128, 8, 2, 3)) else pytest.mark.slow)
        for p in LAUNCHES
    ],
    ids=str,
)
def test_shared_memory_of_every_launch(launch: tuple[int, ...], sparse: bool) -> None:
    """Triton opts in to more than 48 KB only where its own allocation is larger, whatever inline PTX declares."""
    group = 0 if sparse else 128
    machine = machine_of("grid", 3, launch=launch, direct=not sparse, group=group, sparse=sparse)
    asked, declared = machine.shared
    declared -= SYSTEM
    assert declared == (2048 * launch[1] * launch[2] if sparse else 0)
    assert asked >= 2 * 512 * launch[0]
    assert asked > DEFAULT_SMEM or asked + declared <= DEFAULT_SMEM
    assert asked + declared <= OPT_IN


@counts_instructions
@pytest.mark.parametrize("dtype", [pytest.param("fp16", marks=pytest.mark.slow), "bf16"])
def test_residuals_cost_one_instruction_per_weight(dtype: str) -> None:
    machine = machine_of("grid", 3, sparse=True, dtype=dtype)
    assert machine.stack <= 16
    assert machine.opcodes["HGMMA"] == 32
    assert machine.opcodes["LDS"] <= 40  # 16 bytes per mma_k16 and row tile
    assert machine.opcodes["SHFL"] == 0
    # three instructions of every fourth loop are for entries beyond 64, rarely entered
    assert machine.loop / 256 < 4.8


@pytest.mark.slow
@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize(
    ("format", "bits", "group", "zeros", "dtype"),
    [
        ("grid", 8, 128, True, "bf16"), ("grid", 5, 0, True, "fp16"), ("grid", 4, 32, True, "fp16"),
        ("grid", 7, 512, False, "fp16"), ("codebook", 2, 0, False, "bf16"),
    ],
)  # fmt: skip
def test_every_format_compiles(
    format: str, bits: int, group: int, zeros: bool, dtype: str, direct: int
) -> None:
    machine = machine_of(
        format, bits, launch=(64, 8, 1, 2), direct=bool(direct), group=group, zeros=zeros, dtype=dtype
    )
    assert machine.stack == 0
    assert machine.opcodes["HGMMA"] == 16


@counts_instructions
def test_permute_moves_sixteen_bytes_at_a_time() -> None:
    machine = compile_kernel(
        permute_kernel, {"PAIRS": True, "TOKENS": 8, "K32": 8, "ROWS": 32, "PDL": True}, capability=90,
        pointers={"x_ptr": "*i32", "xp_ptr": "*i32"}, absent=("row_perm_ptr", "inverse_perm_ptr"), warps=4,
        aligned=("width",),
    )  # fmt: skip
    assert machine.opcodes["LDG"] == machine.opcodes["STG"] == 2
    assert machine.instructions < 120


@counts_instructions
def test_splitk_reduce_moves_sixteen_bytes_at_a_time() -> None:
    constants = {"SPLIT_K": 4, "WIDTH": 64, "ROWS": 16, "TOKENS": 64, "PDL": True}
    machine = compile_kernel(
        splitk_reduce_kernel, constants, capability=90, pointers={}, absent=("inverse_perm_ptr", "bias_ptr"), warps=4,
        aligned=("n_rows",),
    )  # fmt: skip
    assert machine.stack == 0
    assert machine.registers <= 64
    assert machine.opcodes["LDG"] == 8  # 16 bytes each: a mask would make them 32
    assert machine.opcodes["STG"] == 1
