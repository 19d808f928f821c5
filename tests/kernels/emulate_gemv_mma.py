"""Run by `test_interpreter.py` with TRITON_INTERPRET=1: `gemv_int8_mma.py` and `gemv_fp16_mma.py`, inline PTX included.

Triton's interpreter has no inline assembly, so the PTX instructions that these kernels use have a model here; all warps run
in lockstep. What `cp.async` copies arrives at the wait that says so; before that its destination is garbage.
"""

import ctypes
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gluon_as_triton  # noqa: F401
import interpreter_fixes  # noqa: F401
import numpy as np
import torch
import triton.language as tl
from case_selection import selected
from cases import Case, random_layout, relative_error
from ptx_model import float_product, integer_product, permute_bytes
from requant_kernels.common.inline_ptx import SMEM_UNIT, smem_units
from requant_kernels.common.occupancy import SM_SMEM_BYTES
from requant_kernels.common.packing import GridLayout, Layout
from requant_kernels.fallback import reference
from requant_kernels.launch_config import LaunchConfig
from requant_kernels.scalar import gemv_fp16_mma, gemv_int8_mma
from requant_kernels.scalar.gemv_fp16_mma_launch import Fp16MmaConfig
from requant_kernels.scalar.gemv_int8_mma import smem_layout
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

SMEM_BASE = 1 << 12  # the address where shared memory begins
GARBAGE = 0x7FC17FC1
SHARED = np.full(1 << 14, GARBAGE, np.uint32)
committed: list[list[tuple[np.ndarray, np.ndarray]]] = []  # cp.async groups: where words go, and the words
uncommitted: list[tuple[np.ndarray, np.ndarray]] = []
Registers = dict[str, np.ndarray]


def from_memory(address: np.ndarray, count: int) -> np.ndarray:
    """So many words from each address of global memory: [.., count]."""
    assert not (address % (4 * count)).any()
    found = [(ctypes.c_uint32 * count).from_address(int(at)) for at in address.ravel()]
    return np.array(found, np.uint32).reshape(*address.shape, count)


def smem_indices(address: np.ndarray, count: int) -> np.ndarray:
    """The indices in SHARED of so many words from each address."""
    assert not (address % (4 * count)).any()
    return (address.astype(np.int64)[..., None] - SMEM_BASE) // 4 + np.arange(count)


class AsmBlock:
    """One asm block, run for all threads of a CTA: registers are arrays [warps, 32]."""

    def __init__(self, registers: Registers, shape: tuple[int, ...]) -> None:
        self.registers, self.shape = registers, shape
        self.alive = np.ones(shape, bool)

    def value(self, name: str) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        if name == "%tid.x":
            return np.arange(np.prod(self.shape), dtype=np.uint32).reshape(self.shape)
        number = int(name.replace("0f", "0x"), 0) if name[:2] in ("0f", "0x") else int(name)
        return np.full(self.shape, number % (1 << 32), np.uint32)

    def floats(self, name: str) -> np.ndarray:
        return self.value(name).view(np.float32)

    def put(self, name: str, value: np.ndarray, guard: np.ndarray | None = None) -> None:
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        old = self.registers.get(name, np.zeros(self.shape, value.dtype))
        self.registers[name] = np.where(self.alive if guard is None else self.alive & guard, value, old)

    def address(self, text: str) -> np.ndarray:
        name, _, offset = text.strip("[]").partition(" + ")
        base = self.value(name)
        return base + base.dtype.type(int(offset or 0))

    def access(self, opcode: str, operands: list[str], guard: np.ndarray) -> None:
        on = self.alive & guard
        target = next(i for i, operand in enumerate(operands) if operand[0] == "[")
        names = operands[:target] + operands[target + 1 :]
        at = self.address(operands[target])[on]
        if opcode == "ld.shared.b16":
            value = np.zeros(self.shape, np.uint32)
            value[on] = SHARED[smem_indices(at // 4 * 4, 1)[..., 0]] >> (at % 4 * 8) & 0xFFFF
            self.put(names[0], value, guard)
            return
        if opcode[:2] == "st":
            SHARED[smem_indices(at, len(names))] = np.stack([self.value(name)[on] for name in names], -1)
            return
        found = from_memory(at, len(names)) if "global" in opcode else SHARED[smem_indices(at, len(names))]
        for i, name in enumerate(names):
            value = np.zeros(self.shape, np.uint32)
            value[on] = found[..., i]
            self.put(name, value, guard)

    def line(self, line: str) -> None:
        guard = np.ones(self.shape, bool)
        if line[0] == "@":
            name, line = line[1:].split(None, 1)
            guard = self.registers[name].astype(bool)
        opcode, _, rest = line.partition(" ")
        operands = [part.strip(" {}") for part in rest.split(",")]
        kind = opcode.split(".")
        if kind[0] == "bra":
            assert (guard == guard[:, :1]).all(), "a warp diverges"
            self.alive &= ~guard
        elif kind[0] in ("bar", "prefetch"):  # lockstep
            pass
        elif kind[0] == "cp":
            if kind[2] == "commit_group":
                committed.append(uncommitted.copy())
                uncommitted.clear()
                return
            if kind[2] == "wait_all":
                for to, words in [*(copied for group in committed for copied in group), *uncommitted]:
                    SHARED[to] = words
                committed.clear()
                uncommitted.clear()
                return
            count = int(operands[2]) // 4
            to, words = (
                smem_indices(self.address(operands[0])[guard], count),
                from_memory(self.address(operands[1])[guard], count),
            )
            uncommitted.append((to, words))
            SHARED[to] = GARBAGE
        elif kind[0] in ("ld", "st"):
            self.access(opcode, operands, guard)
        elif kind[0] == "mma":
            a, b, c = ([self.value(name) for name in operands[i:j]] for i, j in ((4, 8), (8, 10), (10, 14)))
            product = integer_product
            if "s32" not in opcode:
                product = partial(float_product, dtype="bf16" if "bf16" in opcode else "fp16")
            for name, result in zip(operands[:4], product(a, b, c), strict=True):
                self.put(name, result)
        elif opcode == "mov.b32" and rest[0] == "{":
            pair = self.value(operands[2])
            self.put(operands[0], pair & np.uint32(0xFFFF))
            self.put(operands[1], pair >> np.uint32(16))
        else:
            self.put(operands[0], self.arithmetic(opcode, operands[1:]), guard)

    def arithmetic(self, opcode: str, names: list[str]) -> np.ndarray:
        if "f32" in opcode and not opcode.startswith(("cvt", "selp", "mov")):
            x = [self.floats(name) for name in names]
            match opcode.split(".")[0]:
                case "abs":
                    return np.abs(x[0])
                case "max":
                    return np.maximum(x[0], x[1])
                case "add":
                    return x[0] + x[1]
                case "mul":
                    return x[0] * x[1]
                case "rcp":
                    with np.errstate(divide="ignore"):  # lanes that are not guarded yet
                        return np.float32(1) / x[0]
                case "fma":
                    return (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32)
        a = [self.value(name) for name in names]
        signed = [value.view(np.int32) for value in a if value.dtype == np.uint32]
        match opcode:
            case "mov.b32" | "mov.b64" | "mov.u32" | "mov.f32" | "cvt.u32.u16":
                return a[0]
            case "cvt.f32.f16":
                return a[0].astype(np.uint16).view(np.float16).astype(np.float32)
            case "cvt.rn.f32.s32":
                return signed[0].astype(np.float32)
            case "setp.eq.s32":
                return a[0] == a[1]
            case "setp.lt.s32":
                return signed[0] < signed[1]
            case "setp.eq.and.s32":
                return (a[0] == a[1]) & a[2]
            case "setp.gt.and.s32":
                return (signed[0] > signed[1]) & a[2]
            case "setp.ne.s32":
                return a[0] != a[1]
            case "selp.f32" | "selp.b32":
                return np.where(a[2], a[0], a[1])
            case "and.b32":
                return a[0] & a[1]
            case "xor.b32":
                return a[0] ^ a[1]
            case "shl.b32":
                return a[0] << a[1]
            case "shr.u32":
                return a[0] >> a[1]
            case "shf.r.wrap.b32":
                return (a[0] >> a[2]) | (a[1] << np.uint32(1) << (31 - a[2]))
            case "add.s32" | "add.s64":
                return a[0] + a[1]
            case "sub.s32":
                return a[0] - a[1]
            case "mul.lo.s32":
                return a[0] * a[1]
            case "mad.lo.s32" | "mad.lo.u32":
                return a[0] * a[1] + a[2]
            case "mad.wide.s32":
                return signed[0].astype(np.int64).view(np.uint64) * a[1] + a[2]
            case "lop3.b32":
                assert names[3] == "0xEA"
                return a[0] & a[1] | a[2]
            case "prmt.b32":
                return permute_bytes(*a)
            case "shfl.sync.bfly.b32":
                return a[0][:, np.arange(32) ^ int(names[1])]
        raise AssertionError(f"no model of {opcode}")


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int, _semantic: Any = None
) -> Any:
    """What `inline_asm_elementwise` does on a GPU, one element per thread."""
    asm, constraints = (str(getattr(text, "value", text)) for text in (asm, constraints))
    dtype = getattr(dtype, "value", dtype)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    values = [np.asarray(arg.handle.data) for arg in args]
    assert len(constraints.split(",")) == len(kinds) + len(values)
    shape = np.broadcast_shapes(*(value.shape for value in values)) if values else (1,)
    block = AsmBlock({}, shape)
    for i, value in enumerate(values):
        value = np.ascontiguousarray(np.broadcast_to(value, shape))
        block.registers[f"${len(kinds) + i}"] = value.view(
            np.uint64 if value.dtype.itemsize == 8 else np.uint32
        )
    for i, constraint in enumerate(constraints.split(",")):
        if constraint.isdigit():  # an input in the register of an output
            block.registers[f"${constraint}"] = block.registers[f"${i}"]
    if "global_smem" in asm:
        block.registers["$0"] = np.full(shape, SMEM_BASE, np.uint32)
    elif "wait_group" in asm:
        while len(committed) > int(asm.split("wait_group")[1].split(";")[0]):
            for to, words in committed.pop(0):
                SHARED[to] = words
    else:
        text = asm.strip().removeprefix("{").removesuffix("}") if asm.lstrip().startswith("{") else asm
        for line in map(str.strip, re.split(r";|\w+:", text)):
            if line and not line.startswith(".reg"):
                block.line(line)
    numpy_of = {tl.float32: np.float32, tl.int32: np.int32}
    made = tuple(
        tl.tensor(
            TensorHandle(
                np.ascontiguousarray(block.registers.get(f"${i}", np.zeros(shape, np.uint32))).view(
                    numpy_of[kind]
                ),
                kind,
            ),
            tl.block_type(kind, list(shape)) if values else kind,
        )
        for i, kind in enumerate(kinds)
    )
    return made if isinstance(dtype, tuple) else made[0]


def one_token() -> None:
    for case, launch in selected(
        [
            (Case(format="grid", bits=2, n=32, k=1024, m=1), (2, 1, 3)),
            (Case(format="grid", bits=3, n=16, k=512, m=1), (1, 1, 2)),
            (
                Case(format="grid", bits=4, n=40, k=768, m=1, bias=True),
                (2, 2, 2),
            ),  # a last k_tile and row tile that are partly beyond the end
            (Case(format="grid", bits=3, n=40, k=1280, m=1), (4, 2, 3)),
            (Case(format="grid", bits=2, n=16, k=512, m=1, group_size=512), (2, 1, 2)),  # one scale a row
            (Case(format="grid", bits=4, n=16, k=1024, m=1, group_size=256), (2, 1, 2)),
            (Case(format="grid", bits=3, n=16, k=1024, m=1, group_size=512), (2, 1, 2)),
            (Case(format="grid", bits=2, n=200, k=512, m=1), (1, 7, 2)),  # more rows than threads
            (Case(format="grid", bits=2, n=100, k=512, m=1), (2, 3, 4)),  # stages that no k_tile reaches
            (Case(format="grid", bits=2, n=64, k=1024, m=1, density=0.01), (2, 2, 2)),
            (
                Case(format="grid", bits=2, n=64, k=768, m=1, density=0.01),
                (1, 1, 5),
            ),  # more stages than k_tiles
            (Case(format="grid", bits=4, n=64, k=1024, m=1, density=0.03), (2, 2, 3)),
            (
                Case(format="grid", bits=3, n=100, k=1280, m=1, density=0.05),
                (2, 3, 2),
            ),  # many steps; idle half-warps
            (
                Case(format="grid", bits=4, n=40, k=512, m=1, density=0.02, bias=True, dtype=torch.bfloat16),
                (4, 1, 2),
            ),
        ]
    ):
        check_one(case, launch)
    for case, launch in (
        (Case(format="grid", bits=2, n=64, k=1024, m=1, density=0.01), (2, 2, 2)),
        (
            Case(format="grid", bits=3, n=40, k=1280, m=1, density=0.05),
            (2, 1, 3),
        ),  # the last k_tile is one warp's
        (Case(format="grid", bits=4, n=40, k=512, m=1, density=0.02, dtype=torch.bfloat16), (1, 2, 2)),
    ):
        check_one(case, launch, reload=True)


def check_one(case: Case, launch: tuple[int, int, int], *, reload: bool = False) -> None:
    """`reload`: shared memory has no space for unquantized activations beside the others, so they are loaded again."""
    warps, tiles, stages = launch
    layout = random_layout(case, "cpu")
    config = Int8MmaConfig(num_warps=warps, tiles_per_cta=tiles, num_stages=stages)
    assert isinstance(layout, GridLayout)
    if reload:
        smem = smem_layout(layout, config, 132)
        gemv_int8_mma.SM_SMEM_BYTES = (smem_units(smem.size - 2 * case.k) + 1) * SMEM_UNIT.value
    assert reload == (smem_layout(layout, config, 132).max_registers is not None)
    check(case, layout, config, gemv_int8_mma.gemv_int8_mma, gemv_int8_mma)
    gemv_int8_mma.SM_SMEM_BYTES = SM_SMEM_BYTES


def several_tokens() -> None:
    for case, (warps, tiles, stages, groups) in selected(
        [
            # k_tiles, row tiles and tokens beyond the end
            (Case(format="grid", bits=3, n=40, k=768, m=3, bias=True), (4, 2, 2, 2)),
            (Case(format="grid", bits=2, n=32, k=1024, m=8), (2, 1, 3, 1)),
            (Case(format="grid", bits=2, n=64, k=768, m=8, dtype=torch.bfloat16), (4, 1, 3, 4)),
            (Case(format="grid", bits=4, n=40, k=512, m=5, group_size=512), (1, 3, 2, 1)),  # one scale a row
            (Case(format="grid", bits=4, n=32, k=512, m=2, group_size=256, zero_points=True), (2, 2, 2, 1)),
            (
                Case(format="grid", bits=3, n=32, k=512, m=8, dtype=torch.bfloat16, zero_points=True),
                (2, 1, 2, 2),
            ),
            (Case(format="grid", bits=3, n=48, k=512, m=8, zero_points=True), (2, 2, 2, 2)),
            (Case(format="grid", bits=4, n=16, k=512, m=4, dtype=torch.bfloat16), (2, 1, 2, 1)),
        ]
    ):
        config = Fp16MmaConfig(
            num_warps=warps,
            tiles_per_warp_group=tiles,
            num_stages=stages,
            warp_groups=groups,
            prefetch=case.bits == 3,
        )
        check(case, random_layout(case, "cpu"), config, gemv_fp16_mma.gemv_fp16_mma, gemv_fp16_mma)


def check(
    case: Case,
    layout: Layout,
    config: LaunchConfig,
    kernel: Callable[..., Tensor],
    module: Any,
) -> None:
    """One product against float64."""
    x = torch.randn(case.m, case.k).to(case.dtype)
    x[0, ::77] *= 50
    bias = torch.randn(case.n).to(case.dtype) if case.bias and case.m > 1 else None
    assert module.supports(layout, case.m, x.device) and module.fits(layout, config, x.device)
    SHARED[:] = GARBAGE
    committed.clear()
    error = relative_error(kernel(x, layout, bias, config), reference.linear(x, layout, bias))
    assert error < (5e-4 if case.dtype == torch.float16 else 4e-3), f"{case} {config} is off by {error:.1e}"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tl.inline_asm_elementwise = inline_asm_elementwise
    one_token()
    several_tokens()


if __name__ == "__main__":
    main()
