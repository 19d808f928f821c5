"""The texts of a run, for calibration and evaluation: defaults, reading them, and cutting them into windows of tokens."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.errors import ModelError, TextError
from requant.models.loading import DEMO, load_tokenizer
from requant.recipe.schema import Recipe
from requant.text.sources import NAMED_SETS, SELF, WIKITEXT, Text, read_text
from requant.text.windows import (
    check_holds_a_window,
    count_tokens,
    overlap,
    sample_self,
    token_windows,
)

HELD_OUT = " (last tenth, held out)"
READ = 1 << 26  # bytes of text files that are read to count what they hold


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Both, in windows."""

    calibration: Text
    windows: Int64[Tensor, "b t"]  # all of the calibration text
    evaluation: Text
    eval_windows: Int64[Tensor, "e c"]
    overlap: float  # the share of the evaluation text that is calibration text too


def calibration_text(source: Path | None, recipe: Recipe) -> Text | None:
    """The text to calibrate on; None where the model is to write it."""
    given = recipe.calibration.text
    if list(given) == [SELF]:
        return None
    if not given:
        return _usual_text("demo" if source == DEMO else f"{WIKITEXT}:train", recipe.calibration.field)
    return read_text(given, field=recipe.calibration.field)


def evaluation_text(source: Path | None, recipe: Recipe) -> Text | None:
    """The text to score; None where the last tenth of the calibration text is held out for that."""
    if recipe.evaluation.text:
        return read_text(recipe.evaluation.text, field=recipe.evaluation.field)
    if recipe.calibration.text and source != DEMO:
        return None
    return _usual_text("demo-eval" if source == DEMO else f"{WIKITEXT}:test", recipe.evaluation.field)


def names_of_texts(source: Path, recipe: Recipe) -> tuple[str, str]:
    """Which texts these will be, for calibration and for evaluation, for a plan that reads none."""
    usual = ("demo", "demo-eval") if source == DEMO else (f"{WIKITEXT}:train", f"{WIKITEXT}:test")
    calibration, evaluation = (
        ", ".join(given) for given in (recipe.calibration.text, recipe.evaluation.text)
    )
    if calibration and not evaluation and source != DEMO:
        evaluation = f"{calibration}{HELD_OUT}"
    return calibration or usual[0], evaluation or usual[1]


def windows_there(folder: Path, recipe: Recipe) -> tuple[float, float]:
    """About how many windows the recipe's texts hold, for calibration and for evaluation, for a plan that reads no weights.

    Counted are text files on this machine of up to READ bytes, where the model's folder has a tokenizer, and text that the
    model is to write, as much as the recipe takes; others hold infinitely many. Raises TextError for what the run refuses.
    """
    given, demo = recipe.calibration.text, folder == DEMO
    seq_len, context = recipe.calibration.seq_len, recipe.evaluation.context
    held_out = bool(given) and not demo and not recipe.evaluation.text
    if list(given) == [SELF]:
        count = recipe.calibration.num_samples
        return (0.9 * count, 0.1 * count * seq_len / context) if held_out else (count, math.inf)
    try:
        tokenizer = load_tokenizer(str(folder))
    except ModelError:  # a folder with nothing but config.json
        return math.inf, math.inf
    calibration = calibration_text(folder, recipe) if _is_here(given or demo * ("demo",)) else None
    evaluation = None
    if held_out:
        calibration, evaluation = (None, None) if calibration is None else held_out_tenth(calibration)
    elif _is_here(recipe.evaluation.text or demo * ("demo-eval",)):
        evaluation = evaluation_text(folder, recipe)

    def windows_of(text: Text | None, length: int) -> float:
        if text is None:
            return math.inf
        tokens = count_tokens(text, tokenizer)
        check_holds_a_window(text, tokens, length)
        return tokens // length

    return windows_of(calibration, seq_len), windows_of(evaluation, context)


def _is_here(sources: Sequence[str]) -> bool:
    """Whether all of these are named sets or files that take no time to read."""
    files = [os.path.expanduser(source) for source in sources if source not in NAMED_SETS]
    return bool(sources) and all(map(os.path.isfile, files)) and sum(map(os.path.getsize, files)) <= READ


def held_out_tenth(whole: Text) -> tuple[Text, Text]:
    """The text for calibration and, its last tenth, that for evaluation."""
    cut = len(whole.text) * 9 // 10
    return (
        Text.from_documents(whole.name, [whole.text[:cut]]),
        Text.from_documents(f"{whole.name}{HELD_OUT}", [whole.text[cut:]]),
    )


def _usual_text(name: str, field: str) -> Text:
    """What is read where the user names no text; so an error has to say how to name one."""
    try:
        return read_text(name, field=field)
    except TextError as error:
        raise TextError(f"{error} It is read because no --calibration was given.") from error


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
        calibration, evaluation = held_out_tenth(calibration)
    lengths = recipe.calibration.seq_len, recipe.evaluation.context
    with ThreadPoolExecutor(1) as executor:  # one after the other: threads may not share a tokenizer

        def windows_of(text: Text, length: int, seed: int = 0) -> Future[Int64[Tensor, "b t"]]:
            return executor.submit(
                token_windows, text, tokenizer, num_samples=None, seq_len=length, seed=seed
            )

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
