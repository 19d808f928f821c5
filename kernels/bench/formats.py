"""Random packed matrices, what a call reads of them, and kernels compiled in parallel before anything is timed."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from requant_kernels import Layout, TrellisLayout, pack_codebook, pack_grid, pack_trellis
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import step_bits
from torch import Tensor


def random_sparse(n: int, k: int, density: float) -> tuple[Tensor, Tensor, Tensor, None]:
    """CSR of random positions, fp16 values."""
    mask = torch.rand(n, k, device="cuda") < density
    rows, columns = mask.nonzero(as_tuple=True)
    indptr = torch.zeros(n + 1, dtype=torch.int64, device="cuda")
    indptr[1:] = mask.sum(1).cumsum(0)
    return indptr, columns.int(), torch.randn(len(rows), device="cuda").half() * 0.1, None


def _signs(width: int) -> Tensor:
    """The same for all matrices of a width, as those that `requant quantize` makes."""
    g = torch.Generator("cuda").manual_seed(width)
    return torch.randn(width, generator=g, device="cuda").sign()


def random_layout(kind: str, bits: float, n: int, k: int, density: float = 0.0) -> Layout | TrellisLayout:
    """A packed matrix of random codes; groups of 128 for a grid; `kind` may name a trellis code."""
    sparse = random_sparse(n, k, density) if density else None
    if kind in CODES:
        own = torch.tensor([1 << width for width in step_bits(round(4 * bits))], device="cuda").repeat(k // 4)
        codes = (torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda") % own).to(torch.uint8)
        scales = [(_signs(width) * 0.02).half() for width in (k, n)]
        return pack_trellis(codes, *scales, bits=bits, code=kind, sparse=sparse)
    bits = int(bits)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device="cuda")
    if kind == "codebook":
        levels = torch.randn(n, 1 << bits, device="cuda").sort(1).values.half()
        return pack_codebook(codes, levels, bits=bits, sparse=sparse)
    scales = torch.rand(n, -(-k // 128), device="cuda").half() + 0.1
    return pack_grid(codes, scales, None, bits=bits, group_size=128, sparse=sparse)


ONCE = ("row_nnz", "coo", "block_ptr")  # not read, or the residuals again in another order


def tensors_of(layout: Layout | TrellisLayout) -> list[Tensor]:
    """Every tensor that a call reads (the levels behind the tables and the row counts are not read)."""
    own = [getattr(layout, f.name) for f in fields(layout) if f.name not in ("levels", "sparse")]
    if layout.sparse is not None:
        own += [getattr(layout.sparse, f.name) for f in fields(layout.sparse) if f.name not in ONCE]
    return [value for value in own if isinstance(value, Tensor)]


def stored_bytes(layout: Layout | TrellisLayout) -> int:
    """Bytes of `tensors_of`."""
    return sum(t.numel() * t.element_size() for t in tensors_of(layout))


def clone(layout: Layout | TrellisLayout) -> Layout | TrellisLayout:
    """A copy with memory of its own."""
    copied: dict[str, Any] = {
        f.name: getattr(layout, f.name).clone()
        for f in fields(layout)
        if isinstance(getattr(layout, f.name), Tensor)
    }
    if layout.sparse is not None:
        values = {f.name: getattr(layout.sparse, f.name) for f in fields(layout.sparse)}
        copied["sparse"] = replace(
            layout.sparse, **{name: v.clone() for name, v in values.items() if isinstance(v, Tensor)}
        )
    return replace(layout, **copied)


def compile_in_parallel(call: Callable[..., object], jobs: Sequence[tuple[Any, ...]], processes: int) -> None:
    """`call(*job)` for every job in processes of their own: what they compile stays in Triton's cache on disk."""
    if processes < 2:
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(_quietly, [(call, job) for job in jobs], chunksize=1)


def _quietly(call: Callable[..., object], job: tuple[Any, ...]) -> None:
    try:
        call(*job)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # the timing that follows meets the same error and reports it
        print(f"{job}: {type(error).__name__}: {error}"[:300], flush=True)
