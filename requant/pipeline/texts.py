"""The texts of a run, for calibration and evaluation: defaults, reading them, and cutting them into windows of tokens."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.errors import TextError
from requant.models.loading import DEMO
from requant.recipe.schema import Recipe
from requant.text.sources import SELF, WIKITEXT, Text, read_text
from requant.text.windows import overlap, sample_self, token_windows


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Both, in windows."""

    calibration: Text
    windows: Int64[Tensor, "b t"]  # all of the calibration text
    evaluation: Text
    eval_windows: Int64[Tensor, "e c"]
    overlap: float  # the share of the evaluation text that is calibration text too


def calibration_text(source: Path | None, recipe: Recipe, given: Sequence[str]) -> Text | None:
    """None where the model is to write it."""
    if list(given) == [SELF]:
        return None
    if not given:
        return _usual_text("demo" if source == DEMO else f"{WIKITEXT}:train", recipe.calibration.field)
    return read_text(given, field=recipe.calibration.field)


def evaluation_text(source: Path | None, recipe: Recipe, given: Sequence[str]) -> Text | None:
    """None where the calibration text's last tenth is held out for it."""
    if recipe.evaluation.text:
        return read_text(recipe.evaluation.text, field=recipe.evaluation.field)
    if given and source != DEMO:
        return None
    return _usual_text("demo-eval" if source == DEMO else f"{WIKITEXT}:test", recipe.evaluation.field)


def _usual_text(name: str, field: str) -> Text:
    """What is read where the user names no text; so an error has to say how to name one."""
    try:
        return read_text(name, field=field)
    except TextError as error:
        raise TextError(f"{error}. It is read because no --calibration was given.") from error


def in_windows(
    calibration: Text,
    evaluation: Text | None,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    *,
    scored: bool,
) -> Texts:
    """The texts in windows; without one for evaluation the last tenth of the other is held out."""
    if evaluation is None:
        whole, name = calibration.text, calibration.name
        cut = len(whole) * 9 // 10
        calibration = Text.from_documents(name, [whole[:cut]])
        evaluation = Text.from_documents(f"{name} (last tenth, held out)", [whole[cut:]])
    lengths = recipe.calibration.seq_len, recipe.evaluation.context
    with ThreadPoolExecutor(1) as beside:  # one after the other: threads may not share a tokenizer

        def windows_of(text: Text, length: int, seed: int = 0) -> Future[Int64[Tensor, "b t"]]:
            return beside.submit(token_windows, text, tokenizer, num_samples=None, seq_len=length, seed=seed)

        windows = windows_of(calibration, lengths[0], recipe.seed)
        eval_windows = windows_of(evaluation, lengths[1])
        shared = overlap(calibration, evaluation) if scored else 0.0
    return Texts(
        calibration=calibration,
        windows=windows.result(),
        evaluation=evaluation,
        eval_windows=eval_windows.result(),
        overlap=shared,
    )


def sampled_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, *, quiet: bool
) -> Text:
    """As much calibration text as the recipe takes, sampled from the model."""
    tokens = recipe.calibration.num_samples * recipe.calibration.seq_len
    return sample_self(model, tokenizer, num_tokens=tokens, seed=recipe.seed, progress=not quiet)
