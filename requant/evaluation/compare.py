"""`requant eval`: models and checkpoints by the names a user gives, all scored on the same tokens."""

from collections.abc import Sequence

from requant.checkpoint.sizes import byte_table
from requant.evaluation.perplexity import Candidate, Row, compare
from requant.inference.load import is_checkpoint, open_model
from requant.models.devices import pick_device
from requant.models.loading import (
    DEMO,
    context_limit,
    folder_bytes,
    load_config,
    load_tokenizer,
    resolve_source,
)
from requant.text.sources import WIKITEXT, read_text
from requant.text.windows import token_windows

CONTEXT = 2048  # of a window, where the model has as many positions


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

    `context` None takes 2048 tokens, or all that the first model has positions for. Raises RequantError.
    """
    folders = [resolve_source(model) for model in models]
    original = None if reference is None else resolve_source(reference)
    where = pick_device(device)
    names = (
        list(text) if text else ["demo-eval" if str(DEMO) in (folders[0], original) else f"{WIKITEXT}:test"]
    )
    scored = read_text(names)
    if context is None:
        context = min(CONTEXT, context_limit(load_config(folders[0])) or CONTEXT)
    tokens = token_windows(scored, load_tokenizer(folders[0]), num_samples=None, seq_len=context)
    reference_model = None if original is None else open_model(original, device=where, dtype=dtype)
    candidates = [
        _candidate(name, folder, where, dtype) for name, folder in zip(models, folders, strict=True)
    ]
    return compare(candidates, tokens[:windows], text=scored, reference=reference_model, progress=not quiet)


def _candidate(name: str, folder: str, device: str, dtype: str) -> Candidate:
    bits = byte_table(folder).bits_per_weight if is_checkpoint(folder) else None
    size = folder_bytes(folder)
    return Candidate(
        name=name,
        load=lambda: open_model(folder, device=device, dtype=dtype),
        bits_per_weight=bits,
        size_bytes=size,
    )
