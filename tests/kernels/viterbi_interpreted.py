"""Run under TRITON_INTERPRET=1 by `test_viterbi.py`: the Triton search finds the paths of the CPU search."""

import interpreter_fixes  # noqa: F401
import torch
from requant_kernels.viterbi.gpu import viterbi_paths

from requant.formats.trellis_codes import code_values, step_bits
from requant.quantizers.viterbi import plain_paths

for name, bits in (("pair", 2.25), ("mul1", 2.25), ("mul1", 4.5), ("mul1", 5.5), ("mul1", 6.5)):
    values = code_values(name)
    shifts = step_bits(bits, values.shape[1])
    targets = torch.randn(2, 8, values.shape[1], generator=torch.Generator().manual_seed(int(bits)))
    targets = (32 * targets).round() / 32  # whose distances from values of pairs are exact in float16
    for pinned in (None, torch.tensor([5, 77])):
        found = viterbi_paths(targets, values, shifts=shifts, pinned=pinned)
        plain = plain_paths(targets, values=values, shifts=shifts, pinned=pinned)
        assert torch.equal(found, plain), (name, bits, pinned)
