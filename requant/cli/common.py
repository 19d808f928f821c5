"""What the commands share: options of one meaning, the table, the log."""

import logging
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from requant.errors import OutputError

RECIPE = "The recipe"  # panels of --help
CALIBRATION = "Calibration and evaluation"
RUN = "The run"
PRINTED = "What is printed"


def values(*known: str) -> Callable[[str], list[str]]:
    """What completion offers for an option of these values; where none fits, the shell offers files."""
    return lambda incomplete: [value for value in known if value.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Aliases, for completion."""
    from requant.models.aliases import ALIASES

    return values("demo", *ALIASES)(incomplete)


def shipped_recipes(incomplete: str) -> list[str]:
    """Names of recipes, for completion."""
    from requant.recipe.shipped import available_recipes

    return values(*available_recipes())(incomplete)


Model = Annotated[
    str | None,
    typer.Option(
        help="Folder, hub name, alias (llama-3.2-1b), or demo. [the recipe's, or demo]",
        autocompletion=models,
        rich_help_panel=RECIPE,
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        help="A recipe by name or YAML file; other options override it.",
        autocompletion=shipped_recipes,
        rich_help_panel=RECIPE,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="Quantization method; `requant methods` lists them.",
        autocompletion=values("trellis", "lut", "kmeans", "gptq", "awq", "hqq", "rtn"),
        rich_help_panel=RECIPE,
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        help="best: rounds of quantizing and finetuning; paper: ReQuant as published; dense: codes only. "
        "[best]",
        autocompletion=values("best", "paper", "dense"),
        rich_help_panel=RECIPE,
    ),
]
HeadBits = Annotated[
    int | None,
    typer.Option(
        help="Bits of embedding and head, 3 to 8 or 16. [the fewest that add 1 % to the loss; with --size the best "
        "split; with --code-bits 16]",
        rich_help_panel=RECIPE,
    ),
]
Score = Annotated[
    str | None,
    typer.Option(
        help="pqi, hessian, gradient or marginal.",
        autocompletion=values("pqi", "hessian", "gradient", "marginal"),
        rich_help_panel=RECIPE,
    ),
]
FinetuneSteps = Annotated[
    int | None,
    typer.Option(
        help="Training steps of each finetuning phase; codes stay fixed. [450 in mode best on a GPU, else 0]",
        rich_help_panel=RECIPE,
    ),
]
Rotations = Annotated[
    str | None,
    typer.Option(
        help="Of trellis codes: per-matrix, or folded into the model where its architecture allows it, which leaves the "
        "input of down_proj to rotate at run time. [per-matrix]",
        autocompletion=values("per-matrix", "folded"),
        rich_help_panel=RECIPE,
    ),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(help="Text files, a datasets name, demo, or self.", rich_help_panel=CALIBRATION),
]
EvalText = Annotated[
    list[str] | None, typer.Option(help="Text to score. [a held-out part]", rich_help_panel=CALIBRATION)
]
NumSamples = Annotated[
    int | None,
    typer.Option(help="Calibration windows. [128; on a GPU 256; demo: 16]", rich_help_panel=CALIBRATION),
]
SeqLen = Annotated[
    int | None,
    typer.Option(help="Tokens of a calibration window. [2048; demo: 512]", rich_help_panel=CALIBRATION),
]
AllExperts = Annotated[
    bool | None,
    typer.Option(
        "--all-experts",
        help="Every expert of a mixture sees every calibration token, not only those routed to it.",
        rich_help_panel=CALIBRATION,
    ),
]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="A program that has to read the export: vllm, transformers or llama.cpp. Picks mode, method and grid, and "
        "refuses what it cannot read before the run.",
        autocompletion=values("vllm", "transformers", "llama.cpp"),
        rich_help_panel=RECIPE,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        help="Columns that share a scale, of gptq, awq, hqq and rtn; -1: whole rows. [128]",
        rich_help_panel=RECIPE,
    ),
]
Symmetric = Annotated[
    bool | None,
    typer.Option(
        "--symmetric/--asymmetric",
        help="Whether grids of gptq, awq and rtn go without zero points. [asymmetric]",
        rich_help_panel=RECIPE,
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(help="Shell pattern of matrices not to quantize; repeatable.", rich_help_panel=RECIPE),
]
Modules = Annotated[
    list[str] | None,
    typer.Option(
        "--module",
        help="What is different for some matrices: a shell pattern and options of the method, such as "
        "'*.down_proj:bits=4,group_size=64'; repeatable. Bits given here are fixed, a budget gives out the rest.",
        rich_help_panel=RECIPE,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed; above 0 it shifts the calibration windows.", rich_help_panel=CALIBRATION),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder to write. [./MODEL-METHOD-BITSbit]", rich_help_panel=RUN)
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, or auto: the GPU where there is one.",
        autocompletion=values("auto", "cpu", "cuda"),
        rich_help_panel=RUN,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: float32 on the CPU.",
        autocompletion=values("auto", "float32", "bfloat16", "float16"),
        rich_help_panel=RUN,
    ),
]
SaveEvery = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Minutes between two saved states of training, where --resume goes on; less often if saving takes long.",
        rich_help_panel=RUN,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=PRINTED)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.", rich_help_panel=PRINTED)]
LogFile = Annotated[
    Path | None,
    typer.Option(
        help="File to which stages, a line a minute and what the quantizers report are appended.",
        rich_help_panel=PRINTED,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what the quantizers report.", rich_help_panel=PRINTED)
]


class PanelledCommand(TyperCommand):
    """A command whose --help lists the options by panel; those of one command are listed as they come."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(panel if isinstance(parameter, TyperOption) else "Arguments", []).append(
                    record
                )
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def recipe_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of a command that the recipe is made of."""
    from requant.recipe.options import Options

    return {name: given[name] for name in Options.__annotations__ if name in given}


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While the context lasts, SIGTERM (a preempted machine, a scheduler) ends a run as Ctrl-C does: cleanly, to resume."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(rows: Any) -> str:
    from requant.display import format_table

    return format_table(rows)


def next_commands(folder: Path, target: str | None = None) -> str:
    """Two commands that a user may want next."""
    checkpoint = shlex.quote(str(folder))
    first = f"requant inspect {checkpoint}"
    if target is not None:
        first = f"requant export {checkpoint} --to {target} --output {shlex.quote(f'{folder}-{target}')}"
    return f"{first}\n      requant generate {checkpoint} --prompt 'The history of'"


def log_to_stderr(verbose: bool) -> None:
    logging.basicConfig(format="requant: %(message)s", level=logging.INFO if verbose else logging.WARNING)
    for noisy in ("transformers", "datasets", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def log_to_file(file: Path | None) -> None:
    """Append what the package reports to a file, with the time; what is printed stays the same. Raises OutputError."""
    if file is None:
        return
    try:
        handler = logging.FileHandler(file.expanduser(), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"--log-file {file} cannot be written ({error.strerror}); choose another."
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    root, package = logging.getLogger(), logging.getLogger("requant")
    for printing in root.handlers:
        printing.setLevel(max(printing.level, root.level))
    package.setLevel(logging.INFO)
    package.addHandler(handler)


def log_failure(message: str) -> None:
    """Add to the log file, if there is one, why the run ended; whoever prints it calls this too."""
    record = logging.makeLogRecord({"name": "requant", "levelno": logging.ERROR, "msg": message})
    for handler in logging.getLogger("requant").handlers:
        handler.handle(record)


def say_what_is_loaded(quiet: bool = False) -> None:
    """Log what is loaded, with its checksum, to standard error."""
    log_to_stderr(verbose=False)
    logging.getLogger("requant.inference").setLevel(logging.WARNING if quiet else logging.INFO)
