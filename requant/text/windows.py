"""From text to windows of tokens.

`token_windows` tokenises the whole text once, without special tokens, and takes window i of n at

    seq_len * floor(i * total / n),        total = number of whole windows in the text

so the windows are spaced evenly over the text, and with n = total they are the usual protocol of WikiText
perplexity. `sample_self` samples calibration text from the model itself (LLM-QAT: Liu et al. 2023,
arXiv:2305.17888). `requant.text.sources` reads the text.
"""

import logging
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from requant.errors import TextError
from requant.text.sampling import sample_documents
from requant.text.sources import SELF, Text

SHINGLE_WORDS = 13  # the n-gram of contamination checks since GPT-3 (Brown et al. 2020, arXiv:2005.14165)
HASH_FACTOR = 0x5851F42D4C957F2D  # odd; the multiplier of Knuth's MMIX generator
SELF_BATCH, SELF_TOKENS = 16, 1024  # documents sampled at once, and tokens of each at most
COUNTED, SLICES = 1 << 19, 128  # characters whose tokens are counted, in so many parts of a longer text
PART = 1 << 19  # characters of a text that a thread tokenizes; 8 million take 3 s of a core
AROUND = 1 << 10  # characters on either side of a cut between parts, whose tokens must not depend on it
LINE_START = re.compile(r"\n(?=[^\S\n]*\S)")

logger = logging.getLogger(__name__)


def token_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int | None,
    seq_len: int,
    seed: int = 0,
) -> Int64[Tensor, "s t"]:
    """`num_samples` windows of `seq_len` tokens, spread evenly over the text; None takes every whole window.

    A seed above 0 moves the first window by less than `seq_len` tokens, for another draw from the same text.
    A text with fewer windows than `num_samples` gives all it has, with a warning.

    Raises:
        TextError: not one whole window.
    """
    if seq_len < 2 or (num_samples is not None and num_samples < 1):
        raise TextError(
            f"num_samples {num_samples} x seq_len {seq_len} holds no token to predict: at least 1 x 2."
        )
    tokens = torch.tensor(_token_ids(text.text, tokenizer), dtype=torch.int64)
    check_holds_a_window(text, tokens.numel(), seq_len)
    if seed > 0:
        shifts = min(seq_len, tokens.numel() - seq_len + 1)
        shift = torch.randint(shifts, (1,), generator=torch.Generator().manual_seed(seed))
        tokens = tokens[int(shift) :]
    total = tokens.numel() // seq_len
    windows = tokens[: total * seq_len].view(total, seq_len)
    return windows if num_samples is None else spread(windows, num_samples, of=text.name)


def check_has_rows(tokens: Int64[Tensor, "..."], model: PreTrainedModel) -> None:
    """Raise TextError for a token that the model's embedding has no row for: a GPU would only say that an index is wrong."""
    embedding: Any = model.get_input_embeddings()
    rows: int = embedding.num_embeddings
    if tokens.numel() and (largest := int(tokens.max())) >= rows:
        raise TextError(
            f"the text holds token {largest}, and the model's embedding has {rows} rows: use the tokenizer of this model."
        )


def check_holds_a_window(text: Text, tokens: int, seq_len: int) -> None:
    """Raise TextError for a text of so many tokens that has not one whole window."""
    if tokens < seq_len:
        raise TextError(
            f"{text.name} holds {tokens} tokens and one window needs {seq_len}: lower --seq-len "
            "(--context when scoring), or give more text."
        )


def count_tokens(text: Text, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokens of a text; of one longer than COUNTED characters an estimate, by those of SLICES parts of it.

    Of WikiText, C4 and another text, of 1.3 to 8 million characters, within 0.9 %, in 0.4 s instead of up to 4.
    """
    total, length = len(text.text), COUNTED // SLICES
    if total <= COUNTED:
        return len(_token_ids(text.text, tokenizer))
    starts = [index * (total - length) // (SLICES - 1) for index in range(SLICES)]
    found = sum(len(_token_ids(text.text[start : start + length], tokenizer)) for start in starts)
    return found * total // (SLICES * length)


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a text, without special ones.

    Transformers asks its Rust tokenizers for the place of every token too, which takes more than half of the time.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # nor padding, as transformers sets it where neither is asked for
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens

    def encoded(parts: list[str]) -> list[int]:
        """The tokens of all parts, one after the other; the library's threads take a part each."""
        encodings = backend.encode_batch_fast(parts, add_special_tokens=False)
        return list(chain.from_iterable(encoding.ids for encoding in encodings))

    return encoded(_parts(text, encoded))


def _parts(text: str, encoded: Callable[[list[str]], list[int]]) -> list[str]:
    """The text in parts of about PART characters whose tokens, in turn, are those of the text.

    It is cut where a line begins, if what is AROUND the cut has the same tokens in one piece as in two. So it stays whole
    for a tokenizer that marks where a text begins, as some of SentencePiece do.
    """
    parts: list[str] = []
    first = 0
    for start in range(PART, len(text) - PART // 2, PART):
        if (line := LINE_START.search(text, start, start + PART // 2)) is None:
            continue
        cut = line.end()
        before, after = text[cut - AROUND : cut], text[cut : cut + AROUND]
        if encoded([before + after]) == encoded([before, after]):
            parts.append(text[first:cut])
            first = cut
    return [*parts, text[first:]]


def spread(windows: Int64[Tensor, "w t"], num_samples: int, *, of: str | None) -> Int64[Tensor, "s t"]:
    """`num_samples` evenly spaced windows; all of them if there are fewer, with a warning that names the text `of`."""
    total = len(windows)
    if total < num_samples:
        if of is not None:
            logger.warning(
                "%s holds %d windows of %d tokens, not the %d asked for, and all are used: give more text "
                "or lower --seq-len",
                of,
                total,
                windows.shape[1],
                num_samples,
            )
        return windows
    return windows[torch.arange(num_samples) * total // num_samples]


def overlap(calibration: Text, evaluation: Text) -> float:
    """The fraction of the evaluation text's 13-grams of words that also occur in the calibration text."""
    runs = _shingles(evaluation.text)
    return int(np.isin(runs, _shingles(calibration.text)).sum()) / len(runs)


def _shingles(text: str) -> Int64[np.ndarray, " r"]:
    """A hash for every run of 13 words; a shorter text is one run.

    A polynomial of the words' hashes, modulo 2^64: different runs have the same one as rarely as in any hash of 64 bits.
    """
    words = np.fromiter(map(hash, text.split()), np.int64)
    runs = np.ones(max(1, len(words) - SHINGLE_WORDS + 1), np.int64)
    for place in range(min(SHINGLE_WORDS, len(words))):
        runs = runs * HASH_FACTOR + words[place : place + len(runs)]
    return runs


def sample_self(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_tokens: int,
    seed: int = 0,
    progress: bool = False,
) -> Text:
    """At least `num_tokens` tokens of text written by the model, begun from its start (or end) token.

    Temperature 1 without truncation: the text is then an unbiased sample of the model's distribution.

    Raises:
        TextError: the tokenizer has neither token, or the model writes next to nothing.
    """
    end = cast(int | None, tokenizer.eos_token_id)
    start = end if tokenizer.bos_token_id is None else cast(int, tokenizer.bos_token_id)
    if start is None:
        raise TextError(
            "the tokenizer has neither a start nor an end of text token to begin from: give a text file."
        )
    limit = min(SELF_TOKENS, getattr(model.config, "max_position_embeddings", None) or SELF_TOKENS)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    documents: list[str] = []
    found = 0
    while found < num_tokens:
        rows = sample_documents(
            model,
            start=start,
            end=end,
            batch_size=SELF_BATCH,
            max_tokens=limit - 1,
            generator=generator,
            progress=progress,
        )
        written = [
            text for row in rows if (text := str(tokenizer.decode(row, skip_special_tokens=True)).strip())
        ]
        if not written:
            raise TextError(
                "the model ends every text where it begins: calibrate on a file instead of `self`."
            )
        documents += written
        found = len(_token_ids("\n\n".join(documents), tokenizer))
    return Text.from_documents(SELF, documents)
