"""What `launch` remembers a kernel by is never coarser than what Triton chooses it by."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.launching import _tag  # noqa: E402


def arguments():
    room = torch.empty(64, dtype=torch.uint8)
    for dtype, offset in itertools.product(
        (torch.float16, torch.bfloat16, torch.int32, torch.float32), (0, 8, 16)
    ):
        yield room[offset : offset + 16].view(dtype)
    yield from (0, 1, 2, 3, 15, 16, 17, 32, 4096, 4097, 2**31 - 1, 2**31, 2**31 + 16, 2**40, -16, -1)
    yield None


def test_equal_tags_mean_an_equal_specialization() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    def triton_sees(value):
        return native_specialize_impl(type(CUDABackend(GPUTarget("cuda", 90, 32))), value, False, True, True)

    by_tag: dict = {}
    for value in arguments():
        by_tag.setdefault(_tag(value), []).append(triton_sees(value))
    assert len(by_tag) > 12
    for tag, seen in by_tag.items():
        assert all(one == seen[0] for one in seen), (tag, seen)
