"""Passes through a model whose matrices are on the host are those of one that lies on the device, bit for bit."""

import copy
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from requant.calibration.batches import own_chunks
from requant.calibration.block_by_block import Descent
from requant.calibration.collect import collect
from requant.calibration.hidden_states import why_not_block_by_block
from requant.calibration.passes import gradient_pass
from requant.models.hosted import HostedMatrix, hosted_blocks
from requant.models.targets import find_blocks, find_linears, keep_on_host

BLOCKS, WIDTH = 6, 32
NEEDS = frozenset({"hessian", "output_hessian"})


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config.use_cache = False
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    monkeypatch.setattr(
        "requant.calibration.batches.chunks", lambda windows, model, each, **_: windows.split(each or 2)
    )


@pytest.fixture
def room(monkeypatch):
    """`room(states)`: the host has room for so many hidden states of every window of the text."""

    def give(states: float, windows: torch.Tensor) -> None:
        free = int(2 * states * windows.numel() * WIDTH * 4)
        monkeypatch.setattr("requant.calibration.block_by_block.free_memory", lambda _device: free)

    return give


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(getattr(found[name], field), getattr(expected[name], field))
        for name in found
        for field in NEEDS
    )


@pytest.mark.parametrize("states", [0.0, 4.0, 100.0])
def test_groups_of_batches_add_up_to_the_same(model, tiny_windows, room, states: float) -> None:
    """With room for one batch at a time, for half of them, for all."""
    expected = collect(model, tiny_windows, find_linears(model), needs=NEEDS)
    targets = keep_on_host(model, find_linears(model), "cpu")
    room(states, tiny_windows)
    assert equal(collect(model, tiny_windows, targets, needs=NEEDS), expected)


@pytest.mark.parametrize(
    ("states", "kept", "again"), [(4, (), 10), (5, (4,), 6), (6, (3,), 4), (9, (1, 3, 4), 2)]
)
def test_a_pass_goes_on_where_it_stopped(
    model, tiny_windows, room, monkeypatch, states: int, kept: tuple[int, ...], again: int
) -> None:
    """In four parts, the last blocks first; the more states the host has room for, the fewer are computed again."""
    expected = collect(model, tiny_windows, find_linears(model), needs=NEEDS)
    targets = keep_on_host(model, find_linears(model), "cpu")
    parts = [[4, 5], [3], [1, 2], [0]]
    room(states, tiny_windows)
    descent = Descent.with_stops(model, own_chunks(tiny_windows, model), [part[0] for part in parts])
    assert descent is not None and tuple(descent.kept) == kept
    loads, value, found = Counter[str](), HostedMatrix.value, {}

    def counted(matrix: HostedMatrix) -> torch.Tensor:
        loads[matrix.name] += 1
        return value(matrix)

    monkeypatch.setattr(HostedMatrix, "value", counted)
    for part in parts:
        members = [target for target in targets if target.block in part]
        found |= collect(model, tiny_windows, members, needs=NEEDS, descent=descent)
    assert equal(found, expected)
    blocks = (
        sum(loads.values()) * BLOCKS / len(targets)
    )  # that came: twice each if nothing were computed again
    assert blocks - 2 * BLOCKS == again


def test_asking_for_gradients_brings_one_block_alone(model) -> None:
    """A graph over several blocks would keep the matrices of all of them on the GPU."""
    keep_on_host(model, find_linears(model), "cpu")
    in_graph: list[int] = []
    for index, block in enumerate(find_blocks(model)[1]):
        block.register_forward_hook(
            lambda *_, index=index: in_graph.append(index) if torch.is_grad_enabled() else None
        )
    assert why_not_block_by_block(model, gradients=True) is None
    assert in_graph == [0]


def test_without_room_there_is_no_such_pass(model, tiny_windows, room) -> None:
    room(3, tiny_windows)
    assert Descent.with_stops(model, own_chunks(tiny_windows, model), [0, 1, 3, 4]) is None


def test_the_next_block_is_read_ahead_and_what_it_becomes_counts(model, tiny_windows) -> None:
    plain = copy.deepcopy(model)
    targets = keep_on_host(model, find_linears(model), "cpu")
    hosted = hosted_blocks(model)
    assert hosted is not None
    for index, following in ((1, 2), (2, 3), (1, 0)):  # the last turns round
        hosted.load(index)
        hosted.reader.wait()
        ahead = {target.block for target in targets if target.hosted and target.hosted.ahead is not None}
        assert ahead == {following}
    weight = torch.randn(WIDTH, WIDTH)
    for own, hosted_target in zip(find_linears(plain), targets, strict=True):
        if own.name.endswith("0.self_attn.q_proj"):
            own.set_weight(weight)
            hosted_target.set_weight(lambda: weight)
    assert torch.equal(model(tiny_windows).logits, plain(tiny_windows).logits)


def test_gradients_are_those_of_a_recomputed_pass(model, tiny_windows, recomputing) -> None:
    """Also of single blocks, where the pass ends early."""
    recomputing(True)

    def gradients(model, targets) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        def add(target, gradient) -> None:
            found[target.name] = found.get(target.name, 0) + gradient

        found["loss"] = torch.tensor(gradient_pass(model, tiny_windows, targets, add))
        return found

    resident, own = copy.deepcopy(model), find_linears(model)
    expected = gradients(resident, find_linears(resident))
    targets = keep_on_host(model, own, "cpu")
    for members in (targets, targets[-7:], targets[14:21]):
        found = gradients(model, members)
        assert found.keys() == {"loss", *(target.name for target in members)}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
