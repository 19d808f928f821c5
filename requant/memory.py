"""Bytes of memory: what a device still has, and the most that was taken of it."""

import resource

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated at most on the GPU, else resident at most in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
