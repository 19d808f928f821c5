"""Inline assembly for Triton's interpreter, which knows none; for scripts that run under TRITON_INTERPRET=1.

Blocks of arithmetic go to the models of PTX warp by warp, and the few that load, store or use shared memory are run line by
line on the real addresses, all threads of a CTA in step.
"""

import ctypes
import re
from typing import Any

import interpreter_fixes  # noqa: F401
import numpy as np
import torch
import triton.language as tl
from hadamard_ptx_model import Accesses, run
from ptx_model import run_ptx
from requant_kernels.trellis import gemv
from triton.runtime.interpreter import TensorHandle

ACCESS = re.compile(r"(@p )?(ld|st)\.(global|shared)\S* (.*)")
SIZE = re.compile(r"\[(\$?\w+)(?: \+ (\d+))?\]")
ALLOCATED: list[torch.Tensor] = []  # what the kernels may touch
OF_TWO = {
    "and.b32": np.bitwise_and, "xor.b32": np.bitwise_xor, "shl.b32": np.left_shift, "shr.u32": np.right_shift,
    "add.u32": np.add, "min.u32": np.minimum,
}  # fmt: skip
SHARED, ACCESSES = np.zeros(1 << 16, np.uint32), Accesses()
allocate = torch.empty


def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.empty`, remembered, and filled with bytes that no result may depend on."""
    ALLOCATED.append(allocate(*args, **kwargs))
    ALLOCATED[-1].view(torch.uint8).fill_(0x7F)
    return ALLOCATED[-1]


def check_addresses(address: np.ndarray) -> None:
    """Every access of four bytes stays within one of the tensors: also in units, tiles and tokens beyond the end."""
    inside = np.zeros(address.shape, bool)
    for tensor in ALLOCATED:
        start = np.uint64(tensor.data_ptr())
        inside |= (address >= start) & (address + np.uint64(4) <= start + np.uint64(tensor.nbytes))
    assert inside.all(), f"{(~inside).sum()} of {inside.size} accesses lie outside of every tensor"


def emulate_in_models() -> None:
    """Layers of a model run the assembly of their products; rotations by themselves run plain code.

    Addresses are not checked: a model allocates by other ways than `allocate_poisoned`.
    """
    global check_addresses
    tl.inline_asm_elementwise = inline_asm_elementwise
    check_addresses = lambda address: None  # noqa: E731
    rotate_apart = gemv.hadamard_transform_int8
    gemv.hadamard_transform_int8 = lambda *args, **options: rotate_apart(*args, **options | {"asm": False})


def memory_around(address: np.ndarray) -> tuple[np.ndarray, np.uint64]:
    """The words of global memory from the first address to the last one, and the former."""
    first, last = address.min(), address.max()
    assert not ((address - first) % 4).any()
    return np.ctypeslib.as_array(
        (ctypes.c_uint32 * (int(last - first) // 4 + 1)).from_address(int(first))
    ), first


def run_memory(
    text: str, operands: dict[str, np.ndarray], shape: tuple[int, ...], outputs: int
) -> list[np.ndarray]:
    """A block that touches memory, for all threads of a CTA."""
    text = re.sub("//.*", "", text)
    registers, shared = dict(operands), SHARED
    active = np.ones(shape, bool)
    warps = np.indices(shape)[0]
    for line in filter(None, (part.strip(" {}\n") for part in text.split(";"))):
        if line.startswith(".shared"):  # the only variable of a block is at address 0
            registers[re.findall(r"(\w+)\[", line)[0]] = np.zeros(shape, np.uint32)
            ACCESSES.barrier()  # of a new CTA
            continue
        if line.startswith("bar.sync"):
            ACCESSES.barrier()
        if line.startswith((".reg", "bar.sync")):
            continue
        if line.startswith("mov.b32 {l, h}"):
            pair = registers[line.split()[-1]]
            registers |= {"l": pair & 0xFFFF, "h": pair >> 16}
            continue
        access = ACCESS.match(line)
        if access is None:
            opcode, rest = line.split(None, 1)
            target, *names = [name.strip() for name in rest.split(",")]
            a = [np.full(shape, int(n, 0), np.uint32) if n[0].isdigit() else registers[n] for n in names]
            match opcode:
                case "setp.ne.b32":
                    active = a[0] != 0
                case "setp.eq.u32":
                    active = a[0] == a[1]
                case "shfl.sync.bfly.b32":
                    registers[target] = a[0][..., np.arange(32) ^ int(names[1])]
                case "mov.u32" | "mov.b32":
                    registers[target] = np.broadcast_to(a[0], shape)
                case "mad.lo.u32":
                    registers[target] = a[0] * a[1] + a[2]
                case _ if opcode in OF_TWO:
                    registers[target] = OF_TWO[opcode](a[0], a[1])
                case "cvt.f32.f16":
                    halves = a[0].astype(np.uint16).view(np.float16)
                    registers[target] = halves.astype(np.float32).view(np.uint32)
                case "add.f32":
                    registers[target] = (a[0].view(np.float32) + a[1].view(np.float32)).view(np.uint32)
                case _:
                    raise AssertionError(f"no model of {opcode}")
            continue
        where = np.ones(shape, bool) if access[1] is None else active
        address_of = SIZE.search(access[4])
        assert address_of is not None
        names = re.findall(r"\$\d+|[a-z_]+\d+", SIZE.sub("", access[4]))
        start = registers[address_of[1]].astype(np.uint64) + np.uint64(address_of[2] or 0)
        for i, name in enumerate(names):
            address = start + np.uint64(4 * i)
            if access[3] == "global":
                check_addresses(address[np.broadcast_to(where, shape)])
            if access[3] == "shared" and access[2] == "ld":
                ACCESSES.read(address // 4, warps)
                registers[name] = shared[address // 4]
            elif access[3] == "shared":
                words = (address // 4)[where]
                ACCESSES.write(words, warps[where])
                shared[words] = registers[name][where]
            elif access[2] == "ld":
                words, first = memory_around(address)
                registers[name] = words[(address - first) // 4]
            else:
                own = np.broadcast_to(address, shape)[where]
                if own.size:
                    words, first = memory_around(own)
                    words[(own - first) // 4] = registers[name][where]
    return [registers[f"${i}"] for i in range(outputs)]


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int, _semantic: Any = None
) -> Any:
    """What Triton's own does on a GPU, for one element a thread: tensors [.., warps, 32], or [32 warps]."""
    dtype = getattr(dtype, "value", None) or dtype  # of a constant of Gluon
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    values = [np.asarray(arg.handle.data) for arg in args]
    given = np.broadcast_shapes(*(value.shape for value in values))
    if len(given) != 2:
        values = [np.broadcast_to(value, given).reshape(-1, 32) for value in values]
    shape = np.broadcast_shapes(*(value.shape for value in values))
    operands = {}
    for i, value in enumerate(values):
        wide = value.dtype.itemsize == 8
        operands[f"${len(kinds) + i}"] = np.ascontiguousarray(np.broadcast_to(value, shape)).view(
            np.uint64 if wide else np.uint32
        )
    assert len(constraints.split(",")) == len(kinds) + len(values)
    if "mma.sync" in asm and "st.shared" in asm:
        registers, stored = run(asm, operands, SHARED, ACCESSES)
        for at, word in stored.items():
            check_addresses(np.array([at], np.uint64))
            ctypes.c_uint32.from_address(at).value = word
        results = [registers[f"${i}"] for i in range(len(kinds))]
    elif any(name in asm for name in ("mma.sync", "dp4a", "f16x2", "bf16x2", "prmt", "ex2.")):
        results = run_ptx(asm, operands, shape, outputs=len(kinds))
    else:
        results = run_memory(asm, operands, shape, len(kinds))
    made = tuple(
        tl.tensor(
            TensorHandle(result.view(np.float32 if kind == tl.float32 else np.int32).reshape(given), kind),
            tl.block_type(kind, list(given)),
        )
        for result, kind in zip(results, kinds, strict=True)
    )
    return made if isinstance(dtype, tuple) else made[0]
