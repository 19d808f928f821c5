"""PTX of `gemm_sm90.py`: packed codes to scaled weights, a *k64_stage* at a time.

A k64_stage is a quarter of a k_tile: 16 rows x 64 columns per row tile, four mma_k16 (`bit_layout.py`), of which a lane
holds 16 registers over both operands. 64 columns of 16 bits are one line of swizzled shared memory. `dequant_k64_ptx` reuses
the lines of `grid_dequant_ptx` and `codebook_dequant_ptx`: it drops those of other stages, and adds one multiplication per
pair of weights by the scale of their group, so that one accumulator serves a whole row. With residuals
(`gemm_sm90_residuals.py`) that multiplication becomes a fused multiply-add: the residual, or zero, is its addend,
and costs nothing but its load.

A weight is rounded once to the type of the activations, as in the dequantized matrix. Scales of a grid stay below 128.
"""

import re
from dataclasses import dataclass
from functools import cache

from requant_kernels.common.dequant_ptx import (
    GRID_STEP,
    STEPS_PER_ASM,
    codebook_dequant_ptx,
    grid_dequant_ptx,
    zero_bias,
)
from requant_kernels.common.packing import k_tiles_per_scale, scales_per_k_tile
from requant_kernels.common.ptx import Ptx, broadcast_pair_ptx, inline_ptx

MMA_PER_STAGE = 4  # mma_k16 per k64_stage
K64_STAGES = 4  # per k_tile


@cache
def dequant_k64_ptx(
    format: str, bits: int, dtype: str, groups: int, stage: int, *, zeros: bool = False, sparse: bool = False
) -> Ptx:
    """The four mma_k16 of a k64_stage, scaled; `groups` scales per k_tile, 0: the kernel scales rows at its end.

    Operands: four outputs; `bits` packed codes; a codebook's tables; the pairs (scale, scale) of the stage's groups; with
    `zeros` their pairs -(zero + bias) * GRID_STEP (one pair if a row has one); with `sparse` four pairs of residuals.
    """
    half, quarter = divmod(stage, K64_STAGES // 2)
    own = max(1, groups // K64_STAGES)  # groups of this stage
    if format == "codebook":
        source, scales = codebook_dequant_ptx(bits, half), 0
        names = [f"code{i}" for i in range(bits)] + [f"table{i}" for i in range(1 << (bits - 1))]
    else:
        source = grid_dequant_ptx(bits, dtype, max(1, groups) if zeros else 0, half)
        names, scales = [f"code{i}" for i in range(bits)], own if groups else 0

    def operand(match: re.Match[str]) -> str:
        """An input of the half's lines, by name."""
        index = int(match[1]) - STEPS_PER_ASM
        if index < len(names):
            return f"${names[index]}"
        group = index - len(names) - (quarter * own if groups > 2 else 0)
        return f"$zero{group if 0 <= group < own else 0}"  # arbitrary in lines that are dropped

    registers, lines, kind = list(source.registers), [], dtype.replace("fp", "f")
    for line in source.lines:
        found = re.match(r"(\S+) \$([0-7]), ", line)
        if found is None:
            lines.append(re.sub(r"\$(\d+)", operand, line))
            continue
        output = int(found[2]) - MMA_PER_STAGE * quarter
        if not 0 <= output < MMA_PER_STAGE:
            continue
        target = f"unscaled{output}" if scales or sparse else f"$weight{output}"
        lines.append(f"{found[1]} {target}, " + re.sub(r"\$(\d+)", operand, line[found.end() :]))
        scale = f"$scale{output * own // MMA_PER_STAGE}"
        if scales and sparse:
            lines.append(f"fma.rn.{kind}x2 $weight{output}, {target}, {scale}, $residual{output};")
        elif scales:
            lines.append(f"mul.rn.{kind}x2 $weight{output}, {target}, {scale};")
        elif sparse:
            lines.append(f"add.rn.{kind}x2 $weight{output}, {target}, $residual{output};")
    if scales or sparse:
        registers += [f"unscaled{i}" for i in range(MMA_PER_STAGE)]
    names += [f"scale{i}" for i in range(scales)]
    names += [f"zero{i}" for i in range(own)] if zeros else []
    names += [f"residual{i}" for i in range(MMA_PER_STAGE)] if sparse else []
    outputs = {f"weight{i}": "=r" for i in range(MMA_PER_STAGE)}
    return inline_ptx(lines, outputs=outputs, inputs=dict.fromkeys(names, "r"), registers={"b32": registers})


@dataclass(frozen=True, kw_only=True, slots=True)
class Dequant:
    """How the kernel dequantizes a packed format."""

    bits: int
    codebook: bool
    group: int  # columns per scale; 0: one per row
    tables: int  # registers of a row's lookup tables
    grid_step: float  # the value of one grid step before scaling
    stages: tuple[Ptx, ...]  # by k64_stage
    scale_pairs: Ptx
    zero_pairs: Ptx

    @property
    def groups(self) -> int:
        """Scales per row and k_tile."""
        return scales_per_k_tile(self.group)

    @property
    def k_tiles_per_scale(self) -> int:
        return k_tiles_per_scale(self.group)


@cache
def dequant(
    format: str, bits: int, dtype: str, group: int, *, zeros: bool = False, sparse: bool = False
) -> Dequant:
    """The `Dequant` of a format; with residuals a scale per row is applied to the weights too, not to the sums."""
    groups = scales_per_k_tile(group) or int(sparse and format == "grid")
    step = GRID_STEP[dtype]
    return Dequant(
        bits=bits, codebook=format == "codebook", group=group, tables=1 << (bits - 1) if format == "codebook" else 0,
        grid_step=step,
        stages=tuple(
            dequant_k64_ptx(format, bits, dtype, groups, stage, zeros=zeros, sparse=sparse) for stage in range(K64_STAGES)
        ),
        scale_pairs=broadcast_pair_ptx(dtype, 1 / step, 0.0),
        zero_pairs=broadcast_pair_ptx(dtype, -step, -step * zero_bias(bits, dtype)),
    )  # fmt: skip
