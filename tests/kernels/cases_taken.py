"""Which cases a script of the interpreter takes: every other one, or with `all` every one."""

import sys
from collections.abc import Sequence
from typing import TypeVar

Taken = TypeVar("Taken")


def some(cases: Sequence[Taken]) -> Sequence[Taken]:
    return cases if "all" in sys.argv[1:] else cases[::2]
