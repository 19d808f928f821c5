"""The trellis GEMM of Hopper, of one matrix and of experts, compiled for a GPU that is not there. Needs Gluon."""

from requant_kernels.common.wgmma import x_layout
from requant_kernels.experts import gemm
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import gemm_sm90
from requant_kernels.trellis.gemm_sm90 import gemm_codes, gemm_cta, max_registers
from requant_kernels.trellis.gemm_sm90_launch import group_cta
from requant_kernels.trellis.layout import words_per_load

from .compile_offline import Machine, compile_kernel


def multiply_machine(
    code: str, bits: float, *, launch: tuple[int, ...] = (64, 8, 1, 0), whole: bool = True, sums: bool = False,
    int8: bool = False, position: str = "alone",
) -> Machine:  # fmt: skip
    """`launch`: tokens, warps, tiles, k step of the prefetch."""
    tokens, warps, tiles, prefetch_at = launch
    four = round(4 * bits)
    config = GemmSm90Config(
        tokens_per_cta=tokens, num_warps=warps, tiles_per_warp=tiles, prefetch_at=prefetch_at
    )
    codes = gemm_codes(code, four, words_per_load(four), whole=whole, sums=sums, int8=int8)
    cta = gemm_cta(config, int8=int8)
    box = f"[{tokens}, {cta.stage_columns}]"
    pointers = {
        "x_desc": f"tensordesc<{'i8' if int8 else 'fp16'}{box},{x_layout(8 if int8 else 16)!r}>",
        "x_scales_ptr": "*fp32",
        "codes_ptr": "*i32",
        "out_ptr": "*fp16",
    }
    pointers |= dict.fromkeys(("units", "rows", "k_tiles", "skipped"), "i32")
    return compile_kernel(
        gemm_sm90.trellis_gemm_sm90_kernel, {"CODES": codes, "CTA": cta, "PDL": position}, capability=90,
        pointers=pointers, warps=warps, aligned=("rows",), absent=() if int8 else ("x_scales_ptr",),
        max_registers=max_registers(config, four),
    )  # fmt: skip


def experts_gemm_machine(code: str, widths: tuple[float, ...], tokens: int, *, k: int) -> Machine:
    """The launch of `experts/gemm.py` for groups of so many tokens."""
    config = group_cta(tokens)
    _, constants = gemm._program(code, widths, k, config, 128)
    box = f"[{tokens}, {constants['CTA'].stage_columns}]"
    count = len(widths)
    pointers = {
        "x_desc": f"tensordesc<fp16{box},{x_layout()!r}>", "codes_ptrs": ("*i32",) * count, "out_ptr": "*fp16",
        "groups_ptr": "*i32", "locations_ptr": "*i32", "columns": ("i32",) * count, "k_tiles": "i32", "rows": "i32",
    }  # fmt: skip
    return compile_kernel(
        gemm.experts_gemm_kernel, {name: constants[name] for name in ("WIDTHS", "CTA", "EXPERTS", "PDL")},
        capability=90, pointers=pointers, warps=config.num_warps, aligned=("rows",), max_registers=constants["maxnreg"],
    )  # fmt: skip
