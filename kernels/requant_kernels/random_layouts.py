"""Packed matrices of random codes, for `kernels/bench` and the studies: speed depends on shapes, not on values."""

import torch
from torch import Tensor

from requant_kernels.common.packing import Layout, pack_codebook, pack_grid
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import TrellisLayout, pack_trellis, step_bits


def random_sparse(
    n: int, k: int, density: float, *, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, None]:
    """CSR of random positions, fp16 values."""
    mask = torch.rand(n, k, device=device) < density
    rows, columns = mask.nonzero(as_tuple=True)
    indptr = torch.zeros(n + 1, dtype=torch.int64, device=device)
    indptr[1:] = mask.sum(1).cumsum(0)
    return indptr, columns.int(), torch.randn(len(rows), device=device).half() * 0.1, None


def _signs(width: int, device: str) -> Tensor:
    """The same for all matrices of a width, as in `requant quantize`."""
    g = torch.Generator(device).manual_seed(width)
    return torch.randn(width, generator=g, device=device).sign()


def random_layout(
    kind: str, bits: float, n: int, k: int, density: float = 0.0, *, device: str = "cuda"
) -> Layout | TrellisLayout:
    """A packed matrix of random codes; groups of 128 for a grid; `kind` may name a trellis code."""
    sparse = random_sparse(n, k, density, device=device) if density else None
    if kind in CODES:
        own = torch.tensor([1 << width for width in step_bits(round(4 * bits))], device=device).repeat(k // 4)
        codes = (torch.randint(0, 256, (n, k), dtype=torch.uint8, device=device) % own).to(torch.uint8)
        scales = [(_signs(width, device) * 0.02).half() for width in (k, n)]
        return pack_trellis(codes, *scales, bits=bits, code=kind, sparse=sparse)
    bits = int(bits)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    if kind == "codebook":
        levels = torch.randn(n, 1 << bits, device=device).sort(1).values.half()
        return pack_codebook(codes, levels, bits=bits, sparse=sparse)
    scales = torch.rand(n, -(-k // 128), device=device).half() + 0.1
    return pack_grid(codes, scales, None, bits=bits, group_size=128, sparse=sparse)
