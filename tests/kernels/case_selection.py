"""Which cases a script runs in the interpreter: one of some, or with the argument `all` every one."""

import sys
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
ALL = "all" in sys.argv[1:]


def selected(cases: Sequence[T], *, one_of: int = 2) -> Sequence[T]:
    return cases if ALL else cases[::one_of]
