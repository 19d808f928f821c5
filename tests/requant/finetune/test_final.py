"""Tuning: theta stands for the same floats as the matrix, learns, and leaves codes and bytes alone."""

import dataclasses
from pathlib import Path

import pytest
import torch

from requant import ranks
from requant.allocation.budget import uniform
from requant.allocation.embedding_and_head import quantize_embedding_and_head
from requant.calibration.stats import LinearStats
from requant.errors import RecipeError
from requant.finetune import compile_blocks, final
from requant.finetune.final import finetune
from requant.finetune.loop import micro_batch_that_fits
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.trainables import default_lr, learning_rate
from requant.formats.quantized_weight import trainable_params, weight_function, with_trainable_params
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.quantizers.rtn import RtnConfig
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe
from requant.run.context import RunContext
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric", "awq", "codebook", "trellis"])
@pytest.mark.parametrize("int8", [False, True])
def test_theta_stands_for_the_same_floats(random_weight, kind, int8):
    weight = random_weight(20, 70, kind=kind, int8=int8)
    floats = weight_function(weight)(trainable_params(weight))
    torch.testing.assert_close(floats, weight.dequantize(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["asymmetric", "codebook", "codebook-int8", "trellis", "trellis-int8"])
@pytest.mark.parametrize("int8", [False, True])
def test_a_round_trip_through_theta_changes_nothing(random_weight, kind, int8):
    weight = random_weight(20, 70, kind=kind, int8=int8)
    again = with_trainable_params(weight, trainable_params(weight))
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert again.sparse.values.dtype == weight.sparse.values.dtype  # the bytes stay what the budget counted


def test_the_one_scale_of_residuals_grows_with_them(random_weight):
    weight = random_weight(20, 70, int8=True, one_scale=True)
    params = trainable_params(weight)
    assert torch.equal(with_trainable_params(weight, params).dequantize(), weight.dequantize())
    params["values"] *= 1.5
    grown = with_trainable_params(weight, params).sparse
    assert (grown.floats() - params["values"]).abs().max() <= 0.52 * params["values"].abs().max() / 127


@pytest.mark.parametrize("kind", ["asymmetric", "codebook", "trellis"])
def test_gradients_reach_every_field(random_weight, kind):
    weight = random_weight(20, 70, kind=kind)
    params = {name: value.requires_grad_(True) for name, value in trainable_params(weight).items()}
    weight_function(weight)(params).square().sum().backward()
    for name, value in params.items():
        assert value.grad is not None and value.grad.abs().sum() > 0, name


def prepared_run(folder: Path, text: Path, method: str, tuning: Finetune) -> tuple[RunContext, Recipe]:
    recipe = Recipe(
        model=str(folder),
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(bits=2),
        calibration=Calibration(text=(str(text),), num_samples=12, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=tuning,
    )
    return start(prepare(str(folder), recipe), recipe, workspace=Workspace(None), quiet=True), recipe


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_coded_matrix_stands_in_the_model_as_it_is_stored(tiny_folder, tiny_text_file, kind):
    run, _ = prepared_run(tiny_folder(kind), tiny_text_file, "kmeans", Finetune(steps=1))
    weights = quantize_linears(run, None, label="quantize")
    trainable = {name: trainable_params(weight) for name, weight in weights.items()}
    for params in trainable.values():
        params["levels"] = (params["levels"] * 1.25).requires_grad_(True)
    for target, matrix in zip(run.targets, reparametrized_weights(run, weights, trainable), strict=True):
        matrix.apply()
        torch.testing.assert_close(target.weight(), 1.25 * weights[target.name].dequantize())
        matrix.parameter.grad = torch.ones_like(matrix.parameter)
        matrix.backward()
        counts = torch.nn.functional.one_hot(weights[target.name].dense.codes.long(), 4).sum(
            1
        )  # of a level in a row
        torch.testing.assert_close(trainable[target.name]["levels"].grad, counts.float())


@pytest.mark.parametrize("method", ["kmeans", "rtn"])
def test_tuning_lowers_the_divergence_and_keeps_the_codes(tiny_folder, tiny_text_file, method):
    run, recipe = prepared_run(
        tiny_folder("llama"),
        tiny_text_file,
        method,
        Finetune(steps=12, tokens_per_step=128, lr=3e-2, warmup_steps=2, val_windows=1, eval_every=4),
    )
    weights = quantize_linears(run, None, label="quantize")
    tuned = finetune(run, weights, recipe.finetune)

    def distance(of):
        run.apply_original_weights()
        original = run.model(input_ids=run.windows).logits.log_softmax(-1)
        run.apply_quantized_weights(of)
        return (original.exp() * (original - run.model(input_ids=run.windows).logits.log_softmax(-1))).sum()

    assert distance(tuned) < 0.97 * distance(weights)
    for name, weight in tuned.items():
        assert torch.equal(weight.dense.codes, weights[name].dense.codes)
    assert not run.targets[0].parameter.requires_grad and run.targets[0].parameter.grad is None


def test_scales_of_a_quantized_embedding_learn_too(tiny_folder, tiny_text_file):
    settings = Finetune(steps=12, tokens_per_step=128, lr=3e-2, warmup_steps=2, val_windows=1, eval_every=4)
    run, recipe = prepared_run(tiny_folder("llama-tied"), tiny_text_file, "rtn", settings)
    run = dataclasses.replace(run, allocation=uniform(recipe, run.targets, {"embedding": (3,)}))
    tables = quantize_embedding_and_head(run)
    (name,) = tables.weights
    exact = {
        t.name: METHODS["rtn"].quantize(t.weight(), LinearStats(), RtnConfig(bits=8)) for t in run.targets
    }
    found = finetune(run, exact, settings, tables)
    assert set(found) == {*exact, name} and torch.equal(
        found[name].dense.codes, tables.weights[name].dense.codes
    )
    assert not torch.equal(found[name].dense.scales, tables.weights[name].dense.scales)
    assert f"{name}.weight" not in run.finetuned_params and torch.equal(
        tables.parameters[name].cpu(), tables.originals[name]
    )

    def distance(of):
        run.apply_original_weights()
        tables.apply_weights(quantized=False)
        original = run.model(input_ids=run.windows).logits.log_softmax(-1)
        run.apply_quantized_weights(exact)
        dataclasses.replace(tables, weights={name: of[name]}).apply_weights(quantized=True)
        return (original.exp() * (original - run.model(input_ids=run.windows).logits.log_softmax(-1))).sum()

    learned = distance(found)
    run.finetuned_params.clear()
    assert learned < 0.97 * distance(tables.weights)


def test_a_hopeless_rate_keeps_the_start(tiny_folder, tiny_text_file):
    """The best theta on held-out windows wins, and the start is one of the candidates."""
    run, recipe = prepared_run(
        tiny_folder("llama"),
        tiny_text_file,
        "kmeans",
        Finetune(steps=2, tokens_per_step=64, lr=50.0, warmup_steps=1, val_windows=1, eval_every=1),
    )
    weights = quantize_linears(run, None, label="quantize")
    for name, weight in finetune(run, weights, recipe.finetune).items():
        assert torch.equal(weight.dequantize(), weights[name].dequantize())


def test_one_window_is_too_little(tiny_folder, tiny_text_file):
    run, recipe = prepared_run(tiny_folder("llama"), tiny_text_file, "rtn", Finetune(steps=1))
    weights = quantize_linears(run, None, label="quantize")
    one = RunContext(
        **{**{f: getattr(run, f) for f in run.__dataclass_fields__}, "train_windows": run.windows[:1]}
    )
    with pytest.raises(RecipeError, match="at least 2 calibration windows"):
        finetune(one, weights, recipe.finetune)


@pytest.mark.parametrize(
    ("room", "steps", "part"), [(10**12, 1, 8), (2 * 10**6, 1, 2), (2 * 10**6, 100, 4), (10**5, 1, None)]
)
def test_a_part_is_what_the_gpu_has_room_for(tiny_folder, tiny_text_file, monkeypatch, room, steps, part):
    settings = Finetune(steps=steps, tokens_per_step=256)
    monkeypatch.setattr(compile_blocks, "_compiler_works", lambda: True)
    run, _ = prepared_run(tiny_folder("llama"), tiny_text_file, "rtn", settings)
    assert micro_batch_that_fits(run, [], [], settings, 32) is None  # on a CPU nothing is decided
    monkeypatch.setattr(type(run.model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room - 1000, 2 * room))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2000)
    head = run.model.get_output_embeddings().weight.shape[0]
    size = 2 if steps >= compile_blocks.MIN_STEPS_TO_COMPILE else 4
    a_token = size * sum(sum(target.shape) for target in run.targets) + 8 * head
    found = micro_batch_that_fits(run, [], [], settings, 32)
    assert found == part
    if found:
        assert 1.5 * found * 32 * a_token <= room and (found == 8 or 3 * found * 32 * a_token > room)


def test_the_rate_follows_from_the_steps_unless_it_is_given(tiny_folder, tiny_text_file) -> None:
    assert [default_lr(steps) for steps in (1, 200, 1000, 6000)] == pytest.approx([8e-3, 8e-3, 3e-3, 3e-3])
    between = [default_lr(steps) for steps in range(200, 1001, 100)]
    assert between == sorted(between, reverse=True) and len(set(between)) == 9
    run, _ = prepared_run(tiny_folder("llama"), tiny_text_file, "rtn", Finetune(steps=200))
    of_given = learning_rate(run, Finetune(steps=200, lr=1e-3))
    assert learning_rate(run, Finetune(steps=200)) == pytest.approx(8 * of_given)
    assert learning_rate(run, Finetune(steps=1000)) == pytest.approx(3 * of_given)


def test_processes_train_alike_on_gpus_of_two_sizes(tiny_folder, tiny_text_file, monkeypatch) -> None:
    """What the smallest cannot hold goes block by block on all."""
    settings, asked = Finetune(steps=1, tokens_per_step=256), []
    run, _ = prepared_run(tiny_folder("llama"), tiny_text_file, "rtn", settings)
    monkeypatch.setattr(type(run.model), "device", torch.device("cuda"))
    monkeypatch.setattr(final, "total_memory", lambda _: 80)
    monkeypatch.setattr(ranks, "smallest", lambda own: min(own, 24))
    monkeypatch.setattr(final, "trains_by_block", lambda *_, device_memory: asked.append(device_memory))
    teacher = object.__new__(final.Teacher)
    teacher.cache = object.__new__(final.StateCache)
    monkeypatch.setattr(final, "Teacher", lambda *_: teacher)
    assert final.teacher_of(run, settings, run.train_windows) is teacher and asked == [24]
