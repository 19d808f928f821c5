"""The rule for launches of the experts of a step (`experts/`), which no table knows."""

import torch

from requant_kernels.common.device import num_sms
from requant_kernels.launch_config import ROWS, Shape
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
