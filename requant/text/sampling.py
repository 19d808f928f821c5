"""Sampling from a model: nucleus sampling with a key-value cache and its own random generator.

The next token is drawn from the smallest set of tokens that holds `top_p` of `softmax(logits / temperature)`
(Holtzman et al. 2019, arXiv:1904.09751). The global random state is neither read nor changed, so the same
seed on the same machine gives the same text whatever ran before.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from requant.errors import NumericalError
from requant.progress import tracked
from requant.text.kv_cache import takes_cache, with_cache

# A temperature below which a logit that is a thousandth smaller is e^100 times less likely; far below, quotients overflow
GREEDY_BELOW = 1e-5


def sample_next(
    logits: Float[Tensor, "b v"],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    generator: torch.Generator,
) -> Int64[Tensor, "b 1"]:
    """One token per row [b, 1] from logits [b, vocabulary]; a temperature of 0 or next to it takes the most likely.

    `top_k` leaves only that many tokens, `min_p` those that are at least so likely, relative to the likeliest.
    Raises NumericalError for logits that are not finite.
    """
    if not logits.isfinite().all():
        raise NumericalError(
            "the model's next-token logits hold NaN or infinity, so nothing can be sampled: load it in "
            "float32 or bfloat16, and check the checkpoint with `requant inspect`."
        )
    if temperature < GREEDY_BELOW:
        return logits.argmax(-1, keepdim=True)
    probabilities, order = (logits.float() / temperature).softmax(-1).sort(-1, descending=True)
    if top_p < 1.0:  # sums in float32 come to 1 before the last tokens
        mass_before = probabilities.cumsum(-1) - probabilities
        probabilities[mass_before >= top_p] = 0.0
    probabilities[probabilities < min_p * probabilities[:, :1]] = 0.0
    if top_k is not None:
        probabilities[:, top_k:] = 0.0
    return order.gather(-1, torch.multinomial(probabilities, 1, generator=generator))


@torch.inference_mode()
def sample_documents(
    model: PreTrainedModel,
    *,
    start: int,
    end: int | None,
    batch_size: int,
    max_tokens: int,
    generator: torch.Generator,
    top_p: float = 1.0,
    progress: bool = False,
) -> list[list[int]]:
    """`batch_size` documents of at most `max_tokens` tokens, each begun from the token `start`.

    A document ends before the first `end` token; what its row of the batch samples afterwards is dropped.
    """
    tokens = torch.full((batch_size, 1), start, device=model.device)
    text = tokens[:, :0]
    finished = torch.zeros(batch_size, dtype=torch.bool, device=model.device)
    columns, cache = [], DynamicCache(config=model.config) if takes_cache(model) else None
    for _ in tracked(range(max_tokens), label="sampling text" if progress else None, unit="tokens"):
        if cache is None:
            text = torch.cat([text, tokens], dim=1)
        output = model(text if cache is None else tokens, **with_cache(model, cache))
        tokens = sample_next(output.logits[:, -1], top_p=top_p, generator=generator)
        columns.append(tokens)
        finished |= tokens[:, 0] == (-1 if end is None else end)
        if finished.all():
            break
    rows = torch.cat(columns, dim=1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]
