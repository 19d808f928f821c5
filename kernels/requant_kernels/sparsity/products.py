"""`x w'` with a 2:4 matrix of 16-bit values, by cuSPARSELt through torch.

    y [m, n] = x [m, k] w',    w 2:4 along k, stored as half of its values and 1 bit of metadata per weight

The tensor cores of Ampere to Hopper skip the zeros, which pays off when the product is compute-bound: from some number of
tokens m on; below it the dense product is faster. cuSPARSELt has several algorithms per product. It can search for the best,
but a search synchronizes, cannot be captured in a CUDA graph, and has been seen to leave the library in an error state. So
algorithms come from a table (`tuned/semi_structured.json`, by `kernels/bench/semi_structured.py`), by GPU, shape and m. A
shape or GPU missing there is multiplied dense: the default algorithm, 1.13 to 1.53 times as fast as dense bfloat16 from 1024
tokens on at four shapes of an H200, takes a fifth to a half longer on an H100, where the best gains 2 to 7 %
(docs/sparsity.md).
"""

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

TABLE = Path(__file__).parents[1] / "tuned" / "semi_structured.json"
WEIGHT_MULTIPLE, TOKEN_MULTIPLE = 16, 8  # required by cuSPARSELt for 16-bit values
Algorithms = tuple[
    tuple[int, int], ...
]  # (smallest number of tokens, algorithm), ascending; empty: dense is faster
logger = logging.getLogger(__name__)


def supports(n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has the product: Ampere to Hopper, 16-bit values, rows and columns multiples of 16."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cusparselt.is_available():
        return False
    ampere_to_hopper = (8, 0) <= torch.cuda.get_device_capability(device) <= (9, 0)
    whole = n % WEIGHT_MULTIPLE == k % WEIGHT_MULTIPLE == 0
    return ampere_to_hopper and whole and dtype in (torch.float16, torch.bfloat16)


def algorithms(n: int, k: int, device_name: str) -> Algorithms:
    """The algorithms to use, each from some number of tokens on."""
    return _table(TABLE).get(device_name, {}).get(f"{n}x{k}", ())


def algorithm_for(tokens: int, rows: Algorithms) -> int | None:
    """The algorithm for a number of tokens; None if the dense product is faster."""
    found = None
    for first, algorithm in rows:
        if tokens >= first:
            found = algorithm
    return found


def compress(weight: Tensor) -> Tensor:
    """A 2:4 matrix [n, k] in the form that cuSPARSELt reads."""
    return torch._cslt_compress(weight.contiguous())


def semi_structured_linear(x: Tensor, compressed: Tensor, bias: Tensor | None, algorithm: int) -> Tensor:
    """`x w' + bias`, [m, n]; x is [m, k] in the dtype of the weight. Any m: tokens are padded to a multiple of 8."""
    tokens = x.shape[0]
    x = F.pad(x, (0, 0, 0, -tokens % TOKEN_MULTIPLE)).contiguous()
    y = torch._cslt_sparse_mm(compressed, x.T, bias, transpose_result=True, alg_id=algorithm)
    return y[:tokens]


@cache
def _table(file: Path) -> dict[str, dict[str, Algorithms]]:
    """GPU -> `NxK` -> algorithms; empty if there is no file, or, with a warning, if it is damaged."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {device: {s: _rows(rows) for s, rows in shapes.items()} for device, shapes in found.items()}
    except (ValueError, TypeError, AttributeError):
        logger.warning("%s is damaged and not used; measure it again", file)
        return {}


def _rows(rows: Sequence[Sequence[int]]) -> Algorithms:
    found = tuple((int(first), int(algorithm)) for first, algorithm in rows)
    if list(found) != sorted(found):
        raise ValueError("numbers of tokens ascend")
    return found
