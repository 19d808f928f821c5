"""Whether a kernel may take the place of its formula in torch on this machine.

Kernels (`requant_kernels`) are compiled on the user's machine, by a compiler and a driver that nobody has tested together.
So before one is first used its result is compared with the formula's on that GPU. A kernel that differs, or does not compile
or start there, is not used, and the log says so.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from requant.errors import first_line

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


def usable_kernel(
    name: str, device: torch.device, load: Callable[[], F], agrees: Callable[[F], bool]
) -> F | None:
    """The kernel that `load` imports, launched on the device whichever is the current one; None where it is not used.

    `load` is called here, because Triton is imported only where it can run; `agrees` compares the kernel with its formula.
    """
    try:
        kernel = _on(device, load())
        if agrees(kernel):
            return kernel
        reason = "it differs from torch"
    except Exception as error:  # Triton, its compiler and the driver raise their own
        reason = first_line(error)
    logger.warning(
        "the kernel `%s` is not used on this machine, where torch takes its place: %s", name, reason
    )
    return None


def _on(device: torch.device, kernel: F) -> F:
    def launched(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(device):
            return kernel(*args, **kwargs)

    return cast(F, launched)
