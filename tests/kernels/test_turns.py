"""The PTX of a section of a rotation, run by a model of its instructions, all 16 warps in step."""

import re

import numpy as np
import pytest
import torch
from requant_kernels import naive
from requant_kernels.turns import await_asm, section_asm

from .ptx_model import bfloat16, float_product, pair_of, permute_bytes

SHAPE = (16, 32)
WARP, LANE = np.indices(SHAPE).astype(np.uint32)
PLACES = {"values": 0, "most": 1 << 15, "totals": 1 << 16}  # in shared memory


def as_float(register: np.ndarray) -> np.ndarray:
    return register.view(np.float32)


def run(text: str, operands: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[int, int]]:
    """Registers at the end, and the words that were stored."""
    registers, stored = dict(operands), {}
    shared = np.zeros(1 << 16, np.uint32)
    written = np.zeros(1 << 16, np.int64) - 1  # by which warp, since the last barrier
    registers |= {name: np.full(SHAPE, place, np.uint32) for name, place in PLACES.items()}
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
            written[:] = -1
        if line.startswith((".reg", ".shared", "bar.sync")):
            continue
        where = read("p").astype(bool) if line.startswith("@p ") else np.ones(SHAPE, bool)
        line = line.removeprefix("@p ")
        opcode, rest = line.split(None, 1)
        if opcode.startswith(("st.", "ld.")):
            bracket = re.search(r"\[[^]]*\]", rest)
            assert bracket is not None
            address = place(bracket[0])
            names = re.findall(r"\$\d+|t\d+", rest.replace(bracket[0], ""))
            assert (address % (4 * len(names)) == 0).all()
            for i, name in enumerate(names):
                if opcode.startswith("st.global"):
                    for at, value in zip(address[where] + 4 * i, read(name)[where], strict=True):
                        assert int(at) not in stored
                        stored[int(at)] = int(value)
                elif opcode.startswith("st.shared"):
                    shared[address // 4 + i], written[address // 4 + i] = read(name), WARP
                else:
                    by = written[address // 4 + i]
                    assert ((by < 0) | (by == WARP)).all(), "read before a barrier"
                    registers[name] = shared[address // 4 + i]
            continue
        names = [name.strip() for name in re.sub("[{}]", "", rest).split(",")]
        if opcode.startswith("mma"):
            a, b, c = ([read(name) for name in names[i:j]] for i, j in ((4, 8), (8, 10), (10, 14)))
            warps = [
                float_product([r[w] for r in a], [r[w] for r in b], [r[w] for r in c], "bf16")
                for w in range(16)
            ]
            registers |= {name: np.stack([w[i] for w in warps]) for i, name in enumerate(names[:4])}
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


def signs(mask: int) -> np.ndarray:
    """A lane's pairs of signs over the bits of `mask`, as bfloat16; ones on the diagonal of the other bits."""
    entries = []
    for j in (LANE % 4 * 2, LANE % 4 * 2 + 1):
        odd = 0x6996 >> (LANE // 4 & j & mask).astype(int) & 1
        entries.append(np.where((LANE // 4 ^ j) & ~np.uint32(mask) & 7, 0.0, 1.0 - 2 * odd))
    return pair_of(np.stack(entries, -1), "bf16")


def section(values: np.ndarray, size: int, paired: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Operands of a section of blocks of `size`, and what it becomes."""
    own = values.reshape(16, 32, 8)
    operands = {f"${8 + i}": own[..., i].copy().view(np.uint32) for i in range(8)}
    for first, mask in ((16, 6 if paired else 7), (24, 7), (32, size - 1 >> 8)):
        operands |= {f"${first + i}": signs(mask) for i in range(8)}
    matrix = naive.hadamard(size).numpy() * size**0.5
    if paired:
        matrix = np.kron(naive.hadamard(size // 2).numpy() * (size // 2) ** 0.5, np.eye(2))
    return operands, (values.astype(float).reshape(-1, size) @ matrix).ravel()


PLACE = (LANE // 4 * 256 + WARP * 16 + LANE % 4 * 4)[..., None] + np.array(
    [0, 1, 2, 3, 2048, 2049, 2050, 2051]
)


@pytest.mark.parametrize("size", [256, 512, 2048, 4096])
def test_a_section_is_turned(size: int) -> None:
    operands, want = section(np.random.randn(4096).astype(np.float32), size, paired=False)
    text, names = section_asm(size == 4096, fixed=False)
    assert len(names.split(",")) == 8 + len(operands)
    registers, _ = run(text, operands)
    got = np.stack([as_float(registers[f"${i}"]) for i in range(8)], -1)
    assert np.abs(got - want[PLACE]).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("size", [1024, 4096])
@pytest.mark.parametrize("kind", ["many", "one", "none"])
def test_a_section_in_fixed_point(size: int, kind: str) -> None:
    """High and low bytes, one scale, and the sum of exactly the integers that were stored."""
    values = np.random.randn(4096).astype(np.float32) * (kind != "none")
    if kind == "one":
        values = np.eye(1, 4096, 77, dtype=np.float32)[0] * 1e-3
    operands, want = section(values, size, paired=kind == "many")
    high, low, scale = 1 << 20, 1 << 21, 1 << 22
    for first, base in ((40, high + PLACE[..., 0]), (48, low + PLACE[..., 0]), (56, np.full(SHAPE, scale))):
        operands |= {f"${first + i}": base for i in range(8)}
    text, names = section_asm(size == 4096, fixed=True)
    assert len(names.split(",")) == 8 + len(operands)
    _, stored = run(text, operands)
    found = np.array([stored.pop(base + 4 * i) for base in (high, low) for i in range(1024)], np.uint32)
    found = found.view(np.int8).reshape(2, 4096).astype(int)
    assert found[0].min() > -128
    factor, total = np.array([stored.pop(scale), stored.pop(scale + 4)], np.uint32).view(np.float32)
    assert not stored
    q = 256 * found[0] + found[1]
    assert total == np.float32(q.sum())
    assert np.abs(q * float(factor) - want).max() <= np.abs(want).max() * 1e-4
    assert kind == "none" or np.abs(q).max() == 32512


def test_sums_are_awaited_together() -> None:
    """All loads of a look before its branch, and one mark anywhere is enough to look again."""
    for parts in (1, 2, 4):
        text, names = await_asm(parts)
        assert len(names.split(",")) == 16 * parts
        assert text.count("ld.relaxed.gpu.global.v4.b32") == 2 * parts
        assert text.rindex("ld.relaxed") < text.index("max.u32") < text.index("bra")
        used = set(re.findall(r"\$\d+", text[text.index("max.u32") :]))
        assert used == {f"${i}" for i in range(8 * parts)}
    assert torch.tensor(-1, dtype=torch.int32).view(torch.float32).isnan()
