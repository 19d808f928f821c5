"""Kernels of other libraries behind one signature: `build(n, k) -> call(x)`, each call with its own random weights.

A peer that cannot be imported, built or captured is reported as failed, with its error; none is required.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Peer:
    """`bits_per_weight` counts what the peer reads: codes, scales, zero points, residuals."""

    build: Callable[[int, int], Callable[[Tensor], Tensor]]
    dtype: torch.dtype
    bits_per_weight: float
    tokens: int = 1 << 30  # largest number of tokens that the peer supports


def torch_linear(dtype: torch.dtype) -> Callable[[int, int], Callable[[Tensor], Tensor]]:
    """The baseline: `F.linear` with an unquantized weight."""

    def build(n: int, k: int) -> Callable[[Tensor], Tensor]:
        weight = torch.randn(n, k, device="cuda", dtype=dtype) * 0.02
        return lambda x: torch.nn.functional.linear(x, weight)

    return build


def torch_int4(n: int, k: int) -> Callable[[Tensor], Tensor]:
    """torch's tinygemm: 4 bits, groups of 128, bfloat16."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scales)


def humming(bits: int) -> Callable[[int, int], Callable[[Tensor], Tensor]]:
    """humming-kernels, groups of 128."""

    def build(n: int, k: int) -> Callable[[Tensor], Tensor]:
        from humming.layer import HummingLayer

        config = {"dtype": f"int{bits}", "group_size": 128}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.float16).cuda()
        layer.load_from_unquantized(torch.randn(n, k, device="cuda", dtype=torch.float16) * 0.02)
        layer.transform()
        return layer

    return build


def gemlite(bits: int) -> Callable[[int, int], Callable[[Tensor], Tensor]]:
    """gemlite's A16Wn, groups of 128 with zero points."""

    def build(n: int, k: int) -> Callable[[Tensor], Tensor]:
        from gemlite.helper import A16Wn

        codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device="cuda")
        scales = torch.rand(n, k // 128, device="cuda", dtype=torch.float16)
        zeros = torch.full_like(scales, 1 << (bits - 1))
        maker = A16Wn(device="cuda:0", dtype=torch.float16)
        return maker.from_weights(codes, scales, zeros, W_nbits=bits, group_size=128)

    return build


def nf4(n: int, k: int) -> Callable[[Tensor], Tensor]:
    """bitsandbytes' NF4, blocks of 64."""
    import bitsandbytes.functional as functional

    weight = torch.randn(n, k, device="cuda", dtype=torch.float16)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    shape, absmax = list(state.shape), state.absmax
    gemm = torch.ops.bitsandbytes.gemm_4bit.default
    return lambda x: gemm(x, codes.view(-1, 1), shape, absmax, 64, "nf4")


def spqr(n: int, k: int) -> Callable[[Tensor], Tensor]:
    """SpQR's dense-and-sparse kernel: 3 bits in tiles of 16 x 16, 1 % of residuals, one token."""
    from spqr_quant.inference import FeatureFlags
    from spqr_quant.inference_kernels import cuda_kernel  # noqa: F401  (registers the op)

    dense = torch.randint(-(2**62), 2**62, (n * k // 16,), dtype=torch.int64, device="cuda")
    rows = torch.arange(n + 1, dtype=torch.int32, device="cuda") * (k // 100)
    count = n * (k // 100)
    values = (torch.randn(count, device="cuda") * 0.1).half().view(torch.int16).int()
    entries = values << 16 | torch.randint(0, k, (count,), dtype=torch.int32, device="cuda")
    flags, y = int(FeatureFlags.SPARSE_FUSED_FP32_ASYNC), torch.zeros(n, dtype=torch.float16, device="cuda")
    multiply = torch.ops.spqr_cuda.spqr_mul
    return lambda x: multiply(n, k, 3, 16, 16, dense, rows, entries, count, x.view(-1), flags, y, y)


PEERS: dict[str, Peer] = {
    "torch int4 g128": Peer(build=torch_int4, dtype=torch.bfloat16, bits_per_weight=4.25),
    "humming 2-bit g128": Peer(build=humming(2), dtype=torch.float16, bits_per_weight=2.125),
    "humming 3-bit g128": Peer(build=humming(3), dtype=torch.float16, bits_per_weight=3.125),
    "humming 4-bit g128": Peer(build=humming(4), dtype=torch.float16, bits_per_weight=4.125),
    "gemlite 2-bit g128": Peer(build=gemlite(2), dtype=torch.float16, bits_per_weight=2.25),
    "gemlite 4-bit g128": Peer(build=gemlite(4), dtype=torch.float16, bits_per_weight=4.25),
    "SpQR 3-bit + 1% sparse": Peer(build=spqr, dtype=torch.float16, bits_per_weight=4.32, tokens=1),
    "bitsandbytes NF4": Peer(build=nf4, dtype=torch.float16, bits_per_weight=4.5),
}
