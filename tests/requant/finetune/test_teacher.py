"""The original's logits from states that are kept: the same, computed once, and only where that is right."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from requant.finetune import teacher as module
from requant.finetune.final import finetune
from requant.finetune.teacher import StateCache, Teacher
from requant.models.targets import find_blocks
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace


def count_blocks(model) -> list[int]:
    """A list that grows with every call of the model's first block."""
    calls: list[int] = []
    find_blocks(model)[1][0].register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_kept_states_give_the_logits_of_the_whole_model(tiny_model, windows, architecture) -> None:
    model = tiny_model(architecture)
    teacher, chosen = Teacher(model, windows), torch.tensor([4, 1, 5])
    for _ in range(2):
        for part in teacher.micro_batches(chosen, 2):
            torch.testing.assert_close(teacher.logits(*part), model(input_ids=part[0]).logits)
    kept = architecture != "opt"
    assert teacher.cache.cached.tolist() == [False, kept, False, False, kept, kept]
    assert "forward" not in model.base_model.__dict__


def test_a_window_goes_through_the_blocks_once(tiny_model, windows) -> None:
    teacher = Teacher(tiny_model("llama"), windows)
    teacher.micro_batches(torch.tensor([0, 1]), 2)  # tries it, too
    calls = count_blocks(teacher.model)
    for chosen, more in (([1, 0], 0), ([2, 3], 1), ([3, 4], 1), ([2, 3], 0), ([4, 0], 0)):
        before = len(calls)
        for part in teacher.micro_batches(torch.tensor(chosen), 2):
            teacher.logits(*part)
        assert len(calls) - before == more


def test_states_are_those_of_the_first_batch_with_the_window(tiny_model, windows) -> None:
    """Whoever has them already and whoever computes them anew, in the same batches, learns from the same."""
    cache = StateCache(tiny_model("llama"), windows)
    cache.states = torch.zeros(len(windows), 1, 1)
    for number, members in enumerate(([0, 3], [3, 1, 0], [1, 5]), start=1):
        cache.put(torch.tensor(members), torch.full((len(members), 1, 1), float(number)))
    assert cache.states.flatten().tolist()[:6] == [1, 2, 0, 1, 0, 3]
    assert cache.cached.tolist()[:6] == [True, True, False, True, False, True]


def test_what_one_rank_computed_all_keep(tiny_model, windows, monkeypatch) -> None:
    """Two ranks, a thread each: every window goes through the blocks of one of them once, whoever has it afterwards."""
    own, barrier, sent = threading.local(), threading.Barrier(2, timeout=60), {}

    def rows_of_all(rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        assert len(rows) == counts[own.rank]
        sent[own.rank] = rows.clone()
        barrier.wait()
        found = [sent[rank] for rank in range(2)]
        barrier.wait()
        return found

    monkeypatch.setattr(module, "rows_of_all", rows_of_all)
    monkeypatch.setattr(module.ranks, "world_size", lambda: 2)
    monkeypatch.setattr(module.ranks, "rank", lambda: own.rank)
    monkeypatch.setattr(module.ranks, "all_agree", lambda condition: condition)
    teachers = [Teacher(tiny_model("llama"), windows) for _ in range(2)]
    steps = [torch.tensor(step) for step in ([0, 1, 2], [3, 4, 5], [1, 3, 0], [5, 2, 4])]  # of two epochs

    def train(rank: int) -> list[int]:
        own.rank, teacher, calls = rank, teachers[rank], []
        for number, chosen in enumerate(steps):
            if number == 1:  # the first try is made
                calls = count_blocks(teacher.model)
            teacher.micro_batches(chosen[rank::2], 2)
            teacher.cache.share(chosen)
        return calls

    with ThreadPoolExecutor(2) as threads:
        assert [len(calls) for calls in threads.map(train, range(2))] == [1, 1]
    _, states = module.last_states(teachers[0].model, windows)
    for teacher in teachers:
        torch.testing.assert_close(teacher.cache.states, states)


def test_a_model_whose_head_reads_past_the_base_model_runs_its_blocks(tiny_model, windows) -> None:
    """OPT calls the decoder inside of its base model."""
    teacher = Teacher(tiny_model("opt"), windows)
    (part,) = teacher.micro_batches(torch.arange(6), 8)
    assert teacher.cache.works is False and len(part) == 1 and teacher.cache.bytes_to_come == 0
    assert teacher.cache.states is None  # nor is their memory taken


def test_states_take_at_most_a_quarter_of_the_memory(tiny_model, windows, monkeypatch) -> None:
    model = tiny_model("llama")
    needed = windows.numel() * model.config.hidden_size * 4
    for free, kept in ((4 * needed, True), (4 * needed - 1, False)):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        teacher = Teacher(model, windows)
        assert teacher.cache.bytes_to_come == (needed if kept else 0)
        assert [len(part) for part in teacher.micro_batches(torch.arange(6), 6)] == [2 if kept else 1]
        assert teacher.cache.bytes_to_come == 0 and (teacher.cache.states is not None) == kept


def test_learning_is_the_same_with_and_without(tiny_folder, tiny_text_file, monkeypatch) -> None:
    folder, found = tiny_folder("llama"), []
    recipe = Recipe(
        model=str(folder),
        mode="dense",
        method="kmeans",
        quantizer=METHODS["kmeans"].config(bits=2),
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=12, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=Finetune(steps=9, tokens_per_step=128, warmup_steps=2, val_windows=1, eval_every=4),
    )
    for free in (10**12, 0):
        run = start(prepare(str(folder), recipe), recipe, workspace=Workspace(None), quiet=True)
        weights = quantize_linears(run, None, label="quantize")
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        found.append(finetune(run, weights, recipe.finetune))
    for name, weight in found[0].items():
        torch.testing.assert_close(weight.dequantize(), found[1][name].dequantize(), rtol=1e-5, atol=1e-7)
        assert not torch.equal(weight.dequantize(), weights[name].dequantize())
