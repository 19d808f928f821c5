"""Statistics of experts against sums over the tokens that are routed to them."""

import copy
import dataclasses
import sys

import pytest
import torch
from safetensors.torch import load_file

import requant
from requant.calibration import experts
from requant.calibration.collect import collect
from requant.calibration.experts import routed_tokens
from requant.calibration.hidden_states import HiddenStateCache
from requant.models.experts import unfuse_experts
from requant.models.targets import find_linears
from requant.pipeline import best
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.recipe_targets import all_experts_counts
from requant.quantizers.gptq import GptqConfig
from requant.quantizers.kmeans import KmeansConfig
from requant.quantizers.lut import LutConfig
from requant.quantizers.rtn import RtnConfig
from requant.quantizers.trellis import TrellisConfig
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.run import quantize_linears
from requant.run.workspace import Workspace

LAYER = "model.layers.1.mlp.experts"
NEEDS = frozenset({"hessian", "input_mean_abs"})


@pytest.fixture
def model(tiny_model):
    """Of its second layer's experts the last one is never chosen."""
    model = tiny_model("qwen3-moe")
    unfuse_experts(model)

    def never_the_last(_module, inputs):
        return inputs[0], inputs[1].where(inputs[1] != 3, inputs[1].new_tensor(0)), inputs[2]

    model.get_submodule(LAYER).register_forward_pre_hook(never_the_last)
    return model


@torch.no_grad()
def inputs_of(model, name: str, windows: torch.Tensor) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _m, x: parts.append(x[0].double()))
    model(input_ids=windows, use_cache=False)
    handle.remove()
    return torch.cat(parts) if parts else torch.empty(0, model.get_submodule(name).in_features).double()


@pytest.mark.parametrize("kind", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_has_the_mean_over_its_tokens_shrunk_to_its_layers(model, tiny_windows, kind: str) -> None:
    inputs = [inputs_of(model, f"{LAYER}.{e}.{kind}", tiny_windows) for e in range(4)]
    assert len(inputs[3]) == 0 and len({len(x) for x in inputs}) > 1
    everything = torch.cat(inputs)
    found = collect(model, tiny_windows, find_linears(model), needs=NEEDS)
    for e, x in enumerate(inputs):
        stats = found[f"{LAYER}.{e}.{kind}"]
        tau = experts.SHRINKAGE * x.shape[1]
        hessian = (x.T @ x + tau * everything.T @ everything / len(everything)) / (len(x) + tau)
        mean_abs = (x.abs().sum(0) + tau * everything.abs().mean(0)) / (len(x) + tau)
        assert stats.hessian is not None and stats.input_mean_abs is not None
        torch.testing.assert_close(stats.hessian.double(), hessian, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stats.input_mean_abs.double(), mean_abs, rtol=1e-4, atol=1e-5)
        assert stats.tokens == len(x)


def test_statistics_do_not_depend_on_what_is_quantized_already(model, tiny_windows) -> None:
    """A run that resumes lacks some experts only; theirs are shrunk to the average of all as before."""
    targets = find_linears(model)
    whole = collect(model, tiny_windows, targets, needs=NEEDS)
    some = [
        target for target in targets if target.name.endswith(("experts.1.up_proj", "experts.3.down_proj"))
    ]
    for name, stats in collect(model, tiny_windows, some, needs=NEEDS).items():
        assert torch.equal(stats.hessian, whole[name].hessian)


def test_all_tokens_to_all_experts(model, tiny_windows) -> None:
    found = collect(model, tiny_windows, find_linears(model), needs=NEEDS, all_experts=True)
    x = inputs_of(model, LAYER, tiny_windows)
    for e in range(4):
        stats = found[f"{LAYER}.{e}.gate_proj"]
        assert stats.tokens == tiny_windows.numel() == len(x)
        torch.testing.assert_close(stats.hessian.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[f"{LAYER}.0.down_proj"].hessian, found[f"{LAYER}.1.down_proj"].hessian)
    assert not any(module._forward_pre_hooks for module in model.get_submodule("model.layers.0").modules())


@pytest.mark.parametrize("all_experts", [False, True])
def test_inputs_of_another_model_are_those_of_the_same_tokens(model, tiny_windows, all_experts: bool) -> None:
    """With the model itself as reference C = H; with another router the tokens still go the reference's ways."""
    targets = [target for target in find_linears(model) if target.experts == LAYER]
    other = copy.deepcopy(model)
    for changed in (False, True):
        if changed:
            gate = model.get_parameter("model.layers.1.mlp.gate.weight")
            gate.copy_(gate.flip(0))
        stats = collect(
            model,
            tiny_windows,
            targets,
            needs=NEEDS,
            cache=HiddenStateCache(model, tiny_windows),
            reference=HiddenStateCache(other, tiny_windows),
            all_experts=all_experts,
        )
        for target in targets:
            assert stats[target.name].hessian is not None
            torch.testing.assert_close(stats[target.name].cross_hessian, stats[target.name].hessian)


def test_tokens_are_counted(model, tiny_windows) -> None:
    counts = routed_tokens(model, tiny_windows)
    assert len(counts) == 8
    for expert, count in counts.items():
        x = inputs_of(model, f"{expert}.up_proj", tiny_windows)
        assert count == len(x)


def test_predicted_losses_count_how_often_an_expert_is_used(tiny_model) -> None:
    """White errors of size 1 cost mean |g|^2 |x|^2 over all tokens, which tr G tr H must give for rare experts too."""
    model = tiny_model("qwen3-moe")
    unfuse_experts(model)
    targets = [
        target for target in find_linears(model) if target.experts == LAYER and target.kind == "gate_proj"
    ]
    needs = frozenset({"hessian", "output_hessian", "fisher"})
    found = collect(model, torch.randint(0, 256, (4, 64)), targets, needs=needs)
    assert max(stats.tokens for stats in found.values()) > 1.5 * min(stats.tokens for stats in found.values())
    for stats in found.values():
        assert stats.hessian is not None and stats.output_hessian is not None and stats.fisher is not None
        product = stats.hessian.trace() * stats.output_hessian.trace()
        torch.testing.assert_close(product, stats.fisher.sum(), rtol=0.1, atol=0)


RECIPE = Recipe(
    mode="dense",
    method="gptq",
    quantizer=GptqConfig(bits=3, group_size=32),
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
)


@pytest.mark.parametrize(
    "inputs",
    [*(pytest.param(inputs, marks=pytest.mark.slow) for inputs in ("original", "quantized")), "corrected"],
)
def test_a_run_that_was_interrupted_ends_with_the_same_codes(
    tiny_folder, tiny_text_file, tmp_path, monkeypatch, inputs: str
) -> None:
    recipe = dataclasses.replace(RECIPE, calibration=dataclasses.replace(RECIPE.calibration, inputs=inputs))
    source = str(tiny_folder("qwen3-moe"))
    expected = requant.quantize(source, recipe, tiny_text_file)
    saved, save = [], quantize_linears.save_weight

    def stops(*arguments, **options) -> None:
        if len(saved) == 21:  # in the midst of the second layer's experts
            raise KeyboardInterrupt
        saved.append(save(*arguments, **options))

    monkeypatch.setattr(quantize_linears, "save_weight", stops)
    with pytest.raises(KeyboardInterrupt):
        requant.quantize(source, recipe, tiny_text_file, workspace=Workspace(tmp_path / "work"))
    monkeypatch.setattr(quantize_linears, "save_weight", save)
    found = requant.quantize(
        source, recipe, tiny_text_file, workspace=Workspace(tmp_path / "work", resume=True)
    )
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name].dequantize(), weight.dequantize()), name


def test_starved_experts_are_reported(tiny_folder, tiny_text_file, tmp_path) -> None:
    recipe = dataclasses.replace(RECIPE, calibration=Calibration(num_samples=1, seq_len=32))
    result = requant.quantize(str(tiny_folder("qwen3-moe")), recipe, tiny_text_file)
    assert sum(result.routed_tokens.values()) == 2 * 2 * 32
    said = "8 of 8 experts saw fewer tokens"
    assert any(said in warning for warning in result.warnings)
    unfitted = dataclasses.replace(recipe, method="rtn", quantizer=RtnConfig())
    all_tokens = dataclasses.replace(recipe.calibration, all_experts=True)
    for other, fitted in (
        (unfitted, False),
        (dataclasses.replace(unfitted, mode="paper"), True),
        (dataclasses.replace(unfitted, budget=Budget(bits=5)), True),
        (dataclasses.replace(recipe, calibration=all_tokens), False),
        (dataclasses.replace(unfitted, mode="paper", calibration=all_tokens), True),
    ):
        warnings = dataclasses.replace(result, recipe=other).warnings
        assert any(said in warning for warning in warnings) == fitted
    requant.save(result, tmp_path / "out")
    assert "tokens routed" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(("name", "warned"), [("llama", True), ("qwen3-moe", False)])
def test_all_experts_of_a_model_without_any_is_warned_of(
    name: str, warned: bool, tiny_folder, caplog: pytest.LogCaptureFixture
) -> None:
    calibration = Calibration(num_samples=2, seq_len=32, all_experts=True)
    outline(str(tiny_folder(name)), dataclasses.replace(RECIPE, calibration=calibration))
    assert ("--all-experts changes nothing here" in caplog.text) == warned


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"method": "kmeans", "quantizer": KmeansConfig(bits=4)}, False),
        ({"method": "kmeans", "quantizer": KmeansConfig(), "budget": Budget(bits=5)}, False),
        ({"method": "rtn", "quantizer": RtnConfig(bits=4)}, False),
        ({"method": "gptq", "quantizer": GptqConfig(bits=4)}, True),
        ({"method": "lut", "quantizer": LutConfig(), "budget": Budget(bits=5)}, True),
    ],
)
def test_all_experts_of_a_method_that_reads_no_inputs_is_warned_of(
    changes: dict, counts: bool, tiny_folder, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = dataclasses.replace(RECIPE, **changes)
    assert not all_experts_counts(recipe)
    recipe = dataclasses.replace(recipe, calibration=Calibration(num_samples=2, seq_len=32, all_experts=True))
    outline(str(tiny_folder("qwen3-moe")), recipe)
    assert ("--all-experts changes nothing here: method" in caplog.text) == (not counts)
    assert all_experts_counts(recipe) == counts


def test_routers_are_learnt_and_saved(tiny_folder, tiny_text_file, tmp_path) -> None:
    recipe = dataclasses.replace(
        RECIPE,
        mode="best",
        quantizer=GptqConfig(bits=5, group_size=32),
        finetune=Finetune(steps=2, lr=1e-2, tokens_per_step=64, val_windows=1, eval_every=1),
    )
    source = str(tiny_folder("qwen3-moe"))
    result = requant.quantize(source, recipe, tiny_text_file)
    requant.save(result, tmp_path / "out")
    name = "model.layers.0.mlp.gate.weight"
    learnt = requant.load(tmp_path / "out").get_parameter(name)
    assert torch.equal(learnt, result.model.get_parameter(name))
    assert not torch.equal(learnt, load_file(f"{source}/model.safetensors")[name])


@pytest.mark.slow
def test_a_trained_run_resumes_with_the_same_bytes(
    tiny_folder, tiny_text_file, tmp_path, monkeypatch
) -> None:
    """Mode `best` over trellis codes, interrupted after the rounds, with routers learnt in them."""
    recipe = dataclasses.replace(
        RECIPE,
        mode="best",
        method="trellis",
        quantizer=TrellisConfig(bits=2),
        budget=Budget(bits=2.5),
        finetune=Finetune(steps=2, lr=1e-2, tokens_per_step=64, val_windows=1, eval_every=1),
    )
    source = str(tiny_folder("qwen3-moe"))
    requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "whole")

    def stops(*_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["requant.pipeline.quantize"], "finetuned", stops)
        with pytest.raises(KeyboardInterrupt):
            requant.quantize(source, recipe, tiny_text_file, workspace=Workspace(tmp_path / "work"))
    workspace = Workspace(tmp_path / "work", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(best, "codes_of_round", stops)  # they are not made again
        result = requant.quantize(source, recipe, tiny_text_file, workspace=workspace)
    requant.save(result, tmp_path / "resumed")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    model = requant.load(tmp_path / "resumed")
    assert torch.isfinite(model(torch.arange(40)[None]).logits).all()
