"""The order of stages: model + text -> codes + sparse part -> measured, saved.

prepare      load, find the matrices, check everything that can be checked before work begins
allocate     bits of every matrix, and of embedding and head, within the budget (allocation.py)
quantize     one of MODES: `best` (rounds of codes and training), `dense` (codes only), `paper` (ReQuant as published)
tune         what is not code learns from the original's outputs (training/tuning.py)
diagnose     predicted against measured dF
evaluate     perplexity and KL, the original beside the quantized model
save         checkpoint, report, model card (saving.py)
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.allocation import TOLERANCE, Allocation, allocate_bits, with_allocation
from requant.best import best
from requant.diagnosis import DISAGREEMENT, Diagnosis, diagnose
from requant.errors import InputError, ModelError, TextError
from requant.evaluation import Quality, perplexity_and_kl
from requant.memory import peak_memory
from requant.models import (
    DEMO,
    LinearSite,
    check_finite,
    context_limit,
    find_linears,
    load_model,
    load_tokenizer,
    resolve_source,
)
from requant.outcomes import keep_outcome, kept_outcome
from requant.paper import requant_as_published
from requant.quantizing import quantize_linears
from requant.recipe import Recipe
from requant.reporting.samples import Sample, write_samples
from requant.run import Run, Weights, fingerprint
from requant.sensitivity import originals
from requant.text import SELF, Text, overlap, read_text, sample_self, spread, token_windows
from requant.training.tuning import tune
from requant.vocabulary import QuantizedVocabulary, quantize_vocabulary
from requant.workspace import Workspace

logger = logging.getLogger(__name__)

MODES: dict[str, Callable[[Run], Weights]] = {
    "best": best,
    "dense": lambda run: quantize_linears(run, None, label="quantize"),
    "paper": requant_as_published,
}
DIAGNOSED_TOKENS = 4096  # the prediction holds on any text: it is an identity; few tokens keep it cheap
OVERLAP_TOLERATED = 0.01
WIKITEXT = (
    "Salesforce/wikitext:wikitext-2-raw-v1"  # what the paper calibrates on, where nothing else is named
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model and its texts, checked."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Path | None  # the model's folder; None for one that was built in memory
    sites: Sequence[LinearSite]
    calibration: Text
    windows: Int64[Tensor, "b t"]
    pool: Int64[Tensor, "p t"]  # the windows that tuning may train on
    evaluation: Text
    scored: Int64[Tensor, "e c"]


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """The outcome of a run: `model` holds the quantized weights as floats, `weights` the codes."""

    prepared: Prepared
    weights: Weights
    vocabulary: Weights  # embedding and head, where they are quantized; of tied ones the embedding
    allocation: Allocation | None
    recipe: Recipe
    before: Quality
    after: Quality
    diagnosis: Diagnosis
    seconds: dict[str, float]
    peak_memory: int  # bytes, of the GPU where there is one, else of the process
    samples: Sequence[Sample] = ()  # of what it writes

    @property
    def model(self) -> PreTrainedModel:
        return self.prepared.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.prepared.tokenizer

    @property
    def warnings(self) -> list[str]:
        found = []
        share = self.diagnosis.disagreement
        if share is not None and share > DISAGREEMENT:
            found.append(
                f"The sum of PQI differs from the measured dF by {share:.1%}: use more nodes "
                "(sensitivity.nodes: gauss4) or more calibration text before trusting the ranking."
            )
        if self.allocation is not None and self.allocation.unspent > TOLERANCE:
            found.append(
                f"The matrices are too few to spend the budget: {self.allocation.unspent:.2%} of it stays unspent."
            )
        return found

    def save(self, output: str | Path) -> Path:
        """Write the checkpoint folder, whole or not at all."""
        from requant.saving import save_quantized

        return save_quantized(self, output)


def quantize(
    model: str | PreTrainedModel,
    recipe: Recipe,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    workspace: Workspace | None = None,
    quiet: bool = True,
) -> QuantizedModel:
    """Quantize a model as the recipe says and measure what it cost; nothing is written.

    `model` is a source (folder, hub name, alias, `demo`) or a loaded model, whose weights are then overwritten;
    `text` replaces the recipe's calibration text. Raises RequantError.
    """
    if not isinstance(model, str):
        recipe = dataclasses.replace(recipe, model=model.name_or_path or type(model).__name__)
    if text is not None:  # the recipe in the checkpoint says what was done
        names = (str(text),) if isinstance(text, str | Path) else tuple(map(str, text))
        recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, text=names))
    prepared = prepare(model, recipe, tokenizer=tokenizer, device=device, dtype=dtype, quiet=quiet)
    run = start(prepared, recipe, workspace=workspace or Workspace(None), quiet=quiet)
    run = with_allocation(run, allocate_bits(run))
    weights = MODES[recipe.mode](run)
    run.statistics.clear()
    if recipe.tuning.steps:
        weights = tuned(run, weights)
    vocabulary = quantize_vocabulary(run)
    diagnosis = diagnose(
        run,
        weights,
        diagnosed_windows(prepared),
        names=("gradient", "hessian", "pqi"),
        vocabulary=vocabulary,
        by_matrix=True,
    )
    before, after = evaluate(run, prepared, weights, vocabulary)
    samples = _samples(run, prepared, weights, vocabulary)
    return QuantizedModel(
        prepared=prepared,
        weights=weights,
        vocabulary=dict(vocabulary.weights),
        allocation=run.allocation,
        recipe=recipe,
        before=before,
        after=after,
        diagnosis=diagnosis,
        samples=samples,
        seconds=dict(run.seconds),
        peak_memory=peak_memory(prepared.model.device),
    )


def prepare(
    model: str | PreTrainedModel,
    recipe: Recipe,
    text: str | Path | Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quiet: bool = True,
) -> Prepared:
    """Load what the run needs and refuse what cannot work."""
    model, tokenizer, source = _opened(model, tokenizer, device=device, dtype=dtype)
    sites = find_linears(model, skip=recipe.skip)
    check_finite(model)
    _check_context(model, recipe)
    given = [str(t) for t in ([text] if isinstance(text, str | Path) else text or recipe.calibration.text)]
    calibration, evaluation = _texts(model, tokenizer, source, recipe, given, quiet=quiet)
    everything = token_windows(
        calibration, tokenizer, num_samples=None, seq_len=recipe.calibration.seq_len, seed=recipe.seed
    )
    windows = spread(everything, recipe.calibration.num_samples, of=calibration.name)
    tuning = max(len(windows), recipe.tuning.windows if recipe.tuning.steps else 0)
    scored = token_windows(evaluation, tokenizer, num_samples=None, seq_len=recipe.evaluation.context)
    shared = overlap(calibration, evaluation)
    if shared > OVERLAP_TOLERATED:
        logger.warning(
            "%.0f%% of the evaluation text %s also stands in the calibration text %s: the perplexity will "
            "flatter; give another --eval-text.",
            100 * shared,
            evaluation.name,
            calibration.name,
        )
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        source=source,
        sites=sites,
        calibration=calibration,
        windows=windows,
        pool=spread(everything, tuning, of=None),
        evaluation=evaluation,
        scored=scored[: recipe.evaluation.windows],
    )


def start(prepared: Prepared, recipe: Recipe, *, workspace: Workspace, quiet: bool) -> Run:
    """The context of the stages."""
    if prepared.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(prepared.model.device)
    return Run(
        model=prepared.model,
        sites=prepared.sites,
        original=originals(prepared.sites),
        windows=prepared.windows,
        pool=prepared.pool,
        recipe=recipe,
        workspace=workspace,
        fingerprint=fingerprint(prepared.model, prepared.sites, prepared.windows),
        source=prepared.source,
        quiet=quiet,
    )


def tuned(run: Run, weights: Weights) -> Weights:
    """The weights after tuning, through the workspace."""
    kept = kept_outcome(run, "tuned")
    if kept is None:
        with run.stage("tuning"):
            kept = tune(run, weights, run.recipe.tuning)
        keep_outcome(run, "tuned", kept)
    return kept


def diagnosed_windows(prepared: Prepared) -> Int64[Tensor, "d t"]:
    """The calibration windows that sums are predicted and measured on."""
    return prepared.windows[: max(1, DIAGNOSED_TOKENS // prepared.windows.shape[1])]


def evaluate(
    run: Run, prepared: Prepared, weights: Weights, vocabulary: QuantizedVocabulary
) -> tuple[Quality, Quality]:
    """Quality of the original and of the quantized model on the evaluation text; the model is left quantized."""
    with run.stage("evaluation"):
        path = run.path(weights)
        path.place(0.0)
        vocabulary.place(quantized=False)
        reference = copy.deepcopy(prepared.model)
        path.place(1.0)
        vocabulary.place(quantized=True)
        after = perplexity_and_kl(
            prepared.model,
            prepared.scored,
            text=prepared.evaluation,
            reference=reference,
            progress=not run.quiet,
        )
    assert after.reference_perplexity is not None
    return Quality(protocol=after.protocol, perplexity=after.reference_perplexity), after


def _samples(run: Run, prepared: Prepared, weights: Weights, vocabulary: QuantizedVocabulary) -> list[Sample]:
    """What the original and the quantized model write; the model is left quantized."""

    def place(quantized: bool) -> None:
        run.path(weights).place(float(quantized))
        vocabulary.place(quantized=quantized)

    with run.stage("samples"):
        count = run.recipe.evaluation.samples
        return write_samples(prepared.model, prepared.tokenizer, prepared.scored, place, count=count)


def pick_device(name: str) -> str:
    """`auto` is the GPU where torch sees one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name} is unknown; give auto, cpu, cuda or cuda:NUMBER.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here; use --device cpu."
        )
    return name


def _opened(
    model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, device: str, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Path | None]:
    """The model, frozen, with its tokenizer and its folder if it has one."""
    if isinstance(model, str):
        folder = resolve_source(model)
        return *load_model(folder, device=pick_device(device), dtype=dtype), Path(folder)
    source = Path(resolve_source(model.name_or_path)) if model.name_or_path else None
    if tokenizer is None and source is None:
        raise ModelError("a model that was built in memory needs its tokenizer; give tokenizer=.")
    found = load_tokenizer(str(source)) if tokenizer is None else tokenizer
    return model.requires_grad_(False).eval(), found, source


def _check_context(model: PreTrainedModel, recipe: Recipe) -> None:
    limit = context_limit(model.config)
    for option, length in (
        ("--seq-len", recipe.calibration.seq_len),
        ("evaluation.context", recipe.evaluation.context),
    ):
        if limit is not None and length > limit:
            raise TextError(
                f"{option} {length} is longer than the model's {limit} positions; use {option} {limit}."
            )


def _texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    recipe: Recipe,
    given: Sequence[str],
    *,
    quiet: bool,
) -> tuple[Text, Text]:
    """Calibration and evaluation text; with one text for both, its last tenth is held out and scored."""
    demo = source == DEMO
    names = given or ["demo" if demo else f"{WIKITEXT}:train"]
    if list(names) == [SELF]:
        tokens = recipe.calibration.num_samples * recipe.calibration.seq_len
        calibration = sample_self(model, tokenizer, num_tokens=tokens, seed=recipe.seed, progress=not quiet)
    else:
        calibration = read_text(names, field=recipe.calibration.field)
    scored = recipe.evaluation.text or (("demo-eval",) if demo else () if given else (f"{WIKITEXT}:test",))
    if scored:
        return calibration, read_text(scored, field=recipe.evaluation.field)
    cut = len(calibration.text) * 9 // 10
    return (
        Text.from_documents(calibration.name, [calibration.text[:cut]]),
        Text.from_documents(f"{calibration.name} (last tenth, held out)", [calibration.text[cut:]]),
    )
