"""Options that several studies take, each with one meaning."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Option(help="Folder of the model.")]
Data = Annotated[Path, typer.Option(help="Folder with the texts of the protocol.")]
Out = Annotated[Path, typer.Option(help="Folder of the results.")]
NumSamples = Annotated[int, typer.Option(help="Calibration windows.")]
SeqLen = Annotated[int, typer.Option(help="Tokens of a window.")]
Windows = Annotated[int | None, typer.Option(help="Windows to score; all if not given.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Labels = Annotated[
    list[str] | None,
    typer.Option(help="Label of a row to measure, repeatable; the file's other rows stay."),
]
LabelPatterns = Annotated[
    list[str] | None,
    typer.Option(help="Shell pattern of labels of rows to measure, repeatable; all if not given."),
]
Part = Annotated[int | None, typer.Option(help="Number of the part to write.")]
Join = Annotated[bool, typer.Option("--merge", help="Join the parts and stop.")]
OutFile = Annotated[Path, typer.Option("--out", help="File of the results.")]
Batch = Annotated[list[int] | None, typer.Option(help="Sequences at once, repeatable. [1 8 64]")]
Seconds = Annotated[float, typer.Option(help="Start no new row after this long.")]
