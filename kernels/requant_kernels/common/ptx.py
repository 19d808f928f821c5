"""Inline PTX with named operands and registers, and the snippets that several kernels share.

Triton numbers the operands of inline assembly: $0, $1, .., outputs before inputs. Here the text uses names, `$sum`, and
`inline_ptx` derives the numbers and the constraint string from one list, so that the two cannot disagree. `PtxBuilder`
writes long blocks line by line and declares registers on the way. Plain Python: importing it needs no Triton.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Ptx:
    """A block of inline assembly in the form of `gl.inline_asm_elementwise`."""

    text: str
    constraints: str
    operands: tuple[str, ...] = ()  # names, in the order of their numbers


def inline_ptx(
    body: str | Iterable[str],
    *,
    outputs: Mapping[str, str] | None = None,
    inputs: Mapping[str, str] | None = None,
    registers: Mapping[str, str | Iterable[str]] | None = None,
) -> Ptx:
    """`body` with every `$name` replaced by the number of that operand.

    `outputs` and `inputs`: name -> constraint (`=r`, `=&f`, `l`; a number ties an input to that output). Without outputs the
    block is run for its effect on memory, and gets the one output that Triton requires. `registers`: PTX type -> names.
    """
    lines = [body] if isinstance(body, str) else list(body)
    outputs, inputs = dict(outputs or {}), dict(inputs or {})
    if not outputs:
        outputs = {"unused": "=r"}
        lines.append("mov.b32 $unused, 0;")
    number = {name: i for i, name in enumerate([*outputs, *inputs])}
    declared = [
        f".reg .{kind} {names if isinstance(names, str) else ', '.join(names)};"
        for kind, names in (registers or {}).items()
    ]
    text = re.sub(r"\$([A-Za-z_]\w*)", lambda found: f"${number[found[1]]}", "\n".join([*declared, *lines]))
    return Ptx(
        text=f"{{ {text} }}",
        constraints=",".join([*outputs.values(), *inputs.values()]),
        operands=tuple(number),
    )


class PtxBuilder:
    """Lines of PTX in their own scope; 32-bit registers are declared as they are created: `hash0`, `hash1`, ...

    A comment must contain neither `$` nor braces, which are special to LLVM.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.registers: list[str] = []
        self._count: Counter[str] = Counter()

    def register(self, name: str) -> str:
        """A new register named after `name`."""
        self.registers.append(f"{name}{self._count[name]}")
        self._count[name] += 1
        return self.registers[-1]

    def new(self, name: str, line: str) -> str:
        """Append `line`, where `{d}` is a new register named after `name`; returns the register."""
        register = self.register(name)
        self.lines.append(line.format(d=register))
        return register

    def emit(self, *lines: str) -> None:
        self.lines += lines

    def comment(self, text: str) -> None:
        self.lines.append(f"// {text}")

    def build(self, constraints: list[str], declarations: str = "") -> Ptx:
        """`constraints` of the operands, outputs first; `declarations`: shared memory, and registers of other types."""
        registers = f".reg .b32 {', '.join(self.registers)};\n"
        return Ptx(
            text="{ " + registers + declarations + "\n".join(self.lines) + "\n}",
            constraints=",".join(constraints),
        )


def ptx_dtype(dtype: torch.dtype) -> str:
    """The name of a type of 16-bit activations."""
    return "fp16" if dtype == torch.float16 else "bf16"


def mma_line(
    shape: str, types: str, d: Iterable[str], a: Iterable[str], b: Iterable[str], c: Iterable[str]
) -> str:
    """d = a b + c on the tensor cores; fragments by their registers, `types` in the order d, a, b, c."""
    fragments = ", ".join(f"{{{', '.join(registers)}}}" for registers in (d, a, b, c))
    return f"mma.sync.aligned.{shape}.row.col.{types} {fragments};"


def mma_k16_types(dtype: str) -> str:
    """Types for `mma_line`: products of 16-bit floats, float32 sums."""
    kind = dtype.replace("fp", "f")
    return f"f32.{kind}.{kind}.f32"


def ptx_float(value: float) -> str:
    """A float32 in PTX syntax."""
    return "0f" + struct.pack(">f", value).hex().upper()


# The address of the shared memory that Triton allocates; the kernels here allocate once, so it is their buffer's.
SMEM_BASE = "mov.u32 $0, global_smem;"
SYNCWARP = "bar.warp.sync 0xffffffff;"
LOAD_F32 = inline_ptx("ld.shared.f32 $value, [$address];", outputs={"value": "=f"}, inputs={"address": "r"})


def declare_smem_ptx(size: int) -> str:
    """Declare `size` bytes of static shared memory in addition to Triton's own, which stays aligned; returns the address."""
    return f"{{ .shared .align 1024 .b8 residuals[{size}];\n mov.u32 $0, residuals; }}"


def broadcast_pair_lines(dtype: str, factor: float, addend: float) -> tuple[list[str], dict[str, str]]:
    """Lines that compute, from two float16 in $pair, `factor * x + addend` of the lower one, twice in $low, and of the upper
    one, twice in $high, as `dtype`; and the registers that they need."""
    if dtype == "fp16":
        f, c = ("0x" + 2 * struct.pack(">e", value).hex() for value in (factor, addend))
        return [
            f"mov.b32 f, {f}; mov.b32 c, {c};",
            "prmt.b32 l, $pair, $pair, 0x1010; prmt.b32 h, $pair, $pair, 0x3232;",
            "fma.rn.f16x2 $low, l, f, c; fma.rn.f16x2 $high, h, f, c;",
        ], {"b32": "l, h, f, c"}
    f, c = ptx_float(factor), ptx_float(addend)
    return [
        "mov.b32 {l, h}, $pair; cvt.f32.f16 a, l; cvt.f32.f16 b, h;",
        f"fma.rn.f32 a, a, {f}, {c}; fma.rn.f32 b, b, {f}, {c};",
        "cvt.rn.bf16x2.f32 $low, a, a; cvt.rn.bf16x2.f32 $high, b, b;",
    ], {"b16": "l, h", "f32": "a, b"}


def broadcast_pair_ptx(dtype: str, factor: float, addend: float) -> Ptx:
    """`broadcast_pair_lines` as a separate block."""
    lines, registers = broadcast_pair_lines(dtype, factor, addend)
    return inline_ptx(lines, outputs={"low": "=r", "high": "=r"}, inputs={"pair": "r"}, registers=registers)
