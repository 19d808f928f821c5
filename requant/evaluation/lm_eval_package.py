"""Whether lm-eval, an extra, is installed. No torch is imported here: a command asks before its imports."""

from importlib.util import find_spec

from requant.errors import InputError
from requant.extras import requirement

MISSING = f"tasks need the package lm-eval; install it with `pip install {requirement('tasks')}`."


def check_lm_eval() -> None:
    """Raises InputError where it is missing; whether it can be imported is not tried."""
    if find_spec("lm_eval") is None:
        raise InputError(MISSING)
