"""The Triton search against the CPU search: interpreted, in a process of its own, and on a GPU."""

import pytest
import torch

from requant.formats.trellis_codes import CODES, code_values, step_bits
from requant.quantizers.viterbi import plain_paths, tail_biting_states


def test_interpreted_kernel_finds_the_paths_of_the_cpu(interpreted) -> None:
    interpreted("viterbi_interpreted.py")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "bits"),
    [("mul1", b) for b in (*range(1, 9), 2.25, 2.5, 3.75, 4.5, 5.5, 6.5)]
    + [("3inst", 2)]
    + [("pair", b) for b in (1, 1.75, 2, 2.25, 2.5, 3, 4)],
)
def test_gpu_finds_streams_as_good_as_the_cpu(name: str, bits: int | float) -> None:
    values = code_values(name)
    vector = CODES[name].weights_per_step
    targets = torch.randn(5, 256 // vector, vector, generator=torch.Generator().manual_seed(int(bits)))
    mine = tail_biting_states(targets, values, bits=bits)
    theirs = tail_biting_states(targets.cuda(), values.cuda(), bits=bits).cpu()
    shifts = torch.tensor(step_bits(bits, vector)).repeat(targets.shape[1] // 4)
    assert torch.equal(theirs >> shifts, theirs.roll(1, dims=1) & (65536 >> shifts) - 1)
    errors = [(values[states] - targets).square().sum() for states in (mine, theirs)]
    torch.testing.assert_close(errors[0], errors[1], rtol=2e-2, atol=0)


@pytest.mark.gpu
def test_gpu_searches_many_sequences() -> None:
    targets = torch.randn(300, 64, 1, generator=torch.Generator().manual_seed(0))
    values = code_values("mul1")
    from requant_kernels.viterbi.gpu import viterbi_paths

    found = viterbi_paths(targets.cuda(), values.cuda(), shifts=(2,), pinned=None).cpu()
    some = torch.tensor([0, 131, 299])
    errors = [
        (values[states] - targets[some]).square().sum((1, 2))
        for states in (found[some], plain_paths(targets[some], values=values, shifts=(2,), pinned=None))
    ]
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-3, atol=0)
