"""A builder of long inline PTX: every register gets a name that says what it holds."""

from collections import Counter

from requant_kernels.common.ptx import Ptx


class PtxBuilder:
    """Lines of PTX in a scope of their own, whose 32-bit registers are declared as they are made: `hash0`, `hash1`, ...

    A comment must hold neither `$` nor braces, which mean something to LLVM.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.registers: list[str] = []
        self._count: Counter[str] = Counter()

    def register(self, name: str) -> str:
        """A fresh register called after `name`."""
        self.registers.append(f"{name}{self._count[name]}")
        self._count[name] += 1
        return self.registers[-1]

    def new(self, name: str, line: str) -> str:
        """Append `line`, where `{d}` is a fresh register called after `name`; returns the register."""
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
