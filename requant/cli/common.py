"""What the commands share: options of one meaning, the table, the log."""

import logging
from typing import Annotated, Any

import typer

Calibration = Annotated[list[str] | None, typer.Option(help="Text files, a datasets name, demo, or self.")]
Skip = Annotated[
    list[str] | None, typer.Option(help="Shell pattern of matrices not to quantize; repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="Seed; above 0 it shifts the calibration windows.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: float32 on the CPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bars.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the quantizers report.")]


def table(rows: Any) -> str:
    from requant.display import format_table

    return format_table(rows)


def log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(format="requant: %(message)s", level=logging.INFO if verbose else logging.WARNING)
    for noisy in ("transformers", "datasets", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def say_what_is_loaded(quiet: bool = False) -> None:
    """Log what is loaded, with its checksum, to standard error."""
    log_to_stderr(verbose=False)
    logging.getLogger("requant.inference").setLevel(logging.WARNING if quiet else logging.INFO)
