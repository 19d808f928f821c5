"""The rules for launches of the experts of a step, and of a prompt (`experts/`), which no table knows."""

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.launch_config import ROWS, Shape
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.layout import k64_per_unit


def trellis_slots(shape: Shape, slots: int, device: torch.device) -> TrellisGemvConfig:
    """One token times each of `slots` matrices (`experts/`). CTAs of 16 warps that rotate the token for themselves, where
    one an SM takes all tiles; else as many warps as divide the columns, and about 16 an SM."""
    tiles = -(-shape.n // ROWS)
    units = -(-shape.k // (64 * k64_per_unit(round(4 * shape.bits))))
    if CODES[shape.format].byte_sums and shape.bits <= 4 and shape.k <= 4096 and shape.k % 256 == 0:
        counts = (1, 2, 4, 7) if shape.bits <= 3 else (1, 2, 4)  # seven tiles of 4 bits spill
        own = next((count for count in counts if slots * -(-tiles // count) <= num_sms(device)), None)
        if own is not None:
            several = own <= 2 and shape.bits == int(shape.bits) and units % 32 == 0
            return TrellisGemvConfig(num_warps=16, tiles_per_cta=own, units_per_step=2 if several else 1)
    num_warps = next((warps for warps in (8, 4) if units % warps == 0), 8 if units > 8 else 4)
    most = (1,) if shape.bits > 4 or not CODES[shape.format].byte_sums else (1, 2)
    own = next((n for n in most if slots * -(-tiles // n) * num_warps <= 16 * num_sms(device)), most[-1])
    return TrellisGemvConfig(num_warps=num_warps, tiles_per_cta=own, units_per_step=1)


GROUPS = (32, 64, 128, 256)  # tokens of a CTA


def trellis_groups(bits: float, slots: int, experts: int) -> GemmSm90Config:
    """`slots` tokens divided among `experts` matrices, a CTA's all of one (`experts/prefill.py`). By a model, not measured.

    A CTA takes time for its weights, as much as for 43 tokens, and for its N tokens, of which an expert's last CTA has half
    in the mean: r / N + 1 / 2 CTAs for the r tokens of an expert, whose time is least at N = sqrt(86 r).
    """
    wanted = (86 * slots / experts) ** 0.5
    return trellis_group_of(bits, next((n for n in GROUPS if wanted < 2**0.5 * n), GROUPS[-1]))


def trellis_group_of(bits: float, tokens: int) -> GemmSm90Config:
    """A CTA of so many tokens, as `trellis_gemm_sm90` launches it."""
    small = tokens == 64 and bits <= 4
    return GemmSm90Config(
        tokens_per_cta=tokens, num_warps=4 if small else 8, tiles_per_warp=2 if small else 1,
        prefetch_at=2 if tokens == 256 else 0,
    )  # fmt: skip
