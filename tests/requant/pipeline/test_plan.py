import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import requant
from eval.shapes import config_of
from requant.calibration.experts import share_of_experts
from requant.checkpoint.sizes import byte_table
from requant.finetune.memory import training_bytes
from requant.pipeline.completion import FITS_RESIDENT
from requant.pipeline.memory import CHARACTER_BYTES_KEPT, _training_memory
from requant.pipeline.outline import outline
from requant.pipeline.plan import Plan, make_plan
from requant.pipeline.prepare import prepare
from requant.pipeline.schedule import expected_stages
from requant.pipeline.statistics import statistics_passes
from requant.quantizers.registry import METHODS
from requant.quantizers.table_trellis import TRELLIS
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Budget, Calibration, Detach, Evaluation, Finetune, Mode, Recipe, Sensitivity
from requant.run.rounds import rounds_of

ROOT = Path(__file__).parents[3]
SLOW = {"trellis": pytest.mark.slow}


def recipe_of(method: str, **changes) -> Recipe:
    base = Recipe(
        mode="dense",
        method=method,
        quantizer=METHODS[method].config(bits=3),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        detach=Detach(outlier_rule="uniform", outlier_fraction=0.02, significant_fraction=0.01, steps=1),
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("method", [pytest.param(m, marks=SLOW.get(m, ())) for m in METHODS])
@pytest.mark.parametrize("name", ["gpt2"])
def test_predicted_bytes_of_the_dense_part_are_exact(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str, name: str
) -> None:
    source, recipe = str(tiny_folder(name)), recipe_of(method)
    plan = make_plan(prepare(source, recipe, tiny_text_file), recipe)
    table = byte_table(requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "out"))
    assert plan.bits_per_weight == pytest.approx(table.bits_per_weight, rel=1e-6)
    assert plan.bytes_after == pytest.approx(table.bytes, abs=table.file_headers)
    assert plan.weights == sum(matrix.weights for matrix in table.matrices.values())


def test_predicted_bytes_of_mode_best_are_exact(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """Training changes no byte, and mode `best` has no sparse part."""
    recipe = recipe_of(
        "kmeans",
        mode="best",
        budget=Budget(bits=4.5),
        calibration=Calibration(num_samples=4, seq_len=32),
        finetune=Finetune(steps=1, tokens_per_step=64),
    )
    source = str(tiny_folder("llama"))
    plan = make_plan(prepare(source, recipe, tiny_text_file), recipe)
    table = byte_table(requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "out"))
    assert (
        plan.bits_per_weight == pytest.approx(table.bits_per_weight, rel=1e-6) and plan.bits_per_weight <= 4.5
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["dense", "paper"])
def test_every_method_has_a_plan(tiny_folder, tiny_text_file: Path, method: str, mode: str) -> None:
    recipe = recipe_of(method, mode=mode)
    plan = make_plan(prepare(str(tiny_folder("llama")), recipe, tiny_text_file), recipe)
    assert plan.matrices == dict.fromkeys(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], 2
    )
    assert 0 < plan.bytes_after < plan.bytes_before and plan.seconds > 0
    assert plan.peak_memory > plan.bytes_before
    text = "\n".join(plan.lines())
    assert "14 (2 q_proj, " in text and f"{plan.bytes_before:,} -> {plan.bytes_after:,}" in text


@pytest.mark.parametrize("mode", ["dense", "paper"])
def test_a_configuration_is_enough_for_a_plan(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, mode: str
) -> None:
    """The bytes are those of a plan that has read the weights; there are none to read here."""
    recipe = recipe_of("gptq", mode=mode)
    source = tiny_folder("llama")
    shutil.copy(source / "config.json", tmp_path)
    prepared = prepare(str(source), recipe, tiny_text_file)
    expected = make_plan(prepared, recipe)
    characters = len(prepared.calibration.text) + len(prepared.evaluation.text)
    outlined = outline(str(tmp_path), recipe)
    assert {p.device.type for p in outlined.model.parameters()} == {"meta"}
    plan = make_plan(outlined, recipe, device="cpu")
    assert plan.matrices == expected.matrices and plan.bits_per_weight == expected.bits_per_weight
    texts = CHARACTER_BYTES_KEPT * characters  # what they leave; an outline does not read them
    assert plan.peak_memory == expected.peak_memory - texts
    headers = expected.bytes_before - plan.bytes_before  # of the weight files
    assert plan.bytes_after == pytest.approx(expected.bytes_after - headers, abs=headers)


def test_tables_that_the_run_will_choose_for_get_usual_bits(tiny_folder, tmp_path: Path) -> None:
    """Not the fewest, which no run would take; and the plan says that they are a guess."""
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    recipe = recipe_of("trellis", budget=Budget(bits=3.0))
    guessed, given = (
        make_plan(outline(str(tmp_path), own), own, device="cuda")
        for own in (
            recipe,
            dataclasses.replace(recipe, budget=Budget(bits=3.0, embedding_bits=6, head_bits=6)),
        )
    )
    assert guessed.bytes_after == given.bytes_after and given.tables is None
    text = "\n".join(guessed.lines())
    assert f"-> about {guessed.bytes_after:,}\n  embedding at 6 bits, head at 6 bits, as is usual" in text


def test_a_plan_for_several_gpus(tiny_folder) -> None:
    """Times of GPUs that are not here: of two, half, but for embedding and head. Statistics are divided, what trains not."""
    recipe = recipe_of("trellis", budget=Budget(bits=2.0))
    one, two = (
        make_plan(outline(str(tiny_folder("llama")), recipe, gpus=count), recipe, device="cuda")
        for count in (1, 2)
    )
    tables = 2 * 264 * 64 * TRELLIS.seconds_per_weight["cuda"]
    # neither is the pass that their bits are chosen by, a hundred-thousandth of it all
    assert two.seconds - tables == pytest.approx((one.seconds - tables) / 2, rel=1e-4)
    assert one.bits_per_weight == two.bits_per_weight == 2.0
    assert two.peak_memory < one.peak_memory
    text = "\n".join(two.lines())
    assert " GiB a GPU\n" in text and " on 2 GPUs" in text
    trained = dataclasses.replace(recipe, mode="best", finetune=Finetune(steps=10))
    plan = make_plan(outline(str(tiny_folder("llama")), trained, gpus=2), trained, device="cuda")
    parameters = sum(p.numel() for p in outline(str(tiny_folder("llama")), trained).model.parameters())
    assert plan.peak_memory > 16 * parameters


def test_a_plan_says_how_often_it_trains(tiny_folder) -> None:
    """After the rounds that the model's blocks allow; a recipe without training has no such line."""
    source = str(tiny_folder("llama"))

    def lines(mode: Mode, finetune: Finetune) -> list[str]:
        recipe = recipe_of("gptq", mode=mode, finetune=finetune)
        plan = make_plan(outline(source, recipe), recipe, device="cpu")
        return [line for line in plan.lines() if line.startswith("training ")]

    expected = "training        300 steps of 32 tokens"
    few = Finetune(steps=300, tokens_per_step=32)
    assert lines("best", few) == [f"{expected} after each of 6 rounds"]
    assert lines("best", dataclasses.replace(few, rounds=100)) == [f"{expected} after each of 8 rounds"]
    assert lines("paper", few) == [expected]
    own = dataclasses.replace(few, own_windows=1500)
    assert lines("paper", own) == [f"{expected}, with 1,500 windows that the model writes"]
    assert lines("best", Finetune(steps=0)) == []


def test_a_plan_counts_the_windows_that_the_model_writes(tiny_folder) -> None:
    source = str(tiny_folder("llama"))

    def plan_of(own_windows: int) -> Plan:
        finetune = Finetune(steps=300, own_windows=own_windows)
        recipe = recipe_of("trellis", mode="best", finetune=finetune)
        return make_plan(outline(source, recipe), recipe, device="cuda")

    without, few, many = (plan_of(count) for count in (0, 1000, 100_000))
    assert without.seconds < few.seconds < many.seconds
    assert without.peak_memory < few.peak_memory < many.peak_memory  # the original's states on them


def test_the_time_of_own_text_is_that_of_its_decoding_steps(tmp_path: Path, monkeypatch) -> None:
    """6144 windows of 1024 tokens took bench-32m at most 22 s on an H100, planned at 25; two GPUs share the batches."""
    LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16384,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = default_recipe(str(tmp_path), None, gpu=True)
    recipe = dataclasses.replace(
        recipe,
        budget=Budget(bits=2.0),
        finetune=dataclasses.replace(recipe.finetune, own_windows=6144),
    )

    def seconds(gpus: int) -> float:
        shaped = outline(str(tmp_path), recipe, dtype="bfloat16", gpus=gpus)
        stages = expected_stages(shaped, shaped.recipe, "cuda")
        return next(stage.seconds for stage in stages if stage.name == "own text")

    assert seconds(1) == pytest.approx(25, rel=0.1)
    assert seconds(2) == pytest.approx(seconds(1) / 2)


def test_what_a_second_gpu_takes_off_training_is_what_was_measured(tmp_path: Path, monkeypatch) -> None:
    """Of a 1B shape on H100s; sums of gradients and updates are not halved."""
    measured = json.loads((ROOT / "eval" / "results" / "speed-1b-h100.json").read_text())
    one, two = (measured[run]["seconds"]["finetuning"] for run in ("run_1b", "run_1b_2_gpus"))
    config_of("1b").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = dataclasses.replace(default_recipe(str(tmp_path), None, gpu=True), budget=Budget(bits=2.0))

    def seconds(gpus: int) -> float:
        shaped = outline(str(tmp_path), recipe, dtype="bfloat16", gpus=gpus)
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


def test_the_sparse_part_is_expected_within_a_few_percent(
    tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    recipe = recipe_of("kmeans", mode="paper")
    source = str(tiny_folder("llama"))
    plan = make_plan(prepare(source, recipe, tiny_text_file), recipe)
    table = byte_table(requant.save(requant.quantize(source, recipe, tiny_text_file), tmp_path / "out"))
    assert plan.bits_per_weight == pytest.approx(table.bits_per_weight, rel=0.03)


def save_shape(shape: str, folder: Path) -> str:
    """A folder with the config of a Llama's shape."""
    config_of(shape).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("shape", "limit"), [("1b", 24), ("8b", 90)])
def test_large_shapes_are_trained_in_less_memory(tmp_path: Path, monkeypatch, shape: str, limit: int) -> None:
    """Block by block, in GiB; as a whole both take twice as much and more, most of it in training."""
    source = save_shape(shape, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # an H200 is taken
    recipe = default_recipe(source, None, gpu=True)
    recipe = dataclasses.replace(recipe, budget=Budget(bits=2.0))

    def gib(**changes) -> float:
        changed = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, **changes))
        shaped = outline(source, changed, dtype="bfloat16")
        return make_plan(shaped, shaped.recipe, device="cuda").peak_memory / 2**30

    by_block, whole, untrained = gib(blockwise=True), gib(blockwise=False), gib(steps=0)
    assert untrained <= by_block < limit and whole > 2 * by_block


def test_statistics_that_do_not_fit_take_more_passes(tmp_path: Path, monkeypatch) -> None:
    """Four of an 8B shape on 80 GB, as an H100 took; each goes back to the first of its blocks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = save_shape("8b", tmp_path)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))
    shaped = outline(source, recipe, dtype="bfloat16", device="cuda")
    rounds = rounds_of(shaped.targets, shaped.recipe.finetune.rounds)
    stages = {}
    for memory, passes in ((79, 4), (300, 1)):
        monkeypatch.setattr(
            "requant.pipeline.statistics.total_memory", lambda _device, memory=memory: memory << 30
        )
        shares = statistics_passes(shaped, shaped.recipe, "cuda", shaped.targets)
        assert len(shares) == passes and shares[0] == 1 and shares == sorted(shares, reverse=True)
        assert statistics_passes(shaped, shaped.recipe, "cuda", rounds[3]) == [
            0.5
        ]  # the second half of the blocks
        stages[memory] = {each.name: each.seconds for each in expected_stages(shaped, shaped.recipe, "cuda")}
    more = stages[79]["allocation"] - stages[300]["allocation"]  # predicted losses come on top of both
    assert more > stages[300]["round 2 of 6, codes"] - stages[300]["round 1 of 6, codes"]
    # its statistics of the first round are not kept where they took several passes
    assert stages[79]["round 1 of 6, codes"] > 2 * stages[300]["round 1 of 6, codes"]
    assert stages[79]["round 2 of 6, codes"] == stages[300]["round 2 of 6, codes"]


@pytest.mark.parametrize(
    ("shape", "memory", "fits"),
    [("70b", 80, 62), ("8b", 24, 20), ("8b", 16, None), ("8b", 40, 30), ("3b", 12, 11.5)],
)
def test_shapes_larger_than_the_gpu_are_trained_where_that_fits(
    tmp_path: Path, monkeypatch, shape: str, memory: int, fits: float | None
) -> None:
    """At the end only; in GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for place in ("hosting", "completion", "memory", "plan", "statistics"):
        monkeypatch.setattr(f"requant.pipeline.{place}.total_memory", lambda _device: memory << 30)
    source = save_shape(shape, tmp_path)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))
    shaped = outline(source, recipe, dtype="bfloat16", device="cuda")
    plan = make_plan(shaped, shaped.recipe, device="cuda")
    untrained = dataclasses.replace(
        shaped.recipe, finetune=dataclasses.replace(shaped.recipe.finetune, steps=0)
    )
    assert shaped.hosted and plan.training is not None
    if fits is None:
        assert shaped.bytes_to_train > 16 << 30 and plan.training.startswith("none: it would take about")
        return
    assert plan.training.startswith("200 steps of 16,384 tokens at the end only")
    assert 0.9 * fits < plan.peak_memory / 2**30 < fits
    without = make_plan(shaped, untrained, device="cuda")
    assert without.host_memory == sum(target.size for target in shaped.targets) < plan.host_memory
    assert without.seconds < plan.seconds


@pytest.mark.parametrize(("gpus", "fullest"), [(1, 0), (8, -1)])
def test_the_fullest_phase_of_many_gpus_is_the_last(
    tmp_path: Path, monkeypatch, gpus: int, fullest: int
) -> None:
    """On one an open matrix takes 8 bytes per weight and a coded one 3; on eight 1 and 3."""
    source = save_shape("8b", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = default_recipe(source, None, gpu=True)
    shaped = outline(source, recipe, dtype="bfloat16", gpus=gpus)
    rounds = rounds_of(shaped.targets, recipe.finetune.rounds)
    count, length = shaped.train_windows.shape
    phases = [
        training_bytes(
            shaped.model,
            shaped.targets,
            {target.name for members in rounds[: index + 1] for target in members},
            shaped.recipe.finetune,
            (count, length),
            by_block=True,
            gpu=True,
            device_memory=1,
            gpus=gpus,
        )
        for index in range(len(rounds))
    ]
    assert max(phases) == phases[fullest] > min(phases)
    assert _training_memory(shaped, shaped.recipe, "cuda") == max(phases)


def test_rounds_that_do_not_fit_are_left_out_by_default(tmp_path: Path, monkeypatch) -> None:
    """8B has rounds on a card of 90 GB, as many steps at the end on one of 48, and the steps of one round, from the host, on
    one of 40. Steps that are asked for are tried. Modes that train nothing by default stay on the GPU.
    """
    source = save_shape("8b", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = dataclasses.replace(default_recipe(source, None, gpu=True), budget=Budget(bits=2.0))

    def planned(gigabytes: int, chosen: Recipe = recipe) -> Plan:
        monkeypatch.setattr("requant.models.devices._most_of_a_gpu", gigabytes * 10**9)
        shaped = outline(source, chosen, dtype="bfloat16", device="cuda")
        plan = make_plan(shaped, shaped.recipe, device="cuda")
        assert plan.training is not None or chosen.mode == "dense"
        return plan

    def training(plan: Plan) -> str:
        return plan.training or ""

    rounds, at_the_end, hosted = map(planned, (90, 48, 40))
    assert training(rounds).startswith("200 steps of 16,384 tokens after each of 6 rounds")
    assert training(at_the_end).startswith("1200 steps of 16,384 tokens at the end only")
    assert training(hosted).startswith("200 steps of 16,384 tokens at the end only")
    assert at_the_end.hosted_bytes == 0 < hosted.hosted_bytes
    assert rounds.peak_memory > at_the_end.peak_memory > hosted.peak_memory
    assert at_the_end.peak_memory < FITS_RESIDENT * at_the_end.device_memory
    # of a model on the host what is planned is what it takes: 19.6 GiB
    assert training(planned(22)).startswith("none") and training(planned(23)) == training(hosted)
    assert planned(40, dataclasses.replace(recipe, mode="dense", finetune=Finetune())).hosted_bytes == 0
    own = planned(40, dataclasses.replace(recipe, calibration=Calibration(text=("self",))))
    assert own.hosted_bytes == 0 and training(own).startswith("none: it would take about 4")
    asked = dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, steps=200))
    tried = planned(48, asked)
    assert training(tried) == training(rounds) and tried.peak_memory > 1.1 * tried.device_memory


def test_more_work_takes_longer(tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    monkeypatch.setattr("requant.pipeline.schedule._rate", lambda *_: 1e9)
    source = str(tiny_folder("llama"))

    def seconds(**changes) -> float:
        recipe = recipe_of("kmeans", mode="paper", **changes)
        return make_plan(prepare(source, recipe, tiny_text_file), recipe).seconds

    base = seconds()
    assert seconds(calibration=Calibration(num_samples=8, seq_len=64)) > base
    assert seconds(finetune=Finetune(steps=9)) > seconds(finetune=Finetune(steps=1)) > base
    assert seconds(detach=Detach(steps=9)) > seconds(detach=Detach(steps=1))
    assert seconds(sensitivity=Sensitivity(nodes="plain32")) > base


@pytest.mark.parametrize(
    ("family", "share"), [("mixtral", 2 / 4), ("qwen2-moe", 2 / 4), ("deepseek-v3", 2 / 8)]
)
def test_a_token_sees_as_many_experts_as_the_config_says(tiny_folder, family: str, share: float) -> None:
    """By it activations are counted: a mixture's are a fraction of its matrices'."""
    recipe = recipe_of("kmeans")
    outlined = outline(str(tiny_folder(family)), recipe)
    assert share_of_experts(outlined.model, outlined.targets) == share


def test_the_memory_of_a_cpu_run_follows_the_batch(tiny_folder, tiny_text_file: Path, monkeypatch) -> None:
    """A batch has 2048 tokens at most, and the code that searches for trellis codes is part of the process."""
    source = str(tiny_folder("llama"))

    def peak(method: str, num_samples: int) -> int:
        recipe = recipe_of(method, calibration=Calibration(num_samples=num_samples, seq_len=64))
        return make_plan(prepare(source, recipe, tiny_text_file), recipe).peak_memory

    one, four = peak("rtn", 1), peak("rtn", 4)
    logits = 18 * 1.5 * 64 * 264  # of a window; the vocabulary has 264 tokens
    assert four - one > 3 * logits
    assert peak("trellis", 4) - four > 100 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--method", "rtn", "--mode", "dense"),
        ("--method", "gptq", "--mode", "dense"),
        ("--method", "trellis", "--mode", "dense", "--num-samples", "4"),
    ],
)
def test_the_memory_of_a_cpu_run_is_what_it_takes(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A process of its own, for its peak is the whole process's."""
    command = [
        sys.executable, "-m", "requant", "quantize", "--code-bits", "4", "--num-samples", "2", "--device", "cpu", "--json",
        "--output", str(tmp_path / "out"), *options,
    ]  # fmt: skip
    planned, done = (
        json.loads(subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout)
        for more in (["--dry-run"], [])
    )
    assert planned["peak_memory"] == pytest.approx(done["peak_memory"], rel=0.15)
