"""`requant generate`: a prompt and the model's continuation, as text."""

from typing import Any

import torch

from requant.errors import InputError, TextError
from requant.inference.decode import generate_tokens
from requant.inference.load import open_served
from requant.models.devices import on_its_gpu, pick_device
from requant.models.loading import (
    context_limit,
    load_config,
    load_tokenizer,
    resolve_source,
)
from requant.text.chat import ChatTemplate
from requant.text.windows import check_has_rows


@on_its_gpu
def generate_text(
    checkpoint: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat: bool = False,
    device: str,
    dtype: str,
) -> str:
    """`prompt` and what the model goes on with, as text; with `chat`, the answer to the message `prompt`.

    Raises RequantError.
    """
    if not -(1 << 63) <= seed < 1 << 63:
        raise InputError(f"--seed {seed} has more than 64 bits; give a smaller one.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise TextError("--prompt is not UTF-8; give text in that encoding.") from error
    folder, where = resolve_source(checkpoint), pick_device(device)
    tokenizer = load_tokenizer(folder)
    if chat:
        template = ChatTemplate(tokenizer)
        prompt = template.render([{"role": "user", "content": prompt}])
        template.close()
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).to(
        where
    )  # a template has them
    length = tokens["input_ids"].shape[1]
    if length == 0:
        raise TextError("--prompt holds no token; give the text to go on from.")
    limit = context_limit(load_config(folder))
    if limit is not None and length + max_new_tokens > limit:
        raise TextError(
            f"the prompt's {length} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} "
            "positions; shorten one of them."
        )
    model: Any = open_served(folder, device=where, dtype=dtype)
    check_has_rows(tokens["input_ids"], model)
    ends = model.generation_config.eos_token_id
    written = generate_tokens(
        model,
        tokens["input_ids"],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=torch.Generator(where).manual_seed(seed),  # the caller's generator stays
        end=frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends),
    )
    shown = [] if chat else tokens["input_ids"][0].tolist()
    return str(tokenizer.decode(shown + written, skip_special_tokens=True))
