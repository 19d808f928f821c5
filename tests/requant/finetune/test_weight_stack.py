"""Experts that are computed together get what each would by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from requant.finetune.scaled_rows import ScaledRows
from requant.finetune.step import ReparametrizedWeight
from requant.finetune.weight_stack import WeightStack, in_stacks
from requant.models.stacked import lie_in_a_row


def weight(
    shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, stack: Any = "gate"
) -> ReparametrizedWeight:
    scales, unscaled = torch.randn(shape[0]).requires_grad_(), torch.randn(shape).to(dtype)
    return ReparametrizedWeight(
        parameter=nn.Parameter(torch.empty(shape)),
        value=lambda: scales[:, None] * unscaled,
        rows=[ScaledRows(scales=scales, unscaled=unscaled)],
        stack=stack,
    )


def scales_of(members: list[ReparametrizedWeight]) -> list[Tensor]:
    return [member.rows[0].scales for member in members]


def gradients_by(
    backward: Any, members: list[ReparametrizedWeight], gradients: list[Tensor | None]
) -> list[Tensor | None]:
    """At the scales, of two passes."""
    for _ in range(2):
        for member, gradient in zip(members, gradients, strict=True):
            member.parameter.grad = gradient
        backward()
    found = [scales.grad for scales in scales_of(members)]
    for scales in scales_of(members):
        scales.grad = None
    return found


def each_by_itself(members: list[ReparametrizedWeight]) -> None:
    for member in members:
        member.backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("missing", [None, 1])
def test_values_and_gradients_are_those_of_each(device: str, missing: int | None) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        members = [weight((6, 40)) for _ in range(3)]
        expected = [member.value().detach() for member in members]
        gradients: list[Tensor | None] = [torch.randn(6, 40) for _ in members]
    if missing is not None:
        gradients[missing] = None  # an expert without tokens
    wanted = gradients_by(lambda: each_by_itself(members), members, gradients)
    (stack,) = in_stacks(members)
    assert isinstance(stack, WeightStack) and stack.parameters == [member.parameter for member in members]
    assert all(map(torch.equal, stack.values(), expected)) and lie_in_a_row(stack.values())
    assert all(torch.equal(member.value(), value) for member, value in zip(members, expected, strict=True))
    found = gradients_by(stack.backward, members, gradients)
    for index, (own, each) in enumerate(zip(found, wanted, strict=True)):
        assert (own is None) == (each is None) == (index == missing)
        if own is not None:
            torch.testing.assert_close(own, each)


def test_what_stands_before_the_scales_is_there_once() -> None:
    members = [weight((6, 40)) for _ in range(3)]
    stack = WeightStack.of(members)
    for member, part in zip(members, stack.unscaled, strict=True):
        assert member.rows[0].unscaled.data_ptr() == part.data_ptr()


def test_only_what_is_alike_is_computed_together() -> None:
    gates, downs = [weight((6, 40)) for _ in range(2)], [weight((40, 6), stack="down") for _ in range(2)]
    shared, alone = weight((8, 40)), weight((6, 40), stack=None)
    in_float32 = weight((6, 40), torch.float32)
    several = ReparametrizedWeight(
        parameter=gates[0].parameter, value=gates[0].value, rows=2 * list(gates[0].rows), stack="gate"
    )
    others = [shared, alone, in_float32, several]
    found = in_stacks([gates[0], downs[0], *others, gates[1], downs[1]])
    stacks = [each.members for each in found if isinstance(each, WeightStack)]
    assert stacks == [gates, downs]
    assert [each for each in found if isinstance(each, ReparametrizedWeight)] == others
