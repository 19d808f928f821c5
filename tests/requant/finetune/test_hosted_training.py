"""A model larger than the GPU is trained at the end, block by block, to the bytes of one that lies on the device whole."""

import dataclasses
import hashlib
import inspect
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import requant
from requant.finetune import saved_training
from requant.finetune.blockwise import BlockwiseStep
from requant.finetune.compile_blocks import MIN_STEPS_TO_COMPILE
from requant.finetune.decoded_block import DecodedBlock
from requant.finetune.recomputed_block import LearningBlock
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.teacher import HeadTeacher
from requant.formats import quantized_weight
from requant.formats.quantized_weight import trainable_params
from requant.models import mixed_precision
from requant.models.hosted import HostedMatrix, hosted_blocks
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import find_method
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import dump_recipe
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace

from ..brief_settings import brief_settings
from ..on_text import on_text

STEPS, LR = 4, 3e-3
FINETUNE = Finetune(steps=STEPS, tokens_per_step=96, lr=LR, warmup_steps=2, eval_every=1, own_windows=None)
RESIDENT = dataclasses.replace(FINETUNE, rounds=0, blockwise=True, own_windows=0)


def recipe_of(method: str, *, finetune: Finetune = FINETUNE, **changes) -> Recipe:
    usual = {
        "mode": "best",
        "method": method,
        "quantizer": brief_settings(method),
        "budget": Budget(bits=3.5),
        "calibration": Calibration(num_samples=9, seq_len=32),
        "evaluation": Evaluation(context=32, windows=3, samples=0),
        "finetune": finetune,
    }
    return Recipe(**{**usual, **changes})


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("name", "method", "dtype", "changes"),
    [
        pytest.param("llama", "trellis", "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param(
            "gpt2", "gptq", "auto", {"budget": Budget(bits=4.5, head_bits=4.0)}, marks=pytest.mark.slow
        ),
        ("llama-tied", "rtn", "auto", {"budget": Budget(bits=4.5), "skip": ("down_proj",)}),
        pytest.param("qwen3-moe", "lut", "auto", {"mode": "dense"}, marks=pytest.mark.slow),
        pytest.param("gemma3", "kmeans", "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", "trellis", "bfloat16", {}, marks=pytest.mark.slow),
    ],
)
def test_the_bytes_are_those_of_a_model_on_the_device(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, hosted, monkeypatch, name, method, dtype, changes
) -> None:
    """Trained at the end only, whatever rounds the recipe has, with batches of states in several groups."""
    monkeypatch.setattr("requant.finetune.memory.TOKENS_AT_ONCE", 64)
    monkeypatch.setattr("requant.finetune.teacher.batches_at_once", lambda *_, **__: 2)
    if dtype == "bfloat16":  # training multiplies in it, as on a GPU
        monkeypatch.setitem(mixed_precision.PRODUCTS, "cpu", torch.bfloat16)
    source, found = str(tiny_folder(name)), []
    for on, finetune in ((False, RESIDENT), (True, FINETUNE)):
        hosted(on)
        recipe = recipe_of(method, finetune=finetune, **changes)
        result = requant.quantize(source, recipe, tiny_text_file, dtype=dtype)
        assert (hosted_blocks(result.model) is not None) == on
        assert result.recipe.finetune == RESIDENT
        found.append((result, digests(requant.save(result, tmp_path / str(on)))))
    (resident, whole), (result, parts) = found
    assert parts == whole
    assert (result.before, result.after) == (resident.before, resident.after)
    assert result.diagnosis == dataclasses.replace(
        resident.diagnosis, block_delta_loss={}, kind_delta_loss={}
    )
    assert result.diagnosis.other_params_delta != 0  # training has found better values than the first


@pytest.fixture
def run(tiny_folder, tiny_text_file: Path, hosted):
    """A hosted run, prepared."""
    hosted(True)
    prepared = prepare(str(tiny_folder("llama")), on_text(recipe_of("rtn"), tiny_text_file))
    return start(prepared, prepared.recipe, workspace=Workspace(None), quiet=True)


def test_a_block_is_there_only_while_it_is_computed(
    tiny_folder, tiny_text_file: Path, hosted, monkeypatch
) -> None:
    """Between steps, and between the blocks of a step, no matrix takes memory; while one learns, those of its block."""
    hosted(True)
    seen = Counter[str]()
    compute = LearningBlock._result

    def numbers(result) -> list[int]:
        return [target.parameter.untyped_storage().nbytes() // 4 for target in result]

    def noted(block: LearningBlock, *args):
        sizes = numbers(prepared.targets)
        own = {id(weight.parameter) for weight in block.coded}
        assert all(
            size == (target.size if id(target.parameter) in own else 1)
            for size, target in zip(sizes, prepared.targets, strict=True)
        )
        seen["computed"] += 1
        return compute(block, *args)

    step = BlockwiseStep.__call__

    def stepped(self: BlockwiseStep, *args) -> None:
        step(self, *args)
        assert numbers(prepared.targets) == [1] * 14
        seen["steps"] += 1

    def keep(*args, **kwargs):
        nonlocal prepared
        prepared = own_prepare(*args, **kwargs)
        return prepared

    prepared, own_prepare = prepare("demo", recipe_of("rtn"), device="cpu"), prepare
    monkeypatch.setattr("requant.pipeline.quantize.prepare", keep)
    monkeypatch.setattr(LearningBlock, "_result", noted)
    monkeypatch.setattr(BlockwiseStep, "__call__", stepped)
    result = requant.quantize(str(tiny_folder("llama")), recipe_of("rtn"), tiny_text_file)
    assert seen["steps"] == STEPS and seen["computed"] >= 4 * STEPS
    blocks = hosted_blocks(result.model)
    assert blocks is not None
    blocks.release()
    assert numbers(result.prepared.targets) == [1] * 14


def test_a_block_comes_once_for_the_states_of_all_batches(run, monkeypatch) -> None:
    """And once for the shape of a state."""
    calls, value = Counter[str](), HostedMatrix.value
    monkeypatch.setattr(HostedMatrix, "value", lambda matrix: (calls.update([matrix.name]), value(matrix))[1])
    teacher = HeadTeacher(run.model, run.train_windows)
    assert calls == dict.fromkeys((target.name for target in run.targets), 2)
    with torch.no_grad():
        expected = run.model.base_model(input_ids=run.train_windows, use_cache=False).last_hidden_state
    torch.testing.assert_close(teacher.states, expected)


def test_codes_are_decoded_once_for_a_block_that_is_asked_again(run, monkeypatch) -> None:
    weights = quantize_linears(run, None, label="quantize")
    params = {name: trainable_params(weight) for name, weight in weights.items()}
    decoded, unpack = [], quantized_weight.unpack
    monkeypatch.setattr(
        "requant.finetune.decoded_block.unpack",
        lambda spec, tensors: decoded.append(spec) or unpack(spec, tensors),
    )
    derived = reparametrized_weights(run, weights, params)
    assert decoded == []
    for order in (range(14), range(13, -1, -1)):
        for index in order:
            found = derived[index].value()
            expected = weights[run.targets[index].name].dequantize()
            torch.testing.assert_close(run.targets[index].oriented(found), expected)
    assert len(decoded) == 3 * 7  # the last block stayed
    assert _block_of(derived).decoded.keys() == {target.name for target in run.targets[:7]}


def _block_of(derived) -> DecodedBlock:
    """That which the functions share."""
    (value,) = {id(weight.value): weight.value for weight in derived[:1]}.values()
    floats = inspect.unwrap(value.__closure__[0].cell_contents)
    return next(
        cell.cell_contents for cell in floats.__closure__ if isinstance(cell.cell_contents, DecodedBlock)
    )


DECODING = """
import json, sys
import torch
from torch import nn
from requant import ranks
from requant.finetune import decoded_block
from requant.formats.codebook import Codebook
from requant.formats.grid import Grid
from requant.formats.quantized_weight import QuantizedWeight, trainable_params, unpack, weight_function
from requant.formats.sparse import sparse_residual
from requant.formats.trellis import Trellis
from requant.models.targets import QuantTarget

torch.manual_seed(0)
def weight_of(kind, n, k):
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8)
    if kind == "trellis":
        scales = torch.rand(n).half()
        return QuantizedWeight(dense=Trellis(codes=codes, input_scales=torch.ones(k).half(), output_scales=scales, bits=2,
                                             code="3inst"), sparse=None)
    if kind == "codebook":
        return QuantizedWeight(dense=Codebook(codes=codes, levels=torch.rand(n, 4).half(), bits=2), sparse=None)
    scales = torch.rand(n, k // 16).half()
    dense = Grid(codes=codes, scales=scales, zero_points=None, column_scales=None, bits=2, group_size=16)
    residuals = sparse_residual(torch.randn(n, k), dense.dequantize(), torch.rand(n, k) < 0.1)
    return QuantizedWeight(dense=dense, sparse=residuals if kind == "grid" else None)

def targets_of(block):
    for kind, (n, k) in SHAPES.items():
        module = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        yield QuantTarget(name=f"{block}.{kind}", kind=kind, block=block, module=module, transposed=False)

decoded = []
decoded_block.unpack = lambda spec, tensors: (decoded.append(spec.shape), unpack(spec, tensors))[1]
with ranks.joined(sys.argv[1]) as device:
    targets = [*targets_of(0), *targets_of(1)]
    weights = {target.name: weight_of(target.kind, *target.shape) for target in targets}
    block = decoded_block.DecodedBlock(targets, weights)
    same = []
    for at in (0, 1, 1, 0):  # forward and backward
        for target in targets_of(at):
            weight = weights[target.name]
            alone = weight_function(weight.to(device), torch.bfloat16)
            found = []
            for function in (block.weight_function(target, weight), alone):
                params = {name: each.to(device).requires_grad_() for name, each in trainable_params(weight).items()}
                value = function(params)
                value.square().sum().backward()
                found.append([value, *(each.grad for each in params.values())])
            same.append(all(torch.equal(*pair) for pair in zip(*found, strict=True)))
    held = [name for of_block in block.packed.values() for name, each in of_block.items() if hasattr(each, "stored")]
    print(json.dumps({"decoded": decoded, "held": held, "same": all(same)}), file=sys.__stdout__)
"""


@pytest.mark.parametrize(
    ("device", "shares"),
    [
        pytest.param("cpu", [["trellis"], ["grid", "small"], ["codebook", "other"]], marks=pytest.mark.slow),
        pytest.param("cuda", [["trellis", "other", "small"], ["grid", "codebook"]], marks=pytest.mark.gpu),
    ],
)
def test_each_rank_decodes_its_share_of_a_block(in_processes, device: str, shares: list[list[str]]) -> None:
    """As many weights as the others, about; all have the bits that they would have decoded."""
    if device == "cuda" and torch.cuda.device_count() < len(shares):
        pytest.skip("needs two GPUs")
    shapes = {
        "small": (16, 32),
        "trellis": (64, 64),
        "grid": (48, 64),
        "codebook": (32, 64),
        "other": (32, 32),
    }
    script = f"SHAPES = {shapes}\n{DECODING}"
    found = [json.loads(output) for output in in_processes(script, len(shares), device)]
    for each, share in zip(found, shares, strict=True):
        assert each["same"]
        assert sorted(each["held"]) == sorted(f"{block}.{kind}" for block in (0, 1) for kind in share)
        # block 1 stayed for its backward pass
        assert Counter(map(tuple, each["decoded"])) == dict.fromkeys((shapes[kind] for kind in share), 3)


class Stopped(BaseException):
    """As sudden as a kill, for this process."""


def quantized(recipe: Recipe, text: Path, output: Path, *, resume: bool = False) -> dict[str, str]:
    workspace = Workspace(output.with_name("w"), resume=resume, save_every=0.0)
    result = requant.quantize(recipe.model, recipe, text, workspace=workspace)
    requant.save(result, output)
    workspace.remove()
    return digests(output)


@pytest.mark.parametrize("stop", [1, pytest.param(STEPS - 1, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_in_training_goes_on_there(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, hosted, monkeypatch, stop: int
) -> None:
    hosted(True)
    monkeypatch.setattr(saved_training, "MAX_FRACTION", math.inf)  # every step is saved
    recipe = dataclasses.replace(recipe_of("kmeans"), model=str(tiny_folder("llama")))
    alone = quantized(recipe, tiny_text_file, tmp_path / "alone" / "out")
    put, made, left = Workspace.put, [], stop
    call = BlockwiseStep.__call__
    monkeypatch.setattr(BlockwiseStep, "__call__", lambda *args: (made.append(1), call(*args))[1])

    def stopping(self, stage: str, *args, **kwargs) -> None:
        nonlocal left
        put(self, stage, *args, **kwargs)
        left -= stage == "training"
        if stage == "training" and left == 0:
            raise Stopped

    monkeypatch.setattr(Workspace, "put", stopping)
    with pytest.raises(Stopped):
        quantized(recipe, tiny_text_file, tmp_path / "out")
    assert len(made) == stop
    assert quantized(recipe, tiny_text_file, tmp_path / "out", resume=True) == alone
    assert len(made) == STEPS


HOSTED_COMMAND = """
import sys
import requant.pipeline.preparation.prepare as prepare
from requant.cli import main

on = sys.argv.pop(1) == "hosted"
prepare.stays_on_host = lambda *_, **__: on
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "processes"), [("rtn", 2), ("trellis", 2), ("kmeans", 4)])
def test_several_processes_give_the_bytes_of_as_many_with_models_on_the_device(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, method: str, processes: int
) -> None:
    """Which decode all matrices each. Of four processes one has no window of a step's three."""
    (tmp_path / "hosted.py").write_text(HOSTED_COMMAND)
    found = []
    for kind, finetune in (("resident", RESIDENT), ("hosted", FINETUNE)):
        recipe = dataclasses.replace(
            recipe_of(method, finetune=finetune),
            model=str(tiny_folder("llama")),
            calibration=Calibration(text=(str(tiny_text_file),), num_samples=9, seq_len=32),
        )
        (tmp_path / f"{kind}.yaml").write_text(dump_recipe(recipe))
        torchrun = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            processes,
            tmp_path / "hosted.py",
        ]
        options = [kind, "quantize", "--recipe", tmp_path / f"{kind}.yaml", "--device", "cpu", "--quiet"]
        command = [sys.executable, "-m", *torchrun, *options, "--output", output := tmp_path / kind]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert ("it is trained at the end only" in done.stderr) == (kind == "hosted")
        found.append(digests(output))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "method", "steps"),
    [("llama", "trellis", STEPS), ("qwen3-moe", "rtn", STEPS), ("llama", "rtn", MIN_STEPS_TO_COMPILE)],
)
def test_on_a_gpu_the_quality_is_that_of_a_model_there(
    tiny_folder, tiny_text_file: Path, hosted, name: str, method: str, steps: int
) -> None:
    """Within a tenth, for a GPU may add in another order; with blocks that are compiled too."""
    found = []
    for on, finetune in ((False, RESIDENT), (True, FINETUNE)):
        hosted(on)
        recipe = recipe_of(
            method,
            finetune=dataclasses.replace(finetune, steps=steps, eval_every=steps),
            quantizer=find_method(method).config(bits=2 if method == "trellis" else 3),
            budget=Budget(),
        )
        source = str(tiny_folder(name))
        result = requant.quantize(source, recipe, tiny_text_file, device="cuda", dtype="bfloat16")
        assert (hosted_blocks(result.model) is not None) == on
        assert {p.device.type for p in result.model.parameters()} == {"cuda"}
        found.append(result)
    resident, result = found
    assert result.after.mean_kl == pytest.approx(resident.after.mean_kl, rel=0.1)
    for name, weight in result.weights.items():
        expected = resident.weights[name].dequantize().cpu()
        assert weight.dense.codes.device.type == "cpu"
        assert (weight.dequantize() - expected).norm() < 0.1 * expected.norm(), name
