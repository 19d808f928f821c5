"""`requant generate`: what runs a checkpoint."""

from typing import Annotated

import typer

from requant.cli.common import Device, Dtype


def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Text from a quantized model."""
    from requant.comparison import generate_text

    print(
        generate_text(
            checkpoint,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            device=device,
            dtype=dtype,
        )
    )
