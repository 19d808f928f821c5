"""The GEMV of one trellis matrix, compiled for a GPU that is not there: what the tests of launches compare with."""

import math

import torch
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.fused_hadamard import Token
from requant_kernels.trellis.gemv_kernel import gemv_constants, trellis_gemv_kernel
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.layout import k64_per_unit

from .compile_offline import Machine, compile_kernel

TRELLIS_CEILING = {  # instructions a weight, in the loop over steps
    ("mul1", 2): 3.2, ("pair", 2): 1.75, ("mul1", 4): 3.4, ("mul1", 2.25): 3.5, ("3inst", 2): 5.5,
}  # fmt: skip


def trellis_machine(
    code: str, bits: float, *, launch: tuple[int, ...] = (8, 2, 1), tokens: int = 1, capability: int = 90,
    k: int | None = None, fused: bool = False, finished: bool = False,
    int8: bool | None = None, parts: int = 0,
) -> Machine:  # fmt: skip
    """`launch`: warps, tiles, units a step; the integers of `k` columns as Triton takes them, or any of whole steps.
    `finished`: with output scales and a bias, for an output that is not rotated. `parts`: of the attention that a
    fused rotation combines. `int8`: the activations are bytes; None: if the codes are byte sums."""
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
    token = None
    if fused and k is not None:
        token = Token(block_size=k & -k, dtype=torch.float16, parts=parts, head_dim=128 if parts else 0)
    if int8 is None:
        int8 = CODES[code].byte_sums
    given = gemv_constants(code, quad_bits, vector, config, tokens, units, token, int8=int8) | {
        "PDL": capability >= 90,
        "EARLY_TRIGGER": False,
    }
    given |= {name: 1 for name, value in integers.items() if value == 1}
    pointers = dict.fromkeys(("units", "rows", "hadamard_tiles"), "i32")
    pointers |= {
        "codes_ptr": "*i32",
        "y_ptr": "*bf16" if finished else "*fp32",
        "x_ptr": "*i8" if given["SHAPE"].int8 and not fused else "*fp16",
    }
    pointers |= {"scales_ptr": "*fp32", "input_scales_ptr": "*fp16"}
    absent = () if given["SHAPE"].int8 and (parts or not fused) else ("scales_ptr",)
    absent += () if fused else ("input_scales_ptr",)
    pointers |= {"output_scales_ptr": "*fp16", "bias_ptr": "*bf16", "addend_ptr": "*fp32"}
    absent += ("addend_ptr",) if finished else ("output_scales_ptr", "bias_ptr", "addend_ptr")
    return compile_kernel(
        trellis_gemv_kernel, given, capability=capability, pointers=pointers, warps=launch[0], absent=absent,
        aligned=tuple(name for name, value in integers.items() if value % 16 == 0),
    )  # fmt: skip


Parts = tuple[tuple[str, float], ...]  # code and bits
