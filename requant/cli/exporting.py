"""`requant export`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from requant.cli import options as opt
from requant.cli.common import importing, table


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint that requant wrote.")],
    to: Annotated[
        str,
        typer.Option(
            help="dense, compressed-tensors, gguf, or a program: vllm, transformers, llama.cpp.",
            autocompletion=opt.values(*opt.EXPORTS),
            callback=opt.known_export,
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16, float16, or auto: the model's own.", callback=opt.known_dtype),
    ] = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Write a checkpoint for programs that know nothing of requant."""
    from requant.checkpoint.new_folder import check_output

    check_output(output)  # before the imports that take seconds
    with importing():
        from requant.exporters.export import export

    written = export(checkpoint, to, output, dtype=dtype)
    print(json.dumps(written.to_dict(), indent=2) if as_json else table(written.rows()))
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
