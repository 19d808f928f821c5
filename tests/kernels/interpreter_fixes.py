"""Import this for loops with run-time bounds in Triton's interpreter: Triton 3.6 and numpy 2.4 disagree about them."""

from typing import Any

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_index
