"""The cheapest path through the bitshift trellis (Viterbi 1967; the trellis of Tseng et al. 2024, arXiv 2406.11235).

A sequence of 256 weights is a tail-biting stream of 256 * `bits` bits; the state of a weight is the window of 16 bits that
ends with its own, so neighbours share 16 - bits of them: a weight costs `bits` bits and has 2**16 values to choose from. A
code of v weights per step moves the window by v * `bits` bits per step.

The stream has no first state, which makes an exact search 2**(16 - bits) times as expensive. As in the paper, two searches
do nearly as well: the first, with free ends on the sequence rotated by half, finds the state where the stream closes, and
the second is pinned to it. Rotating and pinning again gains 0.3 % at 2 bits, a first search on half the sequence loses 0.5
%.

CUDA tensors go to the Triton kernel, which is compiled for every number of bits (`compile_searches`), others to its CPU
counterpart (`requant_kernels.viterbi.cpu`), which uses as many threads as torch. The bits of a step may be uneven
(`trellis_codes.step_bits`).
"""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from requant.formats.hadamard import TILE
from requant.formats.trellis_codes import code_values, step_bits


def tail_biting_states(
    targets: Float[Tensor, "b t v"], values: Float[Tensor, "s v"], *, bits: int | float
) -> Int64[Tensor, "b t"]:
    """The state of every step: the window of step 0 begins in the last steps.

    Args:
        targets: b sequences of t steps of v weights.
        values: of each state, exact in float16; 65536 states on a GPU, any power of two on a CPU.
        bits: bits per weight; v * bits is at most 8. Quarters where v is 1.
    """
    steps, vector = targets.shape[1:]
    shifts = step_bits(bits, vector)
    kept = (len(values) >> shifts[0]) - 1  # mask of the bits that the last state hands on to the first
    half = steps // 2  # a multiple of PERIOD
    if targets.is_cuda:
        from requant_kernels.viterbi import gpu  # Triton is imported only where it can run

        paths = partial(gpu.viterbi_paths, values=values, shifts=shifts)
    else:
        paths = partial(plain_paths, values=values, shifts=shifts)

    def tail_biting(part: Tensor) -> Tensor:
        free = paths(part.roll(half, dims=1), pinned=None)  # step 0 comes after step half - 1
        return paths(part, pinned=free[:, half - 1] & kept)

    return tail_biting(targets) if targets.is_cuda else _in_threads(tail_biting, targets)


def compile_searches(codes: Collection[tuple[str, int | float]], device: torch.device, *, wait: bool) -> None:
    """Compile the searches of these codes and bits on all cores: each takes a second or two, and a run has a dozen.

    Without `wait` they are compiled while the caller goes on. Nothing on a CPU.
    """
    if device.type != "cuda":
        return
    from requant_kernels.common.compile_ahead import compile_ahead

    def searches() -> None:
        for code, bits in codes:
            values = code_values(code, device)
            vector = values.shape[1]
            tail_biting_states(torch.zeros(1, TILE**2 // vector, vector, device=device), values, bits=bits)

    compile_ahead(searches, wait=wait)


def plain_paths(
    targets: Float[Tensor, "b t v"],
    *,
    values: Float[Tensor, "s v"],
    shifts: tuple[int, ...],
    pinned: Int64[Tensor, " b"] | None,
) -> Int64[Tensor, "b t"]:
    """The cheapest states on a CPU; `pinned`: the last bits of the state before the first step and of the last state."""
    from requant_kernels.viterbi import cpu  # compiles its loops, in a second or two

    ends = None if pinned is None else pinned.numpy()
    return torch.from_numpy(cpu.viterbi_paths(targets.float().numpy(), values.float().numpy(), shifts, ends))


def _in_threads(search: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Search parts of the batch side by side."""
    workers = min(torch.get_num_threads(), targets.shape[0])
    if workers < 2:
        return search(targets)
    with ThreadPoolExecutor(workers) as pool:
        return torch.cat(list(pool.map(search, targets.tensor_split(workers))))
