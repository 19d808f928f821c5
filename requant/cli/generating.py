"""`requant generate`."""

from typing import Annotated

import typer

from requant.cli import options as opt
from requant.cli.common import importing, say_what_is_loaded


def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message; print the model's answer.")
    ] = False,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
) -> None:
    """Continue a prompt with a quantized model."""
    with importing():
        from requant.inference.generate import generate_text

    say_what_is_loaded()
    print(
        generate_text(
            checkpoint,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            chat=chat,
            device=device,
            dtype=dtype,
        )
    )
