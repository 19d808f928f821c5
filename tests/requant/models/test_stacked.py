"""A stack without a copy is one with the same values and gradients."""

import pytest
import torch

from requant.models.stacked import lie_in_a_row, stacked


def parts(*, in_a_row: bool) -> list[torch.Tensor]:
    memory = torch.randn(4, 3, 5)
    return [part if in_a_row else part.clone() for part in memory[1:]]


@pytest.mark.parametrize("in_a_row", [True, False])
def test_values_and_gradients_are_those_of_torch(in_a_row: bool) -> None:
    tensors = [part.requires_grad_() for part in (each.detach() for each in parts(in_a_row=in_a_row))]
    found = stacked(tensors)
    assert torch.equal(found, torch.stack(tensors))
    assert (found.data_ptr() == tensors[0].data_ptr()) == in_a_row
    weights = torch.randn(3, 3, 5)
    (found * weights).sum().backward()
    (stacked(tensors) * 2 * weights).sum().backward()
    for tensor, expected in zip(tensors, weights, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * expected)
    assert lie_in_a_row([tensor.grad for tensor in tensors if tensor.grad is not None])


def test_what_does_not_lie_in_a_row_is_copied() -> None:
    first, second, third = parts(in_a_row=True)
    square = torch.randn(2, 4, 4)
    for other in (
        [first, third],
        [second, first, third],
        [square[0].mT, square[1].mT],
        [first[:2], first[1:]],
    ):
        assert not lie_in_a_row(other)
        assert torch.equal(stacked(other), torch.stack(other))
    # beyond the end of the memory of the first there may lie another tensor
    assert not lie_in_a_row([torch.zeros(8)[4:], torch.zeros(4)])


def test_without_gradients_nothing_is_copied_either() -> None:
    tensors = parts(in_a_row=True)
    with torch.no_grad():
        assert stacked(tensors).data_ptr() == tensors[0].data_ptr()
