"""Fused decoder layers of vLLM: what they compute, and which models stay as they are."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from requant.checkpoint.save import save_checkpoint
from requant.integrations import vllm_block
from requant.models.targets import find_linears


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_block.FUSE, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "joined"])
def test_with_the_assembly_emulated(interpreted, kind: str) -> None:
    """Alone, and through torch.compile; a layer that differs from vLLM's forward is said to, and stays."""
    interpreted("emulate_vllm_block.py", kind)


def test_operators_take_any_number_of_rows_in_a_compiled_model() -> None:
    """vLLM compiles a model once; export raises where a number of rows becomes a constant."""

    class Layers(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            operators = torch.ops.requant
            q, _, _ = operators.vllm_enter(x, positions, "first", 8, 4)
            q, _, _ = operators.vllm_between(q, x, positions, "first", "last", 8, 4)
            return operators.vllm_leave(q, x, "last")

    rows = {0: torch.export.Dim.DYNAMIC}
    arguments = torch.zeros(5, 8), torch.arange(5)
    exported = torch.export.export(Layers(), arguments, dynamic_shapes={"x": rows, "positions": rows})
    (result,) = (node for node in exported.graph.nodes if node.target is torch.ops.requant.vllm_leave.default)
    assert isinstance(result.meta["val"].shape[0], torch.SymInt)


def config(**changes: Any) -> Any:
    """Of an engine on one GPU."""
    given: dict[str, Any] = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "lora_config": None,
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=8192),
        "quant_config": SimpleNamespace(rotation=None, get_name=lambda: "requant"),
    }
    return SimpleNamespace(**(given | changes))


CHANGES = {
    "divided among GPUs": {"parallel_config": SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)},
    "adapters": {"lora_config": object()},
    "speculative decoding": {"speculative_config": object()},
    "32768 tokens": {"scheduler_config": SimpleNamespace(max_num_batched_tokens=40000)},
    "folded": {"quant_config": SimpleNamespace(rotation=object())},
    "not those of LlamaModel, MistralModel": {},
}  # fmt: skip


@pytest.mark.parametrize("reason", CHANGES)
def test_other_models_stay_as_they_are(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says why."""
    model = nn.Sequential(nn.Linear(2, 2))
    with caplog.at_level(logging.INFO, "vllm"):
        assert not vllm_block.fuse(model, config(**CHANGES[reason]))
    (said,) = caplog.messages
    assert said.startswith("the layers of Sequential are not fused: ") and reason in said


class LlamaModel(nn.Module):
    """Its layers have other modules than Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])


def test_layers_of_other_modules(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm"):
        assert not vllm_block.fuse(LlamaModel(), config())
    assert "their modules are not Llama's" in caplog.text


def test_a_vllm_with_other_names(caplog: pytest.LogCaptureFixture) -> None:
    given = config()
    del given.speculative_config
    with caplog.at_level(logging.INFO, "vllm"):
        assert not vllm_block.fuse(LlamaModel(), given)
    assert "no attribute 'speculative_config'" in caplog.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0", "REQUANT_VLLM_FUSE is 0"),
        ("1", "their modules are not Llama's"),
        ("", "their modules are not Llama's"),
    ],
)
def test_the_switch(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """0 turns it off; after any other value the layers are looked at."""
    monkeypatch.setenv(vllm_block.FUSE, value)
    with caplog.at_level(logging.INFO, "vllm"):
        assert not vllm_block.fuse(LlamaModel(), config())
    assert caplog.messages == [f"the layers of LlamaModel are not fused: {said}"]


def test_loaders_fuse_what_they_loaded(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point wraps vLLM's loader once, however often vLLM calls it; models of other methods pass by."""
    loader: Any = engine.plugin.BaseModelLoader
    model = nn.Module()
    monkeypatch.setattr(loader, "load_model", lambda self, vllm_config, model_config: model)
    engine.plugin.register()
    wrapped = loader.load_model
    engine.plugin.register()
    assert loader.load_model is wrapped
    fused: list[Any] = []
    monkeypatch.setattr(engine.plugin, "fuse", lambda *given: fused.append(given))
    own, other = config(), config(quant_config=SimpleNamespace(get_name=lambda: "gptq"))
    for given in (own, other, config(quant_config=None)):
        assert loader.load_model(None, vllm_config=given, model_config=None) is model
    assert fused == [(model, own)]


@pytest.mark.peers
def test_vllms_llama_with_the_assembly_emulated(interpreted, random_trellis, tmp_path: Path) -> None:
    """vLLM's own modules, loader and forward context; only attention is another."""
    pytest.importorskip("vllm.model_executor.layers.linear", exc_type=ImportError)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    source = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    source.save_pretrained(tmp_path / "source")
    weights = {
        target.name: random_trellis(*target.shape, seed=i) for i, target in enumerate(find_linears(source))
    }
    path = save_checkpoint(
        tmp_path / "checkpoint", source=tmp_path / "source", model=source, weights=weights, manifest={}
    )
    interpreted("emulate_vllm_llama.py", str(path))
