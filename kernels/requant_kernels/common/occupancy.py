"""Dynamic shared memory as an occupancy cap.

With programmatic dependent launch, the first CTAs of a kernel begin on whatever SMs the kernel before leaves free, pile onto
them, and stay there (8192 x 8192, 2 bits: 12.4 us with space for six CTAs an SM, 9.05 with space for the four that are an
even share). Padding the dynamic shared memory of a launch caps its CTAs per SM (`launch.py`).
"""

import torch

from requant_kernels.heuristics import multiprocessors, shared_memory
from requant_kernels.launch_config import DecodeConfig, TrellisConfig

SM_BYTES = 227 << 10  # that the CTAs of an SM share, less 1024 each


def shared_room(programs: int, config: DecodeConfig | TrellisConfig, device: torch.device) -> int:
    """Bytes that every program takes so that as many as its launch has for each multiprocessor fit there, or, of two
    `shares`, twice as many: this launch's and the next one's. 0 where that is no matter."""
    if config.shares == 0 or device.type != "cuda":
        return 0
    each = config.shares * -(-programs // multiprocessors(device))
    return max(0, min(shared_memory(device) - 1024, SM_BYTES // each - 1024))
