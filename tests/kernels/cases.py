"""Layouts of random content, shared by the kernel tests."""

from dataclasses import dataclass
from typing import Any

import torch
from requant_kernels import Layout, pack_codebook, pack_grid
from requant_kernels.fallback import reference
from requant_kernels.hadamard.tile_builder import HADAMARD_TILE
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import step_bits
from requant_kernels.trellis.operands import RotatedActivations
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    format: str  # "grid" or "codebook"
    bits: int
    n: int
    k: int
    m: int
    group_size: int = 128
    zero_points: bool = False
    density: float = 0.0
    int8_residuals: bool = False
    column_scales: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float16


def random_csr(
    n: int, k: int, density: float, int8: bool, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Residuals at random positions; row 3 is full, row 5 empty."""
    mask = torch.rand(n, k, device=device) < density
    if n > 5:
        mask[3], mask[5] = True, False
    rows, columns = mask.nonzero(as_tuple=True)
    indptr = torch.zeros(n + 1, dtype=torch.int64, device=device)
    indptr[1:] = mask.sum(1).cumsum(0)
    if int8:
        values = torch.randint(-127, 128, (len(rows),), dtype=torch.int8, device=device)
        return indptr, columns.int(), values, (torch.rand(n, device=device) * 0.01).half()
    return indptr, columns.int(), torch.randn(len(rows), device=device).half(), None


def random_layout(case: Case, device: str) -> Layout:
    codes = torch.randint(0, 1 << case.bits, (case.n, case.k), dtype=torch.uint8, device=device)
    sparse = None
    if case.density:
        sparse = random_csr(case.n, case.k, case.density, case.int8_residuals, device)
    if case.format == "codebook":
        levels = torch.randn(case.n, 1 << case.bits, device=device).half()
        return pack_codebook(codes, levels, bits=case.bits, sparse=sparse)
    groups = -(-case.k // case.group_size)
    zeros = torch.randint(0, 1 << case.bits, (case.n, groups), dtype=torch.uint8, device=device)
    return pack_grid(
        codes,
        (torch.rand(case.n, groups, device=device) + 0.1).half(),
        zeros if case.zero_points else None,
        bits=case.bits,
        group_size=case.group_size,
        column_scales=(torch.rand(case.k, device=device) + 0.5).half() if case.column_scales else None,
        sparse=sparse,
    )


_empty = torch.empty


def poisoned_empty(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.empty`, full of NaN: patched in, an output or a workspace that a kernel does not write shows in the result."""
    tensor = _empty(*args, **kwargs)
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def rotated(x: Tensor) -> Tensor:
    """H x, float64. A block of r c is the Kronecker product of blocks of r and c; whole, that of 8192 takes 0.5 GB."""
    size = x.shape[-1] & -x.shape[-1]
    rows = 1 << size.bit_length() // 2
    blocks = x.double().unflatten(-1, (-1, rows, size // rows))
    return (reference.hadamard(rows) @ blocks @ reference.hadamard(size // rows)).flatten(-3)


def random_trellis(n: int, k: int, bits: float, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes padded to tiles, input and output scales."""
    rows, columns = -(-n // 16) * 16, -(-k // 16) * 16
    most = torch.tensor([1 << own for own in step_bits(round(4 * bits))], device=device).repeat(columns // 4)
    codes = (torch.randint(0, 256, (rows, columns), device=device) % most).to(torch.uint8)
    return codes, (torch.rand(k, device=device) + 0.5).half(), (torch.rand(n, device=device) + 0.5).half()


def multiplied_values(x: RotatedActivations, code: str, *, high_bytes: bool = False) -> Tensor:
    """The values that int8 activations stand for, float64 [m, columns]; by their high bytes alone."""
    assert x.scales is not None
    high, low = x.values.view(x.num_tokens, 2, -1).double().unbind(1)
    q = high if high_bytes else 256 * high + low
    scales = x.scales[..., 2 if high_bytes else 0].double()
    values = q * scales.repeat_interleave(HADAMARD_TILE, 1)[:, : q.shape[1]]
    if CODES[code].weights_per_hash == 1:
        return values
    sums, differences = values[:, ::2], values[:, 1::2]
    return torch.stack([(sums + differences) / 2, (sums - differences) / 2], -1).flatten(1)
