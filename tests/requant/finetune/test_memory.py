"""What training is said to hold, beside what it holds: the bytes of all live tensors, operation by operation."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from requant.finetune.final import params_in_single_precision, split_windows, teacher_of
from requant.finetune.loop import single_precision, train
from requant.finetune.memory import TrainingMemory, bytes_of_a_token
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.saved_training import SavedTraining
from requant.finetune.teacher import HeadTeacher
from requant.finetune.trainables import params_without_codes, trainable_tensors
from requant.formats.quantized_weight import pack, trainable_params
from requant.models.experts import unfuse_experts
from requant.models.targets import find_blocks, find_linears
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe
from requant.run.quantize_linears import quantize_linears
from requant.run.rounds import rounds_of
from requant.run.statistics import gather
from requant.run.workspace import Workspace


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations return while the context lasts, and of those it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def note(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage()._cdata in self.live:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            del self.live[key]

        self.live[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_iter(found):
            self.note(each)
        return found


@pytest.mark.parametrize(
    ("model", "by_block", "tokens", "hidden_weight"),
    [
        pytest.param("demo-4m", False, 128, 0.0, marks=pytest.mark.slow),
        ("demo-4m", False, 128, 3.0),
        ("demo-4m", False, 512, 0.0),
        pytest.param("demo-4m", True, 128, 0.0, marks=pytest.mark.slow),
        ("demo-4m", True, 512, 3.0),
        pytest.param("demo-4m", True, 1024, 0.0, marks=pytest.mark.slow),
        pytest.param("moe-3m", False, 128, 0.0, marks=pytest.mark.slow),
        ("moe-3m", False, 512, 0.0),
        pytest.param("moe-3m", True, 1024, 0.0, marks=pytest.mark.slow),
    ],
)
def test_what_training_holds_is_predicted(
    model: str, by_block: bool, tokens: int, hidden_weight: float, shared: Callable[[str], Path]
) -> None:
    """Within 15 % of the peak of round 1."""
    settings = Finetune(steps=2, tokens_per_step=tokens, train_windows=8, blockwise=by_block)
    recipe = Recipe(
        mode="best",
        method="kmeans",
        quantizer=METHODS["kmeans"].config(bits=2),
        calibration=Calibration(text=("demo",), num_samples=8, seq_len=128),
        evaluation=Evaluation(text=("demo-eval",), context=32, windows=2, samples=0),
        finetune=settings,
    )
    run = start(
        prepare(str(shared(f"models/{model}")), recipe, device="cpu"),
        recipe,
        workspace=Workspace(None),
        quiet=True,
    )
    coded, method = rounds_of(run.targets)[0], METHODS["rtn"]
    statistics = gather(run, coded, method.needs)
    weights = {t.name: method.quantize(t.weight(), statistics[t.name], method.config(bits=2)) for t in coded}
    windows, _ = split_windows(run, settings)
    live = LiveBytes()
    for tensor in (*run.model.parameters(), *(weight.dense.codes for weight in weights.values())):
        live.note(tensor)
    with live:
        teacher = teacher_of(run, settings, windows)
        host = teacher.states.untyped_storage().nbytes() if isinstance(teacher, HeadTeacher) else 0
        with single_precision(params_in_single_precision(run.model, teacher)):
            params = {name: trainable_params(weight) for name, weight in weights.items()}
            others = list(params_without_codes(run).values())
            still_open = [target for target in run.targets if target.name not in weights]
            trainables = trainable_tensors(params, still_open, others, 1e-3)
            derived = reparametrized_weights(run, weights, params)
            live.peak = live.now
            saved = SavedTraining.of(run, "test")
            train(run, teacher, trainables, derived, settings, saved=saved, hidden_weight=hidden_weight)
    predicted = TrainingMemory(
        model=run.model,
        targets=run.targets,
        settings=settings,
        windows=(windows.shape[0], windows.shape[1]),
        by_block=by_block,
        gpu=False,
        device_memory=10**10,
    ).bytes_of_phase(set(weights))
    assert predicted == pytest.approx(live.peak - host, rel=0.15)


def test_a_token_has_activations_in_the_experts_that_see_it(tiny_model) -> None:
    """Two of four, in 16 bits half a float's bytes."""
    model = tiny_model("qwen3-moe")
    unfuse_experts(model)
    targets, config = find_linears(model), model.config
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    d, width = config.hidden_size, config.moe_intermediate_size
    block = (d + heads) + 2 * (d + kv) + (heads + d) + 2 * 3 * (d + width)
    logits = 24 * config.vocab_size
    assert sum(target.experts is not None for target in targets) == 4 * 3 * config.num_hidden_layers
    found = bytes_of_a_token(model, targets, device="cpu", compiled=False)
    assert found == 4 * config.num_hidden_layers * block + logits
    memory = TrainingMemory(
        model=model, targets=targets, settings=Finetune(steps=2), windows=(8, 1024), by_block=True, gpu=True,
        device_memory=10**10,
    )  # fmt: skip
    everywhere = sum(sum(t.shape) for t in targets if t.block == 0)
    kept = memory._graph(set()) - 2 * sum(t.size for t in targets if t.block == 0)
    assert kept == 4 * block * memory._tokens < 4 * everywhere * memory._tokens


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [256, 1024])
def test_what_training_holds_of_a_hosted_model_is_predicted(hosted, tokens: int) -> None:
    """Of the device within 20 %: here the host is the same, so what is said to wait there is taken off."""
    hosted(True)
    settings = Finetune(steps=2, tokens_per_step=tokens, train_windows=9, eval_every=1)
    recipe = Recipe(
        mode="best",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=2),
        calibration=Calibration(num_samples=9, seq_len=128),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=settings,
    )
    prepared = prepare("demo", recipe, device="cpu")
    run = start(prepared, prepared.recipe, workspace=Workspace(None), quiet=True)
    weights = quantize_linears(run, None, label="quantize")
    packed = sum(tensor.nbytes for weight in weights.values() for tensor in pack(weight)[1].values())
    windows, val_windows = split_windows(run, settings)
    live = LiveBytes()
    for tensor in run.model.parameters():
        live.note(tensor)
    with live:
        params = {name: trainable_params(weight) for name, weight in weights.items()}
        others = list(params_without_codes(run).values())
        trainables = trainable_tensors(params, (), others, 1e-3)
        derived = reparametrized_weights(run, weights, params)
        teacher = teacher_of(run, run.recipe.finetune, windows, val_windows)
        assert isinstance(teacher, HeadTeacher)
        states = teacher.states.untyped_storage().nbytes()
        live.peak = live.now
        saved = SavedTraining.of(run, "test")
        train(run, teacher, trainables, derived, run.recipe.finetune, saved=saved, val_windows=val_windows)
    best = 4 * sum(each.tensor.numel() for each in trainables)
    width, blocks = run.model.get_input_embeddings().weight.shape[1], len(find_blocks(run.model)[1])
    waiting = 4 * min(tokens, windows.numel()) * width * blocks
    predicted = TrainingMemory(
        model=run.model,
        targets=run.targets,
        settings=settings,
        windows=(windows.shape[0], windows.shape[1]),
        by_block=True,
        gpu=False,
        device_memory=10**10,
        hosted=True,
        group_size=run.recipe.quantizer.group_size,
    ).bytes_of_phase(set(weights))
    assert predicted == pytest.approx(live.peak - states - best - waiting - packed, rel=0.2)
