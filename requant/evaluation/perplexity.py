"""The cost of quantization: perplexity, KL divergence to the original, top-1 agreement.

Every window predicts its tokens 2..context from those before it. Over the T scored tokens, with p the distribution of the
original and q that of the quantized model:

    perplexity = exp( 1/T sum_t -log q_t(x_t) )
    KL         = 1/T sum_t sum_v p_t(v) (log p_t(v) - log q_t(v))        nats per token
    top-1      = fraction of t with argmax p_t = argmax q_t

The error of the mean KL is that of the mean over windows, s / sqrt(n), since the tokens of a window are not independent. Two
models scored on the same windows differ by less than their errors suggest, so `mean_difference` pairs them by window.

A number means nothing without its protocol, so `Protocol` (text, hash, context, windows) is stored with it. Trust KL more
than perplexity: at 3 bits three seeds of one method differed by 1.5 % in perplexity and by 0.6 % in KL, and adapting to
the calibration text improves perplexity, not KL.
"""

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.hidden_states import after_blocks
from requant.errors import ModelError, NumericalError, TextError
from requant.evaluation.original import OriginalLogits
from requant.progress import tracked
from requant.text.sources import Text
from requant.text.windows import check_has_rows

RISE = 0.25  # nats a token: by how much loss may be higher in the second half of windows without a warning
CERTAIN = 4.0  # standard errors of that rise
PROBED = 4  # windows that tell it

CHUNK_ELEMENTS = 2**24  # log-softmax runs over this many float32 logits at once: 64 MiB

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What was scored: token perplexity of the concatenated text, in windows of `context` tokens."""

    text: str
    sha256: str
    context: int
    windows: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"token perplexity of {self.text} (sha256 {self.sha256[:12]}), {self.windows} windows of "
            f"{self.context} tokens, {self.tokens} tokens scored"
        )


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One model's result; comparisons with the original are None where there was no original."""

    protocol: Protocol
    perplexity: float
    reference_perplexity: float | None = None  # of the original, on the same windows
    mean_kl: float | None = None
    p99_kl: float | None = None
    top1_agreement: float | None = None
    window_kl: tuple[float, ...] = ()  # mean KL of each window, in the order of the text

    @property
    def kl_error(self) -> float | None:
        """Standard error of the mean KL; None without a reference, or for one window."""
        return standard_error(self.window_kl)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@torch.inference_mode()
def perplexity_and_kl(
    model: PreTrainedModel,
    windows: Int64[Tensor, "s t"],
    *,
    text: Text,
    reference: PreTrainedModel | OriginalLogits | None = None,
    batch_size: int = 1,
    progress: bool = False,
) -> Quality:
    """The quality of `model` on the windows of `text`, and its distance to `reference` if there is one.

    At most two batches of logits exist at once, in the models' own dtype; log-softmax runs in float32 on
    slices of them. Leave `batch_size` at 1 when the vocabulary is large; it is 1 where the reference is OriginalLogits,
    which must be of the same windows. Of several processes each scores its share of the windows.

    Raises:
        TextError: windows longer than the model's positions, or tokens outside its vocabulary.
        ModelError: the two vocabularies differ.
        NumericalError: logits with NaN or infinity.
    """
    models = [model]
    if isinstance(reference, OriginalLogits):
        batch_size = 1
        models.append(reference.model)
    elif reference is not None:
        models.append(reference)
    for each in models:
        _check_windows(each, windows)
    training = [each.training for each in models]
    for each in models:
        each.eval()
    scores: list[Tensor] = []
    try:
        starts, label = ranks.mine(range(0, len(windows), batch_size)), "scoring" if progress else None
        each_batch = [windows[start : start + batch_size] for start in starts]
        at = after_blocks(model, windows, each_batch, label=label)
        for index, start in enumerate(tracked(starts, label=label, unit="batches")):
            batch = each_batch[index]
            with at(index):
                logits = _logits(model, batch, start)
            original = None if reference is None else _logits(reference, batch, start)
            rows: list[Tensor] = []
            for row, window in enumerate(batch):
                reference_logits = None if original is None else original[row, :-1]
                rows.append(_score(logits[row, :-1], window[1:], reference_logits))
            scores.append(torch.cat(rows, dim=1))
    finally:
        for each, mode in zip(models, training, strict=True):
            each.train(mode)
    return _quality(torch.cat(ranks.merged_tensors(scores), dim=1), windows, text)


def _quality(scores: Float[Tensor, "r p"], windows: Int64[Tensor, "s t"], text: Text) -> Quality:
    """Means and quantiles of the scores of all positions, in rows as `_score` gives them."""
    quantized, *compared = scores.double()
    protocol = Protocol(
        text=text.name,
        sha256=text.sha256,
        context=windows.shape[1],
        windows=len(windows),
        tokens=quantized.numel(),
    )
    if not compared:
        return Quality(protocol=protocol, perplexity=_perplexity(quantized))
    original_loss, kl, agreement = compared
    return Quality(
        protocol=protocol,
        perplexity=_perplexity(quantized),
        reference_perplexity=_perplexity(original_loss),
        mean_kl=kl.mean().item(),
        p99_kl=kl.kthvalue(math.ceil(0.99 * kl.numel())).values.item(),
        top1_agreement=agreement.mean().item(),
        window_kl=tuple(kl.view(len(windows), -1).mean(1).tolist()),
    )


@torch.inference_mode()
def warn_of_long_windows(model: PreTrainedModel, *texts: Int64[Tensor, "_ _"]) -> None:
    """Before long work on windows of these texts: say it if an unquantized model predicts their ends worse than their
    beginnings, by PROBED windows of the text whose windows are longest.

    With more text before them tokens are easier, unless windows are longer than those that the model was trained on: a
    configuration may allow more positions.
    """
    halved = [windows for windows in texts if len(windows) > 1 and windows.shape[1] > 2]
    if not halved:
        return
    windows = max(halved, key=lambda each: each.shape[1])
    _check_windows(model, windows)
    probed = windows[:PROBED].split(1)
    at, rows = after_blocks(model, windows, probed), []
    for index, window in enumerate(probed):
        with at(index):
            logits = model(window.to(model.device), use_cache=False).logits[0, :-1]
        rows.append(_score(logits, window[0, 1:], None))
    losses = torch.cat(rows)
    length = losses.shape[1]
    first, second = losses[:, : length // 2].mean(1), losses[:, length // 2 :].mean(1)
    rises = (second - first).tolist()
    error = standard_error(rises)
    if error is not None and statistics.fmean(rises) > max(RISE, CERTAIN * error):
        logger.warning(
            "windows of %d tokens are probably longer than those that the model was trained on: its loss is %.2f nats a "
            "token in their first half and %.2f in the second; give a shorter --seq-len, or --context when scoring",
            length + 1,
            first.mean(),
            second.mean(),
        )


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of independent values; None for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def mean_difference(values: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Mean of `values` less that of `others`, paired, and its standard error; None unless there are two pairs or more."""
    if len(values) != len(others):
        return None
    pairs = [one - other for one, other in zip(values, others, strict=True)]
    error = standard_error(pairs)
    return None if error is None else (statistics.fmean(pairs), error)


def _check_windows(model: PreTrainedModel, windows: Int64[Tensor, "s t"]) -> None:
    if windows.shape[0] < 1 or windows.shape[1] < 2:
        raise TextError(f"windows of shape {tuple(windows.shape)} hold no token to score: give more text.")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and windows.shape[1] > positions:
        raise TextError(
            f"a context of {windows.shape[1]} tokens is longer than the model's {positions} positions: "
            f"set --context {positions} or less."
        )
    check_has_rows(windows, model)


def _logits(
    model: PreTrainedModel | OriginalLogits, batch: Int64[Tensor, "b t"], start: int
) -> Float[Tensor, "b t v"]:
    if isinstance(model, OriginalLogits):
        logits = model[start]
    else:
        logits = model(batch.to(model.device), use_cache=False).logits
    extremes = torch.stack(logits.aminmax(dim=-1))  # NaN where any is; no copy as large as the logits
    if not extremes.isfinite().all():
        raise NumericalError(
            f"the model's logits hold NaN or infinity in window {start} or the batch it begins: evaluate in "
            "float32 or bfloat16 (--dtype), and check the checkpoint with `requant inspect`."
        )
    return logits


def _score(
    logits: Float[Tensor, "t v"], targets: Int64[Tensor, " t"], original: Float[Tensor, "t u"] | None
) -> Float[Tensor, "r t"]:
    """Rows a position: loss and, with an original, the original's loss, KL and agreement; on the CPU."""
    if original is not None and original.shape[1] != logits.shape[1]:
        raise ModelError(
            f"the models predict {logits.shape[1]} and {original.shape[1]} tokens, and KL needs one "
            "vocabulary: give the model that the checkpoint was made from."
        )
    targets = targets.to(logits.device)[:, None]
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = []
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        quantized = logits[part].float().log_softmax(-1)
        rows = [-quantized.gather(-1, targets[part])[:, 0]]
        if original is not None:
            expected = original[part].to(quantized.device).float().log_softmax(-1)
            rows.append(-expected.gather(-1, targets[part])[:, 0])
            rows.append((expected.exp() * (expected - quantized)).sum(-1))
            rows.append((expected.argmax(-1) == quantized.argmax(-1)).float())
        parts.append(torch.stack(rows).cpu())
    return torch.cat(parts, dim=1)


def _perplexity(losses: Float[Tensor, " t"]) -> float:
    return math.exp(min(losses.mean().item(), 700.0))  # a broken model's loss must not overflow a float
