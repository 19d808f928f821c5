import copy
import dataclasses
import hashlib
import weakref
from pathlib import Path

import pytest
import torch

import requant
from requant.calibration.collect import bytes_needed, collect
from requant.calibration.passes import mean_loss
from requant.calibration.stats import LinearStats
from requant.formats.grid import Grid
from requant.formats.quantized_weight import pack
from requant.formats.sparse import sparse_mask
from requant.models.devices import pick_device
from requant.models.loading import DEMO
from requant.models.targets import find_linears
from requant.pipeline.preparation.prepare import prepare
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Sensitivity
from requant.recipe.yaml_files import dump_recipe, load_recipe
from requant.report.summary import result_numbers, result_rows
from requant.run.statistics import chunks_that_fit
from requant.run.workspace import Workspace

from .recipes import RECIPE, changed


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def sparse_count(result: requant.QuantizedModel) -> int:
    return sum(0 if w.sparse is None else w.sparse.values.numel() for w in result.weights.values())


@pytest.mark.parametrize(
    ("rule", "score"),
    [
        ("adaptive", "pqi"),
        pytest.param("adaptive", "marginal", marks=pytest.mark.slow),
        ("uniform", "marginal"),
        ("iqr", "pqi"),
    ],
)
def test_paper_mode_detaches_what_the_recipe_says(run, rule: str, score: str) -> None:
    recipe = changed(detach={"outlier_rule": rule}, sensitivity={"score": score})
    result = run(recipe)
    total = sum(target.size for target in result.prepared.targets)
    matrices = len(result.prepared.targets)
    assert abs(sparse_count(result) - 0.02 * total) <= matrices / 2 + 1  # each matrix rounds its outliers
    originals = {target.name: target for target in find_linears(prepare_again(result))}
    for name, weight in result.weights.items():
        mask = sparse_mask(weight.sparse, weight.shape, torch.device("cpu"))
        error = (weight.dequantize() - originals[name].weight())[mask].abs()
        assert error.numel() == 0 or error.max() < 1e-3 * originals[name].weight().abs().max()


def test_residuals_in_8_bits_say_the_same_in_fewer_bytes(run, tmp_path: Path) -> None:
    whole, short = run(), run(changed(detach={"values": "int8"}))
    for name, weight in whole.weights.items():
        other = short.weights[name]
        assert torch.equal(other.dense.codes, weight.dense.codes)
        assert torch.equal(other.sparse.indices, weight.sparse.indices)
        largest = weight.sparse.floats().abs().max()
        assert (other.sparse.floats() - weight.sparse.floats()).abs().max() <= 0.52 * largest / 127
    assert short.after.mean_kl == pytest.approx(whole.after.mean_kl, rel=0.02)
    sizes = [sum(pack(w)[0].bytes for w in result.weights.values()) for result in (whole, short)]
    assert sizes[0] - sizes[1] == sparse_count(whole) - 2 * len(whole.weights)
    saved = requant.save(short, tmp_path / "out")
    ids = torch.arange(40)[None]
    assert torch.equal(requant.load(saved)(ids).logits, short.model(ids).logits)


def test_a_weight_is_packed_once(run, tmp_path: Path, monkeypatch) -> None:
    """What the workspace keeps and what the checkpoint stores are the same tensors."""
    own, packed = Grid.pack, []
    monkeypatch.setattr(Grid, "pack", lambda grid: packed.append(grid) or own(grid))
    result = run(changed(method="rtn", mode="dense"), workspace=Workspace(tmp_path / "work.partial"))
    assert len(packed) == len(result.weights)
    requant.save(result, tmp_path / "out")
    assert len(packed) == len(result.weights)


def test_a_recipe_alone_names_its_model(tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """As `requant quantize --recipe FILE`: the same bytes as with the model named beside it."""
    folder = str(tiny_folder("llama"))
    recipe = dataclasses.replace(
        changed(mode="dense", method="rtn", calibration={"text": (str(tiny_text_file),)}), model=folder
    )
    (tmp_path / "own.yaml").write_text(dump_recipe(recipe))
    alone = requant.quantize(recipe=tmp_path / "own.yaml")
    assert alone.recipe == recipe and alone.recipe.model == folder
    named = requant.quantize(folder, recipe)
    files = [requant.save(result, tmp_path / name) for name, result in (("a", alone), ("b", named))]
    assert sha256(files[0]) == sha256(files[1])
    scores = requant.score(recipe=recipe)
    assert scores.targets and requant.score(folder, recipe).rows() == scores.rows()


def prepare_again(result: requant.QuantizedModel):
    return prepare(str(result.prepared.source), result.recipe).model


def test_the_sparse_part_helps(run) -> None:
    dense, paper = run(changed(bits=2, mode="dense")), run(changed(bits=2))
    assert sparse_count(dense) == 0 and sparse_count(paper) > 0
    assert paper.after.mean_kl < dense.after.mean_kl


def test_what_is_measured_is_what_is_kept(run, tmp_path: Path) -> None:
    """The model, the codes and the numbers of a result belong together."""
    result = run()
    for target in result.prepared.targets:
        assert torch.equal(target.weight(), result.weights[target.name].dequantize())
    original = prepare_again(result)
    windows = result.prepared.windows
    measured = mean_loss(result.model, windows) - mean_loss(original, windows)
    assert result.diagnosis.delta_loss == pytest.approx(measured, abs=1e-6)
    assert result.diagnosis.original_loss == pytest.approx(mean_loss(original, windows), abs=1e-6)
    assert result.before.perplexity == pytest.approx(
        torch.tensor(mean_loss(original, result.prepared.eval_windows)).exp()
    )
    assert result.after.perplexity == pytest.approx(
        torch.tensor(mean_loss(result.model, result.prepared.eval_windows)).exp()
    )
    for block, found in result.diagnosis.block_delta_loss.items():
        mixed = copy.deepcopy(original)
        for target in find_linears(mixed):
            if target.block == block:
                target.set_weight(result.weights[target.name].dequantize())
        assert found == pytest.approx(mean_loss(mixed, windows) - mean_loss(original, windows), abs=1e-6)
    assert not any(p.requires_grad or p.grad is not None for p in result.model.parameters())
    assert result.peak_memory > 1e6 and all(seconds >= 0 for seconds in result.seconds.values())
    rows = result_rows(result_numbers(result, requant.save(result, tmp_path / "out")))
    assert {row[""] for row in rows} >= {"perplexity", "bits per weight, whole file", "peak memory", "report"}


def test_a_run_that_takes_long_on_a_cpu_is_said_before(
    run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_run: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("requant.pipeline.quantize.allocate_bits", refuse)  # the first work of a run
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not caplog.text
    monkeypatch.setattr("requant.pipeline.planning.quicker.SLOW_RUN", 1e-6)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert "this run takes about" in caplog.text and "on this CPU" in caplog.text


@pytest.mark.parametrize(
    ("call", "first_work"), [("quantize", "pipeline.quantize"), ("score", "report.score")]
)
def test_windows_that_are_too_long_are_said_before(
    tiny_folder, tiny_text_file: Path, monkeypatch: pytest.MonkeyPatch, caplog, call: str, first_work: str
) -> None:
    def refuse(_run: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"requant.{first_work}.allocate_bits", refuse)
    for name in ("RISE", "CERTAIN"):  # whatever the loss of a model without training
        monkeypatch.setattr(f"requant.evaluation.perplexity.{name}", -100.0)
    options = {"method": "rtn", "mode": "dense", "code_bits": 4, "seq_len": 32, "num_samples": 4}
    with pytest.raises(KeyboardInterrupt):
        getattr(requant, call)(tiny_folder("llama"), text=tiny_text_file, **options)
    assert "windows of 32 tokens are probably longer" in caplog.text


@pytest.mark.parametrize("context", [32, 48])
def test_windows_that_are_too_long_are_said_once(run, monkeypatch, caplog, context: int) -> None:
    """Of the text that is scored as well, at the beginning, and not again when it is."""
    for name in ("RISE", "CERTAIN"):
        monkeypatch.setattr(f"requant.evaluation.perplexity.{name}", -100.0)
    run(changed(evaluation={"context": context}))
    assert caplog.text.count(f"windows of {context} tokens are probably longer") == 1
    assert caplog.text.count("probably longer") == 1


def test_the_same_recipe_gives_the_same_bytes(run, tmp_path: Path) -> None:
    recipe = changed(detach={"temperatures": (1.0,), "steps": 1})
    result = run(recipe)
    first = requant.save(result, tmp_path / "a")
    recorded = load_recipe(str(first / "recipe.yaml"))  # as in the checkpoint: model and text by their names
    again = requant.save(requant.quantize(str(result.prepared.source), recorded, quiet=False), tmp_path / "b")
    assert sha256(again) == sha256(first)
    assert (first / "recipe.yaml").read_text() == (again / "recipe.yaml").read_text()
    assert sha256(requant.save(run(dataclasses.replace(recipe, seed=1)), tmp_path / "c")) != sha256(first)


def test_a_skipped_matrix_stays_as_it_is(run, tmp_path: Path) -> None:
    result = run(changed(skip=("down_proj", "*.0.self_attn.*"), mode="dense"))
    assert len(result.weights) == 14 - 2 - 4
    model = requant.load(requant.save(result, tmp_path / "out"))
    original = prepare_again(result)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(model.get_parameter(name), original.get_parameter(name))


def test_statistics_in_chunks_give_the_same_bytes(run, tmp_path: Path, monkeypatch) -> None:
    whole = requant.save(run(), tmp_path / "whole")
    monkeypatch.setattr("requant.run.statistics.free_memory", lambda device: 1)  # a chunk a block
    result = run()
    assert sha256(requant.save(result, tmp_path / "parts")) == sha256(whole)


@pytest.mark.parametrize(
    "chosen",
    [
        {
            "mode": "best",
            "method": "trellis",
            "budget": {"bits": 2.5},
            "finetune": {"steps": 1, "tokens_per_step": 32, "rounds": 2, "val_windows": 1},
        },
        {"mode": "dense", "method": "gptq", "budget": {"bits": 4.5}},
        {"mode": "dense", "method": "gptq", "calibration": {"inputs": "quantized"}},
    ],
    ids=["rounds", "dense", "sequential"],
)
@pytest.mark.usefixtures("greedy_trellis_codes")
def test_one_chunk_of_statistics_at_a_time(run, monkeypatch, chosen: dict) -> None:
    """While a chunk is collected, at most one matrix of the last one is held, that of the loop which asks for the next."""
    monkeypatch.setattr("requant.run.statistics.free_memory", lambda device: 1)  # a chunk a block
    collected: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def watched(*arguments, **options) -> dict[str, LinearStats]:
        held.append(sum(each() is not None for each in collected))
        found = collect(*arguments, **options)
        hessians = {id(each.hessian): each.hessian for each in found.values()}  # siblings share one
        collected.extend(weakref.ref(each) for each in hessians.values())
        return found

    for module in ("requant.run.statistics", "requant.run.quantize_linears", "requant.pipeline.best"):
        monkeypatch.setattr(f"{module}.collect", watched)
    run(changed(**chosen))
    assert len(held) > 1 and max(held) <= 1


def test_chunks_hold_whole_blocks(run, monkeypatch) -> None:
    from requant.pipeline.preparation.prepare import start
    from requant.run.workspace import Workspace

    prepared = run(changed(mode="dense", method="rtn")).prepared
    context = start(prepared, RECIPE, workspace=Workspace(None), quiet=True)
    needs = frozenset({"fisher"})
    assert [len(chunk) for chunk in chunks_that_fit(context, prepared.targets, needs)] == [14]
    monkeypatch.setattr("requant.run.statistics.free_memory", lambda device: 1)
    assert [{s.block for s in chunk} for chunk in chunks_that_fit(context, prepared.targets, needs)] == [
        {0},
        {1},
    ]
    assert chunks_that_fit(context, [], needs) == []
    together = bytes_needed(prepared.targets, needs).total()
    monkeypatch.setattr("requant.run.statistics.free_memory", lambda device: 2 * together)
    for beside, chunks in ((together // 2, 1), (together, 2)):  # what one matrix is quantized in
        monkeypatch.setattr("requant.run.statistics.working_bytes", lambda *_, beside=beside: beside)
        assert len(chunks_that_fit(context, prepared.targets, needs)) == chunks


def test_a_disagreement_is_said(run) -> None:
    """PQI sums to 0.3 - 0.1 = 0.2; what that says depends on the measured dF and on what fine-tuning changed."""
    result = run(changed(mode="dense", method="rtn"))

    def found(scores: dict[str, float], delta_loss: float, other_params_delta: float = 0.0):
        diagnosis = dataclasses.replace(
            result.diagnosis,
            predicted={"pqi": scores} if scores else {},
            delta_loss=delta_loss,
            other_params_delta=other_params_delta,
        )
        return diagnosis.disagreement, dataclasses.replace(result, diagnosis=diagnosis).warnings

    scores = {"q_proj": 0.3, "k_proj": -0.1}
    disagreement, warnings = found(scores, 0.25)  # 0.05 of 0.25
    assert disagreement == pytest.approx(0.2)
    assert len(warnings) == 1 and "differs from the measured dF by 20.0%: use more nodes" in warnings[0]
    many = dataclasses.replace(result.recipe, sensitivity=Sensitivity(nodes="gauss4"))
    (warning,) = dataclasses.replace(result, recipe=many, diagnosis=dataclasses.replace(
        result.diagnosis, predicted={"pqi": scores}, delta_loss=0.25, other_params_delta=0.0,
    )).warnings  # fmt: skip
    assert "more nodes are not likely to help" in warning
    disagreement, warnings = found(scores, 0.202)  # 0.002 of 0.202: below the two percent that are tolerated
    assert disagreement == pytest.approx(0.0099, abs=1e-5) and warnings == []
    assert found(scores, 0.25, 0.05) == (pytest.approx(0.0), [])  # fine-tuned parameters explain the rest
    disagreement, warnings = found(scores, 0.01, -0.2)  # gains cancel costs: 0.01 of the larger, 0.2
    assert disagreement == pytest.approx(0.05) and len(warnings) == 1
    assert found(scores, 0.0) == (None, []) and found({}, 0.25) == (None, [])
    result = run(changed(mode="dense", method="rtn"), "qwen3-moe")  # tokens may change their experts
    _, warnings = found(scores, 0.25)
    said = [warning for warning in warnings if "differs from the measured dF by 20.0%" in warning]
    assert len(said) == 1 and "more nodes do not change" in said[0]


def test_texts(tiny_folder, tiny_text_file: Path, tmp_path: Path, caplog) -> None:
    folder = str(tiny_folder("llama"))

    def prepared(**texts):
        return prepare(
            folder, changed(calibration=texts.get("calibration", {}), evaluation=texts.get("evaluation", {}))
        )

    one = prepared(calibration={"text": (str(tiny_text_file),)})
    assert one.evaluation.name == "tiny.txt (last tenth, held out)"
    whole = one.calibration.text + one.evaluation.text
    assert whole == tiny_text_file.read_text() and len(one.evaluation.text) == pytest.approx(
        len(whole) / 10, abs=2
    )
    assert not caplog.messages
    (tmp_path / "other.jsonl").write_text('{"body": "' + "entirely different words here. " * 20 + '"}\n')
    two = prepared(
        calibration={"text": (str(tiny_text_file),)},
        evaluation={"text": (str(tmp_path / "other.jsonl"),), "field": "body"},
    )
    assert two.calibration.text == whole and two.evaluation.name == "other.jsonl" and not caplog.messages
    prepared(calibration={"text": (str(tiny_text_file),)}, evaluation={"text": (str(tiny_text_file),)})
    assert "100% of the evaluation text tiny.txt is also in the calibration text" in caplog.text
    assert "give another --eval-text" in caplog.text


def test_the_demo_is_scored_on_the_other_half(caplog) -> None:
    prepared = prepare("demo", RECIPE)
    assert prepared.source == DEMO and prepared.calibration.name == "demo (written by a model)"
    assert prepared.evaluation.name == "demo-eval (written by a model)" and not caplog.messages


def test_calibration_on_the_models_own_text(tiny_folder, tiny_text_file: Path) -> None:
    recipe = changed(calibration={"text": ("self",)}, evaluation={"text": (str(tiny_text_file),)})
    first, again = (prepare(str(tiny_folder("llama")), recipe) for _ in range(2))
    assert first.windows.shape == (4, 32) and torch.equal(first.windows, again.windows)


def test_devices() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("score", ["hessian", pytest.param("gradient", marks=pytest.mark.slow)])
def test_the_other_scores_run_too(run, score: str) -> None:
    result = run(changed(sensitivity=Sensitivity(score=score)))
    assert sparse_count(result) > 0


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "gpt2"))]
)
def test_corrected_inputs_bring_outputs_nearer(
    tiny_model, tokenizer, tiny_text_file: Path, name: str
) -> None:
    """The error of the last hidden states, which compensation within a matrix alone cannot know."""

    def error(inputs: str) -> float:
        recipe = changed(method="gptq", mode="dense", calibration={"num_samples": 16, "inputs": inputs})
        model = tiny_model(name)
        result = requant.quantize(model, recipe, tiny_text_file, tokenizer=tokenizer)
        windows = result.prepared.windows
        body, original = (getattr(m, m.base_model_prefix) for m in (result.model, tiny_model(name)))
        return float((body(windows)[0] - original(windows)[0]).square().mean())

    assert error("corrected") < 0.9 * error("original")


@pytest.mark.parametrize("inputs", ["quantized", "corrected"])
def test_sequential_calibration_resumes_where_it_stopped(
    run, tmp_path: Path, monkeypatch, inputs: str
) -> None:
    """Stopped before the ninth matrix, in the middle of the second block: the same codes, and nothing done twice."""
    recipe = changed(method="gptq", mode="dense", calibration={"inputs": inputs})
    whole = run(recipe)
    own, calls = METHODS["gptq"], []

    def stopping(*args, **options):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return own.quantize(*args, **options)

    monkeypatch.setitem(METHODS, "gptq", dataclasses.replace(own, quantize=stopping))
    with pytest.raises(KeyboardInterrupt):
        run(recipe, workspace=Workspace(tmp_path / "work.partial"))
    resumed = run(recipe, workspace=Workspace(tmp_path / "work.partial", resume=True))
    assert len(calls) == 8 + 1 + (14 - 8)
    for name, weight in whole.weights.items():
        assert torch.equal(weight.dequantize(), resumed.weights[name].dequantize())
