"""Trellis layers of 1 to 8 tokens, without wgmma to 16: rotate, multiply, rotate, in as few launches as the layer allows.

`gemv_kernel.py` computes the product; the launches around it depend on the layer:

    first rotation     a launch that writes int8 or float16 (`activation_form`); none for one token of a small matrix, where
                       every CTA rotates the token itself (`fused_hadamard.py`): a launch costs about 1 us of the 4 to 7 us
                       in total
    product            V times rotated activations
    last rotation      a launch; none if the output is not rotated: then the product's epilogue applies scales, residuals
                       and bias (`Epilogue`)

With the same code, `gemv_group.py` multiplies several matrices that read the same activations in one launch, and
`experts/gemv.py` the chosen experts of a mixture.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from requant_kernels.common.device import num_sms, supports_pdl, supports_ptx, supports_sm90
from requant_kernels.common.launch import interned, launch
from requant_kernels.common.occupancy import padded_smem_bytes
from requant_kernels.common.pdl import pdl_option
from requant_kernels.hadamard.tile_builder import HADAMARD_TILE
from requant_kernels.hadamard.transform import hadamard_transform_int8
from requant_kernels.trellis import fused_hadamard
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_kernel import MOST_EXACT_TOKENS, gemv_constants, trellis_gemv_kernel
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.layout import TILE, TrellisLayout
from requant_kernels.trellis.operands import ActivationForm, RotatedActivations, SplitAttention
from requant_kernels.trellis.rotate import residual_product, rotate_input, rotate_output
from requant_kernels.trellis.rounding import tolerates_8_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Epilogue:
    """The operations that finish the outputs of a matrix whose output is not rotated."""

    dtype: torch.dtype
    output_scales: Tensor
    bias: Tensor | None
    addend: Tensor | None  # float32 [m, n]: the product of the residuals


def supports(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """Up to 16 tokens on devices with inline PTX, up to eight on those with wgmma."""
    return num_tokens <= (8 if supports_sm90(device) else 16) and supports_ptx(device)


def gemv(x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: TrellisGemvConfig) -> Tensor:
    """y [m, n] of x [m, k], m up to 16, rows contiguous."""
    if layout.rotates_output:
        return rotate_output(product(x, layout, config), x, layout, bias, asm=True)
    addend = residual_product(x, layout)
    epilogue = Epilogue(dtype=x.dtype, output_scales=layout.output_scales, bias=bias, addend=addend)
    return product(x, layout, config, epilogue=epilogue)


def activation_form(layout: TrellisLayout, num_tokens: int) -> ActivationForm:
    """What `product` reads best: bytes of byte sums up to four tokens, and above where the high bytes will do."""
    columns = -(-layout.k // HADAMARD_TILE) * HADAMARD_TILE  # zero beyond the end
    code = CODES[layout.code]
    if code.byte_sums and (num_tokens <= MOST_EXACT_TOKENS or tolerates_8_bits(layout)):
        return ActivationForm(columns=columns, int8=True, pair=code.weights_per_hash == 2)
    return ActivationForm(columns=columns)


def product(
    x: Tensor | RotatedActivations | SplitAttention, layout: TrellisLayout, config: TrellisGemvConfig, *,
    epilogue: Epilogue | None = None,
) -> Tensor:  # fmt: skip
    """V H (input_scales * x), float32 [m, rows]; with an epilogue y [m, n]. x [m, k], or already rotated, or in parts that
    every CTA combines (`rotates_itself`). Of rotated int8 activations more than four tokens are multiplied by their high
    bytes, whatever the codes: their form is the caller's choice (`activation_form`)."""
    if isinstance(x, Tensor) and not (x.shape[0] == 1 and can_fuse(x, layout, config)):
        x = rotate_activations(x, layout, activation_form(layout, x.shape[0]))
    return launch_gemv(x, layout, config, epilogue=epilogue)


def rotate_activations(
    x: Tensor, layout: TrellisLayout, form: ActivationForm, *, asm: bool = True
) -> RotatedActivations:
    """H (input_scales * x) of x [m, k] in a form that the product reads. `asm` False: without PTX."""
    if not form.int8:
        return RotatedActivations(values=rotate_input(x, layout, form.columns, asm=asm), scales=None)
    values, scales = hadamard_transform_int8(
        x, layout.input_scales, in_width=layout.k, out_width=form.columns, pair=form.pair, asm=asm,
        pdl=supports_pdl(x.device), rotate=layout.input_scales is not None,
    )  # fmt: skip
    return RotatedActivations(values=values, scales=scales)


def can_fuse(x: Tensor, layout: TrellisLayout, config: TrellisGemvConfig) -> bool:
    """Whether every CTA can rotate its token of x itself, with all CTAs resident at once."""
    return x.data_ptr() % 16 == 0 and rotates_itself(layout, config)


def rotates_itself(layout: TrellisLayout, config: TrellisGemvConfig) -> bool:
    """`can_fuse` of an aligned token."""
    return (
        CODES[layout.code].byte_sums
        and layout.input_scales is not None
        and fused_hadamard.supports(layout.k, config)
        and -(-layout.n // (TILE * config.tiles_per_cta)) <= num_sms(layout.packed_codes.device)
        and layout.input_scales.data_ptr() % 16 == 0
    )


def launch_gemv(
    x: Tensor | RotatedActivations | SplitAttention, layout: TrellisLayout, config: TrellisGemvConfig, *,
    epilogue: Epilogue | None = None,
) -> Tensor:  # fmt: skip
    """V times rotated activations, float32 [m, rows], or y [m, n] with an epilogue. A plain tensor is one token that every
    CTA rotates (`can_fuse`), split attention one that it combines before."""
    tiles, units, _, _, vector = layout.packed_codes.shape[-5:]
    rows = tiles * TILE if epilogue is None else layout.n
    if isinstance(x, RotatedActivations):
        values, scales, m = x.values, x.scales, x.num_tokens
        input_scales, hadamard_tiles, stride = None, values.shape[1] // HADAMARD_TILE, values.stride(0)
        token = None
    else:
        values, scales = (x.values, x.logarithms) if isinstance(x, SplitAttention) else (x, None)
        m, input_scales, hadamard_tiles, stride = 1, layout.input_scales, 1, layout.k
        parts = values.shape[1:] if isinstance(x, SplitAttention) else (0, 0)
        token = fused_hadamard.Token(
            block_size=layout.k & -layout.k, dtype=values.dtype, parts=parts[0], head_dim=parts[1]
        )
    device, dtype = values.device, torch.float32 if epilogue is None else epilogue.dtype
    y, pdl = torch.empty(m, rows, dtype=dtype, device=device), supports_pdl(device)
    launch(
        trellis_gemv_kernel,
        (-(-tiles // config.tiles_per_cta), 1, 1),
        (
            values, scales, input_scales, layout.packed_codes, y,
            *((None,) * 3 if epilogue is None else (epilogue.output_scales, epilogue.bias, epilogue.addend)),
            m, units, rows, tiles - 1, -(-units // (config.num_warps * config.units_per_step)), hadamard_tiles, stride,
        ),
        interned(
            **gemv_constants(
                layout.code, layout.quad_bits, vector, config, m, units, token,
                int8=token is not None or scales is not None,
            ),
            PDL=pdl, EARLY_TRIGGER=config.pdl_trigger_early, num_warps=config.num_warps, num_stages=1, **pdl_option(pdl),
        ),
        smem_bytes=padded_smem_bytes(config.max_ctas_per_sm, device),
    )  # fmt: skip
    return y
