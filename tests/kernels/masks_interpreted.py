"""Run under TRITON_INTERPRET=1 by `test_masks.py`: every mask kernel against the formula in torch."""

import interpreter_fixes  # noqa: F401
import torch
from mask_cases import CASES, same
from requant_kernels.sparsity import masks as kernels

from requant.sparsity import masks

torch.set_num_threads(1)
for name, values in CASES:
    if values.dtype == torch.bfloat16:
        continue  # the interpreter computes it wrongly
    found, expected = getattr(kernels, name)(values), getattr(masks, name)(values)
    assert same(found, expected), (name, values.shape, values.dtype)
