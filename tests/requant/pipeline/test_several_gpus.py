"""A plan for several GPUs, which need not be here: what they divide, and what each of them has whole."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from requant.finetune.divided import in_parts
from requant.finetune.memory import GRAPHS_FIT, TrainingMemory, fullest_phase
from requant.finetune.step import PARTS
from requant.pipeline.planning.memory import _training_memory
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.planning.rates import DECODE_SECONDS
from requant.pipeline.planning.schedule import expected_stages
from requant.pipeline.planning.workload import training_memory
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import _alike_on_all_ranks
from requant.quantizers.table_trellis import TRELLIS
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Budget, Finetune
from requant.run.rounds import rounds_of

from .plans import recipe_of, save_shape

ROOT = Path(__file__).parents[3]


def test_a_plan_for_several_gpus(tiny_folder, monkeypatch) -> None:
    """Times of GPUs that are not here: of two, half, but for embedding and head, and weights that are decoded on each of
    them. Statistics are divided, what trains not."""
    monkeypatch.setattr("requant.pipeline.planning.costs.FULL_WIDTH", 1)
    # which so small a model would wait for most of all, in that pass
    monkeypatch.setattr("requant.pipeline.planning.costs.LAUNCH_SECONDS", (0.0, 0.0))
    recipe = recipe_of("trellis", budget=Budget(bits=2.0))
    one, two = (
        make_plan(outline(str(tiny_folder("llama")), recipe, gpus=count), recipe, device="cuda")
        for count in (1, 2)
    )
    whole = 2 * 264 * 64 * TRELLIS.seconds_per_weight["cuda"]
    weights = sum(target.size for target in outline(str(tiny_folder("llama")), recipe).targets)
    whole += weights * DECODE_SECONDS
    # neither is the pass that their bits are chosen by, a hundred-thousandth of it all
    assert two.seconds - whole == pytest.approx((one.seconds - whole) / 2, rel=1e-4)
    assert one.bits_per_weight == two.bits_per_weight == 2.0
    assert two.peak_memory < one.peak_memory
    text = "\n".join(two.lines())
    assert " GiB a GPU\n" in text and " on 2 GPUs" in text
    trained = dataclasses.replace(recipe, mode="best", finetune=Finetune(steps=10))
    plan = make_plan(outline(str(tiny_folder("llama")), trained, gpus=2), trained, device="cuda")
    parameters = sum(p.numel() for p in outline(str(tiny_folder("llama")), trained).model.parameters())
    assert plan.peak_memory > 16 * parameters


def test_what_a_second_gpu_takes_off_training_is_what_was_measured(tmp_path: Path, monkeypatch) -> None:
    """Of a 1B shape on H200s; sums of gradients and updates are not halved."""
    measured = json.loads((ROOT / "eval" / "results" / "speed-1b-h200.json").read_text())["two_gpus"]
    one, two = (measured[run]["seconds"]["finetuning"] for run in ("run_1b", "run_1b_2_gpus"))
    source = save_shape("1b", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))

    def seconds(gpus: int) -> float:
        shaped = outline(source, recipe, dtype="bfloat16", gpus=gpus)
        stages = expected_stages(shaped, shaped.recipe, "cuda")
        return sum(stage.seconds for stage in stages if stage.kind == "training")

    assert seconds(2) / seconds(1) == pytest.approx(two / one, rel=0.05)
    assert seconds(1) / 4 < seconds(4) < seconds(2)


def test_a_plan_divides_what_trains_block_by_block(tiny_folder) -> None:
    """Of the open matrices' 8 bytes per weight, three quarters go to three other GPUs; and it says what does not fit."""
    recipe = recipe_of("trellis", mode="best", finetune=Finetune(steps=10, blockwise=True))
    outlined = [outline(str(tiny_folder("llama")), recipe, gpus=count) for count in (1, 4)]
    one, four = (_training_memory(each, recipe, "cuda") for each in outlined)
    still_open = sum(target.size for later in rounds_of(outlined[0].targets)[1:] for target in later)
    assert one - four >= 6 * still_open
    plan = make_plan(outlined[1], recipe, device="cuda")
    assert "more than" not in "\n".join(plan.lines())
    poor = dataclasses.replace(plan, device_memory=2**30, peak_memory=3 * 2**30)
    assert "peak memory     about 3.00 GiB a GPU, more than the 1.00 GiB of the GPU" in poor.lines()


@pytest.mark.parametrize(("gpus", "fullest"), [(1, 0), (8, -1)])
def test_the_fullest_phase_of_many_gpus_is_the_last(
    tmp_path: Path, monkeypatch, gpus: int, fullest: int
) -> None:
    """On one an open matrix takes 8 bytes per weight and a coded one 3; on eight 1 and 3."""
    source = save_shape("8b", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = default_recipe(source, None, gpu=True)
    shaped = outline(source, recipe, dtype="bfloat16", gpus=gpus)
    memory = training_memory(shaped, shaped.recipe, "cuda")
    rounds = rounds_of(shaped.targets, recipe.finetune.rounds)
    coded = [
        {target.name for members in rounds[: index + 1] for target in members} for index in range(len(rounds))
    ]
    phases = [memory.bytes_of_phase(each, at_least=True) for each in coded]
    assert max(phases) == phases[fullest] > min(phases)
    assert max(phases) < fullest_phase(memory, shaped.recipe) <= GRAPHS_FIT * memory.device_memory


def test_a_plan_counts_gradients_that_are_rounded_for_their_sum(tmp_path: Path) -> None:
    """Of the two consecutive parts that take most; an embedding that comes last makes them larger."""
    source = save_shape("1b", tmp_path)
    recipe = default_recipe(source, None, gpu=True)
    one, two = (
        TrainingMemory(
            model=shaped.model,
            targets=shaped.targets,
            settings=shaped.recipe.finetune,
            windows=(64, 2048),
            by_block=False,
            gpu=True,
            device_memory=1,
            gpus=gpus,
        ).bytes_of_phase((), at_least=True)
        for gpus in (1, 2)
        for shaped in [outline(source, recipe, dtype="bfloat16", gpus=gpus)]
    )
    tensors = list(outline(source, recipe, dtype="bfloat16").model.parameters())
    first, last = (
        max(
            map(
                sum,
                pairwise(
                    2 * sum(tensor.numel() for tensor in order[part]) for part in in_parts(order, PARTS)
                ),
            )
        )
        for order in (tensors, tensors[::-1])
    )
    assert first < last <= two - one < 1.3 * last


@pytest.mark.parametrize("own", [80, 24])
def test_all_ranks_take_what_the_smallest_gpu_has(monkeypatch, own: int) -> None:
    limits: list[tuple[int, str]] = []
    monkeypatch.setattr("requant.pipeline.preparation.prepare.total_memory", lambda _device: own)
    monkeypatch.setattr(
        "requant.pipeline.preparation.prepare.limit_gpu_memory", lambda *limit: limits.append(limit)
    )
    _alike_on_all_ranks("cuda:1")  # alone
    monkeypatch.setattr("requant.ranks.world_size", lambda: 2)
    monkeypatch.setattr("requant.ranks.smallest", lambda number: min(number, 24))
    _alike_on_all_ranks("cpu")
    assert not limits
    _alike_on_all_ranks("cuda:1")
    assert limits == ([(24, "cuda:1")] if own > 24 else [])
