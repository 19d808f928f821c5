"""The bytes that a pass over the text holds for its statistics, against those by which passes are divided and planned."""

import dataclasses
import json
import weakref
from collections.abc import Sequence

import pytest
import torch

from requant.calibration.collect import bytes_needed, collect
from requant.calibration.gram import add_gram
from requant.calibration.hessian import InputStatistics, _Accumulator
from requant.models.experts import unfuse_experts
from requant.models.targets import find_linears
from requant.run.statistics import in_chunks

FIELDS = ("hessian", "output_hessian", "input_mean_abs", "fisher")


def held_bytes(found) -> int:
    tensors = [getattr(stats, field) for stats in found.values() for field in FIELDS]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    "needs", [{"hessian"}, {"hessian", "output_hessian"}, {"hessian", "input_mean_abs", "fisher"}]
)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "opt", "gpt-neox", "phi3", "mixtral", "deepseek-v3", "nemotron-h"]
)
def test_a_pass_holds_what_is_counted(
    tiny_model, tiny_windows, monkeypatch: pytest.MonkeyPatch, name: str, needs: set[str]
) -> None:
    """Queries, keys and values have one Hessian of inputs, as gate and up have, in the pass as after it; a run divides its
    blocks among passes by that."""
    model = tiny_model(name)
    unfuse_experts(model)
    targets = find_linears(model)
    sums: dict[int, torch.Tensor] = {}

    def noted(total: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        sums[id(total)] = total
        add_gram(total, x, scale)

    for place in ("hessian", "output_hessian"):
        monkeypatch.setattr(f"requant.calibration.{place}.add_gram", noted)
    found = collect(model, tiny_windows, targets, needs=frozenset(needs), all_experts=True)
    counted = bytes_needed(targets, frozenset(needs)).total()
    assert held_bytes(found) == counted
    grams = bytes_needed(targets, frozenset(needs & {"hessian", "output_hessian"})).total()
    assert sum(total.nbytes for total in sums.values()) == grams
    blocks = len({target.block for target in targets})
    assert len(in_chunks(targets, frozenset(needs), counted)) == 1 < blocks
    assert len(in_chunks(targets, frozenset(needs), counted - 1)) == 2


def test_matrices_without_siblings_in_the_pass_count_alone(tiny_model) -> None:
    """A round may have the values alone; and siblings on two ranks have a Hessian each."""
    by_kind = {target.kind: target for target in find_linears(tiny_model("llama")) if target.block == 0}
    q, k, v, down = (by_kind[kind] for kind in ("q_proj", "k_proj", "v_proj", "down_proj"))
    needs = frozenset({"hessian"})
    one = 4 * q.shape[1] ** 2
    assert bytes_needed([q, k, v], needs) == bytes_needed([v], needs) == {0: one}
    assert bytes_needed([q, down], needs) == {0: one + 4 * down.shape[1] ** 2}
    assert bytes_needed([q, dataclasses.replace(k, rank=1), v], needs) == {0: one, 1: one}


@pytest.mark.parametrize("name", ["gpt-oss", "zaya", "deepseek-v4"])
def test_experts_without_tokens_hold_no_more_than_is_counted(tiny_model, tiny_windows, name: str) -> None:
    model = tiny_model(name)
    unfuse_experts(model)
    targets, needs = find_linears(model), frozenset({"hessian"})
    found = collect(model, tiny_windows[:1, :2], targets, needs=needs)
    assert any(stats.tokens == 0 for stats in found.values())
    assert held_bytes(found) < bytes_needed(targets, needs).total()


def test_an_average_that_no_expert_needs_is_not_kept(tiny_model, tiny_windows, monkeypatch) -> None:
    """Of all layers: while the statistics of one are averaged, at most the last average is held."""
    model = tiny_model("mixtral")
    unfuse_experts(model)
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    shrunk = _Accumulator._shrunk

    def watched(self: _Accumulator, seen: Sequence[InputStatistics]) -> InputStatistics:
        average = shrunk(self, seen)
        held.append(sum(each() is not None for each in made))
        made.append(weakref.ref(average.hessian))
        return average

    monkeypatch.setattr(_Accumulator, "_shrunk", watched)
    collect(model, tiny_windows, find_linears(model), needs=frozenset({"hessian"}), all_experts=True)
    assert len(held) == 4 and max(held) <= 1  # gate and up, and down, of two layers


HELD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from requant import ranks
from requant.calibration.collect import bytes_needed, collect
from requant.models.experts import unfuse_experts
from requant.models.targets import divided, find_linears

with ranks.joined("cpu"):
    model = AutoModelForCausalLM.from_pretrained(FOLDER).requires_grad_(False)
    unfuse_experts(model)
    targets = divided(find_linears(model), ranks.world_size())
    windows = torch.randint(model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    pairs = []
    for needs in (frozenset({"hessian"}), frozenset({"hessian", "output_hessian"})):
        found = collect(model, windows, targets, needs=needs)
        tensors = [getattr(stats, field) for stats in found.values() for field in needs]
        held = sum({each.data_ptr(): each.nbytes for each in tensors}.values())
        pairs.append((held, bytes_needed(targets, needs)[ranks.rank()]))
    print(json.dumps(pairs), file=sys.__stdout__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_each_process_holds_what_is_counted_of_its_matrices(tiny_folder, in_processes, family: str) -> None:
    """Siblings that two processes own are a Hessian on each."""
    for out in in_processes(HELD.replace("FOLDER", repr(str(tiny_folder(family)))), 2):
        for held, counted in json.loads(out.splitlines()[-1]):
            assert held == counted
