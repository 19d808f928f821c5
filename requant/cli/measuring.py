"""`requant eval` and `requant inspect`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from requant.cli.common import AsJson, Device, Dtype, Quiet, table


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Models or checkpoints.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Text to score. [demo-eval for demo, else WikiText-2 test]")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a window. [2048, or the model's positions]")
    ] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Score the first windows only.")] = None,
    against: Annotated[str | None, typer.Option(help="The original, for KL and agreement.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity, KL to the original and top-1 agreement, several models in one table."""
    from requant.comparison import evaluate_all

    rows = evaluate_all(
        models,
        text=text,
        context=context,
        windows=windows,
        against=against,
        device=device,
        dtype=dtype,
        quiet=quiet,
    )
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    print(rows[0].quality.protocol)
    print(table([row.cells() for row in rows]))


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    as_json: AsJson = False,
) -> None:
    """What a checkpoint stores, matrix by matrix and byte by byte; verifies its checksums."""
    from requant.comparison import inspection

    found = inspection(checkpoint)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found.text())
