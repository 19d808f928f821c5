"""Which matrices multiply activations that are rounded to 8 bits: those whose codes are coarser by far.

A Hadamard transform has spread every large value over all columns, so the largest of 4096 is 3.7 deviations, a step of
8-bit integers 0.03, and rounding adds 7e-5 of the variance. (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456, quantizes
rotated activations too.) Codes of two bits differ from the original by 7e-2 of the variance, of three by 2e-2, of four by
4e-3. So matrices of more than MAX_BITS keep 16 bits, and so does a head, whose errors are those of the logits.

    tokens              multiplied
    1 .. 4              in 16 bits, whose high and low bytes are two columns of the same MMA, for nothing (`gemv.py`)
    5 .. 8              in 8 bits, the high bytes; in float16 where a code is finer, of one matrix or of several that read
                        the same activations (`gemv.py`)
    9 .. 16             on Hopper in float16 (`gemm_sm90.py`), otherwise as 5 .. 8
    17 and more         in float16 or int8, by the shape: `gemm_int8.py`, which rounds weights to 8 bits as well

A transform spreads a value over its block only. Where one value of a token exceeds all others, in one of B blocks, what it
is spread to is sqrt(B) times the root mean square, and rounding adds B / (12 x 127^2) of the energy: MAX_BLOCKS limits
that to 2 % of the error of codes of 3 bits. (11008 columns are 43 blocks of 256; 13696 would be 107 of 128.)
"""

import os

from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import TrellisLayout

MAX_BITS = 3.25  # of codes, to which rounding weights and activations to 8 bits adds 1 % of their error
MAX_BLOCKS = 64  # of the transform of the input
VARIABLE = "REQUANT_INT8_ACTIVATIONS"  # of the environment: 0 keeps 16 bits for all


def is_coarse(code: str, bits: float) -> bool:
    """Whether 8 bits lose little beside such codes, of which kernels can make integers."""
    return CODES[code].byte_sums and bits <= MAX_BITS


def tolerates_8_bits(layout: TrellisLayout) -> bool:
    """Whether activations of 8 bits lose little: for coarse codes with both rotations, so for no head."""
    return (
        is_coarse(layout.code, layout.bits)
        and layout.rotates_output
        and layout.input_scales is not None
        and layout.k // (layout.k & -layout.k) <= MAX_BLOCKS
        and os.environ.get(VARIABLE) != "0"
    )
