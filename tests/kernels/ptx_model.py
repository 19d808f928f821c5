"""A numpy interpreter of the PTX instructions that the kernels' inline assembly uses, 32 lanes or more at a time."""

import re
from functools import cache

import numpy as np
from requant_kernels.common.dequant_ptx import STEPS_PER_ASM
from requant_kernels.common.ptx import Ptx


def floats(pair: np.ndarray, dtype: str) -> np.ndarray:
    """A 32-bit register as its two 16-bit floats, in float64, subnormals included: [.., 2]."""
    halves = np.ascontiguousarray(pair, np.uint32)[..., None].view(np.uint16)
    if dtype == "fp16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pair_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `floats`; every value here is exact in 16 bits."""
    if dtype == "fp16":
        halves = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        halves = values.astype(np.float32).view(np.uint32) >> 16
    return halves[..., 0] | halves[..., 1] << 16


def permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PRMT: each of four nibbles picks one of eight bytes, or with bit 3 spreads its sign."""
    nibbles = selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)
    table = np.stack(np.broadcast_arrays(a, b), -1).view(np.uint8)
    picked = np.take_along_axis(table, (nibbles & 7).astype(np.intp), -1)
    return np.where(nibbles & 8, picked // 128 * 255, picked).astype(np.uint8).view(np.uint32)[..., 0]


def byte_matrix(register: np.ndarray, dtype: type) -> np.ndarray:
    """The four bytes of a register, int64: [.., 4]."""
    return np.ascontiguousarray(register)[..., None].view(dtype).astype(int)


def tile_product(
    a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], dtype: type
) -> list[np.ndarray]:
    """An m16n8 product of each warp, `[.., 32, values of a register]` by lane 4 g + t: four left registers, two right ones,
    four sums."""
    warps, held = a[0].shape[:-2], a[0].shape[-1]
    # left: column half, row half, g, t, value -> row, column; right: column half, n, t, value -> column, n
    left = np.stack(a, -3).reshape(*warps, 2, 2, 8, 4 * held)
    left = np.moveaxis(left, -4, -2).reshape(*warps, 16, 8 * held)
    right = np.moveaxis(np.stack(b, -3).reshape(*warps, 2, 8, 4 * held), -2, -3).reshape(*warps, 8, 8 * held)
    product = left.astype(float) @ np.swapaxes(right, -1, -2).astype(float)  # exact, if of integers
    product = product.astype(left.dtype).reshape(*warps, 2, 32, 2)
    return [
        (product[..., i // 2, :, i % 2] + own.view(dtype)).astype(dtype).view(np.uint32)
        for i, own in enumerate(c)
    ]


def integer_product(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """`mma.m16n8k32`: four registers of unsigned bytes, two of signed ones, four sums; arrays by lane, `[.., 32]`."""
    left, right = ([byte_matrix(r, dtype) for r in part] for part, dtype in ((a, np.uint8), (b, np.int8)))
    return tile_product(left, right, c, np.int32)


def bfloat16(register: np.ndarray) -> np.ndarray:
    """The bits of a float32, rounded to the nearest bfloat16."""
    return (register + 0x7FFF + (register >> 16 & 1)) >> 16


def float_product(
    a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], dtype: str
) -> list[np.ndarray]:
    """`mma.m16n8k16`: pairs of 16-bit floats, float32 sums; arrays by lane, `[.., 32]`."""
    left, right = ([floats(register, dtype) for register in part] for part in (a, b))
    return tile_product(left, right, c, np.float32)


def tf32_product(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """`mma.m16n8k8`: float32 whose low 13 bits are ignored, float32 sums; arrays by lane, `[.., 32]`."""
    left, right = (
        [(register & np.uint32(0xFFFFE000)).view(np.float32)[..., None] for register in part]
        for part in (a, b)
    )
    return tile_product(left, right, c, np.float32)


def transposed_matrices(shared: np.ndarray, address: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of `ldmatrix` and `stmatrix` with `.trans`: where the two values of every lane's four registers stand, `[4, 32]` each.

    Lane l has the address of row l % 8 of matrix l / 8, 16 bytes; lane 4 g + t holds rows 2 t and 2 t + 1 of column g.
    """
    assert not (address % 16).any()
    rows, lane = address.reshape(4, 8).astype(np.int64) // shared.itemsize, np.arange(32)
    return rows[:, lane % 4 * 2] + lane // 4, rows[:, lane % 4 * 2 + 1] + lane // 4


@cache
def program_of(text: str) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    """The lines of an asm block as guard, opcode and operands, and which line every label is at."""
    text = re.sub(r"//.*", "", text)
    labels: dict[str, int] = {}
    program: list[tuple[str, str, str]] = []
    for part in text[text.index("{") + 1 : text.rindex("}")].split(";"):
        found = re.match(r"\s*(?:(\w+):)?\s*(?:@(\w+)\s+)?(.*?)\s*$", part, re.DOTALL)
        assert found is not None
        if found[1]:
            labels[found[1]] = len(program)
        if found[3] and not found[3].startswith((".reg", ".pragma", "bar.warp.sync")):
            program.append((found[2] or "", *found[3].split(None, 1)))
    return program, labels


@cache
def constant(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A literal of the text in every lane: an integer, or the bits of a float after `0f`."""
    value = np.full(shape, int(re.sub("^0f", "0x", name), 0), np.uint32)
    value.flags.writeable = False
    return value


def run_ptx(
    text: str, operands: dict[str, np.ndarray], shape: tuple[int, ...], outputs: int = STEPS_PER_ASM,
    shared: np.ndarray | None = None, memory: np.ndarray | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Run an asm block on arrays of 32-bit registers, by operand number (`$0`); returns its outputs.

    The last axis of `shape` is the lanes, where instructions are those of a warp. `shared` and `memory` are shared and
    global memory from address 0, in units of 16 and of 32 bits. Branches are taken by all lanes or by none.
    """
    program, labels = program_of(text)
    registers = dict(operands)

    def read(name: str) -> np.ndarray:
        return constant(name, shape) if name[0].isdigit() else registers[name]

    def address(line: str) -> np.ndarray:
        parts = re.findall(r"\[(.*)\]", line)[0].split(" + ")
        return read(parts[0]).astype(np.int64) + sum(int(part) for part in parts[1:])

    at = 0
    while at < len(program):
        (guarded_by, opcode, rest), at = program[at], at + 1
        guard = registers[guarded_by] if guarded_by else constant("1", shape).astype(bool)
        if opcode == "bra":
            assert guard.all() or not guard.any()
            at = labels[rest] if guard.all() else at
            continue
        if opcode.startswith("setp."):
            name, *names = [part.strip() for part in rest.split(",")]
            x, y = (read(part).astype(np.uint32).view(np.int32) for part in names)
            registers[name] = {"le": x <= y, "lt": x < y, "gt": x > y}[opcode.split(".")[1]]
            continue
        if opcode == "mov.b32" and rest[0] == "{":  # into halves
            low, high, source = (name.strip() for name in re.sub("[{}]", "", rest).split(","))
            registers |= {low: read(source) & 0xFFFF, high: read(source) >> 16}
            continue
        if opcode in ("st.shared.b32", "ld.shared.v2.b32", "ld.global.b32"):
            names, place = re.findall(r"[$\w]+", re.sub(r"\[.*\]", "", rest)), address(rest)
            assert not (place[guard] % (8 if "v2" in opcode else 4)).any()
            if opcode == "ld.global.b32":
                assert memory is not None
                registers[names[0]] = np.where(guard, memory[np.where(guard, place, 0) // 4], read(names[0]))
                continue
            assert shared is not None
            for i, name in enumerate(names):
                first = place // 2 + 2 * i
                if opcode[0] == "s":
                    shared[first], shared[first + 1] = read(name) & 0xFFFF, read(name) >> 16
                else:
                    registers[name] = (
                        shared[first].astype(np.uint32) | shared[first + 1].astype(np.uint32) << 16
                    )
            continue
        if opcode.startswith(("ldmatrix", "stmatrix")):
            assert shared is not None and ".x4.trans" in opcode
            names = [name.strip() for name in re.findall(r"\{(.*)\}", rest)[0].split(",")]
            for name, low, high in zip(names, *transposed_matrices(shared, address(rest)), strict=True):
                if opcode[0] == "s":
                    shared[low], shared[high] = registers[name] & 0xFFFF, registers[name] >> 16
                else:
                    registers[name] = shared[low].astype(np.uint32) | shared[high].astype(np.uint32) << 16
            continue
        if opcode.startswith("mma.sync"):
            names = [name.strip() for name in re.sub("[{}]", "", rest).split(",")]
            a, b, c = ([read(name) for name in names[i:j]] for i, j in ((4, 8), (8, 10), (10, 14)))
            if "s32" in opcode:
                product = integer_product(a, b, c)
            else:
                product = float_product(a, b, c, "bf16" if "bf16" in opcode else "fp16")
            registers |= dict(zip(names[:4], product, strict=True))
            continue
        target, *names = [name.strip() for name in rest.split(",")]
        a = [read(name) for name in names]
        match opcode:
            case "shfl.sync.idx.b32":
                value = np.take_along_axis(a[0], a[1].astype(np.intp), -1)
            case "mov.b32" | "mov.b64":
                value = a[0]
            case "add.u32" | "add.s32":
                value = a[0] + a[1]
            case "add.s64":
                value = a[0].astype(np.int64) + a[1].astype(np.int64)
            case "sub.s32":
                value = a[0] - a[1]
            case "or.b32":
                value = a[0] | a[1]
            case "set.eq.u32.f16x2":
                same = floats(a[0], "fp16") == floats(a[1], "fp16")
                value = same[..., 0] * np.uint32(0xFFFF) | same[..., 1] * np.uint32(0xFFFF0000)
            case "xor.b32":
                value = a[0] ^ a[1]
            case "cvt.f32.f16":
                value = a[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
            case "fma.rn.f32":
                x, y, z = (v.view(np.float32) for v in a)
                value = (x.astype(np.float64) * y + z).astype(np.float32).view(np.uint32)
            case "sub.f32":
                value = (a[0].view(np.float32) - a[1].view(np.float32)).view(np.uint32)
            case "add.f32":
                value = (a[0].view(np.float32) + a[1].view(np.float32)).view(np.uint32)
            case "max.f32":
                value = np.fmax(a[0].view(np.float32), a[1].view(np.float32)).view(np.uint32)
            case "mul.f32":
                value = (a[0].view(np.float32) * a[1].view(np.float32)).view(np.uint32)
            case "ex2.approx.ftz.f32":
                value = np.exp2(a[0].view(np.float32)).view(np.uint32)
            case "rcp.approx.ftz.f32":
                value = (np.float32(1) / a[0].view(np.float32)).view(np.uint32)
            case "cvt.rn.f16x2.f32":
                low, high = (v.view(np.float32).astype(np.float16).view(np.uint16) for v in a[::-1])
                value = low | high.astype(np.uint32) << 16
            case "cvt.rn.bf16x2.f32":
                value = bfloat16(a[1]) | bfloat16(a[0]) << 16
            case "and.b32":
                value = a[0] & a[1]
            case "shr.b32" | "shr.u32":
                value = a[0] >> a[1]
            case "shl.b32":
                value = a[0] << a[1]
            case "shf.r.wrap.b32":
                value = (a[0] >> a[2]) | (a[1] << np.uint32(1) << (31 - a[2]))
            case "mul.lo.u32":
                value = a[0] * a[1]
            case "mad.lo.u32":
                value = a[0] * a[1] + a[2]
            case "dp2a.lo.u32.u32":
                halves = np.stack([a[0] & np.uint32(0xFFFF), a[0] >> np.uint32(16)], -1)
                value = a[2] + (halves * byte_matrix(a[1], np.uint8)[..., :2].astype(np.uint32)).sum(
                    -1, dtype=np.uint32
                )
            case "dp4a.u32.u32" | "dp4a.u32.s32":
                signed = np.int8 if opcode.endswith("s32") else np.uint8
                products = byte_matrix(a[0], np.uint8) * byte_matrix(a[1], signed)
                value = a[2] + products.sum(-1)
            case "prmt.b32":
                value = permute_bytes(*a)
            case "lop3.b32":
                table = int(names[3], 0)
                value = np.zeros(shape, np.uint32)
                for minterm in range(8):
                    if table >> minterm & 1:
                        bits = [x if minterm >> (2 - i) & 1 else ~x for i, x in enumerate(a[:3])]
                        value |= bits[0] & bits[1] & bits[2]
            case "add.rn.f16x2" | "add.rn.bf16x2" | "sub.rn.f16x2" | "mul.rn.f16x2" | "mul.rn.bf16x2":
                dtype = "fp16" if "bf16" not in opcode else "bf16"
                x, y = (floats(v, dtype) for v in a)
                operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[opcode[:3]]
                value = pair_of(operation(x, y), dtype)
            case "fma.rn.f16x2" | "fma.rn.bf16x2":
                dtype = "fp16" if "bf16" not in opcode else "bf16"
                x, y, z = (floats(v, dtype) for v in a)
                value = pair_of(x * y + z, dtype)
            case _:
                raise AssertionError(f"the model does not know {opcode}")
        registers[target] = value if opcode.endswith("64") else value.astype(np.uint32, copy=False)
    return [registers[f"${i}"] for i in range(outputs)]


def run_block(
    block: Ptx, operands: dict[str, np.ndarray], shape: tuple[int, ...], **memory: np.ndarray
) -> list[np.ndarray]:
    """`run_ptx` with operands by name."""
    outputs = block.constraints.count("=")
    numbered = {f"${block.operands.index(name)}": value for name, value in operands.items()}
    return run_ptx(block.text, numbered, shape, outputs, **memory)
