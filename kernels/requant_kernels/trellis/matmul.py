"""The linear layer of a trellis: y = output_scales * H (V (H (input_scales * x))) + residuals.

Three launches: rotate, multiply, rotate. For one token of a small matrix the first two are one (`fused_hadamard.py`).
Residuals take one more, whose result the last rotation adds.

V is stored as 16 x 16 tiles, each a tail-biting bit stream of 256 codes in row order (`layout.py`). The value of a weight is
a function of its state s, the 16 bits of the stream that end with its own (bitshift trellis, QTIP: Tseng et al. 2024, arXiv
2406.11235). `3inst` is QTIP's; `mul1` is ExLlamaV3's; `pair`, two weights per hash, is ours
(`requant/formats/trellis_codes.py`).

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

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.sparse_spmm import spmm
from requant_kernels.hadamard.transform import hadamard_transform, hadamard_transform_int8
from requant_kernels.launch_config import GemmSm90Config, TrellisGemvConfig
from requant_kernels.trellis.dequantize import dequantize
from requant_kernels.trellis.fused_hadamard import can_fuse
from requant_kernels.trellis.gemv import gemv_fp16, gemv_fused_hadamard, gemv_int8, padded_columns
from requant_kernels.trellis.gemv_ptx import BYTE_SUM_MEAN
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.portable import MAX_TOKENS, portable_gemv

ASSEMBLY = True  # False: every trellis without PTX, as on AMD


def supports_gemv(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Up to 16 tokens where there is inline PTX."""
    return num_tokens <= 16 and ASSEMBLY and supports_ptx(device)


def supports_gemm_sm90(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Up to 512 tokens; `dispatch.py` sees to Hopper."""
    return num_tokens <= 512 and ASSEMBLY


def supports_dense(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Any number of tokens on any GPU."""
    return True


def gemv(x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: TrellisGemvConfig) -> Tensor:
    """y [m, n] of x [m, k], m up to 16, rows contiguous."""
    columns, pdl = padded_columns(layout.k), supports_pdl(x.device)
    if layout.code not in BYTE_SUM_MEAN:
        product = gemv_fp16(_rotate_input(x, layout, columns, asm=True), layout, config, pdl=pdl)
    elif can_fuse(x, layout, config):
        product = gemv_fused_hadamard(x, layout, config, pdl=pdl)
    else:
        quantized, scales = hadamard_transform_int8(
            x, layout.input_scales, in_width=layout.k, out_width=columns, pair=layout.code == "pair", asm=True, pdl=pdl
        )  # fmt: skip
        product = gemv_int8(quantized, scales, layout, config, pdl=pdl)
    return _rotate_output(product, x, layout, bias, asm=True)


def gemm_sm90(x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: GemmSm90Config) -> Tensor:
    """y [m, n] of x [m, k], m up to 512, rows contiguous, on Hopper."""
    from requant_kernels.trellis import gemm_sm90  # Gluon, part of Triton from 3.6 on

    return _rotate_output(gemm_sm90.gemm_sm90(x, layout, config), x, layout, bias, asm=True)


def dense(
    x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: None = None, *, asm: bool | None = None
) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: by cuBLAS, or without PTX, up to 16 tokens, by plain Triton. `asm` None: inline
    PTX where the device has it."""
    asm = (supports_ptx(x.device) if asm is None else asm) and ASSEMBLY
    rotated = _rotate_input(x, layout, -(-layout.k // TILE) * TILE, asm=asm)
    if x.shape[0] > MAX_TOKENS:
        product = torch.nn.functional.linear(rotated, dequantize(layout, asm=asm))
    else:
        product = portable_gemv(rotated, layout)
    return _rotate_output(product, x, layout, bias, asm=asm)


def _rotate_output(
    product: Tensor, x: Tensor, layout: TrellisLayout, bias: Tensor | None, *, asm: bool
) -> Tensor:
    """y [m, n] of V H (input_scales * x), or of its split-K partial sums, with the residuals and the bias."""
    m, rows = x.shape[0], layout.packed_codes.shape[0] * TILE
    residuals = None if layout.sparse is None else spmm(x, layout)
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    hadamard_transform(
        product, y, in_width=rows, columns=rows, out_width=layout.n, output_scales=layout.output_scales, bias=bias,
        addend=residuals, asm=asm, pdl=supports_pdl(x.device),
    )  # fmt: skip
    return y


def _rotate_input(x: Tensor, layout: TrellisLayout, columns: int, *, asm: bool) -> Tensor:
    """H (input_scales * x) in float16 [m, columns], zero beyond the padded width of the layout."""
    rotated = torch.empty(x.shape[0], columns, dtype=torch.float16, device=x.device)
    hadamard_transform(
        x, rotated, in_width=layout.k, columns=-(-layout.k // TILE) * TILE, out_width=columns,
        input_scales=layout.input_scales, asm=asm, pdl=supports_pdl(x.device),
    )  # fmt: skip
    return rotated
