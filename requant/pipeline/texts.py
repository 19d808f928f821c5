"""The texts of a run, for calibration and evaluation: which they are by default, read, and in windows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    usual = ["demo" if source == DEMO else f"{WIKITEXT}:train"]
    return read_text(given or usual, field=recipe.calibration.field)


def evaluation_text(source: Path | None, recipe: Recipe, given: Sequence[str]) -> Text | None:
    """None where the calibration text's last tenth is held out for it."""
    usual = ("demo-eval",) if source == DEMO else () if given else (f"{WIKITEXT}:test",)
    separate = recipe.evaluation.text or usual
    return read_text(separate, field=recipe.evaluation.field) if separate else None


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
    return Texts(
        calibration=calibration,
        windows=token_windows(
            calibration, tokenizer, num_samples=None, seq_len=recipe.calibration.seq_len, seed=recipe.seed
        ),
        evaluation=evaluation,
        eval_windows=token_windows(
            evaluation, tokenizer, num_samples=None, seq_len=recipe.evaluation.context
        ),
        overlap=overlap(calibration, evaluation) if scored else 0.0,
    )


def sampled_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, *, quiet: bool
) -> Text:
    """As much calibration text as the recipe takes, sampled from the model."""
    tokens = recipe.calibration.num_samples * recipe.calibration.seq_len
    return sample_self(model, tokenizer, num_tokens=tokens, seed=recipe.seed, progress=not quiet)
