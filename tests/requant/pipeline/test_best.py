"""Mode `best`: rounds of codes and training end nearer to the original than codes alone, in the bytes that were promised."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import requant
from requant.errors import RequantError
from requant.evaluation.perplexity import perplexity_and_kl
from requant.formats.quantized_weight import QuantizedWeight
from requant.inference.quant_linear import QuantLinear
from requant.pipeline.quantized_model import QuantizedModel
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.report.report import render_report
from requant.report.summary import run_summary
from requant.run.rounds import rounds_of
from requant.run.workspace import Workspace

FINETUNE = Finetune(steps=20, tokens_per_step=256, warmup_steps=2, val_windows=2, eval_every=10, lr=1e-2)

BRIEF = dataclasses.replace(FINETUNE, steps=4, eval_every=2)  # for what needs no quality


def recipe(
    text: Path, *, mode: str = "best", method: str = "kmeans", finetune: Finetune = FINETUNE, **changes
) -> Recipe:
    return Recipe(
        mode=mode,
        method=method,
        quantizer=METHODS[method].config(bits=2),
        calibration=Calibration(text=(str(text),), num_samples=16, seq_len=32),
        evaluation=Evaluation(context=32, windows=8, samples=0),
        finetune=finetune,
        **changes,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is read of a result whose model is used again."""

    mean_kl: float
    bytes: int
    budget: int
    weights: Mapping[str, QuantizedWeight]


@pytest.fixture(scope="module")
def without_outliers(tiny_model, trained_state, tokenizer, tiny_text_file: Path) -> Callable[[str], Run]:
    """Runs of a mode at 3 bits, each made when it is first asked for."""
    made: dict[str, Run] = {}

    def of(mode: str) -> Run:
        if mode not in made:
            model = tiny_model("llama")
            model.load_state_dict(trained_state)
            finetune = FINETUNE if mode == "best" else Finetune()
            chosen = recipe(
                tiny_text_file, mode=mode, finetune=finetune, budget=Budget(bits=3.0, outliers=False)
            )
            result = requant.quantize(model, chosen, tokenizer=tokenizer)
            assert result.allocation is not None
            made[mode] = Run(
                mean_kl=result.after.mean_kl,
                bytes=result.allocation.bytes,
                budget=result.allocation.budget,
                weights=result.weights,
            )
        return made[mode]

    return of


@pytest.fixture
def quantized(trained_model, tokenizer, tiny_text_file: Path):
    def run(**changes) -> QuantizedModel:
        return requant.quantize(trained_model, recipe(tiny_text_file, **changes), tokenizer=tokenizer)

    return run


def test_best_of_more_rounds_trains_after_each(quantized, monkeypatch) -> None:
    trained: list[int] = []
    monkeypatch.setattr(
        "requant.pipeline.best.train",
        lambda _run, _teacher, _trainables, derived, *_, **__: trained.append(len(derived)),
    )
    result = quantized(budget=Budget(bits=3.0), finetune=dataclasses.replace(FINETUNE, rounds=6))
    sizes = [len(members) for members in rounds_of(result.prepared.targets, 6)]
    assert trained == [sum(sizes[: i + 1]) for i in range(5)]
    assert sum(sizes) == len(result.weights)


def test_training_has_windows_that_the_model_wrote_in_front_of_the_texts(
    quantized, trained_state, trained_model, tokenizer, tiny_text_file, tmp_path, monkeypatch
) -> None:
    """Those of the text that validate stay; a run that resumes writes none again, and trains on the same."""
    monkeypatch.setattr("requant.inference.own_text.PREFIX", 8)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        "requant.pipeline.quantize.finetune",
        lambda run, weights, *_: seen.append(run.train_windows) or dict(weights),
    )
    chosen = recipe(
        tiny_text_file, mode="dense", finetune=dataclasses.replace(FINETUNE, steps=1, own_windows=5)
    )
    workspace = Workspace(tmp_path / "w")
    result = requant.quantize(trained_model, chosen, tokenizer=tokenizer, workspace=workspace)
    text = result.prepared.train_windows
    (found,) = seen
    assert torch.equal(found[5:], text) and torch.equal(found[:5, :8], text[:5, :8])
    assert (found[:5] != text[:5]).any(1).all()
    assert "own text" in result.seconds
    written = run_summary(result, tmp_path / "out")
    assert (written.training_windows, written.own_windows) == (len(text), 5)
    assert (
        f"Training used {len(text):,} windows of that text and 5 that the original model wrote itself."
        in render_report(written)
    )
    monkeypatch.setattr(
        "requant.pipeline.quantize.own_windows", lambda *_, **__: pytest.fail("written again")
    )
    trained_model.load_state_dict(trained_state)
    for file in (tmp_path / "w").glob("finetuned-*"):
        file.unlink()
    workspace._unlock()
    requant.quantize(
        trained_model, chosen, tokenizer=tokenizer, workspace=Workspace(tmp_path / "w", resume=True)
    )
    assert torch.equal(seen[1], found)


def test_best_beats_its_own_codes_at_the_same_bytes(without_outliers) -> None:
    best, dense = without_outliers("best"), without_outliers("dense")
    assert best.bytes == dense.bytes <= best.budget
    assert best.mean_kl < 0.8 * dense.mean_kl


def test_what_was_measured_is_what_is_saved(quantized, tmp_path: Path, trained_state) -> None:
    """Norms and embeddings learn too: the folder holds them, and the integral accounts for them."""
    result = quantized(budget=Budget(bits=3.0, head_bits=16.0, embedding_bits=16.0))
    diagnosis = result.diagnosis
    assert abs(diagnosis.other_params_delta) > 1e-4 * abs(diagnosis.delta_loss)
    assert diagnosis.total("pqi") + diagnosis.other_params_delta == pytest.approx(
        diagnosis.delta_loss, rel=0.03
    )
    requant.save(result, tmp_path / "out")
    loaded = requant.load(tmp_path / "out")
    for name, layer in loaded.named_modules():
        if isinstance(layer, QuantLinear):
            assert torch.equal(layer.quantized().dequantize(), result.weights[name].dequantize())
    changed = [
        n for n, p in loaded.named_parameters() if n in trained_state and not torch.equal(p, trained_state[n])
    ]
    assert any("norm" in name for name in changed) and any("embed" in name for name in changed)
    found = perplexity_and_kl(loaded, result.prepared.eval_windows, text=result.prepared.evaluation)
    assert found.perplexity == pytest.approx(result.after.perplexity, rel=1e-4)


def test_skipped_matrices_do_not_learn(quantized, trained_state) -> None:
    skip = ("*.down_proj", "model.layers.0.self_attn.q_proj")
    result = quantized(budget=Budget(bits=3.0), skip=skip, finetune=BRIEF)
    state = result.model.state_dict()
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(state[name], trained_state[name])
    assert not torch.equal(state["model.norm.weight"], trained_state["model.norm.weight"])


@pytest.mark.slow
def test_the_page_accounts_for_what_learned_beside(quantized, tmp_path: Path) -> None:
    result = quantized(budget=Budget(bits=3.0), finetune=BRIEF)
    requant.save(result, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert (
        "finetuned norms, biases and embedding" in page
        and f"{result.diagnosis.other_params_delta:+.4f}" in page.replace("\u2212", "-")
    )


def test_a_run_that_resumes_ends_in_the_same_weights(
    trained_model, trained_state, tokenizer, tiny_text_file: Path, tmp_path: Path, monkeypatch
) -> None:
    chosen = recipe(tiny_text_file, budget=Budget(bits=3.0), finetune=BRIEF)

    def run(resume: bool) -> QuantizedModel:
        trained_model.load_state_dict(trained_state)
        workspace = Workspace(tmp_path / "work.partial", resume=resume)
        return requant.quantize(trained_model, chosen, tokenizer=tokenizer, workspace=workspace)

    first = run(resume=False)
    norms = {name: p.clone() for name, p in first.model.named_parameters() if "norm" in name}
    monkeypatch.setattr(
        "requant.pipeline.best.codes_of_round", lambda *_, **__: pytest.fail("the rounds ran again")
    )
    monkeypatch.setattr("requant.pipeline.quantize.finetune", lambda *_: pytest.fail("finetuning ran again"))
    again = run(resume=True)
    for name, weight in again.weights.items():
        assert torch.equal(weight.dequantize(), first.weights[name].dequantize())
    assert all(torch.equal(p, again.model.get_parameter(name)) for name, p in norms.items())
    assert again.after.mean_kl == first.after.mean_kl


@pytest.mark.parametrize(
    ("rounds", "training"), [(None, "best"), pytest.param(0, "quantize", marks=pytest.mark.slow)]
)
def test_training_that_does_not_fit_leaves_codes_to_write(
    trained_model,
    trained_state,
    tokenizer,
    tiny_text_file: Path,
    tmp_path: Path,
    monkeypatch,
    rounds,
    training,
) -> None:
    """The remedy that the sentence names works; at the end only, when all codes are made, none is made again."""
    made: list[str] = []
    own = METHODS["kmeans"]

    def counting(*args, **options):
        made.append("codes")
        return own.quantize(*args, **options)

    def exhausted(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(METHODS, "kmeans", dataclasses.replace(own, quantize=counting))
    where = {"best": "requant.pipeline.best.train", "quantize": "requant.finetune.final.train"}[training]
    monkeypatch.setattr(where, exhausted)
    finetune = BRIEF if rounds is None else dataclasses.replace(BRIEF, rounds=rounds)

    def run(resume: bool, finetune: Finetune) -> QuantizedModel:
        trained_model.load_state_dict(trained_state)
        chosen = recipe(tiny_text_file, budget=Budget(bits=3.0), finetune=finetune)
        workspace = Workspace(tmp_path / "work.partial", resume=resume)
        return requant.quantize(trained_model, chosen, tokenizer=tokenizer, workspace=workspace)

    without = "and --resume writes the codes without it" if rounds == 0 else "makes codes anew, without it"
    with pytest.raises(
        RequantError, match=f"^training does not fit in memory; .* --finetune-steps 0 {without}"
    ):
        run(False, finetune)
    before = len(made)
    result = run(True, dataclasses.replace(finetune, steps=0))
    assert result.weights and before > 0
    if rounds == 0:
        assert len(made) == before == len(result.weights)


@pytest.mark.slow
def test_rounds_may_match_hidden_states_too(quantized, without_outliers) -> None:
    """At the same bytes the weights differ, and the end is no worse than codes alone."""
    matched, codes = without_outliers("best"), without_outliers("dense")
    assert FINETUNE.hidden_weight > 0
    settings = dataclasses.replace(FINETUNE, hidden_weight=0.0)
    plain = quantized(budget=Budget(bits=3.0, outliers=False), finetune=settings)
    assert plain.weights.keys() == matched.weights.keys()
    assert any(
        not torch.equal(weight.dequantize(), matched.weights[name].dequantize())
        for name, weight in plain.weights.items()
    )
    assert matched.mean_kl < codes.mean_kl
