"""What blocks hand on beside hidden states: its gradients are those of the graph without blocks that are computed again."""

import pytest
import torch
from torch import Tensor, nn

from requant.calibration.hidden_states import in_graph
from requant.finetune.recomputed_block import ChunkSizes, LearningBlock

WINDOWS, WIDTH = 4, 8


class Block(nn.Module):
    """Reads a tensor for every window, one for all and plain values; returns its input's own tensor among others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(
        self,
        hidden: Tensor,
        state: Tensor | None,
        positions: tuple[Tensor, Tensor],
        *,
        first: Tensor,
        table: Tensor,
    ) -> tuple[Tensor, str, Tensor, Tensor, Tensor, None]:
        angles, mask = positions
        own = (hidden + angles) @ self.weight + (0 if state is None else state.tanh()) + table
        counted = torch.full((len(hidden), 1), float(len(hidden)))  # of no graph
        return hidden + own * first * mask, "said", own, first, counted, None


def gradients(blocks, how) -> tuple[list[Tensor], Tensor]:
    """At the inputs and the weights, and what the blocks counted; `how(block)` is called in a block's place."""
    generator = torch.Generator().manual_seed(0)
    hidden, first = (torch.randn(WINDOWS, 3, WIDTH, generator=generator).requires_grad_() for _ in range(2))
    table = torch.randn(WIDTH, generator=generator).requires_grad_()
    angles, mask = (
        torch.randn(1, 3, WIDTH, generator=generator),
        torch.rand(WINDOWS, 3, 1, generator=generator),
    )
    h, state, carried, counted = hidden * 1, None, first * 1, torch.zeros(0)
    for block in blocks:
        h, said, state, carried, counted, nothing = how(block)(
            h, state, (angles, mask), first=carried, table=table
        )
        h = h + 0 * counted[:, None]
        assert said == "said" and nothing is None
    h.square().sum().backward()  # nothing reads the last state
    weights = [block.weight for block in blocks]
    found = [each.grad.clone() for each in (hidden, first, table, *weights)]
    for weight in weights:
        weight.grad = None
    return found, counted


@pytest.mark.parametrize("windows", [1, 3, 4])
@pytest.mark.parametrize("stays", [False, True])
def test_gradients_of_all_that_is_handed_on_are_those_of_the_whole(windows: int, stays: bool) -> None:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    expected, counted = gradients(blocks, lambda block: block)
    assert counted[:, 0].tolist() == [WINDOWS] * WINDOWS
    chunks = ChunkSizes(windows=windows, positions=1, keeps_graphs=stays)
    found, counted = gradients(blocks, lambda block: LearningBlock(block, [], [], None, chunks, stays=stays))
    assert counted[:, 0].tolist() == {1: [1] * 4, 3: [3, 3, 3, 1], 4: [4] * 4}[windows]
    assert not chunks.graphs
    for own, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(own, whole)


def test_what_takes_gradients_is_found_in_tuples_and_lists_too() -> None:
    plain, in_a_graph = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert not in_graph([None, plain, (plain, [plain])])
    assert in_graph([in_a_graph]) and in_graph([None, (plain, [in_a_graph])])
