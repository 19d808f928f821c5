"""A model of the PTX of a Hadamard tile: all 16 warps of a CTA in step, with their shared memory."""

import re
from functools import partial

import numpy as np

try:
    from .ptx_model import bfloat16, float_product, permute_bytes, tf32_product
except ImportError:  # of a script of its own, `emulated_assembly.py`
    from ptx_model import bfloat16, float_product, permute_bytes, tf32_product

SHAPE = (16, 32)
WARP, LANE = np.indices(SHAPE).astype(np.uint32)
# addresses in shared memory
SYMBOLS = {"values": 0, "maxima": 1 << 15, "totals": 1 << 16, "high_totals": 1 << 17}


class Accesses:
    """Which warps have read and written each word of shared memory since the last barrier; whatever depends on which warp is
    faster fails."""

    def __init__(self) -> None:
        self.barrier()

    def barrier(self) -> None:
        self.readers = np.zeros(1 << 16, np.uint32)  # a bit a warp
        self.writer = np.zeros(1 << 16, np.int64) - 1

    def read(self, words: np.ndarray, warps: np.ndarray) -> None:
        by = self.writer[words]
        assert ((by < 0) | (by == warps)).all(), "read before a barrier"
        np.bitwise_or.at(
            self.readers, words, np.uint32(1) << np.broadcast_to(warps, words.shape).astype(np.uint32)
        )

    def write(self, words: np.ndarray, warps: np.ndarray) -> None:
        own = np.uint32(1) << np.broadcast_to(warps, words.shape).astype(np.uint32)
        assert not (self.readers[words] & ~own).any(), "overwritten before a barrier"
        self.writer[words] = warps


def as_float(register: np.ndarray) -> np.ndarray:
    return register.view(np.float32)


def run(
    text: str,
    operands: dict[str, np.ndarray],
    shared: np.ndarray | None = None,
    accesses: Accesses | None = None,
) -> tuple[dict[str, np.ndarray], dict[int, int]]:
    """Registers at the end, and the words that were stored; `shared`: 2^16 words, whose `accesses` several blocks share."""
    text = re.sub("//.*", "", text)
    registers, stored = dict(operands), {}
    shared = np.zeros(1 << 16, np.uint32) if shared is None else shared
    accesses = accesses or Accesses()
    registers |= {name: np.full(SHAPE, place, np.uint32) for name, place in SYMBOLS.items()}
    registers["%tid.x"] = WARP * 32 + LANE

    def read(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full(SHAPE, int(re.sub("^0f", "0x", name), 0), np.uint32)

    def place(text: str) -> np.ndarray:
        name, _, offset = text.strip("[]").partition(" + ")
        return registers[name].astype(np.int64) + int(offset or 0)

    for line in filter(None, (part.strip(" {}\n") for part in text.split(";"))):
        if line.startswith("bar.sync"):
            accesses.barrier()
        if line.startswith((".reg", ".shared", "bar.sync")):
            continue
        where = read("p").astype(bool) if line.startswith("@p ") else np.ones(SHAPE, bool)
        line = line.removeprefix("@p ")
        opcode, rest = line.split(None, 1)
        if opcode.startswith(("st.", "ld.")):
            bracket = re.search(r"\[[^]]*\]", rest)
            assert bracket is not None
            address = place(bracket[0])
            names = re.findall(r"\$\d+|[a-z_]+\d+", rest.replace(bracket[0], ""))
            assert (address % (4 * len(names)) == 0).all()
            for i, name in enumerate(names):
                if opcode.startswith("st.global"):
                    for at, value in zip(address[where] + 4 * i, read(name)[where], strict=True):
                        assert int(at) not in stored
                        stored[int(at)] = int(value)
                elif opcode.startswith("st.shared"):
                    accesses.write(address // 4 + i, WARP)
                    shared[address // 4 + i] = read(name)
                else:
                    accesses.read(address // 4 + i, WARP)
                    registers[name] = shared[address // 4 + i]
            continue
        names = [name.strip() for name in re.sub("[{}]", "", rest).split(",")]
        if opcode.startswith("mma"):
            a, b, c = ([read(name) for name in names[i:j]] for i, j in ((4, 8), (8, 10), (10, 14)))
            product = tf32_product if "tf32" in opcode else partial(float_product, dtype="bf16")
            registers |= dict(zip(names[:4], product(a, b, c), strict=True))
            continue
        target, *rest = names
        x = [read(name) for name in rest]
        match opcode:
            case "mov.u32" | "mov.b32":
                value = x[0]
            case "and.b32":
                value = x[0] & x[1]
            case "xor.b32":
                value = x[0] ^ x[1]
            case "shl.b32":
                value = x[0] << x[1]
            case "shr.u32":
                value = x[0] >> x[1]
            case "shr.s32":
                value = (x[0].view(np.int32) >> x[1].view(np.int32)).view(np.uint32)
            case "add.u32":
                value = x[0] + x[1]
            case "sub.u32":
                value = x[0] - x[1]
            case "mad.lo.u32":
                value = x[0] * x[1] + x[2]
            case "prmt.b32":
                value = permute_bytes(*x)
            case "add.f32":
                value = (as_float(x[0]) + as_float(x[1])).view(np.uint32)
            case "shfl.sync.bfly.b32":
                value = x[0][..., np.arange(32) ^ int(rest[1])]
            case "sub.f32":
                value = (as_float(x[0]) - as_float(x[1])).view(np.uint32)
            case "mul.f32":
                value = (as_float(x[0]) * as_float(x[1])).view(np.uint32)
            case "abs.f32":
                value = x[0] & np.uint32(0x7FFFFFFF)
            case "max.NaN.f32":
                value = np.maximum(as_float(x[0]), as_float(x[1])).view(np.uint32)
            case "rcp.approx.ftz.f32":
                value = (np.float32(1) / as_float(x[0])).view(np.uint32)
            case "fma.rn.f32":
                exact = as_float(x[0]).astype(float) * as_float(x[1]) + as_float(x[2])
                value = exact.astype(np.float32).view(np.uint32)
            case "cvt.rn.bf16x2.f32":
                value = bfloat16(x[1]) | bfloat16(x[0]) << np.uint32(16)
            case "cvt.rn.f32.s32":
                value = x[0].view(np.int32).astype(np.float32).view(np.uint32)
            case "dp4a.s32.s32":
                bytes_of = [
                    np.ascontiguousarray(own).view(np.int8).reshape(*SHAPE, 4).astype(np.int32)
                    for own in x[:2]
                ]
                value = x[2] + (bytes_of[0] * bytes_of[1]).sum(-1).astype(np.uint32)
            case "redux.sync.max.u32":
                value = np.broadcast_to(x[0].max(1, keepdims=True), SHAPE)
            case "redux.sync.add.s32":
                value = np.broadcast_to(x[0].sum(1, keepdims=True, dtype=np.uint32), SHAPE)
            case "setp.eq.u32":
                value = x[0] == x[1]
            case _:
                raise AssertionError(f"no model of {opcode}")
        registers[target] = np.ascontiguousarray(value).astype(np.uint32)
    return registers, stored
