"""Which matrices mode `best` quantizes together, and what their errors count."""

import math

import pytest

from requant.models.targets import find_linears
from requant.run.rounds import round_weights, rounds_of


def test_rounds_hold_neighbouring_kinds(tiny_model) -> None:
    kinds = [
        [s.kind for s in members if s.block == 0] for members in rounds_of(find_linears(tiny_model("llama")))
    ]
    assert kinds == [["q_proj", "k_proj"], ["v_proj", "o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    for name in ("gpt2", "phi3", "opt"):
        targets = find_linears(tiny_model(name))
        rounds = rounds_of(targets)
        assert len(rounds) <= 4 and sorted(s.name for r in rounds for s in r) == sorted(
            s.name for s in targets
        )


def test_more_rounds_halve_the_largest_by_blocks(tiny_model) -> None:
    """Gate and up have most weights; half of them has as many as down, which comes later and so is halved next."""
    targets = find_linears(tiny_model("llama"))
    found = [
        (list(dict.fromkeys(s.kind for s in members)), sorted({s.block for s in members}))
        for members in rounds_of(targets, 6)
    ]
    assert found[:2] == [(["q_proj", "k_proj"], [0, 1]), (["v_proj", "o_proj"], [0, 1])]
    assert found[2:4] == [(["gate_proj", "up_proj"], [0]), (["gate_proj", "up_proj"], [1])]
    assert found[4:] == [(["down_proj"], [0]), (["down_proj"], [1])]


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_any_number_of_rounds_codes_every_matrix_once(tiny_model, name: str) -> None:
    targets = find_linears(tiny_model(name))
    for count in (1, 2, 3, 4, 5, 7, 100):
        rounds = rounds_of(targets, count)
        assert len(rounds) <= count and all(rounds)
        assert sorted(s.name for members in rounds for s in members) == sorted(s.name for s in targets)
    # until every round is of one block
    assert all(len({s.block for s in members}) == 1 for members in rounds_of(targets, 100))


def test_weights_rise_in_equal_ratios_to_one(tiny_model) -> None:
    targets = find_linears(tiny_model("llama"))
    weights = round_weights(targets, 4, 0.4)
    found = {target.kind: weights[target.name] for target in targets}
    assert found == pytest.approx({
        "q_proj": 0.4, "k_proj": 0.4, "v_proj": 0.4 ** (2 / 3), "o_proj": 0.4 ** (2 / 3),
        "gate_proj": 0.4 ** (1 / 3), "up_proj": 0.4 ** (1 / 3), "down_proj": 1.0,
    })  # fmt: skip
    assert math.isclose(min(round_weights(targets, 6, 0.4).values()), 0.4)


def test_without_a_weight_all_rounds_count_alike(tiny_model) -> None:
    targets = find_linears(tiny_model("gpt2"))
    assert set(round_weights(targets, 4, 1.0).values()) == {1.0}
    assert set(round_weights(targets, 1, 0.4).values()) == {1.0}  # a single round is the last too
