"""`requant generate` and `requant bench`."""

import json
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


def bench(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    batch: Annotated[str | None, typer.Option(help="Batch sizes to measure, such as 1,8,64.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens written after each prompt.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="A second model to measure, such as the original.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile a decoding step with torch.compile.")
    ] = False,
    autotune: Annotated[
        bool,
        typer.Option("--autotune", help="Measure launch configs of the kernels first, and keep the best."),
    ] = False,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Tokens per second and memory of a model."""
    with importing():
        from requant.evaluation import bench

    rows = bench.bench(
        checkpoint, reference=reference, batches=_batches(batch), prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        device=device, dtype=dtype, compiled=compile, autotune=autotune,
    )  # fmt: skip
    print(
        json.dumps([row.to_dict() for row in rows], indent=1)
        if as_json
        else bench.speed_table(rows, compared=reference is not None)
    )


def _batches(text: str | None) -> list[int] | None:
    from requant.errors import InputError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--batch {text} is no list of whole numbers; give, for instance, 1,8,64.")
    return [int(part) for part in parts]
