"""Gradients that repeat: asked once a model, switched on for a while, the same bits on a GPU."""

import dataclasses
from typing import Any

import pytest
import torch

import requant
from requant.calibration.collect import collect
from requant.errors import ModelError
from requant.models import deterministic as module
from requant.models.deterministic import (
    check_deterministic_gradients,
    demand_deterministic_gradients,
    deterministic,
)
from requant.models.loading import load_model
from requant.models.targets import find_linears


def test_a_cpu_is_left_as_it_is(tiny_model) -> None:
    model = tiny_model("llama")
    demand_deterministic_gradients(model, True)
    with deterministic(model):
        assert not torch.are_deterministic_algorithms_enabled()


def test_only_models_that_it_was_demanded_of_take_part(tiny_model, monkeypatch) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    monkeypatch.setattr(type(model), "device", torch.device("meta"))  # none that has nothing to do
    monkeypatch.setattr(module, "check_deterministic_gradients", lambda model: None)
    demand_deterministic_gradients(model, True)
    with deterministic(model):
        assert torch.are_deterministic_algorithms_enabled()
        assert not getattr(torch.utils.deterministic, module.FILLS)
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(other):
        assert not torch.are_deterministic_algorithms_enabled()
    demand_deterministic_gradients(model, False)  # its next run
    with deterministic(model):
        assert not torch.are_deterministic_algorithms_enabled()


def test_asking_leaves_nothing_behind(tiny_model) -> None:
    model = tiny_model("llama").requires_grad_(True)
    check_deterministic_gradients(model)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_a_model_that_cannot_is_refused(tiny_model) -> None:
    model = tiny_model("llama")
    norm = model.model.norm.forward

    def scattered(hidden: torch.Tensor) -> torch.Tensor:
        hidden = norm(hidden)
        places = torch.zeros(1, dtype=torch.int64)
        hidden.detach().clone().put_(places, torch.zeros(1))  # which of equal places wins is not defined
        return hidden

    model.model.norm.forward = scattered
    with pytest.raises(ModelError, match="--deterministic: put_, which this model computes, has no"):
        check_deterministic_gradients(model)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_on_the_host_is_refused(tiny_model, monkeypatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    monkeypatch.setattr(module, "hosted_blocks", lambda model: object())
    with pytest.raises(ModelError, match="does not reach a model whose matrices are on the host"):
        demand_deterministic_gradients(model, True)


def test_other_errors_are_not_swallowed(tiny_model) -> None:
    model = tiny_model("llama")

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    model.model.norm.forward = broken
    with pytest.raises(RuntimeError, match="out of luck"):
        check_deterministic_gradients(model)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_of_two_passes_are_the_same_bits(dtype: str) -> None:
    model = load_model("demo", device="cuda", dtype=dtype)
    demand_deterministic_gradients(model, True)
    targets = find_linears(model)
    windows = torch.randint(0, 4000, (16, 512), generator=torch.Generator().manual_seed(0))
    needs = frozenset({"hessian", "output_hessian", "fisher"})
    found = [collect(model, windows, targets, needs=needs) for _ in range(2)]
    for name, first in found[0].items():
        for field in dataclasses.fields(first):
            torch.testing.assert_close(
                getattr(first, field.name), getattr(found[1][name], field.name), rtol=0, atol=0
            )


# torch's compiler reads `.grad` of inner tensors, and gives up where the warning of that is an error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [
        {"method": "trellis", "mode": "best"},
        {"method": "trellis", "mode": "best", "finetune": {"blockwise": True}},
        {"method": "lut", "mode": "best"},
        {"method": "gptq", "mode": "dense"},
    ],
    ids=["best", "blockwise", "lut", "gptq"],
)
def test_two_runs_write_the_same_bytes(tmp_path, recipe: dict[str, Any]) -> None:
    files = []
    for number in range(2):
        result = requant.quantize(
            "demo", recipe, bits=3, num_samples=16, finetune_steps=6, deterministic=True
        )
        requant.save(result, folder := tmp_path / str(number))
        files.append((folder / "model.safetensors").read_bytes())
    assert files[0] == files[1]
