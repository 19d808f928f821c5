"""Settings of methods for tests of what is done with codes, whichever they are."""

from typing import Any

from requant.quantizers.registry import find_method


def brief_settings(method: str, **chosen: Any) -> Any:
    """A method's settings by default, but for those that are chosen, and two rounds of `lut` instead of eight."""
    rounds = {"rounds": 2} if method == "lut" else {}
    return find_method(method).config(**rounds, **chosen)
