"""The capabilities and sizes of a device, queried once per process."""

import os
from functools import cache

import torch

SM90_VARIABLE = "REQUANT_HOPPER"  # 0 turns off the Gluon kernels for Hopper
H200_SMS = 132
H200_SMEM_BYTES = 227 << 10


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor has finished (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def supports_ptx(device: torch.device) -> bool:
    """Whether kernels may use inline PTX: NVIDIA, Ampere or newer."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def supports_sm90(device: torch.device) -> bool:
    """Whether the Gluon kernels run: Hopper, Triton 3.6 or newer, and not turned off by SM90_VARIABLE."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get(SM90_VARIABLE) == "0":
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


@cache
def num_sms(device: torch.device) -> int:
    """SMs of a GPU; an H200's if there is none."""
    if device.type != "cuda":
        return H200_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def max_smem_bytes(device: torch.device) -> int:
    """Shared memory that one CTA may request; an H200's if there is no GPU."""
    if device.type != "cuda":
        return H200_SMEM_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def forget() -> None:
    """Query again."""
    for function in (supports_pdl, supports_ptx, supports_sm90, num_sms, max_smem_bytes):
        function.cache_clear()
