"""`requant compare`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from requant.cli import options as opt
from requant.cli.common import importing, log_to_stderr, table
from requant.errors import WriteError


def compare(
    checkpoints: Annotated[list[str], typer.Argument(help="Checkpoints that requant wrote.")],
    output: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="The original model; all checkpoints are then scored again, on one text."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text to score, with --reference.")] = None,
    context: Annotated[int | None, typer.Option(min=8, help="Tokens of a window.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Score the first windows only.")] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare checkpoints by what their own files say. A table, and with --output a page."""
    from requant.checkpoint.new_folder import check_output

    with importing():
        from requant.report.compare import compare_checkpoints, kl_above_first, note, render_comparison

    log_to_stderr(verbose=False)
    page = None if output is None else check_output(output)
    entries = compare_checkpoints(
        checkpoints,
        reference=reference,
        text=text,
        context=context,
        windows=windows,
        device=device,
        dtype=dtype,
        quiet=quiet,
    )
    if page is not None:
        _write(page, render_comparison(entries))
    if as_json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
        return
    beside = zip(entries, kl_above_first(entries), strict=True)
    rows = [
        {**entry.cells(), "KL above the first": above and f"{above[0]:+.4f} ± {above[1]:.4f}"}
        for entry, above in beside
    ]
    print(table(rows))
    print(note(entries))
    if page is not None:
        print(f"page: {output}")


def _write(page: Path, text: str) -> None:
    """Whole or not at all: a part of it would be in the way of the next try. Raises WriteError."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        page.unlink(missing_ok=True)
        raise WriteError(
            f"{page} cannot be written ({error.strerror or error}); free some space, or choose another --output."
        ) from error
