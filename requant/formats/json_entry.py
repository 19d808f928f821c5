"""Checks of the values in a matrix's entry of `config.json`, which may come from a stranger.

Each function returns the value, or raises CheckpointError with the name of the matrix, the key and the valid values.
"""

from typing import Any

from requant.errors import CheckpointError

MAX_BITS = 8
MAX_DIMENSION = 1 << 31
FLAG = (False, True)


def whole_number(name: str, entry: dict[str, Any], key: str, low: int, high: int) -> int:
    """An int from `low` to `high`."""
    return _bounded(name, key, entry.get(key), low, high)


def choice(name: str, entry: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    """One of `allowed`, of the same type: 1 is not True."""
    value = entry.get(key)
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise CheckpointError(
            f"config.json: {name} has {key} = {_short(value)}, not one of {', '.join(map(repr, allowed))}; "
            "upgrade requant, or download the checkpoint again."
        )
    return value


def whole_bits(name: str, entry: dict[str, Any]) -> int:
    """Bits of a code."""
    return whole_number(name, entry, "bits", 1, MAX_BITS)


def matrix_shape(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    """`[n, k]`."""
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise CheckpointError(
            f"config.json: {name} has shape {_short(shape)} where [n, k] belongs; no version of requant writes that, do not "
            "use this folder."
        )
    n, k = (_bounded(name, "shape", size, 1, MAX_DIMENSION) for size in shape)
    return n, k


def _bounded(name: str, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        raise CheckpointError(
            f"config.json: {name} has {key} = {_short(value)}, not a whole number from {low} to {high}; "
            "the checkpoint is damaged, download it again."
        )
    return value


def _short(value: Any) -> str:
    """A hostile value may be megabytes long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
