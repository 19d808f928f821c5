"""A model in numpy of the few PTX instructions that the decoders use: it runs their text."""

import numpy as np
from requant_kernels.words import HALF


def floats(pair: np.ndarray, dtype: str) -> np.ndarray:
    """A 32-bit register as its two 16-bit floats, in float64, subnormals included: [.., 2]."""
    halves = np.stack([pair & 0xFFFF, pair >> 16], -1).astype(np.uint16)
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
    out = np.zeros_like(a)
    table = (b.astype(np.uint64) << np.uint64(32)) | a
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & 0xF
        byte = ((table >> ((nibble & 7).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)).astype(
            np.uint32
        )
        sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        out |= np.where(nibble & 8, sign, byte) << np.uint32(8 * i)
    return out


def byte_matrix(register: np.ndarray, dtype: type) -> np.ndarray:
    """The four bytes of a register, int64."""
    return (
        np.stack([register >> np.uint32(8 * i) & 0xFF for i in range(4)], -1)
        .astype(np.uint8)
        .view(dtype)
        .astype(int)
    )


def run_ptx(
    text: str, operands: dict[str, np.ndarray], shape: tuple[int, ...], outputs: int = HALF
) -> list[np.ndarray]:
    """Run an asm block on arrays of 32-bit registers; returns its outputs."""
    registers = dict(operands)

    def read(name: str) -> np.ndarray:
        if name[0] in "$t":
            return registers[name]
        return np.full(shape, int(name, 0), np.uint32)

    body = text[text.index(";") + 1 : text.rindex("}")]
    for line in filter(None, (part.strip() for part in body.split(";"))):
        opcode, rest = line.split(None, 1)
        target, *names = [name.strip() for name in rest.split(",")]
        a = [read(name) for name in names]
        match opcode:
            case "mov.b32":
                value = a[0]
            case "and.b32":
                value = a[0] & a[1]
            case "shr.b32":
                value = a[0] >> a[1]
            case "shl.b32":
                value = a[0] << a[1]
            case "shf.r.wrap.b32":
                value = (a[0] >> a[2]) | (a[1] << np.uint32(1) << (31 - a[2]))
            case "mul.lo.u32":
                value = a[0] * a[1]
            case "mad.lo.u32":
                value = a[0] * a[1] + a[2]
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
            case "add.rn.f16x2":
                value = pair_of(floats(a[0], "fp16") + floats(a[1], "fp16"), "fp16")
            case "fma.rn.f16x2" | "fma.rn.bf16x2":
                dtype = "fp16" if "bf16" not in opcode else "bf16"
                x, y, z = (floats(v, dtype) for v in a)
                value = pair_of(x * y + z, dtype)
            case _:
                raise AssertionError(f"the model does not know {opcode}")
        registers[target] = value.astype(np.uint32)
    return [registers[f"${i}"] for i in range(outputs)]
