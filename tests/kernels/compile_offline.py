"""Compile a kernel for a GPU that is not there, and read what came out: registers, spills, SASS."""

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = {"IMMA", "HMMA"}  # opcodes of warps' tensor cores
POINTERS = {  # argument -> type, where the argument is not None
    "x_ptr": "*i32", "codes_ptr": "*i32", "slice_ptr": "*i32", "ell_columns_ptr": "*i16", "row_perm_ptr": "*i32",
    "zeros_ptr": "*fp16", "column_scales_ptr": "*fp16", "levels_ptr": "*fp16", "partial_ptr": "*fp32",
}  # fmt: skip
# Instruction counts hold for one compiler: another version schedules and unrolls differently.
counts_instructions = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="instruction ceilings were measured with Triton 3.6"
)
ALIGNED = ("K", "n", "stride_x", "stride_y")
INTEGERS = ("M", "last_tile", "iterations", "groups", "steps", "blocks", "width", "n_rows", *ALIGNED)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What ptxas made. Instructions are static ones, and read when they are asked for (`disassembly`)."""

    registers: int
    stack: int  # bytes: spills
    shared: tuple[int, int]  # bytes per CTA: dynamic, and static (declared in PTX)
    layout_ir: str
    cubin: bytes

    @cached_property
    def listing(self) -> tuple[list[str], dict[str, int]]:
        """Instructions, and label -> the index of the one behind it."""
        labels: dict[str, int] = {}
        instructions: list[str] = []
        for label, instruction in re.findall(
            r"(\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+([^;]+);", disassembly(self.cubin)
        ):
            if label:
                labels[label] = len(instructions)
            else:
                instructions.append(instruction)
        return instructions, labels

    @cached_property
    def codes(self) -> list[str]:
        """The opcode of each instruction, without modifiers."""
        return [re.sub(r"^@!?U?P\d+ ", "", line).split()[0].split(".")[0] for line in self.listing[0]]

    @cached_property
    def opcodes(self) -> Counter[str]:
        found = Counter(self.codes)
        del found["NOP"]
        return found

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @cached_property
    def loops(self) -> list[tuple[int, int]]:
        """First and last instruction of each."""
        lines, labels = self.listing
        targets = [(i, re.search(r"BRA.*(\.L_\w+)", line)) for i, line in enumerate(lines)]
        return [(labels[to[1]], i) for i, to in targets if to is not None and labels.get(to[1], i) < i]

    @property
    def longest(self) -> list[str]:
        """The instructions of the longest loop."""
        first, last = max(self.loops, key=lambda loop: (loop[1] - loop[0], loop[1]), default=(0, -1))
        return self.listing[0][first : last + 1]

    @property
    def loop(self) -> int:
        """Instructions of the longest loop."""
        return len(self.longest)

    @property
    def barriers(self) -> int:
        """Of the CTA, in that loop."""
        return sum(line.startswith("BAR") for line in self.longest)

    @property
    def innermost(self) -> list[list[str]]:
        """The opcodes of each innermost loop."""
        return [
            self.codes[a : b + 1]
            for a, b in self.loops
            if not any(a <= c and d <= b for c, d in self.loops if (c, d) != (a, b))
        ]

    @property
    def inner(self) -> int:
        """Instructions of the longest innermost loop."""
        return max(map(len, self.innermost), default=0)

    @property
    def mma_loop(self) -> Counter[str]:
        """By opcode, the shortest loop that multiplies on tensor cores."""
        multiplying = [self.codes[a : b + 1] for a, b in self.loops if MMA & set(self.codes[a : b + 1])]
        return Counter(min(multiplying, key=len, default=[]))

    @property
    def mma_loops(self) -> tuple[int, ...]:
        """Instructions of the innermost ones that multiply on tensor cores, ascending."""
        return tuple(sorted(len(codes) for codes in self.innermost if MMA & set(codes)))


def disassembly(cubin: bytes) -> str:
    """The instructions of a kernel, kept beside those that Triton compiled: the disassembler takes half a second to start
    (`-ndf`: a third more for the targets of indirect jumps, which no kernel has)."""
    name = hashlib.sha256(triton.__version__.encode() + cubin).hexdigest()
    kept = Path(triton.knobs.cache.dir, "disassembly", name)
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(output_of("nvdisasm", "-c", "-ndf", cubin=cubin))
        Path(file.name).replace(kept)  # other processes see all of it or nothing
    return kept.read_text()


def output_of(tool: str, *options: str, cubin: bytes) -> str:
    """What one of CUDA's tools prints of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True
        ).stdout


def paths(position: int, kind: str | tuple[str, ...]) -> list[tuple[tuple[int, ...], str]]:
    """Where an argument, or each of a tuple, is, and its type."""
    if isinstance(kind, str):
        return [((position,), kind)]
    return [((position, i), own) for i, own in enumerate(kind)]


def compile_kernel(
    kernel: Any,
    constants: dict[str, Any],
    *,
    capability: int,
    dtype: str = "fp16",
    pointers: dict[str, Any],
    absent: tuple[str, ...] = (),
    warps: int,
    stages: int = 1,
    max_registers: int | None = None,
    aligned: tuple[str, ...] = (),
) -> Machine:
    types = {
        **dict.fromkeys(INTEGERS, "i32"),
        **POINTERS,
        "y_ptr": f"*{dtype}",
        **pointers,
    }
    signature = {
        name: "constexpr" if name in constants or name in absent else types[name] for name in kernel.arg_names
    }
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(position[n],): constants.get(n) for n, kind in signature.items() if kind == "constexpr"},
        attrs={
            path: [["tt.divisibility", 16]]
            for n, kind in signature.items()
            for path, own in paths(position[n], kind)
            if own[0] == "*" or (own == "i32" and n in (*ALIGNED, *aligned))
        },
    )
    options = {"num_warps": warps, "num_stages": stages}
    if max_registers:
        options["maxnreg"] = max_registers
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = output_of("cuobjdump", "-res-usage", cubin=built.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert found is not None
    return Machine(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=(built.metadata.shared, int(found[3])),
        layout_ir=str(built.asm["ttgir"]),
        cubin=built.asm["cubin"],
    )
