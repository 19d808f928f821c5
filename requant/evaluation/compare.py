"""`requant eval`: models and checkpoints by the names a user gives, all scored on the same tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from requant.checkpoint.header import read_json
from requant.checkpoint.sizes import byte_table
from requant.errors import CheckpointError, ModelError, TextError
from requant.evaluation.perplexity import Quality, perplexity_and_kl, warn_of_long_windows
from requant.inference.load import is_checkpoint, open_model
from requant.models.devices import on_its_gpu, pick_device
from requant.models.loading import DEMO, context_limit, load_config, load_tokenizer, resolve_source
from requant.models.safetensors_header import read_tensors
from requant.models.weight_files import folder_bytes, weight_files
from requant.recipe.defaults import DEMO_EVALUATION
from requant.text.sources import WIKITEXT, Text, read_text
from requant.text.windows import token_windows

CONTEXT = 2048  # of a window, where the model has as many positions


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model's line of the table."""

    name: str
    bits_per_weight: float | None
    size_bytes: int | None
    quality: Quality

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def cells(self) -> dict[str, object]:
        """The line of `format_table`."""
        quality = self.quality
        return {
            "model": self.name,
            "bits/weight": self.bits_per_weight,
            "MiB": None if self.size_bytes is None else self.size_bytes / 2**20,
            "perplexity": quality.perplexity,
            "mean KL": quality.mean_kl,
            "± KL": quality.kl_error,
            "p99 KL": quality.p99_kl,
            "top-1": quality.top1_agreement,
        }


@on_its_gpu
def evaluate_all(
    models: Sequence[str],
    *,
    text: Sequence[str] | None = None,
    context: int | None = None,
    windows: int | None = None,
    reference: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quiet: bool = True,
) -> list[Row]:
    """One row a model, in order, all on the first model's tokens; KL and agreement to `reference` if one is given.

    `context` None takes 2048 tokens, or all that the first model has positions for; for the demo, and what was made of it,
    512, as its runs do. Raises RequantError.
    """
    folders = [resolve_source(model) for model in models]
    original = None if reference is None else resolve_source(reference)
    where = pick_device(device)
    demo = any(map(_of_demo, [folders[0], original]))
    scored = read_text(list(text)) if text else _usual_text(demo)
    if context is None:
        usual = DEMO_EVALUATION.context if demo else CONTEXT
        context = min(usual, context_limit(load_config(folders[0])) or usual)
    tokenizer = load_tokenizer(folders[0])
    tokens = token_windows(scored, tokenizer, num_samples=None, seq_len=context)[:windows]
    named = dict(zip(folders, models, strict=True)) | ({} if original is None else {original: reference})
    for folder, name in named.items():
        _check_can_be_scored(folder, name, tokens)
        if folder != folders[0] and _other_tokens(folder, tokenizer, tokens):
            remedy = "give the model that the checkpoints were made from"
            if folder in folders:
                remedy = "score it in a run of its own"
            raise ModelError(
                f"{name} has another vocabulary than {models[0]}, and all are scored on the tokens of the first: {remedy}."
            )
    reference_model = None if original is None else open_model(original, device=where, dtype=dtype)
    if reference_model is not None:
        warn_of_long_windows(reference_model, tokens)
    bits = [byte_table(each).bits_per_weight if is_checkpoint(each) else None for each in folders]
    sizes = [folder_bytes(each) for each in folders]
    rows = []
    for name, folder, bits_per_weight, size_bytes in zip(models, folders, bits, sizes, strict=True):
        model = open_model(folder, device=where, dtype=dtype)
        if reference_model is None:
            warn_of_long_windows(model, tokens)
        quality = perplexity_and_kl(model, tokens, text=scored, reference=reference_model, progress=not quiet)
        del model  # before the next one takes its memory
        rows.append(Row(name=name, bits_per_weight=bits_per_weight, size_bytes=size_bytes, quality=quality))
    return rows


def _check_can_be_scored(folder: str, name: str | None, tokens: Int64[Tensor, "s t"]) -> None:
    """Raise RequantError before the first model is scored for what would end the run at this one."""
    limit = context_limit(load_config(folder))
    if limit is not None and tokens.shape[1] > limit:
        raise TextError(
            f"{name}: a context of {tokens.shape[1]} tokens is longer than the model's {limit} positions: "
            f"set --context {limit} or less."
        )
    read_tensors(weight_files(folder))  # the headers: a file that is truncated


def _other_tokens(folder: str, tokenizer: PreTrainedTokenizerBase, tokens: Int64[Tensor, "s t"]) -> bool:
    """Whether ids of the text mean something else to this model, whose perplexity would be that of other words."""
    try:
        own = load_tokenizer(folder)
    except ModelError:  # only the first model needs one
        return False
    ids: list[int] = torch.unique(tokens).tolist()
    if ids[-1] >= len(own):
        return True
    return own.convert_ids_to_tokens(ids) != tokenizer.convert_ids_to_tokens(ids)


def _usual_text(demo: bool) -> Text:
    """What is scored where no text is named."""
    try:
        return read_text("demo-eval" if demo else f"{WIKITEXT}:test")
    except TextError as error:
        raise TextError(f"{error} It is read because no --text was given.") from error


def _of_demo(folder: str | None) -> bool:
    """Whether this is the demo, or a checkpoint that says it was made of it."""
    report = Path(folder or "") / "report.json"
    if folder is None or folder == str(DEMO) or not report.is_file():
        return folder == str(DEMO)
    try:
        return read_json(report).get("model") == "demo"
    except CheckpointError:  # of a stranger: it decides nothing but a default
        return False
