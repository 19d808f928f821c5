"""Trellis codes without the search for the cheapest path: for tests of what is done with codes, whichever they are."""

import torch
from torch import Tensor

from requant.formats.trellis_codes import PERIOD, step_bits


def greedy_states(targets: Tensor, values: Tensor, *, bits: int | float) -> Tensor:
    """In place of `tail_biting_states`: every step takes the nearest of the values within its reach.

    The stream is closed afterwards, so the first steps of a sequence are not near their weights. Two searches through 65536
    states take a hundred times as long.
    """
    steps, vector = targets.shape[1:]
    shifts = step_bits(bits, vector) * (steps // PERIOD)
    last = len(values) - 1
    state = torch.zeros(len(targets), dtype=torch.int64)
    shifted_in = []
    for step, shift in enumerate(shifts):
        reached = (state[:, None] << shift | torch.arange(1 << shift)) & last
        nearest = (values[reached] - targets[:, step, None]).square().sum(2).argmin(1)
        shifted_in.append(nearest)
        state = reached.gather(1, nearest[:, None])[:, 0]
    states = []
    for new, shift in zip(shifted_in, shifts, strict=True):  # once more, from the state where the stream ends
        state = (state << shift | new) & last
        states.append(state)
    return torch.stack(states, 1)
