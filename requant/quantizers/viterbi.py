"""The cheapest walk through the bitshift trellis (Viterbi 1967; the trellis of Tseng et al. 2024, arXiv 2406.11235).

A sequence of 256 weights is a ring of 256 `bits` bits; the state of a weight is the window of 16 bits that ends with
its own, so neighbours share 16 - bits of them: a weight costs `bits` bits and has 2**16 values to choose from. A code
of v weights a step moves v `bits` bits a step.

The ring has no first state, which makes an exact search 2**(16 - bits) times dearer. As in the paper, two walks do
nearly as well: a free one through the sequence rotated by half tells the state where the ring closes, a second is
pinned to it. Rotating and pinning again gains 0.3 % at 2 bits, a first walk through half the sequence loses 0.5 %.

CUDA tensors go to the Triton kernel; `_Walk` is its torch twin. It keeps the costs of all steps and looks for the
winners along one path only, since torch has no argmin that vectorizes. Steps of uneven bits (`trellis_codes.step_bits`)
take `_uneven_paths`, the same search written plainly.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from requant.trellis_codes import PERIOD, STATE_BITS, STATES, step_bits

_INNERMOST_BITS = 6  # of the vectorized axis, at least, before the bits are brought back into order
_GROUP_BYTES = 1 << 28  # of costs that a worker keeps
_MAX_WORKERS = 8  # more would wait for the interpreter


def tail_biting_states(
    targets: Float[Tensor, "b t v"], values: Float[Tensor, "s v"], *, bits: int | float
) -> Int64[Tensor, "b t"]:
    """The state of every step, a ring: the window of step 0 begins in the last steps.

    Args:
        targets: b sequences of t steps of v weights.
        values: what each of the 65536 states stands for, exact in float16.
        bits: bits a weight; v * bits is at most 8. Quarters where v is 1.
    """
    steps, vector = targets.shape[1:]
    shifts = step_bits(bits, vector)
    kept = (STATES >> shifts[0]) - 1  # mask of the bits that the last state hands on to the first
    half = steps // 2  # a multiple of PERIOD
    if targets.is_cuda:
        from requant_kernels.viterbi import viterbi_paths  # Triton is imported only where it can run

        paths = partial(viterbi_paths, values=values, shifts=shifts)
    elif len(set(shifts)) == 1:
        paths = _Walk(values, shifts[0]).paths
    else:
        paths = partial(_uneven_paths, values=values, shifts=shifts)

    def ring(part: Tensor) -> Tensor:
        free = paths(part.roll(half, dims=1), pinned=None)  # step 0 comes after step half - 1
        return paths(part, pinned=free[:, half - 1] & kept)

    return ring(targets) if targets.is_cuda else _in_threads(ring, targets)


def _in_threads(search: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    """Search parts of the batch side by side: the tensors of one step are too small for torch's own threads."""
    threads = torch.get_num_threads()
    workers = min(threads, targets.shape[0], _MAX_WORKERS)
    if workers < 2:
        return search(targets)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(search, targets.tensor_split(workers))))
    finally:
        torch.set_num_threads(threads)  # what a thread sets for itself is the default of threads to come


class _Walk:
    """The tables of one code, and the walks over them.

    A state is read as (p, rest, new, q): the bits it is about to lose, the oldest it keeps, those of the last j steps
    and of this one. To keep the long axis `rest` innermost, the costs after j steps lie at (new, p, rest), and
    this step's candidates at (new, p, q, rest): the minimum over p leaves (new, q, rest), the order of the next step.
    After `count` steps `rest` is short, and the costs are brought back into the order of their bits.
    """

    def __init__(self, values: Float[Tensor, "s v"], shift: int) -> None:
        self.values, self.shift = values, shift
        free = STATE_BITS - 2 * shift
        self.count = max(1, (free - _INNERMOST_BITS) // shift + 1)
        self.shapes = [
            (1 << j * shift, 1 << shift, 1 << shift, 1 << free - j * shift) for j in range(self.count)
        ]
        self.tables = [
            [table.reshape(p, rest, new, q).permute(2, 0, 3, 1).contiguous() for table in values.unbind(1)]
            for new, q, p, rest in self.shapes
        ]
        self.squares = [torch.stack(tables).square().sum(0) for tables in self.tables]

    def paths(
        self, targets: Float[Tensor, "b t v"], *, pinned: Int64[Tensor, " b"] | None
    ) -> Int64[Tensor, "b t"]:
        """The cheapest states; `pinned`: the last bits of the state before the first step and of the last state."""
        b, steps, _ = targets.shape
        width = STATES >> self.shift
        states = torch.empty(b, steps, dtype=torch.int64)
        group = min(b, max(1, _GROUP_BYTES // (4 * steps * width)))
        buffer = torch.empty(group, steps, width)
        for low in range(0, b, group):
            part = targets[low : low + group]
            ends = None if pinned is None else pinned[low : low + group]
            costs = buffer[: part.shape[0]]
            for i, sequence in enumerate(part):
                self._forward(sequence, None if ends is None else int(ends[i]), costs[i])
            states[low : low + group] = self._trace(part, costs, ends)
        return states

    def _forward(
        self, sequence: Float[Tensor, "t v"], pinned: int | None, costs: Float[Tensor, "t u"]
    ) -> None:
        """Write the costs after each step, but for the square of the target, which all share."""
        width = STATES >> self.shift
        before = torch.zeros(width) if pinned is None else torch.full((width,), torch.inf)
        if pinned is not None:
            before[pinned] = 0
        total = torch.empty(STATES)
        for step, weights in enumerate((-2 * sequence).tolist()):
            phase = step % self.count
            new, q, p, rest = self.shapes[phase]
            view = total.view(new, p, q, rest)
            tables = self.tables[phase]
            torch.add(self.squares[phase], tables[0], alpha=weights[0], out=view)
            for table, weight in zip(tables[1:], weights[1:], strict=True):
                view.add_(table, alpha=weight)
            view.add_(before.view(new, p, 1, rest))
            torch.amin(view, dim=1, out=costs[step].view(new, q, rest))
            before = costs[step]
            if phase == self.count - 1:
                before = before.view(new * q, rest).t().contiguous()

    def _place(self, u: Int64[Tensor, "*i"], step: int) -> Int64[Tensor, "*i"]:
        """Where the cost of u, the last bits of a state, lies in the row of `step`."""
        phase = step % self.count
        recent = (phase + 1) * self.shift
        return (u & ((1 << recent) - 1)) * self.shapes[phase][3] + (u >> recent)

    def _trace(
        self, targets: Float[Tensor, "b t v"], costs: Float[Tensor, "b t u"], ends: Int64[Tensor, " b"] | None
    ) -> Int64[Tensor, "b t"]:
        """The states of the best paths that end in `ends` (None: wherever it is cheapest)."""
        b, steps, width = costs.shape
        rows = torch.arange(b)[:, None]
        if ends is None:
            u = costs[:, -1, self._place(torch.arange(width), steps - 1)].argmin(1)
        else:
            u = ends
        states = torch.empty(b, steps, dtype=torch.int64)
        lost = torch.arange(1 << self.shift) * width
        for step in range(steps - 1, -1, -1):
            candidates = lost + u[:, None]
            earlier = candidates >> self.shift
            total = (self.values[candidates] - targets[:, step, None]).square().sum(-1)
            if step:
                total += costs[rows, step - 1, self._place(earlier, step - 1)]
            elif ends is not None:
                total.masked_fill_(earlier != ends[:, None], torch.inf)
            states[:, step] = candidates.gather(1, total.argmin(1, keepdim=True))[:, 0]
            u = states[:, step] >> self.shift
        return states


def _uneven_paths(
    targets: Float[Tensor, "b t v"],
    *,
    values: Float[Tensor, "s v"],
    shifts: Sequence[int],
    pinned: Int64[Tensor, " b"] | None,
) -> Int64[Tensor, "b t"]:
    """`_Walk.paths` where step i moves `shifts[i % PERIOD]` bits: costs after a step are by the bits that the next keeps."""
    b, steps, _ = targets.shape
    states = torch.empty(b, steps, dtype=torch.int64)
    widths = [STATES >> shift for shift in shifts]  # of the costs before a step
    squares = values.square().sum(1)
    total = torch.empty(STATES)
    for index, sequence in enumerate((-2 * targets).tolist()):
        before = torch.zeros(widths[0])
        if pinned is not None:
            before.fill_(torch.inf)
            before[pinned[index]] = 0
        costs = [before]
        for step, weights in enumerate(sequence):
            torch.add(squares, values[:, 0], alpha=weights[0], out=total)
            for column, weight in enumerate(weights[1:], 1):
                total.add_(values[:, column], alpha=weight)
            total.view(widths[step % PERIOD], -1).add_(costs[-1][:, None])
            costs.append(total.view(-1, widths[(step + 1) % PERIOD]).amin(0))
        u = int(costs[-1].argmin()) if pinned is None else int(pinned[index])
        for step in range(steps - 1, -1, -1):
            shift, width = shifts[step % PERIOD], widths[(step + 1) % PERIOD]
            candidates = torch.arange(u, STATES, width)
            distance = squares[candidates].clone()
            for column, weight in enumerate(sequence[step]):
                distance += weight * values[candidates, column]
            states[index, step] = state = int(
                candidates[(distance + costs[step][candidates >> shift]).argmin()]
            )
            u = state >> shift
    return states
