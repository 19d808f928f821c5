"""Compile a kernel for a GPU that is not there, and read what came out: registers, spills, SASS."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
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
    """What ptxas made: registers, bytes of stack (spills), static instructions by opcode."""

    registers: int
    stack: int
    opcodes: Counter[str]
    loop: int  # static instructions of the longest loop
    barriers: int  # of the CTA, in that loop
    inner: int  # static instructions of the longest innermost loop
    mma_loop: Counter[str]  # by opcode, the shortest loop that multiplies on tensor cores
    mma_loops: tuple[int, ...]  # static instructions of the innermost ones, ascending
    layout_ir: str
    shared: tuple[int, int]  # bytes per CTA: dynamic, and static (declared in PTX)

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())


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
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert found is not None
    lines = re.findall(r"(\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+([^;]+);", sass)
    labels: dict[str, int] = {}
    listing: list[str] = []
    for label, instruction in lines:
        if label:
            labels[label] = len(listing)
        else:
            listing.append(instruction)
    codes = [re.sub(r"^@!?U?P\d+ ", "", line).split()[0].split(".")[0] for line in listing]
    opcodes = Counter(codes)
    del opcodes["NOP"]
    targets = [(i, re.search(r"BRA.*(\.L_\w+)", line)) for i, line in enumerate(listing)]
    spans = [(labels[to[1]], i) for i, to in targets if to is not None and labels.get(to[1], i) < i]
    length, end = max(((last + 1 - first, last) for first, last in spans), default=(0, 0))
    innermost = [(a, b) for a, b in spans if not any(a <= c and d <= b for c, d in spans if (c, d) != (a, b))]
    multiplying = [codes[a : b + 1] for a, b in spans if {"IMMA", "HMMA"} & set(codes[a : b + 1])]
    return Machine(
        registers=int(found[1]), stack=int(found[2]), opcodes=opcodes, loop=length,
        barriers=sum(line.startswith("BAR") for line in listing[end + 1 - length : end + 1]),
        inner=max((b + 1 - a for a, b in innermost), default=0),
        mma_loop=Counter(min(multiplying, key=len, default=[])),
        mma_loops=tuple(sorted(b + 1 - a for a, b in innermost if {"IMMA", "HMMA"} & set(codes[a : b + 1]))),
        layout_ir=str(built.asm["ttgir"]),
        shared=(built.metadata.shared, int(found[3])),
    )  # fmt: skip
