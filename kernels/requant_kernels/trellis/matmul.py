"""The linear layer of a trellis: y = output_scales * H (V (H (input_scales * x))) + residuals.

Three launches: rotate, multiply, rotate. For one token of a small matrix the first two are one (`fused_hadamard.py`).
Residuals take one more, whose result the last rotation adds.

V is stored as 16 x 16 tiles, each a tail-biting bit stream of 256 codes in row order (`layout.py`). The value of a weight is
a function of its state s, the 16 bits of the stream that end with its own (bitshift trellis, QTIP: Tseng et al. 2024, arXiv
2406.11235). `3inst` is QTIP's; `mul1` is ExLlamaV3's; `pair`, two weights a hash, is ours (`requant/trellis_codes.py`).

| code | weights of state s | after the tensor cores |
| --- | --- | --- |
| mul1 | byte sum of 0x83DCD12D s | / 128 |
| pair | two: b0 + b1 + b2 + b3 and 510 + b0 - b1 - b2 + b3 of 0x4E6DA66B s + 0x3C6EF35F | / 128 |
| 3inst | the two float16 in ((89226354 s + 64248484) & 0x8FFF8FFF) ^ 0x3B603B60, added | |

Up to 16 tokens `gemv.py` multiplies, on Hopper up to 512 `gemm_sm90.py`; beyond them V is dequantized to float16, exactly
(`dequantize.py`), and cuBLAS multiplies.
"""

import torch
from torch import Tensor

from requant_kernels.common.sparse_spmm import spmm
from requant_kernels.hadamard.transform import hadamard_transform, hadamard_transform_int8
from requant_kernels.heuristics import (
    DECODE_TOKENS,
    HOPPER_TOKENS,
    hopper_config,
    launches_early,
    runs_on_hopper,
    trellis_config,
)
from requant_kernels.launch_config import HopperConfig, TrellisConfig
from requant_kernels.trellis.dequantize import dequantize
from requant_kernels.trellis.fused_hadamard import can_fuse
from requant_kernels.trellis.gemv import gemv_fp16, gemv_fused_hadamard, gemv_int8, padded_columns
from requant_kernels.trellis.gemv_ptx import BYTE_SUM_MEAN
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.portable import portable_gemv

ASSEMBLY = True  # False: every trellis without PTX, as on AMD


def trellis_linear(
    x: Tensor,
    layout: TrellisLayout,
    bias: Tensor | None,
    *,
    asm: bool,
    config: TrellisConfig | HopperConfig | None = None,
) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous. `config`: a launch of `gemv.py` or `gemm_sm90.py`; None: the tuned one."""
    m, rows, pdl, asm = (
        x.shape[0],
        layout.packed_codes.shape[0] * TILE,
        launches_early(x.device),
        asm and ASSEMBLY,
    )
    if asm and DECODE_TOKENS < m <= HOPPER_TOKENS and runs_on_hopper(layout, x.device):
        from requant_kernels.trellis.gemm_sm90 import gemm_sm90  # Gluon, part of Triton from 3.6 on

        chosen = config if isinstance(config, HopperConfig) else hopper_config(layout, m, x.device)
        product = gemm_sm90(x, layout, chosen)
    elif m > DECODE_TOKENS or not asm:
        rotated = _rotate_input(x, layout, -(-layout.k // TILE) * TILE, asm=asm, pdl=pdl)
        if m > DECODE_TOKENS:
            product = torch.nn.functional.linear(rotated, dequantize(layout, asm=asm))
        else:
            product = portable_gemv(rotated, layout)
    else:
        if not isinstance(config, TrellisConfig):
            config = trellis_config(
                layout.code, layout.bits, layout.n, layout.k, 1 if m == 1 else 8 if m <= 8 else 16, x.device
            )
        product = _gemv(x, layout, config, pdl=pdl)
    residuals = None if layout.sparse is None else spmm(x, layout)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    hadamard_transform(
        product, y, in_width=rows, columns=rows, out_width=layout.n, output_scales=layout.output_scales, bias=bias,
        addend=residuals, asm=asm, pdl=pdl,
    )  # fmt: skip
    return y


def _gemv(x: Tensor, layout: TrellisLayout, config: TrellisConfig, *, pdl: bool) -> Tensor:
    """V H (input_scales * x), float32 [m, rows], of up to 16 tokens."""
    columns = padded_columns(layout.k)
    if layout.code not in BYTE_SUM_MEAN:
        return gemv_fp16(_rotate_input(x, layout, columns, asm=True, pdl=pdl), layout, config, pdl=pdl)
    if can_fuse(x, layout, config):
        return gemv_fused_hadamard(x, layout, config, pdl=pdl)
    quantized, scales = hadamard_transform_int8(
        x,
        layout.input_scales,
        in_width=layout.k,
        out_width=columns,
        pair=layout.code == "pair",
        asm=True,
        pdl=pdl,
    )
    return gemv_int8(quantized, scales, layout, config, pdl=pdl)


def _rotate_input(x: Tensor, layout: TrellisLayout, columns: int, *, asm: bool, pdl: bool) -> Tensor:
    """H (input_scales * x) in float16 [m, columns], zero beyond the padded width of the layout."""
    rotated = torch.empty(x.shape[0], columns, dtype=torch.float16, device=x.device)
    hadamard_transform(
        x, rotated, in_width=layout.k, columns=-(-layout.k // TILE) * TILE, out_width=columns,
        input_scales=layout.input_scales, asm=asm, pdl=pdl,
    )  # fmt: skip
    return rotated
