"""Runs that train block by block: they end where those of the whole model do; when that is chosen; how one is broken off."""

import dataclasses
import gc

import pytest
import torch

from requant import ranks
from requant.allocation.budget import uniform
from requant.allocation.embedding_and_head import quantize_embedding_and_head
from requant.finetune import compile_blocks, final
from requant.finetune.final import finetune, teacher_of, trains_by_block
from requant.finetune.memory import TrainingMemory
from requant.finetune.recomputed_block import LearningBlock
from requant.finetune.teacher import HeadTeacher, Teacher, states_on_host
from requant.models.targets import find_blocks, find_linears
from requant.pipeline.best import best
from requant.pipeline.quantize import finetuned
from requant.recipe.schema import Finetune
from requant.run.quantize_linears import quantize_linears

from .coded_model import run_of


@pytest.mark.parametrize("name", ["llama-tied", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_rounds_and_the_last_phase_end_where_those_of_the_whole_model_do(
    tiny_folder, tiny_text_file, name
) -> None:
    """From the same codes the same floats, but for the moments' last bits; the model is left at the original."""
    found = []
    for by_block in (False, True):
        run = run_of(tiny_folder(name), tiny_text_file, blockwise=by_block)
        originals = {key: p.clone() for key, p in run.model.named_parameters()}
        first = [target for target in run.targets if target.kind in ("q_proj", "c_attn")]
        codes = quantize_linears(run, None, label="quantize")
        rounds = [first, [target for target in run.targets if target not in first]]
        in_rounds = best(run, rounds)
        learned = finetune(run, codes, run.recipe.finetune)
        for key, p in run.model.named_parameters():
            assert torch.equal(p, originals[key]) and p.grad is None and not p.requires_grad, key
        changed = {key: end for key, (_, end) in run.finetuned_params.items()}
        found.append(({t.name: in_rounds[t.name].dequantize() for t in first}, learned, changed, originals))
    (rounds_whole, whole, params_whole, originals), (rounds_block, block, params_block, _) = found
    for key, weight in rounds_whole.items():
        torch.testing.assert_close(rounds_block[key], weight, rtol=0.1, atol=0.05 * weight.std().item())
    for key, weight in whole.items():
        assert torch.equal(weight.dense.codes, block[key].dense.codes)
    distance = sum((params_whole[key] - params_block[key]).norm() ** 2 for key in params_whole)
    learned = sum((params_whole[key] - originals[key]).norm() ** 2 for key in params_whole)
    assert distance < 0.02 * learned


def test_size_and_memory_decide_where_the_recipe_does_not(tiny_model, monkeypatch) -> None:
    model = tiny_model("llama")
    targets, windows = find_linears(model), (64, 32)

    def decided(blockwise: bool | None = None, memory: int | None = None) -> bool:
        settings = Finetune(steps=1, blockwise=blockwise)
        return trains_by_block(model, targets, settings, windows, device_memory=memory)

    settings = Finetune(steps=1)
    whole = TrainingMemory(
        model=model,
        targets=targets,
        settings=settings,
        windows=windows,
        by_block=False,
        gpu=True,
        device_memory=10**9,
    ).bytes_of_phase((), at_least=True)
    assert not decided() and decided(True) and not decided(memory=10**9)
    assert decided(memory=round(whole / 2)) and not decided(False, memory=round(whole / 2))
    monkeypatch.setattr(final, "BLOCKWISE_FROM", 1000)
    assert decided() and decided(memory=10**9) and not decided(False)


def test_a_model_whose_head_reads_past_the_base_model_is_trained_as_a_whole(
    tiny_folder, tiny_text_file, caplog
) -> None:
    """OPT calls the decoder inside of its base model."""
    run = run_of(tiny_folder("opt"), tiny_text_file, blockwise=True)
    teacher = teacher_of(run, run.recipe.finetune, run.train_windows)
    assert isinstance(teacher, Teacher) and "is not trained block by block" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_16_bits_is_trained_block_by_block_on_a_cpu(
    tiny_folder, tiny_text_file, caplog, dtype
) -> None:
    """Its head reads the states in the model's own dtype, for there is no autocast. It learns as the whole model does."""
    ends = []
    for by_block in (False, True):
        run = run_of(tiny_folder("llama"), tiny_text_file, dtype, blockwise=by_block)
        teacher = teacher_of(run, run.recipe.finetune, run.train_windows)
        assert isinstance(teacher, HeadTeacher if by_block else Teacher)
        finetune(run, quantize_linears(run, None, label="quantize"), run.recipe.finetune)
        ends.append(
            {key: end.float() - before.float() for key, (before, end) in run.finetuned_params.items()}
        )
    assert "block by block" not in caplog.text
    distance = sum((ends[0][key] - ends[1][key]).norm() ** 2 for key in ends[0])
    assert distance < 0.05 * sum(change.norm() ** 2 for change in ends[0].values())


@pytest.mark.usefixtures("products_of_a_gpu")
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_a_model_in_float32_is_trained_block_by_block_on_a_gpu(
    tiny_folder, tiny_text_file, caplog, monkeypatch, name
) -> None:
    """Its states are bfloat16 there, which its head takes under autocast alone. It learns as the whole model does."""
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)  # so experts' products are grouped
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ends = []
    for by_block in (False, True):
        run = run_of(tiny_folder(name), tiny_text_file, blockwise=by_block)
        teacher = teacher_of(run, run.recipe.finetune, run.train_windows)
        assert isinstance(teacher, HeadTeacher if by_block else Teacher)
        finetune(run, quantize_linears(run, None, label="quantize"), run.recipe.finetune)
        ends.append({key: end - original for key, (original, end) in run.finetuned_params.items()})
    assert "block by block" not in caplog.text
    distance = sum((ends[0][key] - ends[1][key]).norm() ** 2 for key in ends[0])
    assert distance < 0.05 * sum(change.norm() ** 2 for change in ends[0].values())


@pytest.mark.slow
@pytest.mark.usefixtures("products_of_a_gpu")
def test_a_step_that_is_broken_off_leaves_the_blocks_as_they_were(
    tiny_folder, tiny_text_file, monkeypatch
) -> None:
    """On a GPU blocks are replaced twice, and what came last has to go first."""
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    run = run_of(tiny_folder("llama"), tiny_text_file, blockwise=True)
    codes = quantize_linears(run, None, label="quantize")
    monkeypatch.setattr(LearningBlock, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(run, codes, run.recipe.finetune)
    gc.collect()  # an error in a generator that is collected is a warning, and warnings are errors here
    assert not any("forward" in vars(block) for block in find_blocks(run.model)[1])


@pytest.mark.slow
def test_states_of_the_original_are_computed_once_a_run(tiny_folder, tiny_text_file, monkeypatch) -> None:
    """Those of training and validation windows, by the rounds; the last training reads them, and learns the same."""
    computed: list[int] = []

    def counted(model, windows, *, label=None):
        computed.append(len(windows))
        return states_on_host(model, windows, label=label)

    monkeypatch.setattr("requant.finetune.final.states_on_host", counted)
    run = run_of(tiny_folder("llama"), tiny_text_file, blockwise=True, steps=4)
    weights = best(run)
    again = finetune(run, weights, run.recipe.finetune)
    assert computed == [len(run.train_windows)]
    fresh = run_of(tiny_folder("llama"), tiny_text_file, blockwise=True, steps=4)
    weights_again = best(fresh)
    fresh.last_states.clear()
    learned = finetune(fresh, weights_again, fresh.recipe.finetune)
    assert computed == 3 * [len(run.train_windows)]
    for name, weight in learned.items():
        assert torch.equal(weight.dequantize(), again[name].dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("agreed", [True, False])
def test_states_of_a_model_that_is_trained_as_a_whole_outlive_its_rounds(
    tiny_folder, tiny_text_file, monkeypatch, agreed
) -> None:
    """The last training computes none of them, where all ranks have some, and learns the same as one that has none; then
    their memory is free."""
    computed: list[int] = []
    last_states = Teacher.last_states

    def counted(teacher, tokens):
        computed.append(len(tokens))
        return last_states(teacher, tokens)

    monkeypatch.setattr(Teacher, "last_states", counted)
    # 11 windows in steps of 4, so that a batch holds windows of two epochs
    kept, fresh = (run_of(tiny_folder("llama"), tiny_text_file, blockwise=False, steps=4) for _ in range(2))
    after_rounds = best(kept)
    in_rounds = len(computed)
    assert in_rounds > 0 and len(kept.state_caches) == 1
    monkeypatch.setattr(ranks, "all_agree", lambda condition: condition and agreed)
    allocated = dataclasses.replace(kept, allocation=uniform(kept.recipe, kept.targets, {"embedding": (16,)}))
    learned, _ = finetuned(allocated, after_rounds, quantize_embedding_and_head(allocated))
    assert (len(computed) == in_rounds) is agreed and not kept.state_caches
    after_rounds = best(fresh)
    fresh.state_caches.clear()
    again = finetune(fresh, after_rounds, fresh.recipe.finetune)
    for name, weight in learned.items():
        assert torch.equal(weight.dequantize(), again[name].dequantize())


def test_states_of_other_windows_are_not_taken(tiny_folder, tiny_text_file) -> None:
    run = run_of(tiny_folder("llama"), tiny_text_file, blockwise=False)
    caches = []
    for windows in (run.train_windows[:4], run.train_windows[:4], run.train_windows[1:5]):
        teacher = teacher_of(run, run.recipe.finetune, windows)
        assert isinstance(teacher, Teacher)
        teacher.micro_batches(torch.arange(4), None)
        caches.append(teacher.cache)
    assert caches[0] is caches[1] is not caches[2] and run.state_caches == caches[2:]
