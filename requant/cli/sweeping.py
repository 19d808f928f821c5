"""`requant sweep`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from requant.cli.common import (
    RECIPE,
    RUN,
    AllExperts,
    AsJson,
    Calibration,
    Device,
    Dtype,
    EvalText,
    FinetuneSteps,
    GroupSize,
    HeadBits,
    LogFile,
    Method,
    Mode,
    Model,
    Modules,
    NumSamples,
    Quiet,
    RecipeName,
    Rotations,
    SaveEvery,
    Seed,
    SeqLen,
    Skip,
    Symmetric,
    Verbose,
    log_to_file,
    log_to_stderr,
    recipe_options,
    sigterm_interrupts,
    table,
)


def sweep(
    bits: Annotated[str, typer.Option(help="Bits to try, such as 2,2.5,3,4.", rich_help_panel=RECIPE)],
    model: Model = None,
    recipe: RecipeName = None,
    method: Method = None,
    mode: Mode = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = None,
    head_bits: HeadBits = None,
    finetune_steps: FinetuneSteps = None,
    rotations: Rotations = None,
    skip: Skip = None,
    modules: Modules = None,
    calibration: Calibration = None,
    eval_text: EvalText = None,
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    all_experts: AllExperts = None,
    seed: Seed = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write. [./MODEL-METHOD-sweep]", rich_help_panel=RUN)
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep the checkpoints that are finished; `--resume OUTPUT` alone takes all arguments from that run.",
            rich_help_panel=RUN,
        ),
    ] = False,
    save_every: SaveEvery = 10.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Quantize a model at several bits and compare: the measured curve of KL against size."""
    options = recipe_options(locals())
    from requant import progress
    from requant.report.sweep import sweep

    log_to_stderr(verbose)
    log_to_file(log_file)
    budgets = [each.strip() for each in options.pop("bits").split(",") if each.strip()]
    silent = quiet and log_file is None
    with sigterm_interrupts(), progress.display(shown=not quiet):
        found = sweep(
            model,
            budgets,
            output,
            recipe,
            device=device,
            dtype=dtype,
            resume=resume,
            save_every=60 * save_every,
            arguments=sys.argv[1:],
            quiet=silent,
            **options,
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(table([entry.cells() for entry in found.entries]))
    print(found.answer)
    print(f"page: {found.page}")
