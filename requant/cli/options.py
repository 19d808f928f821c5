"""Command-line options: the types of those that several commands share, and groups of options that belong together.

A command that builds a recipe takes `**options: Unpack[GROUP]`, where GROUP is a TypedDict below. Each field is an option
that is None unless given, under the name that it has in `requant/recipe/options.py`. To add an option, add a field here:
`quantize`, `sweep` and their --help then have it. `spelled_out` turns the fields into parameters, which is what typer
reads.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from requant.errors import InputError, did_you_mean
from requant.recipe.sizes import parse_bits, parse_size

RECIPE = "The recipe"  # panels of --help
CALIBRATION = "Calibration and evaluation"
RUN = "The run"
PRINTED = "What is printed"
PANELS = (RECIPE, CALIBRATION, RUN, PRINTED)
of_recipe = partial(typer.Option, rich_help_panel=RECIPE)
of_calibration = partial(typer.Option, rich_help_panel=CALIBRATION)
of_run = partial(typer.Option, rich_help_panel=RUN)
of_printing = partial(typer.Option, rich_help_panel=PRINTED)


def values(*known: str) -> Callable[[str], list[str]]:
    """Completion for an option with these values; where none fits, the shell offers files."""
    return lambda incomplete: [value for value in known if value.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Aliases, for completion."""
    from requant.models.aliases import ALIASES

    return values("demo", *ALIASES)(incomplete)


def methods(incomplete: str) -> list[str]:
    """Quantization methods, for completion."""
    from requant.quantizers.registry import METHODS

    return values(*METHODS)(incomplete)


def shipped_recipes(incomplete: str) -> list[str]:
    """Names of recipes, for completion."""
    from requant.recipe.shipped import available_recipes

    return values(*available_recipes())(incomplete)


DTYPES = ("auto", "float32", "bfloat16", "float16")
# what `requant export --to` takes: targets, then programs
EXPORTS = ("dense", "compressed-tensors", "gguf", "vllm", "transformers", "llama.cpp")


# Callbacks and parsers run before the imports of a command. Python users are refused in the same words, further down.


def known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise InputError(f"--dtype {name} is unknown; give {', '.join(DTYPES)}.")
    return name


def known_device(name: str) -> str:
    """Whether the device is here is for torch to say."""
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", name):
        raise InputError(f"--device {name} is unknown; give auto, cpu, cuda or cuda:NUMBER.")
    return name


def known_export(name: str) -> str:
    if name not in EXPORTS:
        raise InputError(
            f"--to {name} is unknown{did_you_mean(name, EXPORTS)}; there are: {', '.join(EXPORTS)}."
        )
    return name


def valid_bits(bits: str | None) -> str | None:
    if bits is not None:
        parse_bits(bits)
    return bits


def valid_code_bits(bits: str | None) -> str | None:
    if bits is not None:
        parse_bits(bits, option="--code-bits")
    return bits


def valid_size(size: str | None) -> str | None:
    if size is not None:
        parse_size(size)
    return size


def gpu_memory_bytes(size: str) -> int:
    return parse_size(size, "--gpu-memory")


Model = Annotated[
    str | None,
    of_recipe(
        help="Folder, hub name, alias (llama-3.2-1b), or demo. [the recipe's, or demo]", autocompletion=models
    ),
]
Bits = Annotated[
    str | None,
    of_recipe(
        help="Budget in bits per weight, 1 to 8, for everything stored for the matrices: 3, 2.25. Never exceeded.",
        callback=valid_bits,
    ),
]
CodeBits = Annotated[
    str | None,
    of_recipe(
        help="Instead of --bits: bits of every code, 2 to 8 (trellis from 1); scales, levels and residuals come on top.",
        callback=valid_code_bits,
    ),
]
RecipeName = Annotated[
    str | None,
    of_recipe(
        help="A recipe by name or YAML file; other options override it.", autocompletion=shipped_recipes
    ),
]
Method = Annotated[
    str | None,
    of_recipe(
        help="Quantization method; `requant methods` lists them. [trellis in mode best, else lut]",
        autocompletion=methods,
    ),
]
EvalText = Annotated[list[str] | None, of_calibration(help="Text to score. [a held-out part]")]
GroupSize = Annotated[
    int | None,
    of_recipe(help="Columns that share a scale, for gptq, awq, hqq and rtn; -1: whole rows. [128]"),
]
Symmetric = Annotated[
    bool | None,
    of_recipe(
        "--symmetric/--asymmetric",
        help="Whether grids of gptq, awq and rtn have no zero points. [asymmetric]",
    ),
]
Code = Annotated[
    str | None,
    of_recipe(
        help="For trellis: mul1, pair (faster on a GPU, worse above 2 bits) or 3inst. [pair up to 2 bits, else mul1]",
        autocompletion=values("mul1", "pair", "3inst"),
    ),
]
Skip = Annotated[
    list[str] | None,
    of_recipe(help="Shell pattern of matrices not to quantize; repeatable."),
]
Modules = Annotated[
    list[str] | None,
    of_recipe(
        "--module",
        help="Different settings for some matrices: a shell pattern and options of the method, such as "
        "'*.down_proj:bits=4,group_size=64'; repeatable. Bits set here are fixed; a budget distributes the rest.",
    ),
]
Output = Annotated[
    Path | None, of_run(help="Folder to write. [./MODEL-METHOD-BITSbit, of codes BITSbit-codes]")
]
Device = Annotated[
    str,
    of_run(
        help="cpu, cuda, or auto: the GPU if there is one.",
        autocompletion=values("auto", "cpu", "cuda"),
        callback=known_device,
    ),
]
GpuMemory = Annotated[
    int | None,
    of_run(
        "--gpu-memory",
        metavar="TEXT",
        parser=gpu_memory_bytes,
        help="Most memory that the run may take of each GPU: 24GB. A dry run plans for a GPU of that size. [all]",
    ),
]
Dtype = Annotated[
    str,
    of_run(
        help="float32, bfloat16, float16, or auto: float32 on the CPU.",
        autocompletion=values(*DTYPES),
        callback=known_dtype,
    ),
]
Resume = Annotated[
    bool,
    of_run(
        "--resume",
        help="Continue where the run stopped; `--resume OUTPUT` alone takes all arguments from that run.",
    ),
]
SaveEvery = Annotated[
    float,
    of_run(
        min=0.0,
        help="Minutes between saves of the training state, from which --resume continues; less often if saving takes long.",
    ),
]
AsJson = Annotated[bool, of_printing("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, of_printing("--quiet", "-q", help="Hide progress.")]
LogFile = Annotated[
    Path | None,
    of_printing(
        help="Append stages, a progress line per minute and the quantizers' log messages to this file."
    ),
]
Verbose = Annotated[bool, of_printing("--verbose", "-v", help="Show the quantizers' log messages.")]


class CalibrationOptions(TypedDict, total=False):
    """Options of every command that calibrates."""

    calibration: Annotated[
        list[str] | None,
        of_calibration(help="Text files, a datasets name, demo, or self."),
    ]
    num_samples: Annotated[
        int | None,
        of_calibration(help="Calibration windows. [128; in mode best on a GPU 256; demo: 16]"),
    ]
    seq_len: Annotated[
        int | None,
        of_calibration(
            help="Tokens of a window, of calibration and of scoring. [2048, or all positions of a shorter model; demo: 512]"
        ),
    ]
    all_experts: Annotated[
        bool | None,
        of_calibration(
            "--all-experts",
            help="Every expert of a mixture sees every calibration token, not only those routed to it.",
        ),
    ]
    seed: Annotated[
        int | None,
        of_calibration(help="Seed; above 0 it shifts the calibration windows."),
    ]
    deterministic: Annotated[
        bool | None,
        of_calibration(
            "--deterministic",
            help="The same bytes from every run on one GPU, which takes longer; on a CPU they always are.",
        ),
    ]


class QuantizeOptions(CalibrationOptions, total=False):
    """Options of commands that quantize a model and measure it."""

    method: Method
    mode: Annotated[
        str | None,
        of_recipe(
            help="best: rounds of quantizing and fine-tuning; paper: ReQuant as published; dense: codes only. [best]",
            autocompletion=values("best", "paper", "dense"),
        ),
    ]
    group_size: GroupSize
    symmetric: Symmetric
    code: Code
    head_bits: Annotated[
        float | None,
        of_recipe(
            help="Bits of embedding, head and per-layer embeddings, 3 to 8 or 16; with trellis codes 2 to 8 in steps of "
            "0.25. [the fewest that add at most 1 % to the loss; with --size the best split; with --code-bits 16]"
        ),
    ]
    sensitivity: Annotated[
        str | None,
        of_recipe(
            help="Score that picks the sparse part of mode paper: pqi, hessian, gradient or marginal. [pqi]",
            autocompletion=values("pqi", "hessian", "gradient", "marginal"),
        ),
    ]
    finetune_steps: Annotated[
        int | None,
        of_recipe(
            help="Training steps of each fine-tuning phase, of which mode best has six; finished codes stay fixed. "
            "[in mode best on a GPU 1000, from 240 M parameters on fewer, at least 200; else 0]"
        ),
    ]
    own_windows: Annotated[
        int | None,
        of_recipe(
            help="Windows of text that the original model writes itself, each starting with 32 tokens of the text, to train "
            "on as well. [in mode best on a GPU as many as keep training from seeing a window more than 12 times, where "
            "decoding steps are CUDA graphs; else 0]"
        ),
    ]
    rotations: Annotated[
        str | None,
        of_recipe(
            help="For trellis codes: per-matrix, or folded into the model where its architecture allows it, so that only "
            "the input of down_proj is rotated at run time. [per-matrix]",
            autocompletion=values("per-matrix", "folded"),
        ),
    ]
    skip: Skip
    modules: Modules
    eval_text: EvalText


def spelled_out(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with a signature that names every option of the group in its `**options: Unpack[GROUP]`, if it has one."""
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    groups = [get_args(each.annotation)[0] for each in signature.parameters.values() if each not in own]
    grouped = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for group in groups
        for name, annotation in get_type_hints(group, include_extras=True).items()
    }
    command.__signature__ = signature.replace(parameters=[*own, *grouped.values()])  # type: ignore[attr-defined]
    return command


class PanelledCommand(TyperCommand):
    """A command whose --help lists the options by panel: those of several commands in the order of PANELS."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer's UsageError, whose module differs by version
            if "unexpected extra argument" in getattr(error, "message", "") and any(
                "--model" in parameter.opts for parameter in self.params
            ):
                error.message += "; the model is given as --model MODEL."  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            if parameter.param_type_name == "argument":
                panel = "Arguments"
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(panel, []).append(record)
        shared = iter([panel for panel in PANELS if panel in panels])
        for panel in panels:
            title = next(shared) if panel in PANELS else panel
            with formatter.section(title):
                formatter.write_dl(panels[title])
