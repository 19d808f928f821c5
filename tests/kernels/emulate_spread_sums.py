"""Run under TRITON_INTERPRET=1 by `test_interpreter.py`: `gemv_cp_async.py` with its assembly, line by line, warps in step.

The model is that of `emulate_byte_grid.py`, with the instructions of a trellis. Its rotation runs in the model of
`section_model.py`, and what it stores has to be the spread form of what it stores otherwise, byte by byte.
"""

import ctypes
from typing import Any

import emulate_byte_grid as model
import numpy as np
import torch
import triton.language as tl
from cases import random_trellis, relative_error
from emulate_byte_grid import Program, inline_asm_elementwise
from requant_kernels import TrellisLayout, pack_trellis
from requant_kernels.fallback import reference
from requant_kernels.hadamard.rotate import rotate_fixed
from requant_kernels.hadamard.sections import SECTION
from requant_kernels.hadamard.turns import section_asm
from requant_kernels.launch_config import TrellisConfig
from requant_kernels.trellis import gemv_cp_async
from requant_kernels.trellis.gemv import padded_columns
from requant_kernels.trellis.hashes import WEIGHTS
from section_model import LANE, SHAPE, WARP, run

ROTATED: list[torch.Tensor] = []  # the last token, in fixed point, and its scales


class Trellis(Program):
    """With what `hashes.py` and `spread_texts.py` say beside `byte_texts.py`."""

    def line(self, line: str) -> None:
        if line.startswith(("bar.", ".shared")):
            return
        line = line.replace("setp.ne.b32", "setp.ne.s32").replace("ld.global.v2.f32", "ld.global.v2.b32")
        if line.startswith("shfl.sync.idx.b32"):
            target, value, source = (part.strip() for part in line.split(None, 1)[1].split(",")[:3])
            self.put(
                target, np.take_along_axis(self.value(value), self.value(source).astype(np.int64) % 32, 1)
            )
            return
        if line.startswith("@q "):
            self.registers["q"] = self.registers["q"].astype(bool)
        super().line(line)

    def access(self, opcode: str, operands: list[str], guard: np.ndarray) -> None:
        if not opcode.startswith("st.global"):
            super().access(opcode, operands, guard)
            return
        for at, value in zip(self.address(operands[0])[guard], self.value(operands[1])[guard], strict=True):
            ctypes.c_uint32.from_address(int(at)).value = int(value)

    def arithmetic(self, opcode: str, names: list[str]) -> np.ndarray:
        if opcode == "setp.lt.s32":
            return self.value(names[0]).view(np.int32) < int(names[1])
        if opcode == "setp.lt.and.s32":
            return (self.value(names[0]).view(np.int32) < int(names[1])) & self.registers[names[2]].astype(
                bool
            )
        a = [self.value(name) for name in names]
        match opcode:
            case "shr.b32":
                return a[0] >> a[1]
            case "min.u32":
                return np.minimum(a[0], a[1])
            case "shf.r.wrap.b32":
                wide = a[1].astype(np.uint64) << np.uint64(32) | a[0]
                return (wide >> a[2].astype(np.uint64)).astype(np.uint32)
        return super().arithmetic(opcode, names)


def spread_form(fixed: torch.Tensor, weights: int) -> np.ndarray:
    """What the kernel reads, from high and low bytes `[2, columns]`: the definition, written down once more."""
    rows = fixed.numpy().reshape(2, -1, 4, 16)  # high or low, group, tile, column
    if weights == 1:
        hashes = np.repeat(rows[..., None], 4, -1)
    else:
        hashes = rows.reshape(*rows.shape[:3], 8, 2)[..., [0, 1, 1, 0]]
    chunks = hashes.reshape(2, rows.shape[1], 4, -1, 4, 4)  # .., chunk, hash of it, byte
    return np.ascontiguousarray(chunks.transpose(1, 3, 0, 2, 4, 5)).reshape(-1)


def check_rotation() -> None:
    """The same bytes, in spread form, by the assembly of a section."""
    values = np.random.default_rng(0).standard_normal((8, *SHAPE)).astype(np.float32).view(np.uint32)
    operands = {f"${8 + i}": values[i] for i in range(8)}
    operands |= {f"${16 + i}": np.full(SHAPE, 0x3F803F80, np.uint32) for i in range(24)}
    at = (LANE // 4 * 256 + WARP * 16 + LANE % 4 * 4).astype(np.uint32)
    plain = operands | {"$40": at, "$48": at + np.uint32(4096), "$56": np.full(SHAPE, 1 << 20, np.uint32)}
    _, stored = run(section_asm(True, fixed=True)[0], plain)
    fixed = np.zeros(8192, np.uint8)
    for place, word in stored.items():
        if place < 8192:
            fixed[place : place + 4] = [word >> 8 * i & 0xFF for i in range(4)]
    for weights in (1, 2):
        chunk = LANE % 4 * (16 // weights)
        at = (LANE // 4 * 4 + WARP // 4) * (512 // weights) + chunk // 16 * 128 + chunk % 16 + WARP % 4 * 16
        at = at.astype(np.uint32)
        spread = operands | {"$40": at, "$48": at + np.uint32(64), "$56": np.full(SHAPE, 1 << 20, np.uint32)}
        _, stored = run(section_asm(True, fixed=True, spread=weights)[0], spread)
        found = np.zeros(4096 * 8 // weights, np.uint8)
        for place, word in stored.items():
            if place < len(found):
                found[place : place + 4] = [word >> 8 * i & 0xFF for i in range(4)]
        want = spread_form(torch.from_numpy(fixed.reshape(2, 4096)), weights)
        assert (found == want).all(), f"spread for {weights} weights a hash"


def rotate_spread(
    x: torch.Tensor, before: torch.Tensor, *, width: int, weights: int, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain rotation, spread."""
    fixed, scales = rotate_fixed(
        x, before, width=width, out_width=padded_columns(width), paired=weights == 2, asm=False, pdl=pdl
    )
    ROTATED[:] = [fixed, scales]
    return torch.from_numpy(spread_form(fixed, weights).view(np.int8))[None], scales


def exact(layout: TrellisLayout) -> torch.Tensor:
    """The product of the fixed point that was multiplied, in float64."""
    fixed, scales = ROTATED
    q = (fixed[0].double() * 256 + fixed[1].double()).view(-1, SECTION) * scales[0, :, :1].double()
    x = q.view(-1)
    if layout.code == "pair":  # of sums and differences
        x = torch.stack([x[::2] + x[1::2], x[::2] - x[1::2]], -1).view(-1) / 2
    values = reference.trellis_values(layout)
    return (values @ x[: values.shape[1]])[None]


def check(code: str, bits: float, n: int, k: int, launch: tuple[int, ...]) -> None:
    layout = pack_trellis(*random_trellis(n, k, bits, "cpu"), bits=bits, code=code)
    config = TrellisConfig(warps=launch[0], tiles=launch[1], unroll=launch[2], places=launch[3])
    x = torch.randn(1, k).half()
    assert gemv_cp_async.takes(x, layout, config), f"{code} {bits} {launch}"
    model.waiting.clear()
    model.begun.clear()
    model.SHARED[:] = model.NONSENSE
    got = gemv_cp_async.spread_sums(x, layout, config, pdl=False)
    want = (x.double() * layout.input_scales) @ reference.hadamard(k) @ reference.trellis_values(layout).T
    error = relative_error(got, want)
    assert error < 1e-4, f"{code} at {bits} bits, {launch}, is off by {error:.1e}"
    error = relative_error(got, exact(layout))
    assert error < 1e-6, f"{code} at {bits} bits, {launch}: sums are off by {error:.1e}"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    check_rotation()
    setattr(model, "Program", Trellis)  # noqa: B010
    stub: Any = rotate_spread
    gemv_cp_async.rotate_spread = stub
    tl.inline_asm_elementwise = inline_asm_elementwise
    assert WEIGHTS == {"mul1": 1, "pair": 2, "3inst": 1}
    for case in (
        ("mul1", 2, 50, 512, (2, 2, 2, 3)),  # an odd number of tiles
        ("pair", 2, 32, 512, (2, 2, 2, 2)),
        ("pair", 2, 16, 512, (4, 1, 1, 3)),  # half a copy; as many places as a program needs
        ("mul1", 2, 16, 512, (2, 1, 1, 3)),
        ("mul1", 2.25, 32, 1024, (2, 2, 1, 3)),  # a quarter of a copy
        ("mul1", 3, 16, 512, (2, 1, 2, 2)),
        ("mul1", 4, 16, 512, (2, 1, 2, 3)),
        ("pair", 2, 70, 4608, (8, 4, 1, 3)),  # two sections, the second one not full
        ("mul1", 2, 64, 4608, (8, 4, 1, 2)),
        (
            "mul1",
            2,
            130,
            512,
            (4, 7, 1, 2),
        ),  # seven tiles one after the other, then two and the last one five times
        ("pair", 2, 40, 512, (2, 3, 1, 3)),
    ):
        check(*case)


if __name__ == "__main__":
    main()
