"""Run under TRITON_INTERPRET=1 by `test_interpreter.py`: the decode kernel with words and residuals through shared memory.

Triton's interpreter knows no inline assembly. Here the texts of `copies.py` and `passes.py` get their meaning, and the
decoders go to `ptx_model`. What `cp.async` copies arrives when a `wait` says so and not before: until then its place
holds nonsense, and a place that is asked for again before it was read loses what it held.
"""

import ctypes
from typing import Any

import loop_bounds  # noqa: F401
import numpy as np
import torch
import triton.language as tl
from cases import Case, random_layout, relative_error
from ptx_model import run_ptx
from requant_kernels.fallback import reference
from requant_kernels.launch_config import AHEAD, COPIED, STAGED, decode_setting
from requant_kernels.scalar.gemv import decode
from triton.runtime.interpreter import TensorHandle

BASE = 1 << 12  # where shared memory begins
NONSENSE = np.uint32(0x7FC17FC1)  # no number, in every type
SHARED = np.full(1 << 14, NONSENSE, np.uint32)
waiting: list[list[tuple[np.ndarray, np.ndarray]]] = []  # groups of places and what comes there
begun: list[tuple[np.ndarray, np.ndarray]] = []


def words_at(address: np.ndarray, count: int) -> np.ndarray:
    """So many words from each address of global memory: [.., count]."""
    assert not (address % 16).any()
    found = [(ctypes.c_uint32 * count).from_address(int(at)) for at in address.ravel()]
    return np.array(found, np.uint32).reshape(*address.shape, count)


def places(address: np.ndarray, count: int = 4) -> np.ndarray:
    """Of so many words from each address of shared memory."""
    return (address.astype(np.int64)[..., None] - BASE) // 4 + np.arange(count)


def request(target: np.ndarray, source: np.ndarray, inside: np.ndarray) -> None:
    to, inside = places(target[..., 0])[inside[..., 0] != 0], inside[..., 0] != 0
    begun.append((to, words_at(source[..., 0][inside], 4)))
    SHARED[to] = NONSENSE


def commit() -> None:
    waiting.append(begun.copy())
    begun.clear()


def wait(later: int) -> None:
    while len(waiting) > later:
        for to, words in waiting.pop(0):
            SHARED[to] = words


def take(start: np.ndarray, inside: np.ndarray, shared: bool) -> list[np.ndarray]:
    """Eight times four words; nonsense where nothing is read."""
    start, inside = start[..., 0], inside[..., 0] != 0
    found = []
    for i in range(8):
        own = np.full((*start.shape, 4), NONSENSE, np.uint32)
        at = start[inside] + start.dtype.type(64 * i)
        own[inside] = SHARED[places(at)] if shared else words_at(at, 4)
        found.append(own)
    return found


def stage(text: str, place: np.ndarray, source: np.ndarray, left: np.ndarray) -> None:
    step = int(text.split("$3, ")[2].split(";")[0])
    for i in range(4):
        own = left.view(np.int32) > i * step
        SHARED[places(place[own] + np.uint32(i * step))] = words_at(source[own] + np.uint64(i * step), 4)


def products(
    text: str, columns: np.ndarray, values: np.ndarray, base: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    total = sums.view(np.float32)
    for half in (0, 16):
        address = base + 2 * ((columns >> np.uint32(half)) & 0xFFFF)
        x = SHARED[places(address // 4 * 4, 1)[..., 0]] >> (8 * (address % 4)).astype(np.uint32) & 0xFFFF
        x = (x << 16).view(np.float32) if "mov.b32 x" in text else x.astype(np.uint16).view(np.float16)
        value = ((values >> np.uint32(half)) & 0xFFFF).astype(np.uint16).view(np.float16)
        total = total + x.astype(np.float32) * value.astype(np.float32)
    return total.view(np.uint32)


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int, _semantic: Any = None
) -> Any:
    """What Triton's own does on a GPU."""
    asm, constraints = (str(getattr(text, "value", text)) for text in (asm, constraints))
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    assert len(constraints.split(",")) == pack * (len(kinds) + len(args)) or pack == 1
    values = [np.asarray(arg.handle.data) for arg in args]
    shape = np.broadcast_shapes(*(value.shape for value in values)) if values else (1,)
    values = [
        np.ascontiguousarray(np.broadcast_to(v, shape)).view(
            np.uint64 if v.dtype.itemsize == 8 else np.uint32
        )
        for v in values
    ]
    results = [np.zeros(shape, np.uint64 if kinds[0] == tl.int64 else np.uint32)] * len(kinds)
    if ".shared .align" in asm:
        results[0] = results[0] + np.uint32(BASE)
    elif "cp.async.cg" in asm:
        request(*values)
    elif "commit_group" in asm:
        commit()
    elif "wait_group" in asm:
        wait(int(asm.split()[1].rstrip(";")))
    elif "st.shared.v4" in asm:
        stage(asm, *values)
    elif len(kinds) == 8 and "bra NONE" in asm:
        results = take(*values, shared="ld.shared" in asm)
    elif asm.startswith("ld.shared.v4"):
        results = [SHARED[places(values[0][..., 0])]]
    elif "ld.shared.b16" in asm:
        results = [products(asm, *values)]
    else:
        operands = {f"${len(kinds) + i}": value for i, value in enumerate(values)}
        results = run_ptx(asm, operands, shape, outputs=len(kinds))
    numpy_of = {tl.float32: np.float32, tl.int32: np.int32, tl.int64: np.int64}
    made = tuple(
        tl.tensor(
            TensorHandle(np.ascontiguousarray(result).view(numpy_of[kind]), kind),
            tl.block_type(kind, list(shape)) if values else kind,
        )
        for result, kind in zip(results, kinds, strict=True)
    )
    return made if isinstance(dtype, tuple) else made[0]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tl.inline_asm_elementwise = inline_asm_elementwise
    for case, launch in (
        (Case(kind="grid", bits=2, n=32, k=1024, m=1), (2, 1, 3, 0)),
        (Case(kind="grid", bits=3, n=40, k=1280, m=1, bias=True), (2, 2, 2, 0)),  # blocks and tiles run out
        (
            Case(kind="grid", bits=4, n=16, k=768, m=3, zero_points=True),
            (1, 1, 4, AHEAD),
        ),  # a ring longer than needed
        (Case(kind="grid", bits=2, n=16, k=1000, m=1, group_size=1000), (2, 1, 2, AHEAD)),
        (Case(kind="codebook", bits=3, n=16, k=1100, m=1), (2, 1, 2, 0)),
        (Case(kind="grid", bits=2, n=16, k=1280, m=1, group_size=64, zero_points=True), (4, 1, 2, STAGED)),
        (Case(kind="grid", bits=2, n=37, k=512, m=1, density=0.03), (2, 1, 3, STAGED)),
        (Case(kind="grid", bits=3, n=37, k=512, m=1, density=0.01, bias=True), (4, 2, 2, STAGED)),
        (Case(kind="codebook", bits=2, n=16, k=512, m=1, density=0.02), (1, 1, 3, STAGED)),
        (Case(kind="grid", bits=2, n=16, k=600, m=1, density=0.02), (2, 1, 3, 0)),  # slots beside the blocks
    ):
        warps, tiles, depth, bits = launch
        layout, x = random_layout(case, "cpu"), torch.randn(case.m, case.k).to(case.dtype)
        SHARED[:] = NONSENSE
        waiting.clear()
        got = decode(x, layout, None, decode_setting((warps, tiles, depth, COPIED | bits, 0)), asm=True)
        error = relative_error(got, reference.linear(x, layout))
        assert error < (3e-3 if case.dtype == torch.float16 else 1.2e-2), (
            f"{case} {launch} is off by {error:.1e}"
        )
    # the ring takes more than a program has: words go to registers
    case = Case(kind="grid", bits=4, n=16, k=512, m=1)
    layout, x = random_layout(case, "cpu"), torch.randn(1, 512).half()
    assert (
        relative_error(
            decode(x, layout, None, decode_setting((2, 1, 30, COPIED, 0)), asm=True),
            reference.linear(x, layout),
        )
        < 3e-3
    )


if __name__ == "__main__":
    main()
