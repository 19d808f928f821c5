"""The bytes that a call reads of a packed matrix, and parallel compilation of kernels before anything is timed."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from requant_kernels import Layout, TrellisLayout
from torch import Tensor

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
    """A copy with its own memory."""
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
    """`call(*job)` for every job in separate processes: what they compile stays in Triton's cache on disk."""
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
