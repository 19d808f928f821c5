"""What the numbers of a run say against its result, in words: a damaged model, a file that grew, a wrong prediction.

KL is in nats per token: on text that the original writes, the quantized model's perplexity is exp(KL) times as high. At
DAMAGED_KL that is two thirds more; the limits are chosen, not derived from a measurement.
"""

import math

from requant.display import format_bytes
from requant.quantizers.registry import find_method
from requant.report.report import RunSummary

DAMAGED_KL = 0.5  # nats per token
DAMAGED_AGREEMENT = 0.6  # of the most likely tokens
HARMLESS_KL = 0.05  # nats per token: below, tokens that differ were as good as equally likely
SURPRISE = 2.0  # times: predicted and measured loss that differ by more
LEAST_LOSS = 0.01  # nats per token: smaller losses are noise of the text


def verdicts(run: RunSummary) -> list[str]:
    """A sentence each, with the remedy; empty where nothing is to be said."""
    found = [_damage(run), _growth(run), _surprise(run)]
    return [sentence for sentence in found if sentence is not None]


def is_damaged(kl: float, agreement: float) -> bool:
    """Whether a model with this KL, nats per token, and this share of the original's most likely tokens is of little use."""
    return kl >= DAMAGED_KL or (kl >= HARMLESS_KL and agreement < DAMAGED_AGREEMENT)


def _damage(run: RunSummary) -> str | None:
    quality = run.after
    if quality is None or quality.mean_kl is None or quality.top1_agreement is None:
        return None
    if not is_damaged(quality.mean_kl, quality.top1_agreement):
        return None
    remedies = [_larger_budget(run)] if run.bits < 16 else []
    if _little_text(run):
        remedies.insert(0, "more calibration text (--num-samples)")
    if run.mode == "sparse":
        remedies.append("plain codes (`requant quantize`)")
    elif run.mode != "best" or run.method != "trellis":
        remedies.append("--mode best --method trellis")
    if "finetuning" not in run.seconds:
        remedies.append("--finetune-steps 100")
    return (
        f"The model is damaged: KL is {quality.mean_kl:.2f} nats per token (perplexity times "
        f"{math.exp(quality.mean_kl):.1f} on the original's own text) and {quality.top1_agreement:.0%} of the most likely "
        f"tokens are the original's; give {' or '.join(remedies)}."
    )


def _little_text(run: RunSummary) -> bool:
    """Whether codes were fitted to inputs on fewer tokens than a matrix has columns, which do not determine its Hessian."""
    tokens = run.calibration.num_samples * run.calibration.seq_len
    return "hessian" in find_method(run.method).needs and tokens < max(
        (row.k for row in run.matrices), default=0
    )


def _larger_budget(run: RunSummary) -> str:
    """How to ask for a larger budget: by the option that the run was given, for they exclude one another."""
    if run.budget is None:
        return "more --bits" if run.mode == "sparse" else "more --code-bits"
    return "a larger --size" if run.budget.written == run.bytes_after else "more --bits"


def _growth(run: RunSummary) -> str | None:
    if run.bytes_after < run.bytes_before:
        return None
    return (
        f"The weight files did not shrink: {format_bytes(run.bytes_before)} before, {format_bytes(run.bytes_after)} now, "
        f"at {run.bits_per_weight:.2f} stored bits per weight; give fewer --bits, or a method that stores less beside its "
        "codes (`requant methods`)."
    )


def _surprise(run: RunSummary) -> str | None:
    """Codes alone were predicted: training and a sparse part may do better, but nothing should do worse."""
    if run.budget is None or run.budget.predicted is None or run.delta_loss is None:
        return None
    predicted = run.budget.predicted
    measured = run.delta_loss + (run.embedding_and_head_delta or 0.0)
    if max(predicted, measured) < LEAST_LOSS:
        return None
    better = measured * SURPRISE < predicted and run.mode == "dense" and "finetuning" not in run.seconds
    if not better and measured <= SURPRISE * predicted:
        return None
    remedy = "give more calibration text"
    if run.budget.predictor != "measured":
        remedy = "set budget.predictor: measured in the recipe"
    return (
        f"The budget predicted a loss of {predicted:.3f} nats per token, but {measured:.3f} were measured: the bits of the "
        f"matrices may be far from the best; {remedy}, or read the measured numbers only."
    )
