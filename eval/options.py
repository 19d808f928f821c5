"""Options that several studies share, each with one meaning."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Option(help="Folder of the model.")]
Data = Annotated[Path, typer.Option(help="Folder with the protocol's texts.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
NumSamples = Annotated[int, typer.Option(help="Calibration windows.")]
SeqLen = Annotated[int, typer.Option(help="Tokens per window.")]
Windows = Annotated[int | None, typer.Option(help="Windows to score; all by default.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Labels = Annotated[
    list[str] | None,
    typer.Option(help="Label of a row to measure, repeatable; other rows of the file are kept."),
]
LabelPatterns = Annotated[
    list[str] | None,
    typer.Option(help="Shell pattern for labels of rows to measure, repeatable; all by default."),
]
Part = Annotated[int | None, typer.Option(help="Number of the part to write.")]
Join = Annotated[bool, typer.Option("--merge", help="Join the parts and stop.")]
OutFile = Annotated[Path, typer.Option("--out", help="File for the results.")]
Batch = Annotated[list[int] | None, typer.Option(help="Number of sequences at once, repeatable. [1 8 64]")]
Seconds = Annotated[float, typer.Option(help="Start no new row after this many seconds.")]
