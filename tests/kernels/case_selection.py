"""Which cases a script runs in the interpreter: every other one, or with the argument `all` every one."""

import sys
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def selected(cases: Sequence[T]) -> Sequence[T]:
    return cases if "all" in sys.argv[1:] else cases[::2]
