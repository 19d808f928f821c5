"""A model whose matrices stay in the host's memory gives the bytes of one that lies on the device whole."""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import requant
from requant.calibration.passes import mean_loss
from requant.errors import ModelError, RecipeError
from requant.formats.grid import Grid
from requant.models.hosted import HostedMatrix, hosted_blocks
from requant.pipeline.planning.plan import make_plan
from requant.pipeline.preparation.hosting import least_memory
from requant.pipeline.preparation.outline import outline
from requant.pipeline.preparation.prepare import prepare, start
from requant.pipeline.preparation.shape_bytes import bytes_on_host
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import dump_recipe
from requant.run.workspace import Workspace

from ...brief_settings import brief_settings
from ...on_text import on_text
from ...prequantized_folders import fp8_folder

pytestmark = pytest.mark.usefixtures("any_trellis_codes")

FAMILIES = ("llama", "gpt2", "gemma3", "qwen3-moe")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch) -> None:
    """Two windows each, so that a pass has several."""
    monkeypatch.setattr(
        "requant.calibration.batches.chunks", lambda windows, model, each, **_: windows.split(each or 2)
    )


def recipe_of(method: str, *, bits: float = 3.0, **changes) -> Recipe:
    usual = {
        "mode": "dense",
        "method": method,
        "quantizer": brief_settings(method),
        "budget": Budget(bits=bits),
        "calibration": Calibration(num_samples=7, seq_len=32),
        "evaluation": Evaluation(context=32, windows=3, samples=0),
    }
    return Recipe(**{**usual, **changes})


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


QUANTIZED_INPUTS = Calibration(num_samples=7, seq_len=32, inputs="quantized")


RUNS = (
    ("llama", "lut", "auto", {}),
    ("gemma3", "gptq", "auto", {}),
    ("qwen3-moe", "gptq", "auto", {"calibration": QUANTIZED_INPUTS}),
    ("llama-tied", "gptq", "auto", {"budget": Budget(bits=4.5)}),
    ("llama", "rtn", "bfloat16", {"budget": Budget(bits=4.5, predictor="pqi")}),
    ("gpt2", "gptq", "auto", {"calibration": QUANTIZED_INPUTS}),
    ("llama", "trellis", "auto", {"mode": "best"}),
    # families that a method above has, and methods that a family above has
    *((name, "lut", "auto", {}) for name in FAMILIES if name != "llama"),
    ("qwen3-moe", "trellis", "bfloat16", {"mode": "best"}),
)
QUICK = RUNS[0], RUNS[2]


@pytest.mark.parametrize(
    ("name", "method", "dtype", "changes", "chunk"),
    [
        (*QUICK[0], "whole"),
        (*QUICK[1], "block"),
        *(pytest.param(*each, "whole", marks=pytest.mark.slow) for each in RUNS if each is not QUICK[0]),
        *(pytest.param(*each, "block", marks=pytest.mark.slow) for each in RUNS if each is not QUICK[1]),
    ],
)
def test_the_bytes_are_those_of_a_model_on_the_device(
    tiny_folder,
    tiny_text_file: Path,
    tmp_path: Path,
    hosted,
    monkeypatch,
    name: str,
    method: str,
    dtype: str,
    changes,
    chunk: str,
) -> None:
    """Also where the statistics of a block fill the device, and so come in several parts."""
    if chunk == "block":
        monkeypatch.setattr("requant.run.statistics.free_memory", lambda _device: 1)
    recipe, source, found = recipe_of(method, **changes), str(tiny_folder(name)), []
    for on in (False, True):
        hosted(on)
        result = requant.quantize(source, recipe, tiny_text_file, dtype=dtype)
        assert (hosted_blocks(result.model) is not None) == on
        found.append((result, digests(requant.save(result, tmp_path / str(on)))))
    (resident, whole), (result, parts) = found
    assert parts == whole
    assert result.allocation == resident.allocation
    assert (result.before, result.after) == (resident.before, resident.after)
    assert result.routed_tokens == resident.routed_tokens
    diagnosis = dataclasses.replace(resident.diagnosis, block_delta_loss={}, kind_delta_loss={})
    assert result.diagnosis == diagnosis


def test_a_block_comes_once_for_all_batches(tiny_folder, tiny_text_file: Path, hosted, monkeypatch) -> None:
    hosted(True)
    prepared = prepare(str(tiny_folder("llama")), on_text(recipe_of("rtn"), tiny_text_file))
    calls, batches = Counter[str](), []
    value = HostedMatrix.value
    monkeypatch.setattr(HostedMatrix, "value", lambda matrix: (calls.update([matrix.name]), value(matrix))[1])
    prepared.model.get_output_embeddings().register_forward_hook(lambda *_: batches.append(1))
    mean_loss(prepared.model, prepared.windows)
    assert len(batches) == 4 and calls == dict.fromkeys((target.name for target in prepared.targets), 1)


def test_between_its_blocks_a_model_takes_no_memory(tiny_folder, tiny_text_file: Path, hosted) -> None:
    """At rest every matrix is one number; a block that is called brings its own, and sends back those of the last one."""
    hosted(True)
    prepared = prepare(str(tiny_folder("llama")), on_text(recipe_of("rtn"), tiny_text_file))

    def numbers() -> list[int]:
        return [target.parameter.untyped_storage().nbytes() // 4 for target in prepared.targets]

    sizes = [target.size for target in prepared.targets]
    assert numbers() == [1] * 14 and prepared.targets[0].shape == (64, 64)
    prepared.model(prepared.windows[:1])
    assert numbers() == [1] * 7 + sizes[7:]
    run = start(prepared, prepared.recipe, workspace=Workspace(None), quiet=True)
    files = [target.hosted.stored.data_ptr() for target in prepared.targets if target.hosted is not None]
    assert [tensor.data_ptr() for tensor in run.original.values()] == files  # no copy of the weight files
    run.apply_original_weights()
    assert numbers() == [1] * 14


def test_codes_that_go_to_the_host_are_packed_once(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, hosted, monkeypatch
) -> None:
    hosted(True)
    own, packed = Grid.pack, []
    monkeypatch.setattr(Grid, "pack", lambda grid: packed.append(grid) or own(grid))
    workspace = Workspace(tmp_path / "work.partial")
    source = str(tiny_folder("llama"))
    requant.save(
        requant.quantize(source, recipe_of("rtn"), tiny_text_file, workspace=workspace), tmp_path / "out"
    )
    assert len(packed) == 14 + 2  # embedding and head


def test_a_hosted_model_is_the_same_to_a_workspace(tiny_folder, tiny_text_file: Path, hosted) -> None:
    found = []
    for on in (False, True):
        hosted(on)
        prepared = prepare(str(tiny_folder("gpt2")), on_text(recipe_of("rtn"), tiny_text_file))
        found.append(start(prepared, prepared.recipe, workspace=Workspace(None), quiet=True).fingerprint)
    assert found[0] == found[1]


def test_damaged_weights_are_found_on_the_host_too(tiny_model, tokenizer, tiny_text_file, tmp_path, hosted):
    hosted(True)
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight holds NaN"):
        prepare(str(tmp_path), on_text(recipe_of("rtn"), tiny_text_file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finetune": Finetune(steps=5, blockwise=False)}, "finetune.blockwise false needs .* leave it out"),
        ({"finetune": Finetune(steps=5, own_windows=8)}, "--own-windows 8 needs .* leave it out"),
        ({"mode": "paper"}, "mode 'paper' needs the whole model on the GPU.* --mode dense"),
        (
            {"mode": "sparse", "method": "magnitude", "budget": Budget()},
            "mode 'sparse' needs .* run `requant quantize`",
        ),
        ({"calibration": Calibration(inputs="corrected")}, "calibration.inputs 'corrected' needs"),
        ({"calibration": Calibration(text=("self",))}, "calibration 'self' needs .* give a text"),
        ({"budget": Budget(bits=3.0, predictor="restored")}, "predictor 'restored' needs .* curvature"),
        ({"method": "trellis", "rotations": "folded"}, "--rotations folded needs .* leave it out"),
    ],
)
def test_what_needs_the_whole_model_is_refused(
    tiny_folder, hosted, monkeypatch, changes, message: str
) -> None:
    """Before texts and weights are read."""
    hosted(True)
    monkeypatch.setattr("requant.pipeline.preparation.open_model.load_model", None)
    recipe = recipe_of(**{"method": "gptq", **changes})
    with pytest.raises(RecipeError, match=message):
        prepare(str(tiny_folder("llama")), recipe)


def test_training_comes_at_the_end_and_that_is_said(tiny_folder, tiny_text_file, hosted, caplog) -> None:
    hosted(True)
    recipe = recipe_of("rtn", mode="best", finetune=Finetune(steps=None))
    prepared = prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file))
    found = prepared.recipe
    assert (found.finetune.steps, found.finetune.rounds, found.finetune.blockwise) == (1000, 0, True)
    assert found.evaluation.samples == 0
    assert "larger than the GPU" in caplog.text and "it is trained at the end only" in caplog.text
    caplog.clear()
    prepare(str(tiny_folder("llama")), on_text(recipe_of("rtn"), tiny_text_file))
    assert "nothing is trained" in caplog.text


def test_a_model_that_cannot_be_trained_is_refused_before_codes_are_made(
    tiny_folder, tiny_text_file, hosted, monkeypatch
) -> None:
    hosted(True)
    monkeypatch.setattr(
        "requant.pipeline.preparation.hosting.why_states_do_not_suffice", lambda *_: "it looks back"
    )
    recipe = recipe_of("rtn", finetune=Finetune(steps=5))
    with pytest.raises(RecipeError, match="this one cannot be: it looks back; give --finetune-steps 0, or"):
        prepare(str(tiny_folder("llama")), on_text(recipe, tiny_text_file))


def test_a_model_stays_on_the_host_where_the_gpu_is_too_small(tiny_folder, monkeypatch) -> None:
    recipe = default_recipe(str(tiny_folder("llama")), "trellis", gpu=True)
    plans = {}
    whole = outline(recipe.model, recipe, device="cuda")
    least = least_memory(whole.model, whole.targets, recipe)
    for memory in (2 * least, least):
        monkeypatch.setattr(
            "requant.pipeline.preparation.hosting.total_memory", lambda _device, memory=memory: memory
        )
        plans[memory] = make_plan(
            outlined := outline(recipe.model, recipe, device="cuda"), outlined.recipe, device="cuda"
        )
    fits, hosted = plans.values()
    assert fits.training is not None and fits.hosted_bytes == 0
    assert "after each of 6 rounds" in fits.training and "at the end only" in (hosted.training or "")
    assert hosted.hosted_bytes == 4 * sum(t.size for t in whole.targets) < hosted.host_memory
    assert hosted.peak_memory < fits.peak_memory
    assert "host's memory" in "\n".join(hosted.lines()) and "host's" not in "\n".join(fits.lines())
    monkeypatch.setattr("requant.pipeline.preparation.hosting.total_memory", lambda _device: 1)
    assert not outline(recipe.model, recipe, device="cpu").hosted


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what lies in files")
@pytest.mark.parametrize(
    ("name", "dtype", "stored"),
    [
        ("llama", "auto", "floats"),
        ("llama", "bfloat16", "floats"),
        ("llama", "bfloat16", "fp8"),
        ("qwen3-moe", "auto", "floats"),
    ],
)
def test_processes_share_the_matrices_that_lie_in_the_weight_files(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, hosted, name: str, dtype: str, stored: str
) -> None:
    """The plan counts all others once for each GPU: experts, and what is not a float of the model's dtype there."""
    hosted(True)
    folder = (
        tiny_folder(name) if stored == "floats" else fp8_folder(tiny_folder(name), tmp_path / "fp8", block=24)
    )
    prepared = prepare(str(folder), on_text(recipe_of("rtn"), tiny_text_file), dtype=dtype)
    mapped = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(f"{folder}/model.safetensors")
    ]
    matrices = [target.hosted.stored for target in prepared.targets if target.hosted is not None]
    own = sum(each.nbytes for each in matrices if not any(each.data_ptr() in where for where in mapped))
    one, three = (bytes_on_host(prepared.targets, folder, gpus=gpus) for gpus in (1, 3))
    assert one == sum(each.nbytes for each in matrices)
    assert three == one + 2 * own
    assert (own == 0) == (stored == "floats" and dtype == "auto" and name == "llama")
    assert (own < one) == (dtype == "auto")


def test_every_process_has_its_own_codes_and_floats_of_fp8_in_a_plan(
    tiny_folder, tmp_path: Path, monkeypatch
) -> None:
    """Also of a folder without weight files."""
    monkeypatch.setattr("requant.pipeline.preparation.hosting.total_memory", lambda _device: 1)
    recipe, config = recipe_of("rtn"), tmp_path / "config"
    fp8 = fp8_folder(tiny_folder("llama"), tmp_path / "fp8", block=24)
    config.mkdir()
    shutil.copy(fp8 / "config.json", config)

    def planned(folder: Path, gpus: int) -> tuple[int, int]:
        outlined = outline(str(folder), recipe, device="cuda", gpus=gpus)
        plan = make_plan(outlined, outlined.recipe, device="cuda")
        return plan.hosted_bytes, plan.host_memory

    one, two = planned(tiny_folder("llama"), 1), planned(tiny_folder("llama"), 2)
    assert two == (one[0], 2 * one[1])
    for folder in (fp8, config):
        one, two = planned(folder, 1), planned(folder, 2)
        assert two == (2 * one[0], 2 * one[1])


HOSTED_COMMAND = """
import requant.pipeline.preparation.prepare as prepare
import requant.run.statistics as statistics
from requant.cli import main

prepare.stays_on_host = lambda *_, **__: True
statistics.free_memory = lambda _device: 1  # a part a block
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lut", "gptq"])
def test_two_processes_give_the_bytes_of_one(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str
) -> None:
    """Of an odd number of batches, each from its own windows, and with a stop between the blocks."""
    recipe = dataclasses.replace(recipe_of(method), model=str(tiny_folder("llama")))
    calibration = Calibration(text=(str(tiny_text_file),), num_samples=150, seq_len=32)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(dataclasses.replace(recipe, calibration=calibration)))
    (tmp_path / "hosted.py").write_text(HOSTED_COMMAND)
    options = ["quantize", "--recipe", tmp_path / "recipe.yaml", "--device", "cpu", "--quiet", "--output"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "hosted.py"]
    found = []
    for launcher, said in ((["requant"], ""), (torchrun, "larger than the GPU")):
        command = [sys.executable, "-m", *launcher, *options, output := tmp_path / launcher[0]]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0 and said in done.stderr, done.stderr
        found.append(digests(output))
    assert found[0] == found[1]
