"""Adam whose moments rest in 16 bits learns as Adam does."""

import torch

from requant.finetune.sixteen_bit_adam import SixteenBitAdam
from requant.finetune.step import adam


def test_moments_of_sixteen_bits_learn_as_those_of_adam() -> None:
    start, goal = torch.randn(64, 64), torch.randn(64, 64)
    ends = []
    for optimizer_of in (SixteenBitAdam, lambda groups: adam(groups, captures=False)):
        weight = start.clone().requires_grad_(True)
        optimizer = optimizer_of([{"params": [weight], "lr": 0.01}])
        for _ in range(60):
            (weight - goal + 0.3 * torch.randn(64, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weight.detach())
    moved = (ends[1] - start).norm()
    assert moved > 0.3 * (goal - start).norm()
    assert (ends[0] - ends[1]).norm() < 0.2 * moved  # the noise differs, too


def test_moments_rest_in_sixteen_bits() -> None:
    weight = torch.randn(8, 8).requires_grad_(True)
    optimizer = SixteenBitAdam([{"params": [weight], "lr": 0.01}])
    weight.square().sum().backward()
    optimizer.step()
    (state,) = (each.state[weight] for each in optimizer.each)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert weight.dtype == torch.float32
