"""The trellis GEMM for Hopper on integer tensor cores, of many tokens: half of float16's cycles for the same product.

    y = s V x_q        V int8, the byte sums of the codes; x_q int8, rotated activations over the scale s of their token

Used from 65 tokens on, for tall matrices from 33. The kernel is that of `gemm_sm90.py`. Byte sums have ten bits, of which
eight are kept: an error of 6e-5 of the weights' variance. Activations are rounded by as much; `rounding.py` says which
matrices tolerate that.

Activations are rotated to float16, in the form that matrices of more bits next to this one read, and quantized in a launch
of its own, which arranges them as the product reads them: of every 64 columns, lane `4 g + t` multiplies the 16 of tile t,
four in each register of wgmma's operand.

    position  16 q + 4 t + e   of   column  16 t + 4 q + e
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.launch import interned, launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import dequantize, gemm_sm90
from requant_kernels.trellis.gemm_sm90_launch import ALONE, PdlPosition
from requant_kernels.trellis.layout import TrellisLayout
from requant_kernels.trellis.operands import ActivationForm, RotatedActivations
from requant_kernels.trellis.rotate import rotate_input, rotate_output
from requant_kernels.trellis.rounding import is_coarse, tolerates_8_bits

# With fewer, decoding takes most of the time, and quantizing activations 1 to 3 us. At 128 tokens the products of an 8B
# block take 16 % less (`pair`, `gemm-int8-h200.json`). At 64 only gate and up do (`gemm-int8-trials-h200.json`), which share
# what is quantized: a step of 64 sequences takes 3 to 4 % less (`overlap-h200.json`). At 32 they gain nothing.
MIN_TOKENS, MIN_TALL_TOKENS = 65, 33


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scales_ptr, columns, width, WIDTH: tl.constexpr, PERMUTED: tl.constexpr, PDL: tl.constexpr
):
    """One token of `columns` values -> `width`, a multiple of 64; WIDTH: a power of two from there on.

    PERMUTED: x is in the order of `gemm_sm90.py`. A token with an infinity or NaN gets the scale NaN.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    wait_for_previous_launch(PDL, True)
    x = tl.load(x_ptr + token * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    q = tl.floor(x * tl.where(most > 0, 127 / most, 0.0) + 0.5).to(tl.int8)
    if PERMUTED:  # q i t e of column 16 t + 4 q + 2 i + e
        q = tl.permute(tl.reshape(q, [WIDTH // 64, 4, 2, 4, 2]), (0, 1, 3, 2, 4))
    else:  # t q e
        q = tl.permute(tl.reshape(q, [WIDTH // 64, 4, 4, 4]), (0, 2, 1, 3))
    tl.store(q_ptr + token * width + at, tl.reshape(q, [WIDTH]), mask=at < width)
    tl.store(scales_ptr + token, most / 127 + tl.sum(x * 0, 0))


def quantized(rotated: Tensor, *, permuted: bool, pdl: bool) -> tuple[Tensor, Tensor]:
    """int8 [m, width] in the order of the product, and float32 [m], of rotated activations [m, columns], contiguous."""
    m, columns = rotated.shape
    width = triton.cdiv(columns, gemm_sm90.K64) * gemm_sm90.K64
    q = torch.empty(m, width, dtype=torch.int8, device=rotated.device)
    scales = torch.empty(m, dtype=torch.float32, device=rotated.device)
    lanes = triton.next_power_of_2(width)
    launch(
        quantize_kernel,
        (m, 1, 1),
        (rotated, q, scales, columns, width),
        interned(
            WIDTH=lanes, PERMUTED=permuted, PDL=pdl, num_warps=min(16, max(1, lanes // 512)), **pdl_option(pdl)
        ),
    )  # fmt: skip
    return q, scales


def suits(code: str, bits: float, n: int, k: int, num_tokens: int) -> bool:
    """Whether int8 loses little of such codes, and gains time for such matrices and so many tokens."""
    return is_coarse(code, bits) and num_tokens >= (MIN_TALL_TOKENS if n > 2 * k else MIN_TOKENS)


def supports(layout: TrellisLayout, num_tokens: int, device: torch.device) -> bool:
    """What int8 suits, if both sides are rotated."""
    return suits(layout.code, layout.bits, layout.n, layout.k, num_tokens) and tolerates_8_bits(layout)


def gemm_int8(x: Tensor, layout: TrellisLayout, bias: Tensor | None, config: GemmSm90Config) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous: rotate, quantize, multiply, rotate."""
    return rotate_output(product(x, layout, config), x, layout, bias, asm=True)


def activation_form(layout: TrellisLayout, num_tokens: int) -> ActivationForm | None:
    """What `product` reads for this many tokens: the same as kernels of matrices with more bits."""
    other = gemm_sm90 if num_tokens <= gemm_sm90.MAX_TOKENS else dequantize
    return other.activation_form(layout, num_tokens)


def product(
    x: Tensor | RotatedActivations,
    layout: TrellisLayout,
    config: GemmSm90Config,
    position: PdlPosition = ALONE,
) -> Tensor:
    """As `gemm_sm90.product`; also of x that `quantize` has made."""
    if isinstance(x, RotatedActivations):
        rotated = x
    elif x.shape[0] <= gemm_sm90.MAX_TOKENS:
        rotated = gemm_sm90.rotated_activations(x, layout)
    else:
        columns = dequantize.padded_columns(layout)
        rotated = RotatedActivations(values=rotate_input(x, layout, columns, asm=True), scales=None)
    own = rotated if rotated.scales is not None else quantize(rotated)
    sums = own.num_tokens <= gemm_sm90.MAX_TOKENS and gemm_sm90.takes_half_sums(layout.code, own.num_tokens)
    return gemm_sm90.multiply(own.values, own.scales, layout, config, position, sums=sums)


def quantize(rotated: RotatedActivations) -> RotatedActivations:
    """What `product` multiplies, for several layers that read the same activations."""
    permuted = rotated.num_tokens <= gemm_sm90.MAX_TOKENS
    values, scales = quantized(rotated.values, permuted=permuted, pdl=True)
    return RotatedActivations(values=values, scales=scales)
