"""`requant generate`, `requant bench`: what runs a checkpoint."""

import json
from typing import Annotated

import typer

from requant.cli.common import AsJson, Device, Dtype, say_what_is_loaded


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
    from requant.inference.generate import generate_text

    say_what_is_loaded()
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


def bench(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    batch: Annotated[str | None, typer.Option(help="Numbers of sequences, as 1,8,64.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of each prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=2, help="Written after each prompt.")] = None,
    against: Annotated[str | None, typer.Option(help="A model to measure beside it: the original.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Put torch.compile before a step.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Measure launch shapes first, and keep them.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Tokens a second and memory of a model."""
    from requant.evaluation import bench

    rows = bench.bench(
        checkpoint, against=against, batches=_batches(batch), prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        device=device, dtype=dtype, compiled=compile, tune=tune,
    )  # fmt: skip
    print(
        json.dumps([row.to_dict() for row in rows], indent=1)
        if as_json
        else bench.speed_table(rows, compared=against is not None)
    )


def _batches(text: str | None) -> list[int] | None:
    from requant.errors import InputError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--batch {text} is no list of whole numbers; give, for instance, 1,8,64.")
    return [int(part) for part in parts]
