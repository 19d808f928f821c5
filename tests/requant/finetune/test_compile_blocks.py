"""Compiled blocks: one compilation for all of a model, the same numbers, and everything is put back."""

import copy
import logging
import warnings
from threading import Event

import pytest
import torch

from requant.finetune import compile_blocks
from requant.finetune.compile_blocks import fused
from requant.finetune.loss import loss_sum
from requant.finetune.step import TrainableTensor, TrainingStep
from requant.finetune.teacher import HeadTeacher, Teacher
from requant.models.loading import load_model
from requant.models.targets import find_blocks
from requant.pipeline.preparation import prepare as preparing
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe

from ..on_text import on_text
from .coded_model import Problem


def test_nothing_is_compiled_on_a_cpu_or_for_a_few_steps(tiny_folder) -> None:
    model = load_model(str(tiny_folder("llama")), device="cpu", dtype="auto")
    with fused((model,), 10**6):
        assert not any("forward" in block.__dict__ for block in find_blocks(model)[1])


@pytest.mark.filterwarnings("default")  # the compiler looks where torch warns
@pytest.mark.parametrize(
    ("kind", "hidden_weight"),
    [
        ("llama", 3.0),
        ("gpt2", 0.0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 0.0), ("gpt2", 3.0))),
    ],
)
def test_blocks_are_compiled_once_for_all(tiny_folder, counting_compiler, kind, hidden_weight) -> None:
    """As many compilations as kinds of calls, not of blocks."""
    model = load_model(str(tiny_folder(kind)), device="cpu", dtype="float32")
    tokens = torch.randint(0, 50, (2, 16))
    teacher = Teacher(copy.deepcopy(model), tokens)
    blocks = len(find_blocks(model)[1])
    model.requires_grad_(True)
    plain = loss_sum(model, teacher, tokens, hidden_weight=hidden_weight).item()
    with fused((model, teacher.model), compile_blocks.MIN_STEPS_TO_COMPILE):
        found = loss_sum(model, teacher, tokens, hidden_weight=hidden_weight)
        found.backward()
    assert found.item() == pytest.approx(plain, abs=1e-5)
    assert blocks > 1 and counting_compiler.frame_count <= 4  # first block, the others, the teacher
    assert not any("forward" in block.__dict__ for m in (model, teacher.model) for block in find_blocks(m)[1])


def test_without_a_compiler_it_says_so_once_and_runs_as_it_is(tiny_folder, monkeypatch, caplog) -> None:
    def broken(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")

    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = load_model(str(tiny_folder("llama")), device="cpu", dtype="float32")
    compile_blocks._compiler_works.cache_clear()
    for _ in range(2):
        with fused((model,), compile_blocks.MIN_STEPS_TO_COMPILE):
            assert model(torch.tensor([[1, 2]])).logits.isfinite().all()
    compile_blocks._compiler_works.cache_clear()
    assert [record.message for record in caplog.records] == [
        "training runs without torch.compile, at less than half the speed: Failed to find C compiler"
    ]


@pytest.mark.parametrize("steps", [compile_blocks.MIN_STEPS_TO_COMPILE, 1])
def test_the_compiler_is_asked_while_texts_become_tokens(
    tiny_folder, tiny_text_file, monkeypatch, steps: int
) -> None:
    """Whose windows here come only when it has been, where so many steps are to be compiled at all."""
    asked, seen, plain = Event(), [], preparing.in_windows

    def in_windows(*args, **kwargs):
        seen.append(asked.wait(30 if steps > 1 else 0))
        return plain(*args, **kwargs)

    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(compile_blocks, "_compiler_works", lambda: asked.set() is None)
    monkeypatch.setattr(preparing, "in_windows", in_windows)
    recipe = Recipe(
        calibration=Calibration(num_samples=4, seq_len=16),
        evaluation=Evaluation(context=16, windows=2),
        finetune=Finetune(steps=steps),
    )
    preparing.prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file))
    assert seen == [steps > 1] and asked.is_set() == (steps > 1)


@pytest.mark.parametrize(
    ("device", "steps", "started"),
    [("cuda", None, True), ("cuda:1", 100, True), ("cuda", 99, False), ("cpu", None, False)],
)
@pytest.mark.parametrize("broken", [False, True])
def test_the_compilers_processes_are_started_where_training_is_compiled(
    monkeypatch, device: str, steps: int | None, started: bool, broken: bool
) -> None:
    """And what goes wrong in that is not the run's end: compiling will say so."""
    calls: list[bool] = []

    def start() -> None:
        calls.append(True)
        if broken:
            raise OSError("no more processes")

    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", start)
    compile_blocks.start_compiler(device, steps)
    assert calls == [True] * started


@pytest.mark.parametrize("trained", [True, False])
def test_the_compilers_processes_start_before_weights_are_read(
    tiny_folder, tiny_text_file, monkeypatch, trained: bool
) -> None:
    events, plain = [], preparing.open_model
    monkeypatch.setattr(preparing, "start_compiler", lambda *given: events.append(given))
    monkeypatch.setattr(
        preparing, "open_model", lambda *args, **kwargs: events.append("weights") or plain(*args, **kwargs)
    )
    recipe = Recipe(
        calibration=Calibration(num_samples=4, seq_len=16),
        evaluation=Evaluation(context=16, windows=2),
        finetune=Finetune(steps=None if trained else 0),
    )
    preparing.prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file), device="cpu")
    assert events == [("cpu", None)] * trained + ["weights"]


def test_a_mask_does_not_come_with_a_capture(tiny_folder, monkeypatch) -> None:
    """transformers makes masks while a stream is captured; a block that had none before gets none."""
    model = load_model(str(tiny_folder("llama")), device="cpu", dtype="float32")
    block, seen = find_blocks(model)[1][0], []
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(
        type(block), "forward", lambda self, x, attention_mask=None: seen.append(attention_mask)
    )
    mask = torch.ones(1, 1, 4, 4)
    with fused((model,), 1):
        for capturing, given in ((False, mask), (True, mask), (False, None), (True, mask)):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
            block.forward(torch.ones(1, 4, 8), attention_mask=given)
            block.forward(torch.ones(1, 4, 8), given)
    assert [given is None for given in seen] == [False] * 4 + [True] * 4


# torch's compiler reads `.grad` of inner tensors, and gives up where the warning of that is an error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("hidden_weight", [0.0, 3.0])
def test_compiled_and_captured_it_learns_the_same(tiny_folder, caplog, hidden_weight) -> None:
    found = []
    for steps in (compile_blocks.MIN_STEPS_TO_COMPILE, 1):
        model = load_model(str(tiny_folder("llama")), device="cuda", dtype="float32")
        torch.manual_seed(0)
        tokens = torch.randint(0, 50, (4, 32))
        teacher = Teacher(copy.deepcopy(model), tokens)
        trainables = [p for p in model.parameters() if p.dim() == 2]
        with torch.no_grad():
            for p in trainables:
                p.add_(torch.randn_like(p) * 0.3 * p.std())
        with fused((model, teacher.model), steps), caplog.at_level(logging.WARNING):
            step = TrainingStep(
                lambda *part, model=model, teacher=teacher: loss_sum(
                    model, teacher, *part, hidden_weight=hidden_weight
                ),
                [TrainableTensor(tensor=p, lr=1e-3) for p in trainables],
            )
            for _ in range(8):
                step(teacher.micro_batches(torch.arange(4), 4), 1.0)
            assert step.updates is not None and teacher.cache.cached.all(), caplog.text
            step.close()
        found.append(loss_sum(model, teacher, tokens.cuda()).item())
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.usefixtures("counting_compiler")
def test_what_the_compiler_gives_up_is_one_line(tiny_model, random_weight, windows, caplog, capfd) -> None:
    """Here a warning that is raised: blocks run as they are, whatever torch's compiler has to say."""
    teacher, problem = HeadTeacher(tiny_model("llama"), windows), Problem(tiny_model("llama"), random_weight)
    chosen = teacher.micro_batches(torch.arange(4), None)
    with warnings.catch_warnings(), fused((problem.model,), compile_blocks.MIN_STEPS_TO_COMPILE):
        warnings.simplefilter("error")
        step = problem.step(teacher)
        step(chosen, 1.0)
        step.close()
    (record,) = (each for each in caplog.records if each.name.startswith("requant"))
    assert record.message.startswith(
        "a part of training runs without torch.compile, slower and in more memory: "
    )
    assert "The .grad attribute of a Tensor that is not a leaf" in record.message
    assert "CONVERT" not in capfd.readouterr().err + caplog.text
    assert not logging.getLogger("torch._dynamo.convert_frame").filters
