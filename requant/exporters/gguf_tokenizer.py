"""The tokenizer in a GGUF file: llama.cpp has its own tokenizers, which must split text exactly as tokenizer.json does.

| tokenizer.json | llama.cpp's model | what it needs |
| --- | --- | --- |
| byte-level BPE (Llama 3, Qwen) | `gpt2` | merges, and the name of the pattern that splits text before merging |
| BPE with byte fallback (Llama 2, Mistral) | `llama` | scores: the pair whose token has the highest score merges first |

Patterns are looked up by their behaviour. Scores are minus the token's id, which reproduces the order of the list of merges
if the ids of their results ascend (as in files converted from SentencePiece). A tokenizer that is neither kind is refused,
because another tokenizer would split text differently and silently make the model worse.
"""

import re
from pathlib import Path
from typing import Any

from requant.checkpoint.header import read_json
from requant.errors import InputError, class_and_first_line
from requant.models.loading import load_tokenizer

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|%s|\s+(?!\S)|\s+"
_CONTRACTIONS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|", r"'(?i:[sdmt]|ll|ve|re)|")  # two ways to write one set
_NEWLINES = (r"\s*[\r\n]+", r"\s*[\r\n]")  # \s* takes newlines too: both end at the last one
PRE_TOKENIZERS: dict[str, str] = {  # pattern of the Split before ByteLevel -> llama.cpp's name
    head + _WORDS % (digits, newlines): name
    for digits, name in ((r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2"))
    for head in _CONTRACTIONS
    for newlines in _NEWLINES
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's kinds of tokens
SPACE = "\u2581"  # what SentencePiece replaces a space by


def add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    """Tokens, merges or scores, special tokens and chat template. Raises InputError for what llama.cpp has no name for."""
    description = read_json(folder / "tokenizer.json")
    try:
        _add(writer, folder, config, description)
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # the file is untrusted
        raise InputError(
            f"{folder / 'tokenizer.json'} cannot be read ({class_and_first_line(error)}); "
            "download the checkpoint again, or export --to dense."
        ) from error


def _add(writer: Any, folder: Path, config: Any, description: dict[str, Any]) -> None:
    from gguf import SpecialVocab

    pieces = description.get("model", {}).get("byte_fallback", False)
    name = None if pieces else pre_tokenizer(description)
    spaced = starts_with_space(description) if pieces else False
    tokens, kinds = _tokens(description, size=config.vocab_size)
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre(name or "default")
    writer.add_token_list(tokens)
    if pieces:
        writer.add_token_scores([float(-index) for index in range(len(tokens))])
        writer.add_add_space_prefix(spaced)
    writer.add_token_types(kinds)
    special = SpecialVocab(folder, load_merges=not pieces, n_vocab=len(tokens))
    special.add_special_token["bos"] = _begins_with_bos(folder, special.special_token_ids.get("bos"))
    special.add_to_gguf(writer, quiet=True)


def pre_tokenizer(description: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer.json splits text before its merges."""
    found = description.get("pre_tokenizer") or {}
    steps: list[dict[str, Any]] = (
        (found.get("pretokenizers") or []) if found.get("type") == "Sequence" else [found]
    )
    kinds = [step.get("type") for step in steps]
    normal = description.get("normalizer") is None or description["normalizer"].get("type") == "NFC"
    if description.get("model", {}).get("type") == "BPE" and normal:
        spaced = steps[-1].get("add_prefix_space") if steps else None
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not spaced:
            return "gpt-2"
        if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True) and not spaced:
            name = PRE_TOKENIZERS.get(str(steps[0].get("pattern", {}).get("Regex")))
            if name is not None and steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
                return name
    raise InputError(
        f"tokenizer.json splits text ({' + '.join(map(str, kinds)) or 'not at all'}) in a way that GGUF export has no "
        "llama.cpp name for; export --to dense and convert that folder with llama.cpp's convert_hf_to_gguf.py."
    )


def starts_with_space(description: dict[str, Any]) -> bool:
    """Whether a BPE with byte fallback puts a space before a text; refuses one that is not a SentencePiece model."""
    model, normalizer = description["model"], description.get("normalizer") or {}
    before = description.get("pre_tokenizer") or {}
    vocabulary = model.get("vocab", {})
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
    results = [vocabulary.get("".join(pair), -1) for pair in pairs]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    kinds = [step.get("type") for step in steps]
    replaced = [step for step in steps if step.get("type") == "Replace"]
    if results == sorted(results) and model.get("type") == "BPE":
        if not before and kinds in (["Prepend", "Replace"], ["Replace"]):
            prepended = steps[0].get("prepend", SPACE) == SPACE
            if prepended and (replaced[0].get("pattern"), replaced[0].get("content")) == (
                {"String": " "},
                SPACE,
            ):
                return kinds[0] == "Prepend"
        if not kinds and before.get("type") == "Metaspace" and before.get("replacement") == SPACE:
            return before.get("prepend_scheme", "always") != "never"
    raise InputError(
        f"tokenizer.json is a BPE with byte fallback that is not a SentencePiece model (normalizer {kinds or None}, "
        f"pre-tokenizer {before.get('type')}); export --to dense and convert that folder with llama.cpp's "
        "convert_hf_to_gguf.py."
    )


def _tokens(description: dict[str, Any], *, size: int) -> tuple[list[str], list[int]]:
    """Token strings and kinds by id; rows of the embedding that no token uses get a placeholder."""
    names: dict[int, str] = {index: token for token, index in description["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, NORMAL)
    if description["model"].get("byte_fallback"):
        kinds |= {index: BYTE for index, name in names.items() if re.fullmatch("<0x[0-9A-F]{2}>", name)}
    for added in description.get("added_tokens", []):
        names[added["id"]] = added["content"]
        unknown = added["content"] == description["model"].get("unk_token")
        kinds[added["id"]] = UNKNOWN if unknown else CONTROL if added.get("special") else USER_DEFINED
    if max(names) >= size:
        raise InputError(
            f"tokenizer.json has token {max(names)}, but the model's embedding has {size} rows; use its own tokenizer."
        )
    return (
        [names.get(index, f"[PAD{index}]") for index in range(size)],
        [kinds.get(index, UNUSED) for index in range(size)],
    )


def _begins_with_bos(folder: Path, bos: int | None) -> bool:
    """Whether the tokenizer adds a BOS token; otherwise llama.cpp decides by the name of the pre-tokenizer."""
    return bos is not None and load_tokenizer(str(folder))("a")["input_ids"][:1] == [bos]
